"""The MTP head: drafts the token after next from what the model has just computed.

    target     X₀    X₁    X₂    X₃  …        streams after the last layer, before they are collapsed
    tokens        t₁    t₂    t₃    t₄ …      each beside the streams of the token before it
    draft         e₀    e₁    e₂    e₃ …      its window entries, at the positions of the streams

Entry i needs token i + 1. It belongs to that token, the newest it has seen: at a boundary b the tail holds
the entries up to b - 2, which no token outside the page has touched, and the streams of token b - 1, from
which the next entry is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tiercel.errors import SpecError
from tiercel.kernels.choice import Kernels
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import Span
from tiercel.models.batch import Batch
from tiercel.models.deepseek_v4.blocks import Weights, head_site, part_of
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.layer import Layer
from tiercel.models.entries import EntryRows
from tiercel.models.rotary import Rotary


class Draft:
    """One MTP layer. `weights` are all of the model's: it shares embedding and head."""

    def __init__(
        self,
        config: V4Config,
        kernels: Kernels,
        weights: Weights,
        lm_head: Any,
        memory: DeviceMemory,
        rings: int,
    ) -> None:
        if all(stream.name != "draft_hidden" for stream in memory.spec.streams):
            why = "has no stream `hidden`, without which a draft can not go on: deepseek_v4_mtp(hidden=True)"
            raise SpecError("draft", memory.spec.model, why)
        self._config, self._k, self._rings = config, kernels, rings
        w = part_of(weights, "mtp.0.")
        self._norms = [w["enorm.weight"], w["hnorm.weight"]]
        self._projections = [kernels.pack(w[f"{name}.weight"]) for name in ("e_proj", "h_proj")]
        self._head = head_site(config, kernels, part_of(w, "hc_head."), w["norm.weight"])
        self._embedding, self._lm_head = weights["model.embed_tokens.weight"], lm_head
        self._rotary = Rotary(config.rope_main, config.rope_dim)
        self.layer = Layer(config, kernels, config.layers, w, self._rotary, memory, rings)
        stream = memory.spec.stream("draft_hidden")
        rows = memory.view("draft_hidden", config.layers)
        self._tails = EntryRows(kernels, rows, stream, memory.spec.page_tokens, config.rope_dim)
        self._last = torch.zeros(rings, config.hc_mult, config.hidden_size)

    def follow(self, spans: Sequence[Span], x: Tensor, tokens: Tensor) -> Tensor:
        """The target computed streams x [tokens, n, d]: make their entries. Answers the draft's logits,
        token by token,
        for the tokens that have one before them."""
        shifted, streams, seen, at = [], [], [], 0
        for span in spans:
            part = slice(at, at + len(span.tokens))
            before = torch.cat([self._last[span.ring][None], x[part][:-1]])
            first = int(span.start == 0)  # the first token of a text has no streams before it
            if len(span.tokens) > first:
                streams.append(before[first:])
                seen.append(tokens[part][first:])
                start = max(span.start - 1, 0)
                shifted.append(
                    replace(
                        span, tokens=seen[-1], start=start, tails={b - 1: p for b, p in span.tails.items()}
                    )
                )
            self._last[span.ring] = x[part][-1]
            for boundary, place in span.tails.items():
                self._tails.write_row(
                    place, self._tails.codec.encode(x[at + boundary - span.start - 1].flatten()[None])
                )
            at += len(span.tokens)
        if not shifted:
            return torch.empty(0, len(self._embedding))
        return self._run(shifted, torch.cat(streams), torch.cat(seen))[0]

    def propose(self, span: Span, streams: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits after `span`'s tokens, which the target has not computed yet, and the draft's own streams of
        them; nothing is remembered.

        The first token goes beside the target's last streams. To draft further, give the span again with one
        more token, and the streams it answered, which the tokens after the first go beside.
        """
        before = self._last[span.ring][None]
        if streams is not None:
            before = torch.cat([before, streams])
        assert len(before) == len(span.tokens), "one token more than there are streams of the draft"
        logits, x = self._run([replace(span, start=span.start - 1, keep=False)], before, span.tokens)
        return logits[-1:], x

    def restore(self, ring: int, place: int, boundary: int) -> None:
        self.layer.attention.restore(ring, place, boundary - 1)
        self._last[ring] = self._tails.codec.decode(self._tails.read_row(place)).view_as(self._last[ring])

    def _run(self, spans: Sequence[Span], x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, streams) of tokens beside the streams of the tokens before them."""
        c, k = self._config, self._k
        batch = Batch(spans, self._rings)
        embedded = k.norm(self._embedding[tokens], self._norms[0], c.rms_norm_eps)
        x = k.linear(k.norm(x.flatten(0, 1), self._norms[1], c.rms_norm_eps), self._projections[1])
        x = x.unflatten(0, (len(tokens), -1)) + k.linear(embedded, self._projections[0])[:, None, :]
        x = self.layer(x, tokens, self._rotary.at(batch.positions), batch)
        return k.linear(k.hyper_head(x, self._head), self._lm_head), x
