"""What a model is to an engine: it takes spans of texts, reads and writes device rows, and answers logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one text, positions start … start + len(tokens) - 1."""

    tokens: Tensor
    """[n] int64."""

    start: int
    pages: Tensor
    """[pages] int64: device places of the text's pages, enough for the span's end."""

    ring: int
    """The request's own number: its recent rows live there between calls."""

    tails: Mapping[int, int] = field(default_factory=dict)
    """Boundary in tokens → device place of the tail to be written there."""

    write_from: int = 0
    """Entries that end before this position are in the pages already: a replay must not write them again."""

    keep: bool = True
    """False for a draft of what may not come: the ring does not remember it."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Model(Protocol):
    """A model with its weights, on the device memory of one cache. It knows nothing of scheduling."""

    vocab_size: int

    def resume(self, ring: int, tails: Sequence[tuple[int, int]]) -> None:
        """A text goes on in this ring from the tails at (boundary, place), the earliest first.

        Without tails a text begins, or the model replays its last tokens: what the ring held is not read.
        """

    def forward(self, spans: Sequence[Span], rows: Sequence[int] | None = None) -> Tensor:
        """fp32 logits [rows, vocabulary] of these flat tokens of the spans; None: of each span's last."""
