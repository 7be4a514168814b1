"""The controller: plans go in, copies run elsewhere, what ended comes out in order.

    the caller's thread                 the direction's worker
    ───────────────────                 ──────────────────────
    submit(plan) ─► Ticket ───────────► layer 0: every leg ─► gate.open(0)
                                        layer 1: every leg ─► gate.open(1)
    reader: gate.wait(i) ◄──────────────  …
                                        last layer          ─► landed
    poll() ─► [Done(ticket, None)] ◄──┘
                                        an error anywhere   ─► gate.fail ─► landed
    poll() ─► [Done(ticket, error)] ◄─┘

Loads do not wait for saves nor saves for loads. Within a direction transfers may land in any order, and are
published in the order they were submitted, so a later page is never visible before an earlier one.

A controller merges nothing (one plan is one step's work) and never asks who owns an id: places stay
reserved until `poll` has named their ticket. `LocalController` copies in threads of this process;
`transfer.remote` hands plans to processes that have the memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Condition
from time import perf_counter

from tiercel.errors import TransferError
from tiercel.transfer.copier import Copier
from tiercel.transfer.gate import LayerGate
from tiercel.transfer.plan import Direction, PageLeg, Plan


@dataclass(frozen=True, eq=False)
class Ticket:
    """A plan on its way. The gate opens as its layers arrive (of a save: as they have left)."""

    number: int
    plan: Plan
    gate: LayerGate

    @property
    def direction(self) -> Direction:
        return self.plan.direction


@dataclass(frozen=True, eq=False)
class Done:
    """A plan that ended. With an error its targets hold anything; without, every byte is there."""

    ticket: Ticket
    error: TransferError | None


@dataclass(eq=False)
class Carried:
    """A ticket, and how it ended, if it has."""

    ticket: Ticket
    done: Done | None = None


class Controller(ABC):
    """Keeps plans in order. `submit`, `poll` and `close` belong to one thread; gates to any.

    `landed` is told whenever a transfer ends.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(sorted(layers))
        self.landed = Condition()
        self.seconds: dict[Direction, dict[str, float]] = {direction: {} for direction in Direction}
        """Time spent copying pages and tails."""
        self._queues: dict[Direction, deque[Carried]] = {direction: deque() for direction in Direction}
        self._submitted = 0
        self._published = 0

    def submit(self, plan: Plan) -> Ticket:
        """Have a plan carried out. Never blocks."""
        flight = Carried(Ticket(self._submitted, plan, LayerGate(self.layers)))
        self._queues[plan.direction].append(flight)
        self._submitted += 1
        self._start(flight)
        return flight.ticket

    @abstractmethod
    def _start(self, flight: Carried) -> None:
        """Hand it to whoever does it. Whatever becomes of it, `_end` is called once."""

    def poll(self) -> list[Done]:
        """What ended since the last poll, per direction in the order of submission. Never blocks."""
        if self._submitted == self._published:
            return []
        ended = []
        for queue in self._queues.values():
            while queue and (done := queue[0].done) is not None:
                queue.popleft()
                ended.append(done)
        self._published += len(ended)
        return ended

    @property
    def has_landed(self) -> bool:
        """Whether a transfer has ended that no poll has named yet."""
        return any(queue and queue[0].done for queue in self._queues.values())

    @abstractmethod
    def close(self) -> None:
        """Wait for everything in flight; `poll` still tells how it ended. May be called again."""

    def _end(self, flight: Carried, cause: BaseException | None) -> None:
        ticket, error = flight.ticket, None
        if cause is not None:
            error = TransferError(f"{ticket.direction.value} {ticket.number} failed: {cause!r}")
            error.__cause__ = cause
            ticket.gate.fail(error)
        with self.landed:
            flight.done = Done(ticket, error)
            self.landed.notify_all()


class LocalController(Controller):
    """Copies in this process.

    `executors` gives each direction its worker, and gives it away: `close` shuts it down. The default is one
    thread each.
    """

    def __init__(self, copier: Copier, executors: Mapping[Direction, Executor] | None = None) -> None:
        super().__init__(copier.layers)
        self._copier = copier
        self._executors = executors or {direction: _worker(direction) for direction in Direction}

    def _start(self, flight: Carried) -> None:
        """A worker that takes no work fails the plan."""
        try:
            future = self._executors[flight.ticket.direction].submit(self._carry, flight.ticket)
        except RuntimeError as refusal:  # what an executor that is shut down, or can start no thread, raises
            self._end(flight, refusal)
        else:
            future.add_done_callback(partial(self._land, flight))

    def close(self) -> None:
        for executor in self._executors.values():
            executor.shutdown(wait=True)

    def _carry(self, ticket: Ticket) -> None:
        """The worker's work. It may raise anything: the future keeps it, and the worker goes on (I13)."""
        seconds = self.seconds[ticket.direction]
        carry(self._copier, self.layers, ticket.plan, ticket.gate.open, seconds)

    def _land(self, flight: Carried, future: Future[None]) -> None:
        """A transfer ended in whatever way: by itself, by an error, or cancelled by its executor."""
        self._end(flight, CancelledError() if future.cancelled() else future.exception())


def carry(
    copier: Copier,
    layers: Sequence[int],
    plan: Plan,
    opened: Callable[[int], None],
    seconds: dict[str, float],
) -> None:
    """Do what a plan says, layer by layer; `opened` hears of each. Adds up the time of pages and of tails."""
    for layer in layers:
        for leg in plan.legs:
            start = perf_counter()
            copier.copy(plan.direction, leg, layer)
            what = "pages" if isinstance(leg, PageLeg) else "tails"
            seconds[what] = seconds.get(what, 0.0) + perf_counter() - start
        opened(layer)


def _worker(direction: Direction) -> Executor:
    return ThreadPoolExecutor(1, thread_name_prefix=f"tiercel-{direction.value}")
