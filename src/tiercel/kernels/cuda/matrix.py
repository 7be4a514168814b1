# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Matrix products on CUDA, in Triton: a token's result has the same bits whatever is computed with it.

A product y = W · x is summed over k in one order, which depends on the shape of W alone. k is cut into
segments. Inside a segment the terms are added in ascending k, in fp32; the segments are added in order:

    k        0 ──────────── 1024 ─────────── 2048 ─────────── 3072 ─────────── 4096
    segments      s0               s1               s2               s3
    y        (((0 + s0) + s1) + s2) + s3                     one segment: y = s0

Two ways to launch this give the same bits:

    many rows    a program computes a tile of y: all segments, one after the other; it adds each at its end
    few rows     a program computes one segment of a tile of y; `_add` adds the segments in order. Weights are
                 read by enough programs at once, even those of a small matrix

Rows of W are the rows of the tensor core's tile, tokens its columns. So a tile may have few tokens and is
still computed by the same instruction (wgmma, 16 of k at a time) in the same order of k.

Operands of a product have the dtype of x, sums are fp32. A weight of another dtype is converted, rounded
once. An fp8 weight is number · scale, computed in fp32 and rounded to the dtype of x: the same numbers as if
the matrix had been dequantized when it was loaded. (A power of two as scale makes this exact.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SCALE_TILE: tl.constexpr = tl.constexpr(128)
"""Rows and columns of a weight under one scale, as V4's checkpoints have them."""

SEGMENT_ROWS, SEGMENT_PROGRAMS, SEGMENT_LEAST = 128, 128, 512
"""How segments are counted: there are enough for 128 programs of 128 rows of W each, one for almost every
multiprocessor, but none is shorter than 512. They are the order of sums: another value gives other bits."""

SMALL_ROWS = 256
"""Up to this many tokens, segments are computed by programs of their own. Above, there are enough tiles."""

GROUP: tl.constexpr = tl.constexpr(8)
"""Tiles of W that are walked together: 8 · 128 rows of W and the tokens beside them stay in the L2 cache."""


class Tile(NamedTuple):
    """The shape of one program's work: n rows of W times t tokens, k at a time."""

    n: int
    t: int
    k: int
    warps: int
    stages: int


FP32 = Tile(128, 64, 64, 8, 2)
"""Without tensor cores: the largest tile whose operands fit the registers."""
FEW, FEW_FP8 = Tile(128, 16, 64, 4, 4), Tile(128, 16, 128, 4, 4)
"""Up to 16 tokens weights stream: 16 KB of them in each stage, and three programs fit a multiprocessor. (fp8
takes 128 rows of W, not 64: a fifth fewer instructions per weight, and instructions are the limit.)"""
SOME = Tile(128, 64, 64, 4, 4)
"""Up to `SMALL_ROWS`: x is read once per 128 rows of W, or it would take more of the L2 cache than W does."""
MANY = Tile(128, 256, 64, 8, 4)
"""128 registers per thread for sums, 192 KB of shared memory: the most arithmetic per byte that fits."""
MANY_SEGMENTS = Tile(128, 128, 64, 8, 4)
"""Segments need two sets of sums, so a tile has half the tokens."""

ADD_TILE = 1024


class Weight(NamedTuple):
    """A matrix [n, k], or m of them [m, n, k], as it is on the device: fp32, bf16 or fp8 (e4m3)."""

    data: Tensor
    scale: Tensor | None
    """Scales of an fp8 matrix: fp32, one for 128 x 128 numbers; the last ones may have fewer."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape


def pack(weight: Tensor, scale: Tensor | None = None) -> Weight:
    """A weight [n, k] for `linear`. Scales (fp32 or e8m0) are kept as fp32."""
    if scale is not None:
        side = SCALE_TILE.value
        expected = (*weight.shape[:-2], *(triton.cdiv(size, side) for size in weight.shape[-2:]))
        if tuple(scale.shape) != expected:
            raise ValueError(f"a weight {list(weight.shape)} has scales {list(scale.shape)}")
        scale = scale.float().contiguous()
    return Weight(weight.contiguous(), scale)


def pack_all(weights: Tensor, scale: Tensor | None = None) -> Weight:
    """m matrices of one shape, [m, n, k]."""
    return pack(weights, scale)


def linear(x: Tensor, weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """x [tokens, k] · weightᵀ, as `dtype`; None: the dtype of x."""
    return _multiply(x, weight, (1, *weight.shape), dtype or x.dtype)


def linear_groups(x: Tensor, weights: Weight) -> Tensor:
    """x [tokens, m · k]: part i of m is multiplied by matrix i; the results are concatenated."""
    return _multiply(x, weights, weights.shape, x.dtype)


def segments_of(m: int, n: int, k: int) -> tuple[int, int]:
    """(how many segments the sums of m matrices [n, k] have, their length). The last one may be shorter."""
    programs, count = m * triton.cdiv(n, SEGMENT_ROWS), 1
    while programs * count < SEGMENT_PROGRAMS and k >= 2 * count * SEGMENT_LEAST:
        count *= 2
    length = triton.cdiv(triton.cdiv(k, count), SCALE_TILE.value) * SCALE_TILE.value
    return triton.cdiv(k, length), length


def _multiply(x: Tensor, weight: Weight, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    rows, (m, n, k) = x.shape[0], shape
    assert x.shape[1] == m * k and x.stride(1) == 1
    y = torch.empty(rows, m * n, dtype=dtype, device=x.device)
    if not rows:
        return y
    count, length = segments_of(m, n, k)
    split = count > 1 and rows <= SMALL_ROWS
    tile = _tile_for(rows, x.dtype, weight.data.dtype, count)
    parts = torch.empty(count, rows, m * n, dtype=torch.float32, device=x.device) if split else y
    grid = triton.cdiv(n, tile.n) * triton.cdiv(rows, tile.t), m * (count if split else 1)
    _linear[grid](
        x, x.stride(0), weight.data, weight.scale, parts, rows, n,
        K=k, M=m, SEGMENT=length, SEGMENTS=count, SPLIT=split,
        N_TILE=tile.n, T_TILE=tile.t, K_TILE=tile.k, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if split:
        _add[(triton.cdiv(y.numel(), ADD_TILE),)](parts, y, y.numel(), SEGMENTS=count, TILE=ADD_TILE)
    return y


def _tile_for(rows: int, dtype: torch.dtype, stored: torch.dtype, segments: int) -> Tile:
    if dtype == torch.float32:
        return FP32
    if rows <= SMALL_ROWS:
        few = FEW_FP8 if stored == torch.float8_e4m3fn else FEW
        return few if rows <= few.t else SOME
    return MANY if segments == 1 else MANY_SEGMENTS


@triton.jit
def weight_tile(rows, scales, k, K: tl.constexpr, K_TILE: tl.constexpr, EVEN: tl.constexpr, DTYPE):
    """Columns [k, k + K_TILE) of rows of W as operands. Columns from K on are 0; EVEN: there are none.

    `rows` and `scales` (or None) point to the first column of each row. Rows share scales; but if each loads
    its own, Triton reads weights from shared memory in the layout of the tensor core. With one scalar it
    would write them there again as bf16.
    """
    column = k + tl.arange(0, K_TILE)[None, :]
    at = rows[:, None] + column
    weight = tl.load(at) if EVEN else tl.load(at, mask=column < K, other=0.0)
    if scales is not None:
        # Behind the last column there is no scale, and what lies there may be NaN: 0 times NaN is not 0.
        of = k // SCALE_TILE if EVEN else tl.minimum(k, K - 1) // SCALE_TILE
        weight = weight.to(tl.float32) * tl.load(scales[:, None] + of)
    return weight.to(DTYPE)


@triton.jit
def token_tile(rows, k, K: tl.constexpr, K_TILE: tl.constexpr, EVEN: tl.constexpr):
    """Columns [k, k + K_TILE) of rows of x, transposed."""
    column = k + tl.arange(0, K_TILE)[None, :]
    at = rows[:, None] + column
    return tl.trans(tl.load(at) if EVEN else tl.load(at, mask=column < K, other=0.0))


@triton.jit
def first_scale(matrix, n, row, K: tl.constexpr):
    """Where the scales of rows of one of several matrices [n, K] begin."""
    return (matrix * tl.cdiv(n, SCALE_TILE) + row // SCALE_TILE) * tl.cdiv(K, SCALE_TILE)


@triton.jit(do_not_specialize=["rows"])
def _linear(  # noqa: PLR0913
    x, x_step, data, scale, y, rows, n,
    K: tl.constexpr, M: tl.constexpr, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, SPLIT: tl.constexpr,
    N_TILE: tl.constexpr, T_TILE: tl.constexpr, K_TILE: tl.constexpr,
):  # fmt: skip
    """One tile of y [rows, m · n]. SPLIT: one segment of it; y is [segments, rows, m · n]."""
    STEPS: tl.constexpr = SEGMENT // K_TILE
    EVEN: tl.constexpr = K == SEGMENT * SEGMENTS
    at, n_tiles, t_tiles = tl.program_id(0), tl.cdiv(n, N_TILE), tl.cdiv(rows, T_TILE)
    n_tile, t_tile = tl.swizzle2d(at // t_tiles, at % t_tiles, n_tiles, t_tiles, GROUP)
    matrix, segment = (tl.program_id(1) % M).to(tl.int64), tl.program_id(1) // M
    out = n_tile * N_TILE + tl.arange(0, N_TILE)
    token = (t_tile * T_TILE + tl.arange(0, T_TILE)).to(tl.int64)
    # Beyond the last row, the last row is computed again and not stored: loads need no mask.
    row = tl.minimum(out, n - 1)
    w_rows = data + (matrix * n + row) * K
    s_rows = scale + first_scale(matrix, n, row, K) if scale is not None else None
    x_rows = x + tl.minimum(token, rows - 1) * x_step + matrix * K
    first = segment * SEGMENT if SPLIT else 0
    total = tl.zeros([N_TILE, T_TILE], dtype=tl.float32)
    # Two loops, and not one with a condition: Triton 3.6 would read sums that are still being computed.
    for part in range(1 if SPLIT else SEGMENTS):
        sums = tl.zeros([N_TILE, T_TILE], dtype=tl.float32)
        for step in range(STEPS):
            k = first + part * SEGMENT + step * K_TILE
            weight = weight_tile(w_rows, s_rows, k, K, K_TILE, EVEN, x.dtype.element_ty)
            sums = tl.dot(weight, token_tile(x_rows, k, K, K_TILE, EVEN), sums, input_precision="ieee")
        if SEGMENTS == 1 or SPLIT:
            total = sums
        else:
            total += sums
    if SPLIT:
        y += segment.to(tl.int64) * rows * M * n
    to = y + token[None, :] * (M * n) + matrix * n + out[:, None]
    tl.store(to, total.to(y.dtype.element_ty), mask=(out < n)[:, None] & (token < rows)[None, :])


@triton.jit
def _add(parts, y, size, SEGMENTS: tl.constexpr, TILE: tl.constexpr):
    """The segments [segments, size], added in order."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], dtype=tl.float32)
    for segment in tl.static_range(SEGMENTS):
        total += tl.load(parts + segment * size + at, mask=at < size, other=0.0)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=at < size)
