# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""The best token of each row of logits on CUDA, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 4096
"""Logits of one program: a vocabulary of 129,280 is read by 32 programs per row."""


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
