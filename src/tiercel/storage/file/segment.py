"""A segment: one file that records are appended to, until it is full. Nothing in it is ever overwritten.

    being written   record │ record │ record ……… zeros up to its full size
    sealed          record │ record │ record │ table                       (storage.file.table)
    after a crash   record │ record │ whatever was on its way              read up to there, then sealed

A sealed segment is opened by its table. Any other is scanned: from header to header, with the checksum of
every payload, to the first thing that is not a whole record. A torn end is not an error. The disk space is
taken when a segment is begun, so a write into it does not find the disk full, and the table has its place
in it too.
"""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

from tiercel.storage.file import direct, note
from tiercel.storage.file.direct import ALIGN, Lanes, padded
from tiercel.storage.file.table import OtherVersion, Table, packed_bytes, rows_of
from tiercel.storage.record import Flaw, Header, RecordKey, parse

HEADER_MOST = 1024**2
"""The longest header that a scan looks for. The longest of a real model has 8 KiB."""

_TABLE_GUESS = 64 * 1024
"""Read from the end of a segment before its length is known: the table of 1300 records."""


class Unreadable(OSError):
    """Records that the disk does not give back."""


class Segment:
    """One file, what it holds, and how far it is. Whoever changes it holds the log's lock."""

    def __init__(self, number: int, path: Path, file: int, size: int, table: Table) -> None:
        self.number = number
        self.path = path
        self.file = file
        self.bytes_on_disk = size
        self.table = table
        self.live = 0
        """Bytes of records that the index points to, padding included."""
        self.used = array("Q", bytes(8 * len(table)))
        self.hits = array("Q", bytes(8 * len(table)))
        self.sealed = False
        self.broken = False
        """A write failed: what is behind it would not be found by a scan."""
        self.readers = 0
        self.gone = False

    def fits(self, room: int, rows: int) -> bool:
        """Whether so many bytes of records have a place here, and as many rows in the table."""
        return self.table.end + room + packed_bytes(len(self.table) + rows) <= self.bytes_on_disk

    def add(self, keys: Sequence[RecordKey], kind: int, sizes: Sequence[int], *, used: int) -> int:
        """What was written behind the last row is part of the segment now; answers the first new row."""
        assert not self.broken, "a scan would not come here"
        row = len(self.table)
        self.table.add(keys, note=kind, offset=self.table.end, sizes=sizes)
        self.used.extend(range(used, used + len(keys)))
        self.hits.extend([0] * len(keys))
        return row

    @property
    def dead(self) -> int:
        """Bytes that nobody can read any more."""
        return self.bytes_on_disk - self.live - (packed_bytes(len(self.table)) if self.sealed else 0)

    def seal(self) -> None:
        """Write the table and give the rest of the space back. Raises OSError; nothing is lost then."""
        end = self.table.end
        packed = self.table.pack()
        direct.write(self.file, end, [direct.aligned_copy(packed)])
        direct.calls.ftruncate(self.file, end + len(packed))
        self.bytes_on_disk = end + len(packed)
        self.sealed = True  # as far as this process is concerned: a table that is lost is made again

    def resume(self, size: int) -> None:
        """Take the table off a sealed segment, to append again up to `size` bytes. Raises OSError."""
        assert self.sealed and not self.broken
        self.sealed = False
        direct.calls.ftruncate(self.file, self.table.end)
        self.bytes_on_disk = self.table.end
        direct.calls.fallocate(self.file, self.table.end, size - self.table.end)
        self.bytes_on_disk = size
        direct.calls.fdatasync(self.file)

    def close(self) -> None:
        """No more reads; the descriptor goes with the last that is under way."""
        self.gone = True
        if not self.readers and self.file >= 0:
            os.close(self.file)
            self.file = -1


def create(path: Path, number: int, size: int, *, direct_io: bool) -> Segment:
    """A new file with its space taken; no file if that fails, as far as it can be helped."""
    file = direct.calls.open(
        str(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct_io else 0)
    )
    try:
        direct.calls.fallocate(file, 0, size)
    except BaseException:
        os.close(file)
        with suppress(OSError):
            direct.calls.unlink(str(path))
        raise
    return Segment(number, path, file, size, Table())


def load(path: Path, number: int, *, direct_io: bool, read_only: bool) -> Segment:
    """A segment as it is found. Raises OSError, and OtherVersion."""
    mode = os.O_RDONLY if read_only else os.O_RDWR
    file = direct.calls.open(str(path), mode | (os.O_DIRECT if direct_io else 0))
    try:
        size = os.fstat(file).st_size
        table = _read_table(file, size)
        segment = Segment(number, path, file, size, table or Table())
        if table is None:
            segment = Segment(number, path, file, size, _scan(segment))
        segment.sealed = table is not None
    except BaseException:
        os.close(file)
        raise
    return segment


def _read_table(file: int, size: int) -> Table | None:
    """The table at the end of a sealed segment; None: it has none, or not in one piece."""
    if size == 0 or size % ALIGN:
        return None
    length = min(size, _TABLE_GUESS)
    for _ in range(2):
        memory = direct.aligned(length)
        if _read_up_to(file, size - length, memory) < length:
            return None
        rows = rows_of(memory)
        if rows is None or packed_bytes(rows) > size:
            return None
        if packed_bytes(rows) <= length:
            return Table.parse(memory[length - packed_bytes(rows) :])
        length = packed_bytes(rows)
    return None


def _scan(segment: Segment) -> Table:
    """Every whole record from the start on."""
    table = Table()
    reader = Reader(segment)
    while not isinstance(header := reader.record(table.end), Flaw):
        key, kind = note.subject(header)
        table.add([key], note=kind, offset=table.end, sizes=[header.header_bytes + header.payload_bytes])
    if header is Flaw.VERSION:
        raise OtherVersion("record")
    return table


def copy(source: Segment, rows: Sequence[int], target: Segment, lanes: Lanes) -> None:
    """Records of one segment behind the last of another, durably. Raises Unreadable, OSError."""
    at, filled = target.table.end, 0
    with lanes.take() as lane:
        memory = lane.memory
        for offset, size in _neighbours(source, rows):
            while size:
                taken = min(size, len(memory) - filled)
                _read_whole(source.file, offset, memory[filled : filled + taken])
                offset, size, filled = offset + taken, size - taken, filled + taken
                if filled == len(memory):
                    direct.write(target.file, at, [memory])
                    at, filled = at + filled, 0
        if filled:
            direct.write(target.file, at, [memory[:filled]])
    direct.calls.fdatasync(target.file)


def _neighbours(segment: Segment, rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Offset and padded bytes of these rows, those side by side as one."""
    start = end = 0
    for row in rows:
        offset = segment.table.offsets[row]
        if offset != end and end > start:
            yield start, end - start
        start = start if offset == end and end > start else offset
        end = offset + padded(segment.table.sizes[row])
    if end > start:
        yield start, end - start


def _read_whole(file: int, offset: int, memory: memoryview) -> None:
    try:
        read = _read_up_to(file, offset, memory)
    except OSError as error:
        raise Unreadable(*error.args) from error
    if read < len(memory):
        raise Unreadable(errno.EIO, "a segment is shorter than it was")


class Reader:
    """A segment from front to back through a window of staging memory."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._memory = direct.aligned(direct.STAGING_BYTES)
        self._start = self._end = 0

    def record(self, offset: int) -> Header | Flaw:
        """The header of the whole record there, every byte of it checked; or why it is not one."""
        header = parse(self._view(offset, HEADER_MOST))
        if isinstance(header, Flaw):
            return header
        digest = xxhash.xxh3_128()
        for view in self._views(offset + header.header_bytes, header.payload_bytes):
            digest.update(view)
        return header if digest.digest() == header.checksum else Flaw.CHECKSUM

    def _views(self, offset: int, size: int) -> Iterator[memoryview]:
        """So many bytes, or those up to the end of the file, a window at a time."""
        while size > 0:
            view = self._view(offset, min(size, len(self._memory) - ALIGN))[:size]
            if not view:
                return
            yield view
            offset, size = offset + len(view), size - len(view)

    def _view(self, offset: int, least: int) -> memoryview:
        """What is in the window from an offset on; it is moved if that is less than `least` bytes."""
        least = min(least, self._segment.bytes_on_disk - offset)
        if not self._start <= offset <= offset + least <= self._end:
            self._start = self._end = offset - offset % ALIGN
            self._end += _read_up_to(self._segment.file, self._start, self._memory)
        return self._memory[offset - self._start : self._end - self._start]


def _read_up_to(file: int, offset: int, memory: memoryview) -> int:
    """As much as there is; answers how many bytes."""
    done = 0
    while done < len(memory) and done % ALIGN == 0:
        read = direct.calls.preadv(file, [memory[done:]], offset + done)
        if read == 0:
            break
        done += read
    return done
