# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"
"""Attention of single queries to encoded rows, which are read in place (Triton). A row is key and value.

One program computes one token for a group of heads. It takes tile after tile of rows and keeps a running
softmax:

    rows of a query   │ its window, oldest first, padded to whole tiles │ its entries, in the order named │
    a tile            addresses ─► words ─► numbers ─► scores ─► weights ─► sum of weighted rows

What these rows are, and which lie in one tile, follows from the query alone, and one program sums them all in
order: so a token has the same bits in a prefill and in a decode. If the rows were ever split between
programs, the split would be part of the order of sums, and would have to follow from the query alone too.

A row is cut into pieces of equal channels, each of one type: e4m3 of one group, bf16 or fp32. Bytes wait in
registers as words of four, while the tile before them is multiplied.

The plain twin is `reference.attention`, on decoded rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercel.kernels.entries import Entries, Flat

LOG2_E = tl.constexpr(1.4426950408889634)
PIECE_MOST = 64
"""Channels of a piece: those of an fp8 group in V4-Flash; 128 bytes of bf16, the width of a swizzled tile in
shared memory."""


class Tile(NamedTuple):
    heads: int
    rows: int
    warps: int


WIDE = Tile(heads=64, rows=64, warps=8)
"""bf16, from 64 heads on. 64 is the height of a wgmma; the sum [64, 512] takes 128 registers of each of 256
threads. 64 rows and the queries take 128 KiB of shared memory; 32 rows cost the same instructions twice."""
NARROW = Tile(heads=16, rows=32, warps=4)
"""bf16, fewer heads: 16 is the least that tensor cores multiply."""
EXACT = Tile(heads=16, rows=16, warps=8)
"""fp32: without tensor cores the operands are in registers; tiles are small and threads many."""

NUMBERS = {"fp32": 4, "bf16": 2, "fp8_groups": 2}
"""Bytes of a number that is not e4m3."""


@triton.jit
def _addresses(  # noqa: PLR0913
    tile, here, start, first, ring, count, pages, kept, new, entries, chosen,
    WINDOW: tl.constexpr, KEPT_BYTES: tl.constexpr, NEW_BYTES: tl.constexpr, ROW_BYTES: tl.constexpr,
    PER_ROW: tl.constexpr, VALUE: tl.constexpr, SCALE: tl.constexpr, LISTED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """(value, scale, whether there is a row at all) of each row of a tile."""
    lane = tile * ROWS + tl.arange(0, ROWS)
    at = here - (WINDOW - 1) + lane
    ring_rows: tl.constexpr = WINDOW - 1 if WINDOW > 1 else 1
    old_row = (ring * ring_rows + at % ring_rows).to(tl.int64)
    new_row = (first + at - start).to(tl.int64)
    value = tl.where(at >= start, new + new_row * NEW_BYTES, kept + old_row * KEPT_BYTES)
    scale = value + VALUE
    there = (lane < WINDOW) & (at >= 0)
    if PER_ROW > 0:
        e = lane - (WINDOW + ROWS - 1) // ROWS * ROWS
        far = (e >= 0) & (e < count)
        if LISTED > 0:
            number = tl.load(chosen + e, mask=far, other=-1)
            far = far & (number >= 0)
            place, inner = number // PER_ROW, number % PER_ROW
        else:
            place, inner = tl.load(pages + e // PER_ROW, mask=far, other=0), e % PER_ROW
        row = entries + place.to(tl.int64) * ROW_BYTES
        value = tl.where(far, row + inner * VALUE, value)
        scale = tl.where(far, row + PER_ROW * VALUE + inner * SCALE, scale)
        there = there | far
    return value, scale, there


@triton.jit
def _read_piece(
    value, there, AT: tl.constexpr, NOPE: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr
):  # fmt: skip
    offset: tl.constexpr = AT if AT < NOPE else NOPE + (AT - NOPE) * WIDTH
    words: tl.constexpr = PIECE // 4 if AT < NOPE else PIECE * WIDTH // 4
    word = (value + offset).to(tl.pointer_type(tl.int32), bitcast=True)
    return tl.load(word[:, None] + tl.arange(0, words)[None, :], mask=there[:, None], other=0)


@triton.jit
def _read(  # noqa: PLR0913
    value, scale, there,
    NOPE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """(words of each piece, words of exponents). What is not there is zeros: its memory may hold anything."""
    pieces = ()
    for i in tl.static_range(PIECES):
        pieces += (_read_piece(value, there, i * PIECE, NOPE, WIDTH, PIECE),)
    exponents = ()
    for i in tl.static_range((NOPE // GROUP + 3) // 4):
        word = (scale + 4 * i).to(tl.pointer_type(tl.int32), bitcast=True)
        exponents += (tl.load(word, mask=there, other=0),)
    return pieces, exponents


@triton.jit
def _decode(  # noqa: PLR0913
    pieces, exponents, i: tl.constexpr,
    NOPE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Piece i of a tile in the type of the products. e4m3 · 2^(exponent - 127) is exact in bf16 too."""
    rows: tl.constexpr = pieces[i].shape[0]
    if i * PIECE < NOPE:
        group: tl.constexpr = i * PIECE // GROUP
        exponent = (exponents[group // 4] >> (8 * (group % 4))) & 0xFF
        power = (exponent << 23).to(tl.float32, bitcast=True)
        byte = (pieces[i][:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]).to(tl.uint8)
        number = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32).reshape(rows, PIECE) * power[:, None]
    elif WIDTH == 2:
        half = (pieces[i][:, :, None] >> (16 * tl.arange(0, 2))[None, None, :]).to(tl.int16)
        number = half.to(tl.bfloat16, bitcast=True).reshape(rows, PIECE)
    else:
        number = pieces[i].to(tl.float32, bitcast=True)
    return number.to(OPERAND)


@triton.jit(do_not_specialize=["most_pages"])
def _attention(  # noqa: PLR0913
    q, out, sinks, scale, position, start, first, ring, pages, most_pages, kept, new, entries, chosen,
    HEADS: tl.constexpr, DIM: tl.constexpr, NOPE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    PIECE: tl.constexpr, WINDOW: tl.constexpr, KEPT_BYTES: tl.constexpr, NEW_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr, PER_ROW: tl.constexpr, VALUE: tl.constexpr, SCALE: tl.constexpr,
    LISTED: tl.constexpr, RATIO: tl.constexpr, OPERAND: tl.constexpr, HEADS_TILE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """PER_ROW 0: there are no entries. LISTED: the length of a query's list; 0: all entries. Scores are
    logarithms to base 2, `scale` includes that."""
    PIECES: tl.constexpr = DIM // PIECE
    groups: tl.constexpr = (HEADS + HEADS_TILE - 1) // HEADS_TILE
    token = (tl.program_id(0) // groups).to(tl.int64)
    head = tl.program_id(0) % groups * HEADS_TILE + tl.arange(0, HEADS_TILE)
    here, start, first = tl.load(position + token), tl.load(start + token), tl.load(first + token)
    ring = tl.load(ring + token)
    pages += ring.to(tl.int64) * most_pages
    chosen += token * LISTED
    count = 0
    if LISTED > 0:
        listed = tl.arange(0, triton.next_power_of_2(LISTED))
        numbers = tl.load(chosen + listed, mask=listed < LISTED, other=-1)
        count = tl.max(tl.where((numbers >= 0) & (here >= 0), listed + 1, 0), 0)
    elif PER_ROW > 0:
        count = (here + 1) // RATIO
    cells = (token * HEADS + head)[:, None] * DIM + tl.arange(0, PIECE)[None, :]
    mask = (head < HEADS)[:, None]
    query = ()
    acc = ()
    for i in tl.static_range(PIECES):
        query += (tl.load(q + cells + i * PIECE, mask=mask, other=0).to(OPERAND),)
        acc += (tl.zeros([HEADS_TILE, PIECE], tl.float32),)
    # the sink is a score without a value: with it in front, the maximum is finite whatever follows
    most = tl.load(sinks + head, mask=head < HEADS, other=0) * LOG2_E
    total = tl.full([HEADS_TILE], 1.0, tl.float32)
    tile = tl.maximum(WINDOW - 1 - here, 0) // ROWS
    end = (WINDOW + ROWS - 1) // ROWS + tl.cdiv(count, ROWS)
    value, powers, there = _addresses(
        tile, here, start, first, ring, count, pages, kept, new, entries, chosen,
        WINDOW, KEPT_BYTES, NEW_BYTES, ROW_BYTES, PER_ROW, VALUE, SCALE, LISTED, ROWS,
    )  # fmt: skip
    pieces, exponents = _read(value, powers, there, NOPE, GROUP, WIDTH, PIECE, PIECES)
    while tile < end:
        rows = ()
        for i in tl.static_range(PIECES):
            rows += (_decode(pieces, exponents, i, NOPE, GROUP, WIDTH, PIECE, OPERAND),)
        seen = there
        tile += 1
        value, powers, there = _addresses(
            tile, here, start, first, ring, count, pages, kept, new, entries, chosen,
            WINDOW, KEPT_BYTES, NEW_BYTES, ROW_BYTES, PER_ROW, VALUE, SCALE, LISTED, ROWS,
        )  # fmt: skip
        pieces, exponents = _read(value, powers, there, NOPE, GROUP, WIDTH, PIECE, PIECES)
        scores = tl.zeros([HEADS_TILE, ROWS], tl.float32)
        for i in tl.static_range(PIECES):
            scores = tl.dot(query[i], tl.trans(rows[i]), scores, input_precision="ieee")
        scores = tl.where(seen[None, :], scores * scale, float("-inf"))
        top = tl.maximum(most, tl.max(scores, 1))
        weights, fade = tl.exp2(scores - top[:, None]), tl.exp2(most - top)
        total = total * fade + tl.sum(weights, 1)
        more = ()
        for i in tl.static_range(PIECES):
            part = acc[i] * fade[:, None]
            more += (tl.dot(weights.to(OPERAND), rows[i], part, input_precision="ieee"),)
        acc = more
        most = top
    for i in tl.static_range(PIECES):
        part = acc[i] / total[:, None]
        tl.store(out + cells + i * PIECE, part.to(out.dtype.element_ty), mask=mask)


def attention(  # noqa: PLR0913
    q: Tensor,
    recent: tuple[Entries, Entries],
    window: int,
    entries: Entries | None,
    chosen: Tensor | None,
    ratio: int,
    flat: Flat,
    sinks: Tensor,
    scale: float,
) -> Tensor:
    """q [tokens, heads, dim] → the same shape and type.

    `recent`: kept and new rows. `chosen`, int32 [tokens, k]: numbers in `entries`, -1: none; without it, a
    query sees all entries of its text that ended with its token or before. sinks [heads], fp32.
    """
    (tokens, heads, dim), (kept, new) = q.shape, recent
    far = kept if entries is None else entries
    nope = dim - far.rope if far.encoding == "fp8_groups" else 0
    group = min(64, nope & -nope) or 1
    piece = min(PIECE_MOST, (nope | dim) & -(nope | dim))
    assert q.is_contiguous() and (chosen is None or chosen.is_contiguous())
    assert all(each.encoding == far.encoding and each.sizes == far.sizes for each in recent)
    assert kept.per_row == new.per_row == 1 and piece >= 16, "products take 16 channels at least"
    out = torch.empty_like(q)
    tile = EXACT if q.dtype == torch.float32 else WIDE if heads >= WIDE.heads else NARROW
    if tokens:
        _attention[(tokens * triton.cdiv(heads, tile.heads),)](
            q, out, sinks, scale * LOG2_E.value, flat.position, flat.start, flat.first, flat.ring,
            flat.pages, flat.pages.stride(0), kept.rows, new.rows, far.rows,
            flat.position if chosen is None else chosen,
            HEADS=heads, DIM=dim, NOPE=nope, GROUP=group, WIDTH=NUMBERS[far.encoding], PIECE=piece,
            WINDOW=window, KEPT_BYTES=kept.rows.stride(0), NEW_BYTES=new.rows.stride(0),
            ROW_BYTES=far.rows.stride(0),
            PER_ROW=0 if entries is None else far.per_row, VALUE=far.sizes[0], SCALE=far.sizes[-1],
            LISTED=0 if chosen is None else chosen.shape[1], RATIO=ratio,
            OPERAND=tl.float32 if tile is EXACT else tl.bfloat16,
            HEADS_TILE=tile.heads, ROWS=tile.rows, num_warps=tile.warps,
        )  # fmt: skip
    return out
