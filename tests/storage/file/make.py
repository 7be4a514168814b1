"""Records with a name, and small stores. The bytes of a record follow from its name."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tiercel.storage.base import Get, Put
from tiercel.storage.file import FileStore, direct
from tiercel.storage.record import Form, RecordKey
from tiercel.types import Kind

KIB = 1024
SIZE = 1024 * KIB
SEGMENT_BYTES = 64 * KIB


def make_store(path: Path, size: int = SIZE, **options) -> FileStore:
    return FileStore(path, size, **({"segment_bytes": SEGMENT_BYTES, "free": 0} | options))


@cache
def page_key(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def key_of(name: str, kind: Kind = Kind.PAGE) -> RecordKey:
    return form_of(name, kind).key(page_key(name))


def size_of(name: str) -> int:
    """A few kilobytes, rarely a multiple of anything; `name:12000` says it."""
    _, _, size = name.partition(":")
    return int(size) if size else 1 + zlib.crc32(name.encode()) % 10_000


@cache
def payload_of(name: str) -> bytes:
    return hashlib.shake_128(name.encode()).digest(size_of(name))


@cache
def form_of(name: str, kind: Kind = Kind.PAGE) -> Form:
    size = size_of(name)
    return Form(kind, b"f" * 16, (("kv", (0,), size),), size, FileStore.align)


@cache
def make_put(name: str, kind: Kind = Kind.PAGE) -> Put:
    payload = payload_of(name)
    return Put(key_of(name, kind), [form_of(name, kind).header(page_key(name), [payload]), payload])


def room_of(name: str) -> int:
    """Bytes that its record takes in a segment."""
    return direct.padded(form_of(name).record_bytes)


def put(store: FileStore, *names: str) -> list[bool]:
    return store.put([make_put(name) for name in names])


def keep(store: FileStore, *names: str) -> None:
    assert put(store, *names) == [True] * len(names)


def delete(store: FileStore, *names: str) -> int:
    return store.delete([key_of(name) for name in names])


def held(store: FileStore, *names: str) -> list[bool]:
    """Which of these it has. What it has is compared byte for byte; contains and get agree."""
    found = got(store, *names)
    assert store.contains([key_of(name) for name in names]) == found
    return found


def got(store: FileStore, *names: str) -> list[bool]:
    """The same, where others may put something and so let something go between two questions."""
    wanted = []
    for name in names:
        form = form_of(name)
        parts = [memoryview(bytearray(form.header_bytes)), memoryview(bytearray(form.payload_bytes))]
        wanted.append(Get(key_of(name), parts))
    found = store.get(wanted)
    for name, each, hit in zip(names, wanted, found, strict=True):
        if hit:
            header, payload = each.parts
            assert form_of(name).flaw(header, page_key(name), [payload]) is None
            assert payload == payload_of(name)
    return found


def has_all(store: FileStore, *names: str) -> bool:
    return all(held(store, *names))


def has_none(store: FileStore, *names: str) -> bool:
    return not any(held(store, *names))


def files_of(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir() if file.name.startswith("segment-"))


def bytes_of(path: Path) -> int:
    """Bytes of all segments, as the file system counts."""
    return sum((path / name).stat().st_size for name in files_of(path))


def aligned(data: bytes) -> memoryview:
    """The same bytes where direct I/O can take them."""
    view = memoryview(mmap.mmap(-1, len(data)))
    view[:] = data
    return view


class Watched(direct.Calls):
    """The operating system with a listener: `before` is asked before every call that changes something, by
    name; it may raise, or return how many bytes of a write are let through."""

    CHANGES = ("pwritev", "fdatasync", "fsync", "fallocate", "ftruncate", "unlink")

    def __init__(self, before) -> None:
        self.before = before

    def pwritev(self, file, views, offset):
        most = self.before("pwritev")
        if most is None:
            return super().pwritev(file, views, offset)
        return super().pwritev(file, [views[0][:most]], offset) if most else 0

    def fdatasync(self, file):
        self.before("fdatasync")
        super().fdatasync(file)

    def fsync(self, file):
        self.before("fsync")
        super().fsync(file)

    def fallocate(self, file, offset, size):
        self.before("fallocate")
        super().fallocate(file, offset, size)

    def ftruncate(self, file, size):
        self.before("ftruncate")
        super().ftruncate(file, size)

    def unlink(self, path):
        self.before("unlink")
        super().unlink(path)


def failing(call: str, code: int, times: int = 10**9):
    """A listener that lets a call fail `times` times."""
    left = [times]

    def before(name: str) -> None:
        if name == call and left[0] > 0:
            left[0] -= 1
            raise OSError(code, os.strerror(code))

    return before


@contextmanager
def in_memory(folder: Path) -> Iterator[Path]:
    """A folder in memory where that can be: for what has nothing to do with a disk."""
    if not Path("/dev/shm").is_dir():
        yield folder
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tiercel-") as name:
        yield Path(name)


def without_queue(monkeypatch) -> None:
    """As on a machine without the kernel's queue: threads read."""

    def refuse():
        raise OSError(errno.ENOSYS, "no such call")

    monkeypatch.setattr(direct, "take_queue", refuse)


NO_SPACE, BROKEN = errno.ENOSPC, errno.EIO
