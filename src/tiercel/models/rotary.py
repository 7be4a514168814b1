"""Rotary positions: interleaved pairs, the last channels of a head; YaRN for layers that compress."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tiercel.errors import SpecError
from tiercel.kernels.reference import CosSin
from tiercel.spec.hf_fields import number, whole

POSITIONS_AT_ONCE = 4096


@dataclass(frozen=True)
class Rope:
    """One kind of rotary positions. A factor of 1 is plain, all else YaRN. Nothing scales cos and sin."""

    theta: float
    factor: float = 1.0
    original_length: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def rope_kind(given: Mapping[str, Any]) -> object:
    """The kind (`default`, `yarn`, …) that `rope_scaling` or `rope_parameters` of a config names."""
    return given.get("rope_type", given.get("type", "default"))


def read_rope(given: Mapping[str, Any], theta: float) -> Rope:
    """The rotation from the same object. The model itself reads or refuses what scales cos and sin."""
    kind = rope_kind(given)
    if kind == "default":
        return Rope(theta)
    if kind != "yarn":
        raise SpecError("rope_type", kind, "is none of default, yarn")
    if theta == 1:
        raise SpecError("rope_theta", theta, "is not for YaRN: all channels would turn equally fast")
    return Rope(
        theta,
        factor=number(given, "factor"),
        original_length=whole(given, "original_max_position_embeddings"),
        beta_fast=number({"beta_fast": 32.0, **given}, "beta_fast"),
        beta_slow=number({"beta_slow": 1.0, **given}, "beta_slow"),
    )


def attention_factor(given: Mapping[str, Any]) -> float:
    """What YaRN multiplies cos and sin with: the given factor, or one from the stretch, as in
    `transformers`."""
    if given.get("attention_factor") is not None:
        return number(given, "attention_factor")
    stretch = math.log(max(number(given, "factor"), 1.0))
    if given.get("mscale") and given.get("mscale_all_dim"):
        over, under = (0.1 * number(given, name) * stretch + 1.0 for name in ("mscale", "mscale_all_dim"))
        return over / under
    return 0.1 * stretch + 1.0


def inverse_frequencies(rope: Rope, dim: int) -> Tensor:
    """[dim / 2], on the CPU. YaRN mixes the plain and the stretched frequencies by their number of turns in
    the original length."""
    plain = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    if rope.factor == 1.0:
        return plain
    low, high = (_channel(rotations, rope, dim) for rotations in (rope.beta_fast, rope.beta_slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    channels = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    ramp = ((channels - low) / (high - low or 0.001)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _channel(rotations: float, rope: Rope, dim: int) -> float:
    """The channel that makes `rotations` turns in the original length."""
    return dim * math.log(rope.original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))


class Rotary:
    """(cos, sin) of positions, from a table that grows with the longest text.

    The table is computed in fp64 by numpy, in one thread. torch's cos runs MKL in several threads. When two
    threads enter MKL for the first time together, one of them may run other code: on a busy machine the
    second half of the table had other last bits in about one process of fifteen.
    """

    def __init__(self, rope: Rope, dim: int, device: torch.device | str = "cpu") -> None:
        self._frequencies = inverse_frequencies(rope, dim)
        self._cos = self._sin = torch.empty(0, dim // 2, device=device)

    def table(self, count: int) -> CosSin:
        """(cos, sin) of positions 0 … count - 1 and more."""
        while len(self._cos) < count:
            more = torch.arange(len(self._cos), len(self._cos) + POSITIONS_AT_ONCE, device="cpu")
            angles = (more.float()[:, None] * self._frequencies).double().numpy()
            cos, sin = (
                torch.from_numpy(each).float().to(self._cos) for each in (np.cos(angles), np.sin(angles))
            )
            self._cos, self._sin = torch.cat([self._cos, cos]), torch.cat([self._sin, sin])
        return self._cos, self._sin

    def at(self, positions: Tensor, count: int) -> CosSin:
        """Cosines and sines of these positions, all below `count`."""
        cos, sin = self.table(count)
        return cos[positions], sin[positions]
