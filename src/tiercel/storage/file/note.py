"""Notes: short records that a store writes for itself. A note says that earlier records are gone."""

from __future__ import annotations

from tiercel.storage.file.direct import ALIGN
from tiercel.storage.record import KEY_BYTES, Header, Kind, RecordKey, checksum, pack, page_key_of

EVERYTHING = RecordKey(bytes((Kind.CLEARED,)) + bytes(KEY_BYTES - 1))
"""The key of a CLEARED note."""


def removed(key: RecordKey) -> bytes:
    """The record of this key is gone. The kind of that record is in the place of the stream table."""
    assert len(key) == KEY_BYTES, "not the key of a record"
    return _note(Kind.REMOVED, key, key[:1])


def cleared() -> bytes:
    """Every record is gone."""
    return _note(Kind.CLEARED, EVERYTHING, b"")


def subject(header: Header) -> tuple[RecordKey, int] | None:
    """The key that a record or note is about, and the kind of the note; 0 for a record. None: not a note of
    ours."""
    if header.kind is Kind.REMOVED:
        key = RecordKey(header.table + header.key[1:])
        return (key, header.kind) if len(key) == KEY_BYTES else None
    return header.key, header.kind if header.kind is Kind.CLEARED else 0


def _note(kind: Kind, key: RecordKey, table: bytes) -> bytes:
    return pack(Header(kind, ALIGN, 0, key[1:-32], page_key_of(key), checksum([b""]), table))
