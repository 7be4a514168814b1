"""Sparse attention to entries that stay on the host: the plain twin, on any device.

A text whose pages are on the host has hot rows on the device. Their cells hold single entries, as a cache
that forgets the least recently used. The indexer chose entries of the text. For each layer

    resolve    finds the chosen entries in cells, and gives cells to those that are in none
    gather     copies these from the host to their cells
    stage      copies whole rows from the host, for spans that may choose more of them than there are cells

`kernels/cuda/hot.py` has the same functions for a GPU. They leave the same numbers in every tensor except the
work space `spare`.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from tiercel.kernels.entries import Entries, Flat, Numbering, parts_of


class HotRows(NamedTuple):
    """The hot rows of all running texts of a model, and work space. All tensors are on the device."""

    places: Tensor
    """int32 [rings, most places]: the places of a ring's hot rows. Cell c is entry c % per_row of the row at
    place c // per_row."""
    cells: Tensor
    """int32 [rings]: how many cells a ring has; 0: it has no hot rows."""
    held: Tensor
    """int32 [layers, rings, 2, most cells]: the cells of a ring, the least recently used first, and the entry
    that each of them holds, or -1. What is behind the ring's cells has no meaning."""
    seen: Tensor
    """int32 [rings, most entries]: work space, all -1 between calls."""
    jobs: Tensor
    """int32 [most tokens · k, 2]: (entry, cell) for the gather. Those of a span begin at its first flat
    token · k."""
    counts: Tensor
    """int32 [most tokens]: the number of jobs of the span that begins with a flat token; else 0."""
    spare: Tensor
    """int32 [rings, 2, most cells]: work space."""
    asked: Tensor
    """int64 [2]: how many entries of the host `resolve` has looked up so far, and how many of them were in no
    cell. An entry that a span names several times is looked up once."""

    @classmethod
    def make(  # noqa: PLR0913
        cls, *, layers: int, rings: int, places: int, per_row: int, entries: int, tokens: int, k: int,
        device: torch.device | str,
    ) -> HotRows:  # fmt: skip
        """No ring has cells yet. `places`: the most that a ring can have; `entries`: the most of a text;
        `tokens`: the most of a call; `k`: how many entries each of them chooses."""
        most = places * per_row

        def filled(number: int, *shape: int) -> Tensor:
            return torch.full(shape, number, dtype=torch.int32, device=device)

        return cls(
            places=filled(0, rings, places),
            cells=filled(0, rings),
            held=filled(-1, layers, rings, 2, most),
            seen=filled(-1, rings, entries),
            jobs=filled(0, tokens * k, 2),
            counts=filled(0, tokens),
            spare=filled(0, rings, 2, most),
            asked=torch.zeros(2, dtype=torch.int64, device=device),
        )


class HostRows(NamedTuple):
    """Where the rows of one layer are on the host."""

    address: int
    """The row in host place 0. The device can address it."""
    stride: int
    """Bytes from a host place to the next."""
    pages: Tensor
    """int32 [rings, most pages], on the device: the host place of each page of the text in a ring; -1: it has
    none."""


def begin(hot: HotRows, ring: int, cells: int) -> None:
    """From now on a ring has so many cells, in all layers. They hold nothing. Nothing waits for the device.
    The caller writes `hot.places`."""
    assert 0 <= cells <= hot.held.shape[3]
    held = hot.held[:, ring]
    held[:, 0, :cells] = torch.arange(cells, dtype=torch.int32, device=held.device)
    held[:, 1, :cells] = -1
    hot.cells[ring].fill_(cells)


def resolve(  # noqa: PLR0913
    chosen: Tensor, flat: Flat, end: Tensor, hot: HotRows, layer: int, to: Numbering, per_row: int, most: int
) -> None:
    """Codes -2 - e in `chosen`, int32 [tokens, k], become the numbers of cells; jobs are left in `hot`.

    end int32 [tokens]: the position after the token's span. The entries of a span are looked up together, and
    each of them has one cell afterwards. Entries that are in no cell take cells that hold nothing chosen, the
    least recently used first, in the order of tokens and of their lists. The new order has the other cells
    that hold nothing chosen, then those that were taken, then those that held chosen entries.

    Spans of more than `most` tokens, and of rings without cells, are not touched: their rows are staged. The
    caller guarantees that no other span names more entries of the host than the ring has cells.
    """
    tokens, k = chosen.shape
    hot.counts[:tokens] = 0
    position, first, ring, cells = (
        each.tolist() for each in (flat.position, flat.first, flat.ring, hot.cells)
    )
    lengths = (end - flat.start).tolist()
    for token, (n, own) in enumerate(zip(lengths, ring, strict=True)):
        if position[token] >= 0 and first[token] == token and n <= most and cells[own]:
            _resolve_span(chosen[token : token + n], token, own, hot, layer, to, per_row)


def _resolve_span(  # noqa: PLR0913
    lists: Tensor, token: int, ring: int, hot: HotRows, layer: int, to: Numbering, per_row: int
) -> None:
    codes = lists.flatten().tolist()
    wanted = dict.fromkeys(-2 - code for code in codes if code <= -2)
    if not wanted:
        return
    held = hot.held[layer, ring, :, : int(hot.cells[ring])]
    order = list(zip(*held.tolist(), strict=True))
    hits = [(cell, e) for cell, e in order if e in wanted]
    others = [(cell, e) for cell, e in order if e not in wanted]
    cell_of = {e: cell for cell, e in hits}
    missing = [e for e in wanted if e not in cell_of]
    assert len(missing) <= len(others), "a span names more entries than its ring has cells"
    taken = [(cell, e) for (cell, _), e in zip(others, missing, strict=False)]
    cell_of.update((e, cell) for cell, e in taken)
    held.copy_(torch.tensor(others[len(taken) :] + taken + hits, dtype=torch.int32).T)

    if taken:
        at = token * lists.shape[1]
        hot.jobs[at : at + len(taken)] = _like(hot.jobs, [(e, cell) for cell, e in taken])
    hot.counts[token] = len(taken)
    hot.asked.add_(torch.tensor([len(wanted), len(taken)], device=hot.asked.device))
    places = hot.places[ring].tolist()
    number = {
        e: (places[cell // per_row] * to.step + to.first) * per_row + cell % per_row
        for e, cell in cell_of.items()
    }
    lists.copy_(_like(lists, [number[-2 - code] if code <= -2 else code for code in codes]).view_as(lists))


def gather(hot: HotRows, flat: Flat, k: int, source: HostRows, rows: Entries, to: Numbering) -> None:
    """Carry out the jobs that `resolve` left: entries become entries of `rows`, which `to` numbers."""
    counts, ring = hot.counts[: len(flat.ring)].tolist(), flat.ring.tolist()
    for token in (token for token, count in enumerate(counts) if count):
        own, at = ring[token], token * k
        e, cell = hot.jobs[at : at + counts[token]].long().cpu().T
        pages, places = source.pages[own].long().cpu(), hot.places[own].long().cpu()
        there = pages[e // rows.per_row]
        here = places[cell // rows.per_row] * to.step + to.first
        host = rows._replace(rows=_host_rows(source, int(there.max()) + 1, rows.rows.shape[1]))
        for new, old in zip(parts_of(rows), parts_of(host), strict=True):
            data = old[there, e % rows.per_row].to(new.device)
            new[here.to(new.device), (cell % rows.per_row).to(new.device)] = data


def stage(jobs: Tensor, count: Tensor, source: HostRows, rows: Entries, to: Numbering) -> None:
    """Copy whole rows. jobs int32 [most, 2]: (host place, target in strides behind `to.staged`), of which the
    first `count`, int32 [1], are carried out."""
    listed = jobs[: int(count)].tolist()
    if not listed:
        return
    host = _host_rows(source, max(place for place, _ in listed) + 1, rows.rows.shape[1])
    for place, target in listed:
        rows.rows[to.staged + target] = host[place].to(rows.rows.device)


def _host_rows(source: HostRows, places: int, width: int) -> Tensor:
    """uint8 [places, width]: the first places, as they lie on the host."""
    size = (places - 1) * source.stride + width
    memory = (ctypes.c_uint8 * size).from_address(source.address)
    return torch.frombuffer(memory, dtype=torch.uint8).as_strided((places, width), (source.stride, 1))


def _like(tensor: Tensor, numbers: list[int] | list[tuple[int, int]]) -> Tensor:
    return torch.tensor(numbers, dtype=tensor.dtype, device=tensor.device)
