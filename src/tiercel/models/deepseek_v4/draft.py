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

from tiercel.errors import SpecError
from tiercel.kernels.reference import Matrix
from tiercel.models.base import Span, Weights, part_of
from tiercel.models.batch import Batch
from tiercel.models.deepseek_v4.layer import Layer, site_of
from tiercel.models.deepseek_v4.rows import Setup
from tiercel.models.rotary import Rotary


class Draft:
    """One MTP layer. `weights` are all of the model's: the draft shares embedding and head."""

    def __init__(self, setup: Setup, weights: Weights, lm_head: Matrix) -> None:
        c, k, memory, rings = setup[:4]
        if all(stream.name != "draft_hidden" for stream in memory.spec.streams):
            why = "has no stream `hidden`, without which a draft can not go on: deepseek_v4_mtp(hidden=True)"
            raise SpecError("draft", memory.spec.model, why)
        self._config, self._k, self._rings = c, k, rings
        w = part_of(weights, "mtp.0.")
        self._norms = [w["enorm.weight"], w["hnorm.weight"]]
        self._projections = [k.pack(w[f"{name}.weight"]) for name in ("e_proj", "h_proj")]
        self._head = site_of(c, k, part_of(w, "hc_head.hc_"), w["norm.weight"])
        self._embedding, self._lm_head = weights["model.embed_tokens.weight"], lm_head
        self._rotary = Rotary(c.rope_main, c.rope_dim, memory.device)
        self.layer = Layer(setup, c.layers, w, self._rotary)
        self._tails = setup.rows("draft_hidden", c.layers)
        self._last = torch.zeros(rings, c.hc_mult, c.hidden_size, device=memory.device)

    def follow(self, spans: Sequence[Span], x: Tensor, tokens: Tensor) -> Tensor:
        """Makes the entries of the streams x [tokens, n, d] that the target computed. Answers the draft's
        logits, token by token, for the tokens that have one before them."""
        shifted, streams, seen = [], [], []
        lengths = [len(span.tokens) for span in spans]
        for span, own, own_tokens in zip(spans, x.split(lengths), tokens.split(lengths), strict=True):
            first = int(span.start == 0)  # the first token of a text has no streams before it
            if len(own) > first:
                streams.append(torch.cat([self._last[span.ring][None], own[:-1]])[first:])
                seen.append(own_tokens[first:])
                tails = {boundary - 1: place for boundary, place in span.tails.items()}
                start = max(span.start - 1, 0)
                shifted.append(replace(span, tokens=seen[-1], start=start, tails=tails))
            self._last[span.ring] = own[-1]
            for boundary, place in span.tails.items():
                last = own[boundary - span.start - 1].flatten()[None]
                self._tails.write_row(place, self._tails.codec.encode(last))
        if not shifted:
            return x.new_empty(0, len(self._embedding))
        return self._run(shifted, torch.cat(streams), torch.cat(seen))[0]

    def propose(self, span: Span, streams: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits after `span`'s tokens, which the target has not computed yet, and the draft's own streams of
        these tokens. Nothing is remembered.

        The first token goes beside the target's last streams. To draft further, give the span again with one
        more token, and the streams of the last answer: the tokens after the first go beside these streams.
        """
        before = self._last[span.ring][None]
        if streams is not None:
            before = torch.cat([before, streams])
        assert len(before) == len(span.tokens), "one token more than there are streams of the draft"
        logits, x = self._run(
            [replace(span, start=span.start - 1, keep=False)], before, torch.as_tensor(span.tokens)
        )
        return logits[-1:], x

    def restore(self, ring: int, place: int, boundary: int) -> None:
        self.layer.attention.restore(ring, place, boundary - 1)
        self._last[ring] = self._tails.codec.decode(self._tails.read_row(place)).view_as(self._last[ring])

    def _run(self, spans: Sequence[Span], x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, streams) of tokens beside the streams of the tokens before them."""
        c, k = self._config, self._k
        batch = Batch(spans, self._rings, x.device)
        embedded = k.norm(self._embedding[tokens], self._norms[0], c.rms_norm_eps)
        x = k.linear(k.norm(x.flatten(0, 1), self._norms[1], c.rms_norm_eps), self._projections[1])
        x = x.unflatten(0, (len(tokens), -1)) + k.linear(embedded, self._projections[0])[:, None, :]
        x = self.layer(x, tokens, self._rotary.at(batch.positions, batch.longest), batch)
        return k.linear(k.hyper_head(x, self._head), self._lm_head), x
