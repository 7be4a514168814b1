"""The file of an EAGLE head: one safetensors file, for one model, with tensors of these names.

    streams_norm, streams_proj       of a token's streams [n · d] → its hidden state [d]
    enorm, hnorm, fc                 embedding of a token, hidden state of the token before → input [d]
    input_layernorm, self_attn.…, post_attention_layernorm, mlp.…     one layer, named as Qwen3's
    norm                             before the model's own `lm_head`

All end in `.weight`. Every dimension follows from the shapes. The head shares the model's embedding and
`lm_head`, so its width must be the model's.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
from torch import Tensor

from tiercel.errors import WeightsError
from tiercel.models.base import Weights
from tiercel.models.checkpoint import StoredTensor, check_finite, open_file, refuse, unfit
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.digest import hash_file
from tiercel.models.grouped import Grouping, Shape, layer_shapes
from tiercel.spec.attention import Heads

FILE = "eagle.safetensors"
"""The name of the file in a model's folder."""

PREFIX = "eagle."
"""The head's parameters have this prefix among those of the model."""

TELLING = ("self_attn.q_norm", "self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj")
"""The parameters whose first dimensions are not the model's."""


class HeadFile:
    """A head's file: opening it checks names, shapes and types. `load` reads the bytes."""

    def __init__(self, file: Path, config: V4Config) -> None:
        self.file = file
        self._opened, self._stored = open_file(file)
        names = [f"{name}.weight" for name in TELLING]
        missing = [(name, "") for name in names if not self._rows(name)]
        refuse(file, {"missing, or without rows": missing})
        head_dim, queries, keys, inner = (self._rows(name) for name in names)
        if head_dim % 2 or queries % head_dim or keys % head_dim or queries % keys:
            why = f"heads of {head_dim} channels do not fit {queries} channels of queries and {keys} of keys"
            raise WeightsError(file, why, names[:3])
        grouping = Grouping(queries // head_dim, keys // head_dim, head_dim, config.rms_norm_eps)
        wanted = parameters(config, inner, grouping)
        known = [(each, wanted[name]) for name, each in self._stored.items() if name in wanted]
        faults = {
            "missing": [(name, "") for name in wanted if name not in self._stored],
            "not of an EAGLE head": [(name, "") for name in sorted(self._stored) if name not in wanted],
            "unfit": [(each.name, why) for each, shape in known if (why := unfit(each, shape))],
        }
        refuse(file, faults)
        self.heads = Heads(grouping.kv_heads, head_dim)
        """What `spec.deepseek_v4_eagle` declares."""

    def _rows(self, name: str) -> int:
        stored = self._stored.get(name)
        return stored.shape[0] if stored is not None and stored.shape else 0

    @property
    def products(self) -> int:
        """Multiplications of a guess, without `lm_head`."""
        return sum(prod(each.shape) for each in self._stored.values() if len(each.shape) > 1)

    def digest(self) -> str:
        """A name for the weights, for `spec.deepseek_v4_eagle`."""
        try:
            return hash_file(self.file)
        except OSError as error:
            raise WeightsError(self.file, f"can not be read: {error}") from error

    def load(self, device: str = "cpu", matrices: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Every parameter, to be added to the model's: matrices in the type asked for, norms in fp32."""
        return {PREFIX + name: self._read(each, device, matrices) for name, each in self._stored.items()}

    def _read(self, stored: StoredTensor, device: str, matrices: torch.dtype) -> Tensor:
        dtype = matrices if len(stored.shape) > 1 else torch.float32
        tensor: Tensor = self._opened.get_tensor(stored.name).to(device, dtype, copy=True)
        check_finite(tensor, stored)
        return tensor


def parameters(config: V4Config, inner: int, grouping: Grouping) -> dict[str, Shape]:
    """Every parameter by its name in the file."""
    d, wide = config.hidden_size, config.hc_mult * config.hidden_size
    own: dict[str, Shape] = {
        "streams_norm": (wide,),
        "streams_proj": (d, wide),
        "enorm": (d,),
        "hnorm": (d,),
        "fc": (d, 2 * d),
        "norm": (d,),
    }
    return {f"{name}.weight": shape for name, shape in (own | layer_shapes(d, inner, grouping)).items()}


def grouping_of(weights: Weights, eps: float) -> Grouping:
    """The dimensions of loaded parameters, whose names have no prefix."""
    head_dim, queries, keys, _ = (len(weights[f"{name}.weight"]) for name in TELLING)
    return Grouping(queries // head_dim, keys // head_dim, head_dim, eps)
