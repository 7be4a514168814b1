"""Runs steps on a model in this process: rings with texts, page tables and samplers; the forward; drawing.

`LocalRunner` has a step's tokens when `run` returns. `QueueRunner` queues steps on a device: tokens are drawn
there, and the next step reads them there, before they are known here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.engine.ask import TokenOut
from tiercel.engine.sampling import Sampler, token_logprobs
from tiercel.engine.step import Begin, Drawn, PageTable, Step, StepPart
from tiercel.errors import LogitsError
from tiercel.kernels.draw import Draw, greedy
from tiercel.models.base import DRAWN_LAST, BeforeLayer, Model, QueueModel, Span, at_once
from tiercel.transfer.controller import Ready

log = logging.getLogger(__name__)

Ints = NDArray[np.int64]

NO_TAILS: Mapping[int, int] = MappingProxyType({})
"""Of most spans."""


class _Ring:
    """One running text."""

    sampler: Sampler

    def __init__(self, begin: Begin) -> None:
        self.count = len(begin.tokens)
        self.prompt_tokens = begin.prompt_tokens
        longest = begin.prompt_tokens + begin.sampling.max_tokens
        self.tokens: Ints = np.empty(longest + 1, np.int64)
        self.tokens[: self.count] = begin.tokens
        self.pages = torch.empty(0, dtype=torch.int64)
        self.write_from = begin.write_from
        self.error: Exception | None = None
        """Why this text can not be computed."""

    def place(self, change: PageTable) -> None:
        """A changed table is another tensor, `Span.pages`."""
        end, places = change.first + len(change.places), torch.tensor(change.places, dtype=torch.int64)
        self.pages = torch.cat([self.pages[: change.first], places, self.pages[end:]])

    def span(self, part: StepPart) -> Span:
        tokens = self.tokens[part.start : part.end]
        tails = dict(part.tails) if part.tails else NO_TAILS
        return Span(tokens, part.start, self.pages, part.ring, tails, self.write_from)

    def append(self, token: int) -> None:
        self.tokens[self.count] = token
        self.count += 1

    def expect(self, position: int) -> None:
        """The token there is drawn on the device. Until `append` brings it, the model finds it there."""
        self.tokens[position] = DRAWN_LAST


class _Work(NamedTuple):
    """One forward, and what is drawn of its logits. Lists take less time than an object for each text."""

    drawn: Drawn
    parts: Sequence[StepPart]
    rings: list[_Ring]
    """Of each part: another text may have its number by the time this one's token is known."""
    before: BeforeLayer
    spans: list[Span]
    rows: list[int]
    """Flat tokens of the spans whose logits are wanted."""
    asked: list[int]
    """The numbers of the parts that these rows are for."""

    @property
    def drawing(self) -> list[int]:
        """Those of them that draw a token."""
        return [i for i in self.asked if self.parts[i].draws]

    def ends(self) -> dict[int, int]:
        """By part: the row behind its last one."""
        return dict(zip(self.asked, accumulate(_rows(self.parts[i]) for i in self.asked), strict=True))

    def last_rows(self, parts: Sequence[int]) -> slice | list[int]:
        """The rows that these parts draw from; often all."""
        ends = self.ends()
        return slice(None) if len(parts) == len(self.rows) else [ends[i] - 1 for i in parts]


class LocalRunner:
    """A model, and the rings of its running texts."""

    def __init__(self, model: Model, ready: Callable[[int], Ready] | None = None) -> None:
        """`ready` tells when the layers of a load may be read, by the load's number."""
        self.model = model
        self._ready = ready
        self._rings: dict[int, _Ring] = {}

    def run(self, step: Step) -> Drawn:
        work = self._take(step)
        if not work.spans:
            return work.drawn
        began_s = perf_counter()
        logits = self._forward(step, work)
        drawn = work.drawn._replace(seconds=perf_counter() - began_s)
        plain = [i for i in work.drawing if work.rings[i].sampler.plain]
        best = greedy(logits[work.last_rows(plain)]).tolist() if plain else []
        self._draw(work, logits, drawn, dict(zip(plain, best, strict=True)))
        return drawn

    def _take(self, step: Step) -> _Work:
        """The changes of a step, and what is to be computed and drawn."""
        before = self._waits(step.loads)
        before(0)  # a text goes on from tails, which come with the first layer
        for change in step.changes:
            if isinstance(change, Begin):
                self._begin(change)
            else:
                self._rings[change.ring].place(change)
        rings = [self._rings[part.ring] for part in step.parts]
        work = _Work(Drawn([None] * len(rings), {}, 0.0), step.parts, rings, before, [], [], [])
        end = 0
        for i, (part, ring) in enumerate(zip(step.parts, rings, strict=True)):
            if ring.error is not None:
                work.drawn.results[i] = ring.error
                continue
            work.spans.append(ring.span(part))
            end += part.end - part.start
            if wanted := _rows(part):
                work.asked.append(i)
                work.rows.extend(range(end - wanted, end))
        return work

    def _waits(self, loads: Sequence[int]) -> BeforeLayer:
        if not loads:
            return at_once
        assert self._ready is not None, "a step has loads only where they can be waited for"
        each = [self._ready(number) for number in loads]

        def wait(layer: int) -> None:
            for load in each:
                load.wait(layer)

        return wait

    def _forward(self, step: Step, work: _Work) -> Tensor:
        try:
            return self.model.forward(work.spans, work.rows, work.before)
        except Exception as error:
            log.exception("a step could not be computed")
            for part in step.parts:  # the next step may be queued already: these texts are not computed there
                self._rings[part.ring].error = error
            # The frames of the forward hold its tensors. Their memory is needed, and the error is kept.
            raise error.with_traceback(None) from None

    def _begin(self, begin: Begin) -> None:
        self._rings[begin.ring] = ring = _Ring(begin)
        prompt, output = begin.tokens[: begin.prompt_tokens], begin.tokens[begin.prompt_tokens :]
        try:
            ring.sampler = Sampler(begin.sampling, prompt, self.model.vocab_size, output)
            self.model.resume(begin.ring, begin.tails)
        except Exception as error:  # noqa: BLE001 - whatever a model raises: this text ends
            log.exception("a text could not be resumed")
            ring.error = error

    def _draw(self, work: _Work, logits: Tensor, drawn: Drawn, known: Mapping[int, int]) -> None:
        """`known`: tokens that were drawn already, by part; -1: the best is no number. What can not be drawn
        or scored is the error of its own text."""
        logits = logits.cpu()  # all rows in one copy
        for i, end in work.ends().items():
            part, ring, token = work.parts[i], work.rings[i], known.get(i, -1)
            try:
                if part.score_from is not None:
                    drawn.scores[part.ring] = _scores(part, ring, logits[end - _rows(part) : end])
                if not part.draws:
                    continue
                if token < 0:
                    out = ring.sampler.draw(logits[end - 1])
                elif ring.sampler.plain:  # most of the time
                    out = TokenOut(token)
                else:
                    out = ring.sampler.take(token, logits[end - 1].numpy())
                ring.append(out.token)
                drawn.results[i] = out
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one row is that text's
                drawn.results[i] = ring.error = error


class QueueRunner(LocalRunner):
    """Queues steps on the model's device, which draws their tokens. A step is waited for here if a sampler
    adjusts logits, or if logprobs are wanted."""

    model: QueueModel

    def __init__(self, model: QueueModel, ready: Callable[[int], Ready] | None = None) -> None:
        super().__init__(model, ready)
        self._before: Callable[[], object] = lambda: None
        """Takes the tokens of the last step that was queued."""

    def run(self, step: Step) -> Drawn:
        return self.start(step)()

    def start(self, step: Step) -> Callable[[], Drawn]:
        """Queue a step. The answer waits for its tokens; results are asked for in the order of the steps."""
        work = self._take(step)
        if not work.spans:
            return lambda: work.drawn
        clock = _Clock(self.model.last.device)
        try:
            logits = self._forward(step, work)
        except Exception as error:  # noqa: BLE001 - it is told with the result
            return partial(_raise, error)
        parts, rings, results = work.parts, work.rings, work.drawn.results
        drawing = work.drawing
        tokens = self._queue_draws(work, drawing, logits)
        stopped = clock.mark()
        if not all(rings[i].sampler.queued and parts[i].score_from is None for i in work.asked):
            self._before()  # its tokens come first
            drawn = work.drawn._replace(seconds=clock.stop(stopped))
            known = {i: t for i, t in zip(drawing, tokens.tolist(), strict=True) if rings[i].sampler.raw}
            self._draw(work, logits, drawn, known)
            return lambda: drawn
        for i in drawing:
            rings[i].expect(parts[i].end)

        @cache
        def result() -> Drawn:
            seconds = clock.stop(stopped)
            for i, token in zip(drawing, tokens.tolist(), strict=True):
                if token < 0:
                    error = LogitsError("the best of the logits is no number")
                    results[i] = rings[i].error = error
                    continue
                rings[i].append(token)
                results[i] = TokenOut(token)
            return work.drawn._replace(seconds=seconds)

        self._before = result
        return result

    def _queue_draws(self, work: _Work, drawing: Sequence[int], logits: Tensor) -> Tensor:
        """Draw a token for each of these parts, for the next step on the device; on its way to the host."""
        draws: list[Draw] | None = None
        if not all(work.rings[i].sampler.greedy for i in drawing):
            each = ((work.rings[i], work.parts[i].end) for i in drawing)
            draws = [ring.sampler.how(end - ring.prompt_tokens) for ring, end in each]
        if len(drawing) < len(work.rows):
            logits = logits[work.last_rows(drawing)]
        drawn = self.model.draw(logits, [work.parts[i].ring for i in drawing], draws)
        host = torch.empty(len(drawing), dtype=torch.int64, pin_memory=drawn.is_cuda)
        return host.copy_(drawn, non_blocking=True)


class _Clock:
    """The time of a step on the device, or here if the device is a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._start = self.mark()

    def mark(self) -> Any:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self, mark: Any) -> float:
        """Wait for a mark. The seconds until then."""
        if not self._cuda:
            return float(mark - self._start)
        mark.synchronize()
        return float(self._start.elapsed_time(mark)) / 1e3


def _raise(error: Exception) -> Drawn:
    raise error


def _rows(part: StepPart) -> int:
    """So many of its last tokens need logits: those that are scored, and the last one if it draws."""
    if part.score_from is None:
        return int(part.draws)
    return max(int(part.draws), part.end - max(part.start, part.score_from))


def _scores(part: StepPart, ring: _Ring, logits: Tensor) -> list[TokenOut]:
    """Row i tells how likely the token after it was, as far as that is one of the prompt's."""
    start = part.end - len(logits)
    following: list[int] = ring.tokens[start + 1 : min(part.end + 1, ring.prompt_tokens)].tolist()
    return token_logprobs(logits[: len(following)], following, ring.sampler.sampling.logprobs or 0)
