"""DeepSeek V4 on cached pages: takes spans, reads and writes device pages and recent rows, answers logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tiercel.kernels.choice import Kernels, make_kernels
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import DRAWN_LAST, Span, Weights, part_of
from tiercel.models.batch import Batch
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.draft import Draft
from tiercel.models.deepseek_v4.layer import Layer, site_of
from tiercel.models.deepseek_v4.rows import Setup
from tiercel.models.deepseek_v4.weights import draft_names, load_weights
from tiercel.models.families import Family
from tiercel.models.flat import FlatBatch
from tiercel.models.rotary import Rotary
from tiercel.spec.deepseek_v4 import deepseek_v4


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
        self.config, self.vocab_size = config, config.vocab_size
        self.kernels = k = kernels or make_kernels(device=str(memory.device), offered=FAMILY.kernels)
        self._setup = setup = Setup(config, k, memory, rings)
        self._embedding = weights["model.embed_tokens.weight"]
        self.last = torch.zeros(rings, dtype=torch.int64, device=memory.device)
        self._table: Tensor | None = None
        """The page tables of running texts, where kernels read them on the device."""
        if k.NAME == "cuda":
            self._table = torch.zeros(rings, memory.pages, dtype=torch.int32, device=memory.device)
        self._lm_head = k.pack(weights["lm_head.weight"])
        head = part_of(weights, "model.hc_head.hc_")
        self._head = site_of(config, k, head, weights["model.norm.weight"])
        ropes = config.rope_main, config.rope_compress
        self._rotaries = [Rotary(rope, config.rope_dim, memory.device) for rope in ropes]
        self.layers = [
            Layer(setup, i, part_of(weights, f"model.layers.{i}."), self._rotaries[ratio > 0])
            for i, ratio in enumerate(config.ratios)
        ]
        drafted = any(stream.name.startswith("draft_") for stream in memory.spec.streams)
        self.draft = Draft(setup, weights, self._lm_head) if drafted else None
        """There when the cache declaration has the draft's streams; then it follows every call."""

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span], rows: Sequence[int] | None = None) -> Tensor:
        """Logits of these flat tokens; None: of the last token of each span."""
        batch = self._make_batch(spans)
        tokens = torch.where(batch.tokens == DRAWN_LAST, self.last[batch.rings], batch.tokens)
        turns = [rotary.at(batch.positions, batch.longest) for rotary in self._rotaries]
        x = self._embedding[tokens][:, None, :].repeat(1, self.config.hc_mult, 1)
        for layer, ratio in zip(self.layers, self.config.ratios, strict=True):
            x = layer(x, tokens, turns[ratio > 0], batch)
        if self.draft is not None:
            self.draft.follow(spans, x, tokens)
        x = x[batch.last if rows is None else torch.as_tensor(rows, dtype=torch.long, device=x.device)]
        return self.kernels.linear(self.kernels.hyper_head(x, self._head), self._lm_head, wide=True)

    def _make_batch(self, spans: Sequence[Span]) -> Batch | FlatBatch:
        if self._table is None:
            return Batch(spans, self._setup.rings, self._embedding.device)
        return FlatBatch(spans, self._table)

    def resume(self, ring: int, tails: Sequence[tuple[int, int]]) -> None:
        """A text goes on from the tails at (boundary, place), the earliest first."""
        for boundary, place in tails:
            for layer in self.layers:
                layer.attention.restore(ring, place, boundary)
            if self.draft is not None:
                self.draft.restore(ring, place, boundary)


FAMILY = Family(
    read=V4Config.from_hf,
    declare=partial(deepseek_v4, model="deepseek-v4"),
    load=partial(load_weights, draft=False),
    build=DeepseekV4,
    kernels=("native", "cuda", "reference"),
    unread=draft_names,
)
