"""An EAGLE head with random weights for a reference model, as tensors and as a file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.eagle_weights import parameters
from tiercel.models.grouped import Grouping

HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 8, 24


def make_head(config: V4Config, seed: int = 0) -> dict[str, Tensor]:
    """Norms are random too: ones would hide mistakes."""
    random = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in parameters(config, INNER, Grouping(HEADS, KV_HEADS, HEAD_DIM, 1e-6)).items():
        noise = torch.randn(shape, generator=random)
        made[name] = noise * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.2 * noise
    return made


def write_head(file: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return file
