"""Many reads in one system call: the asynchronous I/O of Linux (`io_submit`), without a library.

A thread that does one read after the other leaves the disk idle in between, and takes the GIL again after
every read. Here a whole batch is submitted at once: two system calls, whatever its length. It works on Linux
with direct I/O only (the kernel does buffered reads synchronously). Everywhere else threads do the reads.

Random reads, aarch64, 2 cores, virtual disk, 2026-10: 64 KiB 3.6 GB/s (4 threads with preadv: 1.5), 256 KiB
5.0 (3.9), 1 MiB 4.4 (4.4).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import numpy as np

from tiercel.storage.record import View

QUEUE_DEPTH = 128  # the most reads of one batch
QUEUE_VIEWS = 1024  # the most views of one batch, over all its reads
_CALLS = {"aarch64": (0, 2, 4), "x86_64": (206, 209, 208)}  # io_setup, io_submit, io_getevents (asm/unistd.h)
_PREADV = 7
_FIELDS = "data:<u8 key:V8 call:<u2 priority:V2 file:<u4 views:<u8 count:<u8 offset:<i8 flags:V16"
_REQUEST = np.dtype([tuple(field.split(":")) for field in _FIELDS.split()])  # struct iocb (linux/aio_abi.h)
_EVENT = np.dtype([("data", "<u8"), ("", "<u8"), ("result", "<i8"), ("", "<i8")])

assert _REQUEST.itemsize == 64 and _EVENT.itemsize == 32

Request = tuple[int, int, Sequence[Any]]  # file, offset, and the views to fill


class Queue:
    """One thread uses it at a time. `read` returns when all its reads have ended."""

    def __init__(self) -> None:
        """Raises OSError where the kernel or a sandbox does not allow it."""
        numbers = _CALLS.get(platform.machine())
        if numbers is None:
            raise OSError(errno.ENOSYS, "unknown machine")
        setup, self._submit, self._wait = numbers
        self._handle = ctypes.c_ulong(0)
        _call(setup, QUEUE_DEPTH, ctypes.addressof(self._handle))
        self._requests = np.zeros(QUEUE_DEPTH, _REQUEST)
        self._requests["call"] = _PREADV
        self._requests["data"] = places = np.arange(QUEUE_DEPTH, dtype=np.uint64)
        self._pointers = places * _REQUEST.itemsize + self._requests.ctypes.data
        self._views = np.zeros((QUEUE_VIEWS, 2), np.uint64)
        self._events = np.zeros(QUEUE_DEPTH, _EVENT)
        arrays = (self._pointers, self._views, self._events)
        self._pointers_at, self._views_at, self._events_at = (array.ctypes.data for array in arrays)

    def read(self, requests: Sequence[Request]) -> list[int]:
        """Fill the views of each request. Returns the bytes read for each, or its negative errno."""
        files, offsets, views = zip(*requests, strict=True)
        counts = [len(each) for each in views]
        *starts, total = accumulate(counts, initial=0)
        assert len(requests) <= QUEUE_DEPTH and total <= QUEUE_VIEWS
        self._views[:total] = [(address(view), len(view)) for each in views for view in each]
        table = self._requests[: len(requests)]
        table["file"] = files
        table["offset"] = offsets
        table["count"] = counts
        table["views"] = [self._views_at + 16 * start for start in starts]
        return self._carry(len(requests))

    def _carry(self, count: int) -> list[int]:
        results = np.zeros(count, np.int64)
        given = taken = 0
        while taken < count:
            try:
                if given < count:
                    at = self._pointers_at + 8 * given
                    given += _call(self._submit, self._handle.value, count - given, at)
            except OSError as error:
                if given == taken:  # no read is running whose end could make room
                    results[given:] = -(error.errno or errno.EIO)
                    break
            got = self._finish(given - taken)
            results[self._events["data"][:got]] = self._events["result"][:got]
            taken += got
        return results.tolist()

    def _finish(self, count: int) -> int:
        """Wait for `count` reads. Returns how many ended."""
        while True:
            with suppress(InterruptedError):
                return _call(self._wait, self._handle.value, count, count, self._events_at, 0)


spare: list[Queue] = []  # queues of closed stores, for reuse: the kernel needs 30 ms to destroy one

os.register_at_fork(after_in_child=spare.clear)


def take_queue() -> Queue:
    """Raises OSError, see `Queue`."""
    try:
        return spare.pop()
    except IndexError:
        return Queue()


def address(view: View) -> int:
    """The address of the first byte. Raises TypeError for read-only memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = [ctypes.c_long] * 6


def _call(number: int, *arguments: int) -> int:
    """A system call, without the GIL."""
    result: int = _libc.syscall(number, *arguments, *(0,) * (5 - len(arguments)))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
