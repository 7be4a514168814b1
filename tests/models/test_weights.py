"""Goal: the same numbers from every form of a checkpoint, or an error that names the tensor.

Method: what transformers saves is loaded again; DeepSeek's own form is written here, by rules of its own,
with known codes and scales, and compared value by value with the stupid way of multiplying them out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from tests.models.folders import make_config, write_folder, write_shards
from tiercel.errors import SpecError, WeightsError
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.weights import WEIGHTS, parameters
from tiercel.spec import deepseek_v4

Tensors = dict[str, Tensor]


def load(folder: Path, **options: Any) -> Tensors:
    checkpoint = Checkpoint(folder)
    return WEIGHTS.plan(checkpoint, V4Config.from_hf(checkpoint.config), **options).read()


def check_equal(loaded: Tensors, expected: Tensors) -> None:
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == (torch.int64 if name.endswith("tid2eid") else torch.float32), name
        assert loaded[name].is_contiguous(), name
        assert torch.equal(loaded[name], tensor.to(loaded[name].dtype)), name


def make_weights(config: dict[str, Any] | None = None) -> Tensors:
    """Random numbers for every parameter, under its own name."""
    own = V4Config.from_hf(config or make_config())
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for each in parameters(own).values():
        random = torch.randn(each.shape, generator=generator)
        weights[each.name] = (random.abs() * 9).long() % own.experts if each.integer else random
    return weights


# DeepSeek's own form

RENAMED = [
    (r"^model\.", ""),
    (r"embed_tokens", "embed"),
    (r"lm_head", "head"),
    (r"hc_head\.hc_", "hc_head_"),
    (r"(attn|ffn)_hc\.", r"hc_\1_"),
    (r"input_layernorm", "attn_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn\.compressor\.indexer\.(scorer\.)?(q_b|weights)", r"self_attn.indexer.\2"),
    (r"self_attn\.compressor\.indexer\.", "self_attn.indexer.compressor."),
    (r"compressor\.kv_norm", "compressor.norm"),
    (r"self_attn\.", "attn."),
    (r"\bmlp\.", "ffn."),
    (r"q_a_proj", "wq_a"),
    (r"q_a_norm", "q_norm"),
    (r"q_b_proj", "wq_b"),
    (r"kv_proj", "wkv"),
    (r"o_([ab])_proj", r"wo_\1"),
    (r"sinks", "attn_sink"),
    (r"position_bias", "ape"),
    (r"compressor\.gate_proj", "compressor.wgate"),
    (r"gate\.e_score_correction_bias", "gate.bias"),
    (r"shared_experts\.gate_proj", "shared_experts.w1"),
    (r"shared_experts\.down_proj", "shared_experts.w2"),
    (r"shared_experts\.up_proj", "shared_experts.w3"),
]


def original_name(name: str) -> str:
    for pattern, new in RENAMED:
        name = re.sub(pattern, new, name)
    return name


def in_original_form(weights: Tensors) -> Tensors:
    """DeepSeek's names, one tensor per expert and matrix."""
    stored = {}
    for name, tensor in weights.items():
        own = original_name(name)
        if own.endswith("experts.gate_up_proj"):
            stem, inner = own.removesuffix("gate_up_proj"), tensor.shape[1] // 2
            for e, both in enumerate(tensor):
                stored[f"{stem}{e}.w1.weight"] = both[:inner].clone()
                stored[f"{stem}{e}.w3.weight"] = both[inner:].clone()
        elif own.endswith("experts.down_proj"):
            for e, down in enumerate(tensor):
                stored[f"{own.removesuffix('down_proj')}{e}.w2.weight"] = down.clone()
        else:
            stored[own] = tensor
    return stored


def blocks(scale: Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> Tensor:
    """The scale of every value, looked up one by one."""
    rows = torch.arange(shape[0]) // block[0]
    columns = torch.arange(shape[1]) // block[1]
    return scale.float()[rows[:, None], columns[None, :]]


def exponents(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Powers of two as bytes, none of them 1."""
    codes = torch.randint(120, 127, shape, generator=generator, dtype=torch.uint8)
    return codes.view(torch.float8_e8m0fnu)


def fp8(values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales of 128 x 128, what they mean)"""
    codes = values.clamp(-400, 400).to(torch.float8_e4m3fn)
    scale = exponents((-(-values.shape[0] // 128), -(-values.shape[1] // 128)), generator)
    return codes, scale, codes.float() * blocks(scale, values.shape, (128, 128))


TABLE = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def fp4(values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(two codes per byte, the first in the low half; scales of 1 x 32; what they mean)"""
    rows, columns = values.shape
    codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    scale = exponents((rows, -(-columns // 32)), generator)
    packed = codes[:, 0::2] + 16 * codes[:, 1::2]
    meant = torch.tensor([[TABLE[code] for code in row] for row in codes.tolist()])
    return packed.view(torch.int8), scale, meant * blocks(scale, (rows, columns), (1, 32))


FP8_NAMES = r"(wq_a|wq_b|attn\.wkv|wo_a|wo_b|shared_experts\.w\d|e_proj|h_proj)\.weight$"
FP4_NAMES = r"\.experts\.\d+\.w\d\.weight$"
Quantizer = Callable[[Tensor, torch.Generator], tuple[Tensor, Tensor, Tensor]]


def quantized(stored: Tensors, quantizers: dict[str, Quantizer]) -> tuple[Tensors, Tensors]:
    """(what is stored, what it means), with the quantizer of the first pattern that a name matches."""
    generator = torch.Generator().manual_seed(1)
    written, meant = {}, {}
    for name, tensor in stored.items():
        quantize = next((each for pattern, each in quantizers.items() if re.search(pattern, name)), None)
        if quantize is None:
            written[name] = meant[name] = tensor
        else:
            written[name], scale, meant[name] = quantize(tensor, generator)
            written[name.removesuffix("weight") + "scale"] = scale
    return written, meant


@pytest.fixture(scope="module")
def model() -> DeepseekV4ForCausalLM:
    torch.manual_seed(0)
    config = DeepseekV4Config(**make_config())
    model = DeepseekV4ForCausalLM(config)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.normal_()
        else:
            assert name.endswith("tid2eid")
            tensor.random_(config.n_routed_experts)
    return model


# From transformers


def test_the_table_is_the_state_dict_of_transformers(model: DeepseekV4ForCausalLM) -> None:
    own = WEIGHTS.of(V4Config.from_hf(model.config.to_dict()), draft=False)
    state = model.state_dict()
    assert {name: each.shape for name, each in own.items()} == {n: tuple(t.shape) for n, t in state.items()}
    assert {name for name, each in own.items() if each.integer} == {n for n in state if n.endswith("tid2eid")}


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_what_transformers_saves_is_loaded(
    model: DeepseekV4ForCausalLM, tmp_path: Path, max_shard_size: str
) -> None:
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "20KB")
    check_equal(load(tmp_path), dict(model.state_dict()))


def test_names_of_transformers_are_loaded_with_and_without_their_prefix(
    model: DeepseekV4ForCausalLM, tmp_path: Path
) -> None:
    state = dict(model.state_dict())
    check_equal(load(write_folder(tmp_path / "with", state)), state)
    without = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    check_equal(load(write_folder(tmp_path / "without", without)), state)


def test_loaded_weights_do_not_depend_on_the_files(model: DeepseekV4ForCausalLM, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, dict(model.state_dict()))
    loaded = load(folder)
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(-file.stat().st_size // 2, 2)
        opened.write(b"\0" * (file.stat().st_size // 2))
    check_equal(loaded, dict(model.state_dict()))


# DeepSeek's own names


@pytest.mark.parametrize("prefix", ["", "model."])
def test_original_names_are_loaded(tmp_path: Path, prefix: str) -> None:
    weights = make_weights()
    stored = {prefix + name: tensor for name, tensor in in_original_form(weights).items()}
    assert f"{prefix}layers.1.attn.indexer.compressor.wgate.weight" in stored
    check_equal(load(write_folder(tmp_path, stored)), weights)


def test_every_parameter_of_a_draft_layer_has_a_name(tmp_path: Path) -> None:
    weights = load(write_folder(tmp_path, make_weights()))
    shapes = {name: tuple(t.shape) for name, t in weights.items() if name.startswith("mtp.0.")}
    layer = {name: tuple(t.shape) for name, t in weights.items() if name.startswith("model.layers.0.")}
    block = {name.replace("model.layers.0.", "mtp.0."): shape for name, shape in layer.items()}
    del block["mtp.0.mlp.gate.tid2eid"]  # the layer chooses by token, a draft layer by score
    assert shapes == block | {
        "mtp.0.mlp.gate.e_score_correction_bias": (3,),
        "mtp.0.e_proj.weight": (32, 32),
        "mtp.0.h_proj.weight": (32, 32),
        "mtp.0.enorm.weight": (32,),
        "mtp.0.hnorm.weight": (32,),
        "mtp.0.norm.weight": (32,),
        "mtp.0.hc_head.hc_fn": (4, 128),
        "mtp.0.hc_head.hc_base": (4,),
        "mtp.0.hc_head.hc_scale": (1,),
    }


def test_a_draft_has_as_many_tensors_as_the_published_one() -> None:
    written, _ = quantized(in_original_form(make_weights()), {FP8_NAMES: fp8, FP4_NAMES: fp4})
    names = {name for name in written if name.startswith("mtp.0.")}
    assert {"mtp.0.hc_head_fn", "mtp.0.attn.wkv.scale", "mtp.0.ffn.gate.bias"} <= names
    published, experts = 1575, 256
    assert len(names) - 3 * 6 == published - experts * 6  # an expert is three matrices and their scales


def test_a_model_with_tied_embeddings_has_one_tensor_for_both(tmp_path: Path) -> None:
    config = make_config(tie_word_embeddings=True)
    weights = make_weights(config)
    assert "lm_head.weight" not in weights
    loaded = load(write_folder(tmp_path, weights, config))
    assert loaded["lm_head.weight"] is loaded["model.embed_tokens.weight"]
    check_equal(loaded, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})


@pytest.mark.parametrize("name", ["lm_head.weight", "head.weight", "model.lm_head.weight"])
def test_a_head_that_is_there_goes_before_tied_embeddings(tmp_path: Path, name: str) -> None:
    """As in transformers: the config is wrong then, not the checkpoint."""
    config = make_config(tie_word_embeddings=True)
    head = torch.randn(24, 32)
    weights = make_weights(config)
    loaded = load(write_folder(tmp_path, weights | {name: head}, config))
    check_equal(loaded, weights | {"lm_head.weight": head})


def test_transformers_takes_a_head_that_is_there_too(tmp_path: Path) -> None:
    config = make_config(tie_word_embeddings=True)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**config | {"tie_word_embeddings": False}))
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = DeepseekV4ForCausalLM.from_pretrained(tmp_path).state_dict()
    assert not torch.equal(theirs["lm_head.weight"], theirs["model.embed_tokens.weight"])
    check_equal(load(tmp_path), dict(theirs))


@pytest.mark.parametrize(
    "name",
    ["model.rotary_emb.inv_freq", "layers.0.attn.rotary_emb.inv_freq", "model.rotary_emb.compress_inv_freq"],
)
def test_rotary_frequencies_that_were_saved_are_not_needed(tmp_path: Path, name: str) -> None:
    weights = make_weights()
    check_equal(load(write_folder(tmp_path, weights | {name: torch.ones(2)})), weights)


def test_what_is_stored_in_other_plain_dtypes_is_widened(tmp_path: Path) -> None:
    weights = {
        name: tensor.int() if name.endswith("tid2eid") else tensor.to(torch.bfloat16)
        for name, tensor in make_weights().items()
    }
    check_equal(load(write_folder(tmp_path, weights)), weights)


# Quantized

WIDE = {"hidden_size": 160, "moe_intermediate_size": 64, "head_dim": 72, "o_lora_rank": 70}
"""More than one block in both directions, the last ones cut."""


def test_fp8_and_fp4_are_multiplied_out_exactly(tmp_path: Path) -> None:
    config = make_config(**WIDE)
    stored = in_original_form(make_weights(config))
    written, meant = quantized(stored, {FP8_NAMES: fp8, FP4_NAMES: fp4})
    assert written["layers.0.attn.wq_b.weight"].dtype == torch.float8_e4m3fn
    assert written["layers.0.attn.wo_b.scale"].shape == (2, 2)
    assert written["layers.0.ffn.experts.2.w1.weight"].shape == (64, 80)
    assert written["layers.0.ffn.experts.2.w1.scale"].shape == (64, 5)
    expected = load(write_folder(tmp_path / "meant", meant, config))
    check_equal(load(write_folder(tmp_path / "written", written, config)), expected)


def test_every_code_of_fp4_is_its_value_times_its_scale(tmp_path: Path) -> None:
    stored = in_original_form(make_weights())
    stored["layers.0.ffn.experts.0.w2.weight"] = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA]] * 32).to(
        torch.uint8
    )
    stored["layers.0.ffn.experts.0.w2.scale"] = torch.full((32, 1), 128, dtype=torch.uint8).view(
        torch.float8_e8m0fnu
    )
    loaded = load(write_folder(tmp_path, stored))["model.layers.0.mlp.experts.down_proj"][0, 0]
    assert loaded.tolist() == [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3]


def test_fp4_may_be_stored_in_its_own_dtype(tmp_path: Path) -> None:
    written, meant = quantized(in_original_form(make_weights()), {FP4_NAMES: fp4})
    own = {n: t.view(torch.float4_e2m1fn_x2) if t.dtype == torch.int8 else t for n, t in written.items()}
    expected = load(write_folder(tmp_path / "meant", meant))
    check_equal(load(write_folder(tmp_path / "own", own)), expected)


def test_experts_may_be_fp8_too(tmp_path: Path) -> None:
    written, meant = quantized(in_original_form(make_weights()), {FP8_NAMES: fp8, FP4_NAMES: fp8})
    expected = load(write_folder(tmp_path / "meant", meant))
    check_equal(load(write_folder(tmp_path / "written", written)), expected)


def test_scales_may_be_float_and_have_the_name_of_transformers(tmp_path: Path) -> None:
    config, generator = make_config(**WIDE), torch.Generator().manual_seed(2)
    weights = make_weights(config)
    stored, name = dict(weights), "model.layers.2.self_attn.o_b_proj.weight"
    stored[name] = weights[name].to(torch.float8_e4m3fn)
    scale = stored[f"{name}_scale_inv"] = torch.rand((2, 2), generator=generator)
    weights[name] = stored[name].float() * blocks(scale, stored[name].shape, (128, 128))
    experts = "model.layers.2.mlp.experts.gate_up_proj"
    stored[experts] = weights[experts].to(torch.float8_e4m3fn)
    scales = stored[f"{experts}_scale_inv"] = torch.rand((3, 1, 2), generator=generator)
    each = [blocks(own, (128, 160), (128, 128)) for own in scales]
    weights[experts] = stored[experts].float() * torch.stack(each)
    check_equal(load(write_folder(tmp_path, stored, config)), weights)


def test_scales_may_be_the_bytes_of_exponents(tmp_path: Path) -> None:
    written, meant = quantized(in_original_form(make_weights()), {FP8_NAMES: fp8, FP4_NAMES: fp4})
    as_bytes = {n: t.view(torch.uint8) if t.dtype == torch.float8_e8m0fnu else t for n, t in written.items()}
    assert as_bytes["layers.0.attn.wkv.scale"].dtype == torch.uint8
    check_equal(load(write_folder(tmp_path / "u8", as_bytes)), load(write_folder(tmp_path / "meant", meant)))


@pytest.mark.parametrize("order", [1, -1])
def test_scales_may_be_in_a_file_before_or_after_what_they_scale(tmp_path: Path, order: int) -> None:
    written, meant = quantized(in_original_form(make_weights()), {FP8_NAMES: fp8})
    scales = {name: tensor for name, tensor in written.items() if tensor.dtype == torch.float8_e8m0fnu}
    others = {name: tensor for name, tensor in written.items() if name not in scales}
    first, second = (scales, others)[::order]
    folder = write_shards(tmp_path / "two", {"1.safetensors": first, "2.safetensors": second})
    check_equal(load(folder), load(write_folder(tmp_path / "meant", meant)))


# What does not fit


ONE_OF_EACH = sorted({re.sub(r"layers\.\d+", "", name): name for name in make_weights()}.values())
"""Of the parameters that several layers have, one layer's."""


def fails(folder: Path, stored: Tensors, config: dict[str, Any] | None = None) -> WeightsError:
    with pytest.raises(WeightsError) as caught:
        load(write_folder(folder, stored, config))
    assert caught.value.file == str(folder)
    return caught.value


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_whatever_is_missing_is_named(tmp_path: Path, name: str) -> None:
    stored = make_weights()
    del stored[name]
    error = fails(tmp_path, stored)
    assert error.tensors == (name,)
    assert f"missing: {name}" in str(error)


def test_what_is_missing_is_told_with_its_original_name(tmp_path: Path) -> None:
    stored = in_original_form(make_weights())
    del stored["layers.0.attn.wkv.weight"]
    error = fails(tmp_path, stored)
    assert str(error).endswith("missing: model.layers.0.self_attn.kv_proj.weight (layers.0.attn.wkv.weight)")


def test_a_missing_piece_of_an_expert_is_named(tmp_path: Path) -> None:
    stored = in_original_form(make_weights())
    del stored["layers.3.ffn.experts.1.w3.weight"], stored["mtp.0.ffn.experts.2.w2.weight"]
    gone = "layers.3.ffn.experts.1.w3.weight", "mtp.0.ffn.experts.2.w2.weight"
    assert fails(tmp_path, stored).tensors == gone


def test_a_draft_is_there_in_full_or_not_at_all(tmp_path: Path) -> None:
    stored = make_weights()
    target = {name: tensor for name, tensor in stored.items() if not name.startswith("mtp.")}
    check_equal(load(write_folder(tmp_path / "none", target)), target)
    part = target | {"mtp.0.norm.weight": stored["mtp.0.norm.weight"]}
    assert "mtp.0.e_proj.weight" in fails(tmp_path / "part", part).tensors


DRAFTS: dict[str, Callable[[], Tensors]] = {
    "MTP": lambda: {n: t for n, t in in_original_form(make_weights()).items() if n.startswith("mtp.")},
    "MTP with embedding and head": lambda: {
        "mtp.0.emb.tok_emb.weight": torch.zeros(24, 32),
        "mtp.0.head.weight": torch.zeros(24, 32),
        "mtp.0.norm.weight": torch.ones(32),
    },
    "DSpark": lambda: {
        "mtp.0.main_proj.weight": torch.zeros(32, 96).to(torch.float8_e4m3fn),
        "mtp.0.main_proj.scale": torch.ones(1, 1),
        "mtp.1.attn.wkv.weight": torch.zeros(16, 32),
        "mtp.2.markov_head.markov_w1.weight": torch.zeros(24, 4),
        "model.mtp.2.confidence_head.proj.weight": torch.zeros(1, 36),
    },
}
"""What published checkpoints have under `mtp.`: V4-Flash, V4-Flash-Base, V4-Flash-0731."""


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_draft_that_is_not_wanted_is_not_read_whatever_its_form(tmp_path: Path, kind: str) -> None:
    target = {name: tensor for name, tensor in make_weights().items() if not name.startswith("mtp.")}
    folder = write_folder(tmp_path, target | DRAFTS[kind]())
    check_equal(load(folder, draft=False), target)
    if kind != "MTP":
        with pytest.raises(WeightsError, match=r"missing: mtp\.0\."):
            load(folder)


def test_the_config_of_a_checkpoint_with_dspark_is_read(tmp_path: Path) -> None:
    """One MTP layer is told, three stages have a ratio each: as in V4-Flash-0731."""
    stages = {"dspark_target_layer_ids": [1, 2, 3], "dspark_block_size": 5, "dspark_markov_rank": 4}
    config = make_config(compress_ratios=[0, 4, 128, 4, 0, 0, 0], **stages)
    target = {name: tensor for name, tensor in make_weights().items() if not name.startswith("mtp.")}
    check_equal(load(write_folder(tmp_path, target | DRAFTS["DSpark"](), config), draft=False), target)
    assert deepseek_v4(config).layers == (0, 1, 2, 3)


def test_a_draft_that_the_config_does_not_have_is_not_of_this_model(tmp_path: Path) -> None:
    config = make_config(num_nextn_predict_layers=0, compress_ratios=[0, 4, 128, 4])
    error = fails(tmp_path, make_weights(), config)
    assert "not of this model: mtp.0.attn_hc.base" in str(error)
    assert re.search(r"and \d+ more", str(error))


@pytest.mark.parametrize(
    "name", ["model.layers.4.input_layernorm.weight", "vision.patch.weight", "model.layers.0.self_attn.bias"]
)
def test_whatever_is_too_much_is_named(tmp_path: Path, name: str) -> None:
    error = fails(tmp_path, make_weights() | {name: torch.zeros(3)})
    assert error.tensors == (name,)
    assert f"not of this model: {name}" in str(error)


def test_a_layer_of_another_kind_is_named(tmp_path: Path) -> None:
    error = fails(tmp_path, make_weights(), make_config(compress_ratios=[0, 4, 0, 4, 0], num_hash_layers=1))
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in error.tensors
    assert "model.layers.1.mlp.gate.tid2eid" in error.tensors
    assert "model.layers.2.self_attn.compressor.position_bias" in error.tensors


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_whatever_has_another_shape_is_named(tmp_path: Path, name: str) -> None:
    stored = make_weights()
    stored[name] = torch.cat([stored[name]] * 2)
    error = fails(tmp_path, stored)
    assert error.tensors == (name,)
    assert f"unfit: {name} is [{stored[name].shape[0]}" in str(error)


def test_a_tensor_with_a_dimension_less_is_named(tmp_path: Path) -> None:
    error = fails(tmp_path, make_weights() | {"model.hc_head.hc_scale": torch.tensor(1.0)})
    assert "model.hc_head.hc_scale is [] of F32, must be [1]" in str(error)


def test_everything_wrong_is_told_at_once_and_briefly(tmp_path: Path) -> None:
    stored = {f"x.{name}": tensor for name, tensor in make_weights().items()}
    stored["lm_head.weight"] = torch.zeros(2, 2)
    error = fails(tmp_path, stored)
    assert len(error.tensors) > 100
    assert len(str(error)) < 1200
    assert all(word in str(error) for word in ("missing: ", "not of this model: ", "unfit: lm_head.weight"))


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("embed.weight", "model.embed_tokens.weight"),
        ("norm.weight", "model.norm.weight"),
        ("layers.0.ffn.experts.1.w1.weight", "model.layers.0.ffn.experts.1.w1.weight"),
        ("layers.0.ffn.experts.0.w1.weight", "model.layers.0.mlp.experts.gate_up_proj"),
    ],
)
def test_what_is_there_twice_is_named(tmp_path: Path, name: str, again: str) -> None:
    weights = make_weights()
    stored = in_original_form(weights)
    stored[again] = weights[again].clone() if again in weights else stored[name].clone()
    error = fails(tmp_path, stored)
    assert "there twice: " in str(error)
    assert {name, again} <= set(error.tensors)


def test_a_quantized_tensor_without_scales_is_named(tmp_path: Path) -> None:
    written, _ = quantized(in_original_form(make_weights()), {FP8_NAMES: fp8})
    del written["layers.0.attn.wo_a.scale"]
    assert "layers.0.attn.wo_a.weight is F8_E4M3 and has no scale" in str(fails(tmp_path, written))


def test_scales_of_another_shape_are_named(tmp_path: Path) -> None:
    written, _ = quantized(in_original_form(make_weights()), {FP4_NAMES: fp4})
    name = "layers.0.ffn.experts.0.w1"
    written[f"{name}.scale"] = written[f"{name}.scale"].view(torch.uint8)[:4].view(torch.float8_e8m0fnu)
    assert f"{name}.weight has a scale [4, 1] of F8_E8M0, must be [12, 1]" in str(fails(tmp_path, written))


def test_scales_of_something_that_is_not_quantized_are_not_of_this_model(tmp_path: Path) -> None:
    stored = in_original_form(make_weights()) | {"layers.0.attn.wkv.scale": torch.ones(1, 1)}
    assert fails(tmp_path, stored).tensors == ("layers.0.attn.wkv.scale",)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("model.norm.weight", torch.int64),
        ("model.norm.weight", torch.int8),
        ("model.norm.weight", torch.float8_e4m3fn),
        ("model.layers.0.mlp.gate.tid2eid", torch.float32),
        ("model.layers.0.self_attn.kv_proj.weight", torch.bool),
    ],
)
def test_a_dtype_that_can_not_be_meant_is_named(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    weights = make_weights()
    error = fails(tmp_path, weights | {name: weights[name].to(dtype)})
    assert error.tensors == (name,)
    assert "must be one of" in str(error)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.layers.2.mlp.experts.down_proj", "mtp.0.norm.weight"]
)
def test_a_weight_that_is_no_number_is_named(tmp_path: Path, name: str, value: float) -> None:
    stored = make_weights()
    stored[name].view(-1)[-1] = value
    with pytest.raises(WeightsError, match=rf"{name} holds NaN or Inf") as caught:
        load(write_folder(tmp_path, stored))
    assert caught.value.tensors == (name,) and caught.value.file.endswith("model.safetensors")


def test_a_scale_that_is_no_number_is_named_with_its_tensor(tmp_path: Path) -> None:
    written, _ = quantized(in_original_form(make_weights()), {FP8_NAMES: fp8})
    written["layers.0.attn.wkv.scale"] = torch.full((1, 1), 255, dtype=torch.uint8)
    with pytest.raises(WeightsError, match=r"layers\.0\.attn\.wkv\.weight holds NaN or Inf"):
        load(write_folder(tmp_path, written))


def test_large_weights_are_numbers(tmp_path: Path) -> None:
    """Their sum is none."""
    weights = make_weights()
    weights["lm_head.weight"].fill_(3e38)
    check_equal(load(write_folder(tmp_path, weights)), weights)


def test_a_table_of_experts_that_are_not_there_is_named(tmp_path: Path) -> None:
    stored = make_weights()
    stored["model.layers.1.mlp.gate.tid2eid"][5, 1] = 3
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.gate\.tid2eid names experts that are not there"):
        load(write_folder(tmp_path, stored))


def test_a_truncated_file_is_named_before_anything_is_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, make_weights())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"model\.safetensors: is no whole safetensors file"):
        load(folder)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"x": torch.zeros(1)}, make_config(model_type="llama"))
    with pytest.raises(SpecError, match="model_type = 'llama': is not deepseek_v4"):
        load(folder)


def test_the_files_written_here_are_what_they_seem(tmp_path: Path) -> None:
    weights = make_weights()
    assert load_file(write_folder(tmp_path, weights) / "model.safetensors").keys() == weights.keys()
