"""Group commit: one thread at a time writes, and it writes the records of all threads that wait.

    thread A   gather ──► queue ─┐
    thread B   gather ──► queue ─┼─► one of them: place ─► write ─► fdatasync ─► in the index, acknowledged
    thread C   gather ──► queue ─┘

Threads prepare their records in parallel (checks and copies). Then one thread writes everything in the queue,
with one fdatasync. A job that comes meanwhile is written by the next thread. Parallel writes are not faster:
an fdatasync waits for all writes to the disk, so all writers end together and leave the disk idle together
(3 threads, 8 MiB each: 2.2 GB/s in parallel, 2.9 GB/s this way; aarch64, virtual disk, 2026-10).

Records of another process are written by that process, at the place that it is given in its turn (`Writer`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition
from typing import NamedTuple, Protocol

from tiercel.storage.file import direct
from tiercel.storage.file.direct import ALIGN, padded
from tiercel.storage.record import RecordKey, View


class Record(NamedTuple):
    """What is appended: a record with its key, or a note with the key it is about."""

    key: RecordKey
    size: int
    parts: Sequence[View]


class Writer(Protocol):
    """Another process, which writes records of its own. `end` follows each `begin`."""

    def begin(self, file: int, offset: int, keys: Sequence[RecordKey]) -> None:
        """Tell it to write these records next to each other, each padded, into this file."""

    def end(self) -> None:
        """Returns when they are written. Raises OSError if they are not, also when the process has ended. It
        may then write them later nevertheless."""


@dataclass(eq=False)
class Job:
    """Records of one caller, written next to each other: all of them, or none."""

    keys: Sequence[RecordKey]
    sizes: Sequence[int]
    kind: int  # the kind of notes; 0 for records
    views: Sequence[View]  # the bytes to write: the records, each padded
    writer: Writer | None = None  # who writes them instead; then there are no views
    done: bool = False
    error: OSError | None = None
    by_itself: bool = False  # a write shared with other jobs failed, and this job is tried again alone

    def __post_init__(self) -> None:
        self.room = sum(map(padded, self.sizes))


class GroupCommit:
    """The queue of jobs, and which thread may write now. Reading needs no turn."""

    def __init__(self, lock: Condition, write: Callable[[Sequence[Job]], None]) -> None:
        """`write` writes the first jobs of the queue, as many as it can, and marks them done."""
        self.queue: deque[Job] = deque()
        self._lock = lock
        self._write = write
        self._busy = False

    def run(self, job: Job) -> None:
        """Return when the job is done: this thread writes, or another thread writes for it."""
        with self._lock:
            self.queue.append(job)
        try:
            while not job.done:
                with self._lock:
                    self._lock.wait_for(lambda: job.done or not self._busy)
                    if job.done:
                        return
                    self._busy = True
                try:
                    self._write(self.queue)
                finally:
                    self._end_turn()
        except BaseException:
            with self._lock:  # the memory of this job is reused as soon as this call ends
                self._lock.wait_for(lambda: not self._busy)
                if not job.done:
                    self.queue.remove(job)
            raise

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Take a turn: no job is written meanwhile."""
        with self._lock:
            self._lock.wait_for(lambda: not self._busy)
            self._busy = True
        try:
            yield
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        with self._lock:
            while self.queue and self.queue[0].done:
                self.queue.popleft()
            self._busy = False
            self._lock.notify_all()


def gather(records: Sequence[Record], memory: memoryview) -> list[View]:
    """Records next to each other, each padded, as they are written. What is not aligned is copied to the
    memory, or to new memory if they are longer."""
    parts, room = list[View](), 0
    for _, size, of_record in records:
        parts += of_record
        room += padded(size)
        if rest := -size % ALIGN:
            parts.append(direct.ZEROS[:rest])
    return direct.gather(parts, memory if room <= len(memory) else direct.aligned(room))
