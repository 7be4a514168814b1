"""One stage of a model, in a process of its own: its layers, its device memory, its copies.

    the scheduler's process        this process
    ── steps, tickets ───────────► thread `inbox` ─► thread `copies`: tickets begin at once
                                                  └► steps, in order ─► StageRunner (the main thread)
    ◄── acks, replies ────────────
                                   x ◄── the stage before        x ──► the next stage

Every stage runs every step: it has the tokens and page tables of all rings, and computes its own layers. The
last stage makes the guesses and draws the tokens. Guesses are sent to the other stages at once. Drawn tokens
come to them with the next step.

A step is computed in pieces, so that no stage waits for all of the stage before it. A text has the same bits
however it is cut.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from time import monotonic
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tiercel.asks.ask import Sampling
from tiercel.engine.config import Build, EngineConfig
from tiercel.engine.drafting import make_drafter
from tiercel.engine.runner import LocalRunner, Work
from tiercel.engine.sampling import Sampler
from tiercel.engine.step import Begin, Drawn, ReadOnHost, Step, StepPart
from tiercel.errors import EngineError
from tiercel.memory.buffers import STAGED_AREAS, DeviceMemory, HostMemory
from tiercel.models.base import NO_GUESS, Model, Span, Stage
from tiercel.models.families import text_folder_of
from tiercel.models.opening import check_device_memory, open_model
from tiercel.text.text import Text
from tiercel.transfer.controller import Ticket, make_controller
from tiercel.transfer.remote import Ack, RankWorker
from tiercel.transfer.staging import Staging

PIECES = 2
"""A step is cut into so many pieces for each stage, if there is enough to compute."""
PIECE_TOKENS = 64
"""A piece of a prompt has at least so many tokens, and a span of fewer is not cut."""
PIECE_TEXTS = 4
"""A piece of a step that draws has at least so many texts."""

PLAIN = Sampling(1, temperature=0.0)


class StagePart(NamedTuple):
    """What a process is told first."""

    build: Build
    """Its device is the stage's own."""
    config: EngineConfig
    own_draft: bool
    apart: bool
    stage: Stage
    number: int
    of: int
    meeting: str
    """A file by which the stages find each other."""
    wire: str
    """How they send: a backend of `torch.distributed`."""


class StageRoom(NamedTuple):
    """What a process is told when it has its weights: the same numbers of places in all stages."""

    frames: int
    staging: int
    staged_pages: int
    host: tuple[str, int] | None
    """The host memory of all stages: where it is mapped, and its size in the settings. None: no host tier."""


class StepOrder(NamedTuple):
    number: int
    step: Step
    drawn: Mapping[int, tuple[int, ...]]
    """The tokens that the step before has drawn, by ring."""


class Reply(NamedTuple):
    """A stage has run a step."""

    number: int
    stage: int
    drawn: Drawn | None
    """Of the last stage."""
    errors: dict[int, Exception]
    """Why texts can not be computed, by the number of their part."""
    error: Exception | None
    """Why the step could not be computed."""
    read: ReadOnHost
    began_s: float
    """When the step began here, on the clock that all processes of a machine share."""
    busy_s: float
    """How long it was computed here: the rest of a step's time this stage waited for others."""


class Links:
    """This stage's neighbours. Everything is sent and received in the order of the calls."""

    def __init__(self, number: int, of: int, wire: str, meeting: str) -> None:
        self.number, self.of = number, of
        dist.init_process_group(wire, init_method=f"file://{meeting}", rank=number, world_size=of)
        self._through_host = wire == "gloo"
        self._sent = deque[tuple[Any, Tensor]]()
        """Tensors on their way: they must stay until they have been received."""

    def take(self, x: Tensor) -> Tensor:
        """What the stage before sends. `x`: room for it."""
        here = x.cpu() if self._through_host else x
        dist.recv(here, self.number - 1)
        return here.to(x.device)

    def give(self, x: Tensor, to: int | None = None) -> None:
        """Send to the next stage, or to another one. Does not wait for it."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        x = (x.cpu() if self._through_host else x).contiguous()
        self._sent.append((dist.isend(x, self.number + 1 if to is None else to), x))

    def share_guesses(self, guesses: Tensor) -> Tensor:
        """The guesses of the last stage, for every stage."""
        last = self.of - 1
        if self.number != last:
            dist.recv(guesses, last)
        else:
            for stage in range(last):
                self.give(guesses, stage)
        return guesses


class StageRunner(LocalRunner):
    """Runs this stage's layers. No text is left out of a step because of an error: all stages compute the
    same spans. What is wrong with it is told in the reply."""

    leaves_out = False

    def __init__(self, model: Model, links: Links, *rest: Any) -> None:
        super().__init__(model, *rest)
        self._links, self._last = links, model.stage.ends
        self._errors: dict[int, Exception] = {}
        self._busy_s = 0.0

    def reply(self, order: StepOrder) -> Reply:
        """Run a step. Whatever is raised here ends this process; an error of the forward is told."""
        for ring, tokens in () if self._last else order.drawn.items():
            for token in tokens:
                self._rings[ring].append(token)
        began_s, self._busy_s, drawn, failed = monotonic(), 0.0, None, None
        try:
            drawn = self.run(order.step)
        except ForwardError as error:
            failed = told(error.cause)
        if drawn is not None and self._last:
            results = [told(each) if isinstance(each, Exception) else each for each in drawn.results]
            drawn = drawn._replace(results=results, guessed=dict(drawn.guessed))
        errors = {i: told(error) for i, error in self._errors.items()}
        read = ReadOnHost() if self.model.last.is_cuda else self.read_on_host()
        own = drawn if self._last else None
        return Reply(order.number, self._links.number, own, errors, failed, read, began_s, self._busy_s)

    def _begin(self, begin: Begin) -> None:
        if not self._last:  # it draws nothing, and needs no grammar
            begin = begin._replace(sampling=Sampling(begin.sampling.max_tokens, temperature=0.0))
        super()._begin(begin)
        ring = self._rings[begin.ring]
        if ring.error is not None:  # it is computed and drawn from all the same
            ring.sampler = Sampler(PLAIN, (), self.model.vocab_size)

    def _take(self, step: Step) -> Work:
        work = super()._take(step)
        self._errors = {i: each for i, each in enumerate(work.drawn.results) if isinstance(each, Exception)}
        return work

    def _guess(self, parts: Sequence[StepPart], rings: Sequence[Any]) -> dict[int, list[int]] | None:
        most = max((part.guesses for part in parts), default=0)
        if not most:
            return None
        rows = torch.full((len(parts), most), NO_GUESS)
        for i, own in ((super()._guess(parts, rings) or {}) if self._last else {}).items():
            rows[i, : len(own)] = torch.tensor(own, dtype=torch.int64)
        rows = self._links.share_guesses(rows)
        return {i: [g for g in row if g != NO_GUESS] for i, row in enumerate(rows.tolist()) if row[0] >= 0}

    def _compute(self, work: Work) -> Tensor:
        done, error = list[Tensor](), None
        for spans, rows in pieces_of(work.spans, work.rows, PIECES * self._links.of):
            room = self.model.room_for(sum(len(span.tokens) for span in spans))
            x = None if self.model.stage.begins else self._links.take(room)
            began_s = monotonic()
            if error is None:
                try:
                    y = self.model.forward(spans, rows, work.before, x)
                except Exception as raised:  # noqa: BLE001 - whatever a model raises: its texts end
                    error = raised
            self._busy_s += monotonic() - began_s
            if not self._last:  # the next stage waits for it: its texts end there too
                self._links.give(y if error is None else room.zero_())
            elif error is None:
                done.append(y)
        if error is not None:
            raise ForwardError(error)
        return torch.cat(done) if done else torch.empty(0)

    def _drawn(self, work: Work, logits: Tensor, drawn: Drawn) -> Drawn:
        if not self._last:
            return drawn
        began_s = monotonic()
        drawn = super()._drawn(work, logits, drawn)
        self._busy_s += monotonic() - began_s
        return drawn


class ForwardError(Exception):
    """A forward could not be computed, and the stages still agree on what is next."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(repr(cause))
        self.cause = cause


def pieces_of(spans: Sequence[Span], rows: Sequence[int], count: int) -> list[tuple[list[Span], list[int]]]:
    """A call in about `count` pieces of as many tokens each: (spans, flat tokens whose logits are wanted).
    Short spans are not cut."""
    total = sum(len(span.tokens) for span in spans)
    count = max(1, min(count, max(len(spans) // PIECE_TEXTS, total // PIECE_TOKENS)))
    size, pieces, current, held = -(-total // count), list[list[Span]](), list[Span](), 0
    for each in spans:
        span = each
        while min(size - held, held + len(span.tokens) - size) >= PIECE_TOKENS // 2:
            first, span = _cut(span, size - held)
            pieces.append([*current, first])
            current, held = [], 0
        current.append(span)
        held += len(span.tokens)
        if held >= size:
            pieces.append(current)
            current, held = [], 0
    found, begin, left = list[tuple[list[Span], list[int]]](), 0, deque(rows)
    for piece in [*pieces, *([current] if current else [])]:
        end = begin + sum(len(span.tokens) for span in piece)
        own = list[int]()
        while left and left[0] < end:
            own.append(left.popleft() - begin)
        found.append((piece, own))
        begin = end
    return found


def _cut(span: Span, tokens: int) -> tuple[Span, Span]:
    middle = span.start + tokens
    first = {boundary: place for boundary, place in span.tails.items() if boundary <= middle}
    rest = {boundary: place for boundary, place in span.tails.items() if boundary > middle}
    return (
        replace(span, tokens=span.tokens[:tokens], tails=first),
        replace(span, tokens=span.tokens[tokens:], start=middle, tails=rest),
    )


def told(error: BaseException | None) -> Exception:
    """An error as another process can read it."""
    try:
        again = pickle.loads(pickle.dumps(error))
        if isinstance(again, Exception):
            return again
    except Exception:  # noqa: BLE001, S110 - it can not be sent as it is
        pass
    return EngineError(repr(error))


class Copies:
    """Begins plans as they come, and says when they have ended. Its own thread makes all calls of the
    controller. Steps pass through it: a step that waits for a load comes behind it."""

    def __init__(
        self, worker: RankWorker, steps: SimpleQueue[StepOrder], tell: Callable[[Ack], None]
    ) -> None:
        self._worker, self._steps, self._tell = worker, steps, tell
        self._inbox = deque[Ticket | StepOrder]()

    def put(self, message: Ticket | StepOrder) -> None:
        self._inbox.append(message)
        self._worker.wake()

    def run(self) -> None:
        while True:
            self._worker.wait(3600.0, unless=lambda: bool(self._inbox))
            while self._inbox:
                message = self._inbox.popleft()
                if isinstance(message, Ticket):
                    self._worker.start(message)
                else:
                    self._steps.put(message)
            for ack in self._worker.acks():
                self._tell(ack)


class StageProcess:
    """The whole process: opens its stage, and runs steps until the scheduler's process closes the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._steps = SimpleQueue[StepOrder]()

    def tell(self, message: object) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._pipe.send_bytes(data)

    def run(self) -> None:
        part: StagePart = self._pipe.recv()
        try:
            runner, copies = self._open(part)
        except Exception as error:  # noqa: BLE001 - the scheduler's process raises it
            self.tell(told(error))
            return
        self.tell(None)
        put = self._steps.put if copies is None else copies.put
        if copies is not None:
            threading.Thread(target=_or_exit(copies.run), name="copies", daemon=True).start()
        threading.Thread(target=_or_exit(partial(self._receive, put)), name="inbox", daemon=True).start()
        while True:
            self.tell(runner.reply(self._steps.get()))

    def _receive(self, put: Callable[[Any], None]) -> None:
        while (message := self._pipe.recv()) is not None:
            put(message)
        raise EOFError

    def _open(self, part: StagePart) -> tuple[StageRunner, Copies | None]:
        build, config, stage = part.build, part.config, part.stage
        opened = replace(open_model(build), own_draft=part.own_draft, apart=part.apart, stage=stage)
        check = partial(check_device_memory, build, cache_bytes=build.device_bytes or 0)
        if not build.on_cpu:
            torch.cuda.set_device(build.device)
        loaded = opened.load(check)
        self.tell(0 if build.on_cpu else torch.cuda.mem_get_info(build.device)[0])
        room: StageRoom | None = self._pipe.recv()
        if room is None:
            raise EOFError("the scheduler's process needs this one no more")
        spec = opened.held
        staged = STAGED_AREAS * room.staged_pages if spec.selective else 0
        memory = DeviceMemory(spec, room.frames, room.staging, build.device, staged)
        ready, copies = None, None
        if room.host is not None:
            path, size = room.host
            memory.host = host = HostMemory(
                opened.spec, config.cache.layout, size, pin=not build.on_cpu, path=path
            )
            worker = RankWorker(part.number, make_controller(config.cache.copier, memory, host))
            ready, copies = worker.ready, Copies(worker, self._steps, self.tell)
        model = loaded.build(memory, config.running_max, config.guesses_max)
        drafter, grammars = None, None
        if stage.ends:
            drafter = make_drafter(config.speculate, model, spec.page_tokens)
            grammars = Text(text_folder_of(build.model)).grammars
        staging = Staging(memory) if memory.tails else None
        links = Links(part.number, part.of, part.wire, part.meeting)
        return StageRunner(model, links, ready, drafter, grammars, staging), copies


def _or_exit(run: Callable[[], object]) -> Callable[[], None]:
    """A thread without which the process is of no use."""

    def guarded() -> None:
        try:
            run()
        except (EOFError, ConnectionError):  # the scheduler's process has ended, or is done with this one
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the scheduler's process sees that this one has ended
            logging.getLogger(__name__).exception("a stage ends")
            os._exit(1)

    return guarded


def main() -> None:
    """`python -c "from tiercel.engine.stage import main; main()" FD`: the process on the other end of a pipe.
    (As a program of its own this module would be loaded under two names.)"""
    StageProcess(Connection(int(sys.argv[1]))).run()
