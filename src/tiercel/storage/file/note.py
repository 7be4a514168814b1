"""Notes: what a store writes for itself about records before this point."""

from __future__ import annotations

from tiercel.storage.file.direct import ALIGN
from tiercel.storage.record import KEY_BYTES, Header, Kind, RecordKey, checksum, pack

EVERYTHING = RecordKey(bytes((Kind.CLEARED,)) + bytes(32))
"""The key of a CLEARED note."""


def removed(key: RecordKey) -> bytes:
    """The record of this key is gone. Its kind stands where other records have their streams."""
    assert len(key) == KEY_BYTES, "the name of a record"
    return _note(Kind.REMOVED, key[1:], key[:1])


def cleared() -> bytes:
    """Every record is gone."""
    return _note(Kind.CLEARED, EVERYTHING[1:], b"")


def subject(header: Header) -> tuple[RecordKey, int] | None:
    """The key that a record or note is about, and which note it is; 0 for a record. None: not one of our
    notes."""
    if header.kind is Kind.REMOVED:
        key = RecordKey(header.table + header.page_key)
        return (key, header.kind) if len(key) == KEY_BYTES else None
    return header.key, header.kind if header.kind is Kind.CLEARED else 0


def _note(kind: Kind, page_key: bytes, table: bytes) -> bytes:
    return pack(Header(kind, ALIGN, 0, bytes(32), page_key, checksum([b""]), table))
