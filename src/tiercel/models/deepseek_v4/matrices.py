"""Which parameters the model multiplies as one matrix, and how they lie in memory.

Everything that reads the same input is one matrix: its parameters lie one after the other, so that nothing is
copied to put them together.

    │ q_a_proj │ kv_proj │ compressor.kv_proj │ …                        one matrix [n, k], of one dtype
    │ experts 0, 1, 2, … │ the shared expert's gate_proj │ its up_proj │   matrices [m, n, k]

If they are fp8, their scales lie together in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from tiercel.models.base import Weights
from tiercel.models.deepseek_v4.config import FP8_BLOCK
from tiercel.models.deepseek_v4.quantized import FP8, Shape, scales_of

SCALE = "_scale"
"""Added to the name of an fp8 matrix: the name of its scales."""

INPUT = (
    "q_a_proj.weight",
    "kv_proj.weight",
    "compressor.kv_proj.weight",
    "compressor.gate_proj.weight",
    "compressor.indexer.kv_proj.weight",
    "compressor.indexer.gate_proj.weight",
    "compressor.indexer.scorer.weights_proj.weight",
)
KEYS_VALUES = ("kv_proj.weight",)
"""A part of `INPUT`, which a draft multiplies by itself too."""
QUERIES = ("q_b_proj.weight", "compressor.indexer.q_b_proj.weight")
OUT_LOW, OUT = ("o_a_proj.weight",), ("o_b_proj.weight",)
GATE_UP = ("experts.gate_up_proj", "shared_experts.gate_proj.weight", "shared_experts.up_proj.weight")
DOWN = ("experts.down_proj", "shared_experts.down_proj.weight")

ATTENTION, MLP = "self_attn.", "mlp."
MATRICES = {ATTENTION: (INPUT, QUERIES, OUT_LOW, OUT), MLP: (GATE_UP, DOWN)}
"""The matrices of each part of a layer, by the parameters that they are made of; some layers have fewer."""


class Group(NamedTuple):
    """Parameters that lie together, or a single one."""

    shapes: Mapping[str, Shape]
    dtype: torch.dtype

    @property
    def scales(self) -> dict[str, Shape]:
        if self.dtype != FP8:
            return {}
        return {name + SCALE: scales_of(shape, FP8_BLOCK) for name, shape in self.shapes.items()}

    @property
    def bytes(self) -> int:
        sizes = (self.shapes, self.dtype), (self.scales, torch.float32)
        return sum(prod(shape) * dtype.itemsize for shapes, dtype in sizes for shape in shapes.values())

    def allocate(self, device: str) -> dict[str, Tensor]:
        """Every parameter and its scales by their names."""
        return _views(self.shapes, self.dtype, device) | _views(self.scales, torch.float32, device)


def _views(shapes: Mapping[str, Shape], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    sizes = [prod(shape) for shape in shapes.values()]
    parts = torch.empty(sum(sizes), dtype=dtype, device=device).split(sizes)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def grouped(names: Iterable[str]) -> tuple[list[list[str]], list[str]]:
    """Returns (the parameters of each matrix, those that belong to none)."""
    rest = dict.fromkeys(names)
    layers = dict.fromkeys(name.partition(ATTENTION)[0] for name in rest if ATTENTION in name)
    wholes = [
        [layer + part + name for name in matrix if layer + part + name in rest]
        for layer in layers
        for part, matrices in MATRICES.items()
        for matrix in matrices
    ]
    for name in (name for whole in wholes for name in whole):
        del rest[name]
    return wholes, list(rest)


def joined(weights: Weights, names: Sequence[str]) -> tuple[Tensor, ...]:
    """These parameters as one matrix, or as several if the first of them is several; and the scales, if they
    are fp8. They are copied only if they do not lie together."""
    own = [weights[name] for name in names if name in weights]
    scales = [weights[name + SCALE] for name in names if name + SCALE in weights]
    assert len(scales) in (0, len(own)), names
    return tuple(_whole(parts) for parts in (own, scales) if parts)


def _whole(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    shape = sum(each.numel() for each in parts) // first[0].numel(), *first.shape[1:]
    memory, at = first.untyped_storage().data_ptr(), first.storage_offset()
    for each in parts:
        here = each.untyped_storage().data_ptr() == memory and each.storage_offset() == at
        if not (here and each.is_contiguous() and each.dtype == first.dtype):
            return torch.cat([each.flatten() for each in parts]).view(shape)
        at += each.numel()
    return first.as_strided(shape, first.stride())
