# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"
"""Attention of single queries to encoded rows, which are read in place (Triton). A row is key and value.

One program computes one token for a group of heads. It takes tile after tile of rows and keeps a running
softmax:

    rows of a query   │ its window, oldest first, padded to whole tiles │ its entries, in the order named │
    a tile            addresses ─► words ─► numbers ─► scores ─► weights ─► sum of weighted rows

The rows, and which of them lie in one tile, follow from the query alone, and one program sums them all in
order: so a token has the same bits in a prefill and in a decode. If the rows were ever split between
programs, the split would be part of the order of sums, and would have to follow from the query alone too.

A row is cut into pieces of equal channels, each of one type: e4m3 of one group, bf16 or fp32. Bytes wait in
registers as words of four, while the tile before them is multiplied. A thread reads the 8 neighbouring
channels of a piece that it later writes to shared memory, so no number moves to another thread in between.
All pieces of a row are then one operand.

`kernels/reference/rows.py` says what it computes.
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
threads. 64 rows and the queries take 128 KiB of shared memory, their weights 8 KiB; 32 rows cost the same
instructions twice."""
NARROW = Tile(heads=16, rows=32, warps=4)
"""bf16, fewer heads: 16 is the least that tensor cores multiply."""
EXACT = Tile(heads=16, rows=16, warps=8)
"""fp32: without tensor cores the operands are in registers; tiles are small and threads many."""

NUMBERS = {"fp32": 4, "bf16": 2, "fp8_groups": 2}
"""Bytes of a number that is not e4m3."""


@triton.jit
def _count(
    here, chosen, PER_ROW: tl.constexpr, LISTED: tl.constexpr, RATIO: tl.constexpr
):  # fmt: skip
    """How many entries a query has, or the length of its list up to the last number."""
    count = 0
    if LISTED > 0:
        listed = tl.arange(0, triton.next_power_of_2(LISTED))
        numbers = tl.load(chosen + listed, mask=listed < LISTED, other=-1)
        count = tl.max(tl.where((numbers >= 0) & (here >= 0), listed + 1, 0), 0)
    elif PER_ROW > 0:
        count = (here + 1) // RATIO
    return count


@triton.jit
def _listed(e, count, chosen, LISTED: tl.constexpr):
    """Returns (e, or the numbers at e in a list; whether there is such an entry)."""
    far = (e >= 0) & (e < count)
    if LISTED > 0:
        e = tl.load(chosen + e, mask=far, other=-1)
        far = far & (e >= 0)
    return e, far


@triton.jit
def _there(  # noqa: PLR0913
    tile, here, count, chosen,
    WINDOW: tl.constexpr, PER_ROW: tl.constexpr, LISTED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """For each row of a tile: whether it exists."""
    lane = tile * ROWS + tl.arange(0, ROWS)
    there = (lane < WINDOW) & (here - (WINDOW - 1) + lane >= 0)
    if PER_ROW > 0:
        there = there | _listed(lane - (WINDOW + ROWS - 1) // ROWS * ROWS, count, chosen, LISTED)[1]
    return there


@triton.jit
def _read_piece(value, there, AT: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr):
    """Returns WIDTH tensors of words [rows, PIECE / 4]. Pairs of words go to them in turn: 8 neighbouring
    channels are in two columns, whatever their width, because a thread reads pairs."""
    word = (value + AT).to(tl.pointer_type(tl.int32), bitcast=True)[:, None]
    column = tl.arange(0, PIECE // 4)[None, :]
    words = ()
    for i in tl.static_range(WIDTH):
        at = column // 2 * (2 * WIDTH) + column % 2 + 2 * i
        words += (tl.load(word + at, mask=there[:, None], other=0),)
    return words


@triton.jit
def _read(  # noqa: PLR0913
    value, scale, there,
    NOPE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """(words of the pieces, words of exponents). Missing rows are zeros: their memory may hold anything."""
    words = ()
    for i in tl.static_range(NOPE // PIECE):
        words += _read_piece(value, there, i * PIECE, 1, PIECE)
    for i in tl.static_range(PIECES - NOPE // PIECE):
        words += _read_piece(value, there, NOPE + i * PIECE * WIDTH, WIDTH, PIECE)
    exponents = ()
    for i in tl.static_range((NOPE // GROUP + 3) // 4):
        word = (scale + 4 * i).to(tl.pointer_type(tl.int32), bitcast=True)
        exponents += (tl.load(word, mask=there, other=0),)
    return words, exponents


@triton.jit
def _fetch(  # noqa: PLR0913
    tile, here, start, first, ring, count, pages, kept, new, entries, chosen,
    WINDOW: tl.constexpr, SPARE: tl.constexpr, KEPT_BYTES: tl.constexpr, NEW_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr, PER_ROW: tl.constexpr, VALUE: tl.constexpr, SCALE: tl.constexpr,
    LISTED: tl.constexpr, ROWS: tl.constexpr, NOPE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Returns (words of the pieces, words of exponents) of the rows of a tile."""
    lane = tile * ROWS + tl.arange(0, ROWS)
    at = here - (WINDOW - 1) + lane
    ring_rows: tl.constexpr = (WINDOW - 1 if WINDOW > 1 else 1) + SPARE
    old_row = (ring * ring_rows + at % ring_rows).to(tl.int64)
    new_row = (first + at - start).to(tl.int64)
    value = tl.where(at >= start, new + new_row * NEW_BYTES, kept + old_row * KEPT_BYTES)
    scale = value + VALUE
    there = (lane < WINDOW) & (at >= 0)
    if PER_ROW > 0:
        e, far = _listed(lane - (WINDOW + ROWS - 1) // ROWS * ROWS, count, chosen, LISTED)
        place = e // PER_ROW
        if LISTED == 0:
            place = tl.load(pages + place, mask=far, other=0)
        row, inner = entries + place.to(tl.int64) * ROW_BYTES, e % PER_ROW
        value = tl.where(far, row + inner * VALUE, value)
        scale = tl.where(far, row + PER_ROW * VALUE + inner * SCALE, scale)
        there = there | far
    return _read(value, scale, there, NOPE, GROUP, WIDTH, PIECE, PIECES)


@triton.jit
def _join(parts, N: tl.constexpr):
    """N tensors [...], N a power of two → [..., 2, 2, and so on]. The new axes are the bits of a part's
    number, the highest first."""
    if N == 1:
        whole = parts[0]
    else:
        pairs = ()
        for i in tl.static_range(N // 2):
            pairs += (tl.join(parts[i], parts[i + N // 2]),)
        whole = _join(pairs, N // 2)
    return whole


@triton.jit
def _interleave(parts, N: tl.constexpr):
    """N tensors [rows, n] → [rows, n · N]: column i of each part, then column i + 1."""
    rows: tl.constexpr = parts[0].shape[0]
    n: tl.constexpr = parts[0].shape[1]
    return _join(parts, N).reshape(rows, n * N)


@triton.jit
def _decode_bytes(words, power, OPERAND: tl.constexpr):
    """e4m3 · power. The bytes are put in order first, so that pairs of them are converted as they lie."""
    numbers = ()
    for i in tl.static_range(4):
        half = (words >> (16 * (i // 2))).to(tl.uint16)
        numbers += ((half >> (8 * (i % 2))).to(tl.uint8),)
    number = _interleave(numbers, 4).to(tl.float8e4nv, bitcast=True)
    return (number.to(tl.float32) * power).to(OPERAND)


@triton.jit
def _decode_wide(words, WIDTH: tl.constexpr, OPERAND: tl.constexpr):
    """Numbers of bf16 or fp32, from the tensors of words of `_read_piece`."""
    parts = ()
    for i in tl.static_range(WIDTH):
        if WIDTH == 2:
            low = words[i].to(tl.int16).to(tl.bfloat16, bitcast=True)
            high = (words[i] >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
            parts += (_interleave((low.to(OPERAND), high.to(OPERAND)), 2),)
        else:
            parts += (words[i].to(tl.float32, bitcast=True).to(OPERAND),)
    rows: tl.constexpr = words[0].shape[0]
    columns: tl.constexpr = words[0].shape[1]
    pairs = _interleave(parts, WIDTH).reshape(rows, columns // 2, 8 // WIDTH, WIDTH)
    return pairs.permute(0, 1, 3, 2).reshape(rows, columns * 4)


@triton.jit
def _decode(  # noqa: PLR0913
    words, exponents,
    NOPE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """The pieces of a tile in the type of the products. e4m3 · 2^(exponent - 127) is exact in bf16 too."""
    pieces = ()
    for i in tl.static_range(NOPE // PIECE):
        exponent = exponents[i * PIECE // GROUP // 4] >> (8 * (i * PIECE // GROUP % 4)) & 0xFF
        power = (exponent << 23).to(tl.float32, bitcast=True)
        pieces += (_decode_bytes(words[i], power[:, None], OPERAND),)
    for i in tl.static_range(PIECES - NOPE // PIECE):
        own = words[NOPE // PIECE + i * WIDTH : NOPE // PIECE + (i + 1) * WIDTH]
        pieces += (_decode_wide(own, WIDTH, OPERAND),)
    return pieces


@triton.jit
def _beside(pieces, N: tl.constexpr):
    """N tensors [rows, n] → [rows, N · n]: all columns of a piece, then those of the next."""
    rows: tl.constexpr = pieces[0].shape[0]
    n: tl.constexpr = pieces[0].shape[1]
    return _interleave(pieces, N).reshape(rows, n, N).permute(0, 2, 1).reshape(rows, N * n)


@triton.jit
def _products(  # noqa: PLR0913
    query, rows, tile, end, HEADS_TILE: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """query · rows, [heads, rows].

    The loop has one round. Without it the compiler finds the products that follow from this one, and has both
    groups of four warps compute all of them. It does not look past the end of a loop.
    """
    products = tl.zeros([HEADS_TILE, ROWS], tl.float32)
    for _ in tl.range(tile, tl.minimum(tile + 1, end), num_stages=1):
        for i in tl.static_range(PARTS):
            products = tl.dot(query[i], tl.trans(rows[i]), products, input_precision="ieee")
    return products


@triton.jit(do_not_specialize=["most_pages"])
def _attention(  # noqa: PLR0913
    q, out, sinks, scale, position, start, first, ring, pages, most_pages, kept, new, entries, chosen,
    HEADS: tl.constexpr, DIM: tl.constexpr, NOPE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    PIECE: tl.constexpr, WINDOW: tl.constexpr, SPARE: tl.constexpr, KEPT_BYTES: tl.constexpr,
    NEW_BYTES: tl.constexpr, ROW_BYTES: tl.constexpr, PER_ROW: tl.constexpr, VALUE: tl.constexpr,
    SCALE: tl.constexpr, LISTED: tl.constexpr, RATIO: tl.constexpr, OPERAND: tl.constexpr,
    HEADS_TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """PER_ROW 0: there are no entries. LISTED: the length of a query's list; 0: all entries. Scores are
    logarithms to base 2, `scale` includes that."""
    PIECES: tl.constexpr = DIM // PIECE
    JOINED: tl.constexpr = PIECES & -PIECES  # pieces in one operand
    PARTS: tl.constexpr = PIECES // JOINED
    WIDE: tl.constexpr = JOINED * PIECE
    groups: tl.constexpr = (HEADS + HEADS_TILE - 1) // HEADS_TILE
    token = (tl.program_id(0) // groups).to(tl.int64)
    head = tl.program_id(0) % groups * HEADS_TILE + tl.arange(0, HEADS_TILE)
    here, start, first = tl.load(position + token), tl.load(start + token), tl.load(first + token)
    ring = tl.load(ring + token)
    pages += ring.to(tl.int64) * most_pages
    chosen += token * LISTED
    count = _count(here, chosen, PER_ROW, LISTED, RATIO)
    cells = (token * HEADS + head)[:, None] * DIM + tl.arange(0, WIDE)[None, :]
    mask = (head < HEADS)[:, None]
    query = ()
    acc = ()
    for i in tl.static_range(PARTS):
        query += (tl.load(q + cells + i * WIDE, mask=mask, other=0).to(OPERAND),)
        acc += (tl.zeros([HEADS_TILE, WIDE], tl.float32),)
    # the sink is a score without a value: it comes first, so the maximum is always finite
    most = tl.load(sinks + head, mask=head < HEADS, other=0) * LOG2_E
    total = tl.full([HEADS_TILE], 1.0, tl.float32)
    begin = tl.maximum(WINDOW - 1 - here, 0) // ROWS
    end = (WINDOW + ROWS - 1) // ROWS + tl.cdiv(count, ROWS)
    words, exponents = _fetch(
        begin, here, start, first, ring, count, pages, kept, new, entries, chosen, WINDOW, SPARE,
        KEPT_BYTES, NEW_BYTES, ROW_BYTES, PER_ROW, VALUE, SCALE, LISTED, ROWS, NOPE, GROUP, WIDTH, PIECE,
        PIECES,
    )  # fmt: skip
    for tile in tl.range(begin, end, num_stages=1):
        pieces = _decode(words, exponents, NOPE, GROUP, WIDTH, PIECE, PIECES, OPERAND)
        rows = ()
        for i in tl.static_range(PARTS):
            rows += (_beside(pieces[i * JOINED : (i + 1) * JOINED], JOINED),)
        words, exponents = _fetch(
            tile + 1, here, start, first, ring, count, pages, kept, new, entries, chosen, WINDOW, SPARE,
            KEPT_BYTES, NEW_BYTES, ROW_BYTES, PER_ROW, VALUE, SCALE, LISTED, ROWS, NOPE, GROUP, WIDTH, PIECE,
            PIECES,
        )  # fmt: skip
        scores = _products(query, rows, tile, end, HEADS_TILE, ROWS, PARTS)
        # read again in the layout of scores: otherwise `there` would have to move between threads
        seen = _there(tile, here, count, chosen, WINDOW, PER_ROW, LISTED, ROWS)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        top = tl.maximum(most, tl.max(scores, 1) * scale)
        weights, fade = tl.exp2(scores * scale - top[:, None]), tl.exp2(most - top)
        total = total * fade + tl.sum(weights, 1)
        more = ()
        for i in tl.static_range(PARTS):
            part = acc[i] * fade[:, None]
            more += (tl.dot(weights.to(OPERAND), rows[i], part, input_precision="ieee"),)
        acc = more
        most = top
    for i in tl.static_range(PARTS):
        part = acc[i] / total[:, None]
        tl.store(out + cells + i * WIDE, part.to(out.dtype.element_ty), mask=mask)


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
    spare: int = 0,
) -> Tensor:
    (tokens, heads, dim), (kept, new) = q.shape, recent
    far = kept if entries is None else entries
    nope = dim - far.rope if far.encoding == "fp8_groups" else 0
    piece = nope | dim | far.group  # its lowest bit is the largest power of two that divides all of them
    piece = min(PIECE_MOST, piece & -piece)
    assert q.is_contiguous() and (chosen is None or chosen.is_contiguous())
    assert all(each[2:] == far[2:] for each in recent), "rows and entries are encoded alike"
    assert kept.per_row == new.per_row == 1 and piece >= 16, "products take 16 channels at least"
    unfit = any(at % 16 for each in (kept, new, far) for at in (each.rows.data_ptr(), each.rows.stride(0)))
    assert not unfit, "rows begin at multiples of 16 bytes (with others, Triton 3.6 reads fp8 wrongly)"
    out = torch.empty_like(q)
    tile = EXACT if q.dtype == torch.float32 else WIDE if heads >= WIDE.heads else NARROW
    if tokens:
        _attention[(tokens * triton.cdiv(heads, tile.heads),)](
            q, out, sinks, scale * LOG2_E.value, flat.position, flat.start, flat.first, flat.ring,
            flat.pages, flat.pages.stride(0), kept.rows, new.rows, far.rows,
            flat.position if chosen is None else chosen,
            HEADS=heads, DIM=dim, NOPE=nope, GROUP=far.group or 1, WIDTH=NUMBERS[far.encoding], PIECE=piece,
            WINDOW=window, SPARE=spare, KEPT_BYTES=kept.rows.stride(0), NEW_BYTES=new.rows.stride(0),
            ROW_BYTES=far.rows.stride(0),
            PER_ROW=0 if entries is None else far.per_row, VALUE=far.sizes[0], SCALE=far.sizes[-1],
            LISTED=0 if chosen is None else chosen.shape[1], RATIO=ratio,
            OPERAND=tl.float32 if tile is EXACT else tl.bfloat16,
            HEADS_TILE=tile.heads, ROWS=tile.rows, num_warps=tile.warps,
        )  # fmt: skip
    return out
