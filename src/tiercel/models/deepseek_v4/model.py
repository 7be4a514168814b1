"""DeepSeek V4: its layers, in the order of a forward, and how the family is opened."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from tiercel.kernels.choice import Kernels, make_kernels
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import Stage, Weights, part_of
from tiercel.models.beside import Beside
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.draft import MtpDraft, products_of
from tiercel.models.deepseek_v4.hyper import hyper_of, site_of
from tiercel.models.deepseek_v4.layer import Layer
from tiercel.models.deepseek_v4.rows import Setup
from tiercel.models.deepseek_v4.weights import WEIGHTS
from tiercel.models.families import DraftOffer, Family
from tiercel.models.flat import FlatBatch
from tiercel.models.frame import Frame, Hidden
from tiercel.models.loading import EMBEDDING, HEAD
from tiercel.models.rotary import Rotary
from tiercel.spec.deepseek_v4 import deepseek_v4, deepseek_v4_mtp


class V4Layers:
    """The layers of a stage, the embedding before the first and the head behind the last."""

    def __init__(self, setup: Setup, weights: Weights, stage: Stage) -> None:
        config, k, device = setup.config, setup.kernels, setup.memory.device
        self.config, self.vocab_size, self.stage = config, config.vocab_size, stage
        self.width: tuple[int, ...] = config.hc_mult, config.hidden_size
        self._k, self._hyper = k, hyper_of(k)
        if stage.begins:
            self._embedding = weights[EMBEDDING]
        if stage.ends:
            self._lm_head = k.pack(weights[HEAD])
            head = part_of(weights, "model.hc_head.hc_")
            self._head = site_of(config, k, head, weights["model.norm.weight"])
        self.rotaries = [
            Rotary(rope, config.rope_dim, device) for rope in (config.rope_main, config.rope_compress)
        ]
        self._layers = {
            i: Layer(setup, i, part_of(weights, f"model.layers.{i}."), self.rotaries[config.ratios[i] > 0])
            for i in stage.layers
        }
        drafts = any(stream.draft for stream in setup.memory.spec.streams)
        self.draft = MtpDraft(setup, weights, self._lm_head, self.rotaries[0]) if drafts else None

    def begin(self, tokens: Tensor) -> Tensor:
        return self._embedding[tokens][:, None, :].repeat(1, self.config.hc_mult, 1)

    def compute(self, layer: int, state: Hidden, batch: FlatBatch) -> Tensor:
        rotation = state.rotations[self.config.ratios[layer] > 0]
        return self._layers[layer](state.x, state.tokens, rotation, batch)

    def logits(self, x: Tensor) -> Tensor:
        return self._k.linear(self._hyper.head(x, self._head), self._lm_head, wide=True)

    def restore(self, moves: Tensor) -> None:
        for layer in self._layers.values():
            layer.attention.restore(moves)


def build(  # noqa: PLR0913
    config: V4Config,
    weights: Weights,
    memory: DeviceMemory,
    rings: int,
    kernels: Kernels | None = None,
    guesses_max: int = 0,
    stage: Stage | None = None,
) -> Frame:
    """The model, or a stage of it, for up to `rings` running requests."""
    k = kernels or make_kernels(device=str(memory.device))
    stage = stage or Stage(0, config.layers, config.layers)
    setup = Setup(config, k, memory, rings, Beside(memory.device), guesses_max)
    layers = V4Layers(setup, weights, stage)
    return Frame(layers, k, memory, rings, guesses_max)


def draft_of(checkpoint: Checkpoint, config: V4Config) -> DraftOffer | None:
    """The MTP layers in a checkpoint."""
    if not WEIGHTS.has_draft(checkpoint, config):
        return None
    target, guess = products_of(config)
    return DraftOffer(partial(deepseek_v4_mtp, checkpoint.config, hidden=True), guess / target)


FAMILY = Family(
    read=V4Config.from_hf,
    declare=partial(deepseek_v4, model="deepseek-v4"),
    weights=WEIGHTS,
    build=build,
    format="fp8",
    draft=draft_of,
)
