"""What is on its way between the tiers: queued since the last step, or sent.

    queue ──► queued ── send: a plan per direction ──► sent ── landed ──► the tree's books
              `batch`                                  ticket

The loads of one step travel together, so requests of one step may share what is queued. What was sent already
can not be joined any more: who wants that waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tiercel.cache.request import Request
from tiercel.cache.transfers import Transfer
from tiercel.errors import TransferError
from tiercel.transfer.controller import Controller
from tiercel.transfer.plan import Direction, Plan
from tiercel.tree.actions import Move
from tiercel.tree.node import Page, Tail


@dataclass
class Flight:
    """Things that move together, and who waits for them."""

    moves: list[Move] = field(default_factory=list)
    waiting: list[Request | Transfer] = field(default_factory=list)


@dataclass(frozen=True)
class Landed:
    """A flight that ended, in one way or the other for all of it."""

    direction: Direction
    flight: Flight
    error: TransferError | None


def count(counters: Counter[str], landed: Landed) -> None:
    """Add what has landed to a cache's counters."""
    word, done = ("load", "loaded") if landed.direction is Direction.LOAD else ("save", "saved")
    if landed.error is not None:
        counters[f"{word}s_failed"] += 1
        return
    pages = sum(isinstance(move.item, Page) for move in landed.flight.moves)
    counters[f"{word}s"] += 1
    counters[f"pages_{done}"] += pages
    counters[f"tails_{done}"] += len(landed.flight.moves) - pages


class Flights:
    """The bookkeeping of transfers. Without a controller (no host tier) nothing is ever queued."""

    def __init__(self, controller: Controller | None) -> None:
        self.controller = controller
        self.batch = 1
        """Number of the loads that are queued now (`tree.node`)."""
        self._queued = {direction: Flight() for direction in Direction}
        self._sent: dict[int, Flight] = {}

    @property
    def busy(self) -> bool:
        return bool(self._sent) or any(flight.moves for flight in self._queued.values())

    def queue(
        self, direction: Direction, moves: Iterable[Move], waits: Request | Transfer | None = None
    ) -> None:
        """To be sent by the next step. Who waits is told when all that is queued with it has landed."""
        flight = self._queued[direction]
        flight.moves.extend(moves)
        if waits is not None:
            flight.waiting.append(waits)

    def landed(self) -> list[Landed]:
        """What ended since the last call, each direction in the order it was sent."""
        if not self._sent:
            return []
        assert self.controller is not None
        return [
            Landed(done.ticket.plan.direction, self._sent.pop(done.ticket.number), done.error)
            for done in self.controller.poll()
        ]

    @property
    def has_landed(self) -> bool:
        """Whether something sent has ended."""
        return self.controller is not None and self.controller.has_landed

    def send(self) -> None:
        """Everything queued, merged into one load and one save."""
        for direction, flight in self._queued.items():
            if flight.moves:
                self._queued[direction] = Flight()
                self.batch += direction is Direction.LOAD
                assert self.controller is not None
                pages = [(m.device, m.host) for m in flight.moves if isinstance(m.item, Page)]
                tails = [(m.device, m.host) for m in flight.moves if isinstance(m.item, Tail)]
                ticket = self.controller.submit(Plan.of(direction, pages, tails))
                self._sent[ticket.number] = flight

    def moves(self) -> Iterator[Move]:
        """Everything queued or sent."""
        for flight in (*self._queued.values(), *self._sent.values()):
            yield from flight.moves

    def close(self) -> None:
        if self.controller is not None:
            self.controller.close()
