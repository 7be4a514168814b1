"""One layer: attention, then experts, each between hyper-connections."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tiercel.memory.buffers import DeviceMemory
from tiercel.models.deepseek_v4.attention import Attention
from tiercel.models.deepseek_v4.batch import Span
from tiercel.models.deepseek_v4.blocks import Experts, HyperConnection, Weights, norm, part_of
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.rope import Rotary, Turn


class Layer:
    """A layer of the target, or behind its last one the draft's."""

    def __init__(
        self, config: V4Config, layer: int, weights: Weights, rotary: Rotary, memory: DeviceMemory, rings: int
    ) -> None:
        self._eps = config.rms_norm_eps
        self._norms = [weights["input_layernorm.weight"], weights["post_attention_layernorm.weight"]]
        self._connections = [
            HyperConnection(config, part_of(weights, f"{site}_hc.")) for site in ("attn", "ffn")
        ]
        self.attention = Attention(config, layer, part_of(weights, "self_attn."), rotary, memory, rings)
        self.experts = Experts(config, part_of(weights, "mlp."))

    def __call__(
        self, x: Tensor, tokens: Tensor, positions: Tensor, turn: Turn, spans: Sequence[Span]
    ) -> Tensor:
        """The streams [tokens, n, d] after this layer."""
        seen, place, mix = self._connections[0].read(x)
        y = self.attention(norm(seen, self._norms[0], self._eps), positions, turn, spans)
        x = HyperConnection.write(x, y, place, mix)
        seen, place, mix = self._connections[1].read(x)
        y = self.experts(norm(seen, self._norms[1], self._eps), tokens)
        return HyperConnection.write(x, y, place, mix)
