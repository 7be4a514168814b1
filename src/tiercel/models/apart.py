"""How a forward reads pages whose second part is on the host (`CacheSpec.apart`).

    page on the device      its rows are read in place
    page on the host        by a short span: the chosen entries come to hot rows, one by one (`kernels.hot`)
                            by a longer span: its rows are staged whole, layer by layer

The indexer numbers entries by a table of places in the second pool. There -1 says that a page is on the host,
and a lower number where its row is staged. So attention reads rows by their numbers, wherever they lie.

Two staging areas are used in turns: the rows of the next sparse layer are copied, on a stream beside, while
this one is computed. Nothing of the host is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tiercel.kernels.choice import Kernels
from tiercel.kernels.entries import Entries, Numbering
from tiercel.kernels.hot import HostRows, HotRows, begin
from tiercel.memory.buffers import STAGED_AREAS, DeviceMemory
from tiercel.models.base import Span
from tiercel.models.flat import FlatBatch, Ints, send
from tiercel.models.rows import entries_in
from tiercel.spec.stream import Stream


class ApartRows(NamedTuple):
    """The rows of one layer in the second pool, among all rows of the device."""

    entries: Entries
    step: int
    """Strides from a place to the next."""
    first: int
    """The stride of place 0."""
    staged: int
    """The stride at which this layer's staging area begins."""

    @classmethod
    def of(cls, memory: DeviceMemory, role: str, layer: int) -> ApartRows:
        stream = memory.stream(role, layer)
        rows = memory.sparse_rows(stream)
        area = memory.staged // STAGED_AREAS * (rows.shape[1] // rows.stride(0))
        first = memory.staged_first + stream.layers.index(layer) % STAGED_AREAS * area
        entries = entries_in(rows, stream, memory.spec.page_tokens)
        return cls(entries, *memory.sparse_place(stream, layer), first)

    def numbering(self, batch: FlatBatch) -> Numbering:
        return Numbering(batch.pools[1].pages, self.step, self.first, self.staged)


class Apart:
    """The hot rows of all rings, and what layers read on the host."""

    def __init__(self, memory: DeviceMemory, kernels: Kernels, rings: int, guesses_max: int) -> None:
        (name,) = memory.spec.second
        self.stream: Stream = memory.spec.stream(name)
        self._k, self._memory = kernels, memory
        self._rows = [ApartRows.of(memory, self.stream.role, layer) for layer in self.stream.layers]
        entries = self._rows[0].entries
        self._per_row, self._strides = entries.per_row, entries.rows.shape[1] // entries.rows.stride(0)
        self.staged_most = memory.staged // STAGED_AREAS
        """Rows of a staging area."""
        self._places = memory.spec.hot_places(guesses_max)[1]
        self._rings, self._tokens = rings, 1 + guesses_max
        self._hot = self._make_hot(0)
        self._held = np.zeros(rings, np.int64)
        """How many entries the hot rows of each ring hold."""
        self.rows_staged = 0
        """How many rows were staged, over all layers."""

    def _make_hot(self, entries: int) -> HotRows:
        """Hot rows of no ring, for texts of so many entries. Lists are of a call: it brings their work
        space."""
        sizes = {"layers": len(self._rows), "rings": self._rings, "places": self._places}
        lists = {"per_row": self._per_row, "entries": entries, "tokens": 0, "k": self.stream.selected}
        return HotRows.make(**sizes, **lists, device=self._memory.device)

    @cached_property
    def side(self) -> torch.cuda.Stream:
        """The stream on which rows are staged."""
        return torch.cuda.Stream(self._memory.device)

    def make_room(self, pages: int) -> None:
        """Make room for texts of `pages` pages. Required: no recorded forward reads what is here now."""
        missing = pages * self._per_row - self._hot.seen.shape[1]
        if missing > 0:
            more = self._hot.seen.new_full((self._rings, missing), -1)
            self._hot = self._hot._replace(seen=torch.cat([self._hot.seen, more], dim=1))

    def take_hot(self, ring: int, places: Sequence[int]) -> None:
        """The text in a ring has these places for hot rows. What they held is forgotten."""
        count = len(places) * self._per_row
        if places:
            own = send(np.array(places, np.int32), self._memory.device)
            self._hot.places[ring, : len(places)] = own
        begin(self._hot, ring, count)
        self._held[ring] = count

    def arrange(self, spans: Sequence[Span]) -> tuple[Sequence[Span], Ints | None]:
        """The spans with page tables that say which rows are staged, and these rows: (host place, place
        behind the first staged row). None: no page of these spans is on the host."""
        if not any(span.sparse for span in spans):
            return spans, None
        staged, arranged = dict[int, int](), list[Span]()
        for span in spans:
            if span.sparse and not self._is_short(span):
                span = self._stage(span, staged)  # noqa: PLW2901
            arranged.append(span)
        assert len(staged) <= self.staged_most, f"{len(staged)} rows to stage, {self.staged_most} have room"
        rows = np.array(list(staged.items()), np.int32).reshape(-1, 2)
        self.rows_staged += len(staged) * len(self._rows)
        return arranged, rows

    def hot_numbers(self) -> tuple[int, int]:
        """See `Model.hot_numbers`."""
        looked_up, missed = self._hot.asked.tolist()
        return looked_up, missed

    def _is_short(self, span: Span) -> bool:
        """Whether the hot rows of its text have room for all that a span may choose."""
        chosen = min(len(span.tokens) * self.stream.selected, span.sparse * self._per_row)
        return len(span.tokens) <= self._tokens and chosen <= self._held[span.ring]

    def _stage(self, span: Span, staged: dict[int, int]) -> Span:
        """The span, reading rows that are staged. A page that several texts have is staged once."""
        pages = span.pages.clone()
        far = ((pages[1] == -1) & (pages[2] >= 0)).nonzero()[:, 0]
        for page, host in zip(far.tolist(), pages[2, far].tolist(), strict=True):
            pages[1, page] = -2 - staged.setdefault(host, len(staged) * self._strides)
        return replace(span, pages=pages)

    def begin(self, layers: Iterable[int], batch: FlatBatch) -> Reading:
        """What these layers read on the host: they are computed next."""
        return Reading(self, [layer for layer in layers if layer in self.stream.layers], batch)

    def resolve(self, layer: int, batch: FlatBatch, chosen: Tensor) -> None:
        """Bring the chosen entries that are on the host to hot rows; `chosen` names them there."""
        at = self.stream.layers.index(layer)
        rows, (tokens, k) = self._rows[at], chosen.shape
        jobs, counts = chosen.new_empty(tokens * k, 2), chosen.new_empty(tokens)
        to, hot = rows.numbering(batch), self._hot._replace(jobs=jobs, counts=counts)
        self._k.resolve(chosen, batch.flat, batch.end, hot, at, to, self._per_row, self._tokens)
        self._k.gather(hot, batch.flat, k, self._host(layer, batch), rows.entries, to)

    def stage(self, layer: int, batch: FlatBatch) -> None:
        """Copy the rows of this layer that longer spans read."""
        assert batch.staged is not None
        rows = self._rows[self.stream.layers.index(layer)]
        self._k.stage(*batch.staged, self._host(layer, batch), rows.entries, rows.numbering(batch))

    def _host(self, layer: int, batch: FlatBatch) -> HostRows:
        assert self._memory.host is not None
        return HostRows(*self._memory.host.where(self.stream, layer), batch.pools[2].pages)


class Reading:
    """The sparse layers of one section of a forward, in order."""

    def __init__(self, apart: Apart, layers: Sequence[int], batch: FlatBatch) -> None:
        self._apart, self._layers, self._batch = apart, layers, batch
        self._cuda = batch.positions.is_cuda
        self._staged: list[torch.cuda.Event] = []
        """For each layer whose rows are queued: the event behind them."""
        for _ in range(STAGED_AREAS):
            self._stage_next()

    def _stage_next(self) -> None:
        """Queue the rows of one more layer, behind all that is queued so far: it may still read the area."""
        if not self._cuda or len(self._staged) == len(self._layers):
            return
        layer, event = self._layers[len(self._staged)], torch.cuda.Event()
        side = self._apart.side
        side.wait_stream(torch.cuda.current_stream(self._batch.positions.device))
        with torch.cuda.stream(side):
            self._apart.stage(layer, self._batch)
            event.record()
        self._staged.append(event)

    def bring(self, layer: int, chosen: Tensor) -> None:
        """Queue the copies of chosen entries to hot rows."""
        self._apart.resolve(layer, self._batch, chosen)

    def wait(self, layer: int) -> None:
        """The rows of a layer are staged before what is queued from now on."""
        if self._cuda:
            self._staged[self._layers.index(layer)].wait()
        else:
            self._apart.stage(layer, self._batch)

    def used(self) -> None:
        """The attention of a layer is queued: its staging area is free behind it."""
        self._stage_next()
