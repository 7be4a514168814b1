"""The controller: plans go in, copies run elsewhere, and what ended comes out in order.

    the caller's thread                 the direction's worker
    ───────────────────                 ──────────────────────
    submit(plan) ─► Ticket ───────────► leg of pages, leg of tails
    poll() ─► [Done(ticket, None)] ◄─── all legs copied
    poll() ─► [Done(ticket, error)] ◄── an error anywhere

Loads do not wait for saves nor saves for loads. Within a direction transfers may end in any order, and are
published in the order they were submitted, so a later page is never visible before an earlier one.

A controller merges nothing (one plan is one step's work) and knows no owners of ids: places stay reserved
until `poll` has named their ticket. `LocalController` copies in threads of this process; `transfer.cuda`
queues copies on a device; `transfer.remote` hands plans to processes that have the memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Condition
from time import perf_counter
from typing import Protocol

from tiercel.errors import TransferError
from tiercel.memory.buffers import HostMemory, Memory
from tiercel.transfer.copier import Copier, make_copier
from tiercel.transfer.plan import Direction, Plan
from tiercel.types import Kind

Seconds = Mapping[str, float]
"""Time spent copying `pages` and `tails`."""


@dataclass(frozen=True)
class Ticket:
    """A plan on its way."""

    number: int
    plan: Plan
    layered: bool = False
    """Its reader waits for it at once, layer by layer (`Controller.ready`)."""


@dataclass(frozen=True)
class Done:
    """A plan that ended. With an error its targets hold undefined bytes; without, every byte is there."""

    ticket: Ticket
    error: TransferError | None
    seconds: Seconds = field(default_factory=dict)


class Ready(Protocol):
    """When the layers of a load may be read."""

    def wait(self, layer: int) -> None:
        """What the caller queues on its device from now on runs after this layer's bytes are there. Tails are
        there with the first layer."""


class Controller(Protocol):
    """Carries out plans. One thread calls `submit`, `poll` and `close`."""

    @property
    def how(self) -> str:
        """The way of copying, in words: what `auto` chose."""

    @property
    def in_order(self) -> bool:
        """Whether copies and computing are queued on one device: `ready` can be asked before a load has
        ended."""

    @property
    def tickets(self) -> Tickets:
        """Plans under way and plans that have ended."""

    def submit(self, plan: Plan, *, layered: bool = False) -> Ticket:
        """Have a plan carried out. Never blocks. `layered`: its reader waits for it at once, layer by layer
        (`ready`)."""

    def poll(self) -> list[Done]:
        """What ended since the last poll, per direction in the order of submission. Never blocks."""

    @property
    def has_landed(self) -> bool:
        """Whether the next `poll` names a transfer."""

    def ready(self, number: int) -> Ready:
        """When the layers of the load with this number may be read. Only where `in_order` holds."""

    def close(self) -> None:
        """Wait for everything in flight; `poll` still tells how it ended. May be called again."""


class Tickets:
    """The plans of one controller: numbered as they come, published in order. `end` may be called by any
    thread; all else belongs to the controller's own."""

    def __init__(self) -> None:
        self.landed = Condition()
        """Notified whenever a transfer ends."""
        self.seconds = {direction: {kind.plural: 0.0 for kind in Kind} for direction in Direction}
        """Time spent copying pages and tails."""
        self._queues: dict[Direction, deque[Ticket]] = {direction: deque() for direction in Direction}
        self._ended: dict[int, Done] = {}
        self._given = 0

    def give(self, plan: Plan, *, layered: bool = False) -> Ticket:
        """A ticket for a plan. `end` is called once, whatever happens."""
        ticket = Ticket(self._given, plan, layered)
        self._queues[plan.direction].append(ticket)
        self._given += 1
        return ticket

    def end(self, ticket: Ticket, cause: BaseException | None, seconds: Seconds | None = None) -> None:
        error = None
        if cause is not None:
            error = TransferError(f"{ticket.plan.direction.value} {ticket.number} failed: {cause!r}")
            error.__cause__ = cause
        with self.landed:
            self._ended[ticket.number] = Done(ticket, error, seconds or {})
            self.landed.notify_all()

    def take(self) -> list[Done]:
        """What ended since the last call, per direction in the order of submission."""
        ended = []
        for direction, queue in self._queues.items():
            while queue and queue[0].number in self._ended:
                done = self._ended.pop(queue.popleft().number)
                for what, seconds in done.seconds.items():
                    self.seconds[direction][what] += seconds
                ended.append(done)
        return ended

    @property
    def has_landed(self) -> bool:
        """Whether the next `take` names a transfer."""
        return any(queue and queue[0].number in self._ended for queue in self._queues.values())

    def under_way(self) -> Iterator[deque[Ticket]]:
        """Tickets that were not taken, of each direction in its order."""
        return iter(self._queues.values())


class LocalController:
    """Copies in this process.

    `executors` gives each direction its worker, and `close` shuts the workers down. The default is one thread
    for each direction.
    """

    in_order = False

    def __init__(self, copier: Copier, executors: Mapping[Direction, Executor] | None = None) -> None:
        self.tickets = Tickets()
        self.poll = self.tickets.take
        self._copier = copier
        self.how = copier.name
        self._executors = executors or {
            direction: ThreadPoolExecutor(1, thread_name_prefix=f"tiercel-{direction.value}")
            for direction in Direction
        }

    def submit(self, plan: Plan, *, layered: bool = False) -> Ticket:
        """All of it is copied at once. A worker that takes no work fails the plan."""
        ticket = self.tickets.give(plan, layered=layered)
        try:
            future = self._executors[plan.direction].submit(carry, self._copier, plan)
        except RuntimeError as refusal:  # what an executor that is shut down, or can start no thread, raises
            self.tickets.end(ticket, refusal)
        else:
            future.add_done_callback(partial(self._land, ticket))
        return ticket

    @property
    def has_landed(self) -> bool:
        return self.tickets.has_landed

    def ready(self, number: int) -> Ready:
        raise NotImplementedError(f"load {number} is copied beside the device's work")

    def close(self) -> None:
        for executor in self._executors.values():
            executor.shutdown(wait=True)

    def _land(self, ticket: Ticket, future: Future[Seconds]) -> None:
        """A transfer has ended: by itself, with an error (I13), or cancelled by its executor."""
        if future.cancelled():
            self.tickets.end(ticket, CancelledError())
        elif (error := future.exception()) is not None:
            self.tickets.end(ticket, error)
        else:
            self.tickets.end(ticket, None, future.result())


def carry(copier: Copier, plan: Plan) -> Seconds:
    """Carry out a plan. Returns the time of pages and of tails."""
    seconds = {kind.plural: 0.0 for kind in Kind}
    for leg in plan.legs:
        start = perf_counter()
        copier.copy(plan.direction, leg)
        seconds[leg.kind.plural] += perf_counter() - start
    return seconds


def make_controller(
    copier: str, device: Memory, host: HostMemory, executors: Mapping[Direction, Executor] | None = None
) -> Controller:
    """`copier` is a name of the settings. A `ConfigError` says why it can not copy between these memories."""
    if device.device.type == "cuda":
        from tiercel.transfer.cuda import CudaController  # here: a CPU needs none of it

        return CudaController(device, host, copier)
    return LocalController(make_copier(copier, device, host), executors)
