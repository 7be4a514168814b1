"""The things of one tier that may be evicted, coldest first.

A heap with one entry per thing. An entry's rank may be stale, but only too low, because ranks never fall (see
`policy.evict`): an entry that reaches the top with an old rank sinks to its place, one that may no longer go
is dropped and offered again by whoever frees it. So no step looks at all leaves; a sweep now and then keeps
the line no longer than twice what stands in it rightly.

A cold path leaves leaf by leaf: each page that goes makes its parent the coldest of all. Such an entry waits
in front of the heap, where it is taken again without moving the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from tiercel.policy.evict import EvictPolicy, Rank
from tiercel.tree.node import Cached

AnyItem = TypeVar("AnyItem", bound=Cached)

SWEEP_AT_LEAST = 64


class Candidates(Generic[AnyItem]):
    """Things for which `ready` holds, in the order of a policy."""

    def __init__(self, policy: EvictPolicy, ready: Callable[[AnyItem], bool]) -> None:
        self._rank = policy.rank
        self.ready = ready
        self._front: tuple[Rank, int, AnyItem] | None = None
        self._heap: list[tuple[Rank, int, AnyItem]] = []
        self._members: set[AnyItem] = set()
        self._serial = 0
        self._sweep_at = SWEEP_AT_LEAST

    def offer(self, item: AnyItem) -> None:
        """To be called whenever an item may have become ready."""
        if item in self._members or not self.ready(item):
            return
        self._members.add(item)
        self._serial += 1
        entry = (self._rank(item), self._serial, item)
        if self._front is None and (not self._heap or entry < self._heap[0]):
            self._front = entry
        else:
            heappush(self._heap, entry)
            if len(self._heap) > self._sweep_at:
                self._sweep()

    def coldest(self) -> AnyItem | None:
        """The next to go, left where it is; None when nothing may go."""
        if self._front is not None:
            rank, _, item = self._front
            colder = not self._heap or self._front < self._heap[0]
            if colder and self.ready(item) and self._rank(item) == rank:
                return item
            self._close_ranks()
        heap = self._heap
        while heap:
            rank, serial, item = heap[0]
            if not self.ready(item):
                heappop(heap)
                self._members.discard(item)
                continue
            now = self._rank(item)
            if now == rank:
                return item
            assert now > rank, "a rank never falls (policy.evict)"  # type: ignore[operator]
            heapreplace(heap, (now, serial, item))
        return None

    def pop(self) -> AnyItem | None:
        item = self.coldest()
        if item is not None:
            if self._front is not None:
                self._front = None
            else:
                heappop(self._heap)
            self._members.discard(item)
        return item

    def _close_ranks(self) -> None:
        if self._front is not None:
            heappush(self._heap, self._front)
            self._front = None

    def _sweep(self) -> None:
        """Let go of what may not go now, or is gone. After twice as many entries, so a constant for each."""
        self._close_ranks()
        self._heap = [entry for entry in self._heap if self.ready(entry[2])]
        heapify(self._heap)
        self._members = {item for _, _, item in self._heap}
        self._sweep_at = max(SWEEP_AT_LEAST, 2 * len(self._heap))

    def __contains__(self, item: object) -> bool:
        return item in self._members

    def __iter__(self) -> Iterator[AnyItem]:
        return iter(self._members)
