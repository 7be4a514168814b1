"""What may leave a tier, the first to go first.

`Candidates` is a heap with one entry per page or tail. The rank of an entry may be stale, but only too low,
because ranks never fall (see `policy.evict`). An entry that reaches the top with an old rank sinks to its
right position. An entry that may not leave now is dropped, and is offered again when it becomes free. So no
step looks at all leaves.

A cold path leaves leaf by leaf: each page that leaves makes its parent the coldest of all. Such an entry
waits in front of the heap, where it is taken again without moving the others.

Entries that are of no use any more are swept out, a few whenever an entry is added. So there are at most two
and a half times as many entries as needed, and no step waits for a sweep. An item itself knows whether it has
an entry (`node.Cached`). So there is no table that has to be copied when it is full.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush, heapreplace
from typing import Any

from tiercel.collector import hidden_list, hide
from tiercel.policy.evict import EvictPolicy
from tiercel.tree.node import Item

SWEEP_AT_LEAST = 64
SWEEP_ENTRIES = 4
"""How many entries are looked at when one is added, during a sweep."""

Entry = tuple[Any, int, Item]
"""A rank, a serial number (so that no two entries are equal), and the item."""


class Heap:
    """Entries, the least first. They can be swept a few at a time: `old` has the entries that a sweep has not
    looked at. Its last entry can be taken away without moving the others."""

    __slots__ = ("fresh", "old")

    def __init__(self) -> None:
        self.fresh: list[Entry] = hidden_list()
        self.old: list[Entry] = hidden_list()

    def __len__(self) -> int:
        return len(self.fresh) + len(self.old)

    def __iter__(self) -> Iterator[Entry]:
        yield from self.fresh
        yield from self.old

    def _part(self) -> list[Entry]:
        """The part with the least entry."""
        fresh, old = self.fresh, self.old
        return old if old and (not fresh or old[0] < fresh[0]) else fresh

    def first(self) -> Entry:
        return self._part()[0]

    def push(self, entry: Entry) -> None:
        hide(entry)
        heappush(self.fresh, entry)

    def pop(self) -> None:
        """Drop the first entry."""
        heappop(self._part())

    def replace(self, entry: Entry) -> None:
        """Put another entry in the place of the first."""
        hide(entry)
        heapreplace(self._part(), entry)


class EvictOrder(ABC):
    """Items for which `ready` holds, in the order in which they leave. `place` is the field of an item that
    says whether it has an entry here: 0, or a number."""

    def __init__(self, ready: Callable[[Any], bool], place: str) -> None:
        self.ready = ready
        self._place = place
        self._sweeping: list[Heap] = []
        self._sweep_at = SWEEP_AT_LEAST

    @abstractmethod
    def offer(self, item: Item) -> None:
        """Called whenever an item may have become ready."""

    @abstractmethod
    def coldest(self) -> Item | None:
        """The next to leave; it stays among the candidates. None when nothing may leave."""

    @abstractmethod
    def pop(self) -> Item | None:
        """The next to leave; it is no candidate any more."""

    @abstractmethod
    def _heaps(self) -> Iterable[Heap]: ...

    @abstractmethod
    def _file_again(self, heap: Heap, entry: Entry) -> None:
        """A sweep took an entry out of a heap: put it where it belongs, or drop it."""

    @abstractmethod
    def __len__(self) -> int:
        """How many entries there are, those of no use included."""

    def _sweep_some(self) -> None:
        """Sweep a few entries, because one was added."""
        if self._sweeping:
            self._sweep(SWEEP_ENTRIES)
        elif len(self) > self._sweep_at:
            self._begin_sweep()

    def _begin_sweep(self) -> None:
        self._sweeping = [heap for heap in self._heaps() if heap.fresh]
        for heap in self._sweeping:
            heap.fresh, heap.old = heap.old, heap.fresh

    def _sweep(self, entries: int) -> None:
        sweeping = self._sweeping
        for _ in range(entries):
            while sweeping and not sweeping[-1].old:
                sweeping.pop()
            if not sweeping:
                self._sweep_at = max(SWEEP_AT_LEAST, 2 * len(self))
                return
            self._file_again(sweeping[-1], sweeping[-1].old.pop())

    def sweep(self) -> None:
        """Drop all entries that may not leave now."""
        while self._sweeping:
            self._sweep(SWEEP_ENTRIES)
        self._begin_sweep()
        while self._sweeping:
            self._sweep(SWEEP_ENTRIES)

    def __contains__(self, item: object) -> bool:
        return bool(getattr(item, self._place))

    def __iter__(self) -> Iterator[Item]:
        return (item for heap in self._heaps() for _, _, item in heap if item in self)


class Candidates(EvictOrder):
    """Pages and tails for which `ready` holds, in the order of a policy."""

    def __init__(self, policy: EvictPolicy, ready: Callable[[Any], bool], place: str) -> None:
        super().__init__(ready, place)
        self._rank = policy.rank
        self._front: Entry | None = None
        self._heap = Heap()
        self._serial = 0

    def offer(self, item: Item) -> None:
        if getattr(item, self._place) or not self.ready(item):
            return
        setattr(item, self._place, 1)
        self._serial += 1
        entry = (self._rank(item), self._serial, item)
        if self._front is None and (not len(self._heap) or entry < self._heap.first()):
            self._front = entry
        else:
            self._heap.push(entry)
            self._sweep_some()

    def coldest(self) -> Item | None:
        heap = self._heap
        if self._front is not None:
            rank, _, item = self._front
            colder = not len(heap) or self._front < heap.first()
            if colder and self.ready(item) and self._rank(item) == rank:
                return item
            self._push_front()
        while len(heap):
            rank, serial, item = heap.first()
            if not self.ready(item):
                heap.pop()
                setattr(item, self._place, 0)
                continue
            now = self._rank(item)
            if now == rank:
                return item
            assert now > rank, "a rank never falls (policy.evict)"
            heap.replace((now, serial, item))
        return None

    def pop(self) -> Item | None:
        item = self.coldest()
        if item is not None:
            if self._front is not None:
                self._front = None
            else:
                self._heap.pop()
            setattr(item, self._place, 0)
        return item

    def _push_front(self) -> None:
        if self._front is not None:
            self._heap.push(self._front)
            self._front = None

    def _begin_sweep(self) -> None:
        self._push_front()
        super()._begin_sweep()

    def _heaps(self) -> Iterable[Heap]:
        return (self._heap,)

    def _file_again(self, heap: Heap, entry: Entry) -> None:
        if self.ready(entry[2]):
            heap.push(entry)
        else:
            setattr(entry[2], self._place, 0)

    def __len__(self) -> int:
        return len(self._heap) + (self._front is not None)

    def __iter__(self) -> Iterator[Item]:
        if self._front is not None:
            yield self._front[2]
        yield from super().__iter__()


class Doubles:
    """What device and host can both read: the first host copies to leave when the host is full.

    Those that the store has too go before the others, even for items that are worth less: nothing is lost
    with them. The latest goes first: the device will need its host copy last.
    """

    def __init__(self) -> None:
        self._others, self._stored = Queue(0), Queue(1)

    def add(self, item: Item) -> None:
        """Add an item; also called when it becomes known whether the store has it."""
        self.discard(item)
        (self._stored if item.stored else self._others).add(item)

    def discard(self, item: Item) -> None:
        if item.double:
            (self._stored if item.double & 1 else self._others).remove(item)

    def pop(self) -> Item | None:
        return self._stored.pop_latest() or self._others.pop_latest()

    def pop_oldest(self) -> Item | None:
        return self._stored.pop_oldest() or self._others.pop_oldest()

    def pop_stored(self) -> Item | None:
        return self._stored.pop_latest()

    def __contains__(self, item: Item) -> bool:
        return bool(item.double)

    def __iter__(self) -> Iterator[Item]:
        yield from self._stored
        yield from self._others

    def check(self) -> None:
        assert all(item.stored for item in self._stored) and not any(item.stored for item in self._others)


ROW = 256


class Queue:
    """Items in the order in which they came. Any of them can leave. They stand in rows of 256, and `double`
    says where: twice the number of the place, and which queue it is. An item that leaves leaves a gap, and a
    row of gaps is dropped."""

    def __init__(self, which: int) -> None:
        self._which = which
        self._rows: dict[int, list[Item | None]] = {}
        self._items: dict[int, int] = {}
        """For each row, how many items are left."""

    def add(self, item: Item) -> None:
        number = next(reversed(self._rows), 0)
        row = self._rows.get(number)
        if row is None or len(row) == ROW:
            number += 1
            row = self._rows[number] = hidden_list()
            self._items[number] = 0
        item.double = 2 * (number * ROW + len(row)) + self._which
        row.append(item)
        self._items[number] += 1

    def remove(self, item: Item) -> None:
        number, at = divmod(item.double // 2, ROW)
        item.double = 0
        self._items[number] -= 1
        if self._items[number]:
            self._rows[number][at] = None
        else:
            del self._rows[number], self._items[number]

    def pop_latest(self) -> Item | None:
        if not self._rows:
            return None
        row = self._rows[next(reversed(self._rows))]
        while row[-1] is None:
            row.pop()
        latest = row[-1]
        self.remove(latest)
        return latest

    def pop_oldest(self) -> Item | None:
        oldest = next(iter(self), None)
        if oldest is not None:
            self.remove(oldest)
        return oldest

    def __iter__(self) -> Iterator[Item]:
        return (item for row in self._rows.values() for item in row if item is not None)
