"""Between host memory and a store: operations in, workers elsewhere, what ended comes out.

    ask     which of these records are there?
    read    … into host pages, each verified before it is told of (I9); what is listed and can not be read,
            or is not what was asked for, is damaged: removed, counted, and written again when it comes again
    write   … from host pages, those that are there already left out

A worker survives whatever a store raises (I13): the operation is tried again after a moment, then it has
failed, and says so. A call that never returns keeps its thread and its host pages, nothing else: another
thread takes its place (`Crew`), and who waits decides by the clock.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from threading import Condition
from typing import Any

from tiercel.errors import StoreError
from tiercel.memory.buffers import HostMemory
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.stream import Stream
from tiercel.storage.base import Get, Put, Store
from tiercel.storage.record import Flaw, Form, Kind, RecordKey
from tiercel.threads import Crew
from tiercel.transfer.operation import Operation, Presence, RecordPlace, Work
from tiercel.types import PageKey

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workers:
    """Who does the work: asks wait for no reads, reads for no writes."""

    askers: Executor
    readers: Executor
    writers: Executor
    retry_after_s: Sequence[float] = (0.02, 0.1)

    @staticmethod
    def threads() -> Workers:
        """Four reads at a time keep a disk busy; of two writes one waits while the other sums."""
        askers, readers = Crew(1, "tiercel-store-ask"), Crew(4, "tiercel-store-read")
        return Workers(askers, readers, Crew(2, "tiercel-store-write"))

    def of(self, work: Work) -> Executor:
        if work is Work.ASK:
            return self.askers
        return self.readers if work is Work.READ else self.writers


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
        store.register(host.mapped)
        self._workers = workers or Workers.threads()
        self._ended: deque[Operation] = deque()
        self.under_way: set[Operation] = set()
        self.flaws: Counter[str] = Counter()
        """What was wrong with records that were read, by the flaw."""
        self._not_removed: set[RecordKey] = set()
        """Damaged, and the store could not remove them: not there until they are written again."""
        self.numbers: dict[str, Any] = {}
        """The store's own statistics, as last asked for."""
        self.removed: deque[RecordKey] = deque()
        """What the store let go of by itself, of this form."""

    def submit(self, work: Work, pieces: Sequence[RecordPlace] = ()) -> Operation:
        """Never blocks."""
        moved = pieces if work in (Work.READ, Work.WRITE) else ()
        size = sum(self.forms[piece.tail].payload_bytes for piece in moved)
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
        """It hangs. If its thread does, there is one more now."""
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
        return self.forms[piece.tail].key(piece.key)

    @property
    def landed(self) -> bool:
        """Whether there is something to poll."""
        return bool(self._ended)

    def close(self) -> None:
        """Wait for what is under way; then the store is closed."""
        for crew in (self._workers.askers, self._workers.readers, self._workers.writers):
            crew.shutdown(wait=True)
        try:
            self._store.close()
        except Exception:  # noqa: BLE001 - a store is not ours; it is left anyway
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
            except BaseException as error:  # noqa: BLE001 - whatever a store raises, its worker goes on
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
        there = self._listed([self.key(piece) for piece in operation.pieces])
        return [Presence.HERE if each else Presence.MISSING for each in there]

    def _listed(self, keys: Sequence[RecordKey]) -> list[bool]:
        there = zip(keys, self._store.contains(keys), strict=True)
        return [here and key not in self._not_removed for key, here in there]

    def _read(self, operation: Operation) -> list[Presence]:
        pieces = operation.pieces
        wanted = [Get(self.key(piece), [self._header_of(piece), *self._views(piece)]) for piece in pieces]
        there = self._store.get(wanted)
        missed = [each.key for each, here in zip(wanted, there, strict=True) if not here]
        listed = dict(zip(missed, self._listed(missed), strict=True)) if missed else {}
        answers, damaged = [], []
        for piece, each, here in zip(pieces, wanted, there, strict=True):
            header, *payload = each.parts
            flaw = Flaw.UNREADABLE if listed.get(each.key) else None
            if here:
                flaw = self.forms[piece.tail].flaw(header, piece.key, payload)
            if flaw is not None:
                damaged.append(self._quarantine(piece, flaw))
            answers.append(Presence.DAMAGED if flaw else Presence.HERE if here else Presence.MISSING)
        self._remove(damaged)
        return answers

    def _remove(self, damaged: Sequence[RecordKey]) -> None:
        """A store that can not (it is full, or open for reading only) does not fail the read."""
        try:
            if damaged:
                self._store.delete(damaged)
        except Exception as error:  # noqa: BLE001 - whatever a store raises
            if not self._not_removed:
                log.warning("the store can not remove damaged records: %r", error)
            self._not_removed.update(damaged)

    def _quarantine(self, piece: RecordPlace, flaw: Flaw) -> RecordKey:
        """Counted, and logged the first time for each flaw; the record is never served again."""
        key, name = self.key(piece), flaw.name.lower()
        with self._landed:
            self.flaws[name] += 1
        if self.flaws[name] == 1:
            log.error("the store answered %s with %s; such records are removed", key.hex(), flaw.value)
        return key

    def _write(self, operation: Operation) -> list[Presence]:
        pieces = operation.pieces
        keys = [self.key(piece) for piece in pieces]
        there = self._listed(keys)
        values = []
        for piece, key, here in zip(pieces, keys, there, strict=True):
            if not here:
                payload = self._views(piece)
                values.append(Put(key, [self.forms[piece.tail].header(piece.key, payload), *payload]))
        kept = dict(
            zip((value.key for value in values), self._store.put(values) if values else [], strict=True)
        )
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
        form, key = self.forms[False], PageKey(os.urandom(32))
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

    def _header_of(self, piece: RecordPlace) -> memoryview:
        return memoryview(bytearray(self.forms[piece.tail].header_bytes))

    def _views(self, piece: RecordPlace) -> list[memoryview]:
        return self._host.views(piece.host, self.forms[piece.tail].payload_bytes)

    _DO: dict[Work, Callable[[StoreMover, Operation], list[Presence]]] = {
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
    return Form(kind, spec.form, rows, size, align)
