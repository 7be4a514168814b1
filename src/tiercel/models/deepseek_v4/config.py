"""The dimensions of a DeepSeek V4 model, from its Hugging Face config.

Two forms of the same facts are read: DeepSeek's own (`compress_ratios`, `num_hash_layers`,
`qk_rope_head_dim`, `rope_scaling`) and what `transformers` turns it into (`layer_types`,
`mlp_layer_types`, `partial_rotary_factor`, `rope_parameters`). Both give the same `V4Config`.

A missing dimension is never guessed, and a setting that the model does not support is refused: a model that
runs with the wrong arithmetic answers fluently and wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tiercel.errors import SpecError
from tiercel.models.base import Dimensions, named
from tiercel.models.quantized import FP8_BLOCK
from tiercel.models.rotary import Rope, attention_factor, read_rope, rope_kind
from tiercel.spec.deepseek_v4 import HEAVY, RATES, SPARSE, compress_rates, kinds_of, mtp_layers, rope_dim
from tiercel.spec.hf_fields import check_only, number, per_layer, whole

MODEL_TYPE = "deepseek_v4"
ARCHITECTURE = "DeepseekV4ForCausalLM"
HASH, SCORE = "hash_moe", "moe"
SPARSE_RATIO = RATES[SPARSE]

ONLY: Mapping[str, object] = {
    "hidden_act": "silu",
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
"""Settings of other models that this model has fixed."""


@dataclass(frozen=True, kw_only=True)
class V4Config(Dimensions):
    """Every dimension the model and its weights need. Not how it is served, stored or quantized."""

    ratios: tuple[int, ...]
    """Tokens per compressed entry of each layer: 4 (sparse), 128 (heavy), 0 (window only)."""
    hash_layers: tuple[bool, ...]
    """Which layers choose experts by token id. The others choose by score."""

    heads: int = named("num_attention_heads")
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int = named("sliding_window")

    index_heads: int = named("index_n_heads")
    index_head_dim: int
    index_topk: int

    experts: int = named("n_routed_experts")
    experts_per_token: int = named("num_experts_per_tok")
    moe_intermediate: int = named("moe_intermediate_size")
    routed_scaling_factor: float
    swiglu_limit: float

    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float

    rope_main: Rope
    """The rotation of layers with ratio 0, and of the MTP layers."""
    rope_compress: Rope
    """The rotation of layers that compress: queries, window and entries alike."""
    mtp_layers: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Read the object in `config.json`. A `SpecError` names what is unusable."""
        _check_architecture(config)
        _check_choices(config)
        rope_main, rope_compress = _ropes(config)
        own = cls.read(
            config,
            ratios=_ratios(config),
            hash_layers=_hash_layers(config),
            rope_dim=rope_dim(config),
            rope_main=rope_main,
            rope_compress=rope_compress,
            mtp_layers=mtp_layers(config),
        )
        own._check_fit()
        return own

    @property
    def layers(self) -> int:
        """The target's layers; MTP layers are not among them."""
        return len(self.ratios)

    def _check_fit(self) -> None:
        """Refuses dimensions that do not fit together."""
        if self.heads % self.o_groups:
            raise SpecError("o_groups", self.o_groups, f"must divide num_attention_heads = {self.heads}")
        if self.experts_per_token > self.experts:
            why = f"is more than n_routed_experts = {self.experts}"
            raise SpecError("num_experts_per_tok", self.experts_per_token, why)
        if self.rope_dim > self.index_head_dim and SPARSE_RATIO in self.ratios:
            why = f"must hold the {self.rope_dim} rotary channels"
            raise SpecError("index_head_dim", self.index_head_dim, why)


def _check_architecture(config: Mapping[str, Any]) -> None:
    kind, classes = config.get("model_type"), config.get("architectures")
    if kind is None and isinstance(classes, list) and ARCHITECTURE in classes:
        return
    if kind != MODEL_TYPE:
        field, value = ("architectures", classes) if kind is None and classes else ("model_type", kind)
        raise SpecError(field, value, f"is not {MODEL_TYPE}, the only architecture this model runs")


def _check_choices(config: Mapping[str, Any]) -> None:
    check_only(config, ONLY)
    older = {SPARSE: config.get("compress_rate_csa"), HEAVY: config.get("compress_rate_hca")}
    rates = compress_rates(config) | {kind: rate for kind, rate in older.items() if rate is not None}
    for kind, rate in rates.items():
        if rate != RATES[kind]:
            raise SpecError(f"compress_rates.{kind}", rate, f"is not supported: the model has {RATES[kind]}")
    quantization = config.get("quantization_config")
    block = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if block is not None and tuple(block) != FP8_BLOCK:
        why = f"is not supported: an fp8 scale is of {FP8_BLOCK[0]} x {FP8_BLOCK[1]} values"
        raise SpecError("quantization_config.weight_block_size", block, why)


def _ratios(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens per entry of every layer. `compress_ratios` goes on for the MTP layers, which have windows."""
    kinds = kinds_of(config)
    if config.get("layer_types") is None:
        for i, ratio in enumerate(config["compress_ratios"]):
            if i >= len(kinds) and ratio != 0:
                raise SpecError(f"compress_ratios[{i}]", ratio, "is not 0: an MTP layer is a window layer")
    return tuple(RATES.get(kind, 0) for kind in kinds)


def _hash_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Which layers are hash layers: from `mlp_layer_types`, or else the first `num_hash_layers`."""
    if config.get("mlp_layer_types") is None:
        layers, hashed = whole(config, "num_hidden_layers"), whole(config, "num_hash_layers", least=0)
        return tuple(i < hashed for i in range(layers))
    kinds = per_layer(config, "mlp_layer_types", known=(HASH, SCORE))
    return tuple(kind == HASH for kind in kinds)


def _check_scale(compress: Mapping[str, Any]) -> None:
    """Refuses a config that makes `transformers` scale cos and sin: nothing scales them here."""
    if rope_kind(compress) == "yarn" and (factor := attention_factor(compress)) != 1.0:
        given = compress.get("attention_factor")
        why = "is not supported" if given else f"means {factor:.3f}, as in `transformers`: not supported"
        raise SpecError("attention_factor", given, f"{why}; the model has 1.0")


def _check_channels(config: Mapping[str, Any], rope: Mapping[str, Any], field: str) -> None:
    """Refuses layers that rotate different numbers of channels."""
    if (share := rope.get("partial_rotary_factor")) is None:
        return
    given = number({field: share}, field) * whole(config, "head_dim")
    if int(given) != (channels := rope_dim(config)):
        raise SpecError(field, share, f"is not supported: {channels} channels of every head turn")


def _ropes(config: Mapping[str, Any]) -> tuple[Rope, Rope]:
    """Rotations of window layers, which are plain in every form, and of layers that compress: YaRN if its
    numbers are given, else plain. `rope_parameters` may have an object for each; a flat object is for layers
    that compress."""
    given: Any = config.get("rope_parameters")
    kinds: list[Any] = []
    if isinstance(given, Mapping):
        kinds = [given.get(kind) for kind in ("main", "compress")]
    nested = bool(kinds) and all(isinstance(kind, Mapping) for kind in kinds)
    main, compress = kinds if nested else ({}, config.get("rope_scaling") or given or {})
    if not isinstance(compress, Mapping):
        raise SpecError("rope_scaling", compress, "must be an object")
    if (kind := rope_kind(main)) != "default":
        raise SpecError("rope_parameters.main.rope_type", kind, "is not supported: window layers are plain")
    _check_scale(compress if nested else {"attention_factor": 1.0, **compress})
    for name, own in {"main": main, "compress": compress}.items() if nested else ():
        _check_channels(config, own, f"rope_parameters.{name}.partial_rotary_factor")
    theta = number(main if "rope_theta" in main else config, "rope_theta")
    own = nested and "rope_theta" in compress  # in the flat form it belongs to the window layers
    compress_theta = number(compress, "rope_theta") if own else number(config, "compress_rope_theta")
    return Rope(theta), read_rope(compress, compress_theta)
