"""A file store for several processes of one machine. It outlives them all.

    process 1 ─┐
    process 2 ─┼── calls ──► owner: index, lock, eviction, who writes where
    process 3 ─┘
        └── reads and writes segments

One process owns the folder (`owner`). The first that opens the store starts it, and so does the first that
finds it gone; it ends when nobody has used it for `linger_s`. What others put is found at once.

Records are read from the files by the process that wants them: what was written is never changed, so a read
needs no lease. If the segment is evicted before the file is open, the records are missed; after that the open
file keeps its bytes. Records are written by the process that has them, at the place that the owner gives it
in its turn; the owner then makes them durable, and all find them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Condition
from typing import Any
from weakref import WeakSet

from tiercel.errors import StoreError
from tiercel.storage.base import Get, Put, Store, trips
from tiercel.storage.file import direct
from tiercel.storage.file.commit import Record, gather
from tiercel.storage.file.direct import ALIGN, Lanes, padded
from tiercel.storage.file.folder import Folder, make
from tiercel.storage.file.reading import READERS, Place, read_records
from tiercel.storage.file.store import record_of
from tiercel.storage.record import RecordKey, View
from tiercel.storage.shared.starting import connect_or_start
from tiercel.storage.shared.wire import KEYS_MOST, Line, LineLost, Said
from tiercel.threads import Crew

TRIES = 3
"""How often a call is sent before it fails: an owner that was killed is started again. Every call may be sent
twice."""


Write = Callable[[Said], None]
"""Writes records into the file and to the offset that the owner has said. Raises OSError."""


class SharedStore(Store):
    """Records in the files of a folder, shared by processes. All open it with the same options."""

    align: int = ALIGN

    def __init__(
        self,
        path: str | os.PathLike[str],
        size: int = 10 * 1024**3,
        *,
        evict: str = "lru",
        free: int | None = None,
        segment_bytes: int | None = None,
        linger_s: float = 10.0,
    ) -> None:
        """As `FileStore`. linger_s: how long the owner stays when nobody uses it."""
        own = {"size": size, "evict": evict, "free": free, "segment_bytes": segment_bytes}
        self._options = own | {"linger_s": linger_s}
        self._process = os.getpid()
        self._lock = Condition()
        self._closed, self._calls = False, 0
        self._idle: list[Line] = []
        self._open: set[Line] = set()
        self._seen: list[Any] | None = None
        """What the owner said when it was last asked for evicted keys."""
        self._path = Path(path).absolute()
        self._crew = Crew(READERS - 1, "tiercel-shared-store")
        make(self._path)
        with ExitStack() as undo:
            undo.callback(self._drop_all)
            self._give_back(self._connect())
            self._folder = Folder(self._path, read_only=True)
            undo.callback(self._folder.close)
            self._lanes = Lanes(queued=self._folder.direct_io)
            self._seen = self._ask("removed", seen=None).words["answer"]
            undo.pop_all()
        _opened.add(self)

    # The contract of a store

    def contains(self, keys: Sequence[RecordKey]) -> list[bool]:
        with self._call("looking for records"):
            return [here for some in _parts(keys) for here in self._ask("contains", some).words["answer"]]

    def get(self, wanted: Sequence[Get]) -> list[bool]:
        with self._call("reading records"):
            return [filled for some in _parts(wanted) for filled in self._get(some)]

    def _get(self, wanted: Sequence[Get]) -> list[bool]:
        sizes = [each.bytes for each in wanted]
        told = self._ask("places", [each.key for each in wanted], sizes=sizes).words["answer"]
        files = dict[int, int]()
        try:
            places = list[Place]()
            for number, place in enumerate(told):
                if place is None:
                    continue
                segment, offset = place
                if segment not in files:
                    files[segment] = self._open_segment(segment)
                if files[segment] >= 0:
                    places.append(Place(files[segment], offset, number))
            return read_records(places, wanted, self._lanes, self._crew)
        finally:
            for file in files.values():
                if file >= 0:
                    os.close(file)

    def _open_segment(self, number: int) -> int:
        """The file of a segment; -1: it was evicted just now."""
        flags = os.O_RDONLY | direct.NO_LINKS | (os.O_DIRECT if self._folder.direct_io else 0)
        with suppress(FileNotFoundError):
            return direct.calls.open(str(self._folder.segment(number)), flags)
        return -1

    def put(self, values: Sequence[Put]) -> list[bool]:
        """Parts of a batch are prepared while others are written, and may be written at the same time."""
        parts = list(trips(map(record_of, values), self._lanes.size, lambda record: padded(record.size)))
        kept: list[list[bool]] = [[] for _ in parts]

        def put_part(number: int) -> None:
            kept[number] = self._put(parts[number])

        with self._call("writing records"):
            self._crew.each(put_part, range(len(parts)))
        return [each for part in kept for each in part]

    def _put(self, records: Sequence[Record]) -> list[bool]:
        with self._lanes.take() as lane:
            views, used = dict[RecordKey, list[View]](), 0
            for record in records:  # each by itself: the owner says which are written
                views[record.key] = gather([record], lane.memory[used:])
                used += padded(record.size)

            def write(told: Said) -> None:
                direct.write(
                    told.file, told.words["write"], [view for key in told.keys for view in views[key]]
                )

            sizes = [record.size for record in records]
            return list(
                self._ask("put", [record.key for record in records], write, sizes=sizes).words["answer"]
            )

    def delete(self, keys: Sequence[RecordKey]) -> int:
        with self._call("removing records"):
            return sum(self._ask("delete", some).words["answer"] for some in _parts(keys))

    def clear(self) -> None:
        with self._call("removing all records"):
            self._ask("clear")

    def compact(self) -> int:
        with self._call("compacting"):
            return int(self._ask("compact").words["answer"])

    def keys(self) -> Iterator[tuple[RecordKey, int]]:
        with self._call("listing"):
            told = self._ask("keys")
            return iter(list(zip(told.keys, told.words["answer"], strict=True)))

    def removed(self) -> list[RecordKey]:
        with self._call("listing"):
            told = self._ask("removed", seen=self._seen)
            self._seen = told.words["answer"]
            return list(told.keys)

    def stats(self) -> dict[str, Any]:
        with self._call("counting"):
            return dict(self._ask("stats").words["answer"])

    def close(self) -> None:
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lock.wait_for(lambda: not self._calls)
        self._drop_all()
        self._crew.shutdown()
        self._lanes.close()
        self._folder.close()

    # Calls

    @contextmanager
    def _call(self, what: str) -> Iterator[None]:
        """Around every call: refuses it after `close`, lets `close` wait for it, translates errors."""
        if os.getpid() != self._process:
            raise StoreError(f"the store is open in process {self._process}, of which this is a fork")
        with self._lock:
            if self._closed:
                raise StoreError("the store is closed")
            self._calls += 1
        try:
            yield
        except OSError as error:
            raise StoreError(f"{what} failed in {self._path}: {error}") from error
        finally:
            with self._lock:
                self._calls -= 1
                self._lock.notify_all()

    def _ask(
        self, call: str, keys: Sequence[RecordKey] = (), write: Write | None = None, **words: Any
    ) -> Said:
        for attempt in range(1, TRIES + 1):
            try:
                with self._line() as line:
                    return _ask(line, {"call": call, **words}, keys, write)
            except LineLost as error:
                if attempt == TRIES:
                    raise StoreError(f"the owner of {self._path} was lost: {error}") from error
        raise AssertionError

    @contextmanager
    def _line(self) -> Iterator[Line]:
        """A free connection. After an error it is not used again: its answer may still come."""
        with self._lock:
            line = self._idle.pop() if self._idle else None
        line = line or self._connect()
        try:
            yield line
        except Refused:
            self._give_back(line)
            raise
        except LineLost:  # and with the owner all others
            self._drop_all(idle=True)
            self._drop([line])
            raise
        except BaseException:
            self._drop([line])
            raise
        self._give_back(line)

    def _give_back(self, line: Line) -> None:
        with self._lock:
            self._open.add(line)
            self._idle.append(line)

    def _drop_all(self, *, idle: bool = False) -> None:
        """Close all connections, or those that nobody uses now."""
        with self._lock:
            lines = list(self._idle if idle else self._open)
            self._idle.clear()
        self._drop(lines)

    def _drop(self, lines: Sequence[Line]) -> None:
        with self._lock:
            self._open.difference_update(lines)
        for line in lines:
            line.close()

    def _connect(self) -> Line:
        line = connect_or_start(str(self._path), self._options)
        with self._lock:
            self._open.add(line)
        return line


_opened: WeakSet[SharedStore] = WeakSet()


def _leave_to_parent() -> None:
    """In a forked process: closes its copies of the connections, so that they end with the parent's."""
    for store in _opened:
        for line in store._open:
            line.forget()


os.register_at_fork(after_in_child=_leave_to_parent)


class Refused(StoreError):
    """The owner answered, with an error."""


def _ask(line: Line, words: dict[str, Any], keys: Sequence[RecordKey], write: Write | None) -> Said:
    """A call and its answer. Before it the owner may tell where records are written."""
    line.send(words, keys)
    while "write" in (said := line.receive()).words:
        assert write is not None, "only a put is told where to write"
        failed = 0
        try:
            write(said)
        except OSError as error:
            failed = error.errno or errno.EIO
        finally:
            os.close(said.file)
        line.send({"failed": failed})
    if "error" in said.words:
        raise Refused(said.words["error"])
    return said


def _parts(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for first in range(0, len(items), KEYS_MOST):
        yield items[first : first + KEYS_MOST]
