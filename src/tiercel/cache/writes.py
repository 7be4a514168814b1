"""Writes from the host to the store, in the background.

    the host has a new copy ──► backlog ── a batch is sent: its copies stay on the host ──► stored
                                   ▲                                                  │ failed
                                   └──────────────────────────────────────────────────┘

The backlog locks nothing: a page or tail that has left the host when its turn comes is passed over.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tiercel.policy.breaker import Breaker, BreakerState
from tiercel.spec.cache_spec import CacheSpec
from tiercel.transfer.mover import Operation, Presence, RecordPlace, StoreMover, Work
from tiercel.tree.node import Item, Tail
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import HostPageId

WRITE_BYTES = 8 * 1024**2
"""A write of a few MiB is as fast as the disk (docs/log.md)."""

BACKLOG_MOST = 1 << 16
TRIES_MOST = 5


@dataclass(eq=False)
class Writes:
    """The backlog, and what is being written. At most `bytes_most` of host memory are being written."""

    mover: StoreMover
    tree: PrefixTree
    spec: CacheSpec
    breaker: Breaker
    counters: Counter[str]
    bytes_most: int
    backlog: deque[tuple[Item, int]] = field(default_factory=deque)
    """What is to be written, and how often that was tried."""
    epoch: int = 0
    """Counts how often the store was emptied or left: a write that began before proves nothing."""
    _under_way: dict[Operation, tuple[int, list[tuple[Item, int]]]] = field(default_factory=dict)

    def offer(self, items: Iterable[Item]) -> None:
        """The host has a copy of these: write them to the store too."""
        for item in items:
            if item.stored or item.storing:
                continue
            if len(self.backlog) >= BACKLOG_MOST:
                self.counters["writes_dropped"] += 1
                continue
            self.backlog.append((item, 0))

    def send(self, now_s: float) -> None:
        """Begin as many writes as may be under way at a time."""
        writing = sum(write.bytes for write in self._under_way)
        while self.backlog and (not self._under_way or writing < self.bytes_most):
            if not self.breaker.allows(now_s):
                return
            batch = self._take()
            if not batch:
                self.breaker.not_used()
                return
            write = self.mover.submit(Work.WRITE, [_piece(item) for item, _ in batch])
            self._under_way[write] = self.epoch, batch
            writing += write.bytes

    def _take(self) -> list[tuple[Item, int]]:
        batch: list[tuple[Item, int]] = []
        size = 0
        while self.backlog and size < min(WRITE_BYTES, self.bytes_most):
            item, tries = self.backlog.popleft()
            if item.gone or not item.on_host:
                self.counters["writes_passed"] += 1
            elif not (item.stored or item.storing):
                self.tree.store_start(item)
                batch.append((item, tries))
                size += self._bytes_of(item)
        return batch

    def ended(self, write: Operation, *, left: bool) -> list[Item]:
        """Update the tree. Returns, if the store was left meanwhile, what another store might want."""
        epoch, batch = self._under_way.pop(write)
        for (item, tries), answer in zip(batch, write.answers, strict=True):
            here = answer is Presence.HERE and write.error is None
            known = here and epoch == self.epoch and not left
            self.tree.store_done(item, known)
            if left:
                continue
            if here and not known:
                self.backlog.append((item, 0))  # the store was emptied since
            elif here:
                self.counters["tails_written" if isinstance(item, Tail) else "pages_written"] += 1
                self.counters["bytes_written"] += self._bytes_of(item)
            elif write.error is not None and tries < TRIES_MOST:
                counts = self.breaker.state is BreakerState.WORKING  # if not, it is not this write's fault
                self.backlog.append((item, tries + counts))
            else:
                self.counters["writes_lost" if write.error else "writes_refused"] += 1
        return [item for item, _ in batch if not item.gone] if left else []

    def _bytes_of(self, item: Item) -> int:
        return self.spec.tail_bytes if isinstance(item, Tail) else self.spec.page_bytes

    @property
    def bytes_waiting(self) -> int:
        return sum(self._bytes_of(item) for item, _ in self.backlog)

    def host_places(self) -> Iterator[HostPageId]:
        """Of what has left the tree while it is written. (A load that reads it too is counted there.)"""
        for _, batch in self._under_way.values():
            for item, _ in batch:
                if item.gone and item.load is None:
                    yield from item.host or ()


def _piece(item: Item) -> RecordPlace:
    page = item.page if isinstance(item, Tail) else item
    return RecordPlace(page is not item, page.key, item.host or ())
