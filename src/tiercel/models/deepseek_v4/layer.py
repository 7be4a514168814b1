"""One layer: attention, then experts, each between hyper-connections. All on flat tokens [tokens, …]."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.kernels.choice import Kernels
from tiercel.kernels.reference import CosSin, Site
from tiercel.models.batch import Batch
from tiercel.models.deepseek_v4.attention import Attention, Setup
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.weights import Weights, part_of
from tiercel.models.rotary import Rotary


def site_of(config: V4Config, kernels: Kernels, weights: Weights, norm: Tensor) -> Site:
    """A hyper-connection: how a layer's attention or experts read the streams, or how the head reads them.

    `norm` is the weight of the norm behind it.
    """
    n, scale = config.hc_mult, weights["scale"]
    if len(scale) == 3:  # of collapse, place and mix; the head has the first only
        scale = scale.repeat_interleave(torch.tensor([n, n, n * n], device=scale.device))
    fn, eps = kernels.pack(weights["fn"]), config.rms_norm_eps
    return Site(fn, scale, weights["base"], norm, n, config.hc_sinkhorn_iters, config.hc_eps, eps)


class Experts:
    """Hash or score routed experts and one shared expert."""

    def __init__(self, config: V4Config, kernels: Kernels, weights: Weights) -> None:
        self._config, self._k = config, kernels
        self._gate = kernels.pack(weights["gate.weight"])
        self._bias = weights.get("gate.e_score_correction_bias")
        self._by_token = weights.get("gate.tid2eid")
        shared = [weights[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")]
        gate_up = torch.cat([weights["experts.gate_up_proj"], torch.cat(shared[:2])[None]])
        down = torch.cat([weights["experts.down_proj"], shared[2][None]])
        self._matrices = kernels.pack_all(gate_up), kernels.pack_all(down)

    def __call__(self, x: Tensor, tokens: Tensor) -> Tensor:
        c, k = self._config, self._k
        chosen = None if self._by_token is None else self._by_token[tokens]
        logits = k.linear(x, self._gate)
        chosen, weights = k.route(logits, chosen, self._bias, c.experts_per_token, c.routed_scaling_factor)
        return k.experts(x, chosen, weights, self._matrices, c.swiglu_limit)


class Layer:
    """A layer of the target, or, with the number after its last one, the draft's."""

    def __init__(self, setup: Setup, layer: int, weights: Weights, rotary: Rotary) -> None:
        config, self._k = setup.config, setup.kernels
        norms = {"attn": weights["input_layernorm.weight"], "ffn": weights["post_attention_layernorm.weight"]}
        self._sites = [site_of(config, self._k, part_of(weights, f"{at}_hc."), n) for at, n in norms.items()]
        self.attention = Attention(setup, layer, part_of(weights, "self_attn."), rotary)
        self.experts = Experts(config, self._k, part_of(weights, "mlp."))

    def __call__(self, x: Tensor, tokens: Tensor, turn: CosSin, batch: Batch) -> Tensor:
        """The streams [tokens, n, d] after this layer."""
        seen, place, mix = self._k.hyper_read(x, self._sites[0])
        x = self._k.hyper_write(x, self.attention(seen, turn, batch), place, mix)
        seen, place, mix = self._k.hyper_read(x, self._sites[1])
        return self._k.hyper_write(x, self.experts(seen, tokens), place, mix)
