"""The processes of a model's stages, as one runner and one controller.

    scheduler ── Step ──► Group ──► a StageProcess for each stage      each runs every step (`engine.stage`)
    cache ── Plan ──────► GroupController                              each copies its own layers
              ◄── done when all of them said so

Places have one number in all stages, so a step and a plan are the same for all. The host memory is one, and
each stage maps it: a page on the host is whole, whoever computed which layers of it. So a store, a peer, and
another number of stages read what these stages wrote.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from socket import socketpair
from time import monotonic
from typing import NamedTuple

import torch

from tiercel.engine.config import Build, EngineConfig
from tiercel.engine.stage_messages import Reply, StagePart, StageRoom, StepOrder
from tiercel.engine.step import Drawn, ReadOnHost, Step, failing
from tiercel.errors import EngineError, RunnerLost
from tiercel.models.base import Stage
from tiercel.models.families import local_name_of
from tiercel.models.opening import Opened
from tiercel.progress import is_shown
from tiercel.threads import start
from tiercel.transfer.controller import Ticket
from tiercel.transfer.plan import Plan
from tiercel.transfer.remote import Ack, RemoteController

log = logging.getLogger(__name__)

START_S = 600.0
"""A process that has said nothing for so long while it starts is given up: weights are read meanwhile."""
END_S = 10.0
"""How long a process may take to end by itself."""


START = """
import sys
from tiercel.threads import end_with
end_with(int(sys.argv[1]), removing=sys.argv[2])  # first: to import the rest takes seconds
from tiercel.engine.stage import main
main()
"""


class _Process:
    """One stage's process, and the pipe to it."""

    def __init__(self, part: StagePart, threads: int) -> None:
        near, far = socketpair()
        with far:
            os.set_inheritable(far.fileno(), True)
            folder = str(Path(part.meeting).parent)
            command = [sys.executable, "-c", START, str(far.fileno()), folder]
            env = {**os.environ, "OMP_NUM_THREADS": str(threads)} if threads else {**os.environ}
            if part.wire == "gloo":
                env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all stages are on this machine
            self.process = subprocess.Popen(
                command, pass_fds=[far.fileno()], env=env, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.number, self.layers = part.number, part.stage.layers
        self.pipe = Connection(near.detach())
        self.pipe.send(part)

    def hear(self) -> object:
        """The next message while the process starts."""
        try:
            if not self.pipe.poll(START_S):
                raise EngineError(f"stage {self.number} has not started within {START_S:.0f} s")
            message = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise EngineError(f"stage {self.number} ended while it started") from error
        if isinstance(message, Exception):
            raise message
        return message

    def ask_to_end(self) -> None:
        with suppress(OSError):  # it has ended already
            self.pipe.send(None)

    def end(self, wait_s: float) -> None:
        """Wait until it has ended. If it takes too long, it is killed."""
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class StepTimes(NamedTuple):
    """Where the time of a step was spent."""

    sent_s: float
    """Until every stage had the step."""
    stages: tuple[tuple[float, float, float], ...]
    """For each stage: when it took the step up, when it was done, and how long it computed."""


class Group:
    """Runs steps on the stages of a model. Made in three calls: weights are read, then memory is made."""

    def __init__(self, build: Build, config: EngineConfig, opened: Opened, cut: Sequence[Stage]) -> None:
        """Start the processes. They read their weights."""
        self.cut, self.vocab_size = tuple(cut), opened.target.dimensions.vocab_size
        devices = devices_of(build, len(cut))
        wire = "nccl" if len({*devices}) == len(cut) > 1 and not build.on_cpu else "gloo"
        self._threads = max(1, (os.cpu_count() or 1) // len(cut)) if build.on_cpu else 0
        each, quiet = zip(cut, devices, strict=True), is_shown()
        model, draft = local_name_of(build.model), build.draft and local_name_of(build.draft)
        self._parts = [
            StagePart(
                replace(build, model=model, draft=draft, device=device, stages=1),
                config, opened.own_draft, opened.apart, stage, number, len(cut), "", quiet or number > 0,
                wire,
            )
            for number, (stage, device) in enumerate(each)
        ]  # fmt: skip
        self._room: StageRoom | None = None
        self._processes = list[_Process]()
        self._lock, self._changed = threading.Lock(), threading.Condition()
        self._replies = dict[int, dict[int, Reply]]()
        self._number = 0
        self._read = [ReadOnHost()] * len(cut)
        self.busy_s = [0.0] * len(cut)
        self.times = StepTimes(0.0, ())
        """Of the last step."""
        self._lost = ""
        """Why steps can not be run any more."""
        self._ends = False
        self._listener: Future[None] | None = None
        self.controller = GroupController(self, len(cut), in_order=not build.on_cpu)
        self.bytes_free = self._start()
        """What the stage with the least device memory has left beside its weights."""

    def _start(self) -> int:
        self._folder = tempfile.mkdtemp(prefix="tiercel-stages-")
        meeting = str(Path(self._folder) / "meeting")
        try:
            for part in self._parts:
                self._processes.append(_Process(part._replace(meeting=meeting), self._threads))
            return min(int(str(each.hear())) for each in self._processes)
        except BaseException:
            self.end(0.0)
            raise

    def open(self, room: StageRoom) -> None:
        """Each process makes its memory. From now on steps are run."""
        self._room = room
        try:
            for each in self._processes:
                each.pipe.send(room)
            for each in self._processes:
                each.hear()
        except BaseException:
            self.end(0.0)
            raise
        self._lost, self._ends = "", False
        self._listener = start(self._listen, "tiercel-stages")

    def restart(self) -> None:
        """The same processes again. Their device memory is empty, the host memory is as it was."""
        assert self._room is not None and not self._processes
        self._replies = {}
        self._start()
        self.open(self._room)

    @property
    def pids(self) -> list[int]:
        return [each.process.pid for each in self._processes]

    # Steps

    def run(self, step: Step) -> Drawn:
        return self.start(step)()

    def start(self, step: Step) -> Callable[[], Drawn]:
        """Send a step. The returned function waits for its tokens. Call them in the order of the steps."""
        if self._lost:
            return failing(RunnerLost(self._lost, computing=False))
        if not step.parts and not step.changes:
            return lambda: Drawn([], {}, 0.0)
        self._number += 1
        sent_s = monotonic()
        self._send(StepOrder.of(self._number, step))
        return partial(self._result, self._number, sent_s)

    def _result(self, number: int, sent_s: float) -> Drawn:
        with self._changed:
            replies = self._replies.setdefault(number, {})
            while len(replies) < len(self._processes):
                if self._lost:
                    raise RunnerLost(self._lost, computing=True)
                self._changed.wait()
            del self._replies[number]
        every = [replies[stage] for stage in sorted(replies)]
        self._read = [reply.read for reply in every]
        self.times = StepTimes(
            max(reply.came_s for reply in every) - sent_s,
            tuple((reply.began_s, reply.ended_s, reply.busy_s) for reply in every),
        )
        self.busy_s = [busy_s + reply.busy_s for busy_s, reply in zip(self.busy_s, every, strict=True)]
        errors = [reply.error for reply in every if reply.error is not None]
        if errors:
            raise errors[0]
        drawn = every[-1].drawn
        assert drawn is not None
        for reply in every:
            for i, error in reply.errors.items():
                drawn.results[i] = error
        return drawn

    def read_on_host(self) -> ReadOnHost:
        return ReadOnHost(*(sum(each) for each in zip(*self._read, strict=True)))

    # What passes between the processes

    def begin(self, ticket: Ticket) -> None:
        """Have every stage carry out a plan. Without processes it has failed."""
        if self._processes:
            self._send(ticket)
        else:
            self.controller.fail(self._lost)

    @property
    def lost(self) -> bool:
        return bool(self._lost)

    def _send(self, message: StepOrder | Ticket) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            for each in self._processes:
                try:
                    each.pipe.send_bytes(data)
                except OSError:
                    self._lose(each)

    def _listen(self) -> None:
        """What the processes say, until they have ended."""
        open_pipes = {each.pipe: each for each in self._processes}
        while open_pipes:
            for pipe in wait(list(open_pipes)):
                assert isinstance(pipe, Connection)
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    self._lose(open_pipes.pop(pipe))
                    continue
                if isinstance(message, Ack):
                    self.controller.acknowledge(message)
                    continue
                assert isinstance(message, Reply)
                with self._changed:
                    self._replies.setdefault(message.number, {})[message.stage] = message
                    self._changed.notify_all()

    def _lose(self, process: _Process) -> None:
        with self._changed:
            if not self._lost and not self._ends:
                self._lost = f"the process of stage {process.number} has ended"
            self._changed.notify_all()

    def end(self, wait_s: float = END_S) -> None:
        """End all processes and wait until they are gone: then nothing copies any more. One that needs more
        than `wait_s` is killed."""
        self._ends = True
        until_s = monotonic() + wait_s
        with self._lock:
            for each in self._processes:
                each.ask_to_end()
        for each in self._processes:
            each.end(max(0.1, until_s - monotonic()))
        if self._listener is not None:
            self._listener.result()
        for each in self._processes:
            each.pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._listener, self._lost = [], None, self._lost or "the stages have ended"
        self.controller.fail(self._lost)


class GroupController(RemoteController):
    """The controller of a group: every plan is sent to all stages at once."""

    def __init__(self, group: Group, stages: int, *, in_order: bool) -> None:
        super().__init__(stages, in_order=in_order)
        self.how = f"{stages} stages"
        self._group = group

    def submit(self, plan: Plan, *, layered: bool = False) -> Ticket:
        super().submit(plan, layered=layered)
        (ticket,) = self.take()
        self._group.begin(ticket)
        return ticket

    def close(self) -> None:
        """Plans that are under way are carried out."""
        until_s = monotonic() + END_S
        with self.tickets.landed:
            while self._waiting and not self._group.lost and (left_s := until_s - monotonic()) > 0:
                self.tickets.landed.wait(min(left_s, 0.1))
        super().close()
        self._group.end()


def devices_of(build: Build, stages: int) -> list[str]:
    """A device for each stage, from the one that is named, if there are as many; else that one for all."""
    if build.on_cpu:
        return [build.device] * stages
    first = torch.device(build.device).index or 0
    enough = torch.cuda.device_count() >= first + stages
    return [f"cuda:{first + number if enough else first}" for number in range(stages)]
