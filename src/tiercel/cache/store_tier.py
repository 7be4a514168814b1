"""The store as one cache uses it: what is written to it, what is fetched from it, whether it works.

    the host has a new copy ──► writes: a backlog, sent in the background ──► stored
    a request lacks pages ──► fetches: ask ── fetch or compute? ── read into host pages ──► the tree has them

No call here blocks: workers do the waiting (`transfer.mover`), and `step` takes in what they answered. When
the store fails or does not answer, a breaker turns the tier off and tries it again later; requests go on
without it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from tiercel.cache.audit import StoreStats
from tiercel.cache.fetch import Fetches
from tiercel.cache.places import Places
from tiercel.cache.writes import Writes
from tiercel.config import CacheConfig
from tiercel.policy.breaker import Breaker, BreakerState
from tiercel.policy.fetch import Rate
from tiercel.spec.cache_spec import CacheSpec
from tiercel.storage.record import Kind, page_key_of
from tiercel.threads import start
from tiercel.transfer.mover import Operation, Presence, StoreMover, Work
from tiercel.tree.actions import Cleared, Event
from tiercel.tree.node import Item
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import HostPageId, PageKey, Tier

log = logging.getLogger(__name__)

PROBE_AGAIN_S = 10.0
"""A store too slow to be worth it is measured again so often."""

NUMBERS_OLD_S = 1.0


class StoreTier:
    """One attached store. All calls come from the thread that drives the cache."""

    def __init__(
        self,
        mover: StoreMover,
        tree: PrefixTree,
        spec: CacheSpec,
        config: CacheConfig,
        places: Places,
        compute: Rate,
        clock: Callable[[], float],
    ) -> None:
        self.mover = mover
        self.breaker = Breaker()
        self.counters: Counter[str] = Counter()
        self.fetches = Fetches(mover, tree, spec, config, places, compute, clock, self.breaker, self.counters)
        host_bytes = places.host.capacity * spec.host_page_bytes
        bytes_most = min(config.store_writing_bytes, host_bytes // 2)
        self.writes = Writes(mover, tree, spec, self.breaker, self.counters, bytes_most)
        self.returned: list[Item] = []
        """What was being written when the store was left: another store might want it."""
        self._tree = tree
        self._page_bytes = spec.page_bytes
        self._timeout_s = config.store_timeout_s
        self._clock = clock
        self._left = False
        self._closed: Future[None] | None = None
        self._ended_s: dict[Work, float] = {}
        self._probe_s = self._numbers_s = clock()
        mover.submit(Work.PROBE)
        mover.submit(Work.STATS)

    # Going on

    def step(self) -> None:
        """Take in what ended, plan fetches, send writes."""
        now = self._clock()
        for operation in self.mover.poll():
            self._ended(operation, now)
        for operation in list(self.mover.under_way):
            if not operation.late and now - self._since(operation) > self._timeout_s:
                self.mover.give_up_on(operation)
                self.counters["timeouts"] += 1
                self.breaker.failed(now)
                self.fetches.hangs(operation)
        self.fetches.plan()
        self.writes.send(now)
        self._probe_again(now)
        self._tell_removed()

    def _since(self, operation: Operation) -> float:
        """When a thread began it. As long as none has: when its crew last finished another operation."""
        if operation.started_s is not None:
            return operation.started_s
        return max(operation.began_s, self._ended_s.get(_crew(operation), 0.0))

    def _ended(self, operation: Operation, now: float) -> None:
        self._ended_s[_crew(operation)] = now
        if operation.error is not None and not operation.cancelled:
            self.counters["failures"] += 1
            if self.counters["failures"] == 1 or self.breaker.state is not BreakerState.WORKING:
                log.warning("the store: %s", operation.error)
            if not operation.late:
                self.breaker.failed(now)
        elif not operation.late and not operation.cancelled:
            self.breaker.worked()
        match operation.work:
            case Work.WRITE:
                self.returned += self.writes.ended(operation, left=self._left)
            case Work.ASK | Work.READ:
                self.fetches.ended(operation)
                self._write_again(operation)
            case Work.PROBE if operation.read_s is not None:
                self.fetches.costs.read.observe(self._page_bytes, operation.read_s)
            case Work.CLEAR if operation.error is None:
                self._unmark()
                self.mover.submit(Work.STATS)

    def _probe_again(self, now: float) -> None:
        if self.fetches.slow and now - self._probe_s > PROBE_AGAIN_S and self.breaker.allows(now):
            self.fetches.slow, self._probe_s = False, now
            self.mover.submit(Work.PROBE)

    def _write_again(self, read: Operation) -> None:
        """A damaged record was removed from the store. If the host has a copy, it is written again."""
        for piece, answer in zip(read.pieces, read.answers, strict=True):
            if answer is Presence.DAMAGED:
                item = self._not_stored(piece.tail, piece.key)
                if item is not None and item.on_host and not self._left:
                    self.writes.offer([item])

    def _tell_removed(self) -> None:
        while self.mover.removed:
            key = self.mover.removed.popleft()
            self._not_stored(key[0] == Kind.TAIL, PageKey(page_key_of(key)))

    def _not_stored(self, tail: bool, key: PageKey) -> Item | None:
        """The store no longer has this page or tail. Returns what the tree has of it."""
        page = self._tree.index.get(key)
        item: Item | None = page.tail if page is not None and tail else page
        if not self._left:
            if item is not None:
                self._tree.mark_stored(item, False)
            if self._tree.events is not None:
                self._tree.events.append(Event(False, Tier.STORE, tail, key))
        return item

    def _unmark(self) -> None:
        """Nothing is known of what the store holds: it was emptied, or it is left."""
        self.writes.epoch += 1
        if self._left:
            return
        for item in self._tree.items():
            self._tree.mark_stored(item, False)
        if self._tree.events is not None:
            self._tree.events.append(Cleared(Tier.STORE))

    # Ending

    @property
    def busy(self) -> bool:
        """Something is under way, or could be. Operations that hang do not count: nobody waits for them."""
        waits = self.writes.backlog and self.breaker.state is BreakerState.WORKING
        return bool(waits) or any(not operation.late for operation in self.mover.under_way)

    def clear(self) -> Operation:
        """Remove every record. The operation says how it ended."""
        return self.mover.submit(Work.CLEAR)

    def leave(self) -> None:
        """Begin nothing more; what is under way ends by itself."""
        for chain in list(self.fetches.of):
            self.fetches.forget(chain)
        self._unmark()
        self._left = True
        self.writes.backlog.clear()

    def close(self) -> bool:
        """After `leave`, when nothing is under way any more. Never blocks; returns whether it is closed."""
        if self._closed is None:
            self._closed = start(self.mover.close, "tiercel-store-close")
        return self._closed.done()

    # Looking

    def host_places(self) -> Iterator[HostPageId]:
        """Host pages that belong to reads and writes, not to the tree."""
        yield from self.fetches.host_places()
        yield from self.writes.host_places()

    def stats(self) -> StoreStats:
        now = self._clock()
        if now - self._numbers_s > NUMBERS_OLD_S and self.breaker.state is BreakerState.WORKING:
            self._numbers_s = now
            self.mover.submit(Work.STATS)
        return StoreStats(
            state=self.breaker.state.value,
            saved_bytes=self.counters["bytes_written"],
            read_bytes=self.counters["bytes_read"],
            read_bytes_s=self.fetches.costs.read.per_s,
            compute_tokens_s=self.fetches.costs.compute.per_s,
            queued_bytes=self.writes.bytes_waiting,
            flaws=dict(self.mover.flaws),
            counters=dict(self.counters),
            records=self.mover.numbers.get("records"),
            bytes=self.mover.numbers.get("bytes"),
            store=self.mover.numbers,
        )


def _crew(operation: Operation) -> Work:
    """Asks and reads have threads of their own; everything else runs on the writers'."""
    return operation.work if operation.work in (Work.ASK, Work.READ) else Work.WRITE
