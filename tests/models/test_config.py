"""Goal: one model has one `V4Config`, whichever form its config has. Method: transformers translates."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models.folders import KINDS, make_config
from tiercel.errors import SpecError
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.rotary import Rope, Rotary, inverse_frequencies

YARN = Rope(160000.0, factor=16.0, original_length=65536, beta_fast=32.0, beta_slow=1.0)


def translated(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers writes it."""
    own: dict[str, Any] = json.loads(json.dumps(DeepseekV4Config(**config).to_dict()))
    assert "compress_ratios" not in own and "num_hash_layers" not in own and "rope_scaling" not in own
    return own


def test_every_dimension_is_taken() -> None:
    assert V4Config.from_hf(make_config()) == V4Config(
        vocab_size=24,
        hidden_size=32,
        ratios=(0, 4, 128, 4),
        hash_layers=(True, True, False, False),
        heads=4,
        head_dim=16,
        rope_dim=4,
        q_lora_rank=8,
        o_groups=2,
        o_lora_rank=6,
        window=8,
        index_heads=2,
        index_head_dim=8,
        index_topk=4,
        experts=3,
        experts_per_token=2,
        moe_intermediate=12,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
        rope_main=Rope(10000.0),
        rope_compress=YARN,
        mtp_layers=1,
        tie_word_embeddings=False,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": None},
        {"num_hash_layers": 0, "compress_ratios": [128, 128, 4, 0, 0]},
        {"num_hash_layers": 9},
        {"num_nextn_predict_layers": 0, "compress_ratios": [0, 4, 128, 4]},
        {"rope_theta": 5000, "compress_rope_theta": 70000.5, "tie_word_embeddings": True},
        {"head_dim": 48, "qk_rope_head_dim": 6},
    ],
    ids=lambda changes: ", ".join(changes) or "as it is",
)
def test_both_forms_are_the_same_model(changes: dict[str, Any]) -> None:
    config = make_config(**changes)
    assert V4Config.from_hf(translated(config)) == V4Config.from_hf(config)


def test_the_defaults_of_transformers_are_flash_with_other_layers() -> None:
    own = V4Config.from_hf(DeepseekV4Config().to_dict())
    assert (own.layers, own.hidden_size, own.heads, own.head_dim, own.rope_dim) == (43, 4096, 64, 512, 64)
    assert own.ratios == (128, 128, *[128, 4] * 20, 128)
    assert own.hash_layers == (True,) * 3 + (False,) * 40
    assert own.rope_main == Rope(10000.0) and own.rope_compress == Rope(160000.0)


def test_layer_types_go_before_compress_ratios() -> None:
    config = make_config(layer_types=[KINDS[ratio] for ratio in (128, 4, 0, 0)])
    assert V4Config.from_hf(config).ratios == (128, 4, 0, 0)


def test_rope_parameters_that_are_not_nested_are_those_of_layers_that_compress() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000, "factor": 4, "original_max_position_embeddings": 512}
    own = V4Config.from_hf(make_config(rope_scaling=None, rope_parameters=yarn))
    assert own.rope_main == Rope(10000.0)
    assert own.rope_compress == Rope(160000.0, factor=4.0, original_length=512)


def test_an_architecture_is_enough_where_the_type_is_not_told() -> None:
    assert V4Config.from_hf(make_config(model_type=None)) == V4Config.from_hf(make_config())


def test_rotary_channels_may_be_told_as_a_fraction() -> None:
    config = make_config(qk_rope_head_dim=None, partial_rotary_factor=0.25)
    assert V4Config.from_hf(config).rope_dim == 4


# What can not be used


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "deepseek_v3"}, "model_type"),
        ({"model_type": None, "architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"model_type": None, "architectures": None}, "model_type"),
    ],
)
def test_another_architecture_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError, match="the only architecture") as caught:
        V4Config.from_hf(make_config(**changes))
    assert caught.value.field == field


@pytest.mark.parametrize("field", sorted(make_config()))
def test_a_field_that_is_missing_is_named_or_does_not_matter(field: str) -> None:
    optional = {
        "architectures",
        "hidden_act",
        "max_position_embeddings",
        "model_type",
        "n_shared_experts",
        "norm_topk_prob",
        "num_key_value_heads",
        "num_nextn_predict_layers",
        "scoring_func",
        "tie_word_embeddings",
    }
    config = make_config(**{field: None})
    if field in optional:
        assert V4Config.from_hf(config) == V4Config.from_hf(make_config())
    elif field == "rope_scaling":
        assert V4Config.from_hf(config).rope_compress == Rope(160000.0)
    else:
        with pytest.raises(SpecError) as caught:
            V4Config.from_hf(config)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0),
        ("hidden_size", "32"),
        ("hidden_size", True),
        ("head_dim", 16.0),
        ("compress_ratios", [0, 4]),
        ("compress_ratios", 4),
        ("layer_types", ["sliding_attention"]),
        ("mlp_layer_types", ["moe"]),
        ("num_hash_layers", -1),
        ("qk_rope_head_dim", 16),
        ("qk_rope_head_dim", 3),
        ("o_groups", 3),
        ("num_experts_per_tok", 4),
        ("index_head_dim", 2),
        ("hc_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("routed_scaling_factor", "1.5"),
        ("swiglu_limit", float("inf")),
        ("tie_word_embeddings", 1),
        ("compress_rope_theta", -1),
        ("rope_scaling", "yarn"),
        ("compress_rates", [4, 128]),
        ("scoring_func", "sigmoid"),
        ("norm_topk_prob", False),
        ("n_shared_experts", 2),
        ("num_key_value_heads", 4),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
    ],
)
def test_a_value_that_can_not_be_used_is_named(field: str, value: object) -> None:
    with pytest.raises(SpecError) as caught:
        V4Config.from_hf(make_config(**{field: value}))
    assert caught.value.field == field
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"compress_ratios": [0, 4, 64, 4, 0]}, "compress_ratios[2]"),
        ({"compress_ratios": [0, 4, 128, 4, 4]}, "compress_ratios[4]"),
        ({"layer_types": [*[KINDS[0]] * 3, "full_attention"]}, "layer_types[3]"),
        ({"mlp_layer_types": ["moe", "dense", "moe", "moe"]}, "mlp_layer_types[1]"),
        ({"compress_rates": {KINDS[4]: 8}}, f"compress_rates.{KINDS[4]}"),
        ({"compress_rate_hca": 64}, f"compress_rates.{KINDS[128]}"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "yarn", "attention_factor": 1.3}}, "attention_factor"),
        ({"rope_parameters": {"main": {"type": "yarn"}, "compress": {}}}, "rope_parameters.main.rope_type"),
        (
            {"quantization_config": {"weight_block_size": [64, 128]}},
            "quantization_config.weight_block_size",
        ),
    ],
)
def test_a_value_inside_a_field_that_can_not_be_used_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        V4Config.from_hf(make_config(**changes))
    assert caught.value.field == field


NESTED = {
    "main": {"rope_type": "default", "rope_theta": 10000},
    "compress": {
        "rope_type": "yarn",
        "rope_theta": 160000,
        "factor": 16,
        "original_max_position_embeddings": 4096,
    },
}
"""As newer versions of `transformers` write it, but for `attention_factor`, which they write too."""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_factor": None},
        {"attention_factor": 1.0},
        {"factor": 1},
        {"mscale": 1.0},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
    ],
    ids=str,
)
def test_nested_yarn_is_that_of_transformers_or_refused_by_name(changes: dict[str, Any]) -> None:
    rope = {**NESTED, "compress": {**NESTED["compress"], **changes}}
    config = make_config(rope_scaling=None, rope_parameters=rope, max_position_embeddings=65536)
    theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](DeepseekV4Config(**deepcopy(config)), layer_type="compress")
    if factor == 1.0:
        own = V4Config.from_hf(config)
        torch.testing.assert_close(inverse_frequencies(own.rope_compress, own.rope_dim), theirs)
        return
    with pytest.raises(SpecError, match=f"attention_factor = None: means {factor:.3f}"):
        V4Config.from_hf(config)


@pytest.mark.parametrize("kind", ["main", "compress"])
def test_every_layer_turns_as_many_channels(kind: str) -> None:
    for share, refused in ((0.125, False), (0.5, True)):
        yarn = {**NESTED["compress"], "attention_factor": 1.0}
        rope = {**NESTED, "compress": yarn}
        rope[kind] = {**rope[kind], "partial_rotary_factor": share}
        config = make_config(head_dim=32, rope_scaling=None, rope_parameters=rope)
        with pytest.raises(SpecError) if refused else nullcontext() as caught:
            assert V4Config.from_hf(config).rope_dim == 4
        if refused:
            assert caught.value.field == f"rope_parameters.{kind}.partial_rotary_factor"


THETAS = [1e-9, 0.3, 0.999, 1.0001, 1.5, 2.0, 37.0, 1e4, 1.6e5, 1e30]


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("length", [1, 6, 7, 200, 4096, 65536])
def test_yarn_is_that_of_transformers_also_where_it_degenerates(theta: float, length: int) -> None:
    yarn = {"type": "yarn", "factor": 16, "original_max_position_embeddings": length}
    config = make_config(compress_rope_theta=theta, rope_scaling=yarn, qk_rope_head_dim=12, index_head_dim=12)
    theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](DeepseekV4Config(**config), layer_type="compress")
    ours = inverse_frequencies(V4Config.from_hf(config).rope_compress, 12)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_rotary_numbers_are_those_of_fp64_rounded_once() -> None:
    """Then they depend on no thread and no library: torch's own gave two answers for one table."""
    rope = V4Config.from_hf(make_config()).rope_main
    rows = [0, 1, 2047, 2048, 4095, 4096, 5000]
    cos, sin = Rotary(rope, 64).at(torch.tensor(rows), max(rows) + 1)
    frequencies = inverse_frequencies(rope, 64)
    for i, row in enumerate(rows):
        angles = [float(each) for each in torch.tensor(float(row)) * frequencies]
        assert torch.equal(cos[i], torch.tensor([math.cos(angle) for angle in angles]))
        assert torch.equal(sin[i], torch.tensor([math.sin(angle) for angle in angles]))


def test_yarn_needs_a_theta_that_turns() -> None:
    config = make_config(compress_rope_theta=1)
    with pytest.raises(SpecError, match=r"theta = 1\.0: .*YaRN"):
        V4Config.from_hf(config)
    assert V4Config.from_hf(make_config(rope_theta=1)).rope_main == Rope(1.0)
