"""A small model of its own that guesses for another one, the target: `--draft FOLDER`.

    target       t₀ t₁ t₂ … t₇ │                 every forward of the target is one of the draft, too
    draft        t₀ t₁ t₂ … t₇ │ t₈ → g₉ → g₁₀   t₈ was drawn last; the draft goes on from it by itself
    target                       t₈   g₉   g₁₀   and these are the next span of both

The draft's entries lie in the pages and tails of the target, so they come back with the prefix from every
tier. All rows lie by position: what the draft wrote for a refused guess is overwritten by the next forward,
and its rings have a spare row for each guess.

Neither family knows of the other: each sees device memory under the names of its own declaration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tiercel.models.base import (
    DRAWN_LAST,
    NO_GUESS,
    BeforeLayer,
    Model,
    Span,
    Stage,
    at_once,
)

DRAWN = np.array([DRAWN_LAST])


class DraftModel:
    """A model as a draft of another one."""

    def __init__(self, model: Model, vocab_size: int, longest: int | None = None) -> None:
        """`vocab_size`: the target's. `longest`: nothing is guessed behind this position of a text."""
        self.model, self._vocab_size, self._longest = model, vocab_size, longest

    def hear(self, last: Tensor) -> None:
        """`last`: the tokens that the target has drawn, which may not be known yet."""
        torch.clamp(last, max=self.model.vocab_size - 1, out=self.model.last)

    def follow(self, spans: Sequence[Span]) -> None:
        """Compute the same spans as the target."""
        self.model.forward([self._known(span) for span in spans], rows=())

    def _known(self, span: Span) -> Span:
        """A token that this model does not have is computed as its last token: any token is as good."""
        return replace(span, tokens=np.minimum(span.tokens, self.model.vocab_size - 1))

    def propose(self, spans: Sequence[Span], count: int) -> Tensor:
        """[spans, count] int64: the best guesses after each span, from forwards of one token of each text.
        All of them are queued; then they are read."""
        made, going = list[tuple[list[int], Tensor]](), dict(enumerate(map(self._known, spans)))
        for _ in range(count):
            if self._longest is not None:
                going = {i: span for i, span in going.items() if span.start < self._longest}
            if not going:
                break
            logits = self.model.forward(list(going.values()))
            tokens = self.model.draw(logits, [span.ring for span in going.values()], None)
            made.append((list(going), tokens.clone()))
            going = {i: Span(DRAWN, span.start + 1, span.pages, span.ring) for i, span in going.items()}
        guesses = torch.full((len(spans), count), NO_GUESS)
        for step, (texts, tokens) in enumerate(made):
            guesses[texts, step] = tokens.cpu()
        none = ((guesses < 0) | (guesses >= self._vocab_size)).cummax(dim=1).values
        return guesses.masked_fill(none, NO_GUESS)


class WithDraft:
    """A target and its draft, as one model. The draft computes every span of the target, too."""

    def __init__(self, target: Model, draft: DraftModel, last_layer: int) -> None:
        """`last_layer`: the draft's last layer, by its number in the cache."""
        self.target, self.draft, self._last_layer = target, draft, last_layer
        self.vocab_size, self.last, self.draw = target.vocab_size, target.last, target.draw
        self.take_hot, self.hot_numbers = target.take_hot, target.hot_numbers

    @property
    def rows_staged(self) -> int:
        return self.target.rows_staged

    @property
    def stage(self) -> Stage:
        return self.target.stage

    def room_for(self, tokens: int) -> Tensor:
        return self.target.room_for(tokens)

    def warm_up(self, longest: int) -> None:
        self.target.warm_up(longest)
        self.draft.model.warm_up(longest)

    def resume(self, ring: int, tails: Sequence[tuple[int, int]]) -> None:
        self.target.resume(ring, tails)
        self.draft.model.resume(ring, tails)

    def forward(
        self,
        spans: Sequence[Span],
        rows: Sequence[int] | None = None,
        before: BeforeLayer = at_once,
        x: Tensor | None = None,
    ) -> Tensor:
        """Logits of the target."""
        self.draft.hear(self.last)  # a recorded forward draws the next tokens
        logits = self.target.forward(spans, rows, before, x)
        before(self._last_layer)
        self.draft.follow(spans)
        return logits
