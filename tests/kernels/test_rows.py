"""Goal: rows on CUDA are normed, rotated, compressed and encoded as by the plain twins, byte by byte where
the twins have bytes, and a token's bits do not depend on its company. Method: random rows of awkward sizes in
larger memory; texts cut into spans in several ways, on permuted pages, with padding between them."""

from typing import NamedTuple

import pytest
import torch

from tests.kernels import texts
from tests.kernels.devices import every_device, every_exact_set, every_set, rand, skip_unless_computed
from tests.kernels.texts import group_of, sizes_of
from tiercel.kernels import reference
from tiercel.kernels.cuda.rows import norm, norm_rotate
from tiercel.kernels.entries import Entries, Flat
from tiercel.kernels.reference.rows import compress

TYPES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
every_type = pytest.mark.parametrize("dtype", TYPES, ids=str)
EPS = 1e-6
UNTOUCHED = 0xA5


def encode(x, encoding, rope, group=0):
    """[n, bytes]: the parts of each entry together."""
    return torch.cat(texts.encode(x, encoding, rope, group), dim=1)


def make_entries(rows, per_row, encoding, dim, rope, device, group=0):
    """Entries in larger memory, which is returned too."""
    sizes, group = sizes_of(encoding, dim, rope, group), group or group_of(dim, rope)
    memory = torch.full((rows, per_row * sum(sizes) + 28), UNTOUCHED, dtype=torch.uint8, device=device)
    return Entries(memory[:, 12:-16], per_row, sizes, encoding, dim, rope, group), memory


def bytes_of(entries, numbers):
    """[n, bytes]: the parts of each of these entries together."""
    found = []
    for number in numbers:
        row, at, parts = entries.rows[number // entries.per_row], 0, []
        for size in entries.sizes:
            parts.append(row[at + number % entries.per_row * size :][:size])
            at += entries.per_row * size
        found.append(torch.cat(parts))
    return torch.stack(found)


def turn_of(tokens, pairs, device):
    return rand(tokens, pairs).to(device), rand(tokens, pairs, seed=1).to(device)


# Norms and rotations


def apart(*shape, dtype, device):
    """Rows inside wider ones."""
    return rand(*shape[:-1], shape[-1] + 16).to(device, dtype)[..., 8:-8]


@every_device
@every_type
def test_rows_are_normed_and_rotated_as_by_the_plain_twins(device, dtype):
    for dim in (1024, 4096) if device == "cuda" else (96, 40):
        x, weight = apart(7, dim, dtype=dtype, device=device), rand(dim).to(device)
        mine, theirs = norm(x, weight, EPS), reference.norm(x.float(), weight, EPS)
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.float(), theirs, atol=TYPES[dtype], rtol=TYPES[dtype])
        cut = norm(x.float(), weight, EPS, dtype=torch.bfloat16)
        assert torch.equal(cut, norm(x.float(), weight, EPS).bfloat16())
    for heads, dim, pairs in (
        [(64, 512, 32), (64, 128, 32)] if device == "cuda" else [(5, 128, 8), (3, 24, 12)]
    ):
        x, weight = apart(7, heads, dim, dtype=dtype, device=device), rand(dim).to(device)
        turn = turn_of(7, pairs, device)
        for how in ({}, {"eps": EPS}, {"eps": EPS, "weight": weight}, {"back": True}):
            mine, theirs = norm_rotate(x, turn, **how), reference.norm_rotate(x.float(), turn, **how)
            assert mine.dtype == dtype
            torch.testing.assert_close(mine.float(), theirs, atol=TYPES[dtype], rtol=TYPES[dtype])


@every_device
@every_type
def test_a_rotated_row_does_not_depend_on_its_company(device, dtype):
    tokens, heads, dim, pairs = (300, 64, 512, 32) if device == "cuda" else (40, 3, 128, 8)
    x, weight = apart(tokens, heads, dim, dtype=dtype, device=device), rand(dim).to(device)
    turn = turn_of(tokens, pairs, device)
    whole, plain = norm_rotate(x, turn, eps=EPS, weight=weight), norm(x[:, 0], weight, EPS)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
    for take in ([0], [7], [tokens - 1, 3, 4], order.tolist()):
        parts = norm_rotate(x[take], (turn[0][take], turn[1][take]), eps=EPS, weight=weight)
        assert torch.equal(parts, whole[take]) and torch.equal(norm(x[take, 0], weight, EPS), plain[take])
    assert torch.equal(norm_rotate(x[3:5], (turn[0][3:5], turn[1][3:5]), eps=EPS, weight=weight), whole[3:5])


@every_set
@every_type
@pytest.mark.parametrize("encoding", ["fp8_groups", "bf16", "fp32", "fp8_row"])
def test_window_rows_have_the_bytes_of_the_encoding(kernels, device, dtype, encoding):
    """bf16 rows are whole numbers: their squares add up exactly in any order."""
    skip_unless_computed(kernels, dtype)
    for dim, pairs in [(512, 32)] if device == "cuda" else [(128, 8), (24, 4)]:
        kv = rand(9, dim).to(device) * torch.logspace(-5, 3, dim, device=device)
        kv[3], kv[4, : dim // 2] = 0, -0.0
        if dtype == torch.bfloat16:
            kv = kv.clamp(-60, 60).round()
        turn, weight = turn_of(9, pairs, device), rand(dim).to(device)
        new, memory = make_entries(12, 1, encoding, dim, 2 * pairs, device)
        kernels.store_window(kv.to(dtype), turn, EPS, weight, new)
        expected = kernels.norm_rotate(kv[:, None, :], turn, eps=EPS, weight=weight)[:, 0, :]
        assert torch.equal(bytes_of(new, range(9)), encode(expected, encoding, 2 * pairs))
        new.rows[:9, : sum(new.sizes)] = UNTOUCHED
        assert (memory == UNTOUCHED).all()


@every_set
@pytest.mark.parametrize("group", [8, 32])
def test_groups_are_as_large_as_the_entries_say(kernels, device, group):
    kv, turn = rand(3, 128).to(device) * torch.logspace(-5, 3, 128, device=device), turn_of(3, 16, device)
    new, _ = make_entries(3, 1, "fp8_groups", 128, 32, device, group)
    kernels.store_window(kv, turn, EPS, torch.ones(128, device=device), new)
    expected = kernels.norm_rotate(kv[:, None, :], turn, eps=EPS, weight=torch.ones(128, device=device))[
        :, 0, :
    ]
    assert torch.equal(bytes_of(new, range(3)), encode(expected, "fp8_groups", 32, group))


@every_set
def test_fp8_rounds_to_the_nearest_and_to_the_even_between_two(kernels, device):
    """All numbers between two of e4m3, in groups of 16 beside 448. The norm divides by 2^20 exactly."""
    steps = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = torch.cat([(steps[1:] + steps[:-1]) / 2, torch.zeros(210 - 126)]).view(14, 15)
    groups = torch.cat([torch.full((14, 1), 448.0), between], dim=1).view(2, 112)
    kv = torch.cat([groups, -groups, groups * 1.001, groups * 0.999])
    kv = torch.cat([kv, torch.zeros(8, 16)], dim=1).to(device)
    new, _ = make_entries(8, 1, "fp8_groups", 128, 16, device)
    turn = torch.ones(8, 8, device=device), torch.zeros(8, 8, device=device)
    kernels.store_window(kv, turn, 2.0**40, torch.ones(128, device=device), new)
    assert torch.equal(bytes_of(new, range(8)), encode(kv * 2.0**-20, "fp8_groups", 16))


# Compressed entries


class Kind(NamedTuple):
    """A compressor: two ratios wide if `overlap`."""

    ratio: int
    overlap: bool
    dim: int
    pairs: int
    per_row: int


SMALL = [Kind(4, True, 32, 4, 3), Kind(32, False, 24, 4, 2), Kind(16, True, 16, 4, 1)]
"""The window of the last is two tiles of rows, and the first tile of its first entry has no row."""
FLASH = [Kind(4, True, 512, 32, 64), Kind(4, True, 128, 32, 64), Kind(128, False, 512, 32, 2)]


class Span(NamedTuple):
    text: int
    start: int
    end: int
    ring: int
    write_from: int = 0


PADDING = Span(-1, 0, 0, 0)
RINGS = 4


class Case:
    """Texts of one kind of compressor."""

    def __init__(self, kind, kernels, device):
        self.kind, self.kernels, self.device = kind, kernels, device
        self.width, self.channels = kind.ratio * (1 + kind.overlap), kind.dim * (1 + kind.overlap)
        self.length = 5 * kind.ratio + 3
        self.texts = [rand(self.length, 2 * self.channels, seed=seed).to(device) for seed in range(3)]
        self.bias, self.weight = rand(kind.ratio, self.channels).to(device), rand(kind.dim).to(device)
        self.table = turn_of(self.length, kind.pairs, device)

    def expected(self, text):
        """Its entries by the plain twins."""
        kind, entries = self.kind, torch.arange(self.length // self.kind.ratio, device=self.device)
        rows = entries[:, None] * kind.ratio + torch.arange(kind.ratio - self.width, kind.ratio).to(entries)
        x = compress(self.texts[text][rows.clamp(min=0)], rows < 0, self.bias, kind.dim)
        turn = tuple(each[entries * kind.ratio] for each in self.table)
        return reference.norm_rotate(x[:, None, :], turn, eps=EPS, weight=self.weight)[:, 0, :]

    def run(self, spans, encoding, seed=0):
        """{(text, entry): bytes} of the entries that the spans end. Nothing else is written."""
        kind, ring_rows, device = self.kind, self.width, self.device
        kept = torch.full((RINGS * ring_rows, 2 * self.channels), torch.nan, device=device)
        flat = {name: [] for name in ("position", "start", "first", "ring", "write_from")}
        new = []
        for span in spans:
            for p in range(max(span.start - ring_rows, 0), span.start):
                kept[span.ring * ring_rows + p % ring_rows] = self.texts[span.text][p]
            for p in range(span.start, span.end):
                values = (p, span.start, len(new) - (p - span.start), span.ring, span.write_from)
                new.append(self.texts[span.text][p])
                for name, value in zip(flat, values, strict=True):
                    flat[name].append(value)
            if span == PADDING:
                new.append(torch.full_like(kept[0], torch.nan))
                for name in flat:
                    flat[name].append(-1 if name == "position" else 0)
        pages_each = -(-(self.length // kind.ratio) // kind.per_row)
        places = torch.randperm(RINGS * pages_each, generator=torch.Generator().manual_seed(seed))
        places = places.view(RINGS, pages_each)
        pages, memory = make_entries(
            RINGS * pages_each, kind.per_row, encoding, kind.dim, 2 * kind.pairs, device
        )
        numbers = {name: torch.tensor(each, dtype=torch.int32, device=device) for name, each in flat.items()}
        write_from = numbers.pop("write_from")
        where = Flat(**numbers, pages=places.int().to(device))
        recent = kept, torch.cat([torch.stack(new), torch.zeros(len(new), 8, device=device)], 1)[:, :-8]
        self.kernels.compress_store(
            recent, self.bias, self.weight, EPS, self.table, pages, where, write_from, ring_rows
        )
        found, untouched = {}, memory.clone()
        view = pages._replace(rows=untouched[:, 12:-16])
        for span in spans:
            for e in range(max(span.start, span.write_from) // kind.ratio, span.end // kind.ratio):
                number = int(places[span.ring, e // kind.per_row]) * kind.per_row + e % kind.per_row
                found[span.text, e] = bytes_of(pages, [number])[0]
                row, at = view.rows[number // kind.per_row], 0
                for size in pages.sizes:
                    row[at + number % kind.per_row * size :][:size] = UNTOUCHED
                    at += kind.per_row * size
        assert (untouched == UNTOUCHED).all()
        return found


def cases(kernels, device):
    return [Case(kind, kernels, device) for kind in (FLASH if device == "cuda" else SMALL)]


def some_spans(case):
    """One text whole, one from within an entry, one whose first entries are there already."""
    middle, end = 2 * case.kind.ratio + 2, case.length
    return [
        Span(0, 0, end, ring=2),
        PADDING,
        Span(1, middle, end - 2, ring=0),
        PADDING,
        PADDING,
        Span(2, case.kind.ratio, end, ring=3, write_from=middle),
    ]


@every_set
def test_entries_are_compressed_as_by_the_plain_twins_and_go_where_they_belong(kernels, device):
    for case in cases(kernels, device):
        found = case.run(some_spans(case), "fp32")
        texts = [case.expected(text) for text in range(3)]
        assert {(0, 0), (1, 2), (2, 2)} <= found.keys() and not {(1, 1), (2, 1)} & found.keys()
        for (text, e), data in found.items():
            torch.testing.assert_close(data.view(torch.float32), texts[text][e], atol=2e-5, rtol=2e-5)


@every_set
@pytest.mark.parametrize("encoding", ["bf16", "fp8_groups", "fp8_row"])
def test_entries_have_the_bytes_of_the_encoding(kernels, device, encoding):
    for case in cases(kernels, device):
        plain, found = (case.run(some_spans(case)[2:], each) for each in ("fp32", encoding))
        for key, data in plain.items():
            x = data.view(torch.float32)[None]
            assert torch.equal(found[key], encode(x, encoding, 2 * case.kind.pairs)[0]), key


@every_exact_set
def test_an_entry_does_not_depend_on_how_its_text_is_cut(kernels, device):
    for case in cases(kernels, device):
        ratio, end = case.kind.ratio, case.length
        whole = case.run([Span(0, 0, end, ring=0)], "fp32")
        for cut in (ratio, 2 * ratio - 1, 4 * ratio + 1):
            parts = [Span(0, 0, cut, ring=1), PADDING, Span(0, cut, end, ring=3)]
            apart = {
                key: data
                for i, span in enumerate(parts)
                if span != PADDING
                for key, data in case.run(parts[max(i - 1, 0) : i + 1], "fp32", seed=cut + i).items()
            }
            assert apart.keys() == whole.keys()
            assert all(torch.equal(apart[key], whole[key]) for key in whole)


@every_set
@pytest.mark.parametrize("x", [-200.0, 0.0, 80.0])
def test_gates_far_apart_do_not_overflow(kernels, device, x):
    case = Case(Kind(4, False, 16, 4, 1), kernels, device)
    case.texts[0][:, 16:] = 0
    case.texts[0][1::4, 16:] = x
    found, expected = case.run([Span(0, 0, 8, ring=0)], "fp32"), case.expected(0)
    for (_, e), data in found.items():
        torch.testing.assert_close(data.view(torch.float32), expected[e], atol=2e-5, rtol=2e-5)
