"""One stage of a model, in a process of its own: its layers, its device memory, its copies.

    the scheduler's process        this process
    ── steps, tickets ───────────► thread `inbox` ─► thread `copies`: tickets
                                                  └► StageRunner (the main thread): steps, in order
    ◄── acks, replies ────────────
                                   x ◄── the stage before        x ──► the next stage
                                   drawn tokens ◄── the last stage

Every stage runs every step: it has the tokens and page tables of all rings, and computes its own layers. The
last stage makes the guesses and draws the tokens, and sends them to the other stages. A step may come before
the one before it has ended: then it begins as soon as the tokens that it needs are there.

A step is computed in pieces (`engine.pieces`), so that no stage waits for all of the stage before it.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
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
from tiercel.engine.pieces import PIECE_TOKENS, Piece, pieces_of
from tiercel.engine.runner import LocalRunner, Ring, Work
from tiercel.engine.sampling import Sampler
from tiercel.engine.step import Begin, Change, Drawn, ReadOnHost, Step, StepPart
from tiercel.errors import EngineError
from tiercel.memory.buffers import STAGED_AREAS, DeviceMemory, HostMemory
from tiercel.models.base import NO_GUESS, Model, Stage
from tiercel.models.families import text_folder_of
from tiercel.models.opening import check_device_memory, open_model
from tiercel.text.text import Text
from tiercel.transfer.controller import Ticket, make_controller
from tiercel.transfer.plan import Direction
from tiercel.transfer.remote import Ack, RankWorker
from tiercel.transfer.staging import Staging

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
    """A step on its way to the stages. Its parts are sent in columns: this takes a third of the time."""

    number: int
    changes: tuple[Change, ...]
    columns: tuple[tuple[Any, ...], ...]
    loads: tuple[int, ...]

    @staticmethod
    def of(number: int, step: Step) -> StepOrder:
        return StepOrder(number, step.changes, tuple(zip(*step.parts, strict=True)), step.loads)

    @property
    def step(self) -> Step:
        return Step(self.changes, tuple(map(StepPart, *self.columns)) if self.columns else (), self.loads)


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
    came_s: float
    """When the step was here, on the clock that all processes of a machine share."""
    began_s: float
    """When the stage took it up, and when it was done with it."""
    ended_s: float
    busy_s: float
    """How long it was computed here: the rest of the time this stage waited for others."""


class Links:
    """The other stages. Everything is sent and received in the order of the calls."""

    def __init__(self, number: int, of: int, wire: str, meeting: str) -> None:
        self.number, self.of = number, of
        dist.init_process_group(wire, init_method=f"file://{meeting}", rank=number, world_size=of)
        self._tokens = dist.new_group(backend="gloo")
        self._through_host = wire == "gloo"
        self._sent = deque[tuple[Any, Tensor]]()
        """Tensors on their way: they must stay until they have been received."""

    def take(self, x: Tensor) -> Tensor:
        """What the stage before sends. `x`: room for it."""
        here = x.cpu() if self._through_host else x
        dist.recv(here, self.number - 1)
        return here.to(x.device)

    def give(self, x: Tensor) -> None:
        """Send to the next stage. Does not wait for it."""
        x = (x.cpu() if self._through_host else x).contiguous()
        self._keep(dist.isend(x, self.number + 1), x)

    def share(self, tokens: Tensor) -> Tensor:
        """Tokens of the last stage, for every stage. They are in host memory."""
        last = self.of - 1
        if self.number != last:
            dist.recv(tokens, last, self._tokens)
        else:
            for stage in range(last):
                self._keep(dist.isend(tokens, stage, self._tokens), tokens)
        return tokens

    def _keep(self, sent: Any, x: Tensor) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        self._sent.append((sent, x))


class Drawing(NamedTuple):
    """Texts for which the last stage draws tokens in one piece of a step."""

    rings: list[Ring]
    most: int
    """How many tokens a text may draw."""


class StageRunner(LocalRunner):
    """Runs this stage's layers. No text is left out of a step because of an error: all stages compute the
    same spans. What is wrong with it is told in the reply. If no token could be drawn for a text, it goes on
    with token 0, because its next step may be on its way; what it draws is dropped."""

    leaves_out = False

    def __init__(self, model: Model, links: Links, *rest: Any) -> None:
        super().__init__(model, *rest)
        self._links, self._last = links, model.stage.ends
        self._errors: dict[int, Exception] = {}
        self._untold = deque[Drawing]()
        """Draws of earlier pieces, whose tokens have not been received yet."""
        self._busy_s = 0.0

    def reply(self, order: StepOrder, came_s: float) -> Reply:
        """Run a step. Whatever is raised here ends this process; an error of the forward is told."""
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
        own, times = drawn if self._last else None, (came_s, began_s, monotonic(), self._busy_s)
        return Reply(order.number, self._links.number, own, errors, failed, read, *times)

    def run(self, step: Step) -> Drawn:
        work = self._take(step)
        if not work.spans:
            return work.drawn
        began_s = monotonic()
        self._forward(step, work)  # tokens are drawn on the way
        return work.drawn._replace(seconds=monotonic() - began_s)

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
        self._learn(len(self._untold))
        rows = torch.full((len(parts), most), NO_GUESS)
        for i, own in ((super()._guess(parts, rings) or {}) if self._last else {}).items():
            rows[i, : len(own)] = torch.tensor(own, dtype=torch.int64)
        rows = self._links.share(rows)
        return {i: [g for g in row if g != NO_GUESS] for i, row in enumerate(rows.tolist()) if row[0] >= 0}

    def _compute(self, work: Work) -> Tensor:
        """Compute the pieces of a step, and draw from each."""
        error: Exception | None = None
        earlier, ends = len(self._untold), deque(work.ends().items())
        logits, rows = list[Tensor](), 0
        for piece in self._pieces(work):
            earlier -= self._learn_of(work.rings[piece.first : piece.first + len(piece.spans)])
            room = self.model.room_for(sum(len(span.tokens) for span in piece.spans))
            x = None if self.model.stage.begins else self._links.take(room)
            began_s = monotonic()
            if error is None:
                try:
                    y = self.model.forward(piece.spans, piece.rows, work.before, x)
                except Exception as raised:  # noqa: BLE001 - whatever a model raises: its texts end
                    error = raised
            if not self._last:  # the next stage waits for it: its texts end there too
                self._links.give(y if error is None else room.zero_())
            elif error is None:
                logits.append(y)
            rows += len(piece.rows)
            ended = list[int]()
            while ends and ends[0][1] <= rows:
                ended.append(ends.popleft()[0])
            if ended:
                if self._last and error is None:
                    count = sum(map(work.count, ended))
                    every = torch.cat(logits)
                    logits = [every[count:]]
                    own = work._replace(asked=ended, rows=[*range(count)])
                    self._drawn(own, every[:count], work.drawn)
                self._tell(work, ended)
            self._busy_s += monotonic() - began_s
        self._learn(earlier)
        if error is not None:
            raise ForwardError(error)
        return torch.empty(0)

    def _pieces(self, work: Work) -> list[Piece]:
        """One for each stage. A step with guesses ends before the next one comes: its pieces must be worth
        that the last stage begins late, and the first one ends early."""
        count = self._links.of
        if any(part.guesses for part in work.parts):
            count = min(count, sum(len(span.tokens) for span in work.spans) // PIECE_TOKENS)
        return pieces_of(work.spans, work.rows, count)

    # Drawn tokens, from the last stage to the others

    def _tell(self, work: Work, ended: Sequence[int]) -> None:
        """These parts have been computed to their ends: tell what was drawn for them, or wait to be told."""
        drawing = [i for i in ended if work.parts[i].draws]
        most = 1 + max((work.parts[i].guesses for i in drawing), default=0)
        if not drawing:
            return
        if not self._last:
            self._untold.append(Drawing([work.rings[i] for i in drawing], most))
            return
        tokens = torch.full((len(drawing), most), NO_GUESS)
        for row, i in zip(tokens, drawing, strict=True):
            outs = work.drawn.results[i]
            own = [out.token for out in outs] if isinstance(outs, tuple) else [0]
            if not isinstance(outs, tuple):
                work.rings[i].append(0)
            row[: len(own)] = torch.tensor(own)
        self._links.share(tokens)

    def _learn_of(self, rings: Sequence[Ring]) -> int:
        """Learn the last tokens of these texts. Returns how many draws have been learned."""
        known = 0
        for count, drawing in enumerate(self._untold, 1):
            if not set(rings).isdisjoint(drawing.rings):
                known = count
        self._learn(known)
        return known

    def _learn(self, count: int) -> None:
        """Receive the tokens of so many draws."""
        for _ in range(count):
            rings, most = self._untold.popleft()
            rows = self._links.share(torch.empty(len(rings), most, dtype=torch.int64))
            for ring, tokens in zip(rings, rows.tolist(), strict=True):
                for token in tokens:
                    if token != NO_GUESS:
                        ring.append(token)


class ForwardError(Exception):
    """A forward could not be computed, and the stages still agree on what is next."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(repr(cause))
        self.cause = cause


def told(error: BaseException | None) -> Exception:
    """An error as another process can read it."""
    try:
        again = pickle.loads(pickle.dumps(error))
        if isinstance(again, Exception):
            return again
    except Exception:  # noqa: BLE001, S110 - it can not be sent as it is
        pass
    return EngineError(repr(error))


class Came(NamedTuple):
    order: StepOrder
    came_s: float


class Copies:
    """Begins plans as they come, and says when they have ended. Its own thread makes all calls of the
    controller.

    A load begins when all steps before it have ended: they may still write the places that it fills. A step
    that comes behind a plan is run after the plan has begun, because it may have to wait for it."""

    def __init__(self, worker: RankWorker, steps: SimpleQueue[Came], tell: Callable[[Ack], None]) -> None:
        self._worker, self._steps, self._tell = worker, steps, tell
        self._inbox = deque[Ticket | Came]()
        """What has not begun. A message leaves it when it has."""
        self._given, self._ended = 0, 0
        """How many steps the runner has got, and how many of them have ended."""
        self._under_way = set[int]()
        """Plans whose end has not been told."""
        self._told = threading.Condition()

    def put(self, message: Ticket | Came) -> None:
        if isinstance(message, Came) and not self._inbox:
            self._give(message)
            return
        self._inbox.append(message)
        self._worker.wake()

    def step_ended(self, order: StepOrder) -> None:
        """A step was run. Its loads have ended: when this returns, that was told, so that the scheduler's
        process hears of them before it hears of the step."""
        self._ended += 1
        if self._inbox:
            self._worker.wake()
        with self._told:
            self._told.wait_for(lambda: self._under_way.isdisjoint(order.loads))

    def _give(self, step: Came) -> None:
        self._given += 1
        self._steps.put(step)

    def _may_begin(self) -> bool:
        if not self._inbox:
            return False
        message = self._inbox[0]
        loads = isinstance(message, Ticket) and message.plan.direction is Direction.LOAD
        return not loads or self._ended == self._given

    def run(self) -> None:
        while True:
            self._worker.wait(3600.0, unless=self._may_begin)
            while self._may_begin():
                message = self._inbox[0]
                if isinstance(message, Ticket):
                    self._under_way.add(message.number)
                    self._worker.start(message)
                else:
                    self._give(message)
                self._inbox.popleft()
            for ack in self._worker.acks():
                self._tell(ack)
                with self._told:
                    self._under_way.discard(ack.number)
                    self._told.notify()


class StageProcess:
    """The whole process: opens its stage, and runs steps until the scheduler's process closes the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._steps = SimpleQueue[Came]()

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
            order, came_s = self._steps.get()
            reply = runner.reply(order, came_s)
            if copies is not None:
                copies.step_ended(order)
            self.tell(reply)

    def _receive(self, put: Callable[[Any], None]) -> None:
        while (message := self._pipe.recv()) is not None:
            put(Came(message, monotonic()) if isinstance(message, StepOrder) else message)
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
