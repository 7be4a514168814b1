"""From rows of logits to tokens, on the CPU. `cuda/draw.py` has the same for CUDA.

    logits ─┬─ greedy ────────────────────────────────────────────────────────────── the best token
            └─ × sharpness ─ top_k ─ top_p ─ min_p ─ inverse transform of a uniform number ─ a token

A token is drawn over weights in the order of ids, so a filter that removes nothing changes nothing. Of equal
logits the lower ids are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Row = NDArray[np.float32]
Ids = NDArray[np.int64]
Mask = NDArray[np.int32]
"""Bit t % 32 of word t // 32 tells whether token t may be drawn."""

NUCLEUS_FLOORS = (2.0**-6, 2.0**-12, 0.0)
"""Weights relative to the best. `top_p` sorts only what is above the first floor that leaves enough."""


class Draw(NamedTuple):
    """How a token is drawn from a row of logits."""

    sharpness: float
    """1 ÷ temperature. 0: the best token."""
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0
    """A number in [0, 1) that decides which token is drawn."""


def greedy(logits: Tensor) -> Tensor:
    """int64 [rows]: the best token of each row, the lowest of equals; -1: the best is no finite number."""
    rows = logits.cpu().numpy()
    best = rows.argmax(1)
    sound = np.isfinite(rows[np.arange(len(rows)), best])
    return torch.from_numpy(np.where(sound, best, -1)).to(logits.device)


def masked(logits: Tensor, masks: Tensor) -> Tensor:
    """The rows with -inf for every token that may not be drawn. `masks` int32 [rows, words]."""
    rows = zip(logits.cpu().numpy(), masks.cpu().numpy(), strict=True)
    return torch.from_numpy(np.stack([mask_row(row, mask) for row, mask in rows])).to(logits.device)


def mask_row(row: Row, mask: Mask) -> Row:
    allowed = np.unpackbits(mask.view(np.uint8), count=len(row), bitorder="little").view(np.bool_)
    return np.where(allowed, row, np.float32(-np.inf))


def sample(logits: Tensor, draws: Tensor, best: Tensor) -> Tensor:
    """int64 [rows]: a token of each row. `draws` fp64 [rows, 5 or more] has the fields of `Draw`; `best` is
    what `greedy` found, and -1 stays -1."""
    drawn = best.tolist()
    for i, (row, (sharpness, top_k, *rest)) in enumerate(
        zip(logits.cpu().numpy(), draws.tolist(), strict=True)
    ):
        if sharpness and drawn[i] >= 0:
            drawn[i] = sample_row(row, row[drawn[i]], Draw(sharpness, int(top_k), *rest[:3]))
    return torch.tensor(drawn, dtype=torch.int64, device=logits.device)


def sample_row(row: Row, best: np.float32, draw: Draw) -> int:
    """Inverse transform over weights by id. `best` is the largest of the row."""
    ids = largest(row, draw.top_k) if 0 < draw.top_k < len(row) else None
    weights = weights_of(row if ids is None else row[ids], best, draw.sharpness)
    if draw.top_p < 1.0:
        weights = _nucleus(weights, draw.top_p)
    if draw.min_p > 0.0:
        weights[weights < draw.min_p] = 0.0  # the best has weight 1
    sums = _sums(weights)
    # side="right": a token of weight 0 is never drawn.
    at = sums.searchsorted(draw.uniform * sums[-1], side="right")
    return int(at if ids is None else ids[at])


def weights_of(row: Row, best: np.float32, sharpness: float = 1.0) -> Row:
    """exp(logit - best): 1 for the best token, less for the others.

    numpy computes it in one thread. torch's exp is 1.5 times as quick, but splits even 4,096 numbers among
    threads, and on a busy machine waits for them: 0.6 ms instead of 0.02.
    """
    with np.errstate(over="ignore"):
        distance = row - best
        if sharpness != 1.0:
            distance *= np.float32(sharpness)
    np.exp(distance, out=distance)
    return distance


def largest(row: Row, count: int) -> Ids:
    """The ids of the `count` largest, in order of ids; of equals the lower ones."""
    return _down_to(row, torch.from_numpy(row).topk(count, sorted=False).values.min().item(), count)


def _nucleus(weights: Row, top_p: float) -> Row:
    """The fewest weights that make up `top_p` of all, and 0 for the others; of equals those of lower ids."""
    enough = top_p * weights.sum(dtype=np.float64)
    for floor in NUCLEUS_FLOORS:
        heavy = weights[weights >= floor]
        if heavy.sum(dtype=np.float64) >= enough:
            break
    heavy = -np.sort(-heavy)
    count = min(int(_sums(heavy).searchsorted(enough)) + 1, len(heavy))
    kept = _down_to(weights, float(heavy[count - 1]), count)
    thinned = np.zeros_like(weights)
    thinned[kept] = weights[kept]
    return thinned


def _sums(weights: Row) -> NDArray[np.float64]:
    """The running sum, from left to right in one thread. torch takes 0.16 ms for 129,280, numpy 1 ms."""
    return torch.from_numpy(weights).cumsum(0, dtype=torch.float64).numpy()


def _down_to(row: Row, least: float, count: int) -> Ids:
    ids = np.flatnonzero(row >= least)
    if surplus := len(ids) - count:
        ids = np.delete(ids, np.flatnonzero(row[ids] == least)[-surplus:])
    return ids
