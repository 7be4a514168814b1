# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Experts on CUDA, in Triton: routing, and the weighted sum of the outputs of the chosen experts.

A choice is one (token, expert) pair. A token has topk choices and one more, the shared expert, which is the
last of the matrices: choice c of token t has the number t · (topk + 1) + c. The number of tokens of an expert
is known only on the device, so the launches depend on shapes only:

    _order    sorts the numbers of choices by expert, and cuts each expert's share into tiles:

                  choices   │ 3 5 8 … 44 │ 51 │ 0 6 │ 2 9 13 … │ no more  │          │
                  expert    │ 0          │ 0  │ 2   │ 4        │ -1       │ -1       │

              There are programs for the most tiles that there can be. Those without choices end at once
    _ask      the first product, gate and up with swiglu: one row for each sorted choice
    _ask      the second product: one row for each choice, at the choice's own number
    _add      adds a token's rows in the order of its choices, the shared expert's last

Sums over k go in ascending order, as in `matrix.py` with one segment. So a token's result does not depend on
the tiles that its choices are in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercel.kernels.cuda.matrix import Tile, Weight, first_scale, token_tile, weight_tile

FP32 = Tile(64, 32, 64, 8, 2)
"""No tensor cores. A program multiplies two tiles of n rows: n is half of that in `matrix.py`."""
FEW, FEW_FP8 = Tile(64, 16, 64, 4, 4), Tile(64, 16, 128, 4, 4)
"""For few tokens: weights stream, as in `matrix.py`."""
SOME = Tile(64, 64, 64, 4, 4)
"""Two or three programs fit a multiprocessor. (With 9 experts, larger tiles give 1.1 programs for each.)"""
MANY = Tile(128, 128, 64, 8, 4)
"""Two tiles of sums take 128 registers per thread, and bf16 weights 192 KB of shared memory."""

FEW_MOST, SOME_MOST = 8, 64
"""Choices per expert, on the average of all experts, up to which each of these tiles is used."""

CHOICES_AT_ONCE = 2048
"""Each program of `_order` reads all choices, this many at once: 65,536 in 32 steps."""
ADD_TILE = 1024


def route(  # noqa: PLR0913
    logits: Tensor,
    chosen: Tensor | None,
    bias: Tensor | None,
    k: int,
    factor: float,
    position: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(experts [tokens, k], weights fp32): the given `chosen` experts, or the k best by score + bias.

    The best are in order: the higher score first, of equals the lower number. A given expert -1 is none, and
    its weight is 0. Where scores are NaN, the choice is any k experts and the weights are NaN. A token whose
    position is below 0 is padding: its experts are none, also in the tensor of given ones.
    """
    (tokens, experts), best = logits.shape, chosen is None
    assert logits.stride(1) == 1 and k <= experts
    if chosen is None:
        assert bias is not None and bias.is_contiguous()
        chosen = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    assert chosen.is_contiguous()
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    if tokens:
        _route[(tokens,)](
            logits, logits.stride(0), bias if best else None, chosen, weights, factor, position,
            EXPERTS=experts, K=k, WIDTH=triton.next_power_of_2(experts), K_WIDTH=triton.next_power_of_2(k),
            num_warps=1,
        )  # fmt: skip
    return chosen, weights


def experts(  # noqa: PLR0913
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    matrices: tuple[Weight, Weight],
    limit: float,
    *,
    shared: bool = True,
) -> Tensor:
    """The weighted sum of the chosen experts, plus that of the shared one, if there is one: it is the last of
    the matrices.

    `matrices`: [experts, 2 · inner, d] and [experts, d, inner]. An expert -1 is none.
    """
    gate_up, down = matrices
    (tokens, topk), (count, d, inner) = chosen.shape, down.shape
    assert x.shape == (tokens, d) and x.stride(1) == 1 and gate_up.shape == (count, 2 * inner, d)
    assert weights.shape == chosen.shape and chosen.is_contiguous() and weights.is_contiguous()
    y = torch.empty(tokens, d, dtype=x.dtype, device=x.device)
    if tokens:
        tile = _tile_for(tokens, tokens * topk / (count - shared), x.dtype, gate_up.data.dtype)
        order = _ordered(chosen, count, tile, shared=shared)
        answers = _asked(_asked(x, gate_up, order, limit), down, order)
        _add[tokens, triton.cdiv(d, ADD_TILE)](
            answers, chosen, weights, y, d, TOPK=topk, SHARED=int(shared), TILE=ADD_TILE
        )
    return y


def _tile_for(tokens: int, choices: float, dtype: torch.dtype, stored: torch.dtype) -> Tile:
    """The tile for the average number of choices per expert, which is at most the number of tokens."""
    if dtype == torch.float32:
        return FP32
    if choices <= FEW_MOST or tokens <= FEW.t:
        return FEW_FP8 if stored == torch.float8_e4m3fn else FEW
    return SOME if choices <= SOME_MOST else MANY


class Order(NamedTuple):
    """The choices of a call, sorted by expert."""

    numbers: Tensor
    tiles: Tensor
    """[3, most]: the expert of a tile, its first place in `numbers`, the end of its expert's share."""
    tile: Tile
    per_token: int


def _ordered(chosen: Tensor, experts: int, tile: Tile, *, shared: bool) -> Order:
    (tokens, topk), device = chosen.shape, chosen.device
    choices = tokens * (topk + shared)
    most = min(choices, choices // tile.t + experts)
    numbers = torch.empty(choices, dtype=torch.int32, device=device)
    tiles = torch.empty(3, most, dtype=torch.int32, device=device)
    _order[(experts,)](
        chosen, numbers, tiles, choices, most, TOPK=topk, SHARED=int(shared), EXPERTS=experts,
        BINS=triton.next_power_of_2(experts + 1), T_TILE=tile.t, WIDTH=CHOICES_AT_ONCE, num_warps=8,
    )  # fmt: skip
    return Order(numbers, tiles, tile, topk + shared)


def _asked(x: Tensor, weight: Weight, order: Order, limit: float | None = None) -> Tensor:
    """One product of all choices with their experts' matrices [n, k]. With a limit it is the first one: x has
    a row for each token, and the matrix is gate and up."""
    (_, n, k), tile, most = weight.shape, order.tile, order.tiles.shape[1]
    gated = limit is not None
    if gated:
        n //= 2
    y = torch.empty(len(order.numbers), n, dtype=x.dtype, device=x.device)
    _ask[triton.cdiv(n, tile.n if gated else 2 * tile.n), most](
        x, x.stride(0), order.numbers, order.tiles, most, weight.data, weight.scale, y, n, limit or 0.0,
        K=k, CHOICES=order.per_token, GATED=gated, N_TILE=tile.n, T_TILE=tile.t, K_TILE=tile.k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), as exact for large negative x: for u = 1 + e, log(u) / (u - 1) is log(1 + e) / e."""
    small = tl.exp(-tl.abs(x))
    u = 1.0 + small
    log1p = tl.where(u == 1.0, small, tl.log(u) * tl.div_rn(small, tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 0, x, 0.0) + log1p


@triton.jit
def _route(  # noqa: PLR0913
    logits, step, bias, chosen, weights, factor, position,
    EXPERTS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, K_WIDTH: tl.constexpr,
):  # fmt: skip
    """One token. With a bias the experts are chosen here."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, K_WIDTH)
    logits += token * step
    if bias is not None:
        number = tl.arange(0, WIDTH)
        real = number < EXPERTS
        logit = tl.load(logits + number, mask=real, other=0.0).to(tl.float32)
        key = tl.sqrt_rn(_softplus(logit)) + tl.load(bias + number, mask=real, other=0.0).to(tl.float32)
        key = tl.where(key > -3e38, key, -3e38)  # whatever the scores are, an expert is chosen once
        key = tl.where(real, key, float("-inf"))
        picked = tl.full([K_WIDTH], -1, dtype=tl.int32)
        for i in tl.static_range(K):
            best = tl.min(tl.where(key == tl.max(key, 0), number, WIDTH), 0)
            picked = tl.where(place == i, best, picked)
            key = tl.where(number == best, float("-inf"), key)
    else:
        picked = tl.load(chosen + token * K + place, mask=place < K, other=-1).to(tl.int32)
    if position is not None:
        picked = tl.where(tl.load(position + token) < 0, -1, picked)
    if (bias is not None) | (position is not None):
        tl.store(chosen + token * K + place, picked, mask=place < K)
    logit = tl.load(logits + picked, mask=picked >= 0, other=0.0).to(tl.float32)
    score = tl.where(picked >= 0, tl.sqrt_rn(_softplus(logit)), 0.0)
    weight = tl.div_rn(score, tl.sum(score, 0) + 1e-20) * factor
    tl.store(weights + token * K + place, weight, mask=place < K)


@triton.jit
def _experts_of(  # noqa: PLR0913
    chosen, number, choices,
    TOPK: tl.constexpr, SHARED: tl.constexpr, EXPERTS: tl.constexpr, NONE: tl.constexpr,
):  # fmt: skip
    """The expert of each choice; NONE, if it is none."""
    token, place = number // (TOPK + SHARED), number % (TOPK + SHARED)
    routed = (number < choices) & (place < TOPK)
    expert = tl.load(chosen + token * TOPK + place, mask=routed, other=EXPERTS - 1).to(tl.int32)
    return tl.where((number < choices) & (expert >= 0), expert, NONE)


@triton.jit(do_not_specialize=["choices", "most"])
def _order(  # noqa: PLR0913
    chosen, order, tiles, choices, most,
    TOPK: tl.constexpr, SHARED: tl.constexpr, EXPERTS: tl.constexpr, BINS: tl.constexpr, T_TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """One program for each expert: its choices, and its tiles."""
    expert = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    counts = tl.zeros([BINS], dtype=tl.int32)
    at = 0
    while at < choices:
        counts += tl.histogram(_experts_of(chosen, at + lane, choices, TOPK, SHARED, EXPERTS, BINS - 1), BINS)
        at += WIDTH
    number = tl.arange(0, BINS)
    count = tl.sum(tl.where(number == expert, counts, 0), 0)
    first = tl.sum(tl.where(number < expert, counts, 0), 0)
    tile = tl.sum(tl.where(number < expert, tl.cdiv(counts, T_TILE), 0), 0)
    row, at = first, 0
    while (at < choices) & (row < first + count):
        own = (_experts_of(chosen, at + lane, choices, TOPK, SHARED, EXPERTS, BINS - 1) == expert).to(
            tl.int32
        )
        tl.store(order + row + tl.cumsum(own, 0) - own, at + lane, mask=own > 0)
        row += tl.sum(own, 0)
        at += WIDTH
    own_tiles = tl.cdiv(count, T_TILE)
    end = most if expert == EXPERTS - 1 else tile + own_tiles  # the last expert writes what is left
    at = tile
    while at < end:
        own = at - tile + lane
        there = at + lane < end
        tl.store(tiles + at + lane, tl.where(own < own_tiles, expert, -1), mask=there)
        tl.store(tiles + most + at + lane, first + own * T_TILE, mask=there)
        tl.store(tiles + 2 * most + at + lane, first + count, mask=there)
        at += WIDTH


@triton.jit(do_not_specialize=["most"])
def _ask(  # noqa: PLR0913
    x, x_step, order, tiles, most, data, scale, y, n, limit,
    K: tl.constexpr, CHOICES: tl.constexpr, GATED: tl.constexpr,
    N_TILE: tl.constexpr, T_TILE: tl.constexpr, K_TILE: tl.constexpr,
):  # fmt: skip
    """A tile of sorted choices times two tiles of rows of their expert's matrix: the same rows of gate and up
    (GATED), or neighbours."""
    EVEN: tl.constexpr = K % K_TILE == 0
    tile = tl.program_id(1)
    expert = tl.load(tiles + tile).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(tiles + most + tile) + tl.arange(0, T_TILE)
    end = tl.load(tiles + 2 * most + tile)
    there = place < end
    # Beyond the last choice, its row is read again. (Programs that all read one row wait for each other.)
    place = tl.minimum(place, end - 1)
    number = tl.load(order + place)
    source, target = (number // CHOICES, place) if GATED else (place, number)
    out = tl.program_id(0) * (N_TILE if GATED else 2 * N_TILE) + tl.arange(0, N_TILE)
    row = tl.minimum(out, n - 1)
    next_row = n + row if GATED else tl.minimum(out + N_TILE, n - 1)
    rows = 2 * n if GATED else n
    w_rows, w_next = data + (expert * rows + row) * K, data + (expert * rows + next_row) * K
    s_rows = scale + first_scale(expert, rows, row, K) if scale is not None else None
    s_next = scale + first_scale(expert, rows, next_row, K) if scale is not None else None
    x_rows = x + source.to(tl.int64) * x_step
    a = tl.zeros([N_TILE, T_TILE], dtype=tl.float32)
    b = tl.zeros([N_TILE, T_TILE], dtype=tl.float32)
    for step in range(tl.cdiv(K, K_TILE)):
        k = step * K_TILE
        tokens = token_tile(x_rows, k, K, K_TILE, EVEN)
        weight = weight_tile(w_rows, s_rows, k, K, K_TILE, EVEN, x.dtype.element_ty)
        a = tl.dot(weight, tokens, a, input_precision="ieee")
        weight = weight_tile(w_next, s_next, k, K, K_TILE, EVEN, x.dtype.element_ty)
        b = tl.dot(weight, tokens, b, input_precision="ieee")
    at = y + target.to(tl.int64)[None, :] * n + out[:, None]
    if GATED:
        gate, up = tl.where(a > limit, limit, a), tl.where(b > limit, limit, tl.where(b < -limit, -limit, b))
        small = tl.exp(-tl.abs(gate))
        a = gate * tl.where(gate > 0, 1.0, small) / (1.0 + small) * up
    else:
        tl.store(at + N_TILE, b.to(y.dtype.element_ty), mask=(out + N_TILE < n)[:, None] & there[None, :])
    tl.store(at, a.to(y.dtype.element_ty), mask=(out < n)[:, None] & there[None, :])


@triton.jit
def _add(  # noqa: PLR0913
    answers, chosen, weights, y, d, TOPK: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One token: the outputs of its experts, weighted and added in order."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    answers += token * (TOPK + SHARED) * d + at
    total = tl.zeros([TILE], dtype=tl.float32)
    for i in tl.static_range(TOPK):
        asked = tl.load(chosen + token * TOPK + i) >= 0
        answer = tl.load(answers + i * d, mask=(at < d) & asked, other=0.0).to(tl.float32)
        total += tl.where(asked, tl.load(weights + token * TOPK + i), 0.0) * answer
    if SHARED:
        total += tl.load(answers + TOPK * d, mask=at < d, other=0.0).to(tl.float32)
    tl.store(y + token * d + at, total.to(y.dtype.element_ty), mask=at < d)
