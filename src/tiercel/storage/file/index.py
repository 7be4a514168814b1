"""Which record is where, and how it was used.

The index is at every moment what a replay of the segments would give: row by row in the order of their
places, the later one of a key wins, a note takes away what is before it. So opening a store is that replay,
done in bulk, and nothing else has to be kept.

Uses are on the disk as they were some time ago (`storage.file.uses`); where they are not known, the order of
writing stands for them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tiercel.storage.file import uses
from tiercel.storage.file.direct import ALIGN, padded
from tiercel.storage.file.segment import Segment
from tiercel.storage.file.uses import Uses
from tiercel.storage.record import Kind, RecordKey

_ROW_BITS = 32
_NONE = np.empty(0, np.uint64)
_ROW_MASK = (1 << _ROW_BITS) - 1

REMOVED_MOST = 1_000_000
"""Evicted keys kept for whoever asks; a listener that does not ask must not cost memory for ever."""


@dataclass
class Use:
    """What an eviction policy looks at."""

    used: int
    hits: int
    priority: int = 0
    """A store does not know whose requests its records serve."""


class Index:
    """Records by key. Whoever calls holds the log's lock; looking whether a key is there needs none."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        """By number, oldest first."""
        self.bytes = 0
        """Of all values."""
        self.removed: deque[RecordKey] = deque(maxlen=REMOVED_MOST)
        self._places: dict[RecordKey, int] = {}
        self._clock = 0
        self._random = random.Random(0)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: RecordKey) -> bool:
        return key in self._places

    def load(self, segments: Iterable[Segment], known: Uses) -> None:
        """Replay these, oldest first. What is not in `known` counts as used after all that is."""
        self._clock = known.clock
        for segment in segments:
            self.segments[segment.number] = segment
            first, rows = segment.number << _ROW_BITS, len(segment.table)
            if segment.table.notes.count(0) < rows:
                self._replay(segment)
            else:
                self._places.update(zip(segment.table.keys, range(first, first + rows), strict=True))
            np.frombuffer(segment.used, np.uint64)[:] = np.arange(self._clock, self._clock + rows)
            self._clock += rows
            used, hits = known.of.get(segment.number, (_NONE, _NONE))
            if len(used) <= rows:
                np.frombuffer(segment.used, np.uint64)[: len(used)] = used
                np.frombuffer(segment.hits, np.uint64)[: len(hits)] = hits
        self._count()

    def _replay(self, segment: Segment) -> None:
        first = segment.number << _ROW_BITS
        for row, (key, kind) in enumerate(zip(segment.table.keys, segment.table.notes, strict=True)):
            if kind == Kind.CLEARED:
                self._places.clear()
            elif kind == Kind.REMOVED:
                self._places.pop(key, None)
            else:
                self._places[key] = first + row

    def _count(self) -> None:
        """Live bytes of every segment, from what the index points to after a replay."""
        places = np.fromiter(self._places.values(), np.int64, len(self._places))
        places.sort()
        self.bytes = 0
        for segment in self.segments.values():
            first = segment.number << _ROW_BITS
            here = places[slice(*np.searchsorted(places, (first, first + (1 << _ROW_BITS))))] & _ROW_MASK
            sizes = np.frombuffer(segment.table.sizes, np.uint64)[here].astype(np.int64)
            segment.live = int((-(-sizes // ALIGN) * ALIGN).sum())
            self.bytes += int(sizes.sum())

    def pack_uses(self) -> bytes:
        return uses.pack(self.segments.values(), self._clock + 1)

    def find(self, key: RecordKey) -> tuple[Segment, int] | None:
        """Segment and row."""
        place = self._places.get(key)
        return None if place is None else (self.segments[place >> _ROW_BITS], place & _ROW_MASK)

    def touch(self, segment: Segment, row: int) -> None:
        """It was read."""
        self._clock += 1
        segment.used[row] = self._clock
        segment.hits[row] += 1

    def add(self, segment: Segment, keys: Sequence[RecordKey], sizes: Sequence[int], kind: int = 0) -> None:
        """The next rows of a segment are durable: let everybody see them. `kind`: which notes they are."""
        row = segment.add(keys, kind, sizes, used=self._clock + 1)
        self._clock += len(keys)
        if kind == Kind.CLEARED:
            self.clear()
            return
        for key in keys:
            if key in self._places:
                self._forget(key)
        if kind == Kind.REMOVED:
            return
        first = segment.number << _ROW_BITS | row
        self._places.update(zip(keys, range(first, first + len(keys)), strict=True))
        segment.live += segment.table.end - segment.table.offsets[row]
        self.bytes += sum(sizes)

    def move(self, source: Segment, rows: Sequence[int], target: Segment) -> None:
        """Copies of these rows are durable at the end of another segment; their use goes with them."""
        table = source.table
        self.add(target, [table.keys[row] for row in rows], [table.sizes[row] for row in rows])
        for new, old in enumerate(rows, len(target.table) - len(rows)):
            target.used[new], target.hits[new] = source.used[old], source.hits[old]

    def _forget(self, key: RecordKey) -> None:
        place = self._places.pop(key)
        segment, row = self.segments[place >> _ROW_BITS], place & _ROW_MASK
        segment.live -= padded(segment.table.sizes[row])
        self.bytes -= segment.table.sizes[row]

    def clear(self) -> None:
        self._places.clear()
        self.bytes = 0
        for segment in self.segments.values():
            segment.live = 0

    def live(self, segment: Segment) -> list[int]:
        """Its rows that can still be read."""
        first = segment.number << _ROW_BITS
        return [row for row, key in enumerate(segment.table.keys) if self._places.get(key) == first + row]

    def evict(self, segment: Segment) -> int:
        """Forget what is left in a segment; answers how many records that was."""
        keys = [segment.table.keys[row] for row in self.live(segment)]
        for key in keys:
            self._forget(key)
        self.removed.extend(keys)
        return len(keys)

    def use(self, segment: Segment, row: int) -> Use:
        return Use(segment.used[row], segment.hits[row])

    def sample(self, segment: Segment, count: int) -> list[Use]:
        """The uses of some of its rows, each as likely as another; those that are dead are left out."""
        first, rows = segment.number << _ROW_BITS, len(segment.table)
        keys, places = segment.table.keys, self._places
        found = [int(self._random.random() * rows) for _ in range(count)] if rows else []
        return [self.use(segment, row) for row in found if places.get(keys[row]) == first + row]

    def values(self) -> Iterator[tuple[RecordKey, int]]:
        """Every key with the bytes of its value."""
        for key, place in self._places.items():
            yield key, self.segments[place >> _ROW_BITS].table.sizes[place & _ROW_MASK]
