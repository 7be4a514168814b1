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
from dataclasses import replace
from typing import Any

from tiercel.cache.audit import CacheStats, check_device
from tiercel.cache.core import Core, Order
from tiercel.cache.flights import Flight
from tiercel.cache.memories import Memories, make_memories
from tiercel.cache.request import (
    Extended,
    Found,
    Loaded,
    PagePlaces,
    Request,
    RequestState,
    Wait,
    WaitFor,
    all_ids,
    pages_useful,
)
from tiercel.cache.room import Given, Room, make_residency, pages_whole_most
from tiercel.cache.sharing import Sharing
from tiercel.cache.store_tier import StoreTier
from tiercel.cache.tails import tails_after, tails_of_prompt, tails_to_write
from tiercel.config import CacheConfig
from tiercel.policy.placement import Boundary
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.identity import Identity
from tiercel.transfer.plan import Direction
from tiercel.tree.keys import KeyChain
from tiercel.tree.node import Item, Tail, ids_of


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
        """`memories` may have device memory that a cache before this one has used, if that has enough
        places."""
        whole_most = pages_whole_most(spec, config)
        memories = memories or make_memories(spec, config)
        device = memories.device
        roomy = device is None or (
            device.pages >= config.device_pages * spec.frame_units and device.tails >= config.staging_tails
        )
        assert roomy, "the device memory has fewer places than the cache is to use"
        self.sharing = Sharing(spec.pages_per_window)
        self.core = core = Core(
            spec,
            config,
            memories,
            device_places=config.device_pages,
            identity=identity,
            pool_order=pool_order,
            computes=self.sharing.computes,
        )
        self.spec, self.config, self.identity = spec, config, core.identity
        self.device, self.host = device, core.host
        self.tree, self.places, self.flights = core.tree, core.places, core.flights
        self.pages, self.host_pages = core.places.pages, core.places.host
        self.counters, self.compute = core.counters, core.compute
        self.leases, self.stores, self.controller = core.leases, core.stores, core.controller
        self.transfer_ended, self.send_saves = core.transfer_ended, core.flights.send_saves
        self.requests: dict[Request, None] = {}
        """In the order in which they began."""
        self.residency = make_residency(core, self.requests)
        self.room = Room(core, self.requests, self.residency, whole_most, self._share_all_tails)
        self.pages_most = self.room.pages_most
        """Pages of the longest text."""
        self._ended: list[Loaded] = []
        # What the core and its parts do by themselves has the same name here.
        self.chain, self.find = core.chain, core.find
        self.prefetch, self.withdraw = core.prefetch, core.withdraw
        self.pull, self.pulled = core.pull, core.pulled
        self.land, self.landed = core.landings.land, core.landings.landed
        self.attach, self.detach = core.stores.attach, core.stores.detach
        self.wait, self.wait_until, self.flush = core.wait, core.wait_until, core.flush
        self.limit, self.owners = core.limit, core.owners
        self.watch, self.show = core.watch, core.show

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
        `room_for`: the tokens for which device pages are reserved at once: `extend` up to there waits for no
        page. The text begins only if there is room for its first tails as well: else it would soon give way.
        `for_others`: other servers will read the prompt's pages and tails on the host.
        """
        pages_needed = -(-max(chain.tokens, room_for) // self.spec.page_tokens)
        too_large = pages_needed - self.pages_most
        if too_large > 0:
            return Wait(WaitFor.LARGER_DEVICE, too_large)
        found = self.find(chain, load=load, replay=replay, reuse_most=reuse_most)
        if isinstance(found, Found) and (less := self.room.reuse_most(found)) is not None:
            found = self.find(chain, load=load, replay=replay, reuse_most=(reuse_most := less))
        if isinstance(found, Wait):
            return found
        useful = pages_useful(chain, self.spec, reuse_most)
        if to_come := self.sharing.pages_to_come(chain.keys[:useful], found, priority):
            return Wait(WaitFor.COMPUTING, to_come)
        held: list[Item] = [found.page, found.near, *found.tails]
        self.core.lock(held)
        given: Given | Wait = Wait(WaitFor.DEVICE_PAGES)
        try:
            given = self.room.begin(found, room_for)
        finally:
            if isinstance(given, Wait):
                self.core.unlock(held)
        if isinstance(given, Wait):
            if given.what is WaitFor.DEVICE_PAGES and not self.requests:
                return self.room.make_way(found, room_for)
            return given
        with given.room:
            far, tails_far = len(found.far), [tail for tail in found.tails if tail.device is None]
            self._start_loads(found.far, given.pages[:far])
            self._start_loads(tails_far, given.tails[: len(tails_far)])
            given.room.keep()
        self.pages.release(all_ids(given.tails[len(tails_far) :]))
        request = self._start(found, held, given.pages[far:], priority, turn_ends, for_others)
        if self.residency is not None:
            request.bare = given.bare
            self.residency.begin(request, given.hot)
        return request

    def leave_device(self, chain: KeyChain) -> int:
        """Evict the pages of one text that the host has too and that are not in use. Returns how many of its
        pages stay on the device for now, because a save may be under way."""
        match = self.tree.match(chain.keys, len(chain.keys))
        if match.found:
            self.tree.leave_device(self.tree.index[chain.keys[match.found - 1]])
            self.places.settle()
        return self.tree.match(chain.keys, len(chain.keys)).device

    @property
    def moving(self) -> bool:
        """Whether copies between device and host are queued or under way."""
        return next(self.flights.moves(), None) is not None

    def lose_device(self) -> None:
        """What the device held is gone, with its memory. Only what the host can read stays. Required: no
        request has begun, and no copy is queued or under way."""
        assert not self.requests and not self.moving, "somebody holds what is lost"
        while self.tree.evict(self.pages.capacity):
            self.places.settle()
        self.places.settle()
        self.places.forget_promises()
        assert self.pages.free == self.pages.capacity, "I4: a place of an empty device has an owner"

    @property
    def changes(self) -> tuple[int, ...]:
        """Numbers that stay as they are while nothing is shared and nothing comes free. A prompt that found
        no device pages finds none until they change."""
        return *self.tree.copies.changes, self.pages.free, self.pages.leaving, self.host_pages.free

    def load_under_way(self, request: Request) -> int | None:
        """Send what is queued. Returns the number of the load that a request waits for if the device can wait
        for it layer by layer (`Controller.ready`): then the request may be computed at once."""
        controller = self.core.controller
        if controller is None or not controller.in_order:
            return None
        self.flights.send_loads()
        return request.load

    def extend(
        self, request: Request, upto: int, *, tails_upto: int | None = None, early: bool = False
    ) -> Extended | Wait:
        """Room for positions below `upto`: device pages, and places for the tails to keep on the way, or up
        to `tails_upto`. `early`: the room is not needed yet, so free pages that others wait for are left to
        them.

        Tails are kept at the request's boundaries, and after the prompt at the latest boundary, since any
        token may end the turn. A request waits for their places as it waits for pages: no tail is skipped. A
        replay leaves a tail where it ends: a caller that replays calls `extend` before the replay's first
        token is computed.
        """
        assert request.state is not RequestState.ENDED
        page_tokens, tails_upto = self.spec.page_tokens, upto if tails_upto is None else tails_upto
        wanted = -(-upto // page_tokens)
        if wanted > self.pages_most:
            return Wait(WaitFor.LARGER_DEVICE, wanted - self.pages_most)
        new = self.room.extend(request, wanted, tails_to_write(self.spec, request, tails_upto), early=early)
        if isinstance(new, Wait):
            return new
        request.tails.update(new)
        request.extended_tokens = max(request.extended_tokens, upto)
        request.tails_upto = max(request.tails_upto, tails_upto // page_tokens)
        return Extended({boundary * page_tokens: tail for boundary, tail in new.items()})

    def _share_all_tails(self) -> bool:
        """Share the tails that running texts keep for themselves: then these can go to the host, or leave.
        Returns whether there were any."""
        held = sum(len(request.tails) for request in self.requests)
        for request in self.requests:
            if request.state is RequestState.RUNNING:
                self._share_tails(request, everything=True)
        return sum(len(request.tails) for request in self.requests) < held

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
        if self.residency is not None:
            self.residency.step()
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
        residency = self.residency
        for move in reversed(landed.moves) if loads else landed.moves:
            if residency is not None and loads and residency.is_back(move):
                residency.came_back(move, ok)
                continue
            end(move, ok)
            if residency is not None and not loads:
                residency.saved(move, ok)
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

    def stats(self) -> CacheStats:
        stats = self.core.stats()
        return stats if self.residency is None else replace(stats, sparse=self.residency.stats())

    def check(self) -> None:
        self.core.check()
        check_device(self.core, self.requests, () if self.residency is None else self.residency.owned())

    # How a request begins

    def _start_loads(self, items: Sequence[Item], places: Sequence[Any]) -> None:
        pairs = zip(items, places, strict=True)
        moves = [self.tree.load_start(item, device, self.flights.batch) for item, device in pairs]
        assert self.places.own(moves), "I3: a load of a place that was given back"
        self.flights.queue(Direction.LOAD, moves)

    def _start(
        self,
        found: Found,
        held: list[Item],
        own: Sequence[PagePlaces],
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
        self.requests[request] = None
        if not self.config.force_miss:
            self.sharing.begin(request)
        self.counters["requests"] += 1
        self.places.settle()
        return request

    # What is shared, saved and given back

    def _share_pages(self, request: Request, pages: int) -> None:
        first = request.committed
        texts = request.chain.texts
        if self.residency is not None:
            for at in range(first, pages):
                known = self.tree.index.get(request.chain.keys[at])
                if known is not None and known.load is not None:
                    break
                if known is not None and known.device is not None:
                    request.table[at] = self.residency.adopt(known, ids_of(request.table[at]))
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
                self.pages.release(request.tails.pop(boundary))
        if shared:
            self.tree.cap_tails(shared[-1].page)
            if self.core.saves_after == 0 or request.for_others:
                early = (tail for tail in shared if not tail.gone)
                self.core.save_early(early, by_force=request.for_others)

    def _end(self, request: Request) -> None:
        assert request.state is not RequestState.ENDED, "I3: a request ends once"
        request.state = RequestState.ENDED
        self.requests.pop(request, None)
        self.sharing.end(request, request.committed, request.prompt_pages)
        if self.residency is not None:
            self.residency.end(request)
        self.core.unlock(request.held)
        self.pages.release(all_ids(request.table[request.committed :]))
        self.pages.release([page for tail in request.tails.values() for page in tail])
        request.held, request.table, request.tails = [], [], {}
        request.resume_tails = ()
        self.places.settle()
        self.core.trim()
