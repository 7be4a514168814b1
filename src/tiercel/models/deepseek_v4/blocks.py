"""The stateless parts of a layer: norms, hyper-connections, experts. Everything on flat tokens [tokens,
…]."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from tiercel.kernels.mhc import sinkhorn_reference
from tiercel.models.deepseek_v4.config import V4Config

ASKS_AT_ONCE = 64
"""Up to so many (token, expert) pairs the experts' weights are gathered: 64 is 16 requests of 4 experts."""

Weights = Mapping[str, Tensor]
"""The parameters of one part, by the names they have inside it."""


def part_of(weights: Weights, prefix: str) -> Weights:
    """The parameters below a prefix."""
    return {name[len(prefix) :]: tensor for name, tensor in weights.items() if name.startswith(prefix)}


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * rms(x, eps)


class HyperConnection:
    """Manifold-constrained hyper-connections: how a site reads the streams, and how they take its answer."""

    def __init__(self, config: V4Config, weights: Weights) -> None:
        self._config = config
        self._fn, self._base = weights["fn"], weights["base"]
        n = config.hc_mult
        self._scale = weights["scale"].repeat_interleave(torch.tensor([n, n, n * n]))

    def read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [tokens, n, d] → (what the site sees [tokens, d], C [tokens, n], B [tokens, n, n])."""
        c, n = self._config, self._config.hc_mult
        mixed = F.linear(rms(x.flatten(1), c.rms_norm_eps), self._fn) * self._scale + self._base
        collapse, place, mix = mixed.split([n, n, n * n], dim=1)
        seen = torch.matmul((torch.sigmoid(collapse) + c.hc_eps)[:, None, :], x).squeeze(1)
        mix = torch.softmax(mix.unflatten(1, (n, n)), -1) + c.hc_eps
        return seen, 2 * torch.sigmoid(place), sinkhorn_reference(mix, c.hc_sinkhorn_iters, c.hc_eps)

    @staticmethod
    def write(x: Tensor, y: Tensor, place: Tensor, mix: Tensor) -> Tensor:
        """The streams after the site answered y [tokens, d]."""
        return place[..., None] * y[:, None, :] + torch.matmul(mix.transpose(1, 2), x)


def hyper_head(config: V4Config, weights: Weights, x: Tensor) -> Tensor:
    """The streams [tokens, n, d] collapsed to [tokens, d], once, at the end."""
    mixed = F.linear(rms(x.flatten(1), config.rms_norm_eps), weights["hc_fn"])
    collapse = torch.sigmoid(mixed * weights["hc_scale"] + weights["hc_base"]) + config.hc_eps
    return torch.matmul(collapse[:, None, :], x).squeeze(1)


class Experts:
    """Hash or score routed experts and one shared expert."""

    def __init__(self, config: V4Config, weights: Weights) -> None:
        self._config = config
        self._w = weights
        self._shared_gate_up = torch.cat(
            [weights[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up")]
        )

    def __call__(self, x: Tensor, tokens: Tensor) -> Tensor:
        weights, chosen = self._route(x, tokens)
        flat, count = chosen.flatten(), chosen.shape[1]
        if flat.numel() <= ASKS_AT_ONCE:
            answers = self._ask_each(x.repeat_interleave(count, 0), flat)
        else:
            answers = torch.empty(flat.numel(), x.shape[1])
            for expert in flat.unique().tolist():
                asked = torch.where(flat == expert)[0]
                answers[asked] = self._ask(x[asked // count], expert)
        routed = (answers.view(*chosen.shape, -1) * weights[..., None]).sum(1)
        return routed + self._shared(x)

    def _ask(self, x: Tensor, expert: int) -> Tensor:
        """One expert, many tokens."""
        y = self._gated(F.linear(x, self._w["experts.gate_up_proj"][expert]))
        return F.linear(y, self._w["experts.down_proj"][expert])

    def _ask_each(self, x: Tensor, experts: Tensor) -> Tensor:
        """To each token its own expert: fewer calls than experts, for a few tokens."""
        y = self._gated(torch.matmul(self._w["experts.gate_up_proj"][experts], x[..., None]).squeeze(-1))
        return torch.matmul(self._w["experts.down_proj"][experts], y[..., None]).squeeze(-1)

    def _route(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        c = self._config
        scores = F.softplus(F.linear(x, self._w["gate.weight"])).sqrt()
        if "gate.tid2eid" in self._w:
            chosen = self._w["gate.tid2eid"][tokens]
        else:
            biased = scores + self._w["gate.e_score_correction_bias"]
            chosen = biased.topk(c.experts_per_token, dim=-1, sorted=False).indices
        weights = scores.gather(1, chosen)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor, chosen

    def _gated(self, gate_up: Tensor) -> Tensor:
        limit = self._config.swiglu_limit
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)

    def _shared(self, x: Tensor) -> Tensor:
        gate_up = F.linear(x, self._shared_gate_up)
        return F.linear(self._gated(gate_up), self._w["shared_experts.down_proj.weight"])
