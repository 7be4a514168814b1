"""Everything that is being fetched: what is asked, what is worth reading, who may stop waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from tiercel.cache.fetch import Fetch, FetchStage, cut, give_back
from tiercel.cache.places import HostPlaces
from tiercel.config import CacheConfig
from tiercel.policy.breaker import Breaker, BreakerState
from tiercel.policy.fetch import Costs, Rate, Refusal, choose_fetch, worth_waiting
from tiercel.policy.resume import Reuse, Why
from tiercel.spec.cache_spec import CacheSpec
from tiercel.transfer.mover import StoreMover
from tiercel.transfer.operation import Operation, Presence, RecordPlace, Work
from tiercel.tree.keys import KeyChain
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import HostPageId, PageKey

LEARN_S = 0.01
"""Less time than this says nothing about a store."""

_WHY = {Refusal.NOTHING: None, Refusal.SLOW: Why.STORE_SLOW, Refusal.NO_ROOM: Why.STORE_NO_ROOM}


class Fetches:
    """One fetch for each text that waits to begin."""

    def __init__(
        self,
        mover: StoreMover,
        tree: PrefixTree,
        spec: CacheSpec,
        config: CacheConfig,
        places: HostPlaces,
        compute: Rate,
        clock: Callable[[], float],
    ) -> None:
        self.of: dict[KeyChain, Fetch] = {}
        self.counters: Counter[str] = Counter()
        self.costs = Costs(
            page_tokens=spec.page_tokens,
            page_bytes=spec.page_bytes,
            tail_bytes=spec.tail_bytes,
            pages_per_window=spec.pages_per_window,
            replay_tokens=spec.replay_tokens,
            compute=compute,
        )
        self.slow = False
        """Something was not fetched because the store is slow: it should be measured again now and then."""
        self._mover = mover
        self._tree = tree
        self._spec = spec
        self._config = config
        self._places = places
        self._clock = clock
        self._bytes_most = places.host.capacity * spec.host_page_bytes // 2
        self._asks: dict[Operation, Fetch] = {}
        self._reads: dict[Operation, Fetch] = {}
        self._arriving: dict[RecordPlace, Operation] = {}
        """Pages and tails that a read is bringing."""
        self._bytes_sent = self._bytes_ended = 0
        self._upto: dict[Operation, int] = {}
        """All bytes that were sent up to the end of a read."""
        self._read_ended_s = 0.0
        self._replan = False

    # A request's view

    def want(self, chain: KeyChain, limit: int, breaker: Breaker, *, replay: bool, wait_s: float) -> Fetch:
        """See what the store has of a text's first `limit` pages, and bring it if that is worth it."""
        fetch = self.of.get(chain)
        if fetch is not None:
            return fetch
        match = self._tree.match(chain.keys, limit)
        fetch = self.of[chain] = Fetch(chain, limit, replay, match, self._clock(), wait_s)
        if match.boundary >= limit:
            self._over(fetch, None)
        elif not breaker.allows(self._clock()):
            self._over(fetch, Why.STORE_OFF)
        else:
            pages = [RecordPlace(False, key) for key in chain.keys[match.found : limit]]
            tails = [
                RecordPlace(True, key) for key in chain.keys[match.boundary : limit] if self._lacks_tail(key)
            ]
            self._asks[self._mover.submit(Work.ASK, pages + tails)] = fetch
            self.counters["fetches"] += 1
        return fetch

    def _lacks_tail(self, key: PageKey) -> bool:
        page = self._tree.index.get(key)
        return self._spec.pages_per_window > 0 and (page is None or page.tail is None)

    def ready(self, fetch: Fetch) -> bool:
        """Whether its request may begin now: everything is there, or is not worth waiting for any longer."""
        now = self._clock()
        if fetch.turn_s is None:
            fetch.turn_s = now
            self._replan = self._replan or fetch.stage is FetchStage.PLANNING
        if fetch.stage is FetchStage.OVER:
            return True
        if self._config.fetch == "wait":
            return False
        tokens = (fetch.limit - fetch.match.boundary) * self._spec.page_tokens
        deadline_s = self._config.fetch_deadline_s * max(1.0, tokens / 1024)
        late = self._config.fetch == "best_effort" or now >= fetch.turn_s + deadline_s
        late = late or not worth_waiting(
            self.costs, fetch.spared_tokens or tokens, self._bytes_before(fetch), now - self._moved_s(fetch)
        )
        if late:
            self.counters["fetches_late"] += 1
            self._learn_from(fetch)
            self._over(fetch, Why.STORE_LATE)
        return late

    def _moved_s(self, fetch: Fetch) -> float:
        """When it, or what is before it, last got on."""
        return max(fetch.moved_s, fetch.began_s, self._read_ended_s)

    def _bytes_before(self, fetch: Fetch) -> int:
        """What is to be read until the last of it is there, that of others included."""
        last = fetch.reads[-1] if fetch.reads else None
        return max(0, self._upto[last] - self._bytes_ended) if last in self._upto else 0

    def _learn_from(self, fetch: Fetch) -> None:
        """What did not come in time tells how fast the store is, too."""
        left, still_s = self._bytes_before(fetch), self._clock() - self._moved_s(fetch)
        expected_s = self.costs.read.seconds(left)
        if still_s > max(expected_s or 0.0, LEARN_S):
            self.costs.read.observe(left / 2, still_s)

    def explained(self, chain: KeyChain, reuse: Reuse) -> Reuse:
        """Why not more, where the store is the reason."""
        fetch = self.of.get(chain)
        short = reuse.why in (Why.NOT_CACHED, Why.NO_TAIL)
        return replace(reuse, why=fetch.why) if short and fetch is not None and fetch.why else reuse

    def forget(self, chain: KeyChain) -> None:
        """The request has begun, or has left."""
        fetch = self.of.pop(chain, None)
        if fetch is not None:
            self._over(fetch, None)
            self._replan = True  # there may be room for others

    def _over(self, fetch: Fetch, why: Why | None) -> None:
        for read in fetch.reads:
            self._no_longer_arriving(read)
        fetch.end(self._tree, why)
        self._places.settle()

    # What the store answered

    def asked(self, ask: Operation) -> None:
        fetch = self._asks.pop(ask)
        if fetch.stage is FetchStage.OVER:
            return
        if ask.error is not None:
            self._over(fetch, Why.STORE_OFF)
            return
        here = [answer is Presence.HERE for answer in ask.answers]
        pages = fetch.limit - fetch.match.found
        fetch.pages_stored = next((i for i, there in enumerate(here[:pages]) if not there), pages)
        depth_of = {key: depth for depth, key in enumerate(fetch.chain.keys[: fetch.limit], 1)}
        named = zip(ask.pieces[pages:], here[pages:], strict=True)
        fetch.tails_stored = frozenset(depth_of[piece.key] for piece, there in named if there)
        fetch.stage = FetchStage.PLANNING

    def plan(self, breaker: Breaker) -> None:
        """Decide for those whose answers are new, and for all when something has changed."""
        replan, self._replan = self._replan, False
        for fetch in list(self.of.values()):
            if fetch.stage is FetchStage.PLANNING and (replan or not fetch.planned):
                if breaker.state is BreakerState.OFF:
                    self._over(fetch, Why.STORE_OFF)
                else:
                    self._plan(fetch)

    def _plan(self, fetch: Fetch) -> None:
        """Decide what to read, find it places on the host, and begin."""
        tree, fetch.planned = self._tree, True
        match = tree.match(fetch.chain.keys, fetch.limit)
        following = fetch.chain.keys[match.found : match.found + 1]
        if any(RecordPlace(False, key) in self._arriving for key in following):
            return  # somebody else is bringing it: then this is planned again
        held = fetch.held(tree, match)
        fetch.depth = held.found
        room = self._bytes_most - sum(each.bytes_held for each in self.of.values())
        costs = self.costs if fetch.replay else replace(self.costs, replay_tokens=None)
        now = self._clock()
        wait_s = max(0.0, fetch.began_s + fetch.wait_s - now) if fetch.turn_s is None else 0.0
        ahead = self._bytes_sent - self._bytes_ended
        wanted = choose_fetch(held, costs, bytes_ahead=ahead, wait_s=wait_s, bytes_most=max(0, room))
        if isinstance(wanted, Refusal):
            if wanted is Refusal.NO_ROOM and fetch.turn_s is None:
                return  # others may have begun by the time it is its turn
            self.slow = self.slow or wanted is Refusal.SLOW
            self.counters["fetches_not_worth"] += wanted is Refusal.SLOW
            self._over(fetch, _WHY[wanted])
            return
        anchor = tree.index[fetch.chain.keys[held.found - 1]] if held.found else tree.root
        tree.lock(anchor)  # the places must not be its own
        pieces = self._with_places(list(fetch.pieces(held, wanted)))
        tree.unlock(anchor)
        if pieces is None:
            self._over(fetch, Why.STORE_NO_ROOM)
            return
        fetch.stage, fetch.moved_s, fetch.spared_tokens = FetchStage.READING, now, wanted.spared
        self._read(fetch, pieces)

    def _with_places(self, pieces: list[RecordPlace]) -> list[RecordPlace] | None:
        """All of them with host pages of their own, or none."""
        placed: list[RecordPlace] = []
        for piece in pieces:
            host = self._places.take_host_by_force(self._spec.host_pages_per_tail if piece.tail else 1)
            if host is None:
                give_back(self._tree, placed)
                return None
            placed.append(piece._replace(host=host))
        return placed

    def _read(self, fetch: Fetch, pieces: list[RecordPlace]) -> None:
        bytes_of = {False: self._spec.page_bytes, True: self._spec.tail_bytes}
        for batch in cut(pieces, bytes_of):
            read = self._mover.submit(Work.READ, batch)
            fetch.reads.append(read)
            fetch.bytes_held += read.bytes
            self._reads[read] = fetch
            self._bytes_sent += read.bytes
            self._upto[read] = self._bytes_sent
            self._arriving.update((piece._replace(host=()), read) for piece in batch)

    def ended(self, read: Operation) -> None:
        fetch = self._reads.pop(read)
        self._no_longer_ahead(read)
        self._no_longer_arriving(read)
        self._count(read)
        if fetch.stage is FetchStage.OVER:
            give_back(self._tree, read.pieces)
            return
        fetch.moved_s = self._clock()
        fetch.landed.add(read)
        if not fetch.publish(self._tree) or not fetch.reads:
            self._over(fetch, None)

    def _count(self, read: Operation) -> None:
        bytes_of = {False: self._spec.page_bytes, True: self._spec.tail_bytes}
        pairs = zip(read.pieces, read.answers, strict=True)
        size = sum(bytes_of[piece.tail] for piece, answer in pairs if answer is Presence.HERE)
        started_s = read.began_s if read.started_s is None else read.started_s
        self.costs.read.observe(size, max(0.0, read.ended_s - max(started_s, self._read_ended_s)))
        self._read_ended_s = max(self._read_ended_s, read.ended_s)
        self.counters["bytes_read"] += size

    def _no_longer_arriving(self, read: Operation) -> None:
        for piece in read.pieces:
            name = piece._replace(host=())
            if self._arriving.get(name) is read:
                del self._arriving[name]
                self._replan = True

    def _no_longer_ahead(self, read: Operation) -> None:
        """Nobody has to wait for this read before his own."""
        if self._upto.pop(read, None) is not None:
            self._bytes_ended += read.bytes

    def hangs(self, operation: Operation) -> None:
        """It does not end: who waits for it does not wait any longer, and nobody waits behind it."""
        self._no_longer_ahead(operation)
        fetch = self._reads.get(operation) or self._asks.get(operation)
        if fetch is not None:
            self._over(fetch, Why.STORE_OFF)

    def host_places(self) -> Iterator[HostPageId]:
        """Host pages that belong to reads, not to the tree."""
        for read in self._reads:
            for piece in read.pieces:
                yield from piece.host
        for fetch in self.of.values():
            yield from fetch.host_places()
