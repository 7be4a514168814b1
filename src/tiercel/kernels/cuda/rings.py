# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""What a ring remembers of a call, and tails: snapshots of a ring in cached memory (Triton).

    keep           new rows of a call                  → rings
    write_tails    rings and new rows, at a boundary   → rows of tails
    restore        rows of tails                       → rings
    row_before     new rows of a call, and rings       → for each token the row of the token before it

Rows are copied as the bytes they are; streams of bf16 are fp32 in rings and tails. Position p of a text lies
in row ring · ring_rows + p % ring_rows, and a tail holds the positions before its boundary, the newest last.
`kernels/reference/rows.py` says what each function does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercel.kernels.entries import Entries, Flat
from tiercel.kernels.reference.rows import Rows

WORDS_OF_WARP = 2048
"""Words of a row for each warp: 64 for a thread. A window row is 584 bytes: one warp, and many rows are
copied at once. The streams of V4-Flash are 16,384 words: 8 warps."""

BEFORE_TILE = 2048

TAILS_AT_ONCE = 8
"""A recorded call has room for one tail of each token, and mostly has none: few programs look for them."""


@triton.jit
def _copy(source, target, there, WORDS: tl.constexpr, WIDE: tl.constexpr):
    """Zeros where there is no source."""
    word = tl.arange(0, WIDE)
    value = tl.load(source + word, mask=(word < WORDS) & there, other=0)
    tl.store(target + word, value.to(target.dtype.element_ty), mask=word < WORDS)


@triton.jit(do_not_specialize_on_alignment=["position", "ring", "end"])
def _keep(  # noqa: PLR0913
    kept,
    new,
    position,
    ring,
    end,
    RING_ROWS: tl.constexpr,
    KEPT_STRIDE: tl.constexpr,
    NEW_STRIDE: tl.constexpr,
    WORDS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One program for each token."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.load(position + token)
    if (at < 0) | (at < tl.load(end + token) - RING_ROWS):
        return
    row = tl.load(ring + token).to(tl.int64) * RING_ROWS + at % RING_ROWS
    _copy(new + token * NEW_STRIDE, kept + row * KEPT_STRIDE, True, WORDS, WIDE)


def keep(kept: Rows, new: Rows, flat: Flat, end: Tensor, ring_rows: int) -> None:
    source = _words(new)
    target, words = _as_numbers(_words(kept), source), source.shape[1]
    assert target.shape[1] == words, "rows of one kind"
    if not len(flat.position):
        return
    _keep[(len(flat.position),)](
        target, source, flat.position, flat.ring, end,
        RING_ROWS=ring_rows, KEPT_STRIDE=target.stride(0), NEW_STRIDE=source.stride(0),
        WORDS=words, WIDE=triton.next_power_of_2(words), num_warps=_warps(words),
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["moves"])
def _snapshot(  # noqa: PLR0913
    kept,
    new,
    tails,
    moves,
    count,
    MOVE_STRIDE: tl.constexpr,
    RESTORE: tl.constexpr,
    RING_ROWS: tl.constexpr,
    COUNT: tl.constexpr,
    PER_ROW: tl.constexpr,
    KEPT_STRIDE: tl.constexpr,
    NEW_STRIDE: tl.constexpr,
    TAIL_STRIDE: tl.constexpr,
    PIECES: tl.constexpr,
    ROW_AT: tl.constexpr,
    TAIL_AT: tl.constexpr,
    TAIL_STEP: tl.constexpr,
    WORDS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One program copies one of the last COUNT entries for one tail after the other. An entry lies in pieces:
    piece i has WORDS[i] words from ROW_AT[i] on in a row, and from TAIL_AT[i] + number · TAIL_STEP[i] on in a
    tail."""
    number = PER_ROW - COUNT + tl.program_id(1)
    tail = tl.program_id(0)
    move = moves + tail * MOVE_STRIDE
    place = tl.load(move).to(tl.int64)
    while place >= 0:
        at = tl.load(move + 1) - PER_ROW + number
        there = at >= 0
        if there | (not RESTORE):
            row = kept + (tl.load(move + 2).to(tl.int64) * RING_ROWS + at % RING_ROWS) * KEPT_STRIDE
            if not RESTORE:
                start, first = tl.load(move + 3), tl.load(move + 4).to(tl.int64)
                row = tl.where(at < start, row, new + (first + at - start) * NEW_STRIDE)
            for i in tl.static_range(PIECES):
                own = row + ROW_AT[i]
                saved = tails + place * TAIL_STRIDE + TAIL_AT[i] + number * TAIL_STEP[i]
                if RESTORE:
                    _copy(saved, own, there, WORDS[i], WIDE[i])
                else:
                    _copy(own, saved, there, WORDS[i], WIDE[i])
        tail += tl.num_programs(0)
        move += tl.num_programs(0) * MOVE_STRIDE
        place = tl.load(move, mask=tail < count, other=-1).to(tl.int64)


def write_tails(recent: tuple[Rows, Rows], tails: Entries, moves: Tensor, ring_rows: int) -> None:
    _move(recent[0], recent[1], tails, moves, ring_rows, tails.per_row)


def restore(kept: Rows, tails: Entries, moves: Tensor, ring_rows: int) -> None:
    _move(kept, None, tails, moves, ring_rows, min(ring_rows, tails.per_row))


def _move(kept: Rows, new: Rows | None, tails: Entries, moves: Tensor, ring_rows: int, count: int) -> None:
    old, fresh = _words(kept), _words(kept if new is None else new)
    snapshots, pieces = _as_numbers(_words(tails), fresh), _pieces(kept, tails)
    if not len(moves):
        return
    _snapshot[(min(len(moves), TAILS_AT_ONCE), count)](
        old, fresh, snapshots, moves, len(moves),
        MOVE_STRIDE=moves.stride(0), RESTORE=new is None, RING_ROWS=ring_rows, COUNT=count,
        PER_ROW=tails.per_row, KEPT_STRIDE=old.stride(0), NEW_STRIDE=fresh.stride(0),
        TAIL_STRIDE=snapshots.stride(0), PIECES=len(pieces.words), ROW_AT=pieces.row_at,
        TAIL_AT=pieces.tail_at, TAIL_STEP=pieces.tail_step, WORDS=pieces.words,
        WIDE=tuple(map(triton.next_power_of_2, pieces.words)), num_warps=_warps(max(pieces.words)),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["position", "first", "ring"])
def _row_before(  # noqa: PLR0913
    new,
    kept,
    out,
    position,
    first,
    ring,
    RING_ROWS: tl.constexpr,
    NUMBERS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A part of the row of one token."""
    token = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = tl.load(position + token)
    there, begins = (number < NUMBERS) & (at > 0), tl.load(first + token) == token
    row = tl.load(ring + token).to(tl.int64) * RING_ROWS + (at - 1) % RING_ROWS
    old = tl.load(kept + row * NUMBERS + number, mask=there & begins, other=0.0)
    value = tl.load(new + (token - 1) * NUMBERS + number, mask=there & (begins == 0), other=0.0)
    value = tl.where(begins, old, value.to(tl.float32))
    tl.store(out + token * NUMBERS + number, value.to(out.dtype.element_ty), mask=number < NUMBERS)


def row_before(kept: Tensor, new: Tensor, flat: Flat, ring_rows: int) -> Tensor:
    (tokens, numbers), out = new.shape, torch.empty_like(new)
    assert kept.is_contiguous() and new.is_contiguous() and kept.shape[1] == numbers
    if tokens:
        _row_before[tokens, triton.cdiv(numbers, BEFORE_TILE)](
            new, kept, out, flat.position, flat.first, flat.ring,
            RING_ROWS=ring_rows, NUMBERS=numbers, TILE=BEFORE_TILE,
        )  # fmt: skip
    return out


class _Pieces(NamedTuple):
    """Where the parts of an entry lie in a row and in a tail, in words."""

    row_at: tuple[int, ...]
    tail_at: tuple[int, ...]
    tail_step: tuple[int, ...]
    words: tuple[int, ...]


def _pieces(rows: Rows, tails: Entries) -> _Pieces:
    sizes = tuple(size // 4 for size in tails.sizes)
    if isinstance(rows, Entries):
        assert rows.sizes == tails.sizes, "entries of one kind"
        before = tuple(sum(sizes[:i]) for i in range(len(sizes)))
        return _Pieces(before, tuple(tails.per_row * words for words in before), sizes, sizes)
    dim, channels = sizes[0] // 2, rows.shape[1] // 2
    assert len(sizes) == 1 and tails.encoding == "fp32" and dim <= channels
    return _Pieces((0, channels), (0, dim), (2 * dim, 2 * dim), (dim, dim))


def _words(rows: Rows) -> Tensor:
    """Rows of 4-byte words, without a copy; streams of bf16 as they are."""
    if isinstance(rows, Tensor):
        assert rows.dtype in (torch.float32, torch.bfloat16) and rows.stride(1) == 1
        return rows if rows.dtype == torch.bfloat16 else rows.view(torch.int32)
    assert not any(size % 4 for size in rows.sizes), "words of 4 bytes"
    return rows.rows[:, : rows.per_row * sum(rows.sizes)].view(torch.int32)


def _as_numbers(words: Tensor, source: Tensor) -> Tensor:
    """Words as fp32 where numbers are converted, not copied as bytes."""
    return words.view(torch.float32) if source.dtype == torch.bfloat16 else words


def _warps(words: int) -> int:
    return min(max(int(triton.next_power_of_2(words)) // WORDS_OF_WARP, 1), 8)
