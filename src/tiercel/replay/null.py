"""The shipping cache over nothing: places without bytes, and copies that take time on a clock.

    TieredCache ── plans ──► ClockController      a copy has landed after bytes ÷ rate
                ── store operations ──► `replay.store`

Everything that decides (tree, pools, policies, flights, fetches) is the code that serves. The same calls in
the same order give the same answers, always: there are no threads here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tiercel.cache import TieredCache
from tiercel.cache.memories import Memories
from tiercel.config import CacheConfig
from tiercel.errors import ConfigError
from tiercel.spec.cache_spec import CacheSpec
from tiercel.transfer.controller import Done, Ready, Ticket, Tickets
from tiercel.transfer.plan import Direction, Plan


class Clock:
    """Simulated seconds, and when the next transfer on the clock ends."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ends: list[Callable[[], float | None]] = []
        """For each thing that takes time on this clock: when its next piece ends."""

    def __call__(self) -> float:
        return self.now_s

    def next_s(self) -> float | None:
        """When the next transfer ends; None: none is under way."""
        return min((at_s for end in self.ends if (at_s := end()) is not None), default=None)


class Pipe:
    """Work that is done piece by piece, in order, at a rate."""

    def __init__(self, clock: Clock, bytes_s: float) -> None:
        self._clock, self._bytes_s = clock, bytes_s
        self._free_s = 0.0

    def send(self, size: int) -> tuple[float, float]:
        """When `size` bytes begin and end to move, if they are sent now."""
        begin_s = max(self._clock.now_s, self._free_s)
        self._free_s = begin_s + size / self._bytes_s
        return begin_s, self._free_s


class ClockController:
    """Moves nothing. A plan has ended when its bytes would have been copied."""

    how = "a clock"
    in_order = False

    def __init__(self, spec: CacheSpec, clock: Clock, bytes_s: float) -> None:
        self.tickets = Tickets()
        self._spec = spec
        self._clock = clock
        self._pipes = {direction: Pipe(clock, bytes_s) for direction in Direction}
        self._due: dict[Direction, deque[tuple[float, float, Ticket]]] = {each: deque() for each in Direction}
        clock.ends.append(self._next_s)

    def submit(self, plan: Plan, *, layered: bool = False) -> Ticket:
        ticket = self.tickets.give(plan, layered=layered)
        size = sum(self._spec.item_bytes(leg.kind) * len(leg.device) for leg in plan.legs)
        begin_s, end_s = self._pipes[plan.direction].send(size)
        self._due[plan.direction].append((end_s, begin_s, ticket))
        return ticket

    def poll(self) -> list[Done]:
        for due in self._due.values():
            while due and due[0][0] <= self._clock.now_s:
                end_s, begin_s, ticket = due.popleft()
                self.tickets.end(ticket, None, {"pages": end_s - begin_s})
        return self.tickets.take()

    @property
    def has_landed(self) -> bool:
        return any(due and due[0][0] <= self._clock.now_s for due in self._due.values())

    def ready(self, number: int) -> Ready:
        raise NotImplementedError(f"load {number} is on a clock")

    def _next_s(self) -> float | None:
        return min((due[0][0] for due in self._due.values() if due), default=None)

    def close(self) -> None:
        pass


def null_cache(spec: CacheSpec, config: CacheConfig, clock: Clock, link_bytes_s: float) -> TieredCache:
    """A `TieredCache` of any size without memory for bytes."""
    pages = config.host_bytes // spec.place_bytes
    least = max(1, spec.places_per_tail)
    if config.host_bytes and pages < least:
        why = f"a page and a tail take {least * spec.place_bytes:,} B"
        raise ConfigError("host_bytes", config.host_bytes, why)
    controller = ClockController(spec, clock, link_bytes_s) if pages else None
    return TieredCache(spec, config, Memories(host_pages=pages, controller=controller))
