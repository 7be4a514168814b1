"""The kernels of the models in plain torch, on any device: they define what each kernel computes.

`native.py` has the same functions in C for the CPU, `cuda/` in Triton. A model runs on any set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from tiercel.kernels.draw import greedy as greedy
from tiercel.kernels.draw import masked as masked
from tiercel.kernels.draw import sample as sample

NAME = "reference"
EXACT = False
"""False: torch sums in another order for another shape, so a row's bits depend on the number of rows."""

dtype = torch.float32
"""The type of activations and matrices."""

QUERIES_AT_ONCE = 256
"""How many queries are gathered together: [256, rows, dim] stays in the tens of megabytes."""

Matrix = Any
"""A weight [n, k], packed by `pack` for `linear`. Here it is the tensor itself."""

CosSin = tuple[Tensor, Tensor]
"""(cos, sin) of the rotary angles, [tokens, pairs] each."""

Recent = tuple[Tensor, Tensor]
"""Rows of recent tokens in two pools: those of earlier calls, and those of this call. Row numbers continue
from the first pool to the second; -1 is no row."""


@dataclass(frozen=True)
class Site:
    """One hyper-connection: how a site reads the n streams. `weight` belongs to the norm after it."""

    fn: Matrix
    scale: Tensor
    base: Tensor
    weight: Tensor
    streams: int
    iterations: int
    hc_eps: float
    eps: float


def built_from() -> tuple[str, ...]:
    """What the results depend on besides this file and torch."""
    return ()


def pack(weight: Tensor) -> Matrix:
    return weight.contiguous()


def pack_all(weights: Tensor) -> Matrix:
    """Packs m matrices of one shape, [m, n, k]."""
    return weights.contiguous()


def linear(x: Tensor, weight: Matrix, *, wide: bool = False) -> Tensor:  # noqa: ARG001
    """x [tokens, k] · weightᵀ. `wide`: as fp32, whatever the type of x."""
    return F.linear(x, weight)


def linear_groups(x: Tensor, weights: Matrix) -> Tensor:
    """x [tokens, m · k]: part i of m is multiplied by matrix i; the results are concatenated."""
    parts = x.unflatten(1, (weights.shape[0], -1)).transpose(0, 1)
    return torch.bmm(parts, weights.transpose(1, 2)).transpose(0, 1).flatten(1)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * _rms(x, eps)


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def put_rows(target: Tensor, to: Tensor, source: Tensor, rows: Tensor | None = None) -> None:
    """target[to] = source[rows], whole rows; without `rows`, all of them in order."""
    target[to] = source if rows is None else source[rows]


def norm_rotate(
    x: Tensor, rotation: CosSin, *, eps: float | None = None, weight: Tensor | None = None, back: bool = False
) -> Tensor:
    """x [tokens, heads, dim]: norms each head if `eps` is given, and rotates its last channels in pairs."""
    if eps is not None:
        x = _rms(x, eps)
    if weight is not None:
        x = weight * x
    cos, sin = (each[:, None, :] for each in rotation)
    sin = -sin if back else sin
    still, turned = x.split([x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], dim=-1)
    a, b = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat([still, pairs], dim=-1)


# Hyper-connections


def hyper_read(x: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, n, d] → the site's input, normed [tokens, d]; the weights of its output for each stream
    [tokens, n]; the matrix that mixes the streams [tokens, n, n]."""
    n = site.streams
    mixed = F.linear(_rms(x.flatten(1), site.eps), site.fn) * site.scale + site.base
    collapse, place, mix = mixed.split([n, n, n * n], dim=1)
    seen = torch.matmul((torch.sigmoid(collapse) + site.hc_eps)[:, None, :], x).squeeze(1)
    mix = torch.softmax(mix.unflatten(1, (n, n)), -1) + site.hc_eps
    mix = sinkhorn(mix, site.iterations, site.hc_eps)
    return norm(seen, site.weight, site.eps), 2 * torch.sigmoid(place), mix


def sinkhorn(mix: Tensor, iterations: int, eps: float) -> Tensor:
    """Scales rows and columns of [tokens, n, n] in turn towards a sum of one, columns last."""
    mix = mix / (mix.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(2, keepdim=True) + eps)
        mix = mix / (mix.sum(1, keepdim=True) + eps)
    return mix


def hyper_write(x: Tensor, y: Tensor, place: Tensor, mix: Tensor) -> Tensor:
    """The streams after the site's output y [tokens, d]."""
    return place[..., None] * y[:, None, :] + torch.matmul(mix.transpose(1, 2), x)


def hyper_head(x: Tensor, site: Site) -> Tensor:
    """Collapses the streams [tokens, n, d] to [tokens, d] and norms them: the last step of a model."""
    mixed = F.linear(_rms(x.flatten(1), site.eps), site.fn)
    collapse = torch.sigmoid(mixed * site.scale + site.base) + site.hc_eps
    return norm(torch.matmul(collapse[:, None, :], x).squeeze(1), site.weight, site.eps)


# Experts


def route(
    logits: Tensor, chosen: Tensor | None, bias: Tensor | None, k: int, factor: float
) -> tuple[Tensor, Tensor]:
    """(experts [tokens, k], weights): the given `chosen` experts, or the k best by score + bias."""
    scores = F.softplus(logits).sqrt()
    if chosen is None:
        assert bias is not None
        chosen = (scores + bias).topk(k, dim=-1, sorted=False).indices
    weights = scores.gather(1, chosen)
    return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * factor


def experts(
    x: Tensor, chosen: Tensor, weights: Tensor, matrices: tuple[Matrix, Matrix], limit: float
) -> Tensor:
    """The weighted sum of the chosen experts, plus the shared expert, which is the last of the matrices.

    `matrices`: [experts, 2 · inner, d] and [experts, d, inner], packed.
    """
    gate_up, down = matrices
    flat, k = chosen.flatten(), chosen.shape[1]
    answers = torch.empty(flat.numel(), x.shape[1], device=x.device)
    for expert in flat.unique().tolist():
        asked = torch.where(flat == expert)[0]
        answers[asked] = _ask(x[asked // k], gate_up[expert], down[expert], limit)
    routed = (answers.view(*chosen.shape, x.shape[1]) * weights[..., None]).sum(1)
    return routed + _ask(x, gate_up[-1], down[-1], limit)


def _ask(x: Tensor, gate_up: Tensor, down: Tensor, limit: float) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit), down)


# Attention


def compress(recent: Recent, rows: Tensor, bias: Tensor, dim: int) -> Tensor:
    """Entries [n, dim] of windows of rows [n, width]: for each channel, values weighted by the softmax of the
    gates over the window.

    A row is kv, then gate, `channels` each; bias [ratio, channels] is added to the gates. If a window is two
    ratios wide, its first half uses the first channels of its rows, the second half the last channels.
    """
    ratio, channels = bias.shape
    both = torch.cat(recent)[rows.clamp(min=0).long()].unflatten(2, (2, channels))
    both[:, :, 1] += bias.repeat(rows.shape[1] // ratio, 1)
    if rows.shape[1] > ratio:
        both = torch.cat([both[:, :ratio, :, :dim], both[:, ratio:, :, dim:]], dim=1)
    gate = both[:, :, 1].masked_fill((rows < 0)[..., None], float("-inf"))
    values: Tensor = both[:, :, 0].masked_fill((rows < 0)[..., None], 0.0)  # 0 · NaN is NaN
    return (values * torch.softmax(gate, dim=1)).sum(dim=1)


def _parts(q: Tensor) -> list[slice]:
    return [slice(at, at + QUERIES_AT_ONCE) for at in range(0, len(q), QUERIES_AT_ONCE)]


def best_rows(
    q: Tensor, weights: Tensor, keys: Tensor, rows: Tensor, span: Tensor, visible: Tensor, k: int
) -> Tensor:
    """The lightning indexer: the rows [tokens, k] of each query's k best keys, ascending; -1: fewer keys.

    score = sum over heads of weight · ReLU(q · key). q [tokens, heads, dim], weights [tokens, heads], keys
    [m, dim]; rows [spans, n] are the keys of each span; `span` is the span of each token, and `visible` how
    many of its keys the token sees. Ties go to the lower number.
    """
    parts = []
    for part in _parts(q):
        own = rows[span[part]].long()
        scores = torch.relu_(torch.matmul(q[part], keys[own.clamp(min=0)].transpose(1, 2)))
        scores = torch.matmul(weights[part][:, None, :], scores).squeeze(1)
        best = top_numbers(scores, visible[part], k)
        picked = own.gather(1, best.clamp(min=0)) if own.shape[1] else best
        parts.append(torch.where(best < 0, -1, picked).int())
    return torch.cat(parts)


def top_numbers(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """The numbers of the k best scores among the first `visible` of each query, ascending; -1: fewer."""
    tokens, n = scores.shape
    number = torch.arange(n, device=scores.device)
    hidden = number[None, :] >= visible[:, None]
    if n <= k:
        return torch.where(hidden, -1, number.expand(tokens, n))
    bits = scores.float().contiguous().view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # the order of floats, as integers; -0 is 0
    keys = (ordered << 32) | (n - 1 - number)
    keys = keys.masked_fill(hidden, torch.iinfo(torch.int64).min)
    best, picked = keys.topk(k, dim=-1)
    chosen = torch.where(best == torch.iinfo(torch.int64).min, n, picked).sort(dim=-1).values
    return torch.where(chosen == n, -1, chosen)


def attention(
    q: Tensor, recent: Recent, window: Tensor, entries: Tensor, chosen: Tensor, sinks: Tensor, scale: float
) -> Tensor:
    """Attention of each query to the rows it names. A row is both key and value.

    q [tokens, heads, dim]; `window` [tokens, w]: rows of `recent`; `chosen` [tokens, k]: rows of `entries`;
    sinks [heads]: logits without a value. Returns [tokens, heads, dim].
    """
    out = torch.empty(q.shape, device=q.device)
    pool = torch.cat(recent)
    for part in _parts(q):
        near, far = window[part], chosen[part]
        none = torch.cat([near, far], dim=1) < 0
        seen = torch.cat([pool[near.clamp(min=0).long()], entries[far.clamp(min=0).long()]], dim=1)
        seen.masked_fill_(none[..., None], 0.0)  # row 0 may hold NaN, and 0 · NaN is NaN
        scores = torch.matmul(q[part], seen.transpose(1, 2)) * scale
        scores = scores.masked_fill_(none[:, None, :], float("-inf"))
        sink = sinks.view(1, -1, 1).expand(scores.shape[0], -1, 1)
        weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
        out[part] = torch.matmul(weights, seen)
    return out
