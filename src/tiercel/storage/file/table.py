"""What a segment holds: records, and notes that earlier records are gone. A sealed segment ends with this
table, so that one read opens it.

    ┌─ record ─┬─ record ─┬─ … ─┬─ rows of the table ─┬─ zeros ─┬─ trailer ─┐ end of the file
    0          each at a multiple of 4096       a multiple of 4096 bytes together

Everything in a table is also in the headers of the records. If a table is lost, a scan makes it again: that
costs time, nothing else. A note is a record without a payload that the store writes for itself.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import xxhash

from tiercel.storage.file.direct import ALIGN, padded
from tiercel.storage.record import KEY_BYTES, Header, Kind, RecordKey, View, checksum, pack, page_key_of

VERSION = 2
_MAGIC = b"tiercel\t"
_TRAILER = struct.Struct("<8sH6xQ16s16x8s")
_ROW = np.dtype([("key", f"V{KEY_BYTES}"), ("note", "u1"), ("", "V2"), ("place", "<u4"), ("bytes", "<u8")])
"""`place` counts in units of ALIGN; `bytes` is the value's length, without padding."""

_NOTES = bytes((0, Kind.REMOVED, Kind.CLEARED))

assert _ROW.itemsize == 64


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
        trailer = _TRAILER.pack(_MAGIC, VERSION, len(self), xxhash.xxh3_128_digest(body), bytes(8))
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
    """The length of a packed table with so many rows."""
    return padded(rows * _ROW.itemsize + _TRAILER.size)


def rows_of(data: View) -> int | None:
    """The number of rows of the table that ends here. None: there is no whole trailer."""
    if len(data) < _TRAILER.size:
        return None
    trailer = bytes(data[-_TRAILER.size :])
    magic, version, rows, _, check = _TRAILER.unpack(trailer)
    if magic != _MAGIC or xxhash.xxh3_64_digest(trailer[:-8] + bytes(8)) != check:
        return None
    if version != VERSION:
        raise OtherVersion(f"table version {version}")
    return int(rows)


EVERYTHING = RecordKey(bytes((Kind.CLEARED,)) + bytes(KEY_BYTES - 1))  # the key of a CLEARED note


def note(kind: Kind, key: RecordKey) -> bytes:
    """A note: REMOVED, the record of this key is gone; or CLEARED, every record is gone."""
    assert len(key) == KEY_BYTES, "not the key of a record"
    removed = key[:1] if kind is Kind.REMOVED else b""  # in the place of the stream table
    return pack(Header(kind, ALIGN, 0, key[1:-32], page_key_of(key), checksum([b""]), removed))


def subject(header: Header) -> tuple[RecordKey, int] | None:
    """The key that a record or note is about, and the kind of the note; 0 for a record. None: not a note of
    ours."""
    if header.kind is Kind.REMOVED:
        key = RecordKey(header.table + header.key[1:])
        return (key, header.kind) if len(key) == KEY_BYTES else None
    return header.key, header.kind if header.kind is Kind.CLEARED else 0
