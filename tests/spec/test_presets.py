from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tiercel.errors import SpecError
from tiercel.spec import PRESETS, CacheSpec, Window, load

DENSE = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
LATENT = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
WINDOWED = {
    **DENSE,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
LINEAR = {
    **DENSE,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
JAMBA = {
    **DENSE,
    "attn_layer_period": 4,
    "attn_layer_offset": 2,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
}
RATIO_2 = {
    "model": "made-up",
    "page_tokens": 64,
    "streams": [{"name": "c2", "layers": [0, 1, 2], "parts": {"value": 100}, "tokens_per_entry": 2}],
}


def write(folder: Path, content: Any, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def load_config(folder: Path, model_type: str, config: dict[str, Any], **arguments: Any) -> CacheSpec:
    return load(write(folder, {"model_type": model_type, **config}), **arguments)


def refusal(source: str | Path, **arguments: Any) -> str:
    with pytest.raises(SpecError) as refused:
        load(source, **arguments)
    return str(refused.value)


# Presets


@pytest.mark.parametrize(
    ("name", "page_bytes"), [("deepseek-v4-flash", 998_208), ("deepseek-v4-pro", 1_430_208)]
)
def test_a_preset_is_loaded_with_production_pages_and_its_own_name(name: str, page_bytes: int) -> None:
    spec = load(name)
    assert (spec.model, spec.page_tokens, spec.page_bytes) == (name, 256, page_bytes)


def test_a_preset_takes_another_page_size_and_format() -> None:
    spec = load("deepseek-v4-flash", page_tokens=128, format="bf16")
    assert (spec.page_tokens, spec.bytes_per_token) == (128, 6_880)


def test_a_preset_is_loaded_with_its_draft() -> None:
    spec = load("deepseek-v4-flash", draft=True)
    assert spec.model == "deepseek-v4-flash+mtp"
    assert spec.stream("draft_window").layers == (43,)


def test_a_page_size_of_zero_is_not_taken_for_silence() -> None:
    assert refusal("deepseek-v4-flash", page_tokens=0).startswith("page_tokens = 0")


# Hugging Face configs


def test_a_config_file_gives_the_preset_under_the_name_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-flash"
    folder.mkdir()
    spec = load(write(folder, PRESETS["deepseek-v4-flash"]))
    assert spec.model == "my-flash"
    assert spec.streams == load("deepseek-v4-flash").streams


def test_a_file_of_another_name_names_the_model(tmp_path: Path) -> None:
    assert load(write(tmp_path, {"model_type": "llama", **DENSE}, "my-llama.json")).model == "my-llama"


def test_a_config_without_model_type_is_known_by_its_architecture(tmp_path: Path) -> None:
    config = {**PRESETS["deepseek-v4-pro"], "architectures": ["DeepseekV4ForCausalLM"]}
    del config["model_type"]
    assert load(write(tmp_path, config)).page_bytes == 1_430_208


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_dense_models_store_keys_and_values(tmp_path: Path, model_type: str) -> None:
    spec = load_config(tmp_path, model_type, DENSE)
    assert [s.name for s in spec.streams] == ["k", "v"]
    assert spec.bytes_per_token == 4 * 2 * 2 * 64 * 2


def test_a_config_without_kv_heads_has_one_per_head(tmp_path: Path) -> None:
    config = {**DENSE, "num_key_value_heads": None}
    assert load_config(tmp_path, "llama", config).bytes_per_token == 4 * 2 * 8 * 64 * 2


def test_a_dense_model_with_window_layers_keeps_them_in_tails(tmp_path: Path) -> None:
    assert load_config(tmp_path, "qwen3", WINDOWED).stream("window_k").layers == (0, 2)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_latent_models_store_one_latent(tmp_path: Path, model_type: str) -> None:
    assert load_config(tmp_path, model_type, LATENT).bytes_per_token == 70_272
    assert load_config(tmp_path, model_type, LATENT, format="fp8").bytes_per_token == 40_016


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_latent_models_with_an_indexer_store_its_keys(tmp_path: Path, model_type: str) -> None:
    config = {**LATENT, "index_head_dim": 128}
    spec = load_config(tmp_path, model_type, config, format="fp8")
    assert spec.bytes_per_token == 48_068 and not spec.apart.selective
    spec = load_config(tmp_path, model_type, {**config, "index_topk": 2048}, format="fp8")
    assert spec.bytes_per_token == 48_068 and spec.apart.second == ("latent",)
    assert spec.apart.hot_places() == (32, 64), "2,048 entries, of which a page of 64 tokens has 64"
    assert spec.apart.units == (515_328, 6), "the latents of a page take five units, its keys one"


@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma3_text"])
def test_window_hybrids_are_read_from_layer_types(tmp_path: Path, model_type: str) -> None:
    spec = load_config(tmp_path, model_type, WINDOWED)
    assert (spec.stream("k").layers, spec.stream("window_k").layers) == ((1, 3), (0, 2))
    assert spec.stream("window_k").keep == Window(128)


def test_the_language_model_of_a_larger_model_is_read(tmp_path: Path) -> None:
    config = {"text_config": {"model_type": "gemma3_text", **WINDOWED}}
    assert (
        load_config(tmp_path, "gemma3", config).streams == load_config(tmp_path, "gemma3", WINDOWED).streams
    )


def test_linear_attention_hybrids_keep_states(tmp_path: Path) -> None:
    spec = load_config(tmp_path, "qwen3_next", LINEAR)
    assert (spec.stream("k").layers, spec.stream("conv").layers) == ((3,), (0, 1, 2))
    assert spec.row_bytes(spec.stream("conv")) == (2 * 16 * 128 + 32 * 128) * 3 * 2
    assert spec.row_bytes(spec.stream("temporal")) == 32 * 128 * 128 * 4


def test_layer_types_of_a_linear_attention_hybrid_come_first(tmp_path: Path) -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    assert load_config(tmp_path, "qwen3_next", {**LINEAR, "layer_types": kinds}).stream("k").layers == (0, 3)


def test_mamba_hybrids_keep_states(tmp_path: Path) -> None:
    spec = load_config(tmp_path, "jamba", JAMBA)
    assert (spec.stream("k").layers, spec.stream("conv").layers) == ((2,), (0, 1, 3))
    assert spec.row_bytes(spec.stream("conv")) == 1024 * 3 * 2
    assert spec.row_bytes(spec.stream("temporal")) == 1024 * 16 * 4


# Declarations


def test_a_stream_nobody_wrote_code_for_is_declared_in_json(tmp_path: Path) -> None:
    spec = load(write(tmp_path, RATIO_2))
    assert (spec.model, spec.page_bytes) == ("made-up", 3 * 32 * 100)


def test_a_declaration_takes_another_page_size(tmp_path: Path) -> None:
    assert load(write(tmp_path, RATIO_2), page_tokens=128).page_bytes == 3 * 64 * 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "fp8"}, "format = 'fp8'"),
        ({"draft": True}, "draft = True"),
        ({"page_tokens": 63}, "c2.tokens_per_entry = 2: entries do not divide a row of 63 tokens"),
    ],
)
def test_a_declaration_refuses_what_it_says_itself(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    assert message in refusal(write(tmp_path, RATIO_2), **arguments)


# Refusals


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    message = refusal("deepseek-v9")
    assert "'deepseek-v9'" in message
    assert "deepseek-v4-flash" in message


def test_an_unknown_model_type_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    config = {"model_type": "perceiver", "architectures": ["PerceiverModel"]}
    message = refusal(write(tmp_path, config))
    assert "'perceiver', 'PerceiverModel'" in message
    assert "deepseek_v4" in message


@pytest.mark.parametrize("text", ["{", "", "\x00", "[1, 2]", '"flash"'])
def test_a_file_that_holds_no_json_object_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    assert f"file = {str(path)!r}" in refusal(path)


def test_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("llama", {}, "num_hidden_layers = None: is missing"),
        ("llama", {**DENSE, "num_hidden_layers": -4}, "num_hidden_layers = -4"),
        (
            "llama",
            {**DENSE, "layer_types": ["chunked_attention"] * 4},
            "layer_types[0] = 'chunked_attention'",
        ),
        ("llama", {**DENSE, "layer_types": []}, "layer_types = []"),
        ("gpt_oss", DENSE, "layer_types = None"),
        ("gpt_oss", {**WINDOWED, "sliding_window": None}, "sliding_window = None"),
        ("deepseek_v3", {**LATENT, "kv_lora_rank": None}, "kv_lora_rank = None"),
        ("qwen3_next", {**LINEAR, "linear_key_head_dim": None}, "linear_key_head_dim = None"),
        ("jamba", {**JAMBA, "attn_layer_offset": None}, "attn_layer_offset = None"),
    ],
)
def test_a_config_that_lacks_what_its_family_needs_is_refused_by_field_and_value(
    tmp_path: Path, model_type: str, config: dict[str, Any], message: str
) -> None:
    assert message in refusal(write(tmp_path, {"model_type": model_type, **config}))


def test_a_draft_of_a_family_without_one_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"model_type": "llama", **DENSE})
    assert refusal(path, draft=True) == "draft = True: no draft is known for llama"
