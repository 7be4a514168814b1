# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Rows of numbers that are normed, rotated, compressed and encoded into the memory of a cache (Triton).

    norm, norm_rotate    x              → x's type
    store_window         kv of a token  → the encoded row of the token
    compress_store       recent rows    → the encoded entry in its page, where a token ends one

`kernels/reference/` says what each function does, `kernels/entries.py` how entries are encoded. All numbers
between a load and a store are fp32.

The compiler orders the sum of a row by the shape of a tile, the number of warps and the width of a load. So
all of them come from the model's shapes: tiles and strides are constants of a compiled kernel, rows begin at
multiples of 16 bytes, and the address of encoded memory, which differs between layers, does not count.
Products and sums are not fused, so that two kernels round the same expression equally.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercel.kernels.entries import AMAX_LEAST, FP8_MAX, Entries, Flat
from tiercel.kernels.reference import CosSin

TILE_NUMBERS = 2048
"""Numbers of a program of `_norm_rotate`: 16 of each thread of 4 warps, so two 16-byte loads of bf16."""

WINDOW_TILE = 16
"""Rows of a compressor's window that are loaded together, by a warp each. Of 512 channels a thread then holds
16 gates and 16 values: 64 registers of the 128 that 16 warps leave it."""

UNFUSED: Any = {"enable_fp_fusion": False}
LEAST: tl.constexpr = tl.constexpr(-3.4e38)
E4M3_MOST: tl.constexpr = tl.constexpr(FP8_MAX)
AMAX: tl.constexpr = tl.constexpr(AMAX_LEAST)


def check_rows(*tensors: Tensor) -> None:
    for x in tensors:
        strides = [step for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
        unfit = any(step * x.itemsize % 16 for step in strides) or x.data_ptr() % 16 or x.stride(-1) != 1
        assert not unfit, f"rows {tuple(x.shape)}, strides {x.stride()} do not begin at multiples of 16 bytes"


# Numbers as bytes


@triton.jit
def _e4m3(x):
    """fp32 as e4m3, cut to ±448, rounded to the nearest, ties to even. Written out, because Triton's
    interpreter can not convert. Below 2^-6 it is a multiple of 2^-9, and a sum with 2^14 rounds to those."""
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), E4M3_MOST)
    bits = size.to(tl.uint32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1) - 0x3C000000) >> 20
    small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal) | sign
    return tl.where(x == x, code, 0x7F).to(tl.uint8)


@triton.jit
def _store_entries(  # noqa: PLR0913
    x,
    rows,
    entry,
    there,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    DIM: tl.constexpr,
    ENCODING: tl.constexpr,
    STRIDE: tl.constexpr,
    PER_ROW: tl.constexpr,
    VALUE: tl.constexpr,
    SCALE: tl.constexpr,
    ROPE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write x [ROWS, WIDE], of which DIM channels are real, into the entries `entry` where `there`."""
    row = rows + (entry // PER_ROW).to(tl.int64) * STRIDE
    value = (row + entry % PER_ROW * VALUE)[:, None]
    scale = row + PER_ROW * VALUE + entry % PER_ROW * SCALE
    channel = tl.arange(0, WIDE)[None, :]
    mask = there[:, None] & (channel < DIM)
    if ENCODING == "fp32":
        tl.store(value.to(tl.pointer_type(tl.float32)) + channel, x, mask=mask)
    if ENCODING == "bf16":
        tl.store(value.to(tl.pointer_type(tl.bfloat16)) + channel, x.to(tl.bfloat16), mask=mask)
    if ENCODING == "fp8_row":
        unit = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=1), AMAX), E4M3_MOST)
        tl.store(value + channel, _e4m3(tl.div_rn(x, unit[:, None])), mask=mask)
        tl.store(scale.to(tl.pointer_type(tl.float32)), unit, mask=there)
    if ENCODING == "fp8_groups":
        GROUPS: tl.constexpr = WIDE // GROUP
        USED: tl.constexpr = (DIM - ROPE) // GROUP
        most = tl.max(tl.abs(tl.reshape(x, (ROWS, GROUPS, GROUP))), axis=2)
        bits = tl.div_rn(tl.maximum(most, AMAX), E4M3_MOST).to(tl.uint32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.uint32)  # of the least power not below
        factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        factor = tl.broadcast_to(factor[:, :, None], (ROWS, GROUPS, GROUP))
        code = _e4m3(x * tl.reshape(factor, (ROWS, WIDE)))
        tl.store(value + channel, code, mask=there[:, None] & (channel < DIM - ROPE))
        turned = (value + (DIM - ROPE)).to(tl.pointer_type(tl.bfloat16)) + (channel - (DIM - ROPE))
        tl.store(turned, x.to(tl.bfloat16), mask=mask & (channel >= DIM - ROPE))
        group = tl.arange(0, GROUPS)[None, :]
        tl.store(scale[:, None] + group, exponent.to(tl.uint8), mask=there[:, None] & (group < USED))
        pad = USED + tl.arange(0, 4)[None, :]
        tl.store(scale[:, None] + pad, tl.zeros((ROWS, 4), tl.uint8), mask=there[:, None] & (pad < SCALE))


def encoding_of(entries: Entries) -> dict[str, Any]:
    rows, sizes, nope = entries.rows, entries.sizes, entries.dim - entries.rope
    assert rows.dtype == torch.uint8 and rows.stride(1) == 1, rows.dtype
    assert not any(step % 4 for step in (rows.data_ptr(), rows.stride(0), *sizes)), "words of 4 bytes"
    if entries.encoding == "fp8_groups":
        group = entries.group
        assert group and not group & group - 1, f"a group of {group} channels is no power of two"
        assert not nope % group and 0 <= sizes[1] - nope // group <= 4, "scales are padded to whole words"
    return {
        "DIM": entries.dim,
        "ENCODING": entries.encoding,
        "STRIDE": rows.stride(0),
        "PER_ROW": entries.per_row,
        "VALUE": sizes[0],
        "SCALE": sizes[1] if len(sizes) > 1 else 0,
        "ROPE": entries.rope,
        "GROUP": entries.group,
    }


# Norms and rotations


@triton.jit
def _normed(
    x, weight, eps, WIDE: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr, WEIGHTED: tl.constexpr
):
    """x [rows, WIDE] over its root mean square, times the weight of each channel."""
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
    if WEIGHTED:
        channel = tl.arange(0, WIDE)
        x = x * tl.load(weight + channel, mask=channel < DIM, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def _rotated(  # noqa: PLR0913
    x,
    cos,
    sin,
    at,
    there,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BACK: tl.constexpr,
):
    """x [ROWS, WIDE], its last channels rotated in pairs by the angles in row `at` of the tables."""
    a, b = tl.split(tl.reshape(x, (ROWS, WIDE // 2, 2)))
    pair = tl.arange(0, WIDE // 2)[None, :] - (DIM // 2 - PAIRS)
    rotates = (pair >= 0) & (pair < PAIRS)
    angle = at.to(tl.int64)[:, None] * PAIRS + pair
    c = tl.load(cos + angle, mask=there[:, None] & rotates, other=0.0)
    s = tl.load(sin + angle, mask=there[:, None] & rotates, other=0.0)
    if BACK:
        s = -s
    first, second = tl.where(rotates, a * c - b * s, a), tl.where(rotates, b * c + a * s, b)
    return tl.reshape(tl.join(first, second), (ROWS, WIDE))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows"])
def _norm_rotate(  # noqa: PLR0913
    x,
    weight,
    cos,
    sin,
    out,
    rows,
    count,
    eps,
    HEADS: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BACK: tl.constexpr,
    ENCODING: tl.constexpr,
    STRIDE: tl.constexpr,
    PER_ROW: tl.constexpr,
    VALUE: tl.constexpr,
    SCALE: tl.constexpr,
    ROPE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Process `count` rows, one for each head of each token; into `out`, or encoded into `rows`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < count
    channel = tl.arange(0, WIDE)[None, :]
    mask = there[:, None] & (channel < DIM)
    source = (row // HEADS * TOKEN_STRIDE + row % HEADS * HEAD_STRIDE)[:, None] + channel
    value = tl.load(x + source, mask=mask, other=0.0).to(tl.float32)
    value = _normed(value, weight, eps, WIDE, DIM, NORM, WEIGHTED)
    if PAIRS:
        value = _rotated(value, cos, sin, row // HEADS, there, ROWS, WIDE, DIM, PAIRS, BACK)
    if ENCODING == "none":
        tl.store(out + row[:, None] * DIM + channel, value.to(out.dtype.element_ty), mask=mask)
    else:
        _store_entries(
            value, rows, row, there,
            ROWS, WIDE, DIM, ENCODING, STRIDE, PER_ROW, VALUE, SCALE, ROPE, GROUP,
        )  # fmt: skip


NOT_ENCODED = {"ENCODING": "none", "STRIDE": 0, "PER_ROW": 1, "VALUE": 0, "SCALE": 0, "ROPE": 0, "GROUP": 1}


def _launch(x: Tensor, rotation: CosSin | None, out: Tensor, made: dict[str, Any], **how: Any) -> None:
    """x [tokens, heads, dim]."""
    tokens, heads, dim = x.shape
    check_rows(x)
    eps, weight = how.get("eps"), how.get("weight")
    cos, sin = rotation or (x, x)
    assert rotation is None or (cos.shape == sin.shape and cos.is_contiguous() and sin.is_contiguous())
    assert weight is None or (weight.is_contiguous() and len(weight) == dim)
    wide = max(triton.next_power_of_2(dim), 2)
    rows = max(TILE_NUMBERS // wide, 1)
    if not x.numel():
        return
    _norm_rotate[(triton.cdiv(tokens * heads, rows),)](
        x, x if weight is None else weight, cos, sin, out, out, tokens * heads, eps or 0.0,
        HEADS=heads, TOKEN_STRIDE=x.stride(0), HEAD_STRIDE=x.stride(1), ROWS=rows, WIDE=wide,
        PAIRS=cos.shape[1] if rotation else 0, NORM=eps is not None, WEIGHTED=weight is not None,
        BACK=how.get("back", False), **made, num_warps=4, **UNFUSED,
    )  # fmt: skip


def norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """x [tokens, dim]. `dtype`: the type of the result; None: x's."""
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    _launch(x[:, None, :], None, out, {"DIM": x.shape[1], **NOT_ENCODED}, eps=eps, weight=weight)
    return out


def norm_rotate(
    x: Tensor, rotation: CosSin, *, eps: float | None = None, weight: Tensor | None = None, back: bool = False
) -> Tensor:
    """x [tokens, heads, dim]; `rotation` [tokens, pairs], fp32."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, rotation, out, {"DIM": x.shape[2], **NOT_ENCODED}, eps=eps, weight=weight, back=back)
    return out


def store_window(kv: Tensor, rotation: CosSin, eps: float, weight: Tensor, new: Entries) -> None:
    assert new.per_row == 1 and len(new.rows) >= len(kv) and new.dim == kv.shape[1]
    _launch(kv[:, None, :], rotation, new.rows, encoding_of(new), eps=eps, weight=weight)


# Compressed entries


@triton.jit
def _gated_sum(  # noqa: PLR0913
    old,
    new,
    bias,
    at,
    begin,
    KEPT_STRIDE: tl.constexpr,
    NEW_STRIDE: tl.constexpr,
    RING_ROWS: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    DIM: tl.constexpr,
):
    """[1, WIDE]: the values of the WIDTH rows up to position `at`, weighted by the softmax of the gates.
    `old` is the ring; `new` the row of the span's first position, `begin`."""
    channel = tl.arange(0, WIDE)[None, :]
    most = tl.full((WIDE,), LEAST, tl.float32)
    total = tl.zeros((WIDE,), tl.float32)
    mixed = tl.zeros((WIDE,), tl.float32)
    for done in range(0, WIDTH, TILE):
        number = done + tl.arange(0, TILE)
        where = (at - (WIDTH - 1) + number)[:, None]
        known = (where >= 0) & (number < WIDTH)[:, None]
        kept, fresh = known & (where < begin) & (channel < DIM), known & (where >= begin) & (channel < DIM)
        # of a window two ratios wide, the older rows give their first channels, the others their last
        half = tl.where((number >= RATIO) & (WIDTH > RATIO), DIM, 0)[:, None] + channel
        ring_row = old + where % RING_ROWS * KEPT_STRIDE + half
        new_row = new + (where - begin).to(tl.int64) * NEW_STRIDE + half
        value, gate = (
            tl.load(ring_row, mask=kept, other=0.0),
            tl.load(ring_row + CHANNELS, mask=kept, other=0.0),
        )
        value = tl.where(fresh, tl.load(new_row, mask=fresh, other=0.0), value)
        gate = tl.where(fresh, tl.load(new_row + CHANNELS, mask=fresh, other=0.0), gate)
        shift = bias + (number % RATIO)[:, None] * CHANNELS + half
        gate += tl.load(shift, mask=known & (channel < DIM), other=0.0)
        gate = tl.where(known, gate, float("-inf"))
        top = tl.maximum(most, tl.max(gate, axis=0))
        share, fade = tl.exp(gate - top[None, :]), tl.exp(most - top)
        total = total * fade + tl.sum(share, axis=0)
        mixed = mixed * fade + tl.sum(share * value, axis=0)
        most = top
    return tl.div_rn(mixed, total)[None, :]


@triton.jit(
    do_not_specialize_on_alignment=["position", "start", "first", "ring", "pages", "write_from", "rows"]
)
def _compress(  # noqa: PLR0913
    kept,
    new,
    bias,
    weight,
    cos,
    sin,
    position,
    start,
    first,
    ring,
    pages,
    write_from,
    rows,
    eps,
    KEPT_STRIDE: tl.constexpr,
    NEW_STRIDE: tl.constexpr,
    PAGES_STRIDE: tl.constexpr,
    RING_ROWS: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    DIM: tl.constexpr,
    ENCODING: tl.constexpr,
    STRIDE: tl.constexpr,
    PER_ROW: tl.constexpr,
    VALUE: tl.constexpr,
    SCALE: tl.constexpr,
    ROPE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program for each token: the entry that ends with it, if one does."""
    token = tl.program_id(0)
    at = tl.load(position + token)
    if (at < 0) | ((at + 1) % RATIO != 0) | (at < tl.load(write_from + token)):
        return
    begin, own_ring = tl.load(start + token), tl.load(ring + token).to(tl.int64)
    old = kept + own_ring * RING_ROWS * KEPT_STRIDE
    own = new + tl.load(first + token).to(tl.int64) * NEW_STRIDE
    x = _gated_sum(
        old, own, bias, at, begin,
        KEPT_STRIDE, NEW_STRIDE, RING_ROWS, RATIO, WIDTH, CHANNELS, TILE, WIDE, DIM,
    )  # fmt: skip
    entry, one = at // RATIO, tl.arange(0, 1)
    x = _normed(x, weight, eps, WIDE, DIM, True, True)
    x = _rotated(x, cos, sin, entry * RATIO + one, one == 0, 1, WIDE, DIM, PAIRS, False)
    place = tl.load(pages + own_ring * PAGES_STRIDE + entry // PER_ROW).to(tl.int64)
    _store_entries(
        x, rows, place * PER_ROW + entry % PER_ROW + one, one == 0,
        1, WIDE, DIM, ENCODING, STRIDE, PER_ROW, VALUE, SCALE, ROPE, GROUP,
    )  # fmt: skip


def compress_store(  # noqa: PLR0913
    recent: tuple[Tensor, Tensor],
    bias: Tensor,
    weight: Tensor,
    eps: float,
    table: CosSin,
    pages: Entries,
    flat: Flat,
    write_from: Tensor,
    ring_rows: int,
) -> None:
    kept, new = recent
    (ratio, channels), dim, (cos, sin) = bias.shape, len(weight), table
    width, wide = ratio * channels // dim, max(triton.next_power_of_2(dim), 2)
    tile = min(WINDOW_TILE, triton.next_power_of_2(width))
    check_rows(kept, new, bias)
    plain = all(each.is_contiguous() for each in (bias, weight, cos, sin))
    assert plain and kept.dtype == new.dtype == bias.dtype == torch.float32
    assert kept.shape[1] == new.shape[1] == 2 * channels and pages.dim == dim and flat.pages.stride(1) == 1
    assert width <= ring_rows + ratio, "the window of an entry reaches back further than the ring"
    if not len(new):
        return
    _compress[(len(flat.position),)](
        kept, new, bias, weight, cos, sin, *flat, write_from, pages.rows, eps,
        KEPT_STRIDE=kept.stride(0), NEW_STRIDE=new.stride(0), PAGES_STRIDE=flat.pages.stride(0),
        RING_ROWS=ring_rows, RATIO=ratio, WIDTH=width, CHANNELS=channels, TILE=tile, WIDE=wide,
        PAIRS=cos.shape[1], **encoding_of(pages), num_warps=tile, **UNFUSED,
    )  # fmt: skip
