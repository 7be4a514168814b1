"""Between host memory and a store: operations in, workers elsewhere, what ended comes out.

    ask     which of these records are there?
    read    … into host pages, each verified before it is told of (I9)
    write   … from host pages, those that are there already left out

A worker survives whatever a store raises (I13): the operation is tried again after a moment, then it has
failed, and says so. A call that never returns keeps its worker and its host pages, nothing else: who waits
decides by the clock.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from threading import Condition
from typing import Any, NamedTuple

from tiercel.errors import StoreError
from tiercel.memory.buffers import HostMemory
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.stream import Stream
from tiercel.storage.base import Get, Put, Store
from tiercel.storage.record import Flaw, Form, Kind, RecordKey, record_key
from tiercel.types import HostPageId, PageKey

log = logging.getLogger(__name__)

READERS = 4
"""Four reads at a time keep a disk busy (docs/log.md); one waits on most networks anyway."""
WRITERS = 2
"""One writes while the other sums."""


class Work(Enum):
    ASK = "ask"
    READ = "read"
    WRITE = "write"
    CLEAR = "clear"
    STATS = "stats"
    PROBE = "probe"
    """A page of nothing, written, read and removed again: how fast is it?"""


class Answer(Enum):
    """How it went with one record."""

    HERE = "here"
    """Asked: it is there. Read: every byte is right. Written: the store has it."""
    MISSING = "missing"
    """Not there, or, of something written, not kept."""
    DAMAGED = "damaged"
    """Something was there that is not what was asked for. It has been removed."""


class Piece(NamedTuple):
    """One page or tail, and the host pages it is read into or written from."""

    tail: bool
    key: PageKey
    host: tuple[HostPageId, ...] = ()


@dataclass(eq=False)
class Operation:
    """Something asked of a store. It ends with answers, one for each piece, or with an error."""

    work: Work
    pieces: Sequence[Piece]
    bytes: int
    began_s: float
    ended_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    error: StoreError | None = None
    cancelled: bool = False
    """Nobody waits for it any more: it need not begin, nor be tried again."""
    late: bool = False
    """It took longer than anybody waits; whoever submitted it counts it as failed already."""


@dataclass(frozen=True)
class Workers:
    """Who does the work: reads do not wait for writes."""

    readers: Executor
    writers: Executor
    retry_after_s: Sequence[float] = (0.02, 0.1)

    @staticmethod
    def threads() -> Workers:
        readers = ThreadPoolExecutor(READERS, "tiercel-store-read")
        return Workers(readers, ThreadPoolExecutor(WRITERS, "tiercel-store-write"))


class StoreMover:
    """Runs operations on one store. `submit` and `poll` belong to one thread.

    Workers and store are given away: `close` closes them.
    """

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
        pages = Kind.PAGE_BY_ENTRY if host.layout.by_entry else Kind.PAGE
        self.forms = {
            False: _form(pages, spec, spec.page_streams, store.align),
            True: _form(Kind.TAIL, spec, spec.tail_streams, store.align),
        }
        self._workers = workers or Workers.threads()
        self._ended: deque[Operation] = deque()
        self.under_way: set[Operation] = set()
        self.flaws: Counter[str] = Counter()
        """What was wrong with records that were read, by the flaw."""
        self.numbers: dict[str, Any] = {}
        """The store's own statistics, as last asked for."""
        self.removed: deque[RecordKey] = deque()
        """What the store let go of by itself."""
        self.probed_s: float | None = None
        """How long the probe's page took to read."""
        store.register(host.view)

    def submit(self, work: Work, pieces: Sequence[Piece] = ()) -> Operation:
        """Never blocks."""
        size = sum(self.forms[piece.tail].payload_bytes for piece in pieces)
        operation = Operation(work, pieces, size, self._clock())
        self.under_way.add(operation)
        try:
            reads = work in (Work.ASK, Work.READ)
            workers = self._workers.readers if reads else self._workers.writers
            future = workers.submit(self._run, operation)
        except RuntimeError as refusal:  # what an executor that can start no thread raises
            self._end(operation, StoreError(f"no worker: {refusal}"))
        else:
            future.add_done_callback(lambda _: self._end(operation, operation.error))
        return operation

    def poll(self) -> list[Operation]:
        """What ended since the last poll."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
            self.under_way.discard(ended[-1])
        return ended

    def key(self, piece: Piece) -> RecordKey:
        return record_key(self.forms[piece.tail].kind, piece.key)

    @property
    def landed(self) -> bool:
        """Whether there is something to poll."""
        return bool(self._ended)

    def close(self) -> None:
        """Wait for what is under way; then the store is closed."""
        self._workers.readers.shutdown(wait=True)
        self._workers.writers.shutdown(wait=True)
        try:
            self._store.close()
        except Exception:  # noqa: BLE001 - a store is not ours; it is left anyway
            log.exception("the store did not close")

    # In a worker

    def _run(self, operation: Operation) -> None:
        for wait_s in (*self._workers.retry_after_s, None):
            if operation.cancelled:
                operation.answers = [Answer.MISSING] * len(operation.pieces)
                return
            try:
                operation.answers = self._DO[operation.work](self, operation.pieces)
                operation.error = None
                return
            except Exception as error:  # noqa: BLE001 - whatever a store raises, its worker goes on
                operation.error = StoreError(f"{operation.work.value} failed: {error!r}")
                operation.error.__cause__ = error
                if wait_s is None or operation.work is Work.ASK:
                    return
                time.sleep(wait_s)

    def _end(self, operation: Operation, error: StoreError | None) -> None:
        operation.error = error
        operation.ended_s = self._clock()
        with self._landed:
            self._ended.append(operation)
            self._landed.notify_all()

    def _ask(self, pieces: Sequence[Piece]) -> list[Answer]:
        there = self._store.contains([self.key(piece) for piece in pieces])
        assert len(there) == len(pieces), "a store answers for every key"
        return [Answer.HERE if each else Answer.MISSING for each in there]

    def _read(self, pieces: Sequence[Piece]) -> list[Answer]:
        headers = [bytearray(self.forms[piece.tail].header_bytes) for piece in pieces]
        payloads = [self._views(piece) for piece in pieces]
        wanted = [
            Get(self.key(piece), [memoryview(header), *payload])
            for piece, header, payload in zip(pieces, headers, payloads, strict=True)
        ]
        there = self._store.get(wanted)
        assert len(there) == len(pieces), "a store answers for every key"
        answers, damaged = [], []
        for piece, header, payload, here in zip(pieces, headers, payloads, there, strict=True):
            flaw = self.forms[piece.tail].flaw(header, piece.key, payload) if here else None
            if flaw is not None:
                damaged.append(self._quarantine(piece, flaw))
            answers.append(Answer.MISSING if not here else Answer.DAMAGED if flaw else Answer.HERE)
        if damaged:
            self._store.delete(damaged)
        return answers

    def _quarantine(self, piece: Piece, flaw: Flaw) -> RecordKey:
        """Counted, and logged the first time for each flaw; the record is never served again."""
        key, name = self.key(piece), flaw.name.lower()
        with self._landed:
            self.flaws[name] += 1
        if self.flaws[name] == 1:
            log.error("the store answered %s with %s; such records are removed", key.hex(), flaw.value)
        return key

    def _write(self, pieces: Sequence[Piece]) -> list[Answer]:
        keys = [self.key(piece) for piece in pieces]
        there = self._store.contains(keys)
        values = []
        for piece, key, here in zip(pieces, keys, there, strict=True):
            if not here:
                payload = self._views(piece)
                values.append(Put(key, [self.forms[piece.tail].header(piece.key, payload), *payload]))
        kept = iter(self._store.put(values) if values else [])
        self.removed.extend(self._store.removed())
        return [Answer.HERE if here or next(kept) else Answer.MISSING for here in there]

    def _clear(self, _: Sequence[Piece]) -> list[Answer]:
        self._store.clear()
        return []

    def _stats(self, _: Sequence[Piece]) -> list[Answer]:
        self.numbers = self._store.stats()
        return []

    def _probe(self, _: Sequence[Piece]) -> list[Answer]:
        form, key = self.forms[False], PageKey(os.urandom(32))
        name, payload = record_key(form.kind, key), bytearray(form.payload_bytes)
        kept = self._store.put([Put(name, [form.header(key, [payload]), payload])])
        began_s = self._clock()
        parts = [memoryview(bytearray(form.header_bytes)), memoryview(payload)]
        if all(kept) and all(self._store.get([Get(name, parts)])):
            self.probed_s = self._clock() - began_s
        self._store.delete([name])
        return []

    def _views(self, piece: Piece) -> list[memoryview]:
        return self._host.views(piece.host, self.forms[piece.tail].payload_bytes)

    _DO: dict[Work, Callable[[StoreMover, Sequence[Piece]], list[Answer]]] = {
        Work.ASK: _ask,
        Work.READ: _read,
        Work.WRITE: _write,
        Work.CLEAR: _clear,
        Work.STATS: _stats,
        Work.PROBE: _probe,
    }


def _form(kind: Kind, spec: CacheSpec, streams: Sequence[Stream], align: int) -> Form:
    rows = tuple((stream.name, stream.layers, spec.row_bytes(stream)) for stream in streams)
    size = sum(map(spec.bytes_of, streams))
    return Form(kind, spec.fingerprint, rows, size, align)
