"""An EAGLE head: one layer of full attention that guesses tokens from the target's last streams.

    target     X₀    X₁    X₂    X₃  …        streams after the last layer
    hidden     h₀    h₁    h₂    h₃  …        made of them, token by token
    tokens  t₀    t₁    t₂    t₃    t₄ …      each beside the hidden state of the token before it
    entries e₀    e₁    e₂    e₃    e₄ …      keys and values, at the positions of the tokens

Entry j is made of the hidden state of token j - 1 and of token j, the newest it has seen: it belongs to j. So
a page holds the entries of its own tokens and of no other, and the tail at a boundary b holds the hidden
state of token b - 1, from which entry b is made. Before token 0 there are zeros.

An entry does not depend on other entries: to follow the target takes no attention. To guess, one token of
each text attends to all its entries, and the head's output is the hidden state for the next guess. The
entries of guesses are written where those of accepted tokens will be: `follow` overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tiercel.errors import SpecError
from tiercel.kernels.reference import CosSin, Matrix
from tiercel.models.base import Span, Weights, part_of
from tiercel.models.batch import Batch
from tiercel.models.deepseek_v4.eagle_weights import PREFIX, grouping_of
from tiercel.models.deepseek_v4.rows import Setup
from tiercel.models.entries import plain_codec
from tiercel.models.grouped import Layer, Numbers, Reach
from tiercel.models.rotary import Rotary
from tiercel.spec.deepseek_v4 import HIDDEN

NO_RINGS = 0
"""The head's batches number a call's own rows from 0: attention reads no rows of rings."""


class Eagle:
    """An EAGLE head. `weights`: the model's and the head's. The head shares embedding and `lm_head`."""

    def __init__(self, setup: Setup, weights: Weights, lm_head: Matrix) -> None:
        c, k, memory = setup.config, setup.lists, setup.memory
        w = part_of(weights, PREFIX)
        if not w:
            why = "has the streams of an EAGLE head, and there are no weights of one: HeadFile.load"
            raise SpecError("draft", memory.spec.model, why)
        self._k, self._eps = k, c.rms_norm_eps
        self._page_tokens, self._grouping = memory.spec.page_tokens, grouping_of(w, c.rms_norm_eps)
        self._embedding, self._lm_head = weights["model.embed_tokens.weight"], lm_head
        names = ("streams_norm", "enorm", "hnorm", "norm")
        self._streams_norm, self._enorm, self._hnorm, self._norm = (w[f"{name}.weight"] for name in names)
        self._streams_proj, self._fc = k.pack(w["streams_proj.weight"]), k.pack(w["fc.weight"])
        self._layer = Layer(self._grouping, k, w, memory, c.layers)
        self._rotary = Rotary(c.rope_main, self._grouping.head_dim, memory.device)
        self._tails = setup.rows(HIDDEN, c.layers)
        # a step with guesses knows only afterwards which of its hidden states was the last accepted one
        self._recent = setup.make_rings(setup.guesses_max + 1, plain_codec(4 * c.hidden_size))

    def follow(self, spans: Sequence[Span], x: Tensor, tokens: Tensor) -> None:
        """Make the entries of these tokens; x [tokens, n, d] are the target's streams."""
        k, batch = self._k, Batch(spans, NO_RINGS, x.device)
        hidden = k.linear(k.norm(x.flatten(1), self._streams_norm, self._eps), self._streams_proj)
        lengths = [len(span.tokens) for span in spans]
        numbers = Numbers(self._page_tokens, self._grouping.kv_heads, x.device)
        if (written := numbers.written(batch)) is not None:
            before = hidden.roll(1, 0)
            before[batch.last - torch.tensor(lengths, device=x.device) + 1] = self._last(spans)
            rotation = self._rotary.at(batch.positions, batch.longest)
            self._layer.write(self._enter(before, tokens), rotation, written)
        data = self._recent.codec.encode(hidden)
        first = 0
        for span, length in zip(spans, lengths, strict=True):
            for boundary, place in span.tails.items():
                row = first + boundary - span.start - 1
                self._tails.write_row(place, tuple(each[row : row + 1] for each in data))
            first += length
        self._recent.keep(batch, data)

    @torch.inference_mode()
    def propose(self, spans: Sequence[Span], count: int) -> Tensor:
        """[spans, count] int64: the greedy guesses after each span of one token."""
        before = self._last(spans)
        tokens = torch.stack([torch.as_tensor(span.tokens)[0] for span in spans]).to(before.device)
        if not count:
            return tokens.new_empty(len(spans), 0)
        # all steps are numbered at once: only their tokens are not known yet
        unknown = torch.zeros(count, dtype=torch.int64)
        batch = Batch([replace(span, tokens=unknown, tails={}) for span in spans], NO_RINGS, before.device)
        in_place = self._layer.entries.in_place
        reach = Reach(batch, self._page_tokens, self._grouping.kv_heads, in_place=in_place)
        cos, sin = self._rotary.at(batch.positions, batch.longest)
        guesses = list[Tensor]()
        for step in range(count):
            own = batch.last - (count - 1 - step)
            before, logits = self.guess(before, tokens, (cos[own], sin[own]), reach.only(own))
            tokens = self._k.greedy(logits).clamp(min=0)  # if no logit is a number, any token is as good
            guesses.append(tokens)
        return torch.stack(guesses, 1)

    def restore(self, ring: int, place: int, boundary: int) -> None:
        self._recent.restore(ring, boundary, self._tails.read_row(place))

    def _last(self, spans: Sequence[Span]) -> Tensor:
        """[spans, d]: the hidden state of the token before each span; zeros before a text."""
        rows = [span.ring * self._recent.rows + (span.start - 1) % self._recent.rows for span in spans]
        begins = torch.tensor([[span.start == 0] for span in spans], device=self._embedding.device)
        return self._recent.read()[rows].masked_fill(begins, 0.0)

    def _enter(self, before: Tensor, tokens: Tensor) -> Tensor:
        """What the layer reads: tokens beside the hidden states of the tokens before them."""
        k = self._k
        embedded = k.norm(self._embedding[tokens], self._enorm, self._eps)
        return k.linear(torch.cat([embedded, k.norm(before, self._hnorm, self._eps)], 1), self._fc)

    def guess(self, before: Tensor, tokens: Tensor, rotation: CosSin, reach: Reach) -> tuple[Tensor, Tensor]:
        """(the head's own hidden states, logits) after one token of each text."""
        x = self._layer(self._enter(before, tokens), rotation, reach)
        return x, self._k.linear(self._k.norm(x, self._norm, self._eps), self._lm_head)
