"""DeepSeek V4 on cached pages: takes spans, reads and writes device pages and recent rows, answers logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.kernels.choice import Kernels, make_kernels
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.deepseek_v4.batch import Batch, Span
from tiercel.models.deepseek_v4.blocks import Weights, head_site, part_of
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.draft import Draft
from tiercel.models.deepseek_v4.layer import Layer
from tiercel.models.deepseek_v4.rope import Rotary


class DeepseekV4:
    """The whole model for up to `rings` running requests. It knows nothing of scheduling."""

    def __init__(
        self,
        config: V4Config,
        weights: Weights,
        memory: DeviceMemory,
        rings: int,
        kernels: Kernels | None = None,
    ) -> None:
        self.config = config
        self.kernels = k = kernels or make_kernels()
        self._rings = rings
        self._embedding, self._lm_head = (
            weights["model.embed_tokens.weight"],
            k.pack(weights["lm_head.weight"]),
        )
        self._head = head_site(config, k, part_of(weights, "model.hc_head."), weights["model.norm.weight"])
        self._rotaries = [Rotary(kind, config.rope_dim) for kind in (config.rope_main, config.rope_compress)]
        self.layers = [
            Layer(
                config, k, i, part_of(weights, f"model.layers.{i}."), self._rotaries[ratio > 0], memory, rings
            )
            for i, ratio in enumerate(config.ratios)
        ]
        drafted = any(stream.name.startswith("draft_") for stream in memory.spec.streams)
        self.draft = Draft(config, k, weights, self._lm_head, memory, rings) if drafted else None
        """There when the cache declaration has the draft's streams; then it follows every call."""

    @torch.inference_mode()
    def __call__(self, spans: Sequence[Span], *, every_token: bool = False) -> Tensor:
        """Logits of the last token of each span, or of every token, in the order of the spans."""
        batch = Batch(spans, self._rings)
        turns = [rotary.at(batch.positions) for rotary in self._rotaries]
        x = self._embedding[batch.tokens][:, None, :].repeat(1, self.config.hc_mult, 1)
        for layer, ratio in zip(self.layers, self.config.ratios, strict=True):
            x = layer(x, batch.tokens, turns[ratio > 0], batch)
        if self.draft is not None:
            self.draft.follow(spans, x, batch.tokens)
        if not every_token:
            x = x[batch.last]
        return self.kernels.linear(self.kernels.hyper_head(x, self._head), self._lm_head)

    def restore(self, ring: int, place: int, boundary: int) -> None:
        """A request resumes at a boundary from the tail at this device place."""
        for layer in self.layers:
            layer.attention.restore(ring, place, boundary)
        if self.draft is not None:
            self.draft.restore(ring, place, boundary)
