"""A segment: one file that records are appended to until it is full. Records are never overwritten.

    being written   record │ record │ record ……… zeros up to its full size
    sealed          record │ record │ record │ rows of the table │ zeros │ trailer
    after a crash   record │ record │ parts of unfinished writes           scanned, then sealed

A sealed segment is opened by reading its table. Any other segment is scanned: from header to header, with the
checksum of every payload. The scan skips what is not a whole record and goes on at the next header, so damage
costs only the records that it hits. The disk space is allocated when a segment is begun, with room for the
table, so later writes do not fail because the disk is full. Everything in a table is also in the headers of
the records: if a table is lost, a scan makes it again.

A note is a record without a payload that the store writes for itself: earlier records are gone.
"""

from __future__ import annotations

import logging
import os
import struct
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import xxhash

from tiercel.storage import record
from tiercel.storage.base import trips
from tiercel.storage.file import direct
from tiercel.storage.file.direct import ALIGN, Lanes, padded
from tiercel.storage.record import KEY_BYTES, MAGIC, Flaw, Header, Note, RecordKey, View, parse

HEADER_MOST = 1024**2  # The longest header that a scan looks for. Headers of real models have up to 8 KiB.
_TABLE_GUESS = 64 * 1024
"""The first read of a table, before its length is known. A table of 1000 records has this length."""

UNREADABLE_MOST = 16
"""After this number of unreadable places the rest of a segment is not read: each attempt can take seconds."""

_TABLE_VERSION = 2
_TABLE_MAGIC = b"tiercel\t"
_TRAILER = struct.Struct("<8sH6xQ16s16x8s")
_ROW = np.dtype([("key", f"V{KEY_BYTES}"), ("note", "u1"), ("", "V2"), ("place", "<u4"), ("bytes", "<u8")])
"""`place` counts in units of ALIGN; `bytes` is the value's length, without padding."""

_NOTES = bytes((0, Note.REMOVED, Note.CLEARED))

assert _ROW.itemsize == 64

log = logging.getLogger(__name__)


class OtherVersion(Exception):
    """A table or a record of another format version. It is not damaged, and must not be changed."""


class Table:
    """The records of one segment in the order of their offsets, one row each.

    `notes[row]` is 0 for a record. A REMOVED note has the key that it removes."""

    def __init__(self) -> None:
        self.keys: list[RecordKey] = []
        self.notes = bytearray()
        self.offsets = array("Q")
        self.sizes = array("Q")
        self.end = 0  # where the next record begins

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, keys: Sequence[RecordKey], *, note: int, offset: int, sizes: Sequence[int]) -> None:
        """Add rows for records next to each other, from an offset on."""
        self.keys += keys
        self.notes += bytes((note,)) * len(keys)
        *offsets, self.end = accumulate(map(padded, sizes), initial=offset)
        self.offsets.extend(offsets)
        self.sizes.extend(sizes)

    def pack(self) -> bytes:
        """The table as it is written behind the last record. The trailer is at the end."""
        rows = np.zeros(len(self), _ROW)
        rows["key"] = np.frombuffer(b"".join(self.keys), f"V{KEY_BYTES}")
        rows["note"] = np.frombuffer(self.notes, np.uint8)
        rows["place"] = np.frombuffer(self.offsets, np.uint64) // ALIGN
        rows["bytes"] = np.frombuffer(self.sizes, np.uint64)
        body = rows.tobytes()
        trailer = _TRAILER.pack(
            _TABLE_MAGIC, _TABLE_VERSION, len(self), xxhash.xxh3_128_digest(body), bytes(8)
        )
        trailer = trailer[:-8] + xxhash.xxh3_64_digest(trailer)
        return body + bytes(packed_bytes(len(self)) - len(body) - len(trailer)) + trailer

    @staticmethod
    def parse(data: View, room: int) -> Table | None:
        """What `pack` made. None: it is damaged, or has offsets outside the `room` bytes before it."""
        rows = rows_of(data)
        if not rows or packed_bytes(rows) != len(data):
            return None
        body = memoryview(data)[: rows * _ROW.itemsize]
        if xxhash.xxh3_128_digest(body) != _TRAILER.unpack(data[-_TRAILER.size :])[3]:
            return None
        read = np.frombuffer(body, _ROW)
        offsets, sizes = read["place"].astype(np.uint64) * ALIGN, read["bytes"]
        ends = offsets + -(-np.minimum(sizes, room + 1).astype(np.int64) // ALIGN * ALIGN).astype(np.uint64)
        notes = bytearray(read["note"].tobytes())
        if ends[-1] > room or (ends[:-1] > offsets[1:]).any() or notes.translate(None, _NOTES):
            return None
        table = Table()
        table.keys = read["key"].tolist()
        table.notes = notes
        table.offsets.frombytes(offsets.tobytes())
        table.sizes.frombytes(sizes.tobytes())
        table.end = int(ends[-1])
        return table


def packed_bytes(rows: int) -> int:
    """The length of a packed table of `rows`."""
    return padded(rows * _ROW.itemsize + _TRAILER.size)


def rows_of(data: View) -> int | None:
    """The number of rows of the table that ends here. None: there is no whole trailer."""
    if len(data) < _TRAILER.size:
        return None
    trailer = bytes(data[-_TRAILER.size :])
    magic, version, rows, _, check = _TRAILER.unpack(trailer)
    if magic != _TABLE_MAGIC or xxhash.xxh3_64_digest(trailer[:-8] + bytes(8)) != check:
        return None
    if version != _TABLE_VERSION:
        raise OtherVersion(f"table version {version}")
    return int(rows)


@dataclass(eq=False)
class Segment:
    """One file and what it holds. Callers that change it hold the log's lock."""

    number: int
    path: Path
    file: int
    bytes_on_disk: int
    table: Table
    sealed: bool = False
    damaged: int = 0  # gaps between records that a scan found
    unreadable: bool = False
    """The disk could not read all of it. Perhaps it can later, so the file is not changed."""
    broken: bool = False
    """A write failed. Behind the last row there may be a record that was never acknowledged."""
    live: int = 0  # bytes of records that the index points to, padding included
    readers: int = 0
    gone: bool = False

    def __post_init__(self) -> None:
        self.used = array("Q", bytes(8 * len(self.table)))
        self.hits = array("Q", bytes(8 * len(self.table)))

    def fits(self, room: int, rows: int) -> bool:
        """Whether records of `room` bytes fit here, with their `rows` in the table."""
        return self.table.end + room + packed_bytes(len(self.table) + rows) <= self.bytes_on_disk

    @property
    def dead(self) -> int:
        """Bytes that neither a live record nor the table uses."""
        return self.bytes_on_disk - self.live - (packed_bytes(len(self.table)) if self.sealed else 0)

    def seal(self) -> None:
        """Write the table and free the rest of the space. Raises OSError; then nothing is lost."""
        end = self.table.end
        packed = self.table.pack()
        direct.write(self.file, end, [direct.aligned_copy(packed)])
        direct.calls.ftruncate(self.file, end + len(packed))
        self.bytes_on_disk = end + len(packed)
        if self.broken:
            direct.calls.fdatasync(self.file)  # without the table a scan would find the failed write
        self.sealed = True  # not synced: if a crash loses the table, a scan makes it again

    def resume(self, size: int) -> None:
        """Append to a sealed segment again, up to `size` bytes. The first record overwrites the table. After
        a crash in that write the table is either damaged, and the segment is scanned, or whole, and the
        record was not acknowledged. Raises OSError."""
        assert self.sealed and not self.broken
        self.sealed = False
        direct.calls.fallocate(self.file, self.table.end, size - self.table.end)
        self.bytes_on_disk = size

    def close(self) -> None:
        """No new reads. The last read that is still running closes the file."""
        self.gone = True
        if not self.readers and self.file >= 0:
            os.close(self.file)
            self.file = -1


def create(path: Path, number: int, size: int, *, direct_io: bool) -> Segment:
    """A new file with its disk space allocated. If that fails the file is removed again."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct_io else 0)
    file = direct.calls.open(str(path), flags)
    try:
        direct.calls.fallocate(file, 0, size)
    except BaseException:
        os.close(file)
        with suppress(OSError):
            direct.calls.unlink(str(path))
        raise
    return Segment(number, path, file, size, Table())


def load(path: Path, number: int, *, direct_io: bool, read_only: bool) -> Segment:
    """Open a segment, as far as it can be read. Raises OSError and OtherVersion."""
    flags = (os.O_RDONLY if read_only else os.O_RDWR) | (os.O_DIRECT if direct_io else 0) | direct.NO_LINKS
    file = -1
    try:
        file = direct.calls.open(str(path), flags)
        return _load(path, number, file, read_only=read_only)
    except BaseException as error:
        if file >= 0:
            os.close(file)
        if isinstance(error, OtherVersion):
            raise OtherVersion(f"{path.name} has {error}") from error
        if isinstance(error, OSError):
            error.filename = str(path)
        if file >= 0 or not (isinstance(error, OSError) and direct.is_damage(error)):
            raise
        log.warning("a segment can not be opened and is not used: %s", error)
        return Segment(number, path, -1, 0, Table(), unreadable=True)


def _load(path: Path, number: int, file: int, *, read_only: bool) -> Segment:
    size = os.fstat(file).st_size
    table = _read_table(file, size)
    if table is not None:
        return Segment(number, path, file, size, table, sealed=True)
    reader = Reader(file, size)
    table, damaged = _scan(reader)
    if damaged or reader.unreadable:
        places = f"no whole record at bytes {damaged}, unreadable at bytes {sorted(reader.unreadable)}"
        log.warning("%s is damaged: %s; the rest of it is used", path, places)
    if not read_only:
        direct.calls.fdatasync(file)  # writes of a killed process may not be on the disk yet
    return Segment(number, path, file, size, table, False, len(damaged), bool(reader.unreadable))


def _read_table(file: int, size: int) -> Table | None:
    """The table at the end of a sealed segment. None: there is no table, or it is damaged."""
    if size == 0 or size % ALIGN:
        return None
    guess = min(size, _TABLE_GUESS)
    memory = direct.aligned(guess)
    if not direct.read(file, size - guess, [memory], memory):
        return None
    rows = rows_of(memory)
    if rows is None or packed_bytes(rows) > size:
        return None
    length = packed_bytes(rows)
    if length > guess:
        memory = direct.aligned(length)
        if not direct.read(file, size - length, [memory], memory):
            return None
    return Table.parse(memory[-length:], room=size - length)


def _scan(reader: Reader) -> tuple[Table, list[int]]:
    """Every whole record, and where the gaps between records begin."""
    table, damaged, offset = Table(), list[int](), 0
    while (offset := reader.next(offset)) < reader.size:
        header, room = reader.record(offset)
        if header is Flaw.VERSION:
            raise OtherVersion("a record of another version")
        if not isinstance(header, Flaw) and (about := subject(header)) is not None:
            if offset > table.end:
                damaged.append(table.end)
            size = header.header_bytes + header.payload_bytes
            table.add([about[0]], note=about[1], offset=offset, sizes=[size])
        offset += room
    return table, damaged


def copy(source: Segment, rows: Sequence[int], target: Segment, lanes: Lanes) -> list[int]:
    """Copy records of one segment to the end of another, durably. Returns the rows that were whole and are
    copied. Raises OSError."""
    table, at, whole = source.table, target.table.end, list[int]()
    with lanes.take() as lane, lanes.take() as held:
        for some in trips(rows, lanes.size, lambda row: padded(table.sizes[row])):
            ends = [0, *accumulate(padded(table.sizes[row]) for row in some)]
            memory = held.memory if ends[-1] <= lanes.size else direct.aligned(ends[-1])
            places = [memory[start:end] for start, end in pairwise(ends)]
            placed = zip(some, places, strict=True)
            asked = [(source.file, table.offsets[row], [place]) for row, place in placed]
            views = list[View]()
            for row, place, read in zip(some, places, direct.read_many(asked, lane), strict=True):
                if read and record.flaw_of(place[: table.sizes[row]], table.keys[row]) is None:
                    whole.append(row)
                    views.append(place)
            direct.write(target.file, at, views)
            at += sum(map(len, views))
    direct.calls.fdatasync(target.file)
    return whole


class Reader:
    """Reads a file from front to back through a window of staging memory. Unreadable bytes are read as
    zeros."""

    def __init__(self, file: int, size: int) -> None:
        self.size = size
        self.unreadable: set[int] = set()  # offsets that the disk can not read
        self._file = file
        self._memory = direct.aligned(direct.STAGING_BYTES)
        self._start = self._end = 0
        self._most = direct.STAGING_BYTES

    def next(self, offset: int) -> int:
        """The next offset where a record may begin; the end of the file if there is none."""
        while (places := len(view := self._view(offset, ALIGN)) // ALIGN) > 0:
            starts = np.frombuffer(view, f"S{len(MAGIC)}", places * ALIGN // len(MAGIC))
            found = np.flatnonzero(starts[:: ALIGN // len(MAGIC)] == MAGIC)
            if len(found):
                return offset + int(found[0]) * ALIGN
            offset += places * ALIGN
        return self.size

    def record(self, offset: int) -> tuple[Header | Flaw, int]:
        """The header of the record at this offset after every byte was checked, or its flaw; and how many
        bytes to skip to what comes behind it."""
        for least in (ALIGN, HEADER_MOST):
            header = parse(self._view(offset, least))
            if header is not Flaw.HEADER:
                break
        if isinstance(header, Flaw):
            return header, ALIGN
        digest, size = xxhash.xxh3_128(), header.header_bytes + header.payload_bytes
        at, end = offset + header.header_bytes, offset + size
        while at < end and (view := self._view(at, min(end - at, len(self._memory) - ALIGN))[: end - at]):
            digest.update(view)
            at += len(view)
        return header if digest.digest() == header.checksum else Flaw.CHECKSUM, padded(size)

    def _view(self, offset: int, least: int) -> memoryview:
        """The window from an offset on. It is moved first if it holds less than `least` bytes from there."""
        end = min(offset + least, self.size)
        if not self._start <= offset <= end <= self._end:
            self._start = self._end = offset - offset % ALIGN
            while self._end < end and (read := self._read(self._end)) > 0:
                self._end += read
        return self._memory[offset - self._start : self._end - self._start]

    def _read(self, offset: int) -> int:
        """Read more of the window with one call. After an error the next call is half as long, until only
        ALIGN unreadable bytes are left."""
        memory = self._memory[offset - self._start :]
        while len(self.unreadable) <= UNREADABLE_MOST and offset % ALIGN == 0:
            try:
                read = direct.calls.preadv(self._file, [memory[: self._most]], offset)
                self._most = min(2 * self._most, direct.STAGING_BYTES)
                return read
            except OSError as error:
                if not direct.is_damage(error):
                    raise
            if self._most > ALIGN:
                self._most //= 2
                continue
            self.unreadable.add(offset)
            memory[:ALIGN] = direct.ZEROS
            return ALIGN
        return 0


EVERYTHING = RecordKey(bytes((Note.CLEARED,)) + bytes(KEY_BYTES - 1))  # the key of a CLEARED note


def note(kind: Note, key: RecordKey) -> bytes:
    """A note: REMOVED, the record of this key is gone; or CLEARED, every record is gone."""
    assert len(key) == KEY_BYTES, "not the key of a record"
    removed = key[:1] if kind is Note.REMOVED else b""  # in the place of the stream table
    return record.pack(Header(kind, ALIGN, 0, key[1:-32], key[-32:], record.checksum([b""]), removed))


def subject(header: Header) -> tuple[RecordKey, int] | None:
    """The key that a record or note is about, and the kind of the note; 0 for a record. None: not a note of
    ours."""
    if header.kind is Note.REMOVED:
        key = RecordKey(header.table + header.key[1:])
        return (key, header.kind) if len(key) == KEY_BYTES else None
    return header.key, header.kind if header.kind is Note.CLEARED else 0
