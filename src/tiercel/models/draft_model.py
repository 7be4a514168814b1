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

from tiercel.errors import ConfigError, SpecError, WeightsError
from tiercel.kernels.choice import Kernels
from tiercel.kernels.draw import greedy
from tiercel.kernels.meaning import digest_of
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import (
    DRAWN_LAST,
    NO_GUESS,
    BeforeLayer,
    BytesCheck,
    Dimensions,
    Draft,
    Model,
    QueueModel,
    Span,
    at_once,
)
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.families import family_of, folder_of, sources_of
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.hf_fields import whole

LONGEST = "max_position_embeddings"

NOTHING = torch.empty(0)
"""The draft reads nothing of what the target computed."""


class DraftFolder:
    """The folder of a model that guesses. A `ConfigError` names what can not be used."""

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            self._checkpoint = Checkpoint(folder_of(name))
            self._config = self._checkpoint.config
            self._family = family_of(self._config)
            self._dimensions: Dimensions = self._family.read(self._config)
            made_for = self._config.get(LONGEST) is not None
            self.longest = whole(self._config, LONGEST) if made_for else None
            """The tokens of the longest text that the model was made for."""
        except (SpecError, WeightsError) as error:
            raise ConfigError("draft", name, str(error)) from error

    def declare(self, page_tokens: int, format: str) -> CacheSpec:
        """What the model caches. Its streams name weights and arithmetic: pages with another draft's entries
        have another form."""
        weights = digest_of(
            self._checkpoint.digest(), self._dimensions.digest, files=sources_of(self._config)
        )
        try:
            spec = self._family.declare(self._config, page_tokens, format)
        except SpecError as error:
            raise ConfigError("draft", self.name, f"can not be cached with the model: {error}") from error
        return replace(spec, streams=tuple(replace(each, weights=weights) for each in spec.streams))

    def load(self, device: str, kernels: Kernels, check: BytesCheck) -> dict[str, Tensor]:
        """The weights. If the draft itself has a draft, that one's weights are left out."""
        return self._family.load(
            self._checkpoint, self._dimensions, device, kernels.dtype, draft=False, fp8=False, check=check
        )

    def build(
        self,
        weights: dict[str, Tensor],
        memory: DeviceMemory,
        running_max: int,
        kernels: Kernels,
        guesses_max: int,
    ) -> Model:
        """The model, on memory for the streams of `declare`."""
        return self._family.build(self._dimensions, weights, memory, running_max, kernels, guesses_max)


class DraftModel:
    """A model as a draft of another one."""

    def __init__(self, model: Model, vocab_size: int, longest: int | None = None) -> None:
        """`vocab_size`: the target's. `longest`: nothing is guessed behind this position of a text."""
        self.model, self._vocab_size, self._longest = model, vocab_size, longest

    def follow(self, spans: Sequence[Span], x: Tensor, tokens: Tensor) -> None:  # noqa: ARG002
        """Compute the same spans. The target's x is not read.

        A token that this model does not have is computed as its last token: any token is as good.
        """
        own = tokens.clamp(max=self.model.vocab_size - 1).split([len(span.tokens) for span in spans])
        self.model.forward(_with_tokens(spans, own), rows=())

    def propose(self, spans: Sequence[Span], count: int) -> Tensor:
        """[spans, count] int64: the best guesses after each span, from forwards of one token of each text."""
        guesses = torch.full((len(spans), count), NO_GUESS)
        last = self.model.vocab_size - 1
        tokens = [torch.as_tensor(span.tokens).clamp(max=last) for span in spans]
        going = dict(enumerate(_with_tokens(spans, tokens)))
        for step in range(count):
            if self._longest is not None:
                going = {i: span for i, span in going.items() if span.start < self._longest}
            if not going:
                break
            best = greedy(self.model.forward(list(going.values()))).cpu()
            best[best >= self._vocab_size] = NO_GUESS
            guesses[list(going), step] = best
            going = {
                i: Span(token, span.start + 1, span.pages, span.ring)
                for token, (i, span) in zip(best.split(1), going.items(), strict=True)
                if int(token) != NO_GUESS
            }
        return guesses

    def restore(self, ring: int, place: int, boundary: int) -> None:
        self.model.resume(ring, [(boundary, place)])


def _with_tokens(spans: Sequence[Span], tokens: Sequence[Tensor]) -> list[Span]:
    return [replace(span, tokens=own) for span, own in zip(spans, tokens, strict=True)]


class WithDraft:
    """A target and its draft, as one model. The draft follows every forward of the target."""

    draft: Draft | None

    def __init__(self, target: Model, draft: DraftModel, last_layer: int) -> None:
        """`last_layer`: the draft's last layer, by its number in the cache."""
        self.target, self.draft, self._draft = target, draft, draft
        self.vocab_size, self._last_layer = target.vocab_size, last_layer
        if isinstance(target, QueueModel):  # then this is one, too
            self.last, self.draw = target.last, target.draw

    def warm_up(self, longest: int) -> None:
        self.target.warm_up(longest)
        self._draft.model.warm_up(longest)

    def resume(self, ring: int, tails: Sequence[tuple[int, int]]) -> None:
        self.target.resume(ring, tails)
        for boundary, place in tails:
            self._draft.restore(ring, place, boundary)

    def forward(
        self, spans: Sequence[Span], rows: Sequence[int] | None = None, before: BeforeLayer = at_once
    ) -> Tensor:
        """Logits of the target."""
        tokens = self._tokens(spans)
        logits = self.target.forward(spans, rows, before)
        before(self._last_layer)
        self._draft.follow(spans, NOTHING, tokens)
        return logits

    def _tokens(self, spans: Sequence[Span]) -> Tensor:
        """The flat tokens of spans. Tokens that are still on the target's device are read here."""
        tokens = torch.from_numpy(np.concatenate([span.tokens for span in spans]))
        unknown = tokens == DRAWN_LAST
        if unknown.any():
            assert isinstance(self.target, QueueModel)
            rings = [span.ring for span in spans for _ in span.tokens]
            tokens = torch.where(unknown, self.target.last.cpu()[rings].clamp(min=0), tokens)
        return tokens
