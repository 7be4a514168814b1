# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Rows between device memory and any memory the device can address, in one launch (Triton).

A table of extents says which bytes of every place move (`transfer/extents.py`). Each is cut into tiles, and a
bounded number of programs takes tile after tile: beside a model a copy must not take all multiprocessors.
The plain twin is `copy.copy_extents_plain`. Single entries, for attention on rows that stay on the host, are
moved by number (`move_entries`; the plain twin is `entries.move_entries_plain`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from tiercel.kernels.entries import Entries

TILE_BYTES = 16 * 1024
"""H200, 512 scattered V4-Flash pages from pinned memory: 48.9 GB/s with 16 programs; tiles of 8 KiB 44, of
4 KiB 30 (2026-11-15, benchmarks/copy.py)."""

ENTRY_PROGRAMS = 2048
"""Programs that move single entries. Each has one entry in flight, so the link needs many."""

WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit
def _move(  # noqa: PLR0913
    table,
    tiles,
    near_places,
    near_parts,
    far_places,
    far_parts,
    host,
    tile_count,
    total,
    WORD: tl.constexpr,
    WORDS_PER_TILE: tl.constexpr,
    LOAD: tl.constexpr,
):
    """table [extents, 7], sizes in words; tiles [tiles, 2]: extent, first word."""
    work = tl.program_id(0).to(tl.int64)
    while work < total:
        item = work // tile_count
        tile = tiles + 2 * (work % tile_count)
        extent = table + 7 * tl.load(tile)
        place = tl.load(near_places + item * near_parts + tl.load(extent + 2))
        near = tl.load(extent) + place * tl.load(extent + 1)
        place = tl.load(far_places + item * far_parts + tl.load(extent + 5))
        far = host + tl.load(extent + 3) + place * tl.load(extent + 4)
        word = tl.load(tile + 1) + tl.arange(0, WORDS_PER_TILE)
        mask = word < tl.load(extent + 6)
        here = near.to(tl.pointer_type(WORD)) + word
        there = far.to(tl.pointer_type(WORD)) + word
        if LOAD:
            tl.store(here, tl.load(there, mask=mask), mask=mask)
        else:
            tl.store(there, tl.load(here, mask=mask), mask=mask)
        work += tl.num_programs(0)


class Mover:
    """Moves the extents of one table. Made once: the table and its tiles stay on the device."""

    def __init__(self, extents: NDArray[np.int64], device: torch.device | str, host: int = 0) -> None:
        """`host`: the address that far offsets count from. The widest word that fits every number is used."""
        bits = (
            int(np.bitwise_or.reduce(np.delete(extents, [2, 5], axis=1), axis=None)) | host
            if len(extents)
            else 0
        )
        self.word = next(size for size in WORDS if bits % size == 0)
        self._tile = TILE_BYTES // self.word
        table = extents.copy()
        table[:, 6] //= self.word
        tiles = [(i, first) for i, size in enumerate(table[:, 6]) for first in range(0, size, self._tile)]
        self._host, self._count = host, len(tiles)
        self._table = torch.from_numpy(table).to(device)
        self._tiles = torch.tensor(tiles, dtype=torch.int64).reshape(-1, 2).to(device)

    def __call__(self, near: Tensor, far: Tensor, programs: int, *, load: bool) -> None:
        """Queue one launch. near and far [items, parts], int64 on the device."""
        total = self._count * len(near)
        if not total:
            return
        words: Any = WORDS[self.word]
        _move[(min(programs, total),)](
            self._table, self._tiles, near, near.shape[1], far, far.shape[1], self._host, self._count, total,
            words, self._tile, load, num_warps=8,
        )  # fmt: skip


@triton.jit
def _move_entries(  # noqa: PLR0913
    to,
    to_stride,
    to_numbers,
    source,
    source_stride,
    source_numbers,
    count,
    per_row,
    VALUE: tl.constexpr,
    SCALE: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program moves one entry after the other: its value, then its scale."""
    item = tl.program_id(0).to(tl.int64)
    byte = tl.arange(0, TILE) * WORD_BYTES
    in_scale = byte >= VALUE
    while item < count:
        here, there = tl.load(to_numbers + item), tl.load(source_numbers + item)
        mask = (byte < VALUE + SCALE) & (here >= 0) & (there >= 0)
        near = to + here // per_row * to_stride
        near += tl.where(in_scale, per_row * VALUE + here % per_row * SCALE - VALUE, here % per_row * VALUE)
        far = source + there // per_row * source_stride
        far += tl.where(in_scale, per_row * VALUE + there % per_row * SCALE - VALUE, there % per_row * VALUE)
        word = tl.load((far + byte).to(tl.pointer_type(WORD)), mask=mask)
        tl.store((near + byte).to(tl.pointer_type(WORD)), word, mask=mask)
        item += tl.num_programs(0)


def move_entries(to: Entries, to_numbers: Tensor, source: Entries, source_numbers: Tensor) -> None:
    """Queue one launch: entry source_numbers[i] becomes entry to_numbers[i]. Where one is -1 nothing moves.

    Entries have one form on both sides, and each memory may be the device's or pinned. The widest word that
    fits every address is used. Numbers are int64 on the device, each target at most once.
    """
    value, scale = (*to.sizes, 0)[:2]
    strides = to.rows.stride(0), source.rows.stride(0)
    bits = value | scale | strides[0] | strides[1] | to.rows.data_ptr() | source.rows.data_ptr()
    size = next(size for size in WORDS if bits % size == 0)
    if not len(to_numbers):
        return
    words: Any = WORDS[size]
    _move_entries[(min(ENTRY_PROGRAMS, len(to_numbers)),)](
        to.rows.data_ptr(), strides[0], to_numbers, source.rows.data_ptr(), strides[1], source_numbers,
        len(to_numbers), to.per_row, value, scale, words, size,
        triton.next_power_of_2((value + scale) // size), num_warps=1,
    )  # fmt: skip
