"""Loads and saves between device and host: queued since the last step, or sent.

    queue ──► queued ── send: a plan per direction ──► sent ── landed ──► the tree knows
              `batch`                                  ticket

The loads of one step travel together, so requests of one step may share what is queued. A load that was sent
can not be joined any more: a request that needs its pages waits. Saves are sent oldest first, up to a budget
of bytes for each step: a device that copies at full rate computes more slowly.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from tiercel.cache.request import Request, Transfer
from tiercel.errors import TransferError
from tiercel.spec.cache_spec import CacheSpec
from tiercel.transfer.controller import Controller
from tiercel.transfer.plan import NO_PLACE, Direction, Plan
from tiercel.tree.node import Move, Page, Tail
from tiercel.types import Kind


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

    def __init__(
        self, controller: Controller | None, counters: Counter[str], spec: CacheSpec, save_step_bytes: int
    ) -> None:
        self.controller = controller
        self._spec = spec
        self._save_step_bytes = save_step_bytes
        self.batch = 1
        """Number of the loads that are queued now (`tree.node`)."""
        self._counters = counters
        self._queued: dict[Direction, deque[Flight]] = {direction: deque() for direction in Direction}
        self._sent: dict[int, Flight] = {}
        self.parts_loaded = [0] * len(spec.pools)
        """Of how many pages loads have brought the part in each pool: one of two parts may stay away."""

    @property
    def busy(self) -> bool:
        return bool(self._sent) or any(flight.moves for queue in self._queued.values() for flight in queue)

    def queue(
        self, direction: Direction, moves: Iterable[Move], waits: Request | Transfer | None = None
    ) -> None:
        """Have a later step send these moves. `waits` is told when all sent with them has landed."""
        waiting = [] if waits is None else [waits]
        self._queued[direction].append(Flight(direction, list(moves), waiting))

    def landed(self) -> list[Flight]:
        """Count and return flights that ended, each direction in the order it was sent."""
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
        self._counters[f"{word}s"] += 1
        for kind in Kind:
            self._counters[f"{kind.plural}_{done}"] += sum(move.item.kind is kind for move in flight.moves)
        if self._spec.second and flight.direction is Direction.LOAD:
            pages = (move.near for move in flight.moves if move.item.kind is Kind.PAGE)
            for pool, places in enumerate(zip_longest(*pages, fillvalue=NO_PLACE)):
                self.parts_loaded[pool] += len(places) - places.count(NO_PLACE)

    @property
    def has_landed(self) -> bool:
        return self.controller is not None and self.controller.has_landed

    def send(self) -> None:
        """Send one load of everything queued, and one save."""
        for direction in Direction:
            self._send(direction)

    def send_saves(self) -> None:
        """Send one save of what is queued, for places that somebody waits for."""
        self._send(Direction.SAVE)

    def send_loads(self) -> None:
        """Send one load of everything queued, for a step that waits for it layer by layer."""
        self._send(Direction.LOAD, layered=True)

    def _send(self, direction: Direction, *, layered: bool = False) -> None:
        if not self._queued[direction] or not (flight := self._take(direction)).moves:
            return
        assert self.controller is not None
        self.batch += direction is Direction.LOAD
        pages = [(m.near, m.host) for m in flight.moves if isinstance(m.item, Page)]
        tails = [(m.near, m.host) for m in flight.moves if isinstance(m.item, Tail)]
        ticket = self.controller.submit(Plan.of(direction, pages, tails), layered=layered)
        self._sent[ticket.number] = flight
        for request in flight.waiting:
            if isinstance(request, Request):
                request.load = ticket.number

    def _take(self, direction: Direction) -> Flight:
        """The moves queued first; saves up to the budget. Moves with a waiting caller stay together."""
        taken, queue, room = Flight(direction), self._queued[direction], self._save_step_bytes
        while queue and (direction is Direction.LOAD or room > 0):
            flight = queue.popleft()
            moves = flight.moves
            if direction is Direction.SAVE:
                count = self._fitting(moves, room) if not flight.waiting else len(moves)
                room -= sum(self._spec.item_bytes(move.item.kind) for move in moves[:count])
                if count < len(moves):
                    queue.appendleft(Flight(direction, moves[count:]))
                    moves = moves[:count]
            taken.moves += moves
            taken.waiting += flight.waiting
        assert taken.moves or not taken.waiting, "who waits for nothing would wait for ever"
        return taken

    def _fitting(self, moves: Sequence[Move], room: int) -> int:
        """How many of the first moves are sent now. The last one may go beyond `room`."""
        for count, move in enumerate(moves):
            if room <= 0:
                return count
            room -= self._spec.item_bytes(move.item.kind)
        return len(moves)

    def moves(self) -> Iterator[Move]:
        """Everything queued or sent."""
        for flight in (*chain.from_iterable(self._queued.values()), *self._sent.values()):
            yield from flight.moves

    def close(self) -> None:
        if self.controller is not None:
            self.controller.close()
