"""The dimensions of a Qwen3 model, what it caches, and its weights, from a Hugging Face folder.

A missing dimension is never guessed, and a setting that the model does not support is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from tiercel.errors import SpecError
from tiercel.models.base import Dimensions, named
from tiercel.models.checkpoint import COMPUTED, FLOATS, Checkpoint, StoredTensor, check_finite
from tiercel.models.rotary import Rope, read_rope, rope_kind
from tiercel.spec.attention import values
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.hf_fields import check_only, number, per_layer, whole
from tiercel.spec.stream import Stream

Shape = tuple[int, ...]

ONLY: Mapping[str, object] = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
"""Settings of other models that this model has fixed."""

ROPE_ONLY: Mapping[str, object] = {"truncate": True, "partial_rotary_factor": 1.0}

FORMATS = ("fp32", "bf16")

STREAM = "kv"
"""One entry per token, one part per kv head: its key, turned, then its value."""

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

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """From the object in `config.json`. Anything unusable is a `SpecError` that names it."""
        check_only(config, ONLY)
        if config.get("quantization_config") is not None:
            raise SpecError("quantization_config", config["quantization_config"], "is not supported")
        if config.get("layer_types") is not None:
            per_layer(config, "layer_types", known=("full_attention",))
        some = "num_attention_heads" if config.get("num_key_value_heads") is None else "num_key_value_heads"
        rope, attention_factor = _rope(config)
        own = cls.read(config, kv_heads=whole(config, some), rope=rope, attention_factor=attention_factor)
        if own.heads % own.kv_heads:
            raise SpecError(some, own.kv_heads, f"must divide num_attention_heads = {own.heads}")
        if own.head_dim % 2:
            raise SpecError("head_dim", own.head_dim, "must be even: channels turn in pairs")
        return own


def _rope(config: Mapping[str, Any]) -> tuple[Rope, float]:
    """Plain or YaRN, and the factor of cos and sin. As in `transformers`, `rope_scaling` goes before
    `rope_parameters`."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise SpecError("rope_scaling", given, "must be an object")
    check_only(given, ROPE_ONLY)
    rope = read_rope(given, number(given if "rope_theta" in given else config, "rope_theta"))
    if rope_kind(given) != "yarn":
        return rope, 1.0
    for name in ("mscale", "mscale_all_dim"):
        if given.get(name) is not None:
            raise SpecError(name, given[name], "is not supported: attention_factor says it")
    if given.get("attention_factor") is not None:
        return rope, number(given, "attention_factor")
    return rope, 0.1 * math.log(max(rope.factor, 1.0)) + 1.0


def declare(config: Mapping[str, Any], page_tokens: int, format: str) -> CacheSpec:
    """A head's key and value are one row for attention, and its rows of a page lie together: a part each.

    (Where a token's heads lie together, rows of one head are far apart: attention took twice as long.)
    """
    if format not in FORMATS:
        raise SpecError("format", format, f"is none of {', '.join(FORMATS)}, which Qwen3 has")
    own = Qwen3Config.from_hf(config)
    head = values(2 * own.head_dim, format)
    others = (replace(head, name=f"{format}.{i}") for i in range(1, own.kv_heads))
    stream = Stream(STREAM, tuple(range(own.layers)), (head, *others), encoding=format)
    return CacheSpec("qwen3", page_tokens, (stream,))


# Weights


def parameters(config: Qwen3Config, *, tied: bool) -> dict[str, Shape]:
    """Every parameter by its name."""
    d, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.heads * dim, config.kv_heads * dim
    layer: dict[str, Shape] = {
        "input_layernorm": (d,),
        "self_attn.q_proj": (queries, d),
        "self_attn.k_proj": (keys, d),
        "self_attn.v_proj": (keys, d),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "self_attn.o_proj": (d, queries),
        "post_attention_layernorm": (d,),
        "mlp.gate_proj": (inner, d),
        "mlp.up_proj": (inner, d),
        "mlp.down_proj": (d, inner),
    }
    ends: dict[str, Shape] = {EMBEDDING: (config.vocab_size, d), "model.norm.weight": (d,)}
    if not tied:
        ends[HEAD] = ends[EMBEDDING]
    layers = range(config.layers)
    return ends | {f"model.layers.{i}.{name}.weight": layer[name] for i in layers for name in layer}


def load_weights(checkpoint: Checkpoint, config: Qwen3Config, device: str = "cpu") -> dict[str, Tensor]:
    """Every parameter by its name, in fp32. One error names all that does not fit, before a byte is read.

    As in `transformers`, embeddings are not tied where the checkpoint has a head of its own.
    """
    stored = {name: each for name, each in checkpoint.tensors.items() if not name.endswith(COMPUTED)}
    wanted = parameters(config, tied=config.tie_word_embeddings and HEAD not in stored)
    known = [(each, wanted[name]) for name, each in stored.items() if name in wanted]
    faults = {
        "missing": [(name, "") for name in wanted if name not in stored],
        "not of this model": [(name, "") for name in sorted(stored) if name not in wanted],
        "unfit": [(each.name, why) for each, shape in known if (why := _unfit(each, shape))],
    }
    checkpoint.refuse(faults)
    weights = {}
    for each, _ in known:
        weights[each.name] = checkpoint.read(each.name).to(device, torch.float32, copy=True)
        check_finite(weights[each.name], each)
    weights.setdefault(HEAD, weights[EMBEDDING])
    return weights


def _unfit(stored: StoredTensor, shape: Shape) -> str:
    """Why a tensor can not be what its name says, or nothing."""
    if stored.shape == shape and stored.dtype in FLOATS:
        return ""
    return f" is {list(stored.shape)} of {stored.dtype}, must be {list(shape)} of {', '.join(FLOATS)}"
