"""What may leave a tier, the first to go first.

`Candidates` is a heap with one entry per page or tail. The rank of an entry may be stale, but only too low,
because ranks never fall (see `policy.evict`). An entry that reaches the top with an old rank sinks to its
right position. An entry that may not leave now is dropped, and is offered again when it becomes free. So no
step looks at all leaves; a sweep now and then keeps the heap at most twice as long as it must be.

A cold path leaves leaf by leaf: each page that leaves makes its parent the coldest of all. Such an entry
waits in front of the heap, where it is taken again without moving the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

from tiercel.policy.evict import EvictPolicy, Rank
from tiercel.tree.node import Item

SWEEP_AT_LEAST = 64


class Candidates:
    """Pages and tails for which `ready` holds, in the order of a policy."""

    def __init__(self, policy: EvictPolicy, ready: Callable[[Any], bool]) -> None:
        self._rank = policy.rank
        self.ready = ready
        self._front: tuple[Rank, int, Item] | None = None
        self._heap: list[tuple[Rank, int, Item]] = []
        self._members: set[Item] = set()
        self._serial = 0
        self._sweep_at = SWEEP_AT_LEAST

    def offer(self, item: Item) -> None:
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
                self.sweep()

    def coldest(self) -> Item | None:
        """The next to leave; it stays among the candidates. None when nothing may leave."""
        if self._front is not None:
            rank, _, item = self._front
            colder = not self._heap or self._front < self._heap[0]
            if colder and self.ready(item) and self._rank(item) == rank:
                return item
            self._push_front()
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

    def pop(self) -> Item | None:
        item = self.coldest()
        if item is not None:
            if self._front is not None:
                self._front = None
            else:
                heappop(self._heap)
            self._members.discard(item)
        return item

    def _push_front(self) -> None:
        if self._front is not None:
            heappush(self._heap, self._front)
            self._front = None

    def sweep(self) -> None:
        """Drop what may not leave now. Done when the heap has doubled: a constant time for each entry."""
        self._push_front()
        self._heap = [entry for entry in self._heap if self.ready(entry[2])]
        heapify(self._heap)
        self._members = {item for _, _, item in self._heap}
        self._sweep_at = max(SWEEP_AT_LEAST, 2 * len(self._heap))

    def __contains__(self, item: object) -> bool:
        return item in self._members

    def __iter__(self) -> Iterator[Item]:
        return iter(self._members)


class Doubles:
    """What device and host can both read: the first host copies to leave when the host is full.

    Those that the store has as well go before the others, and may go for less: nothing is lost with them.
    The latest goes first: the device will not need its host copy for longest.
    """

    def __init__(self) -> None:
        self._stored: dict[Item, None] = {}
        self._others: dict[Item, None] = {}

    def add(self, item: Item) -> None:
        """Also when it has become known whether the store has the item."""
        self.discard(item)
        (self._stored if item.stored else self._others)[item] = None

    def discard(self, item: Item) -> None:
        self._stored.pop(item, None)
        self._others.pop(item, None)

    def pop(self) -> Item | None:
        return self.pop_stored() or (self._others.popitem()[0] if self._others else None)

    def pop_oldest(self) -> Item | None:
        oldest = next(iter(self), None)
        if oldest is not None:
            self.discard(oldest)
        return oldest

    def pop_stored(self) -> Item | None:
        return self._stored.popitem()[0] if self._stored else None

    def __contains__(self, item: Item) -> bool:
        return item in self._stored or item in self._others

    def __iter__(self) -> Iterator[Item]:
        yield from self._stored
        yield from self._others

    def check(self) -> None:
        assert all(item.stored for item in self._stored) and not any(item.stored for item in self._others)
