"""Qwen3, dense or with experts: its layers, in the order of a forward, and how the family is opened.

Every layer reads the whole prefix, and all of it is in pages, by position: there are no rings and no tails,
and a guess that is refused is overwritten.
"""

from __future__ import annotations

from torch import Tensor

from tiercel.kernels.choice import Kernels, make_kernels
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import Stage, Weights, part_of
from tiercel.models.families import Family
from tiercel.models.flat import FlatBatch
from tiercel.models.frame import Frame, Hidden, LayersDraft
from tiercel.models.grouped import Attention, FeedForward, Layer, Mixture, Mlp
from tiercel.models.loading import EMBEDDING, HEAD
from tiercel.models.qwen3.config import Qwen3Config, declare
from tiercel.models.qwen3.weights import WEIGHTS
from tiercel.models.rotary import Rotary


class Qwen3Layers:
    """The layers of a stage, the embedding before the first and the head behind the last."""

    draft: LayersDraft | None = None

    def __init__(
        self, config: Qwen3Config, weights: Weights, memory: DeviceMemory, kernels: Kernels, stage: Stage
    ) -> None:
        self.vocab_size, self.stage = config.vocab_size, stage
        self.width: tuple[int, ...] = (config.hidden_size,)
        self._config, self._k = config, kernels
        if stage.begins:
            self._embedding = weights[EMBEDDING]
        if stage.ends:
            self._lm_head, self._norm = kernels.pack(weights[HEAD]), weights["model.norm.weight"]
        self.rotaries = [Rotary(config.rope, config.head_dim, memory.device)]
        self._layers = {i: self._layer(i, weights, memory) for i in stage.layers}

    def _layer(self, i: int, weights: Weights, memory: DeviceMemory) -> Layer:
        c, k, own = self._config, self._k, part_of(weights, f"model.layers.{i}.")
        attention = Attention(c.grouping, k, part_of(own, "self_attn."), memory, i)
        mlp, experts = part_of(own, "mlp."), c.experts
        feed_forward: FeedForward
        if experts is not None and i in experts.layers:
            feed_forward = Mixture(k, mlp, experts.per_token, normed=experts.normalized)
        else:
            feed_forward = Mlp(k, mlp)
        return Layer(attention, feed_forward, k, own, c.rms_norm_eps)

    def begin(self, tokens: Tensor) -> Tensor:
        return self._embedding[tokens]

    def compute(self, layer: int, state: Hidden, batch: FlatBatch) -> Tensor:
        return self._layers[layer](state.x, state.rotations[0], batch)

    def logits(self, x: Tensor) -> Tensor:
        return self._k.linear(
            self._k.norm(x, self._norm, self._config.rms_norm_eps), self._lm_head, wide=True
        )

    def restore(self, moves: Tensor) -> None:
        """Pages hold everything."""


def build(  # noqa: PLR0913
    config: Qwen3Config,
    weights: Weights,
    memory: DeviceMemory,
    rings: int,
    kernels: Kernels | None = None,
    guesses_max: int = 0,
    stage: Stage | None = None,
) -> Frame:
    """The model, or a stage of it, for up to `rings` running requests."""
    k = kernels or make_kernels(device=str(memory.device))
    layers = Qwen3Layers(config, weights, memory, k, stage or Stage(0, config.layers, config.layers))
    return Frame(layers, k, memory, rings, guesses_max)


FAMILY = Family(
    read=Qwen3Config.from_hf,
    declare=declare,
    weights=WEIGHTS,
    build=build,
)
