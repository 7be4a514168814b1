"""What the weights of every family go through: all faults are told at once, and no number is NaN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tiercel.errors import WeightsError
from tiercel.models.checkpoint import Checkpoint, StoredTensor, listed

COMPUTED = "inv_freq"
"""What old versions of `transformers` saved of rotary positions. The config says it all."""

FLOATS = ("F32", "BF16", "F16", "F64")


def refuse(checkpoint: Checkpoint, faults: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """One error that names all that is wrong, if anything is: kind of fault → (tensor, why)."""
    if told := [f"{what}: {listed([n + w for n, w in found])}" for what, found in faults.items() if found]:
        tensors = [name for found in faults.values() for name, _ in found]
        raise WeightsError(checkpoint.folder, "; ".join(told), tensors)


def check_finite(values: Tensor, stored: StoredTensor) -> None:
    """Refuse NaN and Inf. A sum is the cheapest test of all values, and it may overflow itself.

    264 M values of bf16 in the page cache, 2 busy x86 cores: hashed in 0.35 s, read in 0.31, summed in 0.16.
    """
    if not values.sum().isfinite() and not torch.stack(torch.aminmax(values)).isfinite().all():
        why = f"{stored.name} holds NaN or Inf, or a scale that makes it so"
        raise WeightsError(stored.file, why, [stored.name])
