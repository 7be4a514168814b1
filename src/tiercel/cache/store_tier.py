"""The store as one cache uses it: what is written to it, what is fetched from it, whether it works.

    the host has a new copy ──► writes: a backlog, sent in the background ──► stored
    a request lacks pages ──► fetches: ask ── fetch or compute? ── read into host pages ──► the tree has them

No call here blocks: workers do the waiting (`transfer.mover`), and `step` takes in their results. When the
store fails or does not answer, a breaker turns the tier off and tries it again later; requests go on without
it.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from tiercel.cache.audit import StoreStats
from tiercel.cache.fetches import Fetches
from tiercel.cache.places import Places
from tiercel.config import CacheConfig
from tiercel.policy.breaker import Breaker, BreakerState
from tiercel.policy.fetch import Rate
from tiercel.spec.cache_spec import CacheSpec
from tiercel.threads import start
from tiercel.transfer.mover import ItemPlace, Mover, Operation, Presence, Work
from tiercel.tree.node import Cleared, Event, Item, Tail
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import Kind, PageKey, Tier

log = logging.getLogger(__name__)

PROBE_AGAIN_S = 10.0
"""How often a store that is too slow to be worth it is measured again."""

NUMBERS_OLD_S = 1.0
"""How often a store is asked how much it holds, while it is written to or looked at."""

WRITE_BYTES = 8 * 1024**2
"""A write of a few MiB is as fast as the disk (docs/log.md)."""

COUNTED = (
    *("writes_dropped", "writes_passed", "writes_lost", "writes_refused", "pages_written", "tails_written"),
    *("bytes_written", "bytes_read", "timeouts", "failures", "fetches", "fetches_late", "fetches_not_worth"),
)
"""What the store tier counts: all counters are there from the start."""

REFUSED_AGAIN_S = 60.0
"""A store that keeps some writes and refuses others is told of once in this time."""

BACKLOG_MOST = 1 << 16
TRIES_MOST = 5


@dataclass(eq=False)
class Writes:
    """Writes from the host to the store, in the background: at most `bytes_most` of host memory at a time.

    the host has a new copy ──► backlog ── a batch is sent: its copies stay on the host ──► stored
                                   ▲                                                  │ failed
                                   └──────────────────────────────────────────────────┘

    The backlog locks nothing: a page or tail that has left the host when its turn comes is passed over.
    """

    mover: Mover
    tree: PrefixTree
    spec: CacheSpec
    breaker: Breaker
    counters: Counter[str]
    bytes_most: int
    backlog: deque[tuple[Item, int]] = field(default_factory=deque)
    """Items to write, and how often each was tried."""
    bytes_waiting: int = 0
    """Bytes of everything in the backlog."""
    refused: bool = False
    """Whether the store did not keep the last write, although it works."""
    _told_s: float = -REFUSED_AGAIN_S
    epoch: int = 0
    """Counts how often the store was emptied or left: a write that began before that proves nothing."""
    _under_way: dict[Operation, tuple[int, list[tuple[Item, int]]]] = field(default_factory=dict)
    _writing: set[Item] = field(default_factory=set)

    def offer(self, items: Iterable[Item]) -> None:
        """The host has a copy of these: write them to the store too, unless it can only be read."""
        if not self.mover.writes:
            return
        for item in items:
            if item.stored or item in self._writing:
                continue
            if len(self.backlog) >= BACKLOG_MOST:
                self.counters["writes_dropped"] += 1
                continue
            self._wait(item, 0)

    def _wait(self, item: Item, tries: int) -> None:
        self.backlog.append((item, tries))
        self.bytes_waiting += self._bytes_of(item)

    def forget(self) -> None:
        """Drop the backlog."""
        self.backlog.clear()
        self.bytes_waiting = 0

    def check(self) -> None:
        assert self.bytes_waiting == sum(self._bytes_of(item) for item, _ in self.backlog)

    def send(self, now_s: float) -> None:
        """Begin writes until the most that may be under way are."""
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
            self.bytes_waiting -= self._bytes_of(item)
            if item.gone or not item.on_host or not self.tree.worth_keeping(item):
                self.counters["writes_passed"] += 1
            elif not (item.stored or item in self._writing):
                self.tree.read_start(item)
                self._writing.add(item)
                batch.append((item, tries))
                size += self._bytes_of(item)
        return batch

    def ended(self, write: Operation, *, left: bool) -> list[Item]:
        """Update the tree. If the store was left meanwhile, returns what another store might want."""
        epoch, batch = self._under_way.pop(write)
        for (item, tries), answer in zip(batch, write.answers, strict=True):
            here = answer is Presence.HERE and write.error is None
            known = here and epoch == self.epoch and not left
            self._writing.discard(item)
            self.tree.read_done(item)
            if known and not item.gone:
                self.tree.mark_stored(item)
            if left:
                continue
            if here and not known:
                self._wait(item, 0)  # the store was emptied since
            elif here:
                self.counters[f"{item.kind.plural}_written"] += 1
                self.counters["bytes_written"] += self._bytes_of(item)
            elif write.error is not None and tries < TRIES_MOST:
                counts = self.breaker.state is BreakerState.WORKING  # if not, the write is not to blame
                self._wait(item, tries + counts)
            else:
                self.counters["writes_lost" if write.error else "writes_refused"] += 1
        if write.error is None and not left:
            self._tell_refused(write)
        return [item for item, _ in batch if not item.gone] if left else []

    def _tell_refused(self, write: Operation) -> None:
        """A line of the log when the store begins to refuse writes, and when it keeps them again."""
        refused = Presence.MISSING in write.answers
        if refused == self.refused:
            return
        self.refused = refused
        if write.ended_s - self._told_s < REFUSED_AGAIN_S:
            return
        self._told_s = write.ended_s
        if refused:
            log.warning("the store works and does not keep what is written: it is full, or has no memory")
        else:
            log.info("the store keeps what is written")

    def _bytes_of(self, item: Item) -> int:
        return self.spec.item_bytes(item.kind)

    @property
    def busy(self) -> bool:
        """Whether a write is under way."""
        return bool(self._under_way)

    def items(self) -> Iterator[Item]:
        """What is being written."""
        return iter(self._writing)


def _piece(item: Item) -> ItemPlace:
    page = item.page if isinstance(item, Tail) else item
    return ItemPlace(item.kind, page.key, item.host or ())


@dataclass(eq=False)
class StoreTier:
    """One attached store. All calls come from the thread that drives the cache."""

    mover: Mover
    tree: PrefixTree
    spec: CacheSpec
    config: CacheConfig
    places: Places
    compute: Rate
    clock: Callable[[], float]
    returned: list[Item] = field(default_factory=list)
    """Items that were being written when the store was left: another store might want them."""
    _left: bool = False
    _closed: Future[None] | None = None
    _ended_s: dict[Work, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = self.mover, self.tree, self.spec
        self.breaker = Breaker(works=not self.mover.away)
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.fetches = Fetches(
            *parts, self.config, self.places, self.compute, self.clock, self.breaker, self.counters
        )
        host_bytes = self.places.host.capacity * self.spec.place_bytes
        bytes_most = min(self.config.store_writing_bytes, host_bytes // 2)
        self.writes = Writes(*parts, self.breaker, self.counters, bytes_most)
        self._probe_s = self._numbers_s = self.clock()
        self._numbers: Operation | None = None
        """The operation that asks the store how much it holds, while it runs."""
        self._told = ""
        """The last failure in the log: the same one is not told again until the store has worked."""
        self._changed = False
        """Whether it was written to, or emptied, since it was last asked."""
        if self.breaker.allows(self._probe_s):
            self.mover.submit(Work.PROBE)
        self._ask_numbers(self._numbers_s)

    # Going on

    def step(self) -> None:
        """Take in what ended, plan fetches, send writes."""
        now = self.clock()
        for operation in self.mover.poll():
            self._ended(operation, now)
        for operation in list(self.mover.under_way):
            if not operation.late and now - self._since(operation) > self.config.store_timeout_s:
                self.mover.give_up_on(operation)
                self.counters["timeouts"] += 1
                self.breaker.failed(now)
                self.fetches.hangs(operation)
        self.fetches.plan()
        self.writes.send(now)
        if self.fetches.slow and now - self._probe_s > PROBE_AGAIN_S and self.breaker.allows(now):
            self.fetches.slow, self._probe_s = False, now
            self.mover.submit(Work.PROBE)
        elif self.tries_again and self.breaker.allows(now):
            self.mover.submit(Work.PROBE)
        if self._changed and (not self.writes.busy or now - self._numbers_s > NUMBERS_OLD_S):
            self._ask_numbers(now)
        while self.mover.removed:
            kind, key = self.mover.removed.popleft()
            self._not_stored(kind, key)
            self.tree.copies.evicted[Tier.STORE, kind, "room"] += 1

    @property
    def tries_again(self) -> bool:
        """Whether it fails, and is found to work again without a request. What can only be read is found to
        work by a request: only a fetch asks it anything."""
        return self.mover.writes and self.breaker.state is BreakerState.OFF

    def _ask_numbers(self, now: float) -> None:
        """Ask the store how much it holds, unless it is being asked, or fails."""
        if self._numbers is None and self.breaker.state is BreakerState.WORKING:
            self._numbers, self._numbers_s, self._changed = self.mover.submit(Work.STATS), now, False

    def _since(self, operation: Operation) -> float:
        """When a thread began the operation. If none has: when its crew last finished another operation."""
        if operation.started_s is not None:
            return operation.started_s
        return max(operation.began_s, self._ended_s.get(_crew(operation), 0.0))

    def _ended(self, operation: Operation, now: float) -> None:
        self._ended_s[_crew(operation)] = now
        self._numbers = None if operation is self._numbers else self._numbers
        self._changed = self._changed or operation.work in (Work.WRITE, Work.CLEAR)
        self._judge(operation, now)
        match operation.work:
            case Work.WRITE:
                self.returned += self.writes.ended(operation, left=self._left)
            case Work.ASK | Work.READ:
                self.fetches.ended(operation)
                for piece, answer in zip(operation.pieces, operation.answers, strict=True):
                    if answer is Presence.DAMAGED:
                        self._damaged(piece)
            case Work.PROBE if operation.read_s is not None:
                self.fetches.costs.read.observe(self.spec.place_bytes, operation.read_s)
            case Work.PROBE if not self.mover.writes:
                self.fetches.costs.read.forget()  # the next fetch measures it
            case Work.CLEAR if operation.error is None:
                self._unmark()

    def _judge(self, operation: Operation, now: float) -> None:
        """Whether the store works, as far as this operation tells."""
        if operation.error is not None and not operation.cancelled:
            self.counters["failures"] += 1
            if (why := repr(operation.error.__cause__)) != self._told:
                log.warning("the store: %s", operation.error)
                self._told = why
            if not operation.late:
                self.breaker.failed(now)
        elif not operation.late and not operation.cancelled:
            if self.breaker.state is not BreakerState.WORKING:
                log.info("the store works")
                self._told = ""
            self.breaker.worked()

    def _damaged(self, piece: ItemPlace) -> None:
        """A damaged record was removed from the store. If the host has a copy, write it again."""
        item = self._not_stored(piece.kind, piece.key)
        if item is not None and item.on_host and not self._left:
            self.writes.offer([item])

    def _not_stored(self, kind: Kind, key: PageKey) -> Item | None:
        """The store no longer has this page or tail. Returns what the tree has of it."""
        page = self.tree.index.get(key)
        item: Item | None = page.tail if page is not None and kind is Kind.TAIL else page
        if not self._left:
            if item is not None:
                self.tree.mark_stored(item, False)
            if self.tree.copies.events is not None:
                self.tree.copies.events.append(Event(False, Tier.STORE, kind, key))
        return item

    def _unmark(self) -> None:
        """Nothing is known of what the store holds: it was emptied, or it is left."""
        self.writes.epoch += 1
        if self._left:
            return
        for item in self.tree.items():
            self.tree.mark_stored(item, False)
        if self.tree.copies.events is not None:
            self.tree.copies.events.append(Cleared(Tier.STORE))

    # Ending

    @property
    def busy(self) -> bool:
        """Something is under way, or will be. Operations that hang do not count: nobody waits for them."""
        waits = self.writes.backlog and self.breaker.state is BreakerState.WORKING
        return bool(waits) or any(not operation.late for operation in self.mover.under_way)

    def clear(self) -> Operation:
        """Remove every record. The returned operation tells how it ended."""
        return self.mover.submit(Work.CLEAR)

    def leave(self) -> None:
        """Begin nothing more; what is under way ends by itself."""
        for chain in list(self.fetches.of):
            self.fetches.forget(chain)
        self._unmark()
        self._left = True
        self.writes.forget()

    def close(self) -> bool:
        """Call it after `leave`. Closes the store once nothing is under way; returns whether it did."""
        if self._closed is None:
            self._closed = start(self.mover.close, "tiercel-store-close")
        return self._closed.done()

    # Looking

    def stats(self) -> StoreStats:
        now = self.clock()
        if now - self._numbers_s > NUMBERS_OLD_S:  # others may write to it, too
            self._ask_numbers(now)
        return StoreStats(
            state=self.breaker.state.value,
            refused=self.writes.refused,
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
