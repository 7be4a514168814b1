"""The spans of one forward as numbers on a device: kernels find rows by themselves, so no lists are made.

One copy takes everything to the device, and nothing waits for it. The numbers may be padded to a size that a
forward was recorded for: padding has position -1, and no kernel reads or writes rows for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tiercel.kernels.entries import Flat
from tiercel.models.base import Span

if TYPE_CHECKING:
    from tiercel.models.apart import Reading

Ints = npt.NDArray[np.int32]


class Size(NamedTuple):
    """How many numbers of each kind a forward has."""

    tokens: int
    rows: int
    """How many rows of logits there are."""
    tails: int
    longest: int
    """The most positions of any text behind the call."""
    staged: int = 0
    """How many rows of the host a layer may stage; 0: no page of these texts is on the host."""

    @property
    def numbers(self) -> int:
        return sum(self.parts)

    @property
    def parts(self) -> list[int]:
        """How many numbers there are of tokens, rows, tails and staged rows."""
        return [7 * self.tokens, 2 * self.rows, 5 * self.tails, self.staged and 1 + 2 * self.staged]


class Numbers(NamedTuple):
    """The numbers of a call, on the host."""

    tokens: Ints
    """[7, tokens], see `FlatBatch`."""
    rows: Ints
    tails: Ints
    rings: int
    """A ring that belongs to no text."""
    longest: int
    staged: Ints | None = None
    """[staged rows, 2], see `FlatBatch`; None: no page of these texts is on the host."""

    @property
    def size(self) -> Size:
        staged = 0 if self.staged is None else max(1, len(self.staged))
        return Size(self.tokens.shape[1], self.rows.shape[1], len(self.tails), self.longest, staged)

    def padded(self, size: Size) -> Ints:
        """All numbers in a row, in the order in which `FlatBatch` takes them apart."""
        own, tokens = self.size, np.zeros((7, size.tokens), np.int32)
        tokens[0], tokens[:, : own.tokens] = -1, self.tokens
        rows = np.zeros((2, size.rows), np.int32)
        rows[1], rows[:, : own.rows] = self.rings, self.rows
        tails = np.full((size.tails, 5), -1, np.int32)
        tails[: own.tails] = self.tails
        parts = [tokens.ravel(), rows.ravel(), tails.ravel()]
        if size.staged:
            staged = np.zeros(1 + 2 * size.staged, np.int32)
            if self.staged is not None:
                staged[0], staged[1 : 1 + self.staged.size] = len(self.staged), self.staged.ravel()
            parts.append(staged)
        return np.concatenate(parts)


def no_numbers(rings: int) -> Numbers:
    """A call without tokens: all of it is padding."""
    tokens, rows, tails = (np.zeros(shape, np.int32) for shape in ((7, 0), (2, 0), (0, 5)))
    return Numbers(tokens, rows, tails, rings, 0)


def numbers_of(spans: Sequence[Span], rows: Sequence[int] | None, rings: int) -> Numbers:
    """`rows`: flat tokens whose logits are wanted, ascending; None: the last of each span."""
    lengths = np.array([len(span.tokens) for span in spans])
    starts = np.array([span.start for span in spans])
    ring = np.array([span.ring for span in spans])
    write_from = np.array([span.write_from for span in spans])
    ends, first = starts + lengths, lengths.cumsum() - lengths
    of_tokens = np.array([starts, first, ring, ends, write_from]).repeat(lengths, axis=1)
    position = np.arange(lengths.sum()) + of_tokens[0] - of_tokens[1]
    tokens = np.concatenate([span.tokens for span in spans])
    wanted = first + lengths - 1 if rows is None else np.asarray(rows, np.int64)
    owner = of_tokens[2][wanted]
    last = np.ones(len(owner), np.bool_)
    last[:-1] = owner[1:] != owner[:-1]
    tails = [
        (place, boundary, span.ring, span.start, at)
        for span, at in zip(spans, first.tolist(), strict=True)
        if span.tails
        for boundary, place in span.tails.items()
    ]
    return Numbers(
        np.array([position, *of_tokens, tokens], np.int32),
        np.array([wanted, np.where(last, owner, rings)], np.int32),
        np.array(tails, np.int32).reshape(-1, 5),
        rings,
        int(ends.max()),
    )


class FlatBatch:
    """The flat tokens of one forward. `table` [pools, rings, most pages] has the page tables of running
    texts."""

    def __init__(self, numbers: Tensor, size: Size, table: Tensor) -> None:
        """`numbers`: on the device, as `Numbers.padded` made them for this size."""
        tokens, rows, tails, staged = numbers.split(size.parts)
        self.positions, start, first, ring, self.end, self.write_from, self.tokens = tokens.view(7, -1)
        self.rows, self.row_rings = rows.view(2, -1)
        """The flat tokens whose logits are wanted. The last one of each span has the span's ring, others have
        one that no text has."""
        self.tails = tails.view(-1, 5)
        self.rings = ring
        self.pools = tuple(Flat(self.positions, start, first, ring, pages) for pages in table)
        """Where each token stands, with the page tables of each device pool."""
        self.longest = size.longest
        self.staged = (staged[1:].view(-1, 2), staged[:1]) if size.staged else None
        """Rows that each layer stages: (host place, place behind the first staged row), and how many of
        them there are. None: no page of these texts is on the host."""
        self.host: Reading | None = None
        """Where layers bring what is on the host."""

    @property
    def flat(self) -> Flat:
        """Where each token stands, for a kernel that reads no second pool."""
        return self.pools[0]

    def behind(self, lag: int) -> FlatBatch:
        """The same tokens, each `lag` positions earlier. Positions before the text become padding."""
        other = copy(self)
        other.positions, other.end = (self.positions - lag).clamp(min=-1), self.end - lag
        start = self.flat.start - lag
        other.pools = tuple(flat._replace(position=other.positions, start=start) for flat in self.pools)
        other.tails = self.tails.clone()
        other.tails[:, 1::2] -= lag  # boundary and start
        return other


def send(numbers: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Send numbers to the device, without waiting for it."""
    whole = torch.from_numpy(numbers)
    if device.type != "cuda":
        return whole
    target = torch.empty_like(whole, device=device)
    send_to(numbers, target)
    return target


def send_to(numbers: npt.NDArray[Any], target: Tensor) -> None:
    """Send numbers to a tensor on a GPU, without waiting for it."""
    if find_spec("triton") is None:
        target.copy_(torch.from_numpy(numbers).pin_memory(), non_blocking=True)
        return
    from tiercel.kernels.pull import buffers_of  # here: Triton takes a second to import

    buffers_of(target.device).send(np.ascontiguousarray(numbers), target)


class PageTables:
    """The page tables of running texts, on the device. Only changes are sent."""

    def __init__(self, pools: int, rings: int, device: torch.device) -> None:
        self.table = torch.zeros(pools, rings, 0, dtype=torch.int32, device=device)
        """[pools, rings, pages]. It grows with the longest text and is then another tensor."""
        self._sent: dict[int, Tensor] = {}

    def make_room(self, pages: int) -> None:
        """Make room for texts of `pages` pages. A recorded forward reads the table that it was recorded with:
        there must be room for the longest text before that."""
        missing = pages - self.table.shape[2]
        if missing > 0:
            more = self.table.new_zeros(*self.table.shape[:2], missing)
            self.table = torch.cat([self.table, more], dim=2)

    def send(self, spans: Sequence[Span]) -> None:
        changed = [span for span in spans if self._sent.get(span.ring) is not span.pages]
        if not changed:
            return
        self._sent.update((span.ring, span.pages) for span in changed)
        widest = max(span.pages.shape[1] for span in changed)
        self.make_room(widest)
        pages = np.zeros((len(self.table), len(changed), widest + 1), np.int32)
        for i, span in enumerate(changed):
            pages[:, i, 0], pages[:, i, 1 : span.pages.shape[1] + 1] = span.ring, span.pages[: len(pages)]
        sent = send(pages.ravel(), self.table.device).view(pages.shape)
        self.table[:, sent[0, :, 0].long(), :widest] = sent[:, :, 1:]
