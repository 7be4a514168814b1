"""How records were used, saved in a file beside the segments for the next process.

    magic, version, clock, checksum of the rest │ for each segment: number, rows │ used … │ hits …

Only eviction reads it, so it may be old or missing: it is written from time to time and when the store is
closed, without fsync. Records that are newer than the file count as used later. If the file is damaged, for
example by a crash, the order of writing replaces the uses.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from tiercel.storage.file import direct
from tiercel.storage.file.segment import Segment

_HEAD = struct.Struct("<8sHxxxxxxQ16s")
_MAGIC = b"tiercel\x0b"
_VERSION = 1
_SEGMENT = struct.Struct("<QQ")
_BYTES_PER_ROW = 16
_CLOCK_MOST = 2**62
"""A larger clock is damage: the clock must not overflow."""

BYTES_PUT_PER_BYTE = 64
"""The file is written again after 64 times its size in records: it adds less than 2 % to what is written."""


class Uses(NamedTuple):
    """What was saved: for each segment the last use and the hits of its first rows."""

    clock: int
    of: Mapping[int, tuple[np.ndarray, np.ndarray]]


def bytes_for(segments: Iterable[Segment]) -> int:
    return sum(_SEGMENT.size + _BYTES_PER_ROW * len(segment.table) for segment in segments)


def pack(segments: Iterable[Segment], clock: int) -> bytes:
    """The bytes of the file. Callers hold the log's lock."""
    parts = []
    for segment in segments:
        parts += [_SEGMENT.pack(segment.number, len(segment.used)), bytes(segment.used), bytes(segment.hits)]
    body = b"".join(parts)
    return _HEAD.pack(_MAGIC, _VERSION, clock, xxhash.xxh3_128_digest(body)) + body


def parse(data: bytes) -> Uses:
    """What `pack` made. Empty if it is damaged."""
    nothing = Uses(0, {})
    if len(data) < _HEAD.size:
        return nothing
    magic, version, clock, digest = _HEAD.unpack_from(data)
    if (magic, version) != (_MAGIC, _VERSION) or xxhash.xxh3_128_digest(data[_HEAD.size :]) != digest:
        return nothing
    of, at = {}, _HEAD.size
    try:
        while at < len(data):
            number, rows = _SEGMENT.unpack_from(data, at)
            columns = np.frombuffer(data, np.uint64, 2 * rows, at + _SEGMENT.size)
            of[number] = columns[:rows], columns[rows:]
            at += _SEGMENT.size + _BYTES_PER_ROW * rows
            clock = max(clock, int(columns.max(initial=0)))
    except (ValueError, OverflowError, struct.error):  # the checksum is right, the content is not
        return nothing
    return Uses(clock, of) if clock < _CLOCK_MOST else nothing


def save(path: Path, data: bytes) -> None:
    """Overwrite the file. A failure does no harm."""
    with suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(file, "wb") as out:
            out.write(data)


def load(path: Path) -> Uses:
    try:
        file = direct.calls.open(str(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(file, "rb") as kept:
            return parse(kept.read())
    except OSError:
        return Uses(0, {})
