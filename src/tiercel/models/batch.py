"""The spans of one forward as flat tokens and lists of row numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tiercel.models.base import Span

Ints = npt.NDArray[np.int64]


def rows_before(window: int) -> int:
    """Rows of a ring for a window: the tokens before the current one, and at least one row."""
    return max(window - 1, 1)


class NewEntries(NamedTuple):
    """Entries that this call completes: for each, the rows that it is made of, its page row, its position."""

    rows: Tensor
    pages: Tensor
    positions: Tensor


Asked = ParamSpec("Asked")
Made = TypeVar("Made")


def _once(make: Callable[Asked, Made]) -> Callable[Asked, Made]:
    """Makes a list of a batch at its first use only: all layers of a kind use the same lists."""

    @wraps(make)
    def made(*args: Asked.args, **options: Asked.kwargs) -> Made:
        known: dict[Any, Made] = args[0].made  # type: ignore[attr-defined]
        key = make, args[1:], *options.values()
        if key not in known:
            known[key] = make(*args, **options)
        return known[key]

    return made


class Batch:
    """Flat tokens, and lists of row numbers that all layers of a kind use.

    flat tokens    │ span 0: 7 8 9 │ span 1: 40 │ span 2: 0 1 2 3 │
    recent rows    ring · rows + position % rows, in what rings keep, for positions before the span
                   rings · rows + flat token, for the span's own
    entry rows     page's place · entries of a page + number in the page
    """

    def __init__(self, spans: Sequence[Span], rings: int, device: torch.device) -> None:
        lengths = np.array([len(span.tokens) for span in spans])
        self.spans, self._rings, self._device = spans, rings, device
        self._starts = np.array([span.start for span in spans])
        self._ends = self._starts + lengths
        self._ring = np.array([span.ring for span in spans])
        self._first = lengths.cumsum() - lengths
        self._span = np.arange(len(spans)).repeat(lengths)
        self._positions = np.arange(lengths.sum()) + (self._starts - self._first)[self._span]
        self.tokens = self._tensor(np.concatenate([span.tokens for span in spans]))
        self.span = self._tensor(self._span)
        self.rings = self._tensor(self._ring[self._span])
        self.positions = self._tensor(self._positions)
        self.last = self._tensor(self._first + lengths - 1)
        """The last token of each span."""
        self.longest = int(self._ends.max())
        """How many positions the longest text has behind this call."""
        self.made: dict[Any, Any] = {}
        """Lists that were asked for (`_once`)."""

    @cached_property
    def _pages(self) -> Ints:
        """[spans, most pages]: the page tables. A call that reads windows only needs none."""
        pages = np.full((len(self.spans), max(len(span.pages) for span in self.spans)), -1)
        for table, span in zip(pages, self.spans, strict=True):
            table[: len(span.pages)] = span.pages.numpy()
        return pages

    def _tensor(self, numbers: Ints) -> Tensor:
        return torch.from_numpy(numbers).to(self._device)

    def _rows(self, rows: Ints) -> Tensor:
        """Row numbers as kernels read them."""
        return self._tensor(rows.astype(np.int32))

    def recent(self, positions: Ints, span: Ints, ring_rows: int) -> Tensor:
        """Row numbers of positions of spans; -1 before the start of the text."""
        own = positions - self._starts[span]
        old = self._ring[span] * ring_rows + positions % ring_rows
        new = self._rings * ring_rows + self._first[span] + own
        return self._rows(np.where(positions < 0, -1, np.where(own < 0, old, new)))

    def recent_before(self, end: int, count: int, span: int, ring_rows: int) -> Tensor:
        """Row numbers of the `count` positions before `end`."""
        return self.recent(np.arange(end - count, end), np.full(count, span), ring_rows)

    @_once
    def window(self, width: int, ring_rows: int) -> Tensor:
        """[tokens, width]: each token's window, itself last."""
        positions = self._positions[:, None] + np.arange(1 - width, 1)
        return self.recent(positions, self._span[:, None], ring_rows)

    @_once
    def kept(self, ring_rows: int) -> tuple[Tensor, Tensor]:
        """(flat tokens, ring rows): what the rings remember of this call."""
        chosen = self._positions >= (self._ends - ring_rows)[self._span]
        rows = self._ring[self._span] * ring_rows + self._positions % ring_rows
        return self._tensor(chosen.nonzero()[0]), self._tensor(rows[chosen])

    @_once
    def visible(self, ratio: int) -> Tensor:
        """How many entries each token sees: those that ended with it or before."""
        return self._tensor((self._positions + 1) // ratio)

    @_once
    def entries(self, ratio: int, per_page: int, *, in_place: bool) -> Tensor:
        """[spans, most]: rows of all entries of each span, in the pages or in the order they are read out."""
        counts = self._ends // ratio
        numbers = np.arange(counts.max())[None, :]
        if in_place:
            rows = self._pages[:, numbers[0] // per_page] * per_page + numbers % per_page
        else:
            rows = (counts.cumsum() - counts)[:, None] + numbers
        return self._rows(np.where(numbers < counts[:, None], rows, -1))

    @_once
    def seen_entries(self, ratio: int, per_page: int, *, in_place: bool) -> Tensor:
        """[tokens, most]: rows of all entries each token sees."""
        rows = self.entries(ratio, per_page, in_place=in_place)
        numbers = torch.arange(rows.shape[1], device=self._device)
        return torch.where(numbers < self.visible(ratio)[:, None], rows[self.span], -1)

    @_once
    def new_entries(self, ratio: int, width: int, ring_rows: int, per_page: int) -> NewEntries | None:
        since = np.maximum(self._starts, [span.write_from for span in self.spans]) // ratio
        counts = np.maximum(self._ends // ratio - since, 0)
        if not counts.any():
            return None
        span = np.arange(len(counts)).repeat(counts)
        numbers = np.arange(counts.sum()) + (since - (counts.cumsum() - counts))[span]
        positions = numbers[:, None] * ratio + np.arange(ratio - width, ratio)
        pages = self._pages[span, numbers // per_page] * per_page + numbers % per_page
        rows = self.recent(positions, span[:, None], ring_rows)
        return NewEntries(rows, self._tensor(pages), self._tensor(numbers * ratio))
