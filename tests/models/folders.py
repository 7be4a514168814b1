"""Checkpoint folders with tiny numbers, in DeepSeek's own form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def make_config(**changes: Any) -> dict[str, Any]:
    """Four layers of all kinds and one MTP layer. `None` leaves a field out."""
    config = {
        "model_type": "deepseek_v4",
        "architectures": ["DeepseekV4ForCausalLM"],
        "vocab_size": 24,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": 1,
        "compress_ratios": [0, 4, 128, 4, 0],
        "num_hash_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "qk_rope_head_dim": 4,
        "q_lora_rank": 8,
        "o_groups": 2,
        "o_lora_rank": 6,
        "sliding_window": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4,
        "n_routed_experts": 3,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": 1048576,
        "tie_word_embeddings": False,
    }
    return {name: value for name, value in {**config, **changes}.items() if value is not None}


def write_folder(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None = None
) -> Path:
    """One safetensors file and a config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(make_config() if config is None else config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, shards: Mapping[str, Mapping[str, Tensor]]) -> Path:
    """Several files and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(make_config()))
    for file, tensors in shards.items():
        save_file(dict(tensors), folder / file)
    write_index(folder, {name: file for file, tensors in shards.items() for name in tensors})
    return folder


def write_index(folder: Path, file_of: Mapping[str, str]) -> None:
    text = json.dumps({"metadata": {}, "weight_map": file_of})
    (folder / "model.safetensors.index.json").write_text(text)
