# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Hyper-connections: how a site reads the n streams of a token and writes its output into them (Triton).

A read is two kernels, for one token as for thousands:

    _project    x [tokens, n, d]  ┬ channels 0 … 31 of all streams    → products with fn, and x²
                                  ├ channels 32 … 63                  → the same       one program for each
                                  └ …                                                  64 tokens of a segment
    _read       sums the segments; then some programs collapse and norm the streams of a token each, and
                others, at the same time, balance the mixing matrices of four tokens each

`fn` is most of what a read loads, and segments load it in parallel. A token's sums run over the segments of
the model's shape, so they do not depend on the call. `_project` can write the streams before it reads them,
which saves a pass over them: `write_read`.

With bf16 streams the products run on tensor cores: fn is cut into three bf16 numbers that add up to it, so
every product is exact. With fp32 streams they are fp32. The plain twins are in `kernels/reference/hyper.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercel.kernels.cuda.matrix import Weight
from tiercel.kernels.cuda.rows import UNFUSED, check_rows
from tiercel.kernels.reference.hyper import Site

TOKENS = 64
"""Tokens of a program of `_project`: the least height of Hopper's products (wgmma). Few tokens fill it with
zeros, which costs nothing beside loading fn."""

CHANNELS = 32
"""Channels of a segment, of each stream. V4-Flash has 128 segments: almost every multiprocessor of an H200
loads 12 KB of fn. Twice as many would spill registers in `write_read`."""

MIXED_TOKENS = 4
"""Tokens whose mixing matrices one program balances: 40 dependent sums take as long for four as for one."""

WRITE_CHANNELS = 1024
"""Channels of a program of `_write`: 8 for each thread of 4 warps, a 16-byte load of bf16."""


@triton.jit
def _written(  # noqa: PLR0913
    x, y, place, mix, token, tokens, channel, K: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr
):
    """Stream K after the site's output y, of the tokens [t] and channels [c]."""
    known, at = token < tokens, token[:, None] * DIM + channel[None, :]
    there = known[:, None] & (channel < DIM)[None, :]
    weight = tl.load(place + token * N + K, mask=known, other=0.0)
    made = weight[:, None] * tl.load(y + at, mask=there, other=0.0).to(tl.float32)
    for j in tl.static_range(N):
        weight = tl.load(mix + (token * N + j) * N + K, mask=known, other=0.0)
        stream = tl.load(x + (token * N + j)[:, None] * DIM + channel[None, :], mask=there, other=0.0)
        made += weight[:, None] * stream.to(tl.float32)
    return made


@triton.jit(do_not_specialize=["tokens"])
def _write(  # noqa: PLR0913
    x, y, place, mix, out, tokens, N: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    for k in tl.static_range(N):
        made = _written(x, y, place, mix, token, tokens, channel, k, N, DIM)
        at = (token * N + k)[:, None] * DIM + channel[None, :]
        tl.store(out + at, made.to(out.dtype.element_ty), mask=(channel < DIM)[None, :])


@triton.jit
def _times(x, weight, total):
    """total + x · weightᵀ, where weight is fp32. Beside bf16 it is cut into three numbers of 8 bits each."""
    if x.dtype == tl.bfloat16:
        for _ in tl.static_range(3):
            part = (weight.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
            total = tl.dot(x, tl.trans(part.to(tl.bfloat16)), total)
            weight -= part
    else:
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["tokens"])
def _project(  # noqa: PLR0913
    x,
    y,
    place,
    mix,
    fn,
    out,
    parts,
    tokens,
    N: tl.constexpr,
    DIM: tl.constexpr,
    OUTS: tl.constexpr,
    WIDE_OUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WRITE: tl.constexpr,
):
    """parts [tokens, segments, WIDE_OUTS]: products with the rows of fn, then the sum of squares."""
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    segment = tl.program_id(0)
    channel = segment * CHANNELS + tl.arange(0, CHANNELS)
    number = tl.arange(0, WIDE_OUTS)
    there = (token < tokens)[:, None] & (channel < DIM)[None, :]
    asked = (number < OUTS)[:, None] & (channel < DIM)[None, :]
    total = tl.zeros((TOKENS, WIDE_OUTS), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for k in tl.static_range(N):
        at = (token * N + k)[:, None] * DIM + channel[None, :]
        if WRITE:
            made = _written(x, y, place, mix, token, tokens, channel, k, N, DIM).to(out.dtype.element_ty)
            tl.store(out + at, made, mask=there)
        else:
            made = tl.load(x + at, mask=there, other=0.0)
        value = made.to(tl.float32)
        squares += tl.sum(value * value, axis=1)
        row = (number * N + k)[:, None] * DIM
        weight = tl.load(fn + row + channel[None, :], mask=asked, other=0.0)
        total = _times(made, weight, total)
    total = tl.where((number == OUTS)[None, :], squares[:, None], total)
    at = (token * tl.num_programs(0) + segment)[:, None] * WIDE_OUTS + number[None, :]
    tl.store(parts + at, total, mask=(token < tokens)[:, None])


@triton.jit
def _collapse(  # noqa: PLR0913
    x,
    parts,
    scale,
    base,
    weight,
    seen,
    token,
    hc_eps,
    eps,
    N: tl.constexpr,
    DIM: tl.constexpr,
    OUTS: tl.constexpr,
    WIDE_OUTS: tl.constexpr,
    WIDE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WIDE_SEGMENTS: tl.constexpr,
    SCALE_STEP: tl.constexpr,
):
    """The streams of one token as one, normed."""
    segment, number = tl.arange(0, WIDE_SEGMENTS)[:, None], tl.arange(0, WIDE_OUTS)
    row = parts + (token * SEGMENTS + segment) * WIDE_OUTS
    total = tl.sum(tl.load(row + number[None, :], mask=segment < SEGMENTS, other=0.0), axis=0)
    root = tl.rsqrt(tl.sum(tl.where(number == OUTS, total, 0.0)) / (N * DIM) + eps)
    factor = tl.load(scale + number * SCALE_STEP, mask=number < N, other=0.0)
    share = tl.sigmoid(total * root * factor + tl.load(base + number, mask=number < N, other=0.0)) + hc_eps
    channel = tl.arange(0, WIDE)
    value = tl.zeros((WIDE,), tl.float32)
    for j in tl.static_range(N):
        stream = tl.load(x + (token * N + j) * DIM + channel, mask=channel < DIM, other=0.0)
        value += tl.sum(tl.where(number == j, share, 0.0)) * stream.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value) / DIM + eps)
    value = value * tl.load(weight + channel, mask=channel < DIM, other=0.0).to(tl.float32)
    tl.store(seen + token * DIM + channel, value.to(seen.dtype.element_ty), mask=channel < DIM)


@triton.jit
def _balance(  # noqa: PLR0913
    parts,
    scale,
    base,
    place,
    mix,
    token,
    tokens,
    hc_eps,
    eps,
    N: tl.constexpr,
    DIM: tl.constexpr,
    OUTS: tl.constexpr,
    WIDE_OUTS: tl.constexpr,
    WIDE_N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WIDE_SEGMENTS: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    """The weights of the output for each stream, and the mixing matrices, of the tokens [t]."""
    segment = tl.arange(0, WIDE_SEGMENTS)[None, :]
    at = (token[:, None] * SEGMENTS + segment) * WIDE_OUTS
    known = (token < tokens)[:, None] & (segment < SEGMENTS)
    squares = tl.sum(tl.load(parts + at + OUTS, mask=known, other=0.0), axis=1)
    root = tl.rsqrt(squares / (N * DIM) + eps)
    number = tl.arange(0, WIDE_N)
    one, real = number[None, :], (number < N)[None, :]
    total = tl.sum(
        tl.load(parts + at[:, :, None] + N + number, mask=known[:, :, None] & real, other=0.0), axis=1
    )
    factor = tl.load(scale + N + one, mask=real, other=0.0)
    shift = tl.load(base + N + one, mask=real, other=0.0)
    shared = 2 * tl.sigmoid(total * root[:, None] * factor + shift)
    tl.store(place + token[:, None] * N + one, shared, mask=(token < tokens)[:, None] & real)
    cell = number[:, None] * N + number[None, :]
    real = (number < N)[:, None] & (number < N)[None, :]
    each = known[:, :, None, None] & real
    logits = tl.load(parts + at[:, :, None, None] + 2 * N + cell, mask=each, other=0.0)
    factor = tl.load(scale + 2 * N + cell, mask=real, other=0.0)
    logits = tl.sum(logits, axis=1) * root[:, None, None] * factor
    logits += tl.load(base + 2 * N + cell, mask=real, other=0.0)
    logits = tl.where((number < N), logits, float("-inf"))
    m = tl.exp(logits - tl.max(logits, axis=2, keep_dims=True))
    m = tl.where(real, m / tl.sum(m, axis=2, keep_dims=True) + hc_eps, 0.0)
    m = m * (1 / (tl.sum(m, axis=1, keep_dims=True) + hc_eps))
    for _ in range(ITERATIONS - 1):
        m = m * (1 / (tl.sum(m, axis=2, keep_dims=True) + hc_eps))
        m = m * (1 / (tl.sum(m, axis=1, keep_dims=True) + hc_eps))
    tl.store(mix + token[:, None, None] * N * N + cell, m, mask=(token < tokens)[:, None, None] & real)


@triton.jit(do_not_specialize=["tokens"])
def _read(  # noqa: PLR0913
    x,
    parts,
    scale,
    base,
    weight,
    seen,
    place,
    mix,
    tokens,
    hc_eps,
    eps,
    N: tl.constexpr,
    DIM: tl.constexpr,
    OUTS: tl.constexpr,
    WIDE_OUTS: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WIDE_SEGMENTS: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    MIXED: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    """MIXED: how many tokens a program balances. These programs come first; 0: there are none."""
    program = tl.program_id(0).to(tl.int64)
    balancing = 0
    if MIXED:
        balancing = tl.cdiv(tokens, MIXED)
        if program < balancing:
            _balance(
                parts, scale, base, place, mix, program * MIXED + tl.arange(0, MIXED), tokens, hc_eps, eps,
                N, DIM, OUTS, WIDE_OUTS, WIDE_N, SEGMENTS, WIDE_SEGMENTS, ITERATIONS,
            )  # fmt: skip
    if program >= balancing:
        _collapse(
            x, parts, scale, base, weight, seen, program - balancing, hc_eps, eps,
            N, DIM, OUTS, WIDE_OUTS, WIDE, SEGMENTS, WIDE_SEGMENTS, SCALE_STEP,
        )  # fmt: skip


def read(x: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, n, d] → the site's input, normed [tokens, d], in x's type; fp32: the weights of its output
    for each stream [tokens, n], the matrix that mixes the streams [tokens, n, n]. `site.fn` is fp32, packed.
    """
    return _finish(x, _parts(x, site), site)


def write(x: Tensor, y: Tensor, place: Tensor, mix: Tensor) -> Tensor:
    """The streams after the site's output y [tokens, d]."""
    (tokens, n, dim), out = x.shape, torch.empty_like(x)
    _check_written(x, y, place, mix)
    tile = min(WRITE_CHANNELS, triton.next_power_of_2(dim))
    if tokens:
        _write[(tokens, triton.cdiv(dim, tile))](
            x, y, place, mix, out, tokens, N=n, DIM=dim, TILE=tile, num_warps=4, **UNFUSED
        )
    return out


def write_read(
    x: Tensor, y: Tensor, place: Tensor, mix: Tensor, site: Site
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The streams after y, as `write` makes them, and what `read` returns for the next site."""
    out = torch.empty_like(x)
    _check_written(x, y, place, mix)
    return out, *_finish(out, _parts(x, site, (y, place, mix, out)), site)


def head(x: Tensor, site: Site) -> Tensor:
    """Collapses the streams [tokens, n, d] to [tokens, d] and norms them: the last step of a model."""
    return _finish(x, _parts(x, site), site)[0]


def _check_written(x: Tensor, y: Tensor, place: Tensor, mix: Tensor) -> None:
    tokens, n, dim = x.shape
    assert y.shape == (tokens, dim) and place.shape == (tokens, n) and mix.shape == (tokens, n, n)
    assert all(each.is_contiguous() for each in (x, y, place, mix)), "rows lie together"
    assert place.dtype == mix.dtype == torch.float32
    check_rows(x, y)


def _wide(site: Site) -> int:
    """How many sums a token has: the rows of fn and the squares. Tensor cores need 16 columns or more."""
    return max(int(triton.next_power_of_2(len(site.base) + 1)), 16)


def _parts(x: Tensor, site: Site, written: tuple[Tensor, Tensor, Tensor, Tensor] | None = None) -> Tensor:
    """The sums of each segment. `written`: y, place, mix, and where the written streams go."""
    tokens, n, dim = x.shape
    weight: Weight = site.fn
    fn, wide, segments = weight.data, _wide(site), triton.cdiv(dim, CHANNELS)
    assert fn.dtype == torch.float32 and fn.shape == (len(site.base), n * dim), (fn.dtype, fn.shape)
    assert x.is_contiguous()
    check_rows(x, fn)
    parts = torch.empty(tokens, segments, wide, dtype=torch.float32, device=x.device)
    y, place, mix, out = written or (x, x, x, x)
    if tokens:
        _project[(segments, triton.cdiv(tokens, TOKENS))](
            x, y, place, mix, fn, out, parts, tokens, N=n, DIM=dim, OUTS=len(fn), WIDE_OUTS=wide,
            TOKENS=TOKENS, CHANNELS=CHANNELS, WRITE=written is not None, num_warps=4, **UNFUSED,
        )  # fmt: skip
    return parts


def _finish(x: Tensor, parts: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
    tokens, n, dim = x.shape
    outs = len(site.base)
    mixed = MIXED_TOKENS if outs > n else 0
    assert outs == (n * (n + 2) if mixed else n) and site.streams == n
    assert len(site.scale) == (outs if mixed else 1) and len(site.weight) == dim
    seen = torch.empty(tokens, dim, dtype=x.dtype, device=x.device)
    place = torch.empty(tokens, n, dtype=torch.float32, device=x.device)
    mix = torch.empty(tokens, n, n, dtype=torch.float32, device=x.device)
    if tokens:
        _read[(tokens + (triton.cdiv(tokens, mixed) if mixed else 0),)](
            x, parts, site.scale, site.base, site.weight, seen, place, mix, tokens, site.hc_eps, site.eps,
            N=n, DIM=dim, OUTS=outs, WIDE_OUTS=_wide(site), WIDE=triton.next_power_of_2(dim),
            WIDE_N=triton.next_power_of_2(n), SEGMENTS=parts.shape[1],
            WIDE_SEGMENTS=triton.next_power_of_2(parts.shape[1]),
            SCALE_STEP=int(len(site.scale) > 1), MIXED=mixed, ITERATIONS=site.iterations,
            num_warps=8, **UNFUSED,
        )  # fmt: skip
    return seen, place, mix
