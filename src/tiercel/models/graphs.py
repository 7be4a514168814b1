"""Forwards that are recorded once as CUDA graphs and replayed: a few launches instead of thousands.

A forward is recorded for a few numbers of tokens and a few lengths of the longest text. A call is padded to
the next of them. It is recorded in sections of layers, because a load may still be bringing the later ones:

    numbers of the call ─► one buffer │ section: layers 0 … 4 │ 5 … 14 │ 15 … 42, logits │
                                      ▲ wait for these layers ▲        ▲

All recordings use the same memory for what they compute: one of them runs at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiercel.models.base import BeforeLayer
from tiercel.models.flat import FlatBatch, Ints, Numbers, Size, no_numbers, send, send_to

log = logging.getLogger(__name__)

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Larger calls keep the device busy for longer than it takes to launch their kernels one by one."""

LONGEST_FIRST, LONGEST_STEP = 16_384, 8
"""Lengths of the longest text: a kernel that looks for the best keys is launched for the most keys."""


class Section(NamedTuple):
    """Some layers of a forward."""

    last_layer: int
    run: Callable[[FlatBatch, Any], Any]
    """(batch, what the section before returned) → what the next section reads. The last one returns the
    result of a forward."""


class Recording:
    """Calls on the device, recorded. They read a buffer of numbers, which is filled before a replay."""

    def __init__(
        self, numbers: Tensor, calls: Sequence[Callable[[Any], Any]], pool: Any, stream: torch.cuda.Stream
    ) -> None:
        """Each call takes the result of the call before. A pool lends memory again on one stream only."""
        self._numbers = numbers
        self.graphs = [torch.cuda.CUDAGraph() for _ in calls]
        self.answer: Any = None
        stream.wait_stream(torch.cuda.current_stream(numbers.device))
        with torch.cuda.stream(stream):
            for graph, call in zip(self.graphs, calls, strict=True):
                graph.capture_begin(pool=pool, capture_error_mode="relaxed")
                try:
                    self.answer = call(self.answer)
                finally:
                    graph.capture_end()
        torch.cuda.current_stream(numbers.device).wait_stream(stream)

    def fill(self, numbers: Ints) -> None:
        send_to(numbers, self._numbers)


class Graphs:
    """The recorded forwards of one model."""

    def __init__(
        self,
        sections: Sequence[Section],
        restore: Callable[[Tensor], None] | None,
        table: Tensor,
        page_tokens: int,
        rows_most: int,
        staged: Sequence[int] = (0,),
    ) -> None:
        """Takes seconds. `restore` reads three numbers: place of a tail, its boundary, a ring; None: there
        are no tails. There is no recording for more than `rows_most` rows of logits. `staged`: a set of
        recordings for each of these numbers of rows that a layer may stage (`Size.staged`)."""
        self._sections, self._table, self._rows_most, self._staged = sections, table, rows_most, staged
        self._most = table.shape[2] * page_tokens
        self.memory = torch.cuda.graph_pool_handle(), torch.cuda.Stream(table.device)
        """The pool and the stream of all recordings of the model."""
        began = perf_counter()
        self._recordings = self._record_all()
        """The recordings, the smallest first."""
        self._restore: Recording | None = None
        if restore is not None:
            tail = torch.tensor([-1, 0, 0], dtype=torch.int32, device=table.device)
            restore(tail)
            self._restore = Recording(tail, [lambda _: restore(tail)], *self.memory)
        torch.cuda.synchronize(table.device)
        log.info("%d forwards recorded in %.1f s", len(self._recordings), perf_counter() - began)

    @torch.inference_mode()
    def _record_all(self) -> list[tuple[Size, Recording]]:
        """The largest is recorded first: the others use its memory."""
        longest, made = [LONGEST_FIRST], list[tuple[Size, Recording]]()
        while longest[-1] < self._most:
            longest.append(longest[-1] * LONGEST_STEP)
        for tokens in reversed(TOKENS):
            for staged in self._staged:
                for most in reversed(longest):
                    size = Size(tokens, min(tokens, self._rows_most), tokens, min(most, self._most), staged)
                    made.append((size, self._record(size, warm=most == longest[-1])))
        return made[::-1]

    def _record(self, size: Size, *, warm: bool) -> Recording:
        """`warm`: run everything once, so that kernels are compiled before they are recorded."""
        numbers = send(no_numbers(self._table.shape[1]).padded(size), self._table.device).clone()
        batch = FlatBatch(numbers, size, self._table)
        calls = [partial(section.run, batch) for section in self._sections]
        state = None
        for call in calls if warm else ():
            state = call(state)
        del state
        return Recording(numbers, calls, *self.memory)

    def run(self, numbers: Numbers, before: BeforeLayer) -> Any:
        """What the last section returns for the padded call; None: no recording is large enough. The next
        call overwrites it."""
        tokens, rows, tails, longest, staged = numbers.size
        assert longest <= self._most, "a text is longer than the page tables of recorded forwards"
        for size, recording in self._recordings:
            fits = tokens <= size[0] and rows <= size[1] and tails <= size[2] and longest <= size[3]
            if fits and bool(staged) == bool(size[4]):
                recording.fill(numbers.padded(size))
                for section, graph in zip(self._sections, recording.graphs, strict=True):
                    before(section.last_layer)
                    graph.replay()
                return recording.answer
        return None

    def resume(self, tail: Ints) -> None:
        assert self._restore is not None, "there are no tails"
        self._restore.fill(tail)
        self._restore.graphs[0].replay()
