"""What goes from the host to the store, when there is time.

    the host has a new copy ──► backlog ── a batch is sent: its copies stay on the host ──► stored
                                   ▲                                                  │ failed
                                   └──────────────────────────────────────────────────┘

What waits in the backlog holds nothing: if it has left the host when its turn comes, it is passed over.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from tiercel.config import CacheConfig
from tiercel.policy.breaker import Breaker, BreakerState
from tiercel.spec.cache_spec import CacheSpec
from tiercel.transfer.mover import StoreMover
from tiercel.transfer.operation import Operation, Presence, RecordPlace, Work
from tiercel.tree.node import Item, Tail
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import HostPageId

WRITE_BYTES = 8 * 1024**2
"""A write of a few MiB is as fast as the disk (docs/log.md)."""

BACKLOG_MOST = 1 << 16
TRIES_MOST = 5


class Writes:
    """The backlog, and what is being written."""

    def __init__(
        self,
        mover: StoreMover,
        tree: PrefixTree,
        spec: CacheSpec,
        config: CacheConfig,
        host_bytes: int,
        counters: Counter[str],
    ) -> None:
        self._mover = mover
        self._tree = tree
        self._spec = spec
        self._bytes_most = min(config.store_writing_bytes, host_bytes // 2)
        self._counters = counters
        self._epoch = 0
        """Counts how often the store was emptied: a write of before proves nothing."""
        self._under_way: dict[Operation, tuple[int, list[tuple[Item, int]]]] = {}
        self.backlog: deque[tuple[Item, int]] = deque()
        """What is to be written, and how often that was tried."""

    def offer(self, items: Iterable[Item]) -> None:
        """The host has a copy of these: the store shall have one too."""
        for item in items:
            if item.stored or item.storing:
                continue
            if len(self.backlog) >= BACKLOG_MOST:
                self._counters["writes_dropped"] += 1
                continue
            self.backlog.append((item, 0))

    def send(self, breaker: Breaker, now_s: float) -> None:
        """As much as may be under way at a time."""
        writing = sum(write.bytes for write in self._under_way)
        while self.backlog and (not self._under_way or writing < self._bytes_most):
            if not breaker.allows(now_s):
                return
            batch, pieces = self._take()
            if not pieces:
                breaker.not_used()
                return
            write = self._mover.submit(Work.WRITE, pieces)
            self._under_way[write] = self._epoch, batch
            writing += write.bytes

    def _take(self) -> tuple[list[tuple[Item, int]], list[RecordPlace]]:
        batch: list[tuple[Item, int]] = []
        pieces: list[RecordPlace] = []
        size = 0
        while self.backlog and size < min(WRITE_BYTES, self._bytes_most):
            item, tries = self.backlog.popleft()
            if item.gone or not item.on_host or item.host is None:
                self._counters["writes_passed"] += 1
            elif not (item.stored or item.storing):
                self._tree.store_start(item)
                batch.append((item, tries))
                pieces.append(_piece(item, item.host))
                size += self.bytes_of(item)
        return batch, pieces

    def ended(self, write: Operation, breaker: Breaker, *, left: bool) -> list[Item]:
        """The books follow. Answers, if the store was left meanwhile, what another one might want."""
        epoch, batch = self._under_way.pop(write)
        for (item, tries), answer in zip(batch, write.answers, strict=True):
            here = answer is Presence.HERE and write.error is None
            known = here and epoch == self._epoch and not left
            self._tree.store_done(item, known)
            if left:
                continue
            if here and not known:
                self.backlog.append((item, 0))  # the store was emptied since
            elif here:
                self._counters["tails_written" if isinstance(item, Tail) else "pages_written"] += 1
                self._counters["bytes_written"] += self.bytes_of(item)
            elif write.error is not None and tries < TRIES_MOST:
                chance = breaker.state is BreakerState.WORKING  # if not, it is not this write's fault
                self.backlog.append((item, tries + chance))
            else:
                self._counters["writes_lost" if write.error else "writes_refused"] += 1
        return [item for item, _ in batch if not item.gone] if left else []

    def forget_what_is_known(self) -> None:
        """The store was emptied, or is left."""
        self._epoch += 1

    def bytes_of(self, item: Item) -> int:
        return self._spec.tail_bytes if isinstance(item, Tail) else self._spec.page_bytes

    @property
    def bytes_waiting(self) -> int:
        return sum(self.bytes_of(item) for item, _ in self.backlog)

    def host_places(self) -> Iterator[HostPageId]:
        """Of what has left the tree while it is written. (A load that reads it too is counted there.)"""
        for _, batch in self._under_way.values():
            for item, _ in batch:
                if item.gone and item.load is None:
                    yield from item.host or ()


def _piece(item: Item, host: tuple[HostPageId, ...]) -> RecordPlace:
    if isinstance(item, Tail):
        return RecordPlace(True, item.page.key, host)
    return RecordPlace(False, item.key, host)
