"""Threads for calls that may hang: into a disk, a network, or a user's own store.

All of them are daemon threads, so a call that never returns does not keep the process from ending.
(`ThreadPoolExecutor` waits for its threads when the process ends.)
"""

from __future__ import annotations

import os
import select
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

GROW_MOST = 16
"""The most threads that `Crew.grow` replaces: a store with more hanging calls is not used any more."""


def end_with(other: int, *, removing: str) -> None:
    """End this process as soon as the other end of a socket is closed, whatever is computed here. Others may
    read the socket meanwhile. `removing`: a folder that the process at the other end would have removed."""
    start(lambda: _end_with(other, removing), "tiercel-end-with")


def _end_with(other: int, removing: str) -> None:
    hung_up = select.poll()
    hung_up.register(other, 0)  # no event but the end, which is always told
    hung_up.poll()
    shutil.rmtree(removing, ignore_errors=True)
    os._exit(0)


def start(do: Callable[[], T], name: str) -> Future[T]:
    """Run `do` in a thread of its own."""
    future: Future[T] = Future()
    Thread(target=_fulfil, args=(future, do), name=name, daemon=True).start()
    return future


class Crew(Executor):
    """An executor with at most `threads` threads, each started when it is first needed."""

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = Lock()
        self._threads: list[Thread] = []
        self._name = name
        self._count = threads
        self._most = threads + GROW_MOST
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Raises RuntimeError after `shutdown`, or if no thread can be started."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the crew is closed")
            self._start_if_short()
            self._tasks.put(partial(_fulfil, future, partial(fn, *args, **kwargs)))
        return future

    def each(self, do: Callable[[T], object], items: Sequence[T]) -> None:
        """Do all items in parallel, the first in this thread. Returns or raises when all have ended."""
        others = [self.submit(do, item) for item in items[1:]]
        try:
            for item in items[:1]:
                do(item)
        finally:
            wait(others)
        for other in others:
            other.result()

    def grow(self) -> None:
        """Start one more thread, because one hangs."""
        with self._lock:
            if not self._closed and self._count < self._most:
                self._count += 1
                self._start_if_short()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """End the threads after what was submitted is done."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._tasks.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _start_if_short(self) -> None:
        if len(self._threads) < self._count:
            thread = Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


def _fulfil(future: Future[T], do: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(do())
        except BaseException as error:  # noqa: BLE001 - the error belongs to whoever reads the future
            future.set_exception(error)
