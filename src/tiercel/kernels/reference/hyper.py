"""Hyper-connections in plain torch: a site reads the n streams of a token and writes its output into them.

They are DeepSeek V4's own (`models/deepseek_v4/hyper.py`): `Kernels` does not have them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from tiercel.kernels.reference.layers import Matrix, norm, rms


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


def read(x: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, n, d] → the site's input, normed [tokens, d]; the weights of its output for each stream
    [tokens, n]; the matrix that mixes the streams [tokens, n, n]."""
    n = site.streams
    mixed = F.linear(rms(x.flatten(1), site.eps), site.fn) * site.scale + site.base
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


def write(x: Tensor, y: Tensor, place: Tensor, mix: Tensor) -> Tensor:
    """The streams after the site's output y [tokens, d]."""
    return place[..., None] * y[:, None, :] + torch.matmul(mix.transpose(1, 2), x)


def head(x: Tensor, site: Site) -> Tensor:
    """Collapses the streams [tokens, n, d] to [tokens, d] and norms them: the last step of a model."""
    mixed = F.linear(rms(x.flatten(1), site.eps), site.fn)
    collapse = torch.sigmoid(mixed * site.scale + site.base) + site.hc_eps
    return norm(torch.matmul(collapse[:, None, :], x).squeeze(1), site.weight, site.eps)
