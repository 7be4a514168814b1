"""DeepSeek V4 on cached pages: takes spans, reads and writes device pages and recent rows, answers logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from tiercel.memory.buffers import DeviceMemory
from tiercel.models.deepseek_v4.batch import Span
from tiercel.models.deepseek_v4.blocks import Weights, hyper_head, norm, part_of
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.draft import Draft
from tiercel.models.deepseek_v4.layer import Layer
from tiercel.models.deepseek_v4.rope import Rotary


class DeepseekV4:
    """The whole model for up to `rings` running requests. It knows nothing of scheduling."""

    def __init__(self, config: V4Config, weights: Weights, memory: DeviceMemory, rings: int) -> None:
        self.config = config
        self._weights = weights
        self._head = part_of(weights, "model.hc_head.")
        self._rotaries = [Rotary(kind, config.rope_dim) for kind in (config.rope_main, config.rope_compress)]
        self.layers = [
            Layer(config, i, part_of(weights, f"model.layers.{i}."), self._rotaries[ratio > 0], memory, rings)
            for i, ratio in enumerate(config.ratios)
        ]
        drafted = any(stream.name.startswith("draft_") for stream in memory.spec.streams)
        self.draft = Draft(config, weights, memory, rings) if drafted else None
        """There when the cache declaration has the draft's streams; then it follows every call."""

    @torch.inference_mode()
    def __call__(self, spans: Sequence[Span], *, every_token: bool = False) -> Tensor:
        """Logits of the last token of each span, or of every token, in the order of the spans."""
        tokens = torch.cat([span.tokens for span in spans])
        positions = torch.cat([torch.arange(span.start, span.end) for span in spans])
        turns = [rotary.at(positions) for rotary in self._rotaries]
        x = self._weights["model.embed_tokens.weight"][tokens]
        x = x[:, None, :].expand(-1, self.config.hc_mult, -1)
        for layer, ratio in zip(self.layers, self.config.ratios, strict=True):
            x = layer(x, tokens, positions, turns[ratio > 0], spans)
        if self.draft is not None:
            self.draft.follow(spans, x, tokens)
        if not every_token:
            x = x[torch.tensor([len(span.tokens) for span in spans]).cumsum(0) - 1]
        y = hyper_head(self.config, self._head, x)
        y = norm(y, self._weights["model.norm.weight"], self.config.rms_norm_eps)
        return F.linear(y, self._weights["lm_head.weight"])

    def restore(self, ring: int, place: int) -> None:
        """A request resumes from the tail at this device place."""
        for layer in self.layers:
            layer.attention.restore(ring, place)
        if self.draft is not None:
            self.draft.restore(ring, place)
