"""A `transformers` model of a few thousand parameters with nothing left at its default, and ours on the same
weights."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from tiercel.models.base import Weights
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.weights import WEIGHTS

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
VOCAB = 256


@dataclass(frozen=True)
class Shape:
    """What differs between the models compared."""

    layers: tuple[str, ...] = (SLIDING, SLIDING, SPARSE, HEAVY, SPARSE, HEAVY)
    window: int = 32
    topk: int = 16
    heads: int = 4
    hash_layers: int = 2
    yarn: bool = True
    streams: int = 4
    head_dim: int = 32


def make_reference(shape: Shape) -> DeepseekV4ForCausalLM:
    """Sinks, biases, bases and norms are random: HF's defaults of 0 and 1 would hide mistakes."""
    yarn = {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    count = len(shape.layers)
    config = DeepseekV4Config(
        vocab_size=VOCAB,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=count,
        num_attention_heads=shape.heads,
        head_dim=shape.head_dim,
        partial_rotary_factor=0.25,
        q_lora_rank=32,
        num_experts_per_tok=2,
        n_routed_experts=4,
        layer_types=list(shape.layers),
        mlp_layer_types=["hash_moe"] * shape.hash_layers + ["moe"] * (count - shape.hash_layers),
        sliding_window=shape.window,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=16,
        index_head_dim=16,
        index_topk=shape.topk,
        hc_mult=shape.streams,
        max_position_embeddings=65536,
        rope_parameters=yarn if shape.yarn else None,
    )
    model = DeepseekV4ForCausalLM(config).eval().float()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=random)
            if name.endswith("tid2eid"):
                tensor.copy_(torch.randint(0, 4, tensor.shape, generator=random))
            elif "norm" in name:
                tensor.copy_(1 + 0.2 * noise)
            elif tensor.dim() == 1 or "position_bias" in name:
                tensor.copy_(0.3 * noise)
            else:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5)
    return model


def our_config(reference: DeepseekV4ForCausalLM) -> V4Config:
    return V4Config.from_hf(reference.config.to_dict())


def our_weights(reference: DeepseekV4ForCausalLM, device: str, matrices: torch.dtype) -> Weights:
    """In the types that they have when they are loaded from a folder."""
    wanted, own = WEIGHTS.of(our_config(reference), draft=False), reference.state_dict()
    return {name: own[name].to(device, each.dtype(matrices)) for name, each in wanted.items()}


def converted(reference: DeepseekV4ForCausalLM, dtype: torch.dtype) -> DeepseekV4ForCausalLM:
    """A copy with all numbers of this type. Frequencies stay fp32, as where `transformers` loads a folder."""
    model = deepcopy(reference)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and "inv_freq" not in name:
            tensor.data = tensor.data.to(dtype)
    return model


@torch.no_grad()
def reference_logits(reference: DeepseekV4ForCausalLM, tokens: Tensor) -> Tensor:
    """Logits of the reference, computed on its device; returned as fp32 on the CPU."""
    return reference(tokens[None].to(reference.device), use_cache=False).logits[0].float().cpu()


def random_tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))
