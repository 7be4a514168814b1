"""The segments of a folder as one log: records are appended, segments begin and end, segments go.

**The index is always what a replay of the segments would give.** After a failed write the segment ends: the
bytes of that write may or may not be a whole record, so nothing is written over them or behind them. If the
write was shared by several jobs, each job is tried again by itself. The keys of a failed write are *doubtful*
until they are written again: a replay may find them or not.

**One thread writes at a time** (`storage.file.commit`), also to begin a segment, to clear and to compact.
Other threads can read meanwhile.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, chain
from threading import Condition
from typing import Any

from tiercel.policy.evict import EvictPolicy
from tiercel.storage.base import trips
from tiercel.storage.file import direct, index, room
from tiercel.storage.file.commit import GroupCommit, Job, Record, Writer, gather
from tiercel.storage.file.direct import ALIGN, Lanes, padded
from tiercel.storage.file.folder import Folder
from tiercel.storage.file.index import Index, load_uses, save_uses
from tiercel.storage.file.reading import READERS
from tiercel.storage.file.room import Candidate, Limits, Standing
from tiercel.storage.file.segment import EVERYTHING, Segment, copy, create, load, note, packed_bytes
from tiercel.storage.record import Note, RecordKey
from tiercel.threads import Crew

FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""Errors that mean that the disk is full. Any other error is a failure."""

GROUP_BYTES = 32 * 1024**2  # The most bytes of one write. The next thread waits that long.
log = logging.getLogger(__name__)


class Log:
    """The segments, oldest first, with the index of their records."""

    def __init__(self, folder: Folder, limits: Limits, policy: EvictPolicy) -> None:
        self.index = Index()
        self.lock = Condition()
        self.limits = limits
        self.evicted = 0
        self.damaged = 0  # damaged records that were found, and are not used
        self.doubtful: set[RecordKey] = set()
        self.lanes = Lanes(queued=folder.direct_io)
        self.readers = Crew(READERS - 1, "tiercel-file-store")
        self.commit = GroupCommit(self.lock, self._write_next)
        self._folder = folder
        self._policy = policy
        self._active: Segment | None = None
        self._number = 0
        self._bytes_put = 0  # since the uses were saved, about
        self._read_only = True

    @property
    def bytes_on_disk(self) -> int:
        return sum(segment.bytes_on_disk for segment in self.index.segments.values())

    # Opening and closing

    def load(self, *, read_only: bool) -> None:
        """Open the segments. A reader starts again if the writing process has removed a file meanwhile."""
        while True:
            segments: list[Segment] = []
            try:
                for number in self._folder.numbers():
                    path = self._folder.segment(number)
                    segments.append(load(path, number, direct_io=self._folder.direct_io, read_only=read_only))
                    self._number = number
                break
            except BaseException as error:
                for segment in segments:
                    segment.close()
                if not (read_only and isinstance(error, FileNotFoundError)):
                    raise
        self.index.load(segments, load_uses(self._folder.uses))
        self.damaged = sum(segment.damaged for segment in segments)
        self._read_only = read_only
        if not read_only:
            self._settle()

    def _settle(self) -> None:
        """Seal segments that a crash left open. Evict down to the size. Resume the last segment if it was
        sealed, is less than half full, and if at its full size there is still room for another segment. Into
        one that a crash left open another process (`Writer`) may still be writing."""
        self._folder.sync()  # a killed process may have created or removed files
        closed = {segment for segment in self.index.segments.values() if segment.sealed}
        for segment in list(self.index.segments.values()):
            self._retire(segment)
        while self.bytes_on_disk > self.limits.size:
            self._evict(list(self.index.segments.values()))
        *_, last = [None, *self.index.segments.values()]
        if last not in closed or last.table.end >= self.limits.segment_bytes // 2:
            return
        if self._missing() + self.limits.segment_bytes - last.bytes_on_disk <= 0:
            try:
                last.resume(self.limits.segment_bytes)
                self._active = last
            except OSError:
                self._retire(last)

    def close(self) -> None:
        """The caller makes sure that no thread writes or reads."""
        if self._active:
            self._retire(self._active)
        if not self._read_only:
            save_uses(self._folder.uses, self.index.pack_uses())
        for segment in self.index.segments.values():
            segment.close()
        self.readers.shutdown()
        self.lanes.close()

    # Appending

    def append(self, records: Sequence[Record], kind: int = 0, writer: Writer | None = None) -> int:
        """Write records, or notes of one kind, durably and in this order; then they are in the index. Returns
        how many were written: there was no room for the others. `writer`: who has the bytes of these records,
        and writes them."""
        done = 0
        most = min(self.lanes.size, self.limits.segment_bytes // 4)  # more would leave segments less full
        for some in trips(records, most, lambda record: padded(record.size)):
            with self.lanes.take() as lane:
                keys, sizes, _ = zip(*some, strict=True)
                job = Job(keys, sizes, kind, () if writer else gather(some, lane.memory), writer)
                self.commit.run(job)
            if job.error is not None:
                if job.error.errno in FULL:
                    break
                raise job.error
            done += len(some)
        return done

    def _write_next(self, queue: Sequence[Job]) -> None:
        """Write the first jobs of the queue, as many as fit into a segment."""
        group = [queue[0]]
        try:
            segment = self._segment_for(group[0])
            group = _group(queue, segment)
            self._write(segment, group)
        except OSError as error:
            for job in group:
                job.by_itself = True
            if len(group) == 1:
                group[0].error, group[0].done = error, True

    def _segment_for(self, job: Job) -> Segment:
        """The active segment, or a new one if the job does not fit into it. Raises OSError."""
        room, rows = job.room, len(job.keys)
        while not self._has_place(room, rows):
            if not self._begin(room + packed_bytes(rows)):
                raise OSError(errno.ENOSPC, "no room")
        assert self._active is not None
        return self._active

    def _has_place(self, room: int, rows: int = 1) -> bool:
        return self._active is not None and not self._active.broken and self._active.fits(room, rows)

    def _write(self, segment: Segment, group: Sequence[Job]) -> None:
        """Write jobs durably; then they are in the index."""
        try:
            if group[0].writer is None:
                views = [view for job in group for view in job.views]
                direct.write(segment.file, segment.table.end, views)
            else:
                _write_elsewhere(segment, group)
            direct.calls.fdatasync(segment.file)
        except BaseException:
            segment.broken = True
            self.doubtful.update(key for job in group for key in job.keys)
            raise
        with self.lock:
            for job in group:
                self.index.add(segment, job.keys, job.sizes, job.kind)
                self.doubtful.difference_update(job.keys)
                job.done = True

    # Segments. All of this needs a turn (`commit`)

    def _begin(self, leave: int) -> bool:
        """Begin a segment; `leave` bytes of it stay free for the caller. False: there is no room for one."""
        self._end()
        if self._bytes_put > index.BYTES_PUT_PER_BYTE * self.index.bytes_of_uses():
            self._bytes_put = 0
            with self.lock:
                data = self.index.pack_uses()
            save_uses(self._folder.uses, data)
        segment = self._create_if_room()
        if segment is None:
            return False
        self._bytes_put += segment.bytes_on_disk
        try:
            self._make_room(segment, leave)
        finally:
            self._active = segment
        return True

    def _end(self) -> None:
        if self._active:
            active, self._active = self._active, None
            self._retire(active)

    def _create_if_room(self) -> Segment | None:
        try:
            return self._create() if self._make_room() else None
        except OSError as error:
            if error.errno in FULL:
                return None
            raise

    def _create(self) -> Segment:
        self._number += 1
        path = self._folder.segment(self._number)
        segment = create(path, self._number, self.limits.segment_bytes, direct_io=self._folder.direct_io)
        with self.lock:
            self.index.segments[segment.number] = segment
        try:
            self._folder.sync()
        except OSError:
            self._retire(segment)
            raise
        return segment

    def _retire(self, segment: Segment) -> None:
        """Seal a segment. A failure does no harm: without a table it is scanned when it is opened."""
        if segment.unreadable:
            return
        with suppress(OSError):
            if not len(segment.table):
                self._remove(segment)
            elif not segment.sealed:
                segment.seal()

    def _remove(self, segment: Segment) -> None:
        """Remove the file. Reads that have begun can finish."""
        direct.calls.unlink(str(segment.path))
        with self.lock:
            del self.index.segments[segment.number]
            segment.close()
        self._folder.sync()

    # Making room

    def _missing(self, bytes_free: int | None = None) -> int:
        """How many bytes must be freed before another segment can be begun."""
        if bytes_free is None:
            bytes_free = self._folder.space().free
        return self.limits.missing(bytes_on_disk=self.bytes_on_disk, bytes_free=bytes_free)

    def _make_room(self, into: Segment | None = None, leave: int = 0) -> bool:
        """Evict segments until there is room for a new one. False: not even an empty store has room for it.
        Records that stay are moved `into` a segment, if one is given, of which `leave` bytes stay free."""
        bytes_free = self._folder.space().free
        while (missing := self._missing(bytes_free)) > 0:
            old = [each for each in self.index.segments.values() if each is not into and each.bytes_on_disk]
            if sum(segment.bytes_on_disk for segment in old) < missing:
                return False
            bytes_free += self._evict(old, into, leave)
        return True

    def _evict(self, old: Sequence[Segment], into: Segment | None = None, leave: int = 0) -> int:
        """Evict one of these segments. Returns its bytes."""
        segment = old[0]
        if into is not None and not into.broken:
            left = into.bytes_on_disk - into.table.end - packed_bytes(len(into.table)) - leave
            old = [each for each in old if each is segment or self._may_go(each, left // 2)]
            standings = [self._standing(each) for each in old]
            number, cold = room.going(standings, left=left, segment_bytes=self.limits.segment_bytes)
            segment = old[number]
            self._carry(segment, cold, into, left)
        size = segment.bytes_on_disk
        self._drop(segment)
        return size

    def _drop(self, segment: Segment) -> None:
        """Forget the records that are left in a segment, and remove it."""
        with self.lock:
            self.evicted += self.index.evict(segment)
        self._remove(segment)

    def _may_go(self, segment: Segment, left: int) -> bool:
        """Whether a segment may be evicted before older ones. Its REMOVED notes about them are then written
        again; a CLEARED note can not be."""
        return Note.CLEARED not in segment.table.notes and ALIGN * len(self._notes(segment)) <= left

    def _standing(self, segment: Segment) -> Standing:
        with self.lock:
            uses = self.index.sample(segment, room.SAMPLE)
        ranks = [self._policy.rank(use) for use in uses]
        notes = len(self._notes(segment))
        carried = segment.live + ALIGN * notes + packed_bytes(segment.table.notes.count(0) + notes)
        return Standing(segment.bytes_on_disk, carried, ranks, room.SAMPLE - len(ranks))

    def _notes(self, segment: Segment) -> list[RecordKey]:
        """Keys of its REMOVED notes that may have to be written again when it is evicted: older segments may
        hold records of these keys."""
        oldest = next(each for each in self.index.segments.values() if each.bytes_on_disk)
        if segment is oldest or Note.REMOVED not in segment.table.notes:
            return []
        named = zip(segment.table.keys, segment.table.notes, strict=True)
        keys = dict.fromkeys(key for key, kind in named if kind == Note.REMOVED)
        return [key for key in keys if key not in self.index]

    def _carry(self, segment: Segment, cold: Any | None, into: Segment, left: int) -> None:
        """Move the warm records of a segment, and notes still needed, into another, durably."""
        rank, sizes = self._policy.rank, segment.table.sizes
        notes = self._notes(segment)
        if notes:
            older = [each.table.keys for each in self.index.segments.values() if each.number < segment.number]
            notes = list(set(notes).intersection(chain.from_iterable(older)))
        with self.lock:
            rows = self.index.live(segment)
            uses = [(row, self.index.use(segment, row)) for row in rows]
            candidates = [Candidate(rank(use), row, padded(sizes[row])) for row, use in uses]
        left -= packed_bytes(len(rows) + len(notes)) + ALIGN * len(notes)
        most = left if cold is None else min(segment.bytes_on_disk // 2, left)
        self._move(segment, room.staying(candidates, cold=cold, bytes_most=most), into)
        if notes:
            self._write(into, [_notes_job(Note.REMOVED, notes)])

    def _move(self, source: Segment, rows: Sequence[int], target: Segment) -> None:
        """Copy records to the end of another segment, durably. Damaged records are left out."""
        if not rows:
            return
        try:
            whole = copy(source, rows, target, self.lanes)
        except BaseException:
            target.broken = True
            self.doubtful.update(source.table.keys[row] for row in rows)
            raise
        if len(whole) < len(rows):
            log.warning("%s: %d damaged records are removed", source.path, len(rows) - len(whole))
        with self.lock:
            self.damaged += len(rows) - len(whole)
            if whole:
                self.index.move(source, whole, target)

    def clear(self) -> None:
        """Forget everything. A CLEARED note does it in one write; without room for the note, the files are
        removed one by one, oldest first."""
        with self.commit.alone():
            with self.lock:
                self.doubtful.update(key for key, _ in self.index.values())
            self._end()
            segment = self._create_if_room()
            if segment is not None:
                self._active = segment
                self._write(segment, [_notes_job(Note.CLEARED, [EVERYTHING])])
            with self.lock:
                self.index.clear()
            for old in list(self.index.segments.values()):
                if old is not segment:
                    self._remove(old)
            self.doubtful.clear()

    def compact(self) -> int:
        """Move the live records out of every segment with dead bytes, oldest first. Returns the bytes gained.
        It stops where there is no room to move records."""
        gained = 0
        with self.commit.alone():
            self._end()
            for segment in list(self.index.segments.values()):
                if not segment.dead:
                    continue
                with self.lock:
                    rows = self.index.live(segment)
                    live = segment.live
                rooms = [padded(segment.table.sizes[row]) for row in rows]
                while rows:
                    if not self._has_place(rooms[0]):
                        self._end()
                        if self._missing() > 0:
                            return gained
                        self._active = self._create()
                    assert self._active is not None
                    total = accumulate(rooms)
                    count = sum(self._has_place(room, number) for number, room in enumerate(total, 1))
                    if not count:
                        return gained
                    self._move(segment, rows[:count], self._active)
                    rows, rooms = rows[count:], rooms[count:]
                gained += segment.bytes_on_disk - live
                self._drop(segment)
        return gained


def _notes_job(kind: Note, keys: Sequence[RecordKey]) -> Job:
    notes = direct.aligned_copy(b"".join(note(kind, key) for key in keys))
    return Job(keys, [ALIGN] * len(keys), kind, [notes])


def _group(queue: Sequence[Job], segment: Segment) -> list[Job]:
    """The first jobs of the queue that may share one write into this segment."""
    first, *others = list(queue)
    group, room, rows = [first], first.room, len(first.keys)
    for job in others:
        room, rows = room + job.room, rows + len(job.keys)
        too_much = room > GROUP_BYTES or not segment.fits(room, rows)
        other = (job.writer is None) != (first.writer is None)
        if too_much or other or job.by_itself or first.by_itself:
            break
        group.append(job)
    return group


def _write_elsewhere(segment: Segment, group: Sequence[Job]) -> None:
    """Let other processes write their jobs, all at the same time. Raises OSError when all have ended."""
    *begins, end = accumulate((job.room for job in group), initial=segment.table.end)
    writers = [(job.writer, begin, job.keys) for job, begin in zip(group, begins, strict=True) if job.writer]
    acts: list[Callable[[], None]] = [
        partial(writer.begin, segment.file, begin, keys) for writer, begin, keys in writers
    ]
    errors = list[OSError]()
    for act in [*acts, *(writer.end for writer, _, _ in writers)]:
        try:
            act()
        except OSError as error:
            errors.append(error)
    if errors:
        segment.table.end = end  # a process that was given up may still write there
        raise errors[0]
