"""Replays in processes, as many at the same time as there are cores.

    this process ── trace, declaration ──► each worker, once
                 ── a work ─────────────► a worker that is idle
                 ◄── how many requests have ended, and at last the report ──

Workers hold nothing that others need, so they are killed, however this ends. They do not see Ctrl-C: it is
this process that ends. A worker whose parent is gone ends with its next word.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from threading import current_thread, main_thread
from typing import Any, NamedTuple, cast

from tiercel.errors import ConfigError
from tiercel.replay.report import Report
from tiercel.replay.run import Serving, replay
from tiercel.replay.sizes import Sizes
from tiercel.replay.trace import Trace
from tiercel.spec.cache_spec import CacheSpec

ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a command."""


class Work(NamedTuple):
    """One replay."""

    sizes: Sizes
    policy: str


class Given(NamedTuple):
    """What all replays have."""

    trace: Trace
    spec: CacheSpec
    serving: Serving
    sparse: bool

    def replayed(self, work: Work, progress: Callable[[int], None]) -> Report:
        spec = self.spec.apart if self.sparse and work.sizes.host_bytes else self.spec
        sizes, policy = work
        return replay(self.trace, spec, sizes, policy=policy, serving=self.serving, progress=progress)


def replay_all(
    trace: Trace,
    spec: CacheSpec,
    serving: Serving,
    works: Sequence[Work],
    *,
    sparse: bool = False,
    processes: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Report]:
    """The report of each work. `progress` is called with the requests that have ended since the last call."""
    given = Given(trace, spec, serving, sparse)
    count = min(len(works), processes or os.cpu_count() or 1)
    if count == 1:
        return [given.replayed(work, progress) for work in works]
    workers = dict[Connection, BaseProcess]()
    try:
        for _ in range(count):
            with _undisturbed():
                ours, process = _start()
                workers[ours] = process
        return _shared_out(given, works, workers, progress)
    finally:
        for process in workers.values():
            process.kill()
        for process in workers.values():
            process.join()


def _start() -> tuple[Connection, BaseProcess]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _shared_out(
    given: Given,
    works: Sequence[Work],
    workers: dict[Connection, BaseProcess],
    progress: Callable[[int], None],
) -> list[Report]:
    """Give each worker the next work as soon as it has none."""
    reports: list[Report | None] = [None] * len(works)
    waiting, doing = iter(range(len(works))), dict[Connection, int]()
    what = bytes(ForkingPickler.dumps(given))
    try:
        for worker in workers:
            worker.send_bytes(what)
            doing[worker] = next(waiting)
            worker.send(works[doing[worker]])
        while doing:
            for worker in cast(list[Connection], wait([*doing])):
                told = worker.recv()
                if isinstance(told, int):
                    progress(told)
                    continue
                if isinstance(told, Exception):
                    raise told
                reports[doing.pop(worker)] = told
                if (number := next(waiting, None)) is not None:
                    doing[worker] = number
                    worker.send(works[number])
    except (EOFError, ConnectionError) as error:
        why = "one of them was ended from outside: memory may be short; try fewer"
        raise ConfigError("--processes", len(workers), why) from error
    return [report for report in reports if report is not None]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals that end a command come after this block. A process that begins in it is not disturbed by them
    while it starts."""
    if current_thread() is not main_thread():  # such a thread gets no signals, and may not say who does
        yield
        return
    came: list[int] = []
    before: dict[signal.Signals, Any] = {
        number: signal.signal(number, lambda number, _: came.append(number)) for number in ENDING
    }
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for each, handler in before.items():
            signal.signal(each, handler)
    for number in came:
        signal.raise_signal(number)


def _serve(parent: Connection) -> None:
    """A worker: one replay after the other, until nobody wants any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    try:
        given: Given = parent.recv()
        while True:
            work = parent.recv()
            try:
                report: Report | Exception = given.replayed(work, parent.send)
            except ConnectionError:
                return
            except Exception as error:  # noqa: BLE001 - it is raised where somebody sees it
                report = error
            parent.send(report)
    except (EOFError, ConnectionError):
        return
