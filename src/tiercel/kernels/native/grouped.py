"""Grouped-query attention on pages in C: `reference/grouped.py` says what each function does."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.kernels.entries import Entries, Flat
from tiercel.kernels.native.library import call, dense, step_of
from tiercel.kernels.native.rows import pass_flat
from tiercel.kernels.reference.grouped import HeadEntries, head_entries
from tiercel.kernels.reference.layers import CosSin


def _memory(entries: Entries, how: HeadEntries) -> tuple[Tensor, int, bool, int]:
    return entries.rows, how.row_bytes, how.dtype is torch.bfloat16, how.page_tokens


def store_heads(  # noqa: PLR0913
    key: Tensor,
    value: Tensor,
    rotation: CosSin,
    entries: Entries,
    flat: Flat,
    write_from: Tensor,
    *,
    eps: float,
    weight: Tensor | None,
) -> None:
    (tokens, kv_heads, dim), (cos, sin) = key.shape, rotation
    pairs, how = cos.shape[1], head_entries(entries, kv_heads, dim)
    steps = step_of(key, (tokens, kv_heads, dim)), step_of(value, (tokens, kv_heads, dim))
    dense(write_from, (tokens,), torch.int32)
    for angles in rotation:
        dense(angles, (tokens, min(pairs, dim // 2)))
    if weight is not None:
        dense(weight, (dim,))
    call(
        "store_heads", tokens, key, steps[0], value, steps[1], cos, sin, weight, eps, *_memory(entries, how),
        pass_flat(flat, tokens), write_from, kv_heads, dim, pairs,
    )  # fmt: skip


def grouped_attention(  # noqa: PLR0913
    q: Tensor,
    entries: Entries,
    kv_heads: int,
    flat: Flat,
    scale: float,
    longest: int,  # noqa: ARG001 - other sets plan with it
    *,
    sinks: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    tokens, heads, dim = q.shape
    how = head_entries(entries, kv_heads, dim)
    dense(q, (tokens, heads, dim))
    if sinks is not None:
        dense(sinks, (heads,))
    if heads % kv_heads:
        raise ValueError(f"{heads} heads can not share {kv_heads} kv heads")
    out = torch.empty(tokens, heads, dim)
    call(
        "grouped_attention", tokens, q, out, *_memory(entries, how), pass_flat(flat, tokens), sinks,
        scale, window, heads, kv_heads, dim,
    )  # fmt: skip
    return out


def route_softmax(
    logits: Tensor, k: int, *, normed: bool, position: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    rows, count = logits.shape
    step = step_of(logits, (rows, count))
    if position is not None:
        dense(position, (rows,), torch.int32)
    chosen, weights = torch.empty(rows, k, dtype=torch.int64), torch.empty(rows, k)
    call("route_softmax", rows, logits, step, position, chosen, weights, rows, count, k, normed)
    return chosen, weights


def gated(x: Tensor) -> Tensor:
    rows, inner = x.shape[0], x.shape[1] // 2
    y = torch.empty(rows, inner)
    call("gated", rows, x, step_of(x, (rows, 2 * inner)), y, rows, inner)
    return y
