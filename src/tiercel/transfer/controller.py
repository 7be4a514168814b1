"""The controller: plans go in, copies run elsewhere, and what ended comes out in order.

    the caller's thread                 the direction's worker
    ───────────────────                 ──────────────────────
    submit(plan) ─► Ticket ───────────► leg of pages, leg of tails
    poll() ─► [Done(ticket, None)] ◄─── all legs copied
    poll() ─► [Done(ticket, error)] ◄── an error anywhere

Loads do not wait for saves nor saves for loads. Within a direction transfers may end in any order, and are
published in the order they were submitted, so a later page is never visible before an earlier one.

A controller merges nothing (one plan is one step's work) and never asks who owns an id: places stay
reserved until `poll` has named their ticket. `LocalController` copies in threads of this process;
`transfer.cuda` queues copies on a device; `transfer.remote` hands plans to processes that have the memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Condition
from time import perf_counter
from typing import Protocol

from tiercel.errors import TransferError
from tiercel.memory.buffers import HostMemory, Memory
from tiercel.transfer.copier import Copier, make_copier
from tiercel.transfer.plan import Direction, Plan
from tiercel.types import Kind


@dataclass(frozen=True)
class Ticket:
    """A plan on its way."""

    number: int
    plan: Plan


@dataclass(frozen=True)
class Done:
    """A plan that ended. With an error its targets hold anything; without, every byte is there."""

    ticket: Ticket
    error: TransferError | None


class Ready(Protocol):
    """When the layers of a load may be read."""

    def wait(self, layer: int) -> None:
        """What the caller queues on its device from now on runs after this layer's bytes are there. Tails are
        there with the first layer."""


class Controller(ABC):
    """Keeps plans in order. `submit`, `poll` and `close` belong to one thread."""

    how: str
    """Who copies, for people: what `auto` came to."""

    in_order = False
    """Whether copies and computing are queued on one device: `ready` can be asked before a load has ended."""

    def __init__(self) -> None:
        self.landed = Condition()
        """Notified whenever a transfer ends."""
        self.seconds = {direction: {kind.plural: 0.0 for kind in Kind} for direction in Direction}
        """Time spent copying pages and tails."""
        self._queues: dict[Direction, deque[Ticket]] = {direction: deque() for direction in Direction}
        self._ended: dict[int, Done] = {}
        self._submitted = 0

    def submit(self, plan: Plan, *, layered: bool = False) -> Ticket:
        """Have a plan carried out. Never blocks. `layered`: who reads it waits for it at once, layer by layer
        (`ready`)."""
        ticket = Ticket(self._submitted, plan)
        self._queues[plan.direction].append(ticket)
        self._submitted += 1
        self._start(ticket, layered=layered)
        return ticket

    @abstractmethod
    def _start(self, ticket: Ticket, *, layered: bool) -> None:
        """Hand the plan to whoever carries it out. Whatever becomes of it, `_end` is called once."""

    def poll(self) -> list[Done]:
        """What ended since the last poll, per direction in the order of submission. Never blocks."""
        done = []
        for queue in self._queues.values():
            while queue and queue[0].number in self._ended:
                done.append(self._ended.pop(queue.popleft().number))
        return done

    @property
    def has_landed(self) -> bool:
        """Whether the next `poll` names a transfer."""
        return any(queue and queue[0].number in self._ended for queue in self._queues.values())

    def ready(self, number: int) -> Ready:
        """Of the ticket with this number."""
        raise NotImplementedError("only where `in_order` holds")

    @abstractmethod
    def close(self) -> None:
        """Wait for everything in flight; `poll` still tells how it ended. May be called again."""

    def _end(self, ticket: Ticket, cause: BaseException | None) -> None:
        error = None
        if cause is not None:
            error = TransferError(f"{ticket.plan.direction.value} {ticket.number} failed: {cause!r}")
            error.__cause__ = cause
        with self.landed:
            self._ended[ticket.number] = Done(ticket, error)
            self.landed.notify_all()


class LocalController(Controller):
    """Copies in this process.

    `executors` gives each direction its worker, and `close` shuts the workers down. The default is one thread
    for each direction.
    """

    def __init__(self, copier: Copier, executors: Mapping[Direction, Executor] | None = None) -> None:
        super().__init__()
        self._copier = copier
        self.how = copier.name
        self._executors = executors or {
            direction: ThreadPoolExecutor(1, thread_name_prefix=f"tiercel-{direction.value}")
            for direction in Direction
        }

    def _start(self, ticket: Ticket, *, layered: bool) -> None:  # noqa: ARG002 - all of it is copied at once
        """A worker that takes no work fails the plan."""
        direction = ticket.plan.direction
        try:
            future = self._executors[direction].submit(
                carry, self._copier, ticket.plan, self.seconds[direction]
            )
        except RuntimeError as refusal:  # what an executor that is shut down, or can start no thread, raises
            self._end(ticket, refusal)
        else:
            future.add_done_callback(partial(self._land, ticket))

    def close(self) -> None:
        for executor in self._executors.values():
            executor.shutdown(wait=True)

    def _land(self, ticket: Ticket, future: Future[None]) -> None:
        """A transfer ended in whatever way: by itself, by an error (I13), or cancelled by its executor."""
        self._end(ticket, CancelledError() if future.cancelled() else future.exception())


def carry(copier: Copier, plan: Plan, seconds: dict[str, float]) -> None:
    """Do what a plan says. Adds up the time of pages and of tails."""
    for leg in plan.legs:
        start = perf_counter()
        copier.copy(plan.direction, leg)
        what = leg.kind.plural
        seconds[what] = seconds.get(what, 0.0) + perf_counter() - start


def make_controller(
    copier: str, device: Memory, host: HostMemory, executors: Mapping[Direction, Executor] | None = None
) -> Controller:
    """`copier` is a name of the settings. A `ConfigError` says why it can not copy between these memories."""
    if device.device.type == "cuda":
        from tiercel.transfer.cuda import CudaController  # here: a CPU needs none of it

        return CudaController(device, host, copier)
    return LocalController(make_copier(copier, device, host), executors)
