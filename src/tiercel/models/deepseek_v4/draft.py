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

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from tiercel.memory.buffers import DeviceMemory
from tiercel.models.deepseek_v4.batch import Span
from tiercel.models.deepseek_v4.blocks import Weights, hyper_head, norm, part_of
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.entries import EntryRows, codec_of
from tiercel.models.deepseek_v4.layer import Layer
from tiercel.models.deepseek_v4.rope import Rotary


class Draft:
    """One MTP layer. `weights` are all of the model's: it shares embedding and head."""

    def __init__(self, config: V4Config, weights: Weights, memory: DeviceMemory, rings: int) -> None:
        self._config = config
        self._w = part_of(weights, "mtp.0.")
        self._head = part_of(self._w, "hc_head.")
        self._embedding, self._lm_head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
        self._rotary = Rotary(config.rope_main, config.rope_dim)
        self.layer = Layer(config, config.layers, self._w, self._rotary, memory, rings)
        stream = memory.spec.stream("draft_hidden")
        codec = codec_of(stream, config.rope_dim)
        rows = memory.view("draft_hidden", config.layers)
        self._tails = EntryRows.over(rows, stream, memory.spec.page_tokens, codec)
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
            return torch.empty(0, self._lm_head.shape[0])
        return self._run(shifted, torch.cat(streams), torch.cat(seen))[0]

    def propose(self, span: Span, streams: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits of the token after `span`'s one token, which the target has not computed yet; nothing is
        remembered.

        To draft further, give the streams it answers and the next token.
        """
        assert len(span.tokens) == 1
        before = self._last[span.ring][None] if streams is None else streams
        shifted = replace(span, start=span.start - 1, keep=False)
        return self._run([shifted], before, span.tokens)

    def restore(self, ring: int, place: int) -> None:
        self.layer.attention.restore(ring, place)
        self._last[ring] = self._tails.codec.decode(self._tails.read_row(place)).view_as(self._last[ring])

    def _run(self, spans: Sequence[Span], x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, streams) of tokens beside the streams of the tokens before them."""
        c, w = self._config, self._w
        embedded = norm(self._embedding[tokens], w["enorm.weight"], c.rms_norm_eps)
        x = F.linear(norm(x, w["hnorm.weight"], c.rms_norm_eps), w["h_proj.weight"])
        x = x + F.linear(embedded, w["e_proj.weight"])[:, None, :]
        positions = torch.cat([torch.arange(span.start, span.end) for span in spans])
        x = self.layer(x, tokens, positions, self._rotary.at(positions), spans)
        y = norm(hyper_head(c, self._head, x), w["norm.weight"], c.rms_norm_eps)
        return F.linear(y, self._lm_head), x
