"""A record: some layers of one page or tail as they are stored, with a header that says what it is
(docs/record-format.md).

    ┌─ header ────────────────────────────────────────┐┌─ payload ───────────────────────────────┐
    │ fixed part │ stream table (JSON) │ zeros to align ││ bytes of these layers of the page or tail │
    └─────────────────────────────────────────────────┘└─────────────────────────────────────────┘

Which layers are one record follows from the model alone (`CacheSpec.grains`).

`Form.flaw` verifies what comes back from a store before it is used: its form, its key, its length, and the
checksum of every byte.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property
from typing import NamedTuple, NewType

import xxhash

from tiercel.types import Kind

MAGIC = b"tiercel\n"
VERSION = 3
VERSIONS = (2, VERSION)
"""Records of version 2 hold a whole page or tail. They are recognized and verified, but no longer used."""
ALIGN_LEAST = 64
KEY_BYTES = 49
_FIXED = struct.Struct("<8sHBxIQ16s32s16sIHH16x8s8x")
_CHECK_AT = 112  # Offset of the checksum of the header. It is computed with zeros in its place.

RecordKey = NewType("RecordKey", bytes)
"""The name of a record in a store: one byte of the format version and the kind, 16 of the form, 32 of the
page key. All processes of a model use the same page keys. The form names the layers of the record."""

View = memoryview | bytearray | bytes  # contiguous bytes


class Note(IntEnum):
    """What a store writes for itself, as a record without a payload."""

    REMOVED = 16  # earlier records of this key are gone
    CLEARED = 17  # all earlier records are gone


class Flaw(Enum):
    """Why the bytes that were read are not the record that was asked for."""

    FOREIGN = "not a record"
    VERSION = "a record of another format version"
    HEADER = "a damaged header"
    FORM = "of another form: other streams, layers or lengths"
    KEY = "the record of another key"
    CHECKSUM = "a damaged payload"
    UNREADABLE = "nothing, although the key is listed"


def record_key(kind: Kind | Note, form: bytes, page_key: bytes, version: int = VERSION) -> RecordKey:
    is_plain = version == 2 or isinstance(kind, Note)  # the first byte is the kind alone
    return RecordKey(bytes((kind if is_plain else version << 4 | kind,)) + form + page_key)


def page_key_of(key: RecordKey) -> bytes:
    return key[-32:]


def form_of(key: RecordKey) -> bytes:
    return key[1:-32]


def start_of(key: RecordKey) -> bytes:
    """What the keys of all records of one form begin with."""
    return key[:-32]


def kind_of(key: RecordKey) -> tuple[Kind, int] | None:
    """The kind and the format version of a record. None: it is not the key of a record."""
    version, kind = divmod(key[0], 16) if len(key) == KEY_BYTES else (0, 0)
    return (Kind(kind), version or 2) if kind in set(Kind) and version != 2 else None


def is_older(key: RecordKey) -> bool:
    """Whether it is the key of a record of an older format version, which is no longer read."""
    kind = kind_of(key)
    return kind is not None and kind[1] < VERSION


class Header(NamedTuple):
    """A header whose own checksum is right, in the order of its bytes. The caller compares it with what was
    asked for."""

    kind: Kind | Note
    header_bytes: int
    payload_bytes: int
    form: bytes
    page_key: bytes
    checksum: bytes
    table: bytes
    grain: int = 0
    """Which part of the page or tail it is, and of how many (`spec.cache_spec.Grain`)."""
    grains: int = 1
    version: int = VERSION

    @property
    def key(self) -> RecordKey:
        return record_key(self.kind, self.form, self.page_key, self.version)


@dataclass(frozen=True)
class Form:
    """What all records of one grain in one cache and one store have in common: all but key and payload."""

    kind: Kind
    digest: bytes  # the digest of the declaration of these layers (`Grain.form`)
    streams: tuple[tuple[str, tuple[int, ...], int], ...]
    """Name, layers and bytes per row, in the order of the payload."""
    payload_bytes: int
    align: int = ALIGN_LEAST  # the payload begins at a multiple of this
    grain: int = 0
    grains: int = 1

    def __post_init__(self) -> None:
        assert len(self.digest) == 16 and self.align >= 1
        assert sum(len(layers) * row for _, layers, row in self.streams) == self.payload_bytes

    @cached_property
    def start(self) -> bytes:
        """What the keys of all its records begin with."""
        return record_key(self.kind, self.digest, b"")

    def key(self, page_key: bytes) -> RecordKey:
        return RecordKey(self.start + page_key)

    @cached_property
    def table(self) -> bytes:
        rows = [{"name": name, "layers": layers, "row_bytes": row} for name, layers, row in self.streams]
        return json.dumps(rows, separators=(",", ":")).encode()

    @cached_property
    def header_bytes(self) -> int:
        """The length of the fixed part and the table, rounded up to `align`."""
        return -(-(_FIXED.size + len(self.table)) // self.align) * self.align

    @property
    def record_bytes(self) -> int:
        return self.header_bytes + self.payload_bytes

    def header(self, page_key: bytes, payload: Iterable[View]) -> bytes:
        """The header of a record with this payload. Its parts together have `payload_bytes`."""
        return self.header_of(page_key, checksum(payload))

    def header_of(self, page_key: bytes, checksum: bytes) -> bytes:
        """The same, for a payload whose checksum is known."""
        sizes, part = (self.header_bytes, self.payload_bytes), (self.grain, self.grains)
        return pack(Header(self.kind, *sizes, self.digest, page_key, checksum, self.table, *part))

    def flaw(self, header: View, page_key: bytes, payload: Sequence[View]) -> Flaw | None:
        """What is wrong with a record that was read for `page_key`. None: every byte is right."""
        read = parse(header)
        if isinstance(read, Flaw):
            return read
        if read.key != self.key(page_key):
            return Flaw.FORM if read.form != self.digest else Flaw.KEY
        part = (read.table, read.payload_bytes, read.grain, read.grains)
        if part != (self.table, self.payload_bytes, self.grain, self.grains):
            return Flaw.FORM
        return None if checksum(payload) == read.checksum else Flaw.CHECKSUM


def checksum(payload: Iterable[View]) -> bytes:
    """XXH3-128 of the parts in a row."""
    parts = list(payload)
    if len(parts) == 1:
        return xxhash.xxh3_128_digest(parts[0])
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


def pack(header: Header) -> bytes:
    *fixed, table, grain, grains, version = header
    data = _FIXED.pack(MAGIC, version, *fixed, len(table), grain, grains, bytes(8)) + table
    data = data.ljust(header.header_bytes, b"\0")
    return data[:_CHECK_AT] + xxhash.xxh3_64_digest(data) + data[_CHECK_AT + 8 :]


def parse(data: View) -> Header | Flaw:
    """The header at the start of `data`, or its flaw. `data` may be longer."""
    if len(data) < _FIXED.size:
        return Flaw.FOREIGN
    magic, version, kind, size, payload, form, key, digest, table, grain, grains, check = _FIXED.unpack_from(
        data
    )
    if magic != MAGIC:
        return Flaw.FOREIGN
    if not _FIXED.size <= size <= len(data):
        return Flaw.HEADER
    whole = bytearray(data[:size])
    whole[_CHECK_AT : _CHECK_AT + 8] = bytes(8)
    if xxhash.xxh3_64_digest(whole) != check:
        return Flaw.HEADER
    if version not in VERSIONS:
        return Flaw.VERSION
    if _FIXED.size + table > size or kind not in _KINDS:
        return Flaw.HEADER
    names = bytes(whole[_FIXED.size : _FIXED.size + table])
    return Header(_KINDS[kind], size, payload, form, key, digest, names, grain, grains, version)


def flaw_of(value: View, key: RecordKey) -> Flaw | None:
    """What is wrong with a whole value of this key, for any form. None: every byte is right."""
    header = parse(value)
    if isinstance(header, Flaw):
        return header
    if header.key != key:
        return Flaw.KEY
    if header.header_bytes + header.payload_bytes != len(value):
        return Flaw.FORM
    payload = memoryview(value)[header.header_bytes :]
    return None if checksum([payload]) == header.checksum else Flaw.CHECKSUM


_KINDS: dict[int, Kind | Note] = {kind.value: kind for kind in (*Kind, *Note)}
