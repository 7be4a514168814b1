"""What a reader and a server that offers its host pages say to each other, as bytes.

    reader                              offering server
    ──────                              ───────────────
                 ◄── HELLO              which start of the server this is (boot), a challenge
    PROOF ──►                           that the reader has the key, and a challenge of its own
                 ◄── WELCOME | REFUSED  that the server has the key; the forms of its records; its transports
    FIND ──►                            which of these records are there? with times to hold them and to wait
                 ◄── FOUND …            each with its header and where its bytes are; several, if it waits
    READ ──►                            send these records of that lease            (transport=tcp)
                 ◄── BYTES, the bytes   in the order of the records
    DONE ──►                            I have read them                            (other transports)
                 ◄── END                the lease has ended; whether it held until now

A message is its length, its kind and its body. Numbers are little-endian. The key is never sent, and nothing
is encrypted: a key keeps strangers out, a network that others listen to needs a tunnel.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from tiercel.errors import StoreError
from tiercel.storage.record import ALIGN_LEAST, KEY_BYTES, RecordKey

MAGIC = b"tiercel peer 2\n\0"
BOOT_BYTES = 16
NONCE_BYTES = 32
KEYS_MOST = 1 << 16
"""The most keys in one question."""
ALIGN_MOST = 1 << 16
BODY_MOST = 64 << 20
GREETING_MOST = 4096
"""The longest message of a client that has not shown the key."""

HEAD = struct.Struct("<IB")
_FIND = struct.Struct("<BddII")
_FOUND = struct.Struct("<QBI")
_ENTRY = struct.Struct("<IBQII")
_PIECE = struct.Struct("<QQ")
_READ = struct.Struct("<QI")
_END = struct.Struct("<QB")
_BYTES = struct.Struct("<Q")


class Message(IntEnum):
    HELLO = 1
    PROOF = 2
    WELCOME = 3
    REFUSED = 4
    FIND = 5
    FOUND = 6
    READ = 7
    BYTES = 8
    DONE = 9
    END = 10


class Readiness(IntEnum):
    """What a server's host memory has of a record."""

    ABSENT = 0
    COMING = 1  # being computed, or on its way to the host
    HERE = 2


class Hello(NamedTuple):
    boot: bytes
    nonce: bytes

    def pack(self) -> bytes:
        return MAGIC + self.boot + self.nonce

    @staticmethod
    def parse(body: bytes) -> Hello:
        size = len(MAGIC) + BOOT_BYTES
        if not body.startswith(MAGIC) or len(body) != size + NONCE_BYTES:
            raise StoreError("it does not speak the protocol of peers, or another version of it")
        return Hello(body[len(MAGIC) : size], body[size:])


def proof(key: str, who: bytes, hello: Hello, nonce: bytes) -> bytes:
    """Shows that its sender has the key. Without a key both sides use the empty one."""
    return hmac.digest(key.encode(), who + hello.boot + hello.nonce + nonce, hashlib.sha256)


class Welcome(NamedTuple):
    proof: bytes
    forms: Sequence[bytes]
    """The forms of the records that are offered (`Grain.form`). Keys of another form are not there."""
    transports: dict[str, Any]
    """Name of each transport, and what a reader must know to use it."""

    def pack(self) -> bytes:
        told = {"forms": [form.hex() for form in self.forms], "transports": self.transports}
        return self.proof + json.dumps(told).encode()

    @staticmethod
    def parse(body: bytes) -> Welcome:
        try:
            told = json.loads(body[32:])
            forms, transports = [bytes.fromhex(form) for form in told["forms"]], told["transports"]
        except (ValueError, TypeError, KeyError):
            transports = None
        if not isinstance(transports, dict):
            raise StoreError("its greeting can not be read")
        return Welcome(body[:32], forms, transports)


class Find(NamedTuple):
    """Which of these records are there? With `hold_s`, records that are there are held, and come with their
    headers and places. With `wait_s`, the server waits for those that are not there yet."""

    keys: Sequence[RecordKey]
    hold_s: float = 0.0
    wait_s: float = 0.0
    places: bool = False
    align: int = ALIGN_LEAST
    """The alignment of payloads: headers have a multiple of this."""

    def pack(self) -> bytes:
        own = _FIND.pack(self.places, self.hold_s, self.wait_s, self.align, len(self.keys))
        return own + b"".join(self.keys)

    @staticmethod
    def parse(body: bytes) -> Find:
        try:
            places, hold_s, wait_s, align, count = _FIND.unpack_from(body)
        except struct.error as error:
            raise StoreError(f"a question that can not be read: {error}") from error
        right = len(body) == _FIND.size + count * KEY_BYTES and count <= KEYS_MOST
        right = right and 0 < align <= ALIGN_MOST and align % ALIGN_LEAST == 0
        if not right or not (0 <= hold_s < 1e6 and 0 <= wait_s < 1e6):
            raise StoreError("a question that can not be read")
        at = range(_FIND.size, len(body), KEY_BYTES)
        return Find([RecordKey(body[i : i + KEY_BYTES]) for i in at], hold_s, wait_s, bool(places), align)


class Entry(NamedTuple):
    """The answer for one key, by its number in the question."""

    number: int
    readiness: Readiness
    payload_bytes: int = 0
    header: bytes = b""
    pieces: Sequence[tuple[int, int]] = ()
    """(offset in the memory that is offered, bytes), in the order of the record."""


class Found(NamedTuple):
    """An answer. A question without `wait_s` gets one, with every key. A question with `wait_s` gets several:
    each has the keys decided since the one before, none of them COMING; the last one is marked."""

    entries: Sequence[Entry]
    lease: int = 0
    """0: nothing is held."""
    last: bool = True

    def pack(self) -> bytes:
        parts = [_FOUND.pack(self.lease, self.last, len(self.entries))]
        for number, readiness, size, header, pieces in self.entries:
            parts += [_ENTRY.pack(number, readiness, size, len(header), len(pieces)), header]
            parts += [_PIECE.pack(*piece) for piece in pieces]
        return b"".join(parts)

    @staticmethod
    def parse(body: bytes, keys: int) -> Found:
        """`keys`: how many were asked for. Each may occur once."""
        try:
            lease, last, count = _FOUND.unpack_from(body)
            entries = list(_entries(body, count))
        except (struct.error, ValueError) as error:
            raise StoreError(f"an answer that can not be read: {error}") from error
        numbers = [entry.number for entry in entries]
        if len(set(numbers)) != len(numbers) or any(number >= keys for number in numbers):
            raise StoreError("an answer to something that was not asked")
        return Found(entries, lease, bool(last))


def _entries(body: bytes, count: int) -> Iterator[Entry]:
    at = _FOUND.size
    for _ in range(count):
        number, readiness, size, header, pieces = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size
        end = at + header + pieces * _PIECE.size
        if end > len(body):
            raise ValueError("it ends too early")
        places = list(_PIECE.iter_unpack(body[at + header : end]))
        yield Entry(number, Readiness(readiness), size, body[at : at + header], places)
        at = end
    if at != len(body):
        raise ValueError("it is too long")


class Read(NamedTuple):
    """Send these records of a lease: by their numbers in the question."""

    lease: int
    numbers: Sequence[int]

    def pack(self) -> bytes:
        count = len(self.numbers)
        return _READ.pack(self.lease, count) + struct.pack(f"<{count}I", *self.numbers)

    @staticmethod
    def parse(body: bytes) -> Read:
        try:
            lease, count = _READ.unpack_from(body)
            return Read(lease, struct.unpack(f"<{min(count, KEYS_MOST)}I", body[_READ.size :]))
        except struct.error as error:
            raise StoreError(f"a question that can not be read: {error}") from error


class End(NamedTuple):
    """A lease has ended. `held`: it held until now, so no byte that was read has changed meanwhile."""

    lease: int
    held: bool = True

    def pack(self) -> bytes:
        return _END.pack(self.lease, self.held)

    @staticmethod
    def parse(body: bytes) -> End:
        if len(body) != _END.size:
            raise StoreError("an answer that can not be read")
        lease, held = _END.unpack(body)
        return End(lease, bool(held))


def pack_bytes(size: int) -> bytes:
    return _BYTES.pack(size)


def parse_bytes(body: bytes) -> int:
    if len(body) != _BYTES.size:
        raise StoreError("an answer that can not be read")
    return int(_BYTES.unpack(body)[0])
