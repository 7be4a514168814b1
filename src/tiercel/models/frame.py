"""What every model here is built into: page tables, recorded forwards, rows of logits, drawing, resumption.

A family brings its layers (`Layers`). The frame turns spans into flat tokens, calls the layers in order, and
keeps what they need between calls that is not their own: the page table of every ring, and the token that was
drawn last in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tiercel.kernels.choice import Kernels
from tiercel.kernels.draw import Draw
from tiercel.kernels.reference import CosSin
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.apart import Apart
from tiercel.models.base import DRAWN_LAST, BeforeLayer, Draft, Span, Stage, at_once
from tiercel.models.flat import FlatBatch, PageTables, numbers_of, send
from tiercel.models.graphs import Graphs, Section
from tiercel.models.rotary import Rotary


class Hidden(NamedTuple):
    """The state between two layers."""

    x: Tensor
    """[tokens, …]: what the layers compute."""
    tokens: Tensor
    rotations: list[CosSin]
    """Cosines and sines at the tokens' positions, for each of the family's rotations."""


class LayersDraft(Draft, Protocol):
    """A draft that reads what the layers compute. It follows every call."""

    def follow(self, batch: FlatBatch, x: Tensor, tokens: Tensor, /) -> None:
        """Make the draft's entries. x [tokens, …]: what the last layer has computed for each token."""

    def restore(self, moves: Tensor, /) -> None:
        """Rings go on from tails. `moves`: see `kernels.reference.rows.restore`."""

    def record(self, memory: tuple[Any, torch.cuda.Stream], /) -> None:
        """Record what `propose` calls, in the memory of other recordings."""


class Layers(Protocol):
    """A family's layers, with their weights, on the device memory of one cache."""

    vocab_size: int
    stage: Stage
    width: tuple[int, ...]
    """x is [tokens, *width]."""

    @property
    def rotaries(self) -> Sequence[Rotary]:
        """The rotations of the family, in the order of `Hidden.rotations`."""

    @property
    def draft(self) -> LayersDraft | None:
        """It exists if the cache declaration has the draft's streams."""

    def begin(self, tokens: Tensor) -> Tensor:
        """What the first layer reads. Only of the first stage."""

    def compute(self, layer: int, state: Hidden, batch: FlatBatch) -> Tensor:
        """x after this layer."""

    def logits(self, x: Tensor) -> Tensor:
        """fp32 [rows, vocabulary] of rows of the last layer's x. Only of the last stage."""

    def restore(self, moves: Tensor) -> None:
        """Rings go on from tails. `moves`: see `kernels.reference.rows.restore`."""


class Recorded(NamedTuple):
    """What a recorded forward leaves."""

    logits: Tensor
    best: Tensor


class Frame:
    """A model for up to `rings` running requests. It knows nothing of scheduling."""

    def __init__(
        self, layers: Layers, kernels: Kernels, memory: DeviceMemory, rings: int, guesses_max: int = 0
    ) -> None:
        self.layers, self.kernels, self.memory = layers, kernels, memory
        self.vocab_size, self.draft, self.stage = layers.vocab_size, layers.draft, layers.stage
        self._rings, self._guesses_max = rings, guesses_max
        self.last = torch.zeros(rings + 1, dtype=torch.int64, device=memory.device)
        """One more than there are rings, for tokens drawn for no text."""
        reads_host = memory.host is not None and memory.spec.selective
        self.apart = Apart(memory, kernels, rings, guesses_max) if reads_host else None
        """What reads pages that are on the host, if there may be such pages."""
        rows = len(memory.spec.pools) + (self.apart is not None)
        self.tables = PageTables(rows, rings, memory.device)
        self._graphs: Graphs | None = None
        self._recorded: Recorded | None = None
        """What the last forward left, if it was a recorded one."""

    def warm_up(self, longest: int) -> None:
        """Record forwards and resumptions as CUDA graphs, where kernels run on a GPU. What they read is made
        for the longest text now, because it must not move."""
        if self.memory.device.type != "cuda" or not self.kernels.QUEUES:
            return
        page_tokens = self.memory.spec.page_tokens
        self.tables.make_room(-(-longest // page_tokens))
        table = self.tables.table
        if self.apart is not None:
            self.apart.make_room(table.shape[2])
        for rotary in self.layers.rotaries:  # guesses may stand behind the end of the longest text
            rotary.table(table.shape[2] * page_tokens + self._guesses_max)
        if not self.stage.whole:
            return  # what it goes on from comes from another process
        # With guesses: one for each text, or more for some.
        rows = self._rings * 2 if self._guesses_max else self._rings
        restore = self._restore if self.memory.spec.tail_streams else None
        staged = (0,) if self.apart is None else (0, self.apart.staged_most)
        self._graphs = Graphs(self.sections(), restore, table, page_tokens, rows, staged)
        if self.draft is not None:
            self.draft.record(self._graphs.memory)

    def sections(self) -> list[Section]:
        """The layers in groups, as they are loaded. The first section begins, the last one returns logits.
        (What a draft reads is in tails, which come with the first layers.)"""
        groups, count = self.memory.spec.layer_groups(), self.stage.count

        def run(layers: range, batch: FlatBatch, state: Hidden | None) -> Hidden | Recorded:
            self._read_host(layers, batch)
            state = self._compute(layers, batch, state or self._begin(batch))
            return self._answer(batch, state) if layers[-1] == count - 1 else state

        firsts = [0, *(group[0] for group in groups[1:] if group[0] < count)]
        ranges = [range(*each) for each in zip(firsts, [*firsts[1:], count], strict=True)]
        return [Section(layers[-1], partial(run, layers)) for layers in ranges]

    def room_for(self, tokens: int) -> Tensor:
        return torch.empty(tokens, *self.layers.width, dtype=self.kernels.dtype, device=self.memory.device)

    @torch.inference_mode()
    def forward(
        self,
        spans: Sequence[Span],
        rows: Sequence[int] | None = None,
        before: BeforeLayer = at_once,
        x: Tensor | None = None,
    ) -> Tensor:
        """Logits of these flat tokens; None: the last token of each span. Or x, for the next stage."""
        staged = None
        if self.apart is not None:
            spans, staged = self.apart.arrange(spans)
        self.tables.send(spans)
        numbers = numbers_of(spans, rows, self._rings)._replace(staged=staged)
        self._recorded = self._graphs.run(numbers, before) if self._graphs is not None else None
        if self._recorded is not None:
            self._recorded = Recorded(*(each[: numbers.size.rows] for each in self._recorded))
            return self._recorded.logits
        on_device = send(numbers.padded(numbers.size), self.memory.device)
        batch = FlatBatch(on_device, numbers.size, self.tables.table)
        if self.apart is not None and batch.staged is not None:
            self.apart.make_room(self.tables.table.shape[2])
        self._read_host(self.stage.layers, batch)
        state = self._compute(self.stage.layers, batch, self._begin(batch, x), before)
        return self._logits(batch, state) if self.stage.ends else state.x

    def _read_host(self, layers: range, batch: FlatBatch) -> None:
        """These layers are computed next. Where pages are on the host, their rows are brought for them."""
        if self.apart is not None and batch.staged is not None:
            batch.host = self.apart.begin(layers, batch)

    def _begin(self, batch: FlatBatch, x: Tensor | None = None) -> Hidden:
        drawn = self.last[batch.rings].clamp(min=0)
        tokens = torch.where(batch.tokens == DRAWN_LAST, drawn, batch.tokens)
        rotations = [rotary.at(batch.positions, batch.longest) for rotary in self.layers.rotaries]
        return Hidden(self.layers.begin(tokens) if x is None else x, tokens, rotations)

    def _compute(
        self, layers: range, batch: FlatBatch, state: Hidden, before: BeforeLayer = at_once
    ) -> Hidden:
        for i in layers:
            before(i)
            state = state._replace(x=self.layers.compute(i, state, batch))
        return state

    def _logits(self, batch: FlatBatch, state: Hidden) -> Tensor:
        if self.draft is not None:
            self.draft.follow(batch, state.x, state.tokens)
        if not batch.rows.shape[0]:
            return torch.empty(0, self.vocab_size, device=state.x.device)
        return self.layers.logits(state.x[batch.rows])

    def _answer(self, batch: FlatBatch, state: Hidden) -> Recorded:
        logits = self._logits(batch, state)
        best = self.kernels.greedy(logits)
        self.last[batch.row_rings] = best
        return Recorded(logits, best)

    def draw(
        self,
        logits: Tensor,
        rings: Sequence[int],
        draws: Sequence[Draw] | None,
        masks: npt.NDArray[np.int32] | None = None,
    ) -> Tensor:
        """A token of each row; it becomes `last` of the row's ring. A recorded forward has drawn the best
        tokens already."""
        if masks is not None:
            logits = self.kernels.masked(logits, send(masks, logits.device))
        if self._recorded is not None and logits is self._recorded.logits:
            tokens = self._recorded.best
            if draws is None:
                return tokens
        else:
            tokens = self.kernels.greedy(logits)
        if draws is None:
            to = send(np.array(rings, np.int32), tokens.device)
        else:
            sent = send(np.column_stack([draws, rings]), tokens.device)
            tokens, to = self.kernels.sample(logits, sent, tokens), sent[:, -1].long()
        self.last[to] = tokens
        return tokens

    def take_hot(self, ring: int, places: Sequence[int]) -> None:
        if self.apart is not None:  # a stage may have no layer that selects
            self.apart.take_hot(ring, places)

    def hot_numbers(self) -> tuple[int, int]:
        return (0, 0) if self.apart is None else self.apart.hot_numbers()

    @property
    def rows_staged(self) -> int:
        return 0 if self.apart is None else self.apart.rows_staged

    def resume(self, ring: int, tails: Sequence[tuple[int, int]]) -> None:
        """A text goes on from the tails at (boundary, place), the earliest first."""
        if not self.memory.spec.tail_streams:  # the tails are those of its target, or of its draft
            return
        for boundary, place in tails:
            tail = np.array([place, boundary, ring], np.int32)
            if self._graphs is None:
                self._restore(send(tail, self.last.device))
            else:
                self._graphs.resume(tail)

    @torch.inference_mode()
    def _restore(self, tail: Tensor) -> None:
        self.layers.restore(tail.view(1, -1))
        if self.draft is not None:
            self.draft.restore(tail.view(1, -1))
