"""The stateless parts of a layer: hyper-connections and experts. Everything on flat tokens [tokens, …]."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tiercel.kernels.choice import Kernels
from tiercel.kernels.reference import Site
from tiercel.models.deepseek_v4.config import V4Config

Weights = Mapping[str, Tensor]
"""The parameters of one part, by the names they have inside it."""


def part_of(weights: Weights, prefix: str) -> Weights:
    """The parameters below a prefix."""
    return {name[len(prefix) :]: tensor for name, tensor in weights.items() if name.startswith(prefix)}


def hyper_site(config: V4Config, kernels: Kernels, weights: Weights, norm: Tensor) -> Site:
    """How one site of a layer reads the streams; `norm` is of the site itself."""
    n = config.hc_mult
    scale = weights["scale"].repeat_interleave(torch.tensor([n, n, n * n]))
    return _site(config, kernels, weights["fn"], scale, weights["base"], norm)


def head_site(config: V4Config, kernels: Kernels, weights: Weights, norm: Tensor) -> Site:
    """How the streams are collapsed once, at the end."""
    return _site(config, kernels, weights["hc_fn"], weights["hc_scale"], weights["hc_base"], norm)


def _site(config: V4Config, kernels: Kernels, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor) -> Site:
    return Site(
        kernels.pack(fn),
        scale,
        base,
        norm,
        config.hc_mult,
        config.hc_sinkhorn_iters,
        config.hc_eps,
        config.rms_norm_eps,
    )


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
