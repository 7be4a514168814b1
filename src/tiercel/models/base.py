"""A model as an engine sees it: it takes spans of texts, reads and writes device rows, and returns logits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tiercel.kernels.draw import Draw
from tiercel.spec.hf_fields import flag, number, whole

DRAWN_LAST = -1
"""Stands for the token that was drawn last in the span's ring (`Model.last`)."""

NO_GUESS = -1
"""Stands for a guess that is missing; all behind it are missing too."""

BeforeLayer = Callable[[int], object]
"""Called before a layer is computed or queued: the layer's rows in the pages may still be on their way."""


def at_once(_layer: int) -> None:
    """For calls without a load: every layer is there."""


@dataclass(frozen=True)
class Stage:
    """The layers first … end - 1 of `count`: those that one process computes. Each stage goes on from what
    the stage before it has computed. The first has the embedding, the last has the head and draws."""

    first: int
    end: int
    count: int

    @property
    def layers(self) -> range:
        return range(self.first, self.end)

    @property
    def begins(self) -> bool:
        return self.first == 0

    @property
    def ends(self) -> bool:
        return self.end == self.count

    @property
    def whole(self) -> bool:
        return self.begins and self.ends


@dataclass(slots=True)  # not frozen: making a frozen one takes four times as long, for each text of a step
class Span:
    """Consecutive tokens of one text, positions start … start + len(tokens) - 1. A span never changes."""

    tokens: NDArray[np.int64] | Tensor
    """[n] int64, on the CPU. The last may be `DRAWN_LAST`."""

    start: int
    pages: Tensor
    """[pools, pages] int64, on the CPU: device places of the text's pages, enough for the span's end. It is
    never written again: a table that changed is another tensor. Where pages may be on the host it has a row
    more: the host place of each page whose place in the second pool is -1."""

    ring: int
    """The request's own number. The ring of this number keeps the request's recent rows between calls."""

    tails: Mapping[int, int] = field(default_factory=dict)
    """Boundary in tokens → device place of the tail to be written there."""

    write_from: int = 0
    """Entries that end before this position are in the pages already: a replay must not write them again."""

    sparse: int = 0
    """How many of its pages are without a place in the second pool: that part is on the host."""


class Draft(Protocol):
    """Guesses what a model will draw. Its entries lie in the pages, tails and rings of the model."""

    def propose(self, spans: Sequence[Span], count: int) -> Tensor:
        """[spans, count] int64 on the host: the best guesses after each span. A span has one token: the one
        drawn last, which the target has not computed. Its pages have room for an entry of each guess but the
        last. `NO_GUESS`: a text gets fewer. Nothing of a guess is remembered."""


class Model(Protocol):
    """A model with its weights, on the device memory of one cache. It knows nothing of scheduling."""

    vocab_size: int
    last: Tensor
    """[rings or more] int64 on the device: the token that was drawn last in each ring; -1: there was none. A
    model can go on with such a token before it is known: `DRAWN_LAST`."""

    @property
    def draft(self) -> Draft | None:
        """None: the model has none, or its cache has no streams for it."""

    def warm_up(self, longest: int, /) -> None:
        """Prepare what makes calls fast on this device. `longest`: the most tokens of a text. It may take
        seconds, and is called once."""

    def resume(self, ring: int, tails: Sequence[tuple[int, int]]) -> None:
        """A text goes on in this ring from the tails at (boundary, place), the earliest first.

        Without tails a text begins, or the model replays its last tokens: what the ring held is not read.
        """

    def take_hot(self, ring: int, places: Sequence[int]) -> None:
        """The text in this ring may use these places of the second pool for single entries of pages that are
        on the host. What they held is not read."""

    def hot_numbers(self) -> tuple[int, int]:
        """How many chosen entries of pages on the host were looked up since the start, over all layers, and
        how many of them had to be brought. On a GPU this waits for what is queued."""

    @property
    def rows_staged(self) -> int:
        """How many rows of pages on the host were staged since the start, over all layers."""

    @property
    def stage(self) -> Stage:
        """The layers that it has."""

    def room_for(self, tokens: int) -> Tensor:
        """[tokens, …] on the device, with undefined numbers: room for what the stage before this one has
        computed."""

    def forward(
        self,
        spans: Sequence[Span],
        rows: Sequence[int] | None = None,
        before: BeforeLayer = at_once,
        x: Tensor | None = None,
    ) -> Tensor:
        """fp32 logits [rows, vocabulary] of these flat tokens of the spans; None: of each span's last. Or, of
        a stage that is not the last: what the next one goes on from. `x`: what the stage before has computed.

        What is queued on a device is read before the next call.
        """

    def draw(
        self,
        logits: Tensor,
        rings: Sequence[int],
        draws: Sequence[Draw] | None,
        masks: NDArray[np.int32] | None = None,
    ) -> Tensor:
        """Draw a token from each row of the last call's logits: it becomes `last` of the row's ring.

        `draws` None: the best tokens. `masks`: which tokens may be drawn (`kernels.draw.masked`); None: all.
        Returns [rows] on the device; -1: the best is no number.
        """


Weights = Mapping[str, Tensor]
"""The parameters of one part, by the names they have inside it."""


def part_of(weights: Weights, prefix: str) -> Weights:
    """The parameters below a prefix."""
    return {name[len(prefix) :]: tensor for name, tensor in weights.items() if name.startswith(prefix)}


def named(name: str) -> Any:
    """A dimension that `config.json` has under another name."""
    return field(metadata={"name": name})


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """A parsed `config.json`: everything that the model's numbers depend on, and nothing else."""

    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool

    @classmethod
    def read(cls, config: Mapping[str, Any], **made: Any) -> Self:
        """The fields of `made`, and all others from the config. A `SpecError` names what is unusable."""
        read_as: Mapping[Any, Any] = {"int": whole, "float": number, "bool": flag}
        for each in fields(cls):
            if each.name not in made:
                made[each.name] = read_as[each.type](config, each.metadata.get("name", each.name))
        return cls(**made)

    @property
    def digest(self) -> str:
        """A name for the arithmetic: changes with every number the model reads from its config."""
        return hashlib.sha256(repr(self).encode()).hexdigest()
