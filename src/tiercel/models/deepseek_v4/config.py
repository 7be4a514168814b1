"""The dimensions of a DeepSeek V4 model, from its Hugging Face config.

Two forms of the same facts are read: DeepSeek's own (`compress_ratios`, `num_hash_layers`,
`qk_rope_head_dim`, `rope_scaling`) and what `transformers` turns it into (`layer_types`,
`mlp_layer_types`, `partial_rotary_factor`, `rope_parameters`). Both give the same `V4Config`.

A dimension that is missing is never guessed, and a choice the model does not make is refused: a model
that runs with the wrong arithmetic answers fluently and wrongly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tiercel.errors import SpecError
from tiercel.models.rotary import Rope, read_rope, rope_kind
from tiercel.spec.deepseek_v4 import HEAVY, RATES, SLIDING, SPARSE, mtp_layers, rope_dim
from tiercel.spec.hf_fields import check_only, flag, layer_kinds, number, per_layer, whole

MODEL_TYPE = "deepseek_v4"
ARCHITECTURE = "DeepseekV4ForCausalLM"
HASH, SCORE = "hash_moe", "moe"

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
"""What the model does without asking."""

FP8_BLOCK = (128, 128)
"""One scale per so many rows and columns of an fp8 weight: `quantization_config.weight_block_size`."""


@dataclass(frozen=True)
class V4Config:
    """Every dimension the model and its weights need. Not how it is served, stored or quantized."""

    vocab_size: int
    hidden_size: int
    ratios: tuple[int, ...]
    """Tokens per compressed entry of each layer: 4 (sparse), 128 (heavy), 0 (window only)."""
    hash_layers: tuple[bool, ...]
    """Which layers choose experts by token id. The others choose by score."""

    heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int

    index_heads: int
    index_head_dim: int
    index_topk: int

    experts: int
    experts_per_token: int
    moe_intermediate: int
    routed_scaling_factor: float
    swiglu_limit: float

    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float

    rope_main: Rope
    """Of layers with ratio 0, and of the MTP layers."""
    rope_compress: Rope
    """Of layers that compress: queries, window and entries alike."""

    mtp_layers: int
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """From the object in `config.json`. Anything unusable is a `SpecError` that names it."""
        _check_architecture(config)
        _check_choices(config)
        own = cls(
            vocab_size=whole(config, "vocab_size"),
            hidden_size=whole(config, "hidden_size"),
            ratios=_ratios(config),
            hash_layers=_hash_layers(config),
            heads=whole(config, "num_attention_heads"),
            head_dim=whole(config, "head_dim"),
            rope_dim=rope_dim(config),
            q_lora_rank=whole(config, "q_lora_rank"),
            o_groups=whole(config, "o_groups"),
            o_lora_rank=whole(config, "o_lora_rank"),
            window=whole(config, "sliding_window"),
            index_heads=whole(config, "index_n_heads"),
            index_head_dim=whole(config, "index_head_dim"),
            index_topk=whole(config, "index_topk"),
            experts=whole(config, "n_routed_experts"),
            experts_per_token=whole(config, "num_experts_per_tok"),
            moe_intermediate=whole(config, "moe_intermediate_size"),
            routed_scaling_factor=number(config, "routed_scaling_factor"),
            swiglu_limit=number(config, "swiglu_limit"),
            hc_mult=whole(config, "hc_mult"),
            hc_sinkhorn_iters=whole(config, "hc_sinkhorn_iters"),
            hc_eps=number(config, "hc_eps"),
            rms_norm_eps=number(config, "rms_norm_eps"),
            rope_main=_rope_main(config),
            rope_compress=_rope_compress(config),
            mtp_layers=mtp_layers(config),
            tie_word_embeddings=flag(config, "tie_word_embeddings"),
        )
        own._check_fit()
        return own

    @property
    def digest(self) -> str:
        """A name for the arithmetic: changes with every number the model reads from its config."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    @property
    def layers(self) -> int:
        """The target's layers; MTP layers are not among them."""
        return len(self.ratios)

    def _check_fit(self) -> None:
        """Dimensions that are fine alone and can not be used together."""
        if self.heads % self.o_groups:
            raise SpecError("o_groups", self.o_groups, f"must divide num_attention_heads = {self.heads}")
        if self.experts_per_token > self.experts:
            why = f"is more than n_routed_experts = {self.experts}"
            raise SpecError("num_experts_per_tok", self.experts_per_token, why)
        if self.rope_dim > self.index_head_dim and SPARSE_RATIO in self.ratios:
            why = f"must hold the {self.rope_dim} rotary channels"
            raise SpecError("index_head_dim", self.index_head_dim, why)


SPARSE_RATIO, HEAVY_RATIO = RATES[SPARSE], RATES[HEAVY]
RATIO_OF = {SLIDING: 0, **RATES}


# What must be so


def _check_architecture(config: Mapping[str, Any]) -> None:
    kind, classes = config.get("model_type"), config.get("architectures")
    if kind is None and isinstance(classes, list) and ARCHITECTURE in classes:
        return
    if kind != MODEL_TYPE:
        field, value = ("architectures", classes) if kind is None and classes else ("model_type", kind)
        raise SpecError(field, value, f"is not {MODEL_TYPE}, the only architecture this model runs")


def _check_choices(config: Mapping[str, Any]) -> None:
    check_only(config, ONLY)
    for name, rate in _rates(config).items():
        if rate is not None and rate != RATES[name]:
            raise SpecError(f"compress_rates.{name}", rate, f"is not supported: the model has {RATES[name]}")
    quantization = config.get("quantization_config")
    block = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if block is not None and tuple(block) != FP8_BLOCK:
        why = f"is not supported: an fp8 scale is of {FP8_BLOCK[0]} x {FP8_BLOCK[1]} values"
        raise SpecError("quantization_config.weight_block_size", block, why)


def _rates(config: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens per entry as the config tells them, in the present and in an older form."""
    given = config.get("compress_rates") or {}
    if not isinstance(given, Mapping) or not given.keys() <= RATES.keys():
        raise SpecError("compress_rates", given, f"must map {' and '.join(RATES)} to tokens per entry")
    older = {SPARSE: config.get("compress_rate_csa"), HEAVY: config.get("compress_rate_hca")}
    return {name: given.get(name) if older[name] is None else older[name] for name in RATES}


# Layers


def _ratios(config: Mapping[str, Any]) -> tuple[int, ...]:
    """From `layer_types`, or else from `compress_ratios`, which goes on for the MTP layers."""
    if config.get("layer_types") is not None:
        return tuple(RATIO_OF[kind] for kind in layer_kinds(config, tuple(RATIO_OF)))
    layers = whole(config, "num_hidden_layers")
    ratios = per_layer(config, "compress_ratios", extra=mtp_layers(config))
    for i, ratio in enumerate(ratios):
        known = tuple(RATIO_OF.values()) if i < layers else (0,)
        if ratio not in known or isinstance(ratio, bool):
            raise SpecError(f"compress_ratios[{i}]", ratio, f"is none of {', '.join(map(str, known))}")
    return tuple(ratios[:layers])


def _hash_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """From `mlp_layer_types`, or else the first `num_hash_layers`."""
    if config.get("mlp_layer_types") is None:
        layers, hashed = whole(config, "num_hidden_layers"), whole(config, "num_hash_layers", least=0)
        return tuple(i < hashed for i in range(layers))
    kinds = per_layer(config, "mlp_layer_types")
    for i, kind in enumerate(kinds):
        if kind not in (HASH, SCORE):
            raise SpecError(f"mlp_layer_types[{i}]", kind, f"is none of {HASH}, {SCORE}")
    return tuple(kind == HASH for kind in kinds)


# Rotary positions


def _rope_main(config: Mapping[str, Any]) -> Rope:
    """Plain in every form."""
    given = _nested(config).get("main", {})
    if (kind := rope_kind(given)) != "default":
        raise SpecError("rope_parameters.main.rope_type", kind, "is not supported: window layers are plain")
    return Rope(_theta(given, config, "rope_theta"))


def _rope_compress(config: Mapping[str, Any]) -> Rope:
    """YaRN if the config tells its numbers, plain if not."""
    given = _nested(config).get("compress")
    if given is None:
        given = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(given, Mapping):
            raise SpecError("rope_scaling", given, "must be an object")
        theta = number(config, "compress_rope_theta")  # the flat forms' rope_theta is the main one
    else:
        theta = _theta(given, config, "compress_rope_theta")
    if rope_kind(given) == "yarn" and given.get("attention_factor", 1.0) != 1.0:
        raise SpecError("attention_factor", given["attention_factor"], "is not supported: the model has 1.0")
    return read_rope(given, theta)


def _nested(config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """`rope_parameters` where it tells the two kinds apart, else nothing."""
    given = config.get("rope_parameters")
    if not isinstance(given, Mapping):
        return {}
    kinds = {name: given[name] for name in ("main", "compress") if isinstance(given.get(name), Mapping)}
    return kinds if len(kinds) == 2 else {}


def _theta(given: Mapping[str, Any], config: Mapping[str, Any], name: str) -> float:
    return number(given, "rope_theta") if "rope_theta" in given else number(config, name)
