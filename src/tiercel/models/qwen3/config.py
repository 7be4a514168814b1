"""The dimensions of a Qwen3 model, dense or with experts, from its Hugging Face config; and what it caches.

A missing dimension is never guessed, and a setting that the model does not support is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tiercel.errors import SpecError
from tiercel.models.base import Dimensions, named
from tiercel.models.grouped import Grouping
from tiercel.models.rotary import Rope, attention_factor, read_rope, rope_kind
from tiercel.spec.attention import kv_stream
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.hf_fields import check_only, family_name, flag, number, per_layer, whole

DENSE, MOE = "qwen3", "qwen3_moe"

ONLY: Mapping[str, object] = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
"""Settings of other models that this model has fixed."""

ROPE_ONLY: Mapping[str, object] = {"truncate": True, "partial_rotary_factor": 1.0}

FORMATS = ("fp32", "bf16")


@dataclass(frozen=True)
class Experts:
    """The experts of a layer, and which layers have them."""

    count: int
    per_token: int
    intermediate: int
    normalized: bool
    """The weights of a token's experts are divided by their sum."""
    layers: tuple[int, ...]
    """The others have one feed-forward of `intermediate_size`."""


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
    experts: Experts | None
    """None: every layer has one feed-forward."""

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
        experts = _experts(config) if _name(config) == MOE else None
        own = cls.read(
            config, kv_heads=whole(config, some), rope=rope, attention_factor=factor, experts=experts
        )
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


def _name(config: Mapping[str, Any]) -> str:
    return family_name(config, (DENSE, MOE))


def _experts(config: Mapping[str, Any]) -> Experts:
    counts = [name for name in ("num_experts", "num_local_experts") if config.get(name) is not None]
    if len({config[name] for name in counts}) > 1:
        raise SpecError(counts[1], config[counts[1]], f"is not {counts[0]} = {config[counts[0]]}")
    step, layers = whole(config, "decoder_sparse_step"), whole(config, "num_hidden_layers")
    plain = config.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(isinstance(i, int) and 0 <= i < layers for i in plain):
        raise SpecError("mlp_only_layers", plain, f"must be a list of layers, from 0 to {layers - 1}")
    found = Experts(
        count=whole(config, counts[0] if counts else "num_experts"),
        per_token=whole(config, "num_experts_per_tok"),
        intermediate=whole(config, "moe_intermediate_size"),
        normalized=flag(config, "norm_topk_prob"),
        layers=tuple(i for i in range(layers) if (i + 1) % step == 0 and i not in plain),
    )
    if found.per_token > found.count:
        why = f"is more than the {found.count} experts that there are"
        raise SpecError("num_experts_per_tok", found.per_token, why)
    return found


def declare(config: Mapping[str, Any], page_tokens: int, format: str) -> CacheSpec:
    if format not in FORMATS:
        raise SpecError("format", format, f"is none of {', '.join(FORMATS)}, which Qwen3 has")
    own = Qwen3Config.from_hf(config)
    stream = kv_stream(tuple(range(own.layers)), own.kv_heads, own.head_dim, format)
    return CacheSpec(_name(config), page_tokens, (stream,))
