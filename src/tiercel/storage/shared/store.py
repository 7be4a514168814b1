"""A file store for several processes of one machine. It outlives them all.

    process 1 ─┐                       ┌── index, lock, eviction
    process 2 ─┼── calls ──► owner ────┤
    process 3 ─┘                       └── writes segments ◄── memory that a client filled
        └───────── reads segments ─────────┘

One process owns the folder (`owner`). The first that opens the store starts it, and so does the first that
finds it gone; it ends when nobody has used it for `linger_s`. What others put is found at once.

Records are read from the files by the process that wants them: what was written is never changed, so a read
needs no lease. If the segment is evicted before the file is open, the records are missed; after that the open
file keeps its bytes. Records are written by the owner, from memory that both processes see.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Condition
from typing import Any
from weakref import WeakSet

import numpy as np

from tiercel.errors import StoreError
from tiercel.storage.base import Get, Put, Store, trips
from tiercel.storage.file import direct
from tiercel.storage.file.direct import ALIGN, Lanes, padded
from tiercel.storage.file.folder import Folder, make
from tiercel.storage.file.reading import READERS, Place, read_records
from tiercel.storage.record import RecordKey
from tiercel.storage.shared.starting import connect_or_start
from tiercel.storage.shared.wire import KEYS_MOST, Line, LineLost, Memory, Said
from tiercel.threads import Crew

PUT_BYTES = 8 * 1024**2
"""The most bytes of one call that writes: a connection has so much memory, unless a record is larger."""

TRIES = 3
"""How often a call is sent before it fails: an owner that was killed is started again. Every call may be sent
twice."""


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
        self._idle: list[_Client] = []
        self._open: set[_Client] = set()
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
        """Parts of a batch are copied while others are written."""
        parts = list(trips(values, PUT_BYTES, lambda value: padded(value.bytes)))
        kept: list[list[bool]] = [[] for _ in parts]

        def put_part(number: int) -> None:
            part = parts[number]
            kept[number] = self._ask("put", [value.key for value in part], part).words["answer"]

        with self._call("writing records"):
            self._crew.each(put_part, range(len(parts)))
        return [each for part in kept for each in part]

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
        self, call: str, keys: Sequence[RecordKey] = (), values: Sequence[Put] = (), **words: Any
    ) -> Said:
        for attempt in range(1, TRIES + 1):
            try:
                with self._client() as client:
                    return client.ask({"call": call, **words}, keys, values)
            except LineLost as error:
                if attempt == TRIES:
                    raise StoreError(f"the owner of {self._path} was lost: {error}") from error
        raise AssertionError

    @contextmanager
    def _client(self) -> Iterator[_Client]:
        """A free connection. After an error it is not used again: its answer may still come."""
        with self._lock:
            client = self._idle.pop() if self._idle else None
        client = client or self._connect()
        try:
            yield client
        except Refused:
            self._give_back(client)
            raise
        except LineLost:  # and with the owner all others
            self._drop_all(idle=True)
            self._drop([client])
            raise
        except BaseException:
            self._drop([client])
            raise
        self._give_back(client)

    def _give_back(self, client: _Client) -> None:
        with self._lock:
            self._open.add(client)
            self._idle.append(client)

    def _drop_all(self, *, idle: bool = False) -> None:
        """Close all connections, or those that nobody uses now."""
        with self._lock:
            clients = list(self._idle if idle else self._open)
            self._idle.clear()
        self._drop(clients)

    def _drop(self, clients: Sequence[_Client]) -> None:
        with self._lock:
            self._open.difference_update(clients)
        for client in clients:
            client.line.close()

    def _connect(self) -> _Client:
        client = _Client(connect_or_start(str(self._path), self._options))
        with self._lock:
            self._open.add(client)
        return client


_opened: WeakSet[SharedStore] = WeakSet()


def _leave_to_parent() -> None:
    """In a forked process: closes its copies of the connections, so that they end with the parent's."""
    for store in _opened:
        for client in store._open:
            client.line.forget()


os.register_at_fork(after_in_child=_leave_to_parent)


class Refused(StoreError):
    """The owner answered, with an error."""


class _Client:
    """A connection after the greeting, and the memory that records are written from."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self._memory: Memory | None = None

    def ask(self, words: dict[str, Any], keys: Sequence[RecordKey] = (), values: Sequence[Put] = ()) -> Said:
        file = self._lay(words, values) if values else -1
        try:
            self.line.send(words, keys, file)
        finally:
            if file >= 0:
                os.close(file)
        answer = self.line.receive()
        if "error" in answer.words:
            raise Refused(answer.words["error"])
        return answer

    def _lay(self, words: dict[str, Any], values: Sequence[Put]) -> int:
        """Copy values into the memory, each from an aligned offset on, where the owner writes them from.
        Returns the file of new memory, or -1."""
        room = sum(padded(value.bytes) for value in values)
        file = -1
        if self._memory is None or room > len(self._memory.view):
            self._memory, file = Memory.create(max(room, PUT_BYTES))
        at, view = 0, self._memory.view
        words["offsets"], words["sizes"] = list[int](), list[int]()
        for value in values:
            words["offsets"].append(at)
            words["sizes"].append(value.bytes)
            end = at
            for part in filter(len, value.parts):
                target = np.frombuffer(view[end : end + len(part)], np.uint8)
                np.copyto(target, np.frombuffer(part, np.uint8))  # without the GIL
                end += len(part)
            at += padded(value.bytes)
        return file


def _parts(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for first in range(0, len(items), KEYS_MOST):
        yield items[first : first + KEYS_MOST]
