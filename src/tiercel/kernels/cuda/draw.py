# ruff: noqa: PLR0913
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""From rows of logits to tokens on CUDA, in Triton: what `kernels/draw.py` defines.

The best token is found by many programs per row. A token is sampled by one program per row, which reads the
row again and again: 16 times to find where `top_k` cuts, 16 times for `top_p`, and twice to draw. Sums are
fp64 and their order is fixed: a row's token depends on nothing else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 4096
"""Logits of one program: a vocabulary of 129,280 is read by 32 programs per row."""
SAMPLED = 8192
"""Logits that the program of a sampled row reads at once."""
WARPS = 16
LOWEST = tl.constexpr(-(2**31))
"""A key below that of every number."""


def greedy(logits: Tensor) -> Tensor:
    """logits fp32 [rows, vocab] → int64 [rows]: the best token, the lowest of equals; -1 where the best is no
    finite number. A NaN counts as the best."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    parts = triton.cdiv(vocab, PART)
    values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    numbers = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _best_of_part[rows, parts](logits, logits.stride(0), values, numbers, vocab, WIDTH=PART)
        _best[(rows,)](values, numbers, best, parts, WIDTH=triton.next_power_of_2(parts), num_warps=1)
    return best


@triton.jit
def _best_of_part(logits, step, values, numbers, vocab, WIDTH: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    number = part * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(logits + row.to(tl.int64) * step + number, mask=number < vocab, other=float("-inf"))
    value = tl.where(value == value, value, float("inf"))
    best = tl.max(value, 0)
    at = row * tl.num_programs(1) + part
    tl.store(values + at, best)
    tl.store(numbers + at, tl.min(tl.where(value == best, number, part * WIDTH + WIDTH), 0))


@triton.jit
def _best(values, numbers, tokens, parts, WIDTH: tl.constexpr):
    row, part = tl.program_id(0), tl.arange(0, WIDTH)
    value = tl.load(values + row * parts + part, mask=part < parts, other=float("-inf"))
    number = tl.load(numbers + row * parts + part, mask=part < parts, other=0)
    best = tl.max(value, 0)
    token = tl.min(tl.where((value == best) & (part < parts), number, 0x7FFFFFFF), 0)
    tl.store(tokens + row, tl.where(tl.abs(best) < float("inf"), token, -1).to(tl.int64))


def masked(logits: Tensor, masks: Tensor) -> Tensor:
    """The rows with -inf for every token that may not be drawn. `masks` int32 [rows, words]: bit t % 32 of
    word t // 32 tells whether token t may be drawn."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 and masks.stride(1) == 1 and 32 * masks.shape[1] >= vocab
    found = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    if rows:
        parts = triton.cdiv(vocab, PART)
        _mask[rows, parts](logits, logits.stride(0), masks, masks.stride(0), found, vocab, WIDTH=PART)
    return found


@triton.jit
def _mask(logits, step, masks, masks_step, found, vocab, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = number < vocab
    value = tl.load(logits + row * step + number, mask=inside, other=0.0)
    word = tl.load(masks + row * masks_step + number // 32, mask=inside, other=0)
    allowed = ((word >> (number % 32)) & 1) == 1
    tl.store(found + row * vocab + number, tl.where(allowed, value, float("-inf")), mask=inside)


def sample(logits: Tensor, draws: Tensor, best: Tensor) -> Tensor:
    """int64 [rows]: a token of each row. `draws` fp64 [rows, 5 or more] has the fields of `Draw`; `best` is
    what `greedy` found, and -1 stays -1."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 and draws.stride(1) == 1 and draws.dtype == torch.float64
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        width = min(SAMPLED, max(16, triton.next_power_of_2(vocab)))
        _sample[(rows,)](
            logits,
            logits.stride(0),
            draws,
            draws.stride(0),
            best,
            tokens,
            vocab,
            WIDTH=width,
            num_warps=WARPS,
        )
    return tokens


@triton.jit
def _keys(row, first, vocab, WIDTH: tl.constexpr):
    """Logits, and int32 numbers in the same order. Outside the row: the lowest of all."""
    number = first + tl.arange(0, WIDTH)
    value = tl.load(row + number, mask=number < vocab, other=float("-inf")) + 0.0  # -0 becomes 0
    bits = value.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return value, tl.where(number < vocab, key, LOWEST)


@triton.jit
def _fold(value, WIDTH: tl.constexpr):
    """Sums of neighbours, so that a sum over a row needs few registers."""
    return tl.sum(tl.reshape(value, [WIDTH // 4, 4]), 1)


@triton.jit
def _above(row, vocab, least, top, sharpness, WIDTH: tl.constexpr):
    """The sum of the weights above this key, their number, and how many logits have the key."""
    weights = tl.zeros([WIDTH // 4], tl.float64)
    above = tl.zeros([WIDTH // 4], tl.int32)
    equal = tl.zeros([WIDTH // 4], tl.int32)
    for first in range(0, vocab, WIDTH):
        value, key = _keys(row, first, vocab, WIDTH)
        weight = tl.exp((value - top) * sharpness)
        weights += _fold(tl.where(key > least, weight, 0.0).to(tl.float64), WIDTH)
        above += _fold((key > least).to(tl.int32), WIDTH)
        equal += _fold((key == least).to(tl.int32), WIDTH)
    return tl.sum(weights, 0), tl.sum(above, 0), tl.sum(equal, 0)


@triton.jit
def _cut(row, vocab, low, high, wanted, top, sharpness, WEIGHED: tl.constexpr, WIDTH: tl.constexpr):
    """The largest key in [low, high) such that the logits from it on make up what is wanted: a sum of
    weights, or a number. Those from `low` on do. Three keys between the two are tried at once."""
    while high - low > 1:
        gap = high - low
        one, two, three = low + gap // 4, low + gap // 2, low + gap * 3 // 4
        from_one = tl.zeros([WIDTH // 4], tl.float64)
        from_two = tl.zeros([WIDTH // 4], tl.float64)
        from_three = tl.zeros([WIDTH // 4], tl.float64)
        for first in range(0, vocab, WIDTH):
            value, key = _keys(row, first, vocab, WIDTH)
            weight = tl.full([WIDTH], 1.0, tl.float64)
            if WEIGHED:
                weight = tl.exp((value - top) * sharpness).to(tl.float64)
            from_one += _fold(tl.where(key >= one, weight, 0.0), WIDTH)
            from_two += _fold(tl.where(key >= two, weight, 0.0), WIDTH)
            from_three += _fold(tl.where(key >= three, weight, 0.0), WIDTH)
        if tl.sum(from_three, 0) >= wanted:
            low = three
        elif tl.sum(from_two, 0) >= wanted:
            low, high = two, three
        elif tl.sum(from_one, 0) >= wanted:
            low, high = one, two
        else:
            high = one
    return low


@triton.jit
def _weight_of(key, top, sharpness):
    """The weight of a logit with this key."""
    bits = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.int32)
    return tl.exp((bits.to(tl.float32, bitcast=True) - top) * sharpness).to(tl.float64)


@triton.jit
def _kept(row, first, vocab, least, dropped, tied, top, sharpness, min_p, WIDTH: tl.constexpr):
    """The weights that remain, and how many of the logits with the least key are left. The last of these are
    dropped."""
    value, key = _keys(row, first, vocab, WIDTH)
    weight = tl.exp((value - top) * sharpness)
    stays = (key >= least) & (weight >= min_p)
    if dropped > 0:
        tie = (key == least).to(tl.int32)
        stays = stays & ((tie == 0) | (tied - tl.cumsum(tie, 0) >= dropped))
        tied -= tl.sum(tie, 0)
    return tl.where(stays, weight, 0.0).to(tl.float64), tied


@triton.jit
def _sample(logits, step, draws, draws_step, best, tokens, vocab, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    row, draw = logits + at * step, draws + at * draws_step
    token = tl.load(best + at)
    sharpness, top_k = tl.load(draw).to(tl.float32), tl.load(draw + 1)
    top_p, min_p, uniform = tl.load(draw + 2), tl.load(draw + 3).to(tl.float32), tl.load(draw + 4)
    if (sharpness > 0.0) & (token >= 0):
        top = tl.load(row + token) + 0.0
        bits = top.to(tl.int32, bitcast=True)
        high = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 1
        # Logits from `least` on are kept. Of the `equal` logits with that key, `ties` are kept.
        least, ties, equal = high * 0 + LOWEST, 0, 0
        if (top_k > 0.0) & (top_k < vocab):
            least = _cut(row, vocab, least, high, top_k, top, sharpness, False, WIDTH)
            _, above, equal = _above(row, vocab, least, top, sharpness, WIDTH)
            ties = top_k.to(tl.int32) - above
        if top_p < 1.0:
            enough, _, _ = _above(row, vocab, least, top, sharpness, WIDTH)
            if ties > 0:
                enough += ties * _weight_of(least, top, sharpness)
            enough *= top_p
            cut = _cut(row, vocab, least, high, enough, top, sharpness, True, WIDTH)
            if cut > LOWEST:
                weights, _, equal = _above(row, vocab, cut, top, sharpness, WIDTH)
                more = tl.ceil((enough - weights) / _weight_of(cut, top, sharpness))
                more = tl.minimum(tl.maximum(more, 1.0), equal + 0.0).to(tl.int32)
                ties = tl.where(cut == least, tl.minimum(more, ties), more)
                least = cut
        total, tied = (top * 0.0).to(tl.float64), equal
        for first in range(0, vocab, WIDTH):
            weight, tied = _kept(row, first, vocab, least, equal - ties, tied, top, sharpness, min_p, WIDTH)
            total += tl.sum(weight, 0)
        target, before, tied, found = uniform * total, total * 0.0, equal, -1
        for first in range(0, vocab, WIDTH):
            if found < 0:
                weight, tied = _kept(
                    row, first, vocab, least, equal - ties, tied, top, sharpness, min_p, WIDTH
                )
                after = before + tl.sum(weight, 0)
                if after > target:
                    number = first + tl.arange(0, WIDTH)
                    reached = (before + tl.cumsum(weight, 0) > target) & (weight > 0.0)
                    found = tl.min(tl.where(reached, number, vocab), 0)
                    if found == vocab:  # the two sums are rounded differently
                        found = tl.max(tl.where(weight > 0.0, number, -1), 0)
                before = after
        if found >= 0:
            token = token * 0 + found
    tl.store(tokens + at, token)
