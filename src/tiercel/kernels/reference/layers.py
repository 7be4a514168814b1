"""Matrices, norms and experts in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

Matrix = Any
"""A weight [n, k], packed by `pack` for `linear`. Here it is the tensor itself."""

CosSin = tuple[Tensor, Tensor]
"""(cos, sin) of the rotary angles, [tokens, pairs] each."""


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
    return weight * rms(x, eps)


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def norm_rotate(
    x: Tensor, rotation: CosSin, *, eps: float | None = None, weight: Tensor | None = None, back: bool = False
) -> Tensor:
    """x [tokens, heads, dim]: norms each head if `eps` is given, and rotates its last channels in pairs."""
    if eps is not None:
        x = rms(x, eps)
    if weight is not None:
        x = weight * x
    cos, sin = (each[:, None, :] for each in rotation)
    sin = -sin if back else sin
    still, turned = x.split([x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], dim=-1)
    a, b = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat([still, pairs], dim=-1)


# Experts


def route(  # noqa: PLR0913
    logits: Tensor,
    chosen: Tensor | None,
    bias: Tensor | None,
    k: int,
    factor: float,
    position: Tensor | None = None,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    """(experts [tokens, k], weights): the given `chosen` experts, or the k best by score + bias.

    `position`: of padding it is -1. A set may leave out its experts; nobody reads what they compute.
    """
    scores = F.softplus(logits).sqrt()
    if chosen is None:
        assert bias is not None
        chosen = (scores + bias).topk(k, dim=-1, sorted=False).indices
    weights = scores.gather(1, chosen)
    return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * factor


def experts(  # noqa: PLR0913
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    matrices: tuple[Matrix, Matrix],
    limit: float,
    *,
    shared: bool = True,
) -> Tensor:
    """The weighted sum of the chosen experts, plus that of the shared one, if there is one: it is the last of
    the matrices.

    `matrices`: [experts, 2 · inner, d] and [experts, d, inner], packed.
    """
    gate_up, down = matrices
    flat, k = chosen.flatten(), chosen.shape[1]
    answers = torch.zeros(flat.numel(), x.shape[1], device=x.device)
    for expert in flat[flat >= 0].unique().tolist():
        asked = torch.where(flat == expert)[0]
        answers[asked] = _ask(x[asked // k], gate_up[expert], down[expert], limit)
    routed = (answers.view(*chosen.shape, x.shape[1]) * weights[..., None]).sum(1)
    return routed + _ask(x, gate_up[-1], down[-1], limit) if shared else routed


def _ask(x: Tensor, gate_up: Tensor, down: Tensor, limit: float) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit), down)
