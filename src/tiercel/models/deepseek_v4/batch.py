"""What the model is asked to compute: no scheduling, no HTTP, only tokens and where their rows are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
