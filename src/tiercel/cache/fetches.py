"""All fetches of one cache: what is asked of the store, what is read, when a request stops waiting.

want ──► ask the store ──► `policy.fetch.next_of` ──► read into host pages ──► the tree has them
ready ── the request's turn has come: it waits, or begins with what is there
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tiercel.cache.fetch import Fetch, FetchStage, cut, give_back
from tiercel.cache.places import Places
from tiercel.config import CacheConfig
from tiercel.policy.breaker import Breaker, BreakerState
from tiercel.policy.fetch import (
    Costs,
    Fetching,
    GiveUp,
    Held,
    Keep,
    Moment,
    Rate,
    Refusal,
    Wanted,
    make_fetch_policy,
    next_of,
)
from tiercel.policy.resume import Reuse, Why
from tiercel.spec.cache_spec import CacheSpec
from tiercel.transfer.mover import ItemPlace, Mover, Operation, Presence, Work
from tiercel.tree.keys import KeyChain
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import HostPageId, Kind, PageKey

LEARN_S = 0.01
"""Less time than this says nothing about a store."""

_WHY = {
    None: None,
    Refusal.NOTHING: None,
    Refusal.NO_TAIL: Why.STORE_NO_TAIL,
    Refusal.SLOW: Why.STORE_SLOW,
    Refusal.NO_ROOM: Why.STORE_NO_ROOM,
    Refusal.OFF: Why.STORE_OFF,
    Refusal.LATE: Why.STORE_LATE,
}


@dataclass(eq=False)
class Reading:
    """What all fetches together read: the pages, the bytes, and the rate."""

    rate: Rate
    coming: Counter[PageKey] = field(default_factory=Counter)
    """For each page, how many fetches bring it."""
    bytes_held: int = 0
    """Host memory that belongs to requests until they begin or leave."""
    bytes_sent: int = 0
    bytes_ended: int = 0
    ended_s: float = 0.0
    """When the last read ended."""

    @property
    def bytes_under_way(self) -> int:
        return self.bytes_sent - self.bytes_ended

    def begin(self, fetch: Fetch, reads: list[Operation]) -> None:
        fetch.reads = reads
        fetch.coming = {piece.key for read in reads for piece in read.pieces if piece.kind is Kind.PAGE}
        fetch.bytes_held = sum(read.bytes for read in reads)
        self.coming.update(fetch.coming)
        self.bytes_held += fetch.bytes_held
        self.bytes_sent += fetch.bytes_held
        fetch.bytes_upto = self.bytes_sent

    def ended(self, read: Operation, size: int, *, in_vain: bool) -> None:
        """A read has brought `size` bytes. `in_vain`: damaged, and the store can not be repaired."""
        if not read.late:
            self.bytes_ended += read.bytes
        started_s = read.began_s if read.started_s is None else read.started_s
        self.rate.observe(1 if in_vain else size, max(0.0, read.ended_s - max(started_s, self.ended_s)))
        self.ended_s = max(self.ended_s, read.ended_s)

    def comes_no_more(self, fetch: Fetch, keys: Sequence[PageKey]) -> None:
        fetch.coming.difference_update(keys)
        for key in keys:
            self.coming[key] -= 1
            if not self.coming[key]:
                del self.coming[key]

    def check(self, fetches: Collection[Fetch]) -> None:
        """Raises an AssertionError where the sums over all fetches differ from the fetches themselves."""
        assert self.coming == Counter(key for fetch in fetches for key in fetch.coming), "pages that come"
        assert self.bytes_held == sum(fetch.bytes_held for fetch in fetches), "bytes held by fetches"


@dataclass(eq=False)
class Fetches:
    """One fetch for each text that waits to begin. `policy.fetch.next_of` decides what to do with it."""

    mover: Mover
    tree: PrefixTree
    spec: CacheSpec
    config: CacheConfig
    places: Places
    compute: Rate
    clock: Callable[[], float]
    breaker: Breaker
    counters: Counter[str]
    of: dict[KeyChain, Fetch] = field(default_factory=dict)
    slow: bool = False
    """Something was not fetched because the store is slow: the store should be measured again."""
    _under_way: dict[Operation, Fetch] = field(default_factory=dict)
    """The fetch of each ask and read under way."""
    _planning: dict[Fetch, bool] = field(default_factory=dict)
    """Fetches for which the store has told what it has, and whether each was looked at since: then it waits
    for room, or for another fetch."""
    _replan: bool = False
    """Whether something has changed for fetches that were looked at."""

    def __post_init__(self) -> None:
        self._policy = make_fetch_policy(self.config.fetch)
        self._bytes_most = self.places.host.capacity * self.spec.place_bytes // 2
        self.costs = Costs(
            page_tokens=self.spec.page_tokens,
            page_bytes=self.spec.page_bytes,
            tail_bytes=self.spec.tail_bytes,
            pages_per_window=self.spec.pages_per_window,
            replay_tokens=self.spec.replay_tokens,
            compute=self.compute,
        )
        self.reading = Reading(self.costs.read)

    # A request's view

    def want(self, chain: KeyChain, limit: int, *, replay: bool, wait_s: float = 0.0) -> Fetch:
        """Ask the store for a text's first `limit` pages, and fetch them if that is worth it. The request
        will want to begin in about `wait_s`."""
        fetch = self.of.get(chain)
        if fetch is not None:
            return fetch
        now, match = self.clock(), self.tree.match(chain.keys, limit)
        fetch = self.of[chain] = Fetch(chain, limit, replay, match, now + wait_s, now, self.mover.writes)
        if match.boundary >= limit:
            self._over(fetch, None)
        elif not self.breaker.allows(now):
            self._over(fetch, Why.STORE_OFF)
        else:
            pages = [ItemPlace(Kind.PAGE, key) for key in chain.keys[match.found : limit]]
            tails = [
                ItemPlace(Kind.TAIL, key)
                for key in chain.keys[match.boundary : limit]
                if self._lacks_tail(key)
            ]
            self._under_way[self.mover.submit(Work.ASK, pages + tails)] = fetch
            self.counters["fetches"] += 1
        return fetch

    def pull(self, chain: KeyChain, upto: int, *, tail: bool) -> None:
        """Read what is missing of a text's first `upto` pages, and of the tail behind them: a peer has just
        said that they are there. It does not matter whether that is worth it: the peer computes the rest
        meanwhile. `pulled` tells when it is over."""
        self.forget(chain)
        now, match = self.clock(), self.tree.match(chain.keys, upto)
        fetch = Fetch(chain, upto, False, match, now, now, self.mover.writes, FetchStage.PLANNING)
        self.of[chain], fetch.pages_stored = fetch, upto - match.found
        tails = (upto,) if tail and self._lacks_tail(chain.keys[upto - 1]) else ()
        missing = chain.keys[match.found : upto]
        size = len(missing) * self.spec.page_bytes + len(tails) * self.spec.tail_bytes
        if not size or not self.breaker.allows(now):
            self._over(fetch, None)
        elif any(key in self.reading.coming for key in missing):
            self._over(fetch, None)  # another fetch brings it
        elif size > self._bytes_most - self.reading.bytes_held:
            self._over(fetch, Why.STORE_NO_ROOM)
        else:
            wanted = Wanted(upto, tails, len(missing) * self.spec.page_tokens)
            self._start(fetch, fetch.held(self.tree, match), wanted)

    def pulled(self, chain: KeyChain) -> bool:
        fetch = self.of.get(chain)
        return fetch is None or fetch.stage is FetchStage.OVER

    def _lacks_tail(self, key: PageKey) -> bool:
        page = self.tree.index.get(key)
        return self.spec.pages_per_window > 0 and (page is None or page.tail is None)

    def ready(self, fetch: Fetch) -> bool:
        """Whether the request may begin now: all has arrived, or the rest is not worth waiting for."""
        now = self.clock()
        if fetch.turn_s is None:
            fetch.turn_s = now
            self._replan = self._replan or fetch.stage is FetchStage.PLANNING
        if fetch.stage is FetchStage.OVER:
            return True
        tokens = (fetch.limit - fetch.match.boundary) * self.spec.page_tokens
        deadline_s = self.config.fetch_deadline_s * max(1.0, tokens / 1024)
        fetching = Fetching(
            self.costs,
            tokens=fetch.spared_tokens or tokens,
            bytes_left=max(0, fetch.bytes_upto - self.reading.bytes_ended) if fetch.reads else 0,
            waited_s=now - fetch.turn_s,
            left_s=fetch.turn_s + deadline_s - now,
            still_s=now - max(fetch.moved_s, self.reading.ended_s),
        )
        if isinstance(next_of(Moment(self.costs, fetching=fetching), self._policy), Keep):
            return False
        expected_s = self.costs.read.seconds(fetching.bytes_left) or 0.0
        if fetching.still_s > max(expected_s, LEARN_S):  # the wait also measures how fast the store is
            self.costs.read.observe(fetching.bytes_left / 2, fetching.still_s)
        self.counters["fetches_late"] += 1
        self._over(fetch, Why.STORE_LATE)
        return True

    def begun(self, chain: KeyChain, reuse: Reuse) -> Reuse:
        """The request begins. Returns its reuse; if the store limited it, with the reason."""
        fetch = self.of.get(chain)
        self.forget(chain)
        if reuse.why not in (Why.NOT_CACHED, Why.NO_TAIL) or fetch is None or fetch.why is None:
            return reuse
        held = (fetch.match.found + fetch.pages_stored) * self.spec.page_tokens
        return replace(reuse, why=fetch.why, found_tokens=max(reuse.found_tokens, held))

    def forget(self, chain: KeyChain) -> None:
        fetch = self.of.pop(chain, None)
        if fetch is not None:
            self._over(fetch, None)
            self.reading.bytes_held -= fetch.bytes_held
            self._replan = True  # there may be room for others

    def _over(self, fetch: Fetch, why: Why | None) -> None:
        self._replan = self._replan or bool(fetch.coming)
        self._planning.pop(fetch, None)
        self.reading.comes_no_more(fetch, list(fetch.coming))
        fetch.end(self.tree, why)
        self.places.settle()

    # What to read

    def plan(self) -> None:
        """Look at the fetches with new results, and at all fetches when something has changed."""
        replan, self._replan = self._replan, False
        for fetch, looked_at in [*self._planning.items()]:
            if (replan or not looked_at) and fetch in self._planning:
                self._planning[fetch] = True
                self._plan(fetch)

    def _plan(self, fetch: Fetch) -> None:
        """Decide what to read, reserve host places for it, and start the reads."""
        match = self.tree.match(fetch.chain.keys, fetch.limit)
        held = fetch.held(self.tree, match)
        following = fetch.chain.keys[match.found : match.found + 1]
        moment = Moment(
            self.costs if fetch.replay else replace(self.costs, replay_tokens=None),
            self.breaker.state is not BreakerState.OFF,
            held,
            other_brings=any(key in self.reading.coming for key in following),
            turn=fetch.turn_s is not None,
            wait_s=max(0.0, fetch.expected_s - self.clock()) if fetch.turn_s is None else 0.0,
            bytes_ahead=self.reading.bytes_under_way,
            bytes_most=max(0, self._bytes_most - self.reading.bytes_held),
        )
        match next_of(moment, self._policy):
            case GiveUp(why):
                self.slow = self.slow or why is Refusal.SLOW
                self.counters["fetches_not_worth"] += why is Refusal.SLOW
                self._over(fetch, _WHY[why])
            case Wanted() as wanted:
                fetch.why = _WHY[wanted.rest]
                self._start(fetch, held, wanted)

    def _start(self, fetch: Fetch, held: Held, wanted: Wanted) -> None:
        """Read what is wanted, if there are host places for it."""
        tree, fetch.depth = self.tree, held.found
        anchor = tree.index[fetch.chain.keys[held.found - 1]] if held.found else tree.root
        tree.lock(anchor)  # its places must not be taken for its own children
        pieces = self._with_places(list(fetch.pieces(held, wanted)))
        tree.unlock(anchor)
        if pieces is None:
            self._over(fetch, Why.STORE_NO_ROOM)
            return
        self._planning.pop(fetch, None)
        fetch.stage, fetch.moved_s, fetch.spared_tokens = FetchStage.READING, self.clock(), wanted.spared
        reads = [self.mover.submit(Work.READ, batch) for batch in cut(pieces, self._bytes_of)]
        self.reading.begin(fetch, reads)
        self._under_way.update(dict.fromkeys(reads, fetch))

    def _with_places(self, pieces: list[ItemPlace]) -> list[ItemPlace] | None:
        """The pieces with a host page each; None if there is not room for all."""
        placed: list[ItemPlace] = []
        for piece in pieces:
            host = self.places.take_host_by_force(self.spec.places_of(piece.kind))
            if host is None:
                give_back(self.tree, placed)
                return None
            placed.append(piece._replace(host=host))
        return placed

    def _bytes_of(self, piece: ItemPlace) -> int:
        return self.spec.item_bytes(piece.kind)

    # What the store answered

    def ended(self, operation: Operation) -> None:
        """An ask or a read has ended."""
        fetch = self._under_way.pop(operation)
        if operation.work is Work.READ:
            self._read_ended(fetch, operation)
        elif fetch.stage is not FetchStage.OVER:
            self._asked(fetch, operation)

    def _asked(self, fetch: Fetch, ask: Operation) -> None:
        if ask.error is not None:
            self._over(fetch, Why.STORE_OFF)
            return
        here = [answer is Presence.HERE for answer in ask.answers]
        pages = fetch.limit - fetch.match.found
        fetch.pages_stored = next((i for i, there in enumerate(here[:pages]) if not there), pages)
        depth_of = {key: depth for depth, key in enumerate(fetch.chain.keys[: fetch.limit], 1)}
        tails = zip(ask.pieces[pages:], here[pages:], strict=True)
        fetch.tails_stored = frozenset(depth_of[piece.key] for piece, there in tails if there)
        fetch.stage = FetchStage.PLANNING
        self._planning[fetch] = False

    def _read_ended(self, fetch: Fetch, read: Operation) -> None:
        pairs = zip(read.pieces, read.answers, strict=True)
        size = sum(self._bytes_of(piece) for piece, answer in pairs if answer is Presence.HERE)
        in_vain = not self.mover.writes and Presence.DAMAGED in read.answers
        self.reading.ended(read, size, in_vain=in_vain)
        self.counters["bytes_read"] += size
        if fetch.stage is FetchStage.OVER:
            give_back(self.tree, read.pieces)
            return
        self.reading.comes_no_more(fetch, [piece.key for piece in read.pieces if piece.kind is Kind.PAGE])
        self._replan = True
        fetch.moved_s = self.clock()
        fetch.landed.add(read)
        if not fetch.publish(self.tree) or not fetch.reads:
            self._over(fetch, None)

    def hangs(self, operation: Operation) -> None:
        """The operation is late: its request stops waiting, and no other request waits behind it."""
        fetch = self._under_way.get(operation)
        if fetch is not None:
            self.reading.bytes_ended += operation.bytes
            self._over(fetch, Why.STORE_OFF)

    def host_places(self) -> Iterator[HostPageId]:
        """Host pages that belong to reads, not to the tree."""
        waiting = (read for fetch in self.of.values() for read in fetch.reads if read in fetch.landed)
        for read in (*self._under_way, *waiting):
            for piece in read.pieces:
                yield from piece.host

    def check(self) -> None:
        self.reading.check(self.of.values())
        planning = {fetch for fetch in self.of.values() if fetch.stage is FetchStage.PLANNING}
        assert planning == {*self._planning}, "fetches that are to be planned"
