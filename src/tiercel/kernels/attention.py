"""Attention over lists of rows, in plain torch. The Triton twins take the same arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

QUERIES_AT_ONCE = 256
"""So many queries are gathered together: [256, rows, dim] stays in the tens of megabytes."""


def sparse_attention_reference(
    q: Tensor, pools: Sequence[Tensor], rows: Sequence[Tensor], sinks: Tensor, scale: float
) -> Tensor:
    """Each query attends to the rows it names, which are keys and values at once.

    q [tokens, heads, dim]; of each pool [n, dim] the rows [tokens, k], -1 where there is none; sinks
    [heads], a logit without a value. Answers [tokens, heads, dim].
    """
    out = torch.empty_like(q)
    for start in range(0, q.shape[0], QUERIES_AT_ONCE):
        part = slice(start, start + QUERIES_AT_ONCE)
        named = torch.cat([each[part] for each in rows], dim=1)
        entries = torch.cat(
            [pool[each[part].clamp(min=0)] for pool, each in zip(pools, rows, strict=True)], dim=1
        )
        scores = torch.matmul(q[part], entries.transpose(1, 2)) * scale
        scores = scores.masked_fill_((named < 0)[:, None, :], float("-inf"))
        sink = sinks.view(1, -1, 1).expand(scores.shape[0], -1, 1)
        weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
        out[part] = torch.matmul(weights, entries)
    return out


def top_rows_reference(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """The k best rows of each query among its first `visible`, ascending, -1 where there are fewer.

    scores [tokens, n], visible [tokens]. Ties go to the lower row: score and row are one integer, so the
    choice does not depend on how many rows there are.
    """
    tokens, n = scores.shape
    index = torch.arange(n, device=scores.device)
    hidden = index[None, :] >= visible[:, None]
    if n <= k:
        return torch.where(hidden, -1, index.expand(tokens, n))
    bits = scores.float().contiguous().view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # the order of floats, as integers; -0 is 0
    keys = (ordered << 32) | (n - 1 - index)
    keys = keys.masked_fill(hidden, torch.iinfo(torch.int64).min)
    best, picked = keys.topk(k, dim=-1)
    rows = torch.where(best == torch.iinfo(torch.int64).min, n, picked).sort(dim=-1).values
    return torch.where(rows == n, -1, rows)


def index_scores_reference(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """The lightning indexer: sum over heads of weight · ReLU(q · key). q [t, h, c], keys [n, c], weights [t,
    h]."""
    scores = torch.relu_(torch.matmul(q.flatten(0, 1), keys.T)).unflatten(0, q.shape[:2])
    return torch.matmul(weights[:, None, :], scores).squeeze(1)


def best_rows_reference(q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, k: int) -> Tensor:
    """Rows of the indexer's k best scores, a few queries at a time: all scores at once would be quadratic."""
    parts = [slice(start, start + QUERIES_AT_ONCE) for start in range(0, q.shape[0], QUERIES_AT_ONCE)]
    return torch.cat(
        [top_rows_reference(index_scores_reference(q[p], keys, weights[p]), visible[p], k) for p in parts]
    )


def compress_reference(kv: Tensor, gate: Tensor) -> Tensor:
    """Softmax of the gates over the rows of a window, channel by channel. kv, gate [windows, rows, dim]."""
    return (kv * torch.softmax(gate, dim=1)).sum(dim=1)
