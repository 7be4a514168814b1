"""Bytes between memory and a file: few calls, large ones, and past the page cache where the file system can.

Direct I/O wants everything aligned: the place in the file, the address in memory, the length. What is
aligned is read and written where it lies; what is not (a header made in Python, the end of a page that is no
multiple of 4096) passes through staging memory, in the same call:

    parts     ├─ header ─┤├──────── payload ────────┤   any addresses
    stream    0          4096                    ...    bytes one after the other, padded to 4096
    views     ├─ staging ┤├── payload itself ──┤├staging┤   what preadv and pwritev get

The page cache is left out because a record is read once, into memory that is a cache itself: through the
page cache every byte would be copied twice and push out something else (cold random reads of 256 KiB on a
virtual disk: 2.1 GB/s direct, 0.9 buffered).
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from tiercel.storage.file.queue import (
    QUEUE_DEPTH,
    QUEUE_VIEWS,
    Queue,
    Request,
    address,
    give_queue_back,
    take_queue,
)
from tiercel.storage.record import View

ALIGN = 4096
"""What every disk and file system in use takes; also the least that two records are apart."""

STAGING_BYTES = 16 * 1024**2
"""One call's most. Larger ones are no faster: aarch64, virtual disk, 2026-10: 8 MiB 3.3 GB/s, 64 MiB 3.5."""

VIEWS_MOST = 1024
"""IOV_MAX of Linux."""

STRAIGHT_LEAST = 16 * 1024
"""Shorter parts are copied: that takes less time than a view more."""

NO_LINKS = os.O_NOFOLLOW | os.O_NONBLOCK
"""For files that somebody else may have put in our folder: no link is followed, no pipe waited for."""

ZEROS = memoryview(bytes(ALIGN))
NOWHERE = memoryview(bytearray(ALIGN))
"""Padding: what is written, and where what is read goes."""


class Space(NamedTuple):
    """Bytes of a file system: those left for us, and all."""

    free: int
    in_all: int


class Calls:
    """Every call to the operating system that can fail. Tests put their own in place of `calls`."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def pwritev(self, file: int, views: Sequence[View], offset: int) -> int:
        return os.pwritev(file, views, offset)

    def preadv(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        return os.preadv(file, views, offset)

    def fdatasync(self, file: int) -> None:
        os.fdatasync(file)

    def fsync(self, file: int) -> None:
        os.fsync(file)

    def fallocate(self, file: int, offset: int, size: int) -> None:
        try:
            os.posix_fallocate(file, offset, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            os.ftruncate(file, offset + size)  # a file system without it: full is found out by writing

    def ftruncate(self, file: int, size: int) -> None:
        os.ftruncate(file, size)

    def unlink(self, path: str) -> None:
        os.unlink(path)  # noqa: PTH108 - every call stands here as the system knows it

    def space(self, path: str) -> Space:
        """Of the file system that a path is in."""
        found = os.statvfs(path)
        return Space(free=found.f_bavail * found.f_frsize, in_all=found.f_blocks * found.f_frsize)


calls = Calls()

_DAMAGE = frozenset((errno.EIO, errno.EBADMSG, errno.EILSEQ, errno.ENODATA, errno.EREMOTEIO, errno.EUCLEAN))


def is_damage(error: OSError) -> bool:
    """Whether the disk says that it can not give these bytes back. Other places may still be readable."""
    return error.errno in _DAMAGE


def padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def shares(rooms: Sequence[int], most: int) -> Iterator[slice]:
    """Things of these sizes in their order, as many together as make `most` bytes; a larger one alone."""
    start = total = 0
    for end, room in enumerate(rooms):
        if end > start and total + room > most:
            yield slice(start, end)
            start, total = end, 0
        total += room
    if start < len(rooms):
        yield slice(start, len(rooms))


def aligned(size: int) -> memoryview:
    """New memory that direct I/O can use; it is given back with its last view."""
    return memoryview(mmap.mmap(-1, padded(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:size]


def aligned_copy(data: bytes) -> memoryview:
    memory = aligned(len(data))
    memory[:] = data
    return memory


class Lane:
    """What a thread needs to move bytes: staging memory, and the kernel's queue if there is one."""

    def __init__(self, size: int, queue: Queue | None) -> None:
        self.memory = aligned(size)
        self.queue = queue


class Lanes:
    """Lanes are taken by one thread, and given back; as many as are asked for at one time are made."""

    def __init__(self, *, queued: bool = False, size: int = STAGING_BYTES) -> None:
        assert size % ALIGN == 0
        self.size = size
        self.queued = queued
        self._free = [Lane(size, self._make_queue())]

    @contextmanager
    def take(self) -> Iterator[Lane]:
        try:
            lane = self._free.pop()
        except IndexError:
            lane = Lane(self.size, self._make_queue())
        try:
            yield lane
        finally:
            self._free.append(lane)

    def _make_queue(self) -> Queue | None:
        if self.queued:
            with suppress(OSError):
                return take_queue()
        self.queued = False
        return None

    def close(self) -> None:
        for lane in self._free:
            if lane.queue:
                give_queue_back(lane.queue)


def gather(parts: Sequence[View], staging: memoryview) -> list[View]:
    """The parts as `write` takes them, one after the other: what is not aligned is copied to staging, which
    is as long as they are together. Their bytes in all are a multiple of ALIGN."""
    views, passing = _lay(parts, staging)
    for part, place in passing:
        place[:] = part
    return views


def write(file: int, offset: int, views: Sequence[View]) -> None:
    """Aligned views, one after the other."""
    if _carry(calls.pwritev, file, list(views), offset) < sum(map(len, views)):
        raise OSError(errno.EIO, "the disk takes no more of a write")


def read(file: int, offset: int, parts: Sequence[memoryview], staging: memoryview) -> bool:
    """Fill the parts one after the other; False: the file ends before, or is damaged there. The bytes in all
    are a multiple of ALIGN."""
    for at, piece in _pieces(parts, len(staging)):
        views, passing = _lay(piece, staging)
        try:
            if _carry(calls.preadv, file, views, offset + at) < sum(map(len, piece)):
                return False
        except OSError as error:
            if is_damage(error):
                return False
            raise
        for part, place in passing:
            part[:] = place
    return True


def read_many(requests: Sequence[Request], lane: Lane) -> list[bool]:
    """`read` for each (file, offset, parts), as many at once as can be."""
    answers: list[bool] = []
    for wave in _waves(requests, lane):
        if lane.queue is None or len(wave) == 1:
            answers += [read(*request, lane.memory) for request in wave]
        else:
            answers += _read_wave(wave, lane.queue, lane.memory)
    return answers


def _waves(requests: Sequence[Request], lane: Lane) -> Iterator[list[Request]]:
    """As many requests at a time as the queue takes, and staging whatever their alignment."""
    wave, size, views = list[Request](), 0, 0
    for request in requests:
        bytes_more, views_more = sum(map(len, request[2])), 2 * len(request[2])
        full = size + bytes_more > len(lane.memory) or views + views_more > QUEUE_VIEWS
        if wave and (full or len(wave) == QUEUE_DEPTH):
            yield wave
            wave, size, views = [], 0, 0
        wave.append(request)
        size, views = size + bytes_more, views + views_more
    if wave:
        yield wave


def _read_wave(wave: Sequence[Request], queue: Queue, staging: memoryview) -> list[bool]:
    used = 0
    laid: list[Request] = []
    passing: list[list[tuple[Any, memoryview]]] = []
    for file, offset, parts in wave:
        views, through = _lay(parts, staging[used:])
        laid.append((file, offset, views))
        passing.append(through)
        used += sum(len(place) for _, place in through)
    got = queue.read(laid)
    whole = [size == sum(map(len, parts)) for size, (_, _, parts) in zip(got, wave, strict=True)]
    for complete, through in zip(whole, passing, strict=True):
        if complete:
            for part, place in through:
                part[:] = place
    # What did not come in one go is asked for again, one by one: there an error is an error.
    return [complete or read(*request, staging) for complete, request in zip(whole, wave, strict=True)]


def _pieces(parts: Sequence[View], bytes_most: int) -> Iterator[tuple[int, Sequence[View]]]:
    """The parts in pieces that staging can hold, each with where it begins. Almost always that is one."""
    size = sum(map(len, parts))
    assert size % ALIGN == 0, size
    if size <= bytes_most:
        yield 0, parts
        return
    at, size, piece = 0, 0, list[View]()
    for part in parts:
        view = memoryview(part)
        while len(view):
            taken = view[: bytes_most - size]
            piece.append(taken)
            size += len(taken)
            view = view[len(taken) :]
            if size == bytes_most:
                yield at, piece
                at, size, piece = at + size, 0, []
    if piece:
        yield at, piece


def _lay(parts: Sequence[Any], staging: memoryview) -> tuple[list[View], list[tuple[Any, memoryview]]]:
    """What the system gets for these parts, and what passes through staging: (part, its place there).
    Every view is a multiple of ALIGN long: staging is left only where the stream is aligned."""
    views: list[View] = []
    passing: list[tuple[View, memoryview]] = []
    position = used = left = 0
    for part in parts:
        size = len(part)
        if size >= STRAIGHT_LEAST and position % ALIGN == 0 and _is_aligned(part):
            if used > left:
                views.append(staging[left:used])
                left = used
            rest = size % ALIGN
            part = memoryview(part)  # a slice of a bytearray would be a copy, somewhere else
            views.append(part[: size - rest])
            position += size
            part, size = part[size - rest :], rest
        else:
            position += size
        if size:
            passing.append((part, staging[used : used + size]))
            used += size
    if used > left:
        views.append(staging[left:used])
    return views, passing


def _carry(call: Callable[[int, Sequence[Any], int], int], file: int, views: list[View], offset: int) -> int:
    """The views through the system, also if it takes several calls; answers for how many bytes it did."""
    done = 0
    while views:
        moved = call(file, views[:VIEWS_MOST], offset + done)
        done += moved
        if moved == 0 or moved % ALIGN:
            break
        while views and moved >= len(views[0]):
            moved -= len(views.pop(0))
        if moved:
            views[0] = views[0][moved:]
    return done


def _is_aligned(part: View) -> bool:
    try:
        return address(part) % ALIGN == 0
    except TypeError:
        return False  # read-only: its address is not told, so it passes through staging
