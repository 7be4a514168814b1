"""A `transformers` Qwen3 of a few thousand parameters, dense or with experts, with random norms; alone and in
a folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tiercel.models.families import EMBEDDED, folder_of

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 128}


DIMENSIONS = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
"""Six heads on two kv heads, wider together than the model."""

EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}


def make_reference(**changes: Any) -> Qwen3ForCausalLM:
    return _randomized(Qwen3ForCausalLM(Qwen3Config(**{**DIMENSIONS, **changes})))


def make_moe_reference(**changes: Any) -> Qwen3MoeForCausalLM:
    """The first and the last layer have experts."""
    return _randomized(Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**DIMENSIONS, **EXPERTS, **changes})))


def _randomized(model: Any) -> Any:
    """HF's norms of 1 would hide mistakes."""
    model = model.eval().float()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=random)
            tensor.copy_(1 + 0.3 * noise if "norm" in name else noise * tensor.shape[-1] ** -0.5)
    return model


def random_tokens(count: int, vocab: int = 256) -> Tensor:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def reference_logits(model: Qwen3ForCausalLM, tokens: Tensor) -> Tensor:
    return model(tokens[None]).logits[0]


def write_qwen3(folder: Path, *, moe: bool = False, shards_of: str = "5GB", **changes: Any) -> Path:
    """As `transformers` saves it, with the embedded model's tokenizer."""
    make = make_moe_reference if moe else make_reference
    make(**{"vocab_size": 4096, **changes}).save_pretrained(folder, max_shard_size=shards_of)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(folder_of(EMBEDDED) / name, folder)
    return folder
