"""The things of one tier that may be evicted, coldest first.

A heap with one entry per thing. An entry's rank may be stale, but only too low, because ranks never fall (see
`policy.evict`): an entry that reaches the top with an old rank sinks to its place, one that may no longer go
is dropped and offered again by whoever frees it. So every step is O(log n) and nothing is ever rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from typing import Generic, TypeVar

from tiercel.policy.evict import EvictPolicy, Rank
from tiercel.tree.node import Cached

AnyItem = TypeVar("AnyItem", bound=Cached)


class Candidates(Generic[AnyItem]):
    """Things for which `ready` holds, in the order of a policy."""

    def __init__(self, policy: EvictPolicy, ready: Callable[[AnyItem], bool]) -> None:
        self._rank = policy.rank
        self.ready = ready
        self._heap: list[tuple[Rank, int, AnyItem]] = []
        self._members: set[AnyItem] = set()
        self._serial = 0

    def offer(self, item: AnyItem) -> None:
        """To be called whenever an item may have become ready."""
        if item not in self._members and self.ready(item):
            self._members.add(item)
            self._serial += 1
            heappush(self._heap, (self._rank(item), self._serial, item))

    def coldest(self) -> AnyItem | None:
        """The next to go, left where it is; None when nothing may go."""
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
            heappop(self._heap)
            self._members.discard(item)
        return item

    def __contains__(self, item: object) -> bool:
        return item in self._members
