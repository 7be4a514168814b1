"""Which record is where, and how it was used.

The index is always what a replay of the segments gives: row after row, a later record of a key replaces an
earlier one, and a note removes earlier records. Opening a store is that replay, so the index itself is not
stored.

Uses are saved in a file beside the segments, for the next process:

    magic, version, clock, checksum of the rest │ for each segment: number, rows │ used … │ hits …

Only eviction reads this file, so it may be old or missing. It is written from time to time and when the store
is closed, without fsync. Records that are newer count as used later. If the file is damaged, for example by a
crash, the order of writing replaces the uses.
"""

from __future__ import annotations

import os
import random
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from tiercel.storage.file import direct
from tiercel.storage.file.direct import ALIGN, padded
from tiercel.storage.file.segment import Segment
from tiercel.storage.record import Note, RecordKey

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_NONE = np.empty(0, np.uint64)
_HEAD = struct.Struct("<8sHxxxxxxQ16s")
_MAGIC = b"tiercel\x0b"
_VERSION = 1
_SEGMENT = struct.Struct("<QQ")
_BYTES_PER_ROW = 16
_CLOCK_MOST = 2**62  # a larger clock is damage: the clock must not overflow
BYTES_PUT_PER_BYTE = 64
"""The file of uses is written again after 64 times its size in records: it adds less than 2 % to what is
written."""

REMOVED_MOST = 1_000_000
"""Evicted keys that are kept for `removed`. If nobody calls it, the oldest are dropped."""


@dataclass
class Use:
    """The use of a record, as an eviction policy reads it."""

    used: int
    hits: int
    priority: int = 0  # a store does not know the priority of requests


class Uses(NamedTuple):
    """What the file of uses holds: for each segment the last use and the hits of its first rows."""

    clock: int
    of: Mapping[int, tuple[np.ndarray, np.ndarray]]


class Index:
    """Records by key. Callers hold the log's lock, except for `in`."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}  # by number, oldest first
        self.bytes = 0  # of all records, without padding
        self.removed: deque[RecordKey] = deque(maxlen=REMOVED_MOST)
        self._places: dict[RecordKey, int] = {}
        self._clock = 0
        self._random = random.Random(0)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: RecordKey) -> bool:
        return key in self._places

    def load(self, segments: Iterable[Segment], known: Uses) -> None:
        """Replay these segments, oldest first. Records that `known` lacks count as used after all others."""
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
            if kind == Note.CLEARED:
                self._places.clear()
            elif kind == Note.REMOVED:
                self._places.pop(key, None)
            else:
                self._places[key] = first + row

    def _count(self) -> None:
        """Count the live bytes of every segment, after a replay."""
        places = np.fromiter(self._places.values(), np.int64, len(self._places))
        places.sort()
        self.bytes = 0
        for segment in self.segments.values():
            first = segment.number << _ROW_BITS
            here = places[slice(*np.searchsorted(places, (first, first + (1 << _ROW_BITS))))] & _ROW_MASK
            sizes = np.frombuffer(segment.table.sizes, np.uint64)[here].astype(np.int64)
            segment.live = int((-(-sizes // ALIGN) * ALIGN).sum())
            self.bytes += int(sizes.sum())

    def bytes_of_uses(self) -> int:
        return sum(_SEGMENT.size + _BYTES_PER_ROW * len(segment.table) for segment in self.segments.values())

    def pack_uses(self) -> bytes:
        """The bytes of the file of uses."""
        parts = []
        for each in self.segments.values():
            parts += [_SEGMENT.pack(each.number, len(each.used)), bytes(each.used), bytes(each.hits)]
        body = b"".join(parts)
        return _HEAD.pack(_MAGIC, _VERSION, self._clock + 1, xxhash.xxh3_128_digest(body)) + body

    def find(self, key: RecordKey) -> tuple[Segment, int] | None:
        """The segment and the row of a record."""
        place = self._places.get(key)
        return None if place is None else (self.segments[place >> _ROW_BITS], place & _ROW_MASK)

    def touch(self, segment: Segment, row: int) -> None:
        """A record was read."""
        self._clock += 1
        segment.used[row] = self._clock
        segment.hits[row] += 1

    def add(self, segment: Segment, keys: Sequence[RecordKey], sizes: Sequence[int], kind: int = 0) -> None:
        """The next rows of a segment are durable: make them visible. `kind`: of notes; 0 for records."""
        assert not segment.broken, "behind the last row something else may lie"
        table, row = segment.table, len(segment.table)
        table.add(keys, note=kind, offset=table.end, sizes=sizes)
        self._clock += len(keys)
        # The first page is needed by the others: its use is the latest.
        segment.used.extend(range(self._clock, self._clock - len(keys), -1))
        segment.hits.extend([0] * len(keys))
        if kind == Note.CLEARED:
            self.clear()
            return
        for key in keys:
            if key in self._places:
                self._forget(key)
        if kind == Note.REMOVED:
            return
        first = segment.number << _ROW_BITS | row
        self._places.update(zip(keys, range(first, first + len(keys)), strict=True))
        segment.live += table.end - table.offsets[row]
        self.bytes += sum(sizes)

    def move(self, source: Segment, rows: Sequence[int], target: Segment) -> None:
        """Copies of these rows are durable at the end of another segment. They keep their uses."""
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
        """Rows of its live records."""
        first = segment.number << _ROW_BITS
        return [row for row, key in enumerate(segment.table.keys) if self._places.get(key) == first + row]

    def evict(self, segment: Segment) -> int:
        """Forget the live records of a segment. Returns how many there were."""
        keys = [segment.table.keys[row] for row in self.live(segment)]
        for key in keys:
            self._forget(key)
        self.removed.extend(keys)
        return len(keys)

    def use(self, segment: Segment, row: int) -> Use:
        return Use(segment.used[row], segment.hits[row])

    def sample(self, segment: Segment, count: int) -> list[Use]:
        """The uses of `count` random rows, without those that are dead."""
        first, rows = segment.number << _ROW_BITS, len(segment.table)
        keys, places = segment.table.keys, self._places
        found = [int(self._random.random() * rows) for _ in range(count)] if rows else []
        return [self.use(segment, row) for row in found if places.get(keys[row]) == first + row]

    def values(self) -> Iterator[tuple[RecordKey, int]]:
        """Every key with the size of its record."""
        for key, place in self._places.items():
            yield key, self.segments[place >> _ROW_BITS].table.sizes[place & _ROW_MASK]


def parse_uses(data: bytes) -> Uses:
    """What `pack_uses` made. Empty if it is damaged."""
    nothing, of, at = Uses(0, {}), {}, _HEAD.size
    try:
        magic, version, clock, digest = _HEAD.unpack_from(data)
        if (magic, version) != (_MAGIC, _VERSION) or xxhash.xxh3_128_digest(data[at:]) != digest:
            return nothing
        while at < len(data):
            number, rows = _SEGMENT.unpack_from(data, at)
            columns = np.frombuffer(data, np.uint64, 2 * rows, at + _SEGMENT.size)
            of[number] = columns[:rows], columns[rows:]
            at += _SEGMENT.size + _BYTES_PER_ROW * rows
            clock = max(clock, int(columns.max(initial=0)))
    except (ValueError, OverflowError, struct.error):
        return nothing
    return Uses(clock, of) if clock < _CLOCK_MOST else nothing


def save_uses(path: Path, data: bytes) -> None:
    """Overwrite the file. A failure does no harm."""
    with suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(file, "wb") as out:
            out.write(data)


def load_uses(path: Path) -> Uses:
    try:
        file = direct.calls.open(str(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(file, "rb") as kept:
            return parse_uses(kept.read())
    except OSError:
        return Uses(0, {})
