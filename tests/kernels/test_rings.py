"""Goal: rings and tails get exactly the rows they should, byte by byte, and no other byte changes. Method:
random bytes in larger memory; spans and boundaries of every kind against a loop over positions."""

from typing import NamedTuple

import pytest
import torch

from tests.kernels.devices import every_set, skip_unless_computed
from tiercel.kernels.cuda import rings
from tiercel.kernels.entries import Entries, Flat

FORGOTTEN = 2**31 - 1
RINGS, PLACES = 4, 5


class Span(NamedTuple):
    start: int
    end: int
    ring: int
    remembered: bool = True


PADDING = Span(-1, 0, 0)
SPANS = [Span(0, 3, 1), PADDING, Span(30, 52, 0), PADDING, Span(9, 10, 3), Span(17, 23, 2, remembered=False)]
"""Shorter and longer than a ring; one token; drafts; the position of padding is -1."""


def noise(*shape, device, seed=0):
    random = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random).to(device)


def encoded(rows, sizes, device, *, per_row=1, seed=0):
    memory = noise(rows, per_row * sum(sizes) + 12, device=device, seed=seed)
    return Entries(memory[:, 4:-8], per_row, sizes, "fp8_groups", 0, 0, 0)


def plain(rows, channels, device, seed=0):
    memory = noise(rows, 4 * (2 * channels + 4), device=device, seed=seed).view(torch.float32)
    return memory[:, 4:]


def memory_of(rows):
    """All bytes around the rows too."""
    rows = rows.rows if isinstance(rows, Entries) else rows
    return rows._base.view(torch.uint8) if rows._base is not None else rows.view(torch.uint8)


def row_bytes(rows, number):
    if isinstance(rows, Entries):
        return rows.rows[number, : sum(rows.sizes)]
    return rows[number].view(torch.uint8)


def flat_of(spans, device):
    """(flat, end)"""
    numbers = [
        (p, span.start, first, span.ring, span.end if span.remembered else FORGOTTEN)
        for first, span in zip(firsts_of(spans), spans, strict=True)
        for p in range(span.start, span.end)
    ]
    columns = torch.tensor(numbers, dtype=torch.int32).T.contiguous().to(device)
    return Flat(*columns[:4], pages=columns[:1]), columns[4]


def firsts_of(spans):
    lengths = [span.end - span.start for span in spans]
    return [sum(lengths[:i]) for i in range(len(lengths))]


def make_rows(kind, ring_rows, spans, device):
    """(kept, new)"""
    counts = RINGS * ring_rows, sum(span.end - span.start for span in spans)
    if kind == "encoded":
        return tuple(encoded(count, (20, 8), device, seed=i) for i, count in enumerate(counts))
    return tuple(plain(count, 16, device, seed=i) for i, count in enumerate(counts))


@every_set
def test_a_ring_keeps_the_last_rows_of_its_span_and_nothing_else(kernels, device):
    for kind, ring_rows in (("encoded", 7), ("plain", 8)):
        kept, new = make_rows(kind, ring_rows, SPANS, device)
        flat, end = flat_of(SPANS, device)
        expected, old = memory_of(kept).clone(), memory_of(new).clone()
        kernels.keep(kept, new, flat, end, ring_rows)
        done = memory_of(kept).clone()
        memory_of(kept).copy_(expected)
        for first, span in zip(firsts_of(SPANS), SPANS, strict=True):
            for p in range(max(span.start, span.end - ring_rows, 0), span.end):
                if span.remembered:
                    row = row_bytes(kept, span.ring * ring_rows + p % ring_rows)
                    row.copy_(row_bytes(new, first + p - span.start))
        assert torch.equal(done, memory_of(kept)) and not torch.equal(done, expected)
        assert torch.equal(memory_of(new), old)


MOVES = [(2, 48, 2), (0, 2, 0), (4, 10, 4), (3, 32, 2), (-1, 9, 4), (-1, 0, 0)]
"""(place, boundary, span). The second begins before the text, the fourth before its span."""


def moves_of(spans, device):
    firsts = firsts_of(spans)
    rows = [(place, end, spans[i].ring, spans[i].start, firsts[i]) for place, end, i in MOVES]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def pieces_of(rows, row, tails, place, number):
    """(bytes of a row, bytes of a tail) that belong together."""
    if isinstance(rows, Entries):
        at = 0
        for i, size in enumerate(tails.sizes):
            tail = tails.rows[place, at + number * size :][:size]
            yield row_bytes(rows, row)[sum(tails.sizes[:i]) :][:size], tail
            at += tails.per_row * size
    else:
        half, width = tails.sizes[0] // 2, 2 * rows.shape[1]
        tail = tails.rows[place, number * tails.sizes[0] :][: tails.sizes[0]]
        yield row_bytes(rows, row)[:half], tail[:half]
        yield row_bytes(rows, row)[width : width + half], tail[half:]


def snapshots(device):
    """(rows of a ring, kept, new, tails): a window that has a row less than a tail; a compressor's rows, of
    which a tail has half of the channels; a window longer than a page."""
    sizes = 20, 8
    yield 7, *make_rows("encoded", 7, SPANS, device), encoded(PLACES, sizes, device, per_row=8, seed=9)
    tails = encoded(PLACES, (64,), device, per_row=4, seed=9)._replace(encoding="fp32")
    yield 8, *make_rows("plain", 8, SPANS, device), tails
    yield 11, *make_rows("encoded", 11, SPANS, device), encoded(PLACES, sizes, device, per_row=4, seed=9)


@pytest.fixture(params=[1, 2, 8])
def programs(request, monkeypatch):
    """How many tails are taken at once: with fewer programs than tails, a program takes several."""
    monkeypatch.setattr(rings, "TAILS_AT_ONCE", request.param)


@every_set
@pytest.mark.usefixtures("programs")
def test_a_tail_has_the_rows_before_its_boundary(kernels, device):
    for ring_rows, kept, new, tails in snapshots(device):
        before = memory_of(tails).clone()
        kernels.write_tails((kept, new), tails, moves_of(SPANS, device), ring_rows)
        done = memory_of(tails).clone()
        memory_of(tails).copy_(before)
        for place, boundary, i in MOVES:
            span, first = SPANS[i], firsts_of(SPANS)[i]
            for number in range(tails.per_row if place >= 0 else 0):
                p = boundary - tails.per_row + number
                old = p < span.start
                rows = kept if old else new
                row = span.ring * ring_rows + p % ring_rows if old else first + p - span.start
                for mine, tail in pieces_of(rows, 0 if p < 0 else row, tails, place, number):
                    tail.copy_(torch.zeros_like(mine) if p < 0 else mine)
        assert torch.equal(done, memory_of(tails)) and not torch.equal(done, before)


@every_set
def test_a_ring_goes_on_from_a_tail(kernels, device):
    for ring_rows, kept, _, tails in snapshots(device):
        before, source = memory_of(kept).clone(), memory_of(tails).clone()
        moves = torch.tensor([(2, 48, 3), (0, 16, 1), (-1, 8, 0)], dtype=torch.int32, device=device)
        kernels.restore(kept, tails, moves, ring_rows)
        done = memory_of(kept).clone()
        memory_of(kept).copy_(before)
        for place, boundary, ring in ((2, 48, 3), (0, 16, 1)):
            for p in range(boundary - min(ring_rows, tails.per_row), boundary):
                number = p - boundary + tails.per_row
                row = ring * ring_rows + p % ring_rows
                for mine, tail in pieces_of(kept, row, tails, place, number):
                    mine.copy_(tail)
        assert torch.equal(done, memory_of(kept)) and not torch.equal(done, before)
        assert torch.equal(memory_of(tails), source)


@every_set
def test_no_tails_are_no_work(kernels, device):
    ring_rows, kept, new, tails = next(iter(snapshots(device)))
    before = memory_of(kept).clone(), memory_of(tails).clone()
    kernels.write_tails((kept, new), tails, moves_of(SPANS, device)[:0], ring_rows)
    kernels.restore(kept, tails, moves_of(SPANS, device)[:0], ring_rows)
    assert torch.equal(memory_of(kept), before[0]) and torch.equal(memory_of(tails), before[1])


@every_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streams_lie_in_rings_and_tails_as_fp32(kernels, device, dtype):
    """A row for each token; a tail has the last one before its boundary, which is new."""
    skip_unless_computed(kernels, dtype)
    ring_rows, numbers = 3, 20
    (flat, end), firsts = flat_of(SPANS, device), firsts_of(SPANS)
    random = torch.Generator().manual_seed(0)
    kept = torch.randn(RINGS * ring_rows, numbers, generator=random).to(dtype).float().to(device)
    new = torch.randn(len(end), numbers, generator=random).to(device, dtype)
    tails = encoded(PLACES, (4 * numbers,), device, seed=3)._replace(encoding="fp32")
    before, expected = (
        kernels.row_before(kept, new, flat, ring_rows),
        torch.zeros(len(end), numbers, device=device),
    )
    after, snapshots = kept.clone(), memory_of(tails).clone()
    for first, span in zip(firsts, SPANS, strict=True):
        for p in range(max(span.start, 0), span.end):
            row = first + p - span.start
            if p > 0:
                old = kept[span.ring * ring_rows + (p - 1) % ring_rows]
                expected[row] = old if p == span.start else new[row - 1].float()
            if span.remembered and p >= span.end - ring_rows:
                after[span.ring * ring_rows + p % ring_rows] = new[row].float()
    assert before.dtype == dtype and torch.equal(before.float(), expected)
    kernels.keep(kept, new, flat, end, ring_rows)
    assert torch.equal(kept, after)
    kernels.write_tails((new, new), tails, moves_of(SPANS, device), ring_rows)
    done = memory_of(tails).clone()
    memory_of(tails).copy_(snapshots)
    for place, boundary, i in MOVES:
        if place >= 0:
            row = new[firsts[i] + boundary - 1 - SPANS[i].start].float()
            tails.rows[place, : 4 * numbers] = row.view(torch.uint8)
    assert torch.equal(done, memory_of(tails)) and not torch.equal(done, snapshots)
    kernels.restore(kept, tails, torch.tensor([[2, 48, 3]], dtype=torch.int32, device=device), ring_rows)
    own = kept[3 * ring_rows + 47 % ring_rows]
    assert torch.equal(own.view(torch.uint8), tails.rows[2, : 4 * numbers])
