"""TieredCache: the front door. It wires the rooms and holds no algorithm.

    begin ──► (step: loads arrive) ──► extend ─► commit ─► extend ─► commit … ──► finish | preempt | abort

    begin     match, choose where to resume, lock it, reserve device places, queue the loads
    (prefetch) the store is asked early what it has of a text that will begin soon
    extend    places for the tokens about to be computed, and for the tails to keep of them
    commit    bytes are written: full pages and tails become shared, and are saved to the host
    finish    everything is released; what was committed stays cached

One thread drives a cache. Copies run elsewhere (`transfer.controller`) and become visible in `step`, which is
also when observers hear of everything: between two steps nothing happens behind the caller's back.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from threading import Condition
from time import monotonic
from typing import Any

from tiercel.cache.audit import check, stats
from tiercel.cache.flights import Flights, Landed, count
from tiercel.cache.found import Found, find, find_nothing, pages_useful
from tiercel.cache.places import Places
from tiercel.cache.request import Extended, Loaded, Request, RequestState, Wait, WaitFor
from tiercel.cache.sharing import Sharing
from tiercel.cache.store_tier import StoreTier
from tiercel.cache.tails import tails_between, tails_of_prompt
from tiercel.config import CacheConfig
from tiercel.errors import ConfigError
from tiercel.memory.buffers import DeviceMemory, HostMemory
from tiercel.pages.reservation import Reservation
from tiercel.policy.evict import make_evict_policy
from tiercel.policy.fetch import Rate
from tiercel.policy.save import make_save_policy
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.identity import Identity
from tiercel.storage.base import Store
from tiercel.transfer.controller import LocalController
from tiercel.transfer.copier import make_copier
from tiercel.transfer.mover import StoreMover, Workers
from tiercel.transfer.plan import Direction
from tiercel.tree.actions import Cleared, Event
from tiercel.tree.check import readable, show
from tiercel.tree.keys import KeyChain, Tokens
from tiercel.tree.node import Item, Page, Tail, device_of
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import Namespace

log = logging.getLogger(__name__)

Clock = Callable[[], float]


class TieredCache:
    """The tiers of one model's cache. Without an `identity` the model's name says whose numbers it has."""

    def __init__(
        self,
        spec: CacheSpec,
        config: CacheConfig,
        *,
        identity: Identity | None = None,
        device: str = "cpu",
        executors: dict[Direction, Executor] | None = None,
        pool_order: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        least = 2 * spec.pages_per_window
        if config.device_tails < least:
            why = f"{spec.model} keeps tails: a request needs {least} places for them"
            raise ConfigError("device_tails", config.device_tails, why)
        self.spec, self.config = spec, config
        self.identity = identity or Identity(spec.model)
        self.device = DeviceMemory(spec, config.device_pages, config.device_tails, device)
        self._save = make_save_policy(config.save)
        self.tree = PrefixTree(
            evict=make_evict_policy(config.evict),
            save=self._save,
            pages_per_window=spec.pages_per_window,
            tails_per_path=config.tails_per_path,
        )
        self.host: HostMemory | None = None
        if config.host_bytes:
            pin, huge = self.device.device.type == "cuda", config.huge_pages
            self.host = HostMemory(spec, config.layout, config.host_bytes, huge_pages=huge, pin=pin)
        host_pages = self.host.pages if self.host else 0
        if self.host and host_pages < spec.host_pages_per_tail:
            why = f"a tail takes {spec.host_pages_per_tail} host pages of {spec.host_page_bytes:,} B"
            raise ConfigError("host_bytes", config.host_bytes, why)
        controller = None
        if self.host:
            controller = LocalController(make_copier(config.copier, self.device, self.host), executors)
        self._landed = controller.landed if controller else Condition()
        self.flights = Flights(controller)
        counts = config.device_pages, config.device_tails, host_pages
        self.places = Places(self.tree, spec, counts, pool_order or range, self.flights.queue_saves)
        self.pages, self.tails, self.host_pages = self.places.pages, self.places.tails, self.places.host
        self.compute = Rate()
        """Tokens of prompts per second, for those who choose between loading and computing."""
        self.store: StoreTier | None = None
        self._stores_left: list[StoreTier] = []
        self.requests: set[Request] = set()
        self.sharing = Sharing(spec.pages_per_window)
        self._observer: Callable[[Sequence[Event | Cleared]], None] | None = None
        self.counters: Counter[str] = Counter()

    # A request's life

    def chain(self, tokens: Tokens = (), namespace: Namespace = ()) -> KeyChain:
        """The keys of a text: made once, kept while the request waits, extended as the text grows."""
        told = self._observer is not None
        chain = KeyChain(self.identity.digest, namespace, self.spec.page_tokens, keep_tokens=told)
        chain.extend(tokens)
        return chain

    def begin(
        self,
        chain: KeyChain,
        *,
        priority: int = 0,
        turn_ends: Iterable[int] = (),
        load: bool = True,
        replay: bool = False,
        reuse_most: int | None = None,
        room_for: int = 0,
    ) -> Request | Wait:
        """Reuse what the tiers hold of a prompt.

        `turn_ends` are token positions after which this text may be continued differently: message ends and
        break points.
        `load=False` reuses only what the device has; `replay=True` allows to resume without a tail where
        computing the last tokens again is exact and cheaper (`request.reuse.replay_tokens` says how many).
        `reuse_most`: the caller needs what the model says from this position on, so nothing behind it helps.
        `room_for`: device pages for so many tokens are reserved at once: `extend` up to there never waits.
        """
        pages_needed = -(-max(chain.tokens, room_for) // self.spec.page_tokens)
        too_large = pages_needed - self.pages.capacity
        if too_large > 0:
            return Wait(WaitFor.LARGER_DEVICE, too_large)
        if self.config.force_miss:
            found = find_nothing(self.tree, chain)
        else:
            useful = pages_useful(chain, self.spec, reuse_most)
            if load and self.store and not self.store.begins(chain, useful, replay=replay):
                return Wait(WaitFor.STORE)
            found = find(self.tree, self.spec, chain, load=load, replay=replay, most=reuse_most)
            if to_come := self.sharing.pages_to_come(chain.keys[:useful], found, priority):
                return Wait(WaitFor.COMPUTING, to_come)
        if any(self._is_arriving(item) for item in found.items):
            return Wait(WaitFor.ARRIVING)
        held: list[Item] = [found.page, found.near, *found.tails]
        for item in held:
            self.tree.lock(item)
        tails_far = [tail for tail in found.tails if tail.device is None]
        room: Reservation | Wait | None = None
        try:
            own = max(0, -(-room_for // self.spec.page_tokens) - found.page.depth)
            room = self.places.reserve(len(found.far) + own, len(tails_far))
        finally:
            if not isinstance(room, Reservation):
                self._unlock(held)
        if isinstance(room, Wait):
            return room
        with room:
            places = room.ids(self.pages)
            self._start_loads(found.far, places[: len(found.far)])
            self._start_loads(tails_far, room.ids(self.tails))
            room.keep()
        reuse = found.reuse
        if self.store is not None:
            reuse = self.store.fetches.explained(chain, reuse)
            self.store.fetches.forget(chain)
        request = self._start(Request(chain, priority, reuse, held), found, turn_ends)
        request.table.extend(places[len(found.far) :])
        return request

    def prefetch(
        self, chain: KeyChain, *, replay: bool = False, reuse_most: int | None = None, wait_s: float = 0.0
    ) -> None:
        """A request will `begin` with this chain in about `wait_s`: see what the store has of it."""
        if self.store is not None and not self.config.force_miss:
            useful = pages_useful(chain, self.spec, reuse_most)
            self.store.expect(chain, useful, replay=replay, wait_s=wait_s)

    def withdraw(self, chain: KeyChain) -> None:
        """The request that was waiting, or was announced, will not begin."""
        if self.store is not None:
            self.store.fetches.forget(chain)

    def extend(self, request: Request, upto: int) -> Extended | Wait:
        """Room for positions below `upto`: device pages, and places for the tails to keep on the way.

        Tails are kept at the request's boundaries, and after the prompt at the latest boundary, since any
        token may end the turn. Tails that find no place are left out and counted, the earliest first; they
        never make a request wait.
        """
        assert request.state is not RequestState.ENDED
        page_tokens = self.spec.page_tokens
        pages = max(0, -(-upto // page_tokens) - len(request.table))
        if pages + len(request.table) > self.pages.capacity:
            return Wait(WaitFor.LARGER_DEVICE, pages + len(request.table) - self.pages.capacity)
        boundaries = tails_between(self.spec, request, upto)
        room = self.places.reserve(pages, len(boundaries))
        if isinstance(room, Wait) and room.what is WaitFor.DEVICE_TAILS:
            skipped = len(boundaries) - self.tails.free
            boundaries = boundaries[skipped:]
            self.counters["tails_skipped"] += skipped
            room = self.places.reserve(pages, len(boundaries))
        if isinstance(room, Wait):
            return room
        with room:
            request.table.extend(room.ids(self.pages))
            new = dict(zip(boundaries, room.ids(self.tails), strict=True))
            room.keep()
        request.tails.update(new)
        request.extended_tokens = max(request.extended_tokens, upto)
        return Extended({boundary * page_tokens: tail for boundary, tail in new.items()})

    def commit(self, request: Request, upto: int) -> None:
        """Positions below `upto` are written, and so are the tails at boundaries up to there: share them.

        Where another request was first, the table now names its pages and this request's copies are free
        again.
        """
        assert request.state is RequestState.RUNNING, "a request commits while it runs"
        assert upto <= request.extended_tokens, "I2: more was committed than there is room for"
        self._unlock(request.held[1:])
        del request.held[1:]
        request.written_tokens = max(request.written_tokens, upto)
        pages = min(upto, request.chain.tokens) // self.spec.page_tokens
        if pages > request.committed and not self.config.force_miss:
            self._share_pages(request, pages)
        self._share_tails(request, everything=False)
        self.places.settle()

    def finish(self, request: Request) -> None:
        """The text ended. The tail at its last boundary is kept: this is where the next turn goes on."""
        self._share_tails(request, everything=True)
        self._end(request)
        self.counters["requests_finished"] += 1

    def preempt(self, request: Request) -> None:
        """Give everything up for now; `begin` with the same chain finds the committed pages again."""
        if request.state is RequestState.RUNNING:
            self._share_tails(request, everything=True)
        self._end(request)
        self.counters["requests_preempted"] += 1

    def abort(self, request: Request) -> None:
        """Give everything up, at any moment."""
        self._end(request)
        self.counters["requests_aborted"] += 1

    # Moving

    def step(self) -> list[Loaded]:
        """Publish what ended; send what was queued since the last step, merged into one load and one save."""
        loaded: list[Loaded] = []
        for landed in self.flights.landed():
            loaded += self._publish(landed)
        if self._stores():
            self._step_stores()
        self.places.make_room_ahead()
        self.flights.send()
        if self.tree.events:
            self._notify()
        return loaded

    def _publish(self, landed: Landed) -> list[Loaded]:
        """The books follow the bytes: children before parents, so that a failed load takes a path apart."""
        ok, loads = landed.error is None, landed.direction is Direction.LOAD
        end = self.tree.load_done if loads else self.tree.save_done
        moves, waiting = landed.flight.moves, []
        for move in reversed(moves) if loads else moves:
            end(move, ok)
        if self.store is not None and ok and not loads:
            self.store.offer(move.item for move in moves if not move.item.gone)
        for request in landed.flight.requests:
            if request.state is RequestState.LOADING:
                waiting.append(request)
                request.state = RequestState.RUNNING
                if not ok:
                    self._end(request)
                    self.counters["requests_failed"] += 1
        count(self.counters, landed)
        self.places.settle()
        return [Loaded(request, landed.error) for request in waiting]

    def wait(self, timeout_s: float) -> None:
        """Until a transfer ends, if one is under way: for a caller that can do nothing before."""
        if self.busy or self.detaching:
            with self._landed:
                self._landed.wait_for(self._has_landed, timeout_s)

    def _has_landed(self) -> bool:
        return self.flights.has_landed or any(store.mover.landed for store in self._stores())

    def _stores(self) -> list[StoreTier]:
        return self._stores_left if self.store is None else [*self._stores_left, self.store]

    @property
    def pending(self) -> bool:
        """Something waits for a store that is off, or for one to be closed: a `step` now and then goes on."""
        return bool(self._stores_left or (self.store and self.store.pending))

    @property
    def busy(self) -> bool:
        """Something is on its way, or queued to be sent by the next `step`."""
        return self.flights.busy or any(store.busy for store in self._stores())

    def flush(self) -> int:
        """Forget everything no request holds and no transfer moves; answers how many pages stay."""
        stay = self.tree.flush()
        self.places.settle()
        return stay

    def watch(self, observer: Callable[[Sequence[Event | Cleared]], None] | None) -> None:
        """Tell `observer` what each tier can read: at the next `step` everything, then each step's changes.

        Its errors are logged and counted, never raised.
        """
        self._observer = observer
        self.tree.events = readable(self.tree) if observer else None

    # The store

    def attach(self, store: Store, *, clock: Clock = monotonic, workers: Workers | None = None) -> None:
        """Use a store from now on, and give it what the host has. The cache closes it when it leaves it."""
        self.attach_mover(self.mover_for(store, clock=clock, workers=workers), clock)

    def mover_for(
        self, store: Store, *, clock: Clock = monotonic, workers: Workers | None = None
    ) -> StoreMover:
        """The part of `attach` that may take time (stores register host memory), for any thread."""
        if self.host is None:
            raise ConfigError("store", type(store).__name__, "needs a host tier to read into (host_bytes)")
        return StoreMover(store, self.spec, self.host, landed=self._landed, clock=clock, workers=workers)

    def attach_mover(self, mover: StoreMover, clock: Clock = monotonic) -> None:
        """The part of `attach` that takes none."""
        if self.store is not None:
            raise ConfigError("store", None, "one is attached already")
        self.store = StoreTier(mover, self.tree, self.spec, self.config, self.places, self.compute, clock)
        self.store.offer(item for item in self.tree.items() if item.on_host)

    def detach(self) -> None:
        """Go on without the store. It is closed as soon as what is under way has ended."""
        if self.store is not None:
            self.store.leave()
            self._stores_left.append(self.store)
            self.store = None

    @property
    def detaching(self) -> bool:
        """A store that was left is not closed yet."""
        return bool(self._stores_left)

    def _step_stores(self) -> None:
        if self.store is not None:
            self.store.step()
        for left in list(self._stores_left):
            left.step()
            if not left.busy and left.close():
                left.step()
                self._stores_left.remove(left)
            returned, left.returned = left.returned, []
            if self.store is not None:
                self.store.offer(item for item in returned if item.on_host)
        self.places.settle()

    def close(self, store_wait_s: float = 10.0) -> None:
        """Wait for the transfers, for so long also for what the store has not got yet; release everything."""
        until = monotonic() + store_wait_s
        while monotonic() < until and (self.detaching if self.store is None else True):
            if self.store is not None and not self.busy:
                self.detach()
            self.step()
            self.wait(0.01)
        self.detach()
        self.flights.close()
        if self.host is not None:
            self.host.close()

    # Looking

    def stats(self) -> dict[str, Any]:
        """Places and true bytes per tier and stream, bytes moved, and counters."""
        return stats(self)

    def check(self) -> None:
        """Every invariant, counted again from nothing. For tests and for idle moments."""
        check(self)

    def show(self) -> str:
        return show(self.tree)

    # How a request begins

    def _start_loads(self, items: Sequence[Item], places: Sequence[int]) -> None:
        pairs = zip(items, places, strict=True)
        moves = [self.tree.load_start(item, device, self.flights.batch) for item, device in pairs]
        assert all(map(self.places.owns, moves)), "I3: a load of a place that was given back"
        self.flights.queue_loads(moves)

    def _start(self, request: Request, found: Found, turn_ends: Iterable[int]) -> Request:
        """Everything is locked and reserved: nothing can fail from here on."""
        page, tree = found.page, self.tree
        request.table = [device_of(tree.index[key]) for key in request.chain.keys[: page.depth]]
        request.resume_tails = found.tails
        request.prompt_pages = request.chain.tokens // self.spec.page_tokens
        request.extended_tokens = page.depth * self.spec.page_tokens
        request.tail_boundaries = tails_of_prompt(self.spec, self.config, request, found.branch, turn_ends)
        if any(item.load is not None for item in found.items):
            request.state = RequestState.LOADING
            self.flights.join(request)
        if page is not tree.root:
            tree.touch(page, found.tails, request.priority)
            if self._save.early_hits == 1:
                self._save_early([*tree.unsaved(page), *found.tails])
        self.requests.add(request)
        if not self.config.force_miss:
            self.sharing.begin(request)
        self.counters["requests"] += 1
        self.counters["tokens_asked"] += found.reuse.prompt_tokens
        self.counters["tokens_device"] += found.reuse.device_tokens
        self.counters["tokens_host"] += found.reuse.host_tokens
        self.counters["tokens_store"] += found.reuse.store_tokens
        for far in found.far:
            far.fetched = False
        self.places.settle()
        return request

    # How places are had and given back

    def _page_at(self, chain: KeyChain, pages: int) -> Page:
        return self.tree.index[chain.keys[pages - 1]] if pages else self.tree.root

    def _is_arriving(self, item: Item) -> bool:
        """On its way with a batch that was sent, or off the device and not readable on the host yet."""
        if item.device is None:
            return not item.on_host
        return item.load is not None and item.load != self.flights.batch

    def _save_early(self, items: Iterable[Item]) -> None:
        """Copies into host memory that is free, or holds what device and store have (`policy.save`)."""
        if self.host is None:
            return
        for item in items:
            if item.host is None and item.load is None:
                count = 1 if isinstance(item, Page) else self.spec.host_pages_per_tail
                while (host := self.places.take_host(count)) is None:
                    if not self.tree.evict_spare():
                        return
                self.tree.save_start(item, host)

    def _share_pages(self, request: Request, pages: int) -> None:
        first = request.committed
        texts = request.chain.texts
        shared = self.tree.insert(
            request.page,
            request.chain.keys[first:pages],
            request.table[first:pages],
            request.priority,
            texts[first:pages] if texts else (),
        )
        if not shared:
            return
        request.table[first : first + len(shared)] = [device_of(page) for page in shared]
        self.sharing.end(request, first, first + len(shared))
        request.committed += len(shared)
        self.tree.lock(shared[-1])
        self.tree.unlock(request.page)
        request.held[0] = shared[-1]
        if self._save.early_hits == 0:
            self._save_early(shared)

    def _share_tails(self, request: Request, *, everything: bool) -> None:
        """Wanted tails are shared; of the others only the latest are kept, privately, until the text ends."""
        written = min(request.committed, request.written_tokens // self.spec.page_tokens)
        ready = sorted(boundary for boundary in request.tails if boundary <= written)
        shared: list[Tail] = []
        for boundary in ready:
            if everything or boundary in request.tail_boundaries:
                page = self._page_at(request.chain, boundary)
                shared.append(self.tree.insert_tail(page, request.tails.pop(boundary), request.priority))
            elif boundary <= ready[-1] - self.spec.pages_per_window:
                self.tails.release([request.tails.pop(boundary)])
        if shared:
            self.tree.cap_tails(shared[-1].page)
            if self._save.early_hits == 0:
                self._save_early(tail for tail in shared if not tail.gone)

    def _end(self, request: Request) -> None:
        assert request.state is not RequestState.ENDED, "I3: a request ends once"
        request.state = RequestState.ENDED
        self.requests.discard(request)
        self.sharing.end(request, request.committed, request.prompt_pages)
        self._unlock(request.held)
        self.pages.release(request.table[request.committed :])
        self.tails.release(list(request.tails.values()))
        request.held, request.table, request.tails = [], [], {}
        request.resume_tails, request.gate = (), None
        self.places.settle()

    def _unlock(self, items: Iterable[Item]) -> None:
        for item in items:
            self.tree.unlock(item)

    def _notify(self) -> None:
        assert self._observer is not None and self.tree.events is not None
        observer, events, self.tree.events = self._observer, self.tree.events, []
        try:
            observer(events)
        except Exception:  # noqa: BLE001 - an observer is not ours; its error must not stop the cache
            self.counters["observer_errors"] += 1
            log.exception("the observer failed on %d events", len(events))
