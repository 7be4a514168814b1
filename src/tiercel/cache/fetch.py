"""From the store to the host: what is asked, what is worth reading, when a request stops waiting.

    ASKING ── the store says what it has ──► PLANNING ── host places ──► READING ── all landed ──► OVER
       │                                        │                           │
       └──── nothing there, store off ──────────┴── not worth it, no room ──┴── too late, damaged ──► OVER

Pages that were read become visible from the front, each as soon as all pages before it are: so a fetch that
ends early has brought a prefix. A fetch locks nothing: if the page it continues has left meanwhile, it ends.
Host places of a read that nobody waits for come back when the read has ended, never before (I3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from tiercel.cache.places import Places
from tiercel.config import CacheConfig
from tiercel.policy.breaker import Breaker, BreakerState
from tiercel.policy.fetch import Costs, Fetching, Held, Rate, Refusal, Wanted, choose_fetch, make_fetch_policy
from tiercel.policy.resume import Reuse, Why
from tiercel.spec.cache_spec import CacheSpec
from tiercel.transfer.mover import Mover, Operation, Presence, RecordPlace, Work
from tiercel.tree.keys import KeyChain
from tiercel.tree.prefix_tree import Match, PrefixTree
from tiercel.types import HostPageId, Kind, PageKey

READ_BYTES_MOST = 8 * 1024**2
READ_BYTES_LEAST = 256 * 1024
READS = 8
"""A fetch is cut into so many reads, within these sizes: enough to use every worker and to show progress,
few enough that a read is large."""

LEARN_S = 0.01
"""Less time than this says nothing about a store."""

_WHY = {
    None: None,
    Refusal.NOTHING: None,
    Refusal.NO_TAIL: Why.STORE_NO_TAIL,
    Refusal.SLOW: Why.STORE_SLOW,
    Refusal.NO_ROOM: Why.STORE_NO_ROOM,
}


class FetchStage(Enum):
    ASKING = "asking"
    PLANNING = "planning"
    READING = "reading"
    OVER = "over"


@dataclass(eq=False)
class Fetch:
    """What is known of one text, and what is under way for it."""

    chain: KeyChain
    limit: int
    """Pages that would help."""
    replay: bool
    match: Match
    """What the nearer tiers had when the store was asked."""
    expected_s: float
    """When the request is expected to want to begin."""
    moved_s: float
    """Time of the last progress."""
    stored: bool = True
    """Whether what it brings is in a store of ours, and need not be written there again."""
    stage: FetchStage = FetchStage.ASKING
    turn_s: float | None = None
    """When the request could have begun without the fetch."""
    why: Why | None = None
    """Why it brought less than the text has."""
    pages_stored: int = 0
    """Pages in the store that follow the found ones without a gap."""
    tails_stored: frozenset[int] = frozenset()
    spared_tokens: int = 0
    depth: int = 0
    """Pages of the text that were found, or are published."""
    reads: list[Operation] = field(default_factory=list)
    """Reads that are not published yet, in the order of the text."""
    landed: set[Operation] = field(default_factory=set)
    """Those of them that have ended; they wait for the reads before them."""
    coming: set[PageKey] = field(default_factory=set)
    """Pages that reads under way bring."""
    bytes_held: int = 0
    """Host memory that belongs to this request until it begins or leaves."""
    bytes_upto: int = 0
    """All bytes that were sent for any fetch up to the end of this one."""

    def held(self, tree: PrefixTree, match: Match) -> Held:
        """What the tree has of the text now, and what the store has besides."""
        stored = self.match.found + self.pages_stored - match.found
        path = self.chain.keys[: match.found]
        tails = frozenset(depth for depth, key in enumerate(path, 1) if tree.index[key].tail is not None)
        gone = match.found < self.match.found  # the store was not asked for pages that have left since
        return Held(match.boundary, match.found, 0 if gone else max(0, stored), tails, self.tails_stored)

    def pieces(self, held: Held, wanted: Wanted) -> Iterator[RecordPlace]:
        """What is to be read, in the order of the text: a tail follows its page."""
        tails = set(wanted.tails)
        for depth, key in enumerate(self.chain.keys[: wanted.upto], 1):
            if depth > held.found:
                yield RecordPlace(Kind.PAGE, key)
            if depth in tails:
                yield RecordPlace(Kind.TAIL, key)

    def publish(self, tree: PrefixTree) -> bool:
        """Insert what has landed at the front. Returns False if the rest can not be used any more."""
        while self.reads and self.reads[0] in self.landed:
            read = self.reads.pop(0)
            if Presence.DAMAGED in read.answers:
                self.why = Why.STORE_DAMAGED
            elif Presence.MISSING in read.answers and read.error is not None:
                self.why = Why.STORE_OFF
            for number, (piece, answer) in enumerate(zip(read.pieces, read.answers, strict=True)):
                if answer is Presence.HERE and self._insert(tree, piece):
                    continue
                if piece.kind is Kind.PAGE:
                    give_back(tree, read.pieces[number:])
                    return False
                give_back(tree, [piece])
        return True

    def _insert(self, tree: PrefixTree, piece: RecordPlace) -> bool:
        """Returns False if the page that it belongs to or continues has left."""
        if piece.kind is Kind.TAIL:
            page = tree.index.get(piece.key)
            if page is not None:
                tree.insert_fetched_tail(page, piece.host, stored=self.stored)
            return page is not None
        parent = tree.index.get(self.chain.keys[self.depth - 1]) if self.depth else tree.root
        if parent is not None:
            tokens = self.chain.texts[self.depth] if self.chain.texts else b""
            brought = [(piece.key, piece.host, tokens)]
            tree.insert_fetched(parent, brought, stored=self.stored, owner=self.chain.owner)
            self.depth += 1
        return parent is not None

    def end(self, tree: PrefixTree, why: Why | None = None) -> None:
        """Nothing more is published. Places of reads under way come back when these have ended."""
        if self.stage is FetchStage.OVER:
            return
        self.stage = FetchStage.OVER
        self.why = why or self.why
        for read in self.reads:
            if read in self.landed:
                give_back(tree, read.pieces)
            else:
                read.cancel()
        self.reads = []


def give_back(tree: PrefixTree, pieces: Sequence[RecordPlace]) -> None:
    for piece in pieces:
        tree.copies.actions.host.extend(piece.host)


def cut(pieces: Sequence[RecordPlace], bytes_of: Callable[[RecordPlace], int]) -> Iterator[list[RecordPlace]]:
    """One fetch as several reads."""
    size = min(max(sum(map(bytes_of, pieces)) // READS, READ_BYTES_LEAST), READ_BYTES_MOST)
    batch: list[RecordPlace] = []
    filled = 0
    for piece in pieces:
        if batch and filled + bytes_of(piece) > size:
            yield batch
            batch, filled = [], 0
        batch.append(piece)
        filled += bytes_of(piece)
    if batch:
        yield batch


@dataclass(eq=False)
class Fetches:
    """One fetch for each text that waits to begin."""

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
    """Asks and reads."""
    _answered: list[Fetch] = field(default_factory=list)
    """Fetches that were not planned yet: the store has just said what it has."""
    _planning: dict[Fetch, None] = field(default_factory=dict)
    """Fetches that were planned, and wait for room or for another fetch."""
    _coming: Counter[PageKey] = field(default_factory=Counter)
    """How many fetches bring a page."""
    _bytes_held: int = 0
    _bytes_sent: int = 0
    _bytes_ended: int = 0
    _read_ended_s: float = 0.0
    _replan: bool = False

    def __post_init__(self) -> None:
        self._policy = make_fetch_policy(self.config.fetch)
        self._bytes_most = self.places.host.capacity * self.spec.host_page_bytes // 2
        self.costs = Costs(
            page_tokens=self.spec.page_tokens,
            page_bytes=self.spec.page_bytes,
            tail_bytes=self.spec.tail_bytes,
            pages_per_window=self.spec.pages_per_window,
            replay_tokens=self.spec.replay_tokens,
            compute=self.compute,
        )

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
            pages = [RecordPlace(Kind.PAGE, key) for key in chain.keys[match.found : limit]]
            tails = [
                RecordPlace(Kind.TAIL, key)
                for key in chain.keys[match.boundary : limit]
                if self._lacks_tail(key)
            ]
            self._under_way[self.mover.submit(Work.ASK, pages + tails)] = fetch
            self.counters["fetches"] += 1
        return fetch

    def pull(self, chain: KeyChain, upto: int, *, tail: bool) -> None:
        """Read what is missing of a text's first `upto` pages, and of the tail behind them: a peer has just
        said that they are there. Whether that is worth it is not asked: the peer computes the rest meanwhile.
        `pulled` tells when it is over."""
        self.forget(chain)
        now, match = self.clock(), self.tree.match(chain.keys, upto)
        fetch = Fetch(chain, upto, False, match, now, now, self.mover.writes, FetchStage.PLANNING)
        self.of[chain], fetch.pages_stored = fetch, upto - match.found
        tails = (upto,) if tail and self._lacks_tail(chain.keys[upto - 1]) else ()
        missing = chain.keys[match.found : upto]
        size = len(missing) * self.spec.page_bytes + len(tails) * self.spec.tail_bytes
        if not size or not self.breaker.allows(now):
            self._over(fetch, None)
        elif any(key in self._coming for key in missing):
            self._over(fetch, None)  # another fetch brings it
        elif size > self._bytes_most - self._bytes_held:
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
            bytes_left=max(0, fetch.bytes_upto - self._bytes_ended) if fetch.reads else 0,
            waited_s=now - fetch.turn_s,
            left_s=fetch.turn_s + deadline_s - now,
            still_s=now - max(fetch.moved_s, self._read_ended_s),
        )
        if self._policy.waits(fetching):
            return False
        expected_s = self.costs.read.seconds(fetching.bytes_left) or 0.0
        if fetching.still_s > max(expected_s, LEARN_S):  # this tells how fast the store is, too
            self.costs.read.observe(fetching.bytes_left / 2, fetching.still_s)
        self.counters["fetches_late"] += 1
        self._over(fetch, Why.STORE_LATE)
        return True

    def begun(self, chain: KeyChain, reuse: Reuse) -> Reuse:
        """The request begins. Returns its reuse, with the store's reason why it is not more."""
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
            self._bytes_held -= fetch.bytes_held
            self._replan = True  # there may be room for others

    def _over(self, fetch: Fetch, why: Why | None) -> None:
        self._replan = self._replan or bool(fetch.coming)
        self._planning.pop(fetch, None)
        self._comes_no_more(fetch, list(fetch.coming))
        fetch.end(self.tree, why)
        self.places.settle()

    # What to read

    def plan(self) -> None:
        """Plan the fetches whose answers are new, and all of them when something has changed."""
        fetches = [*self._planning, *self._answered] if self._replan else self._answered
        self._replan, self._answered = False, []
        for fetch in fetches:
            if fetch.stage is not FetchStage.PLANNING:
                continue  # nobody waits for it any more
            if self.breaker.state is BreakerState.OFF:
                self._over(fetch, Why.STORE_OFF)
            else:
                self._planning[fetch] = None
                self._plan(fetch)

    def _plan(self, fetch: Fetch) -> None:
        """Decide what to read, reserve host places for it, and start the reads."""
        tree = self.tree
        match = tree.match(fetch.chain.keys, fetch.limit)
        following = fetch.chain.keys[match.found : match.found + 1]
        if any(key in self._coming for key in following):
            return  # another fetch brings it: then this one is planned again
        held = fetch.held(tree, match)
        room = self._bytes_most - self._bytes_held
        costs = self.costs if fetch.replay else replace(self.costs, replay_tokens=None)
        now = self.clock()
        wait_s = max(0.0, fetch.expected_s - now) if fetch.turn_s is None else 0.0
        ahead = self._bytes_sent - self._bytes_ended
        wanted = choose_fetch(held, costs, bytes_ahead=ahead, wait_s=wait_s, bytes_most=max(0, room))
        if isinstance(wanted, Refusal):
            if wanted is Refusal.NO_ROOM and fetch.turn_s is None:
                return  # others may have begun by the time it is its turn
            self.slow = self.slow or wanted is Refusal.SLOW
            self.counters["fetches_not_worth"] += wanted is Refusal.SLOW
            self._over(fetch, _WHY[wanted])
            return
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
        self._read(fetch, pieces)

    def _with_places(self, pieces: list[RecordPlace]) -> list[RecordPlace] | None:
        """All of them with host pages of their own, or none."""
        placed: list[RecordPlace] = []
        for piece in pieces:
            host = self.places.take_host_by_force(self.spec.host_pages_of(piece.kind))
            if host is None:
                give_back(self.tree, placed)
                return None
            placed.append(piece._replace(host=host))
        return placed

    def _bytes_of(self, piece: RecordPlace) -> int:
        return self.spec.item_bytes(piece.kind)

    def _read(self, fetch: Fetch, pieces: list[RecordPlace]) -> None:
        fetch.reads = [self.mover.submit(Work.READ, batch) for batch in cut(pieces, self._bytes_of)]
        fetch.coming = {piece.key for piece in pieces if piece.kind is Kind.PAGE}
        self._coming.update(fetch.coming)
        fetch.bytes_held = sum(read.bytes for read in fetch.reads)
        self._bytes_held += fetch.bytes_held
        self._bytes_sent += fetch.bytes_held
        fetch.bytes_upto = self._bytes_sent
        self._under_way.update(dict.fromkeys(fetch.reads, fetch))

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
        self._answered.append(fetch)

    def _read_ended(self, fetch: Fetch, read: Operation) -> None:
        if not read.late:
            self._bytes_ended += read.bytes
        pairs = zip(read.pieces, read.answers, strict=True)
        size = sum(self._bytes_of(piece) for piece, answer in pairs if answer is Presence.HERE)
        started_s = read.began_s if read.started_s is None else read.started_s
        spent_s = max(0.0, read.ended_s - max(started_s, self._read_ended_s))
        in_vain = not self.mover.writes and Presence.DAMAGED in read.answers  # nobody repairs it
        self.costs.read.observe(1 if in_vain else size, spent_s)
        self._read_ended_s = max(self._read_ended_s, read.ended_s)
        self.counters["bytes_read"] += size
        if fetch.stage is FetchStage.OVER:
            give_back(self.tree, read.pieces)
            return
        self._comes_no_more(fetch, [piece.key for piece in read.pieces if piece.kind is Kind.PAGE])
        self._replan = True
        fetch.moved_s = self.clock()
        fetch.landed.add(read)
        if not fetch.publish(self.tree) or not fetch.reads:
            self._over(fetch, None)

    def _comes_no_more(self, fetch: Fetch, keys: Sequence[PageKey]) -> None:
        fetch.coming.difference_update(keys)
        for key in keys:
            self._coming[key] -= 1
            if not self._coming[key]:
                del self._coming[key]

    def hangs(self, operation: Operation) -> None:
        """The operation is late: its request stops waiting, and no other request waits behind it."""
        fetch = self._under_way.get(operation)
        if fetch is not None:
            self._bytes_ended += operation.bytes
            self._over(fetch, Why.STORE_OFF)

    def host_places(self) -> Iterator[HostPageId]:
        """Host pages that belong to reads, not to the tree."""
        waiting = (read for fetch in self.of.values() for read in fetch.reads if read in fetch.landed)
        for read in (*self._under_way, *waiting):
            for piece in read.pieces:
                yield from piece.host

    def check(self) -> None:
        """Raises an AssertionError where what is kept of all fetches is not what they say themselves."""
        fetches, planning = self.of.values(), {*self._answered, *self._planning}
        assert self._coming == Counter(key for fetch in fetches for key in fetch.coming), "pages that come"
        assert self._bytes_held == sum(fetch.bytes_held for fetch in fetches), "bytes held by fetches"
        assert all(fetch.stage is not FetchStage.PLANNING or fetch in planning for fetch in fetches)
