"""Grouped-query attention on pages, and what models with it need besides, in plain torch.

    row of a page   │ head 0: k, v of token 0 │ k, v of token 1 │ … │ head 1: k, v of token 0 │ …

Each token of a call finds its keys by the page table of its text: nothing is copied together before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from tiercel.kernels.entries import ITEM, Entries, Flat, write_entries
from tiercel.kernels.reference.layers import CosSin, norm_rotate

QUERIES_AT_ONCE = 256
"""Scores of [heads, 256, keys] are computed together."""


class HeadEntries(NamedTuple):
    """How keys and values of `kv_heads` heads lie in the rows of encoded entries."""

    dtype: torch.dtype
    page_tokens: int
    row_bytes: int
    """From one row to the next."""


def head_entries(entries: Entries, kv_heads: int, dim: int) -> HeadEntries:
    """Refuses entries that do not hold a key and a value of `dim` for each head."""
    dtype = ITEM.get(entries.encoding)
    size = 0 if dtype is None else 2 * dim * dtype.itemsize
    rows, step = entries.rows, entries.rows.stride(0)
    fits = entries.sizes == (size,) and not entries.per_row % kv_heads and rows.dtype is torch.uint8
    fits = fits and rows.shape[1] >= entries.per_row * size
    if dtype is None or not fits or rows.stride(1) != 1 or (rows.data_ptr() | step) % dtype.itemsize:
        given = f"{entries.encoding} entries of {entries.sizes} bytes, {entries.per_row} in a row"
        raise ValueError(f"{given}, do not hold keys and values of {kv_heads} heads of {dim} channels")
    return HeadEntries(dtype, entries.per_row // kv_heads, step)


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
    """Norm the keys if there is a weight, rotate them, and write keys and values into the pages.

    key, value [tokens, kv heads, dim]; weight [dim]; `write_from`: int32 [tokens]. Tokens at an earlier
    position are in the pages already and are not written, nor is padding.
    """
    _, kv_heads, dim = key.shape
    how = head_entries(entries, kv_heads, dim)
    made = norm_rotate(key, rotation, eps=None if weight is None else eps, weight=weight)
    tokens = ((flat.position >= 0) & (flat.position >= write_from)).nonzero()[:, 0]
    at = flat.position[tokens].long()
    place = flat.pages[flat.ring[tokens].long(), at // how.page_tokens].long()
    first = place * entries.per_row + at % how.page_tokens
    numbers = first[:, None] + torch.arange(kv_heads, device=at.device) * how.page_tokens
    write_entries(entries, numbers.flatten(), torch.cat([made, value], dim=2)[tokens].flatten(0, 1))


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
    """Attention of q [tokens, heads, dim], rotated, to the keys of its text up to its own position, or to the
    last `window` of them. Returns the same shape and type; padding gets zeros.

    Head h reads kv head h // (heads / kv heads). sinks [heads], fp32: logits without a value. `longest`: no
    text has more positions.
    """
    (_, heads, dim), how = q.shape, head_entries(entries, kv_heads, q.shape[2])
    out, first = torch.zeros_like(q), torch.where(flat.position < 0, -1, flat.first)
    for span in first.unique().tolist():
        tokens = torch.where(first == span)[0]
        for part in tokens.split(QUERIES_AT_ONCE) if span >= 0 else ():
            at = flat.position[part].long()
            keys = torch.arange(int(at.max()) + 1, device=q.device)
            places = flat.pages[int(flat.ring[part[0]]), : len(keys) // how.page_tokens + 1].long()
            places = places[: -(-len(keys) // how.page_tokens)]
            rows = entries.rows[places, : entries.per_row * entries.sizes[0]].contiguous().view(how.dtype)
            both = rows.view(len(places), kv_heads, how.page_tokens, 2, dim).float()
            both = both.permute(3, 1, 0, 2, 4).flatten(2, 3)[:, :, : len(keys)]
            key, value = both.repeat_interleave(heads // kv_heads, dim=1)
            hidden = keys > at[:, None]
            if window:
                hidden |= keys <= at[:, None] - window
            scores = torch.matmul(q[part].float().transpose(0, 1), key.transpose(1, 2)) * scale
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(part), 1)], dim=2)
            weights = torch.softmax(scores, dim=2)[..., : len(keys)]
            out[part] = torch.matmul(weights, value).transpose(0, 1).to(q.dtype)
    return out


def route_softmax(
    logits: Tensor, k: int, *, normed: bool, position: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(experts int64 [tokens, k], weights fp32): the k best by softmax, of equals the lower number first.

    `normed`: the weights of a token have the sum one. Padding has the experts -1, with the weight 0.
    """
    scores = torch.softmax(logits.float(), dim=-1)
    chosen = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, chosen)
    if normed:
        weights = weights / weights.sum(-1, keepdim=True)
    if position is not None:
        padding = (position < 0)[:, None]
        chosen, weights = chosen.masked_fill(padding, -1), weights.masked_fill(padding, 0.0)
    return chosen, weights


def gated(x: Tensor) -> Tensor:
    """silu(gate) · up of rows x [tokens, 2 · inner] that are gate and then up: the middle of an MLP."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
