"""Copies under the simulation's hand: they run when, in the order and with the faults it chooses."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class FaultyCopyError(OSError):
    """The fault the simulation makes."""


class HeldCopies(Executor):
    """Holds every task until it is told to run one."""

    def __init__(self) -> None:
        self.held: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.held.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self, index: int) -> None:
        future, task = self.held.pop(index)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(task())
        except Exception as error:  # noqa: BLE001 - what a real executor does
            future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while self.held:
            self.run(0)


class FaultyCopier:
    """Passes copies on to the real copier, until the count runs out: then one copy fails half way."""

    def __init__(self, copier: Any) -> None:
        self.copier = copier
        self.copies_until_fault: int | None = None

    def copy(self, direction: Any, leg: Any) -> None:
        if self.copies_until_fault is not None:
            if self.copies_until_fault == 0:
                self.copies_until_fault = None
                raise FaultyCopyError("the simulation made this copy fail")
            self.copies_until_fault -= 1
        self.copier.copy(direction, leg)
