"""Threads that may get stuck: they never keep the process from ending, and others take their place."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

GROW_MOST = 16
"""More stuck threads than this are not replaced: then the store is left alone anyway."""


class Crew(Executor):
    """An executor of daemon threads. (The library's own waits for its threads when the process ends.)"""

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = Lock()
        self._threads: list[Thread] = []
        self._name = name
        self._most = threads + GROW_MOST
        self._closed = False
        for _ in range(threads):
            self.grow()

    def grow(self) -> None:
        """One more: another is stuck."""
        with self._lock:
            if not self._closed and len(self._threads) < self._most:
                thread = Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def task() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # noqa: BLE001 - it is the asker's
                    future.set_exception(error)

        with self._lock:
            if self._closed:
                raise RuntimeError("the crew is gone")
            self._tasks.put(task)
        return future

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """What was submitted is done first."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._tasks.put(None)
        for thread in self._threads if wait else ():
            thread.join()
