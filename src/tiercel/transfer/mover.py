"""Between host memory and a store: operations in, worker threads, ended operations out.

    queued ── a thread takes it ──► running ──► ended: results, or an error
       └── cancelled, nobody waits ───────────► ended: nothing was done

The rest of the code has pages and tails. A store keeps each as several records (`CacheSpec.grains`), which
are asked for, read and written together. A page is there if all its records are. If one is missing, the
others stay: only that one is written again. Every record that is read is verified (I9).

A worker survives all errors of a store (I13): the operation is tried once more after a moment, and then it
has failed. A call that never returns keeps its thread and its host pages, and nothing else: another thread
takes its place (`threads.Crew`), and the caller decides by the clock.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from enum import Enum
from threading import Condition
from typing import Any, NamedTuple, Protocol

from tiercel.errors import StoreError
from tiercel.memory.buffers import HostMemory
from tiercel.spec.cache_spec import CacheSpec, Grain
from tiercel.storage.base import Get, Put, Store
from tiercel.storage.record import Flaw, Form, RecordKey, page_key_of, start_of
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
    """How an operation ended for one page or tail."""

    HERE = "here"  # Asked: it is there. Read: every byte is right. Written: the store has it.
    MISSING = "missing"  # not there, or not kept
    DAMAGED = "damaged"
    """A record of it is listed, but can not be read or is not what was asked for. That record is removed, and
    counts as missing until it is written again."""


class ItemPlace(NamedTuple):
    """One page or tail, and the host pages it is read into or written from."""

    kind: Kind
    key: PageKey
    host: tuple[HostPageId, ...] = ()


@dataclass(eq=False)
class Operation:
    """One operation on a store. It ends with one result for each piece, or with an error."""

    work: Work
    pieces: Sequence[ItemPlace]
    bytes: int  # of the pieces that are read or written
    began_s: float
    started_s: float | None = None  # when a thread took it
    ended_s: float = 0.0
    answers: list[Presence] = field(default_factory=list)
    error: StoreError | None = None
    cancelled: bool = False
    late: bool = False  # it took longer than the caller waits: the caller has counted it as failed already
    read_s: float | None = None  # for a probe: how long the read of its page took
    future: Future[None] | None = None

    def cancel(self) -> None:
        """Its result is not needed any more. If no thread has taken it, it ends at once."""
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
        """Four reads keep a disk busy. Of two writes, one computes a checksum while the other waits."""
        askers, readers = Crew(1, "tiercel-store-ask"), Crew(4, "tiercel-store-read")
        return Workers(askers, readers, Crew(2, "tiercel-store-write"))

    def of(self, work: Work) -> Executor:
        return {Work.ASK: self.askers, Work.READ: self.readers}.get(work, self.writers)


class Mover(Protocol):
    """Runs operations on a store: `StoreMover`, or a replay's clock. One thread calls all but `close`."""

    @property
    def writes(self) -> bool:
        """Whether the store can be written to."""

    @property
    def away(self) -> bool:
        """Whether nothing answered when the store was opened."""

    @property
    def under_way(self) -> Collection[Operation]: ...

    @property
    def flaws(self) -> Mapping[str, int]:
        """Records that were read and were not what was asked for, by flaw."""

    @property
    def numbers(self) -> Mapping[str, Any]:
        """The store's own statistics, as last asked for."""

    @property
    def removed(self) -> deque[tuple[Kind, PageKey]]:
        """Pages and tails that the store evicted."""

    @property
    def landed(self) -> bool:
        """Whether there is something to poll."""

    def submit(self, work: Work, pieces: Sequence[ItemPlace] = ()) -> Operation:
        """Never blocks."""

    def give_up_on(self, operation: Operation) -> None:
        """The operation hangs."""

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
        self._spec = spec
        self._host = host
        self._clock = clock
        self._landed = landed
        self.forms = forms_of(spec, store.align)
        store.register(host.mapped)
        self.writes, self.away = store.writes, store.away
        self._workers = workers or Workers.threads()
        self._ended: deque[Operation] = deque()
        self.under_way: set[Operation] = set()
        self.flaws: Counter[str] = Counter()  # of records that were read
        self._not_removed: set[RecordKey] = set()
        """Damaged records that the store could not remove. They count as missing until they are written."""
        self.numbers: dict[str, Any] = {}  # the store's own statistics, as last asked for
        self.removed: deque[tuple[Kind, PageKey]] = deque()  # whose records the store evicted
        self._kinds = {form.start: kind for kind, forms in self.forms.items() for form in forms}
        self._lost: dict[tuple[Kind, PageKey], int] = {}
        """Pages and tails that lost a record and were not written since: how many records each has left."""

    def submit(self, work: Work, pieces: Sequence[ItemPlace] = ()) -> Operation:
        moved = pieces if work in (Work.READ, Work.WRITE) else ()
        size = sum(self._spec.item_bytes(piece.kind) for piece in moved)
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
        """The operation hangs. If it has a thread, that thread is replaced."""
        operation.late = True
        crew = self._workers.of(operation.work)
        if operation.started_s is not None and isinstance(crew, Crew):
            crew.grow()

    def poll(self) -> list[Operation]:
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
            self.under_way.discard(ended[-1])
        return ended

    def keys(self, piece: ItemPlace) -> list[RecordKey]:
        """The keys of all its records."""
        return [form.key(piece.key) for form in self.forms[piece.kind]]

    @property
    def landed(self) -> bool:
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
        keys = [key for piece in operation.pieces for key in self.keys(piece)]
        listed = iter(self._without_damaged(keys, self._store.contains(keys)))
        return [_presence([next(listed) for _ in self.forms[piece.kind]]) for piece in operation.pieces]

    def _kept(self, keys: Sequence[RecordKey]) -> list[bool]:
        return self._without_damaged(keys, self._store.kept(keys))

    def _without_damaged(self, keys: Sequence[RecordKey], there: Sequence[bool]) -> list[bool]:
        return [here and key not in self._not_removed for key, here in zip(keys, there, strict=True)]

    def _read(self, operation: Operation) -> list[Presence]:
        records = [(piece.key, *each) for piece in operation.pieces for each in self._records(piece)]
        wanted = [
            Get(form.key(key), [memoryview(bytearray(form.header_bytes)), *views])
            for key, form, views in records
        ]
        there = self._store.get(wanted)
        missed = [each.key for each, here in zip(wanted, there, strict=True) if not here]
        listed = dict(zip(missed, self._kept(missed), strict=True)) if missed else {}
        flaws = list[Flaw | None]()
        for (page_key, form, views), each, here in zip(records, wanted, there, strict=True):
            flaw = Flaw.UNREADABLE if listed.get(each.key) else None
            flaws.append(form.flaw(each.parts[0], page_key, views) if here else flaw)
        damaged = [(each.key, flaw) for each, flaw in zip(wanted, flaws, strict=True) if flaw]
        for name, flaw in damaged:
            self._count(name, flaw)
        self._remove([name for name, _ in damaged])
        answers, ends = [], iter(zip(there, flaws, strict=True))
        for piece in operation.pieces:
            heres, own = zip(*(next(ends) for _ in self.forms[piece.kind]), strict=True)
            answers.append(Presence.DAMAGED if any(own) else _presence(heres))
        return answers

    def _remove(self, damaged: Sequence[RecordKey]) -> None:
        """Remove damaged records. If that fails (the store is full, or open for reading only), the read does
        not fail. A store that can not be written to is not asked: its next read may be right."""
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
        named = [(piece, self.keys(piece)) for piece in operation.pieces]
        keys = [key for _, own in named for key in own]
        there = dict(zip(keys, self._kept(keys), strict=True))
        values = []
        for piece, own in named:
            if not all(map(there.__getitem__, own)):
                for key, (form, views) in zip(own, self._records(piece), strict=True):
                    if not there[key]:
                        values.append(Put(key, [form.header(piece.key, views), *views]))
        answers = self._store.put(values) if values else []
        kept = {value.key: answer for value, answer in zip(values, answers, strict=True)}
        self._not_removed.difference_update(key for key, is_kept in kept.items() if is_kept)
        whole = [_presence(kept.get(key, True) for key in own) for _, own in named]
        pairs = zip(operation.pieces, whole, strict=True)
        here = [(piece.kind, piece.key) for piece, answer in pairs if answer is Presence.HERE]
        removed = [RecordKey(bytes(key)) for key in self._store.removed()]
        with self._landed:
            for item in here:
                self._lost.pop(item, None)
            self._tell_removed(removed)
        return whole

    def _tell_removed(self, keys: Sequence[RecordKey]) -> None:
        """Note which pages and tails lost a record to the store's eviction: each once until it is written
        again, however many of its records leave."""
        for key in keys:
            kind = self._kinds.get(start_of(key))
            if kind is None:
                continue
            item = kind, PageKey(page_key_of(key))
            if item not in self._lost:
                self.removed.append(item)
            self._lost[item] = self._lost.get(item, len(self.forms[kind])) - 1
            if not self._lost[item]:
                del self._lost[item]

    def _clear(self, _: Operation) -> list[Presence]:
        self._store.clear()
        with self._landed:
            self._lost.clear()
        return []

    def _stats(self, _: Operation) -> list[Presence]:
        self.numbers = dict(self._store.stats())
        return []

    def _probe(self, operation: Operation) -> list[Presence]:
        if not self.writes:
            return []  # only a fetch can measure its rate
        key, records = PageKey(os.urandom(32)), list[tuple[RecordKey, bytes, bytearray]]()
        for form in self.forms[Kind.PAGE] or self.forms[Kind.TAIL]:
            payload = bytearray(form.payload_bytes)
            records.append((form.key(key), form.header(key, [payload]), payload))
        try:
            kept = self._store.put([Put(name, [header, payload]) for name, header, payload in records])
            began_s = self._clock()
            wanted = [
                Get(name, [memoryview(bytearray(header)), memoryview(payload)])
                for name, header, payload in records
            ]
            if all(kept) and all(self._store.get(wanted)):
                operation.read_s = self._clock() - began_s
        finally:
            self._store.delete([name for name, *_ in records])
        return []

    def _records(self, piece: ItemPlace) -> Iterator[tuple[Form, list[memoryview]]]:
        """The form of each record, and its bytes in host memory."""
        forms = self.forms[piece.kind]
        sizes = [form.payload_bytes for form in forms]
        return zip(forms, self._host.views(piece.host, sizes, piece.kind), strict=True)

    _DO: dict[Work, Callable[[StoreMover, Operation], list[Presence]]] = {
        Work.ASK: _ask,
        Work.READ: _read,
        Work.WRITE: _write,
        Work.CLEAR: _clear,
        Work.STATS: _stats,
        Work.PROBE: _probe,
    }


def _presence(records: Iterable[bool]) -> Presence:
    """The presence of a page or tail, given which of its records are there."""
    return Presence.HERE if all(records) else Presence.MISSING


def forms_of(spec: CacheSpec, align: int) -> dict[Kind, tuple[Form, ...]]:
    """The forms of the records that a page, or a tail, is stored as, in the order of its bytes."""
    return {kind: tuple(_form(kind, spec, grain, align) for grain in spec.grains(kind)) for kind in Kind}


def _form(kind: Kind, spec: CacheSpec, grain: Grain, align: int) -> Form:
    rows = tuple((stream.name, stream.layers, spec.row_bytes(stream)) for stream in grain.streams)
    return Form(kind, grain.form, rows, grain.bytes, align, grain.number, grain.of)
