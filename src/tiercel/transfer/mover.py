"""Between host memory and a store: operations in, worker threads, ended operations out.

    queued ── a thread takes it ──► running ──► ended: answers, or an error
       └── cancelled, nobody waits ───────────► ended: nothing was done

Every record that is read is verified (I9). A worker survives whatever a store raises (I13): the operation is
tried again after a moment, and then it has failed. A call that never returns keeps its thread and its host
pages, and nothing else: another thread takes its place (`threads.Crew`), and the caller decides by the clock.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from enum import Enum
from threading import Condition
from typing import Any, NamedTuple, Protocol

from tiercel.errors import StoreError
from tiercel.memory.buffers import HostMemory
from tiercel.spec.cache_spec import CacheSpec
from tiercel.storage.base import Get, Put, Store
from tiercel.storage.record import Flaw, Form, RecordKey
from tiercel.threads import Crew
from tiercel.types import HostPageId, Kind, PageKey

log = logging.getLogger(__name__)


class Work(Enum):
    ASK = "ask"
    READ = "read"
    WRITE = "write"
    CLEAR = "clear"
    STATS = "stats"
    PROBE = "probe"  # write, read and remove a page, to measure how fast the store is


class Presence(Enum):
    """How an operation ended for one record."""

    HERE = "here"  # Asked: it is there. Read: every byte is right. Written: the store has it.
    MISSING = "missing"  # not there, or not kept
    DAMAGED = "damaged"
    """It is listed, but can not be read or is not what was asked for. It is removed, and counts as missing
    until it is written again."""


class RecordPlace(NamedTuple):
    """One page or tail, and the host pages it is read into or written from."""

    kind: Kind
    key: PageKey
    host: tuple[HostPageId, ...] = ()


@dataclass(eq=False)
class Operation:
    """Something asked of a store. It ends with one answer for each piece, or with an error."""

    work: Work
    pieces: Sequence[RecordPlace]
    bytes: int  # of the pieces that are read or written
    began_s: float
    started_s: float | None = None  # when a thread took it
    ended_s: float = 0.0
    answers: list[Presence] = field(default_factory=list)
    error: StoreError | None = None
    cancelled: bool = False
    late: bool = False  # it took longer than the caller waits: the caller has counted it as failed already
    read_s: float | None = None  # of a probe: how long the read of its page took
    future: Future[None] | None = None

    def cancel(self) -> None:
        """Nobody waits for it any more. If no thread has taken it, it ends at once."""
        self.cancelled = True
        if self.future is not None:
            self.future.cancel()


@dataclass(frozen=True)
class Workers:
    """Threads for each kind of work: asks do not wait for reads, and reads do not wait for writes."""

    askers: Executor
    readers: Executor
    writers: Executor
    retry_after_s: Sequence[float] = (0.02, 0.1)

    @staticmethod
    def threads() -> Workers:
        """Four reads at a time keep a disk busy. Of two writes one computes a checksum while one waits."""
        askers, readers = Crew(1, "tiercel-store-ask"), Crew(4, "tiercel-store-read")
        return Workers(askers, readers, Crew(2, "tiercel-store-write"))

    def of(self, work: Work) -> Executor:
        return {Work.ASK: self.askers, Work.READ: self.readers}.get(work, self.writers)


class Mover(Protocol):
    """Who runs operations on a store: `StoreMover`, or a replay's clock. One thread calls all but `close`."""

    @property
    def writes(self) -> bool:
        """Whether the store can be written to."""

    @property
    def under_way(self) -> Collection[Operation]: ...

    @property
    def flaws(self) -> Mapping[str, int]:
        """Records that were read and were not what was asked for, by flaw."""

    @property
    def numbers(self) -> Mapping[str, Any]:
        """The store's own statistics, as last asked for."""

    @property
    def removed(self) -> deque[RecordKey]:
        """Records that the store evicted."""

    @property
    def landed(self) -> bool:
        """Whether there is something to poll."""

    def submit(self, work: Work, pieces: Sequence[RecordPlace] = ()) -> Operation:
        """Never blocks."""

    def give_up_on(self, operation: Operation) -> None:
        """It hangs."""

    def poll(self) -> list[Operation]:
        """What ended since the last poll."""

    def close(self) -> None:
        """Wait for what is under way; then close the store."""


class StoreMover:
    """Runs operations on one store. `submit` and `poll` belong to one thread. `close` closes the workers and
    the store."""

    def __init__(
        self,
        store: Store,
        spec: CacheSpec,
        host: HostMemory,
        *,
        landed: Condition,
        clock: Callable[[], float] = time.monotonic,
        workers: Workers | None = None,
    ) -> None:
        self._store = store
        self._host = host
        self._clock = clock
        self._landed = landed
        self.forms = forms_of(spec, store.align)
        store.register(host.mapped)
        self.writes = store.writes
        self._workers = workers or Workers.threads()
        self._ended: deque[Operation] = deque()
        self.under_way: set[Operation] = set()
        self.flaws: Counter[str] = Counter()  # of records that were read
        self._not_removed: set[RecordKey] = set()
        """Damaged, and the store could not remove them. They count as missing until they are written."""
        self.numbers: dict[str, Any] = {}  # the store's own statistics, as last asked for
        self.removed: deque[RecordKey] = deque()  # records of this form that the store evicted

    def submit(self, work: Work, pieces: Sequence[RecordPlace] = ()) -> Operation:
        """Never blocks."""
        moved = pieces if work in (Work.READ, Work.WRITE) else ()
        size = sum(self.forms[piece.kind].payload_bytes for piece in moved)
        operation = Operation(work, pieces, size, self._clock())
        self.under_way.add(operation)
        try:
            operation.future = self._workers.of(work).submit(self._run, operation)
        except RuntimeError as refusal:  # what an executor that can start no thread raises
            operation.error = StoreError(f"no worker: {refusal}")
            self._end(operation)
        else:
            operation.future.add_done_callback(lambda _: self._end(operation))
        return operation

    def give_up_on(self, operation: Operation) -> None:
        """It hangs. If it has a thread, that thread is replaced."""
        operation.late = True
        crew = self._workers.of(operation.work)
        if operation.started_s is not None and isinstance(crew, Crew):
            crew.grow()

    def poll(self) -> list[Operation]:
        """What ended since the last poll."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
            self.under_way.discard(ended[-1])
        return ended

    def key(self, piece: RecordPlace) -> RecordKey:
        return self.forms[piece.kind].key(piece.key)

    @property
    def landed(self) -> bool:
        """Whether there is something to poll."""
        return bool(self._ended)

    def close(self) -> None:
        """Wait for what is under way; then close the store."""
        for crew in (self._workers.askers, self._workers.readers, self._workers.writers):
            crew.shutdown(wait=True)
        try:
            self._store.close()
        except Exception:  # noqa: BLE001 - whatever a store raises
            log.exception("the store did not close")

    # In a worker

    def _run(self, operation: Operation) -> None:
        operation.started_s = self._clock()
        for wait_s in (*self._workers.retry_after_s, None):
            if operation.cancelled:
                return
            try:
                answers = self._DO[operation.work](self, operation)
                if len(answers) != len(operation.pieces):
                    raise StoreError(f"{len(answers)} answers to {len(operation.pieces)} questions")
                operation.answers, operation.error = answers, None
                return
            except BaseException as error:  # noqa: BLE001 - whatever a store raises
                operation.error = StoreError(f"{operation.work.value} failed: {error!r}")
                operation.error.__cause__ = error
                if wait_s is None or operation.work is Work.ASK:
                    return
                time.sleep(wait_s)

    def _end(self, operation: Operation) -> None:
        if len(operation.answers) != len(operation.pieces):
            operation.answers = [Presence.MISSING] * len(operation.pieces)
        operation.ended_s = self._clock()
        with self._landed:
            self._ended.append(operation)
            self._landed.notify_all()

    def _ask(self, operation: Operation) -> list[Presence]:
        keys = [self.key(piece) for piece in operation.pieces]
        listed = self._without_damaged(keys, self._store.contains(keys))
        return [Presence.HERE if each else Presence.MISSING for each in listed]

    def _kept(self, keys: Sequence[RecordKey]) -> list[bool]:
        return self._without_damaged(keys, self._store.kept(keys))

    def _without_damaged(self, keys: Sequence[RecordKey], there: Sequence[bool]) -> list[bool]:
        return [here and key not in self._not_removed for key, here in zip(keys, there, strict=True)]

    def _read(self, operation: Operation) -> list[Presence]:
        wanted = []
        for piece in operation.pieces:
            header = memoryview(bytearray(self.forms[piece.kind].header_bytes))
            wanted.append(Get(self.key(piece), [header, *self._views(piece)]))
        there = self._store.get(wanted)
        missed = [each.key for each, here in zip(wanted, there, strict=True) if not here]
        listed = dict(zip(missed, self._kept(missed), strict=True)) if missed else {}
        answers, damaged = [], []
        for piece, (key, (header, *payload)), here in zip(operation.pieces, wanted, there, strict=True):
            flaw = Flaw.UNREADABLE if listed.get(key) else None
            if here:
                flaw = self.forms[piece.kind].flaw(header, piece.key, payload)
            if flaw is not None:
                damaged.append(key)
                self._count(key, flaw)
            answers.append(Presence.DAMAGED if flaw else Presence.HERE if here else Presence.MISSING)
        self._remove(damaged)
        return answers

    def _remove(self, damaged: Sequence[RecordKey]) -> None:
        """If the store can not remove them (it is full, or open for reading only), the read does not fail. A
        store that can not be written to is not asked: what it answers may be right the next time."""
        try:
            if damaged and self.writes:
                self._store.delete(damaged)
        except Exception as error:  # noqa: BLE001 - whatever a store raises
            if not self._not_removed:
                log.warning("the store can not remove damaged records: %r", error)
            self._not_removed.update(damaged)

    def _count(self, key: RecordKey, flaw: Flaw) -> None:
        """Count a flaw. The first of each kind is logged."""
        name = flaw.name.lower()
        with self._landed:
            self.flaws[name] += 1
        if self.flaws[name] == 1:
            then = "removed" if self.writes else "not used"
            log.error("the store answered %s with %s; such records are %s", key.hex(), flaw.value, then)

    def _write(self, operation: Operation) -> list[Presence]:
        """Write the records that are not there yet."""
        keys = [self.key(piece) for piece in operation.pieces]
        values = []
        for piece, key, here in zip(operation.pieces, keys, self._kept(keys), strict=True):
            if not here:
                payload = self._views(piece)
                values.append(Put(key, [self.forms[piece.kind].header(piece.key, payload), *payload]))
        answers = self._store.put(values) if values else []
        kept = {value.key: answer for value, answer in zip(values, answers, strict=True)}
        self._not_removed.difference_update(key for key, is_kept in kept.items() if is_kept)
        removed = (RecordKey(bytes(key)) for key in self._store.removed())
        self.removed.extend(key for key in removed if any(form.made(key) for form in self.forms.values()))
        return [Presence.HERE if kept.get(key, True) else Presence.MISSING for key in keys]

    def _clear(self, _: Operation) -> list[Presence]:
        self._store.clear()
        return []

    def _stats(self, _: Operation) -> list[Presence]:
        self.numbers = dict(self._store.stats())
        return []

    def _probe(self, operation: Operation) -> list[Presence]:
        if not self.writes:
            return []  # only a fetch can tell how fast it is
        form, key = self.forms[Kind.PAGE], PageKey(os.urandom(32))
        name, payload = form.key(key), bytearray(form.payload_bytes)
        try:
            kept = self._store.put([Put(name, [form.header(key, [payload]), payload])])
            began_s = self._clock()
            parts = [memoryview(bytearray(form.header_bytes)), memoryview(payload)]
            if all(kept) and all(self._store.get([Get(name, parts)])):
                operation.read_s = self._clock() - began_s
        finally:
            self._store.delete([name])
        return []

    def _views(self, piece: RecordPlace) -> list[memoryview]:
        return self._host.views(piece.host, self.forms[piece.kind].payload_bytes)

    _DO: dict[Work, Callable[[StoreMover, Operation], list[Presence]]] = {
        Work.ASK: _ask,
        Work.READ: _read,
        Work.WRITE: _write,
        Work.CLEAR: _clear,
        Work.STATS: _stats,
        Work.PROBE: _probe,
    }


def forms_of(spec: CacheSpec, align: int) -> dict[Kind, Form]:
    return {kind: _form(kind, spec, align) for kind in Kind}


def _form(kind: Kind, spec: CacheSpec, align: int) -> Form:
    rows = tuple((stream.name, stream.layers, spec.row_bytes(stream)) for stream in spec.streams_of(kind))
    return Form(kind, spec.form, rows, spec.item_bytes(kind), align)
