"""Qwen3 on cached pages: takes spans, writes their keys and values to the pages, reads them, returns logits.

Every layer reads the whole prefix, and all of it is in pages: there are no rings and no tails.

A missing dimension is never guessed, and a setting that the model does not support is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor

from tiercel.errors import SpecError
from tiercel.kernels.choice import Kernels, ListKernels, make_kernels
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import (
    BeforeLayer,
    BytesCheck,
    Dimensions,
    Draft,
    Span,
    Weights,
    at_once,
    bytes_by_part,
    named,
    part_of,
)
from tiercel.models.batch import Batch
from tiercel.models.checkpoint import Checkpoint, check_finite, unfit
from tiercel.models.families import Family
from tiercel.models.grouped import Grouping, Layer, Reach, Shape, layer_shapes
from tiercel.models.rotary import Rope, Rotary, attention_factor, read_rope, rope_kind
from tiercel.progress import progress
from tiercel.spec.attention import kv_stream
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.hf_fields import check_only, number, per_layer, whole

ONLY: Mapping[str, object] = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
"""Settings of other models that this model has fixed."""

ROPE_ONLY: Mapping[str, object] = {"truncate": True, "partial_rotary_factor": 1.0}

FORMATS = ("fp32", "bf16")

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Dimensions):
    """Every dimension the model and its weights need."""

    intermediate_size: int
    layers: int = named("num_hidden_layers")
    heads: int = named("num_attention_heads")
    kv_heads: int
    head_dim: int
    rope: Rope
    attention_factor: float
    """What YaRN multiplies cos and sin with."""

    @property
    def grouping(self) -> Grouping:
        return Grouping(self.heads, self.kv_heads, self.head_dim, self.rms_norm_eps, self.attention_factor)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Read the object in `config.json`. A `SpecError` names what is unusable."""
        check_only(config, ONLY)
        if config.get("quantization_config") is not None:
            raise SpecError("quantization_config", config["quantization_config"], "is not supported")
        if config.get("layer_types") is not None:
            per_layer(config, "layer_types", known=("full_attention",))
        some = "num_attention_heads" if config.get("num_key_value_heads") is None else "num_key_value_heads"
        rope, factor = _rope(config)
        own = cls.read(config, kv_heads=whole(config, some), rope=rope, attention_factor=factor)
        if own.heads % own.kv_heads:
            raise SpecError(some, own.kv_heads, f"must divide num_attention_heads = {own.heads}")
        if own.head_dim % 2:
            raise SpecError("head_dim", own.head_dim, "must be even: channels turn in pairs")
        return own


def _rope(config: Mapping[str, Any]) -> tuple[Rope, float]:
    """Plain or YaRN, and the factor of cos and sin. As in `transformers`, `rope_scaling` overrides
    `rope_parameters`."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise SpecError("rope_scaling", given, "must be an object")
    check_only(given, ROPE_ONLY)
    rope = read_rope(given, number(given if "rope_theta" in given else config, "rope_theta"))
    return rope, attention_factor(given) if rope_kind(given) == "yarn" else 1.0


def declare(config: Mapping[str, Any], page_tokens: int, format: str) -> CacheSpec:
    if format not in FORMATS:
        raise SpecError("format", format, f"is none of {', '.join(FORMATS)}, which Qwen3 has")
    own = Qwen3Config.from_hf(config)
    stream = kv_stream(tuple(range(own.layers)), own.kv_heads, own.head_dim, format)
    return CacheSpec("qwen3", page_tokens, (stream,))


# Weights


def parameters(config: Qwen3Config, *, tied: bool) -> dict[str, Shape]:
    """Every parameter by its name."""
    layer = layer_shapes(config.hidden_size, config.intermediate_size, config.grouping)
    d = config.hidden_size
    ends: dict[str, Shape] = {EMBEDDING: (config.vocab_size, d), "model.norm.weight": (d,)}
    if not tied:
        ends[HEAD] = ends[EMBEDDING]
    layers = range(config.layers)
    return ends | {f"model.layers.{i}.{name}.weight": layer[name] for i in layers for name in layer}


def load_weights(  # noqa: PLR0913
    checkpoint: Checkpoint,
    config: Qwen3Config,
    device: str = "cpu",
    matrices: torch.dtype = torch.float32,
    *,
    draft: bool = False,  # noqa: ARG001 - there is none
    fp8: bool = False,  # noqa: ARG001 - no Qwen3 checkpoint that is read here has it
    check: BytesCheck = lambda _: None,
) -> dict[str, Tensor]:
    """Every parameter by its name: matrices in the type asked for, norms in fp32. One error names all
    that does not fit, before a byte is read.

    As in `transformers`, embeddings are not tied where the checkpoint has a head of its own.
    """
    stored = checkpoint.tensors
    wanted = parameters(config, tied=config.tie_word_embeddings and HEAD not in stored)
    known = [(each, wanted[name]) for name, each in stored.items() if name in wanted]
    faults = {
        "missing": [(name, "") for name in wanted if name not in stored],
        "not of this model": [(name, "") for name in sorted(stored) if name not in wanted],
        "unfit": [(each.name, why) for each, shape in known if (why := unfit(each, shape))],
    }
    checkpoint.refuse(faults)
    dtypes = {name: matrices if len(shape) > 1 else torch.float32 for name, shape in wanted.items()}
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in wanted.items()}
    check(bytes_by_part(sizes.items()))
    weights = {}
    with progress("weights", sum(sizes.values())) as done:
        for each, _ in known:
            weights[each.name] = checkpoint.read(each.name).to(device, dtypes[each.name], copy=True)
            check_finite(weights[each.name], each)
            done(sizes[each.name])
    weights.setdefault(HEAD, weights[EMBEDDING])
    return weights


# The model


class Qwen3:
    """The whole model. Entries lie in pages alone, by position: a guess that is refused is overwritten."""

    draft: Draft | None = None

    def __init__(  # noqa: PLR0913
        self,
        config: Qwen3Config,
        weights: Weights,
        memory: DeviceMemory,
        _rings: int,
        kernels: Kernels | None = None,
        _guesses_max: int = 0,
    ) -> None:
        self.config, self.vocab_size = config, config.vocab_size
        offered = kernels or make_kernels(device=str(memory.device), offered=FAMILY.kernels)
        self.kernels = k = cast("ListKernels", offered)
        self._page_tokens = memory.spec.page_tokens
        self._embedding, self._lm_head = weights[EMBEDDING], k.pack(weights[HEAD])
        self._norm = weights["model.norm.weight"]
        self._rotary = Rotary(config.rope, config.head_dim, memory.device)
        self.layers = [
            Layer(config.grouping, k, part_of(weights, f"model.layers.{i}."), memory, i)
            for i in range(config.layers)
        ]

    @torch.inference_mode()
    def forward(
        self, spans: Sequence[Span], rows: Sequence[int] | None = None, before: BeforeLayer = at_once
    ) -> Tensor:
        """Logits of these flat tokens; None: the last token of each span."""
        batch = Batch(spans, 0, self._embedding.device)
        rotation = self._rotary.at(batch.positions, batch.longest)
        in_place = self.layers[0].entries.in_place
        reach = Reach(batch, self._page_tokens, self.config.kv_heads, in_place=in_place)
        x = self._embedding[batch.tokens]
        for i, layer in enumerate(self.layers):
            before(i)
            x = layer(x, rotation, reach)
        x = x[batch.last if rows is None else torch.as_tensor(rows, dtype=torch.long, device=x.device)]
        return self.kernels.linear(self.kernels.norm(x, self._norm, self.config.rms_norm_eps), self._lm_head)

    def warm_up(self, _longest: int) -> None:
        """Nothing is prepared."""

    def resume(self, ring: int, tails: Sequence[tuple[int, int]]) -> None:
        """Pages hold everything."""


FAMILY = Family(read=Qwen3Config.from_hf, declare=declare, load=load_weights, build=Qwen3)
