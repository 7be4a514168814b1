"""Loads and saves between device and host: queued since the last step, or sent.

    queue ──► queued ── send: a plan per direction ──► sent ── landed ──► the tree's books
              `batch`                                  ticket

The loads of one step travel together, so requests of one step may share what is queued. A load that was sent
can not be joined any more: a request that needs its pages waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tiercel.cache.request import Request, Transfer
from tiercel.errors import TransferError
from tiercel.transfer.controller import Controller
from tiercel.transfer.plan import Direction, Plan
from tiercel.tree.node import Move, Page, Tail


@dataclass(eq=False)
class Flight:
    """Pages and tails that move together, and the requests or transfers that wait for them. They all succeed
    or all fail."""

    direction: Direction
    moves: list[Move] = field(default_factory=list)
    waiting: list[Request | Transfer] = field(default_factory=list)
    error: TransferError | None = None


class Flights:
    """The bookkeeping of transfers. Without a controller (no host tier) nothing is ever queued."""

    def __init__(self, controller: Controller | None, counters: Counter[str]) -> None:
        self.controller = controller
        self.batch = 1
        """Number of the loads that are queued now (`tree.node`)."""
        self._counters = counters
        self._queued = {direction: Flight(direction) for direction in Direction}
        self._sent: dict[int, Flight] = {}

    @property
    def busy(self) -> bool:
        return bool(self._sent) or any(flight.moves for flight in self._queued.values())

    def queue(
        self, direction: Direction, moves: Iterable[Move], waits: Request | Transfer | None = None
    ) -> None:
        """To be sent by the next step. `waits` is answered when everything queued with it has landed."""
        flight = self._queued[direction]
        flight.moves.extend(moves)
        if waits is not None:
            flight.waiting.append(waits)

    def landed(self) -> list[Flight]:
        """What ended since the last call, each direction in the order it was sent. It is counted."""
        if not self._sent:
            return []
        assert self.controller is not None
        ended = []
        for done in self.controller.poll():
            flight = self._sent.pop(done.ticket.number)
            flight.error = done.error
            self._count(flight)
            ended.append(flight)
        return ended

    def _count(self, flight: Flight) -> None:
        word, done = ("load", "loaded") if flight.direction is Direction.LOAD else ("save", "saved")
        if flight.error is not None:
            self._counters[f"{word}s_failed"] += 1
            return
        pages = sum(isinstance(move.item, Page) for move in flight.moves)
        self._counters[f"{word}s"] += 1
        self._counters[f"pages_{done}"] += pages
        self._counters[f"tails_{done}"] += len(flight.moves) - pages

    @property
    def has_landed(self) -> bool:
        return self.controller is not None and self.controller.has_landed

    def send(self) -> None:
        """Everything queued, merged into one load and one save."""
        for direction, flight in self._queued.items():
            if flight.moves:
                assert self.controller is not None
                self._queued[direction] = Flight(direction)
                self.batch += direction is Direction.LOAD
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
