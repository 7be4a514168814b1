"""Rotary positions: interleaved pairs, the last channels of a head; YaRN for layers that compress."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tiercel.models.deepseek_v4.config import Rope


def inverse_frequencies(rope: Rope, dim: int) -> Tensor:
    """[dim / 2]. YaRN mixes the plain and the stretched frequencies by how often they turn in the original
    length."""
    plain = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.factor == 1.0:
        return plain
    low, high = (_channel(turns, rope, dim) for turns in (rope.beta_fast, rope.beta_slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _channel(turns: float, rope: Rope, dim: int) -> float:
    """The channel that makes so many turns in the original length."""
    return dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


Turn = tuple[Tensor, Tensor]
"""(cos, sin) of some positions, [n, rope] each."""


class Rotary:
    """Turns the last channels of vectors by their positions, or back."""

    def __init__(self, rope: Rope, dim: int) -> None:
        self._frequencies = inverse_frequencies(rope, dim)

    def at(self, positions: Tensor) -> Turn:
        """(cos, sin) [n, dim], each repeated for its pair."""
        angles = positions.float()[:, None] * self._frequencies
        return angles.cos().repeat_interleave(2, -1), angles.sin().repeat_interleave(2, -1)


def rotate(x: Tensor, turn: Turn, *, back: bool = False) -> Tensor:
    """x [n, …, dim]: its last channels rotated by (cos, sin) [n, rope]."""
    cos, sin = (each.view(each.shape[0], *(1,) * (x.dim() - 2), -1) for each in turn)
    sin = -sin if back else sin
    still, turned = x[..., : -cos.shape[-1]], x[..., -cos.shape[-1] :]
    pairs = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
    return torch.cat([still, turned * cos + pairs * sin], dim=-1)
