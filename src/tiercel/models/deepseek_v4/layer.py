"""One layer: attention, then experts, each between hyper-connections."""

from __future__ import annotations

from torch import Tensor

from tiercel.kernels.choice import Kernels
from tiercel.kernels.reference import CosSin
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.batch import Batch
from tiercel.models.deepseek_v4.attention import Attention
from tiercel.models.deepseek_v4.blocks import Experts, Weights, hyper_site, part_of
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.rotary import Rotary


class Layer:
    """A layer of the target, or behind its last one the draft's."""

    def __init__(
        self,
        config: V4Config,
        kernels: Kernels,
        layer: int,
        weights: Weights,
        rotary: Rotary,
        memory: DeviceMemory,
        rings: int,
    ) -> None:
        self._k = kernels
        norms = {"attn": weights["input_layernorm.weight"], "ffn": weights["post_attention_layernorm.weight"]}
        self._sites = [
            hyper_site(config, kernels, part_of(weights, f"{site}_hc."), norm) for site, norm in norms.items()
        ]
        own = part_of(weights, "self_attn.")
        self.attention = Attention(config, kernels, layer, own, rotary, memory, rings)
        self.experts = Experts(config, kernels, part_of(weights, "mlp."))

    def __call__(self, x: Tensor, tokens: Tensor, turn: CosSin, batch: Batch) -> Tensor:
        """The streams [tokens, n, d] after this layer."""
        seen, place, mix = self._k.hyper_read(x, self._sites[0])
        x = self._k.hyper_write(x, self.attention(seen, turn, batch), place, mix)
        seen, place, mix = self._k.hyper_read(x, self._sites[1])
        return self._k.hyper_write(x, self.experts(seen, tokens), place, mix)
