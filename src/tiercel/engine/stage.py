"""One stage of a model, in a process of its own: its layers, its device memory, its copies.

    the scheduler's process        this process
    ── steps, tickets ───────────► thread `inbox` ─► thread `copies`: tickets
                                                  └► StageRunner (the main thread): steps, in order
    ◄── acks, replies ────────────
                                   x ◄── the stage before        x ──► the next stage
                                   drawn tokens ◄── the last stage

All three threads end this process when the scheduler's process has ended.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from time import monotonic
from typing import Any, NamedTuple

import torch

from tiercel.engine.drafting import make_drafter
from tiercel.engine.stage_messages import StagePart, StageRoom, StepOrder, told
from tiercel.engine.stage_runner import Links, StageRunner
from tiercel.memory.buffers import STAGED_AREAS, DeviceMemory, HostMemory
from tiercel.models.families import text_folder_of
from tiercel.models.opening import check_device_memory, open_model
from tiercel.progress import show_none
from tiercel.text.text import Text
from tiercel.transfer.controller import Ticket, make_controller
from tiercel.transfer.plan import Direction
from tiercel.transfer.remote import Ack, RankWorker
from tiercel.transfer.staging import Staging


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
        if part.quiet:
            show_none()
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
    """The process on the other end of a pipe: `python -c START FD FOLDER` (`engine.group.START`). (As a
    program of its own this module would be loaded under two names.)"""
    try:
        StageProcess(Connection(int(sys.argv[1]))).run()
    except (EOFError, ConnectionError):  # the scheduler's process has ended while this one started
        os._exit(0)
    except SystemExit as end:
        logging.getLogger(__name__).warning("%s", end)
        os._exit(1)  # without waiting for the other threads
