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

The controller merges nothing (one plan is one step's work) and never asks who owns an id: places stay
reserved until `poll` has named their ticket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
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
class _Flight:
    ticket: Ticket
    done: Done | None = None


class Controller:
    """Runs plans. `submit`, `poll` and `close` belong to one thread; gates to any.

    `executors` gives each direction its worker, and gives it away: `close` shuts it down. The default is one
    thread each. `landed` is told whenever a transfer ends.
    """

    def __init__(
        self,
        copier: Copier,
        layers: Sequence[int],
        executors: Mapping[Direction, Executor] | None = None,
        landed: Condition | None = None,
    ) -> None:
        self._copier = copier
        self._layers = tuple(sorted(layers))
        self._executors = executors or {direction: _worker(direction) for direction in Direction}
        self._queues: dict[Direction, deque[_Flight]] = {direction: deque() for direction in Direction}
        self._landed = landed or Condition()
        self._submitted = 0
        self._published = 0
        self.seconds: dict[Direction, dict[str, float]] = {direction: {} for direction in Direction}
        """Time spent copying pages and tails. Each direction's worker writes its own."""

    def submit(self, plan: Plan) -> Ticket:
        """Hand a plan to its direction's worker. Never blocks; a worker that takes no work fails the plan."""
        flight = _Flight(Ticket(self._submitted, plan, LayerGate(self._layers)))
        self._queues[plan.direction].append(flight)
        self._submitted += 1
        try:
            future = self._executors[plan.direction].submit(self._carry, flight.ticket)
        except RuntimeError as refusal:  # what an executor that is shut down, or can start no thread, raises
            self._end(flight, refusal)
        else:
            future.add_done_callback(partial(self._land, flight))
        return flight.ticket

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

    def close(self) -> None:
        """Wait for everything in flight; `poll` still tells how it ended. May be called again."""
        for executor in self._executors.values():
            executor.shutdown(wait=True)

    def _carry(self, ticket: Ticket) -> None:
        """The worker's work. It may raise anything: the future keeps it, and the worker goes on (I13)."""
        seconds = self.seconds[ticket.direction]
        for layer in self._layers:
            for leg in ticket.plan.legs:
                start = perf_counter()
                self._copier.copy(ticket.direction, leg, layer)
                what = "pages" if isinstance(leg, PageLeg) else "tails"
                seconds[what] = seconds.get(what, 0.0) + perf_counter() - start
            ticket.gate.open(layer)

    def _land(self, flight: _Flight, future: Future[None]) -> None:
        """A transfer ended in whatever way: by itself, by an error, or cancelled by its executor."""
        self._end(flight, CancelledError() if future.cancelled() else future.exception())

    def _end(self, flight: _Flight, cause: BaseException | None) -> None:
        ticket, error = flight.ticket, None
        if cause is not None:
            error = TransferError(f"{ticket.direction.value} {ticket.number} failed: {cause!r}")
            error.__cause__ = cause
            ticket.gate.fail(error)
        with self._landed:
            flight.done = Done(ticket, error)
            self._landed.notify_all()


def _worker(direction: Direction) -> Executor:
    return ThreadPoolExecutor(1, thread_name_prefix=f"tiercel-{direction.value}")
