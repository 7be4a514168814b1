"""The file store: records in the segments of a folder, for one process.

When `put` returns, the records are on the disk and survive any crash. The store has a size, in bytes of its
files, and leaves some space of the file system free. A full store evicts its coldest segment
(`storage.file.room`). Reads and writes do not use the page cache (`storage.file.direct`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any
from weakref import WeakSet

from tiercel.config import size_text
from tiercel.errors import ConfigError, StoreError
from tiercel.policy.evict import make_evict_policy
from tiercel.progress import progress
from tiercel.storage.base import Checked, Get, Put, Store, trips
from tiercel.storage.file.commit import Record, Writer
from tiercel.storage.file.direct import ALIGN, padded
from tiercel.storage.file.folder import Folder
from tiercel.storage.file.log import Log
from tiercel.storage.file.reading import Place, read_records
from tiercel.storage.file.room import Limits, free_for, segment_bytes_for
from tiercel.storage.file.segment import HEADER_MOST, OtherVersion, Reader, Segment, note, packed_bytes
from tiercel.storage.record import Flaw, Note, RecordKey, flaw_of, parse

log = logging.getLogger(__name__)


class FileStore(Store):
    """Records in files. One process writes to a folder. Others may open it to read: they see the records that
    were there when they opened it."""

    align: int = ALIGN

    def __init__(
        self,
        path: str | os.PathLike[str],
        size: int = 10 * 1024**3,
        *,
        evict: str = "lru",
        free: int | None = None,
        read_only: bool = False,
        segment_bytes: int | None = None,
    ) -> None:
        """Opens what is in the folder.

        size: bytes of all files; the default is enough to try it on a laptop without filling its disk. free:
        bytes of the file system that stay free; by default 5 % of it, at most 1 GiB. segment_bytes: by
        default it follows from the size.
        """
        policy = make_evict_policy(evict)
        self._folder = Folder(Path(path), read_only=read_only)
        self._read_only = read_only
        self._closed = False
        self._calls = 0
        self._process = os.getpid()
        with ExitStack() as undo:
            undo.callback(self._folder.close)
            try:
                in_all = self._folder.space().in_all
                if free is None:
                    free = free_for(in_all)
                if size + free > in_all and not read_only:
                    is_less = f"its file system has {size_text(in_all)}, of which {size_text(free)} stay free"
                    log.warning("the store in %s never becomes %s: %s", path, size_text(size), is_less)
                limits = Limits(size, free, segment_bytes or segment_bytes_for(size))
                self._log = Log(self._folder, limits, policy)
                undo.callback(self._log.close)
                self._log.load(read_only=read_only)
            except OtherVersion as error:
                raise ConfigError("store", str(path), f"is of another format version: {error}") from error
            except OSError as error:
                raise StoreError(f"the store in {path} can not be opened: {error}") from error
            undo.pop_all()
        self._index = self._log.index
        _opened.add(self)

    # Reading

    def contains(self, keys: Sequence[RecordKey]) -> list[bool]:
        with self._call("looking for records"):
            return [key in self._index for key in keys]

    def get(self, wanted: Sequence[Get]) -> list[bool]:
        with self._call("reading records"):
            return self._get(wanted, used=True)

    def _get(self, wanted: Sequence[Get], *, used: bool) -> list[bool]:
        """`used`: whether this counts as a use of the records."""
        found, segments = self._find([each.key for each in wanted], [each.bytes for each in wanted], used)
        try:
            return read_records(found, wanted, self._log.lanes, self._log.readers)
        finally:
            self._let_go(segments)

    def _find(
        self, keys: Sequence[RecordKey], sizes: Sequence[int], used: bool
    ) -> tuple[list[Place], set[Segment]]:
        """Where the records of these lengths are, and their segments, which stay open until `_let_go`."""
        found, segments = list[Place](), set[Segment]()
        with self._log.lock:
            for number in reversed(range(len(keys))):  # the first page was used last: the others need it
                place = self._index.find(keys[number])
                if place is None:
                    continue
                segment, row = place
                if segment.table.sizes[row] == sizes[number]:
                    if used:
                        self._index.touch(segment, row)
                    segments.add(segment)
                    found.append(Place(segment.file, segment.table.offsets[row], number))
            for segment in segments:
                segment.readers += 1
        return found, segments

    def places(self, keys: Sequence[RecordKey], sizes: Sequence[int]) -> list[tuple[int, int] | None]:
        """For each of these records the number of its segment and its offset there, for another process that
        reads it: what was written is never changed. None: it is missed. It counts as used."""
        with self._call("looking for records"):
            found, segments = self._find(keys, sizes, used=True)
            numbers = {segment.file: segment.number for segment in segments}
            told: list[tuple[int, int] | None] = [None] * len(keys)
            for file, offset, number in found:
                told[number] = numbers[file], offset
            self._let_go(segments)
            return told

    def _let_go(self, segments: Iterable[Segment]) -> None:
        with self._log.lock:
            for segment in segments:
                segment.readers -= 1
                if segment.gone:
                    segment.close()

    # Writing

    def put(self, values: Sequence[Put]) -> list[bool]:
        """Keep values. If a record is there already, it is read; if it is not whole, it is written again."""

        def append(numbers: Sequence[int]) -> int:
            return self._log.append([record_of(values[number]) for number in numbers])

        return self._put([value.key for value in values], [value.bytes for value in values], append)

    def put_by(self, writer: Writer, keys: Sequence[RecordKey], sizes: Sequence[int]) -> list[bool]:
        """Keep records of another process, which writes those that are not there."""

        def append(numbers: Sequence[int]) -> int:
            records = [Record(keys[number], sizes[number], ()) for number in numbers]
            return self._log.append(records, writer=writer)

        return self._put(keys, sizes, append)

    def _put(
        self, keys: Sequence[RecordKey], sizes: Sequence[int], append: Callable[[Sequence[int]], int]
    ) -> list[bool]:
        """`append` writes the records of these numbers, and returns how many it has written."""
        with self._call("writing records", changes=True):
            most = self._log.limits.segment_bytes - packed_bytes(1)
            listed = {
                key: size
                for key, size in zip(keys, sizes, strict=True)
                if key in self._index and key not in self._log.doubtful
            }
            there = self._whole(listed)
            new = dict[RecordKey, int]()
            for number, (key, size) in enumerate(zip(keys, sizes, strict=True)):
                if key not in there and padded(size) <= most:
                    new.setdefault(key, number)
            done = append(list(new.values()))
            there.update(list(new)[:done])
            return [key in there for key in keys]

    def _whole(self, listed: Mapping[RecordKey, int]) -> set[RecordKey]:
        """Those of these records that the disk holds in this length, with every byte right."""
        whole = set[RecordKey]()
        for some in trips(listed.items(), self._log.lanes.size, itemgetter(1)):
            wanted = [Get(key, [memoryview(bytearray(size))]) for key, size in some]
            for (key, (memory,)), there in zip(wanted, self._get(wanted, used=False), strict=True):
                if there and flaw_of(memory, key) is None:
                    whole.add(key)
        return whole

    def delete(self, keys: Sequence[RecordKey]) -> int:
        with self._call("removing records", changes=True):
            noted = [key for key in dict.fromkeys(keys) if key in self._index or key in self._log.doubtful]
            there = sum(key in self._index for key in noted)
            notes = [Record(key, ALIGN, [note(Note.REMOVED, key)]) for key in noted]
            if self._log.append(notes, Note.REMOVED) < len(notes):
                raise StoreError("there is no room on the disk to note that records are gone")
            return there

    def clear(self) -> None:
        with self._call("removing all records", changes=True):
            self._log.clear()

    def compact(self) -> int:
        with self._call("compacting", changes=True):
            return self._log.compact()

    # Telling

    def keys(self) -> Iterator[tuple[RecordKey, int]]:
        with self._call("listing"), self._log.lock:
            return iter(list(self._index.values()))

    def removed(self) -> list[RecordKey]:
        with self._call("listing"), self._log.lock:
            removed = [key for key in self._index.removed if key not in self._index]
            self._index.removed.clear()
        return removed

    def stats(self) -> dict[str, Any]:
        with self._call("counting"), self._log.lock:
            return {
                "records": len(self._index),
                "bytes": self._index.bytes,
                "bytes_on_disk": self._log.bytes_on_disk,
                "bytes_most": self._log.limits.size,
                "segments": len(self._index.segments),
                "segment_bytes": self._log.limits.segment_bytes,
                "direct": self._folder.direct_io,
                "read_only": self._read_only,
                "evicted": self._log.evicted,
                "damaged": self._log.damaged,
            }

    def check(self) -> Checked:
        """Read every segment from front to back."""
        records, bad = 0, list[tuple[RecordKey, Flaw]]()
        with self._call("checking"):
            with self._log.lock:
                segments = list(self._index.segments.values())
                for segment in segments:
                    segment.readers += 1
            try:
                with progress("checking", len(self._index), counted="records") as done:
                    for segment in segments:
                        with self._log.lock:
                            rows = [] if segment.gone else self._index.live(segment)
                        records += len(rows)
                        reader = Reader(segment.file, segment.bytes_on_disk)
                        for row in rows:
                            key = segment.table.keys[row]
                            read, _ = reader.record(segment.table.offsets[row])
                            if isinstance(read, Flaw) or read.key != key:
                                bad.append((key, read if isinstance(read, Flaw) else Flaw.KEY))
                            done(1)
            finally:
                self._let_go(segments)
        return Checked(records, bad)

    # Opening and closing

    def close(self) -> None:
        if os.getpid() != self._process:
            return
        with self._log.lock:
            if self._closed:
                return
            self._closed = True
            self._log.lock.wait_for(lambda: not self._calls)
        self._log.close()
        self._folder.close()

    @contextmanager
    def _call(self, what: str, *, changes: bool = False) -> Iterator[None]:
        """Around every call: refuses it after `close`, lets `close` wait for it, translates errors."""
        if os.getpid() != self._process:
            raise StoreError(f"the store is open in process {self._process}, of which this is a fork")
        if changes and self._read_only:
            raise StoreError("the store is open for reading only")
        with self._log.lock:
            if self._closed:
                raise StoreError("the store is closed")
            self._calls += 1
        try:
            yield
        except OSError as error:
            raise StoreError(f"{what} failed in {self._folder.path}: {error}") from error
        finally:
            with self._log.lock:
                self._calls -= 1
                self._log.lock.notify_all()


_opened: WeakSet[FileStore] = WeakSet()


def _leave_to_parent() -> None:
    """In a forked process: closes its copies of the files, so that the lock ends with the parent's store."""
    for store in _opened:
        store._folder.close()
        for segment in store._index.segments.values():
            segment.readers = 0
            segment.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def record_of(value: Put) -> Record:
    """What is appended for a value. Its header is checked first: a scan must be able to find the record."""
    key, parts = value
    header = parse(parts[0])
    if isinstance(header, Flaw) and len(parts) > 1:  # seldom: the header is not the first part
        header = parse(b"".join(parts))
    size = sum(map(len, parts))
    if isinstance(header, Flaw) or header.header_bytes > HEADER_MOST:
        raise StoreError(f"a value must begin with the header of a record: {header}")
    if header.key != key or isinstance(header.kind, Note):
        raise StoreError("a record was given under another key than its own")
    if header.header_bytes + header.payload_bytes != size:
        raise StoreError(f"a record of {header.payload_bytes:,} B was given {size:,} B with its header")
    return Record(key, size, parts)
