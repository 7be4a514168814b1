"""The store as one cache uses it: what is written to it, what is fetched from it, whether it works.

    the host has a new copy ──► backlog ── write, in the background ──► stored
    a request lacks pages ──► ask ── plan: fetch or compute? ── read into host pages ──► the tree has them

Nothing here waits: workers do (`transfer.mover`), and `step` carries on with what they answered. When the
store fails or does not answer, a breaker turns the tier off and tries it again later; requests go on without.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from threading import Thread
from typing import Any

from tiercel.cache.fetch import Fetch, Stage, cut, give_back
from tiercel.cache.places import Places
from tiercel.config import CacheConfig
from tiercel.policy.breaker import Breaker, State
from tiercel.policy.fetch import Costs, Rate, choose_fetch, worth_waiting
from tiercel.policy.resume import Reuse, Why
from tiercel.spec.cache_spec import CacheSpec
from tiercel.storage.record import Kind
from tiercel.transfer.mover import Answer, Operation, Piece, StoreMover, Work
from tiercel.tree.actions import Cleared, Event
from tiercel.tree.keys import KeyChain
from tiercel.tree.node import Item, Tail
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import HostPageId, PageKey, Tier

log = logging.getLogger(__name__)

WRITE_BYTES = 8 * 1024**2
"""A write of a few MiB is as fast as the disk (docs/log.md)."""

BACKLOG_MOST = 1 << 16
TRIES_MOST = 5
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
        self.costs = Costs(
            page_tokens=spec.page_tokens,
            page_bytes=spec.page_bytes,
            tail_bytes=spec.tail_bytes,
            pages_per_window=spec.pages_per_window,
            replay_tokens=spec.replay_tokens,
            compute=compute,
        )
        self.fetches: dict[KeyChain, Fetch] = {}
        self._tree = tree
        self._spec = spec
        self._config = config
        self._places = places
        self._clock = clock
        self._host_bytes = places.host.capacity * spec.host_page_bytes
        self._left = False
        self._closer: Thread | None = None
        self._backlog: deque[tuple[Item, int]] = deque()
        """What is to be written, and how often that was tried."""
        self._writes: dict[Operation, list[tuple[Item, int]]] = {}
        self._reads: dict[Operation, Fetch] = {}
        self._arriving: set[Piece] = set()
        """Pages and tails that some fetch is bringing."""
        self._read_ended_s = 0.0
        self._probe_s = self._numbers_s = clock()
        mover.submit(Work.PROBE)
        mover.submit(Work.STATS)

    # Writing

    def offer(self, items: Iterable[Item]) -> None:
        """The host has a copy of these: the store shall have one too, when there is time."""
        for item in items:
            if item.stored or item.storing:
                continue
            if len(self._backlog) >= BACKLOG_MOST:
                self.counters["writes_dropped"] += 1
                continue
            self._backlog.append((item, 0))

    def _send_writes(self) -> None:
        most = min(self._config.store_writing_bytes, self._host_bytes // 2)
        writing = sum(write.bytes for write in self._writes)
        while self._backlog and (not self._writes or writing < most):
            if not self._allowed():
                return
            batch, pieces, size = [], [], 0
            while self._backlog and size < min(WRITE_BYTES, most):
                item, tries = self._backlog.popleft()
                if item.gone or not item.on_host or item.stored or item.storing or item.host is None:
                    self.counters["writes_passed"] += item.gone or not item.on_host
                    continue
                self._tree.store_start(item)
                batch.append((item, tries))
                pieces.append(_piece(item, item.host))
                size += self._bytes_of(item)
            if not pieces:
                self._give_trial_back()
                return
            self._writes[self.mover.submit(Work.WRITE, pieces)] = batch
            writing += size

    def _written(self, write: Operation) -> None:
        batch = self._writes.pop(write)
        answers = write.answers if write.error is None else [Answer.MISSING] * len(batch)
        for (item, tries), answer in zip(batch, answers, strict=True):
            ok = answer is Answer.HERE
            self._tree.store_done(item, ok and not self._left)
            if write.error is not None and tries < TRIES_MOST and not self._left:
                chance = self.breaker.state is State.WORKING  # if not, it is not this write's fault
                self._backlog.append((item, tries + chance))
            elif not ok:
                self.counters["writes_lost" if write.error else "writes_refused"] += 1
            else:
                self.counters["tails_written" if isinstance(item, Tail) else "pages_written"] += 1
                self.counters["bytes_written"] += self._bytes_of(item)

    def _bytes_of(self, item: Item) -> int:
        return self._spec.tail_bytes if isinstance(item, Tail) else self._spec.page_bytes

    # Fetching

    def want(self, chain: KeyChain, limit: int, *, replay: bool, wait_s: float = 0.0) -> Fetch:
        """See what the store has of a text's first `limit` pages, and bring it if that is worth it."""
        fetch = self.fetches.get(chain)
        if fetch is not None:
            return fetch
        fetch = self.fetches[chain] = Fetch(chain, limit, replay, self._clock(), wait_s)
        match = self._tree.match(chain.keys, limit)
        if match.boundary >= limit:
            self._over(fetch, None)
        elif not self._allowed():
            self._over(fetch, Why.STORE_OFF)
        else:
            fetch.asked_from = match.found
            pages = [Piece(False, key) for key in chain.keys[match.found : limit]]
            tails = [Piece(True, key) for key in chain.keys[match.boundary : limit] if self._lacks_tail(key)]
            self._reads[self.mover.submit(Work.ASK, pages + tails)] = fetch
            self.counters["fetches"] += 1
        return fetch

    def _lacks_tail(self, key: PageKey) -> bool:
        page = self._tree.index.get(key)
        return self._spec.pages_per_window > 0 and (page is None or page.tail is None)

    def ready(self, fetch: Fetch) -> bool:
        """Whether its request may begin now: everything is there, or is not worth waiting for any longer."""
        if fetch.stage is Stage.OVER:
            return True
        if self._config.fetch == "wait":
            return False
        now = self._clock()
        if fetch.turn_s is None:
            fetch.turn_s = now
        tokens = (fetch.limit - fetch.asked_from) * self._spec.page_tokens
        deadline_s = self._config.fetch_deadline_s * max(1.0, tokens / 1024)
        late = self._config.fetch == "best_effort" or now >= fetch.turn_s + deadline_s
        if not late:
            still_s = now - max(fetch.moved_s, fetch.began_s, self._read_ended_s)
            spared = fetch.spared_tokens or tokens
            late = not worth_waiting(self.costs, spared, self._bytes_before_end(fetch), still_s)
        if late:
            self.counters["fetches_late"] += 1
            self._give_up(fetch, Why.STORE_LATE)
        return late

    def _bytes_before_end(self, fetch: Fetch) -> int:
        """What is still to be read until the last of it is there, that of others included."""
        total = found = 0
        for read in self._reads:
            total += 0 if read.cancelled else read.bytes
            if fetch.reads and read is fetch.reads[-1]:
                found = total
        return found

    def explained(self, chain: KeyChain, reuse: Reuse) -> Reuse:
        """Why not more, where the store is the reason."""
        fetch = self.fetches.get(chain)
        short = reuse.why in (Why.NOT_CACHED, Why.NO_TAIL)
        return replace(reuse, why=fetch.why) if short and fetch is not None and fetch.why else reuse

    def forget(self, chain: KeyChain) -> None:
        """The request has begun, or has left."""
        fetch = self.fetches.pop(chain, None)
        if fetch is not None:
            self._give_up(fetch, None)

    def _give_up(self, fetch: Fetch, why: Why | None) -> None:
        if fetch.stage is Stage.READING:
            left = self._bytes_before_end(fetch)
            still_s = self._clock() - max(fetch.moved_s, self._read_ended_s)
            expected_s = self.costs.read.seconds(left)
            if expected_s is None or still_s > expected_s:  # what it did not do tells how fast it is, too
                self.costs.read.observe(left / 2, still_s)
        self._over(fetch, why)

    def _over(self, fetch: Fetch, why: Why | None) -> None:
        for read in fetch.reads:
            self._arriving.difference_update(_names(read.pieces))
        fetch.end(self._tree, why)
        self._places.settle()

    def _answered(self, fetch: Fetch, ask: Operation) -> None:
        if fetch.stage is Stage.OVER:
            return
        if ask.error is not None:
            self._over(fetch, Why.STORE_OFF)
            return
        here = [answer is Answer.HERE for answer in ask.answers]
        pages = fetch.limit - fetch.asked_from
        fetch.pages_stored = here[:pages]
        depth_of = {key: depth for depth, key in enumerate(fetch.chain.keys[: fetch.limit], 1)}
        named = zip(ask.pieces[pages:], here[pages:], strict=True)
        fetch.tails_stored = frozenset(depth_of[piece.key] for piece, there in named if there)
        fetch.stage = Stage.PLANNING

    def _plan(self, fetch: Fetch) -> None:
        """Decide what to read, find it places on the host, and begin."""
        tree, now = self._tree, self._clock()
        held = fetch.held(tree)
        following = fetch.chain.keys[held.found : held.found + 1]
        if any(Piece(False, key) in self._arriving for key in following):
            return  # somebody else is bringing it: then this is planned again
        room = self._host_bytes // 2 - sum(read.bytes for read in self._reads)
        costs = self.costs if fetch.replay else replace(self.costs, replay_tokens=None)
        ahead = sum(read.bytes for read in self._reads if not read.cancelled)
        wait_s = max(0.0, fetch.began_s + fetch.wait_s - now) if fetch.turn_s is None else 0.0
        wanted = choose_fetch(held, costs, bytes_ahead=ahead, wait_s=wait_s, bytes_most=max(0, room))
        if wanted is None:
            self._not_worth(fetch, choose_fetch(held, costs) is not None, nothing=held.stored == 0)
            return
        fetch.anchor = tree.index[fetch.chain.keys[held.found - 1]] if held.found else tree.root
        tree.lock(fetch.anchor)  # before places are taken: they must not be its own
        pieces = self._with_places(list(fetch.pieces(held, wanted)))
        if pieces is None:
            self._over(fetch, Why.STORE_NO_ROOM)
            return
        fetch.stage, fetch.wanted, fetch.moved_s = Stage.READING, wanted, now
        fetch.spared_tokens = (wanted.upto - held.boundary) * self._spec.page_tokens
        bytes_of = {False: self._spec.page_bytes, True: self._spec.tail_bytes}
        for batch in cut(pieces, bytes_of):
            read = self.mover.submit(Work.READ, batch)
            fetch.reads.append(read)
            self._reads[read] = fetch
            self._arriving.update(_names(batch))

    def _not_worth(self, fetch: Fetch, no_room: bool, *, nothing: bool) -> None:
        if nothing:
            self._over(fetch, None)
        elif no_room:
            self._over(fetch, Why.STORE_NO_ROOM)
        else:
            self._over(fetch, Why.STORE_SLOW)
            self.counters["fetches_not_worth"] += 1
            if self._clock() - self._probe_s > PROBE_AGAIN_S and self._allowed():
                self._probe_s = self._clock()
                self.mover.submit(Work.PROBE)

    def _with_places(self, pieces: list[Piece]) -> list[Piece] | None:
        """All of them with host pages of their own, or none."""
        placed: list[Piece] = []
        for piece in pieces:
            host = self._places.take_host_by_force(self._spec.host_pages_per_tail if piece.tail else 1)
            if host is None:
                give_back(self._tree, placed)
                return None
            placed.append(piece._replace(host=host))
        return placed

    def _read(self, fetch: Fetch, read: Operation) -> None:
        self._arriving.difference_update(_names(read.pieces))
        if read.error is not None:
            read.answers = [Answer.MISSING] * len(read.pieces)
        elif not read.cancelled:
            self.costs.read.observe(read.bytes, read.ended_s - max(read.began_s, self._read_ended_s))
            self._read_ended_s = read.ended_s
            self.counters["bytes_read"] += read.bytes
        if fetch.stage is Stage.OVER:
            give_back(self._tree, read.pieces)
            return
        fetch.moved_s = self._clock()
        fetch.landed.add(read)
        if not fetch.publish(self._tree):
            self._over(fetch, Why.STORE_OFF if read.error else None)
        elif not fetch.reads:
            self._over(fetch, None)

    # Going on

    def step(self) -> None:
        """Take in what ended, plan what was answered, send what is to be written."""
        now = self._clock()
        for operation in self.mover.poll():
            self._ended(operation, now)
        for operation in self.mover.under_way:
            if not operation.late and now - operation.began_s > self._config.store_timeout_s:
                operation.late = True
                self.counters["timeouts"] += 1
                self.breaker.failed(now)
                if operation in self._reads:
                    self._over(self._reads[operation], Why.STORE_OFF)
        for fetch in list(self.fetches.values()):
            if fetch.stage is Stage.PLANNING:
                self._plan(fetch)
        self._send_writes()
        self._tell_removed()

    def _ended(self, operation: Operation, now: float) -> None:
        if operation.error is not None and not operation.cancelled:
            self.counters["failures"] += 1
            if self.counters["failures"] == 1 or self.breaker.state is not State.WORKING:
                log.warning("the store: %s", operation.error)
            if not operation.late:
                self.breaker.failed(now)
        elif not operation.late and not operation.cancelled:
            self.breaker.worked()
        if operation.work is Work.WRITE:
            self._written(operation)
        elif operation.work is Work.READ:
            self._read(self._reads.pop(operation), operation)
        elif operation.work is Work.ASK:
            self._answered(self._reads.pop(operation), operation)
        elif operation.work is Work.PROBE and self.mover.probed_s is not None:
            self.costs.read.observe(self._spec.page_bytes, self.mover.probed_s)
        elif operation.work is Work.CLEAR and operation.error is None:
            self.unmark()
            self.mover.submit(Work.STATS)

    def _allowed(self) -> bool:
        return self.breaker.allows(self._clock())

    def _give_trial_back(self) -> None:
        """The one operation that may try a store again was not needed: the next one may."""
        if self.breaker.state is State.TRYING:
            self.mover.submit(Work.STATS)

    def _tell_removed(self) -> None:
        while self.mover.removed:
            key = self.mover.removed.popleft()
            tail, page_key = key[0] == Kind.TAIL, PageKey(key[1:])
            page = self._tree.index.get(page_key)
            item: Item | None = page.tail if page is not None and tail else page
            if item is not None:
                self._tree.mark_stored(item, False)
            if self._tree.events is not None:
                self._tree.events.append(Event(False, Tier.STORE, tail, page_key))

    def unmark(self) -> None:
        """Nothing is known of what the store holds: it was cleared, or it is another one."""
        for item in self._tree.items():
            self._tree.mark_stored(item, False)
        if self._tree.events is not None:
            self._tree.events.append(Cleared(Tier.STORE))

    # Ending

    @property
    def busy(self) -> bool:
        """Something is under way, or could be. What hangs does not count: nobody waits for that."""
        waits = self._backlog and self.breaker.state is State.WORKING
        return bool(waits) or any(not operation.late for operation in self.mover.under_way)

    @property
    def pending(self) -> bool:
        return bool(self._backlog)

    def clear(self) -> Operation:
        """Have the store forget everything. The operation says how it ended."""
        return self.mover.submit(Work.CLEAR)

    def leave(self) -> None:
        """Begin nothing more; what is under way ends by itself."""
        self._left = True
        self._backlog.clear()
        self.unmark()
        for chain in list(self.fetches):
            self.forget(chain)

    def close(self) -> bool:
        """After `leave`, when nothing is under way any more. Never blocks: True once it is closed."""
        if self._closer is None:
            self._closer = Thread(target=self.mover.close, name="tiercel-store-close", daemon=True)
            self._closer.start()
        return not self._closer.is_alive()

    # Looking

    def host_places(self) -> Iterator[HostPageId]:
        """Host pages that belong to reads and writes, not to the tree."""
        for operation in self._reads:
            for piece in operation.pieces:
                yield from piece.host
        for fetch in self.fetches.values():
            yield from fetch.host_places()
        for batch in self._writes.values():
            for item, _ in batch:
                if item.gone and item.load is None:
                    yield from item.host or ()

    def stats(self) -> dict[str, Any]:
        now = self._clock()
        if now - self._numbers_s > NUMBERS_OLD_S and self.breaker.state is State.WORKING:
            self._numbers_s = now
            self.mover.submit(Work.STATS)
        return {
            "attached": True,
            "state": self.breaker.state.value,
            "saved_bytes": self.counters["bytes_written"],
            "read_bytes": self.counters["bytes_read"],
            "read_bytes_s": self.costs.read.per_s,
            "compute_tokens_s": self.costs.compute.per_s,
            "queued_bytes": sum(self._bytes_of(item) for item, _ in self._backlog),
            "flaws": dict(self.mover.flaws),
            "counters": dict(self.counters),
            "records": self.mover.numbers.get("records"),
            "bytes": self.mover.numbers.get("bytes"),
            "store": self.mover.numbers,
        }


def _piece(item: Item, host: tuple[HostPageId, ...]) -> Piece:
    if isinstance(item, Tail):
        return Piece(True, item.page.key, host)
    return Piece(False, item.key, host)


def _names(pieces: Iterable[Piece]) -> set[Piece]:
    return {piece._replace(host=()) for piece in pieces}
