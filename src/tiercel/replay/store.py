"""A store that keeps names only, within a size, and works on a clock."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiercel.replay.null import Clock, Pipe
from tiercel.spec.cache_spec import CacheSpec
from tiercel.transfer.mover import ItemPlace, Operation, Presence, Work
from tiercel.types import Kind, PageKey


@dataclass(slots=True)
class _Record:
    size: int
    was_read: bool = False


class NullStore:
    """Names of pages and tails within `size` bytes. The oldest leave first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.bytes = self.bytes_written = self.bytes_read = 0
        self.bytes_of_use = 0
        """Written bytes that were read at least once."""
        self.removed: list[ItemPlace] = []
        self._records: OrderedDict[tuple[Kind, PageKey], _Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def has(self, piece: ItemPlace) -> bool:
        return piece[:2] in self._records

    def read(self, piece: ItemPlace) -> bool:
        record = self._records.get(piece[:2])
        if record is None:
            return False
        self.bytes_read += record.size
        if not record.was_read:
            record.was_read = True
            self.bytes_of_use += record.size
        return True

    def write(self, piece: ItemPlace, size: int) -> bool:
        """Write a record. Returns whether the store has it now."""
        if self.has(piece):
            return True
        if size > self.size:
            return False
        while self.bytes + size > self.size:
            (kind, key), oldest = self._records.popitem(last=False)
            self.bytes -= oldest.size
            self.removed.append(ItemPlace(kind, key))
        self._records[piece[:2]] = _Record(size)
        self.bytes += size
        self.bytes_written += size
        return True

    def clear(self) -> None:
        self._records.clear()
        self.bytes = 0


class ClockMover:
    """Runs the operations of a `NullStore`: reads after reads and writes after writes, each at its rate."""

    def __init__(
        self, store: NullStore, spec: CacheSpec, clock: Clock, *, read_bytes_s: float, write_bytes_s: float
    ) -> None:
        self.store = store
        self._clock: Clock = clock
        self._spec = spec
        self._read_bytes_s = read_bytes_s
        self._pipes = {Work.READ: Pipe(clock, read_bytes_s), Work.WRITE: Pipe(clock, write_bytes_s)}
        self._due: list[tuple[float, int, Operation]] = []
        self._number = 0
        self.writes = True
        self.under_way: set[Operation] = set()
        self.flaws: Counter[str] = Counter()
        self.away = False
        self.numbers: dict[str, Any] = {}
        self.removed: deque[tuple[Kind, PageKey]] = deque()
        clock.ends.append(self._next_s)

    def submit(self, work: Work, pieces: Sequence[ItemPlace] = ()) -> Operation:
        now_s = self._clock.now_s
        size = sum(self._spec.item_bytes(piece.kind) for piece in pieces) if work in self._pipes else 0
        operation = Operation(work, pieces, size, now_s)
        operation.started_s, operation.ended_s = now_s, now_s
        if work in self._pipes:
            operation.started_s, operation.ended_s = self._pipes[work].send(size)
        self.under_way.add(operation)
        self._number += 1
        heapq.heappush(self._due, (operation.ended_s, self._number, operation))
        return operation

    def give_up_on(self, operation: Operation) -> None:
        operation.late = True

    def poll(self) -> list[Operation]:
        ended = []
        while self.landed:
            operation = heapq.heappop(self._due)[2]
            self.under_way.discard(operation)
            operation.answers = self._answers(operation)
            ended.append(operation)
        self.removed.extend((piece.kind, piece.key) for piece in self.store.removed)
        self.store.removed.clear()
        return ended

    def _answers(self, operation: Operation) -> list[Presence]:
        """What the store returns when the operation ends."""
        pieces, store = operation.pieces, self.store
        if operation.cancelled:
            return [Presence.MISSING] * len(pieces)
        match operation.work:
            case Work.ASK:
                there = [store.has(piece) for piece in pieces]
            case Work.READ:
                there = [store.read(piece) for piece in pieces]
            case Work.WRITE:
                there = [store.write(piece, self._spec.item_bytes(piece.kind)) for piece in pieces]
            case Work.PROBE:
                operation.read_s = self._spec.place_bytes / self._read_bytes_s
                there = []
            case Work.CLEAR:
                store.clear()
                there = []
            case Work.STATS:
                self.numbers = {"records": len(store), "bytes": store.bytes, "bytes_most": store.size}
                there = []
        return [Presence.HERE if here else Presence.MISSING for here in there]

    @property
    def landed(self) -> bool:
        return bool(self._due) and self._due[0][0] <= self._clock.now_s

    def _next_s(self) -> float | None:
        return self._due[0][0] if self._due else None

    def close(self) -> None:
        pass
