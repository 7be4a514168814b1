"""A spec by name, from a Hugging Face config.json, or from a declaration in JSON.

`FAMILIES` lists the configs that can be read. A model of another family is declared in JSON
(`CacheSpec.from_dict`); no other room knows this list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tiercel.errors import SpecError
from tiercel.spec.attention import Heads, Recurrence, mha, mla, mla_indexer, recurrent, sliding_window
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.deepseek_v4 import deepseek_v4, deepseek_v4_mtp
from tiercel.spec.hf_fields import family_name, layers_of, per_layer, whole

Config = Mapping[str, Any]

_V4: Config = {
    "model_type": "deepseek_v4",
    "num_nextn_predict_layers": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
}
PRESETS: Mapping[str, Config] = {
    "deepseek-v4-flash": {
        "index_topk": 512,
        **_V4,
        "num_hidden_layers": 43,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    },
    "deepseek-v4-pro": {
        "index_topk": 1024,
        **_V4,
        "num_hidden_layers": 61,
        "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    },
}


def load(
    name_or_path: str | Path,
    page_tokens: int | None = None,
    format: str | None = None,
    draft: bool = False,
    *,
    name: str = "",
) -> CacheSpec:
    """A preset, a folder with a `config.json`, or a file that is a Hugging Face config or a spec declaration.

    The model is called `name`, or after the preset or the file (`config.json`: after its folder). A
    declaration has its name, bytes and draft streams already: only its page size may be changed.
    """
    given = str(name_or_path)
    model, config = (given, PRESETS[given]) if given in PRESETS else _read_file(Path(given))
    if "streams" not in config:
        return _from_config(config, name or model, page_tokens, format, draft)
    if format is not None:
        raise SpecError("format", format, "the file declares the bytes of its streams itself")
    if draft:
        raise SpecError("draft", draft, "the file declares its draft streams itself")
    spec = CacheSpec.from_dict(config)
    return spec if page_tokens is None else replace(spec, page_tokens=page_tokens)


def _read_file(path: Path) -> tuple[str, Config]:
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        known = ", ".join(PRESETS)
        raise SpecError("name", str(path), f"no preset ({known}) and no readable file: {error}") from error
    except ValueError as error:
        raise SpecError("file", str(path), f"is not JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise SpecError("file", str(path), "must hold one JSON object")
    return path.parent.resolve().name if path.name == "config.json" else path.stem, config


class ConfigReader(NamedTuple):
    """How the configs of one `model_type` are read, and its page size and format unless others are given."""

    read: Callable[[Config, int, str, str], CacheSpec]
    read_draft: Callable[[Config, int, str], CacheSpec] | None = None
    page_tokens: int = 64
    format: str = "bf16"


def _from_config(
    config: Config, model: str, page_tokens: int | None, format: str | None, draft: bool
) -> CacheSpec:
    if isinstance(config.get("text_config"), Mapping):  # a model that also sees or hears
        config = {**config, **config["text_config"]}
    name = family_name(config, FAMILIES)
    family = FAMILIES[name]
    page_tokens = family.page_tokens if page_tokens is None else page_tokens
    format = family.format if format is None else format
    spec = family.read(config, page_tokens, format, model)
    if not draft:
        return spec
    if family.read_draft is None:
        raise SpecError("draft", draft, f"no draft is known for {name}")
    return spec.with_draft(family.read_draft(config, page_tokens, format))


def _dense(config: Config, page_tokens: int, format: str, model: str) -> CacheSpec:
    """Every layer reads the whole prefix, unless `layer_types` has window layers.

    Without `layer_types` a window is not used: keeping more than a layer reads is exact.
    """
    if config.get("layer_types") is None:
        config = {**config, "layer_types": ["full_attention"] * whole(config, "num_hidden_layers")}
    return _windowed(config, page_tokens, format, model)


def _windowed(config: Config, page_tokens: int, format: str, model: str) -> CacheSpec:
    kinds = per_layer(config, "layer_types", known=("full_attention", "sliding_attention"))
    full, window = layers_of(kinds, "full_attention"), layers_of(kinds, "sliding_attention")
    heads = _heads(config, format)
    if not window:
        return mha(model, page_tokens, full, heads.kv_heads, heads.head_dim, heads.v_head_dim, format)
    layers = {"full_layers": full, "window_layers": window}
    return sliding_window(model, page_tokens, **layers, window=whole(config, "sliding_window"), heads=heads)


def _latent(config: Config, page_tokens: int, format: str, model: str) -> CacheSpec:
    names = ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")
    layers, rank, rope = (whole(config, name) for name in names)
    if config.get("index_head_dim") is None:
        return mla(model, page_tokens, layers, rank, rope, format)
    best = 0 if config.get("index_topk") is None else whole(config, "index_topk")
    dim = whole(config, "index_head_dim")
    return mla_indexer(model, page_tokens, layers, rank, rope, dim, format, best)


def _linear_attention(config: Config, page_tokens: int, format: str, model: str) -> CacheSpec:
    """Gated delta-net layers with an attention layer at every `full_attention_interval`-th place."""
    if config.get("layer_types") is None:
        every, layers = whole(config, "full_attention_interval"), whole(config, "num_hidden_layers")
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
        config = {**config, "layer_types": kinds}
    kinds = list(per_layer(config, "layer_types", known=("linear_attention", "full_attention")))
    keys, k_dim = whole(config, "linear_num_key_heads"), whole(config, "linear_key_head_dim")
    vals, v_dim = whole(config, "linear_num_value_heads"), whole(config, "linear_value_head_dim")
    kernel = whole(config, "linear_conv_kernel_dim")
    return recurrent(
        model,
        page_tokens,
        attention_layers=layers_of(kinds, "full_attention"),
        recurrent_layers=layers_of(kinds, "linear_attention"),
        heads=_heads(config, format),
        recurrence=Recurrence(2 * keys * k_dim + vals * v_dim, kernel, vals * k_dim * v_dim),
    )


def _jamba(config: Config, page_tokens: int, format: str, model: str) -> CacheSpec:
    """Mamba layers with an attention layer once in every `attn_layer_period`."""
    layers, period = whole(config, "num_hidden_layers"), whole(config, "attn_layer_period")
    offset = whole(config, "attn_layer_offset", least=0)
    kinds = ["attention" if i % period == offset else "mamba" for i in range(layers)]
    channels = whole(config, "mamba_expand") * whole(config, "hidden_size")
    kernel, state = whole(config, "mamba_d_conv"), whole(config, "mamba_d_state")
    return recurrent(
        model,
        page_tokens,
        attention_layers=layers_of(kinds, "attention"),
        recurrent_layers=layers_of(kinds, "mamba"),
        heads=_heads(config, format),
        recurrence=Recurrence(channels, kernel, channels * state),
    )


def _heads(config: Config, format: str) -> Heads:
    kv_heads = "num_attention_heads" if config.get("num_key_value_heads") is None else "num_key_value_heads"
    if config.get("head_dim") is not None:
        head_dim = whole(config, "head_dim")
    else:
        head_dim = whole(config, "hidden_size") // whole(config, "num_attention_heads")
    v_head_dim = None if config.get("v_head_dim") is None else whole(config, "v_head_dim")
    return Heads(whole(config, kv_heads), head_dim, v_head_dim, format)


_READERS: Mapping[Callable[[Config, int, str, str], CacheSpec], str] = {
    _latent: "deepseek_v2 deepseek_v3 deepseek_v32 glm_moe_dsa kimi_k2",
    _dense: "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe glm4_moe",
    _windowed: "gpt_oss gemma2 gemma3 gemma3_text olmo3 cohere2",
    _linear_attention: "qwen3_next qwen3_5_text",
    _jamba: "jamba",
}
FAMILIES = {name: ConfigReader(read) for read, names in _READERS.items() for name in names.split()}
# 256-token pages and fp8 are what production kernels of this model read.
FAMILIES["deepseek_v4"] = ConfigReader(deepseek_v4, deepseek_v4_mtp, page_tokens=256, format="fp8")
