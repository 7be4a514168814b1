"""TieredCache: the front door of an engine whose device memory is ours. It holds no algorithm.

    begin ──► (step: loads arrive) ──► extend ─► commit ─► extend ─► commit … ──► finish | preempt | abort

    begin     match, choose where to resume, lock it, reserve device places, queue the loads
    (prefetch) the store is asked early what it has of a text that will begin soon
    extend    places for the tokens about to be computed, and for the tails to keep of them
    commit    bytes are written: full pages and tails become shared, and are saved to the host
    finish    everything is released; what was committed stays cached

Everything below the device (keys, tree, host, store, `step`) is `cache.host_tier`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiercel.cache.audit import check_device
from tiercel.cache.flights import Landed, count
from tiercel.cache.found import Found, pages_useful
from tiercel.cache.host_tier import Executors, HostTier, Order
from tiercel.cache.places import Places
from tiercel.cache.request import Extended, Loaded, Request, RequestState, Wait, WaitFor
from tiercel.cache.sharing import Sharing
from tiercel.cache.tails import tails_between, tails_of_prompt
from tiercel.config import CacheConfig
from tiercel.errors import ConfigError
from tiercel.memory.buffers import DeviceMemory
from tiercel.pages.reservation import Reservation
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.identity import Identity
from tiercel.transfer.plan import Direction
from tiercel.tree.actions import Move
from tiercel.tree.keys import KeyChain
from tiercel.tree.node import Item, Page, Tail, device_of


class TieredCache(HostTier[Loaded]):
    """The tiers of one model's cache. Without an `identity` the model's name says whose numbers it has."""

    places: Places

    def __init__(
        self,
        spec: CacheSpec,
        config: CacheConfig,
        *,
        identity: Identity | None = None,
        device: str = "cpu",
        executors: Executors | None = None,
        pool_order: Order | None = None,
    ) -> None:
        least = 2 * spec.pages_per_window
        if config.device_tails < least:
            why = f"{spec.model} keeps tails: a request needs {least} places for them"
            raise ConfigError("device_tails", config.device_tails, why)
        if not config.device_pages:
            raise ConfigError("device_pages", 0, "must be places for at least one page")
        self.device = DeviceMemory(spec, config.device_pages, config.device_tails, device)
        super().__init__(
            spec, config, self.device, identity=identity, executors=executors, pool_order=pool_order
        )
        self.pages, self.tails = self.places.pages, self.places.tails
        self.requests: set[Request] = set()
        self.sharing = Sharing(spec.pages_per_window)

    def _make_places(self, order: Order) -> Places:
        counts = self.config.device_pages, self.config.device_tails, self.host.pages if self.host else 0
        return Places(self.tree, self.spec, counts, order, self._queue_saves)

    def _queue_saves(self, moves: Iterable[Move]) -> None:
        self.flights.queue(Direction.SAVE, moves)

    # A request's life

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
        `load`, `replay` and `reuse_most` are those of `find`.
        `room_for`: device pages for so many tokens are reserved at once: `extend` up to there never waits.
        """
        pages_needed = -(-max(chain.tokens, room_for) // self.spec.page_tokens)
        too_large = pages_needed - self.pages.capacity
        if too_large > 0:
            return Wait(WaitFor.LARGER_DEVICE, too_large)
        found = self.find(chain, load=load, replay=replay, reuse_most=reuse_most)
        if isinstance(found, Wait):
            return found
        useful = pages_useful(chain, self.spec, reuse_most)
        if to_come := self.sharing.pages_to_come(chain.keys[:useful], found, priority):
            return Wait(WaitFor.COMPUTING, to_come)
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
        reuse = self._use(found, priority)
        request = self._start(Request(chain, priority, reuse, held), found, turn_ends)
        request.table.extend(places[len(found.far) :])
        return request

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
        skipped, room = 0, self.places.reserve(pages, len(boundaries))
        if isinstance(room, Wait) and room.what is WaitFor.DEVICE_TAILS:
            skipped = len(boundaries) - self.tails.free
            boundaries = boundaries[skipped:]
            room = self.places.reserve(pages, len(boundaries))
        if isinstance(room, Wait):
            return room
        with room:
            request.table.extend(room.ids(self.pages))
            new = dict(zip(boundaries, room.ids(self.tails), strict=True))
            room.keep()
        self.counters["tails_skipped"] += skipped
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

    def _publish(self, landed: Landed) -> list[Loaded]:
        """Children before parents, so that a failed load takes a path apart."""
        ok, loads = landed.error is None, landed.direction is Direction.LOAD
        end = self.tree.load_done if loads else self.tree.save_done
        moves, waiting = landed.flight.moves, []
        for move in reversed(moves) if loads else moves:
            end(move, ok)
        if self.store is not None and ok and not loads:
            self.store.offer(move.item for move in moves if not move.item.gone)
        for request in landed.flight.waiting:
            if isinstance(request, Request) and request.state is RequestState.LOADING:
                waiting.append(request)
                request.state = RequestState.RUNNING
                if not ok:
                    self._end(request)
                    self.counters["requests_failed"] += 1
        count(self.counters, landed)
        self.places.settle()
        return [Loaded(request, landed.error) for request in waiting]

    def check(self) -> None:
        super().check()
        check_device(self)

    # How a request begins

    def _start_loads(self, items: Sequence[Item], places: Sequence[int]) -> None:
        pairs = zip(items, places, strict=True)
        moves = [self.tree.load_start(item, device, self.flights.batch) for item, device in pairs]
        assert all(map(self.places.owns, moves)), "I3: a load of a place that was given back"
        self.flights.queue(Direction.LOAD, moves)

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
            self.flights.queue(Direction.LOAD, (), request)
        if page is not tree.root and self._save.early_hits == 1:
            self._save_early([*tree.unsaved(page), *found.tails])
        self.requests.add(request)
        if not self.config.force_miss:
            self.sharing.begin(request)
        self.counters["requests"] += 1
        self.places.settle()
        return request

    # How places are had and given back

    def _page_at(self, chain: KeyChain, pages: int) -> Page:
        return self.tree.index[chain.keys[pages - 1]] if pages else self.tree.root

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
        request.resume_tails = ()
        self.places.settle()
