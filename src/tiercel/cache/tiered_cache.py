"""TieredCache: for an engine whose device memory is the cache's. A request's life:

    begin ──► (step: loads arrive) ──► extend ─► commit ─► extend ─► commit … ──► finish | preempt | abort

    (prefetch) the store is asked early for a text that will begin soon
    begin     match, choose where to resume, lock it, reserve device places, queue the loads
    extend    reserve places for the tokens about to be computed, and for their tails
    commit    bytes are written: full pages and tails become shared, and are saved to the host
    finish    everything is released; what was committed stays cached

What it has below the device (keys, tree, host, store) is `cache.core`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tiercel.cache.audit import check_device
from tiercel.cache.core import Core, Order
from tiercel.cache.flights import Flight
from tiercel.cache.memories import Memories, make_memories
from tiercel.cache.request import (
    Extended,
    Found,
    Loaded,
    Request,
    RequestState,
    Wait,
    WaitFor,
    pages_useful,
)
from tiercel.cache.store_tier import StoreTier
from tiercel.cache.tails import tails_after, tails_of_prompt, tails_to_write
from tiercel.config import CacheConfig
from tiercel.errors import ConfigError
from tiercel.pages.pool import Reservation
from tiercel.policy.fetch import window
from tiercel.policy.placement import Boundary
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.identity import Identity
from tiercel.transfer.plan import Direction
from tiercel.tree.keys import KeyChain
from tiercel.tree.node import Item, Tail
from tiercel.types import DevicePageId, Kind, PageKey


@dataclass
class Sharing:
    """Which pages of prompts running requests are computing now, so that no page is computed twice.

    request 1   ■ ■ ■ □ □ □ □ ▲       three pages are shared, four are being computed, a tail is kept at 7
    request 2   ■ ■ ■ □ □ □ □ ·       the same text: request 2 can begin at 3 now, or wait and begin at 7

    Waiting is sooner than computing when request 1 is not less urgent: request 1 is ahead, so it has less
    left to compute, and every step computes some of it. A request that waits holds no place. When request 1
    ends early, request 2 begins with what is there.
    """

    pages_per_window: int
    _computing: dict[PageKey, Request] = field(default_factory=dict)

    def begin(self, request: Request) -> None:
        for key in request.chain.keys[request.committed : request.prompt_pages]:
            self._computing.setdefault(key, request)

    def end(self, request: Request, first: int, upto: int) -> None:
        """The request has shared these pages, or is not going to."""
        for key in request.chain.keys[first:upto]:
            if self._computing.get(key) is request:
                del self._computing[key]

    def computes(self, key: PageKey, kind: Kind) -> bool:
        """Whether a request is going to share this page, or the tail at its end."""
        request = self._computing.get(key)
        if request is None or kind is Kind.PAGE:
            return request is not None
        return request.chain.keys.index(key) + 1 in request.tail_boundaries

    def pages_to_come(self, keys: Sequence[PageKey], found: Found, priority: int) -> int:
        """How many pages later a request could begin if it waited; 0: there is nothing to wait for.

        `keys`: the keys of the pages that would help it.
        """
        first, here, limit = found.pages_found, found.page.depth, len(keys)
        request = self._computing.get(keys[first]) if first < limit else None
        if request is None or request.priority < priority:
            return 0
        last = first + 1
        while last < limit and self._computing.get(keys[last]) is request:
            last += 1
        tails = {*range(here + 1), *(b for b in request.tail_boundaries if b > request.committed)}
        while last > here and not tails.issuperset(window(last, self.pages_per_window)):
            last -= 1
        return max(0, last - here)


class TieredCache:
    """The tiers of one model's cache: device memory, host memory, store. Without `memories` the device is the
    CPU. Without an `identity` the model's name identifies the cached numbers.
    """

    def __init__(
        self,
        spec: CacheSpec,
        config: CacheConfig,
        memories: Memories | None = None,
        *,
        identity: Identity | None = None,
        pool_order: Order | None = None,
    ) -> None:
        """`memories` may have device memory that a cache before this one has used, if that has places for
        enough pages and tails."""
        least = 2 * spec.pages_per_window
        if config.device_tails < least:
            why = f"{spec.model} keeps tails: a request needs {least} places for them"
            raise ConfigError("device_tails", config.device_tails, why)
        if not config.device_pages:
            raise ConfigError("device_pages", 0, "must be places for at least one page")
        memories = memories or make_memories(spec, config)
        places, device = (config.device_pages, config.device_tails), memories.device
        roomy = device is None or (device.pages >= places[0] and device.tails >= places[1])
        assert roomy, "the device memory has fewer places than the cache is to use"
        self.sharing = Sharing(spec.pages_per_window)
        self.core = core = Core(
            spec,
            config,
            memories,
            device_places=places,
            identity=identity,
            pool_order=pool_order,
            computes=self.sharing.computes,
        )
        self.spec, self.config, self.identity = spec, config, core.identity
        self.device, self.host = device, core.host
        self.tree, self.places, self.flights = core.tree, core.places, core.flights
        self.pages, self.tails, self.host_pages = core.places.pages, core.places.tails, core.places.host
        self.counters, self.compute = core.counters, core.compute
        self.leases, self.stores, self.controller = core.leases, core.stores, core.controller
        self.transfer_ended = core.transfer_ended
        self.requests: set[Request] = set()
        self._ended: list[Loaded] = []
        # What the core and its parts do by themselves has the same name here.
        self.chain, self.find = core.chain, core.find
        self.prefetch, self.withdraw = core.prefetch, core.withdraw
        self.pull, self.pulled = core.pull, core.pulled
        self.land, self.landed = core.landings.land, core.landings.landed
        self.attach, self.detach = core.stores.attach, core.stores.detach
        self.wait, self.wait_until, self.flush = core.wait, core.wait_until, core.flush
        self.limit, self.owners = core.limit, core.owners
        self.watch, self.stats, self.show = core.watch, core.stats, core.show

    # A request's life

    def begin(  # noqa: PLR0913 - what is asked of a prompt
        self,
        chain: KeyChain,
        *,
        priority: int = 0,
        turn_ends: Iterable[int] = (),
        load: bool = True,
        replay: bool = False,
        reuse_most: int | None = None,
        room_for: int = 0,
        for_others: bool = False,
    ) -> Request | Wait:
        """Reuse what the tiers hold of a prompt.

        `turn_ends` are token positions after which this text may be continued differently: message ends and
        break points. `load`, `replay` and `reuse_most` are those of `find`.
        `room_for`: the tokens for which device pages are reserved at once: `extend` up to there never waits.
        `for_others`: other servers will read the prompt's pages and tails on the host.
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
        self.core.lock(held)
        tails_far = [tail for tail in found.tails if tail.device is None]
        room: Reservation | Wait | None = None
        try:
            own = max(0, -(-room_for // self.spec.page_tokens) - found.page.depth)
            room = self.places.reserve(chain, len(found.far) + own, len(tails_far))
        finally:
            if not isinstance(room, Reservation):
                self.core.unlock(held)
        if isinstance(room, Wait):
            return room
        with room:
            places = room.ids(self.pages)
            self._start_loads(found.far, places[: len(found.far)])
            self._start_loads(tails_far, room.ids(self.tails))
            room.keep()
        return self._start(found, held, places[len(found.far) :], priority, turn_ends, for_others)

    def leave_device(self, chain: KeyChain) -> int:
        """Evict the pages of one text that the host has too and that are not in use. Returns how many of its
        pages stay on the device for now, because a save may be under way."""
        match = self.tree.match(chain.keys, len(chain.keys))
        if match.found:
            self.tree.leave_device(self.tree.index[chain.keys[match.found - 1]])
            self.places.settle()
        return self.tree.match(chain.keys, len(chain.keys)).device

    @property
    def changes(self) -> tuple[int, ...]:
        """Numbers that stay as they are while nothing is shared and nothing comes free. A prompt that found
        no device pages finds none until they change."""
        return *self.tree.copies.changes, self.pages.free, self.places.pages_leaving, self.host_pages.free

    def load_under_way(self, request: Request) -> int | None:
        """Send what is queued. Returns the number of the load that a request waits for if the device can wait
        for it layer by layer (`Controller.ready`): then the request may be computed at once."""
        controller = self.core.controller
        if controller is None or not controller.in_order:
            return None
        self.flights.send_loads()
        return request.load

    def extend(self, request: Request, upto: int, *, early: bool = False) -> Extended | Wait:
        """Room for positions below `upto`: device pages, and places for the tails to keep on the way.
        `early`: the room is not needed yet, so free pages that others wait for are left to them.

        Tails are kept at the request's boundaries, and after the prompt at the latest boundary, since any
        token may end the turn. Tails that find no place are left out and counted, the earliest first; they
        never make a request wait. A replay leaves a tail where it ends: a caller that replays calls `extend`
        before the replay's first token is computed.
        """
        assert request.state is not RequestState.ENDED
        page_tokens = self.spec.page_tokens
        pages = max(0, -(-upto // page_tokens) - len(request.table))
        if pages + len(request.table) > self.pages.capacity:
            return Wait(WaitFor.LARGER_DEVICE, pages + len(request.table) - self.pages.capacity)
        boundaries = tails_to_write(self.spec, request, upto)
        skipped, room = 0, self.places.reserve(request, pages, len(boundaries), urgent=not early)
        if isinstance(room, Wait) and room.what is WaitFor.DEVICE_TAILS:
            skipped = len(boundaries) - self.tails.free
            boundaries = boundaries[skipped:]
            room = self.places.reserve(request, pages, len(boundaries), urgent=not early)
        if isinstance(room, Wait):
            return room
        with room:
            request.table.extend(room.ids(self.pages))
            new = dict(zip(boundaries, room.ids(self.tails), strict=True))
            room.keep()
        self.counters["tails_skipped"] += skipped
        request.tails.update(new)
        request.extended_tokens = max(request.extended_tokens, upto)
        request.tails_upto = max(request.tails_upto, upto // page_tokens)
        return Extended({boundary * page_tokens: tail for boundary, tail in new.items()})

    def commit(self, request: Request, upto: int) -> None:
        """Positions below `upto` are written, and so are the tails at boundaries up to there: share them.

        If another request shared the same page first, the table now names that page and this request's copy
        is free again.
        """
        assert request.state is RequestState.RUNNING, "a request commits while it runs"
        assert upto <= request.extended_tokens, "I2: more was committed than there is room for"
        self.core.unlock(request.held[1:])
        del request.held[1:]
        request.written_tokens = max(request.written_tokens, upto)
        pages = min(upto, request.chain.tokens) // self.spec.page_tokens
        if pages > request.committed and not self.config.force_miss:
            self._share_pages(request, pages)
        self._share_tails(request, everything=False)
        self.places.settle()

    def finish(self, request: Request) -> None:
        """The text ended. The tail at its last boundary is kept: there the next turn goes on."""
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
        """Publish what ended; send what was queued since the last step, merged into one load and one save.
        Returns each request whose loads ended, once."""
        for flight in self.flights.landed():
            self._publish(flight)
        self.core.step()
        ended, self._ended = self._ended, []
        return ended

    def close(self, store_wait_s: float = 10.0) -> None:
        """Wait for the transfers, and up to `store_wait_s` for writes to the store; release everything."""
        self.core.close(self.step, store_wait_s)

    @property
    def busy(self) -> bool:
        return self.core.busy

    @property
    def store(self) -> StoreTier | None:
        """The store that is attached."""
        return self.stores.attached

    def _publish(self, landed: Flight) -> None:
        """Children before parents, so that a failed load takes a path apart."""
        ok, loads = landed.error is None, landed.direction is Direction.LOAD
        end = self.tree.load_done if loads else self.tree.save_done
        for move in reversed(landed.moves) if loads else landed.moves:
            end(move, ok)
        if ok and not loads:
            self.stores.offer(move.item for move in landed.moves)
        for request in landed.waiting:
            if isinstance(request, Request) and request.state is RequestState.LOADING:
                request.state = RequestState.RUNNING
                if ok:
                    self.core.count(request.chain, request.reuse)
                else:
                    self._end(request)
                    self.counters["requests_failed"] += 1
                self._ended.append(Loaded(request, landed.error))
        self.places.settle()

    def check(self) -> None:
        self.core.check()
        check_device(self.core, self.requests)

    # How a request begins

    def _start_loads(self, items: Sequence[Item], places: Sequence[int]) -> None:
        pairs = zip(items, places, strict=True)
        moves = [self.tree.load_start(item, device, self.flights.batch) for item, device in pairs]
        assert self.places.own(moves), "I3: a load of a place that was given back"
        self.flights.queue(Direction.LOAD, moves)

    def _start(
        self,
        found: Found,
        held: list[Item],
        own: Sequence[DevicePageId],
        priority: int,
        turn_ends: Iterable[int],
        for_others: bool,
    ) -> Request:
        """Everything is locked and reserved: nothing can fail from here on."""
        chain, page, tree, page_tokens = found.chain, found.page, self.tree, self.spec.page_tokens
        request = Request(
            chain,
            priority,
            self.core.use(found, priority),
            held,
            prompt_pages=chain.tokens // page_tokens,
            committed=page.depth,
            extended_tokens=page.depth * page_tokens,
            tails_upto=tails_after(self.spec, found),
            table=[*(tree.index[key].device for key in chain.keys[: page.depth]), *own],
            resume_tails=found.tails,
            tail_boundaries=tails_of_prompt(self.spec, found, turn_ends, self.config.tail_every_pages),
            for_others=for_others,
        )
        if any(item.load is not None for item in found.items):
            request.state = RequestState.LOADING
            self.flights.queue(Direction.LOAD, (), request)
        else:
            self.core.count(chain, request.reuse)
        if for_others:
            path = [tree.index[key] for key in chain.keys[: page.depth]]
            self.core.save_early([*path, *found.tails], by_force=True)
        elif page is not tree.root and self.core.saves_after == 1:
            self.core.save_early([*tree.unsaved(page), *found.tails])
        self.requests.add(request)
        if not self.config.force_miss:
            self.sharing.begin(request)
        self.counters["requests"] += 1
        self.places.settle()
        return request

    # What is shared, saved and given back

    def _share_pages(self, request: Request, pages: int) -> None:
        first = request.committed
        texts = request.chain.texts
        shared = self.tree.insert(
            request.page,
            request.chain.keys[first:pages],
            request.table[first:pages],
            request.priority,
            texts[first:pages] if texts else (),
            request.chain.owner,
            hold=True,
        )
        if not shared:
            return
        request.table[first : first + len(shared)] = [page.device for page in shared]
        self.sharing.end(request, first, first + len(shared))
        request.committed += len(shared)
        self.tree.unlock(request.page)
        request.held[0] = shared[-1]
        if self.core.saves_after == 0 or request.for_others:
            self.core.save_early(shared, by_force=request.for_others)

    def _share_tails(self, request: Request, *, everything: bool) -> None:
        """Wanted tails are shared; of the others only the latest are kept, privately, until the text ends."""
        written = min(request.committed, request.written_tokens // self.spec.page_tokens)
        ready = sorted(boundary for boundary in request.tails if boundary <= written)
        shared: list[Tail] = []
        for boundary in ready:
            if everything or boundary in request.tail_boundaries:
                page, place = self.tree.index[request.chain.keys[boundary - 1]], request.tails.pop(boundary)
                why = request.tail_boundaries.get(boundary, Boundary.ANSWER)
                shared.append(self.tree.insert_tail(page, place, request.priority, why))
            elif boundary <= ready[-1] - self.spec.pages_per_window:
                self.tails.release([request.tails.pop(boundary)])
        if shared:
            self.tree.cap_tails(shared[-1].page)
            if self.core.saves_after == 0 or request.for_others:
                early = (tail for tail in shared if not tail.gone)
                self.core.save_early(early, by_force=request.for_others)

    def _end(self, request: Request) -> None:
        assert request.state is not RequestState.ENDED, "I3: a request ends once"
        request.state = RequestState.ENDED
        self.requests.discard(request)
        self.sharing.end(request, request.committed, request.prompt_pages)
        self.core.unlock(request.held)
        self.pages.release(request.table[request.committed :])
        self.tails.release(list(request.tails.values()))
        request.held, request.table, request.tails = [], [], {}
        request.resume_tails = ()
        self.places.settle()
        self.core.trim()
