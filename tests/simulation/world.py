"""A whole cache, its requests and its copies, driven step by step by numbers.

Each step is one integer, the seed of what happens in it, so a run is a list of integers and shrinks by
leaving some out. After every step all invariants hold (`TieredCache.check`), the stupid model agrees
(`oracle`), and every byte a request could read is the right one (`bytes`). Freed places are poisoned, so a
byte read from one is never right by luck.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from unittest.mock import patch

import tiercel.cache.core as cache_module
from tests.simulation.bytes import Bytes, HostRows, Text, text_of
from tests.simulation.copies import HeldCopies
from tests.simulation.oracle import WatchedTree
from tests.simulation.sparse import STEPS_MOST, Told, UnderWay, sparse_options
from tests.simulation.specs import SELECTIVE, SPECS
from tests.simulation.stage import Indifferent, Stage
from tiercel.cache import Extended, Request, RequestState, TieredCache, Wait
from tiercel.cache.memories import make_memories
from tiercel.config import EVICT_POLICIES, FETCH_POLICIES, LAYOUTS, SAVE_POLICIES, CacheConfig
from tiercel.transfer.plan import Direction
from tiercel.tree.keys import KeyChain
from tiercel.tree.node import Page

NAMESPACES = ((), ("a", "bc"), ("ab", "c"))
TOKENS_MAX = 40


@dataclass(eq=False)
class Actor:
    """One client: its text, and how much of it is computed."""

    tokens: list[int]
    namespace: tuple[str, ...]
    chain: KeyChain
    options: dict[str, object]
    request: Request | None = None
    written: int = 0
    tails_due: dict[int, tuple[int, ...]] = field(default_factory=dict)
    told: Told | None = None
    """What its steps are told, where pages may be sparse."""

    def text(self, pages: int) -> Text:
        return text_of(self.namespace, self.tokens[: pages * self.chain.page_tokens])


class World(Stage):
    DEVICE = "cpu"
    COPIERS: tuple[str, ...] = ("reference", "direct")
    NAMES: tuple[str, ...] = tuple(sorted(SPECS))
    """The declarations that it is made of."""

    def __init__(self, setup: int) -> None:
        random = Random(setup)
        self.spec = SPECS[random.choice(self.NAMES)]
        self.copies = {direction: HeldCopies() for direction in Direction}
        self.cache = self._make_cache(random, sparse_options(self.spec, setup))
        self.bytes = self.make_bytes()
        self.set_up(random)
        self.under_way = UnderWay(self.cache, self.bytes)
        self.limit_owners(setup)
        self.tokens_max = min(TOKENS_MAX, self.cache.pages_most * self.spec.page_tokens)
        self.actors: list[Actor] = []
        self.texts: list[tuple[list[int], tuple[str, ...]]] = [([], ())]

    def make_bytes(self) -> Bytes:
        return Bytes(self.spec, self.cache.device)

    def _make_cache(self, random: Random, options: Mapping[str, object]) -> TieredCache:
        least = max(1, self.spec.places_per_tail)
        frame = self.spec.frame_units
        roomy = self.roomy = random.random() < 0.4
        """Most of what is computed reaches the host, and so the store."""
        tight = self.tight = not roomy and random.random() < 0.25
        tails = 2 if tight else random.choice([2, 3, 7])
        beside = -(-tails * self.spec.pages_per_window * self.spec.units_per_tail // frame)
        config = CacheConfig(
            fetch=random.choice(FETCH_POLICIES),
            store_writing_bytes=random.choice([1, 10_000, 1 << 20]),
            save_step_bytes=random.choice([1, 1, 1 << 20]),
            device_pages=beside
            + (14 if roomy else random.randint(4, 8) if tight else random.choice([2, 6, 9, 9, 14])),
            staging_tails=self.spec.pages_per_window,
            host_bytes=self.spec.place_bytes
            * least
            * (30 if roomy else random.randint(1, 3) if tight else random.choice([0, 2, 8, 16, 30])),
            layout=random.choice(LAYOUTS),
            copier=random.choice(self.COPIERS),
            save="through" if roomy else random.choice(SAVE_POLICIES),
            evict=random.choice([*EVICT_POLICIES, f"{Indifferent.__module__}:Indifferent"]),
            tail_every_pages=random.randint(1, 4),
            tails_per_path=random.randint(1, 4),
            **options,  # type: ignore[arg-type]
        )
        shuffled = lambda count: random.sample(range(count), count)  # noqa: E731
        with patch.object(cache_module, "PrefixTree", WatchedTree):
            memories = make_memories(self.spec, config, self.DEVICE, executors=self.copies)
            return TieredCache(self.spec, config, memories, pool_order=shuffled)

    def _poison_what_is_freed(self) -> None:
        real = self.cache.pages.release

        def release(ids):
            for page_id in ids:
                self.bytes.poison_place(page_id)
            real(ids)

        self.cache.pages.release = release  # type: ignore[method-assign]
        super()._poison_what_is_freed()

    # One step

    ACTIONS = (
        ("arrive", 10),
        ("begin", 10),
        ("compute", 30),
        ("finish", 7),
        ("abort", 5),
        ("preempt", 1),
        ("step", 20),
        ("copy", 16),
        ("fault", 2),
        ("flush", 2),
        ("oddity", 4),
        ("store", 30),
        ("store_fault", 2),
        ("store_change", 1),
        ("leave", 1),
        ("shed", 4),
        ("land", 1),
        ("landed", 3),
    )

    def _do_arrive(self, random: Random) -> None:
        """A text that shares a prefix with an earlier one, perhaps in another namespace."""
        if len(self.actors) >= 6:
            return
        base, namespace = random.choice(self.texts[-4 if self.tight else -24 :])
        if random.random() < 0.1:
            namespace = random.choice(NAMESPACES)
        tokens = base[: random.choice([len(base), random.randint(0, len(base))])]
        if random.random() < (0.7 if self.roomy else 0.3):  # a document that others have read too
            tokens = [random.randint(0, 2)] * (self.tokens_max - random.randint(1, 9))
            namespace = random.choice([(), (), (), *NAMESPACES])
        more = random.randint(1, self.tokens_max // 3)
        if self.tight and random.random() < 0.6:  # the same text once more
            tokens, more = list(base), 1
        tokens = (tokens + [random.randint(0, 3) for _ in range(more)])[: self.tokens_max]
        self.texts.append((tokens, namespace))
        options = {
            "priority": random.randint(-2, 2),
            "turn_ends": [random.randint(0, len(tokens)) for _ in range(random.randint(0, 2))],
            "load": random.random() < 0.9,
            "replay": random.random() < 0.2,
            "for_others": len(tokens) % 4 == 0,
        }
        self.actors.append(Actor(tokens, namespace, self.chain_of(tokens, namespace), options))

    def _do_begin(self, random: Random) -> None:
        waiting = [actor for actor in self.actors if actor.request is None]
        if not waiting:
            return
        actor = random.choice(waiting)
        reserves = self.cache.residency is not None and len(actor.tokens) % 2
        self._begin(actor, room_for=len(actor.tokens) if reserves else 0)

    def _begin(self, actor: Actor, *, room_for: int = 0) -> None:
        before = self._snapshot()
        events = len(self.cache.tree.copies.events or ())
        late, left = self._late_fetches(), self._left()
        outcome = self.cache.begin(actor.chain, room_for=room_for, **actor.options)  # type: ignore[arg-type]
        if isinstance(outcome, Wait):
            made_room = len(self.cache.tree.copies.events or ()) > events or self._late_fetches() > late
            made_room = made_room or self._left() != left
            assert made_room or self._snapshot() == before, "I5: waiting left a trace"
            return
        actor.request = outcome
        actor.told = Told(outcome) if self.cache.residency is not None else None
        actor.written = outcome.committed * self.spec.page_tokens
        reuse = outcome.reuse
        assert reuse.tokens == actor.written <= max(0, len(actor.tokens) - 1)
        assert not (self.cache.config.host_bytes == 0 and reuse.host_tokens)

    def _left(self) -> object:
        """What changes where pages of running texts make room for another."""
        return self.cache.counters["pages_sparse"], len(self.cache.tree.copies.saving)

    def _late_fetches(self) -> int:
        return self.cache.store.counters["fetches_late"] if self.cache.store else 0

    def _do_store(self, random: Random) -> None:
        """The store goes on; or an actor's coming is announced."""
        waiting = [actor for actor in self.actors if actor.request is None]
        if waiting and random.random() < 0.3:
            self.cache.prefetch(random.choice(waiting).chain, replay=random.random() < 0.2)
        self._store_works(random)

    def _do_land(self, random: Random) -> None:
        """A peer brings a text that somebody here wants, or is computing."""
        if self.actors and self.cache.host is not None:
            actor = random.choice(self.actors)
            for pages, key in enumerate(actor.chain.keys, 1):
                self.bytes.texts.setdefault(key, actor.text(pages))
            self._land(actor.chain, random)

    def _do_shed(self, random: Random) -> None:
        """Pages become sparse: a few, or any of one path, with what that needs of hot rows."""
        residency, tree = self.cache.residency, self.cache.tree
        if residency is None:
            return
        if random.random() < 0.6:
            residency.make_room(random.randint(1, 3))
            return
        path, page = list[Page](), random.choice([tree.root, *tree.index.values()])
        while page is not tree.root:
            path.insert(0, page)
            page = page.parent
        both = [page for page in path if page.on_device and page.on_host and tree.is_whole(page)]
        pages = residency._allowed([page for page in both if random.random() < 0.7])
        hot = random.choice(residency.hot)
        lack = -residency._gain(residency._readers(pages), len(pages), hot)
        if pages and (lack <= 0 or self.cache.pages.lack(0, lack) <= 0):
            residency.leave(pages, hot)

    def _do_leave(self, random: Random) -> None:
        """A client leaves while it waits."""
        waiting = [actor for actor in self.actors if actor.request is None]
        if waiting:
            actor = random.choice(waiting)
            self.cache.withdraw(actor.chain)
            self.actors.remove(actor)

    def _do_compute(self, random: Random) -> None:
        """Read everything that came from the cache, write some more tokens, share them."""
        running = [a for a in self.actors if a.request and a.request.state is RequestState.RUNNING]
        if not running:
            return
        actor = random.choice(running)
        request = actor.request
        assert request is not None
        self._read(actor)
        if actor.written >= len(actor.tokens) and len(actor.tokens) < self.tokens_max + 12:
            actor.tokens.append(random.randint(0, 3))
            actor.chain.extend(actor.tokens[-1:])
        most = random.choice([3, 10]) * self.spec.page_tokens
        upto = min(len(actor.tokens), actor.written + random.randint(1, most))
        if not self._compute(actor, upto, cancelled=random.random() < 0.05):
            if random.random() < 0.2:
                self._preempt(actor)
        elif actor.written == upto and random.random() < 0.9:
            self._commit(actor, upto)

    def _commit(self, actor: Actor, upto: int) -> None:
        request, told = actor.request, actor.told
        assert request is not None
        first, before = request.committed, list(request.table)
        self.cache.commit(request, upto)
        if told is not None and request.table[first : request.committed] != before[first : request.committed]:
            for at in range(first, min(request.committed, len(told.rows))):
                told.tell_page(self.cache.residency, at)

    def _compute(self, actor: Actor, upto: int, *, cancelled: bool = False) -> bool:
        """Find room and write; False when there is none. Cancelled: there is room, and nothing is written."""
        request, page_tokens = actor.request, self.spec.page_tokens
        assert request is not None
        outcome = self.cache.extend(request, upto)
        if isinstance(outcome, Wait):
            return False
        actor.tails_due.update(outcome.tails)
        if cancelled:
            return True
        for page in range(actor.written // page_tokens, upto // page_tokens):
            assert not self._is_sparse(request.table[page]), "what is written has a place in each pool"
            self.bytes.write(request.table[page], actor.chain.keys[page], actor.text(page + 1), tail=False)
        for boundary in [b for b in actor.tails_due if b <= upto]:
            page = boundary // page_tokens
            tail = actor.tails_due.pop(boundary)
            self.bytes.write(tail, actor.chain.keys[page - 1], actor.text(page), tail=True)
        actor.written = upto
        return True

    def _serve_the_oldest(self) -> None:
        """Everything else gives way to the oldest request."""
        oldest, *others = self.actors
        for actor in others:
            if actor.request is not None:
                self._preempt(actor)
        if oldest.request is None:
            self._begin(oldest, room_for=len(oldest.tokens))
        if oldest.request is None or oldest.request.state is not RequestState.RUNNING:
            return
        self._read(oldest)
        page_tokens, end = self.spec.page_tokens, len(oldest.tokens)
        while oldest.written < end:  # page by page: there may be no room for all tails at once
            upto = min(end, (oldest.written // page_tokens + 1) * page_tokens)
            if not self._compute(oldest, upto):
                if not (self.cache.flights.busy or self.cache.pages.leaving):
                    self._preempt(oldest)  # its own places break the frames that it needs
                return
            self._commit(oldest, upto)
        self.cache.finish(oldest.request)
        self.actors.remove(oldest)

    def _read(self, actor: Actor) -> None:
        request = actor.request
        assert request is not None
        for page in range(actor.written // self.spec.page_tokens):
            self.bytes.check(request.table[page], actor.text(page + 1), tail=False, who="a request's table")
            if self._is_sparse(request.table[page]):
                self._check_host(self.cache.tree.index[actor.chain.keys[page]], "a request's table")
        if len(request.held) > 1:
            for tail in request.resume_tails:
                assert tail.device is not None
                self.bytes.check(
                    tail.device, actor.text(tail.page.depth), tail=True, who="a tail to resume from"
                )

    def _do_finish(self, random: Random) -> None:
        running = [a for a in self.actors if a.request and a.request.state is RequestState.RUNNING]
        if running:
            actor = random.choice(running)
            if all(boundary > actor.written for boundary in actor.tails_due):
                self._commit(actor, actor.written)
            self.cache.finish(actor.request)  # type: ignore[arg-type]
            self.actors.remove(actor)

    def _do_abort(self, random: Random) -> None:
        started = [a for a in self.actors if a.request]
        loading = [a for a in started if a.request and a.request.state is RequestState.LOADING]
        if self.tight and loading:
            started = loading
        elif random.random() < 0.8:
            return
        if started:
            actor = random.choice(started)
            self.cache.abort(actor.request)  # type: ignore[arg-type]
            self.actors.remove(actor)

    def _do_preempt(self, random: Random) -> None:
        started = [a for a in self.actors if a.request]
        if started:
            self._preempt(random.choice(started))

    def _preempt(self, actor: Actor) -> None:
        assert actor.request is not None
        self.cache.preempt(actor.request)
        actor.request, actor.written, actor.tails_due = None, 0, {}

    def _do_step(self, random: Random) -> None:
        self._pass_time(random)
        ended = self.cache.step()
        self.check_limits()
        for loaded in ended:
            (actor,) = [a for a in self.actors if a.request is loaded.request]
            if loaded.error is not None:
                assert loaded.request.state is RequestState.ENDED
                actor.request, actor.written, actor.tails_due = None, 0, {}
                continue
            assert loaded.request.state is RequestState.RUNNING
            self._read(actor)

    def _do_oddity(self, random: Random) -> None:
        """What is allowed and no sensible engine does."""
        started = [a for a in self.actors if a.request]
        if not started:
            return
        actor = random.choice(started)
        assert actor.request is not None
        running = actor.request.state is RequestState.RUNNING
        what = random.choice(["far", "again", "finish"])
        if what == "far":
            outcome = self.cache.extend(actor.request, random.randint(0, TOKENS_MAX + 20))
            actor.tails_due.update(outcome.tails if isinstance(outcome, Extended) else {})
        elif what == "again" and running and all(boundary > actor.written for boundary in actor.tails_due):
            self._commit(actor, random.randint(0, actor.written))
        elif what == "finish":
            self.cache.finish(actor.request)
            self.actors.remove(actor)

    # Steps under way

    def step(self, number: int) -> None:
        super().step(number)
        if self.cache.residency is None:
            return
        random = Random(f"under way {number}")  # it changes nothing of what is chosen otherwise
        if self.under_way.steps and random.random() < 0.25:
            self.log[-1] += ", a step ends"
            self.under_way.end()
        if len(self.under_way.steps) < STEPS_MOST and random.random() < 0.3:
            self.log[-1] += ", a step begins"
            running = [a for a in self.actors if a.request and a.request.state is RequestState.RUNNING]
            chosen = random.sample(running, min(len(running), random.randint(1, 3)))
            self.under_way.plan((actor.told, self._texts(actor)) for actor in chosen if actor.told)

    def _texts(self, actor: Actor) -> list[Text]:
        """The text of each page that is shared. (A page that another text shared first is given back at once:
        no step that reads it is under way, or nothing writes before that has ended.)"""
        assert actor.request is not None
        return [actor.text(page + 1) for page in range(actor.request.committed)]

    # Always

    def check(self) -> None:
        self.cache.check()
        self.cache.tree.oracle.check()  # type: ignore[attr-defined]
        for page in self.cache.tree.index.values():
            self.check_page(page)
        if (residency := self.cache.residency) is not None:
            for request in self.cache.requests:
                hot, least = len(request.hot), residency.hot_places(len(request.sparse))
                assert hot >= least, f"a text has {hot} places for hot rows, it needs {least}"

    def check_page(self, page: Page) -> None:
        if page.device is not None and page.load is None:
            self.bytes.check(page.device, self.bytes.texts[page.key], tail=False, who="the tree")
            if self._is_sparse(page.device):
                self._check_host(page, "the tree")
        if page.fetched and page.on_host:
            assert page.key in self.bytes.texts, "I9: a page nobody has written came from the store"
            record = b"".join(row for _, row in self.bytes.expected(self.bytes.texts[page.key], False))
            (views,) = self.cache.host.views(page.host, [len(record)])
            assert b"".join(views) == record, "I9: wrong bytes came from the store"
        if page.tail is not None and page.tail.device is not None and page.tail.load is None:
            self.bytes.check(page.tail.device, self.bytes.texts[page.key], tail=True, who="the tree")

    def _is_sparse(self, device: object) -> bool:
        return isinstance(device, tuple) and len(device) < len(self.spec.pools)

    def _check_host(self, page: Page, who: str) -> None:
        """What a sparse page has on the host only is there to be read."""
        assert page.on_host, f"I2: a part of {page.key!r} is nowhere ({who})"
        expected = self.bytes.expected(self.bytes.texts[page.key], False)
        HostRows(self.cache.host).check(expected, page.host, tail=False, who=who)

    def _snapshot(self) -> object:
        """Everything a caller could notice; the order of the lines and the clock are not part of it."""
        items: list[object] = []
        for page in self.cache.tree.index.values():
            for item in (page, page.tail):
                if item is not None:
                    kind = isinstance(item, Page)
                    items.append(
                        (page.key, kind, item.device, item.host, item.load, item.save, item.lock, item.hits)
                    )
        pools = [pool.owned_ids() for pool in (self.cache.pages, self.cache.host_pages)]
        return items, pools, list(self.cache.flights.moves())

    def wind_down(self) -> None:
        """No fault happens any more: every request that is left gets through. Then no place is missing."""
        self.calm_down()
        while self.under_way.steps:
            self.under_way.end()
        largest = self.cache.pages_most * self.spec.page_tokens
        for actor in list(self.actors):
            if actor.request is not None and actor.request.state is not RequestState.RUNNING:
                self.cache.abort(actor.request)
                self.actors.remove(actor)
            elif len(actor.tokens) > largest:
                if actor.request is not None:
                    self.cache.abort(actor.request)
                self.actors.remove(actor)
        for _ in range(200):
            if not self.actors:
                break
            self._serve_the_oldest()
            self._do_step(Random(0))
            self._run_all()
        assert not self.actors, "a request that could run waits for ever"
        for actor in [*self.fetching()]:
            self.cache.withdraw(actor)
        while self.cache.busy:
            self.cache.step()
            self._run_all()
        self.check()
        assert self.cache.flush() == 0, self.cache.show()
        for pool in (self.cache.pages, self.cache.host_pages):
            assert pool.free == pool.capacity, f"I4: {pool.name} lost places"
        assert self.cache.counters["observer_errors"] == 0 or self.events
        self._keep_counters()
        self.cache.close()


class SparseWorld(World):
    """One whose pages may be sparse."""

    NAMES = SELECTIVE
