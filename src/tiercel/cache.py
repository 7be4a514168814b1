"""TieredCache: the front door. It wires the rooms and holds no algorithm.

    begin ──► (step: loads arrive) ──► extend ─► commit ─► extend ─► commit … ──► finish | preempt | abort

    begin     match, choose where to resume, lock it, reserve device places, queue the loads     no trace if
    it has to wait extend    places for the tokens about to be computed, and for the tails to keep of them
    commit    bytes are written: full pages and tails become shared, and are saved to the host
    finish    everything is released; what was committed stays cached

One thread drives a cache. Copies run elsewhere (`transfer.controller`) and become visible in `step`, so
between two steps nothing changes behind the caller's back.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from tiercel.config import CacheConfig
from tiercel.errors import ConfigError, TransferError
from tiercel.memory.buffers import DeviceMemory, HostMemory
from tiercel.pages.pool import PagePool
from tiercel.pages.reservation import Reservation, Short, reserve
from tiercel.policy.evict import make_evict_policy
from tiercel.policy.placement import tail_boundaries, with_window
from tiercel.policy.resume import Resume, Reuse, Why, choose_resume
from tiercel.policy.save import make_save_policy
from tiercel.spec.cache_spec import CacheSpec
from tiercel.transfer.controller import Controller, Ticket
from tiercel.transfer.copier import make_copier
from tiercel.transfer.gate import LayerGate
from tiercel.transfer.plan import Direction, Plan
from tiercel.tree.check import check, show
from tiercel.tree.keys import KeyChain, Tokens
from tiercel.tree.node import Item, Page, Tail
from tiercel.tree.prefix_tree import Actions, Event, Match, Move, PrefixTree
from tiercel.types import DevicePageId, DeviceTailId, HostPageId, Namespace, place

log = logging.getLogger(__name__)


class WaitFor(Enum):
    """What a request lacks. All but the last pass by themselves as requests end and transfers arrive."""

    DEVICE_PAGES = "device pages"
    DEVICE_TAILS = "device places for tails"
    ARRIVING = "a transfer that is bringing or taking what it wants to reuse"
    LARGER_DEVICE = "more device pages than there are"


@dataclass(frozen=True)
class Wait:
    """Not now; nothing was changed. Ask again after a `step`."""

    what: WaitFor
    missing: int = 0


@dataclass(frozen=True)
class Extended:
    """There is room. `tails` maps a boundary, in tokens, to the place the tail at it is to be written to."""

    tails: dict[int, DeviceTailId]


class RequestState(Enum):
    LOADING = "loading"
    RUNNING = "running"
    ENDED = "ended"


class Request:
    """One running text: its page table, what of it is shared, and what it holds locked. Made by
    `TieredCache.begin`."""

    def __init__(self, chain: KeyChain, priority: int, reuse: Reuse, page: Page) -> None:
        self.chain = chain
        self.priority = priority
        self.reuse = reuse
        self.state = RequestState.RUNNING
        self.table: list[DevicePageId] = []
        """Device pages of the text, shared ones first; behind `committed` they are private to this
        request."""
        self.committed = page.depth
        self.page = page
        """The deepest shared page; its lock protects the whole shared part of the table."""
        self.resume_tails: tuple[Tail, ...] = ()
        """Tails to continue from, the last first: read them before the first `commit`."""
        self.gate: LayerGate | None = None
        """Opens layer by layer while the loads of this request arrive; None when there are none or they are
        not sent yet."""
        self.tails: dict[int, DeviceTailId] = {}
        """Places for tails not shared yet, by boundary in pages."""
        self.tail_boundaries: frozenset[int] = frozenset()
        self.prompt_pages = 0
        self.extended_pages = 0
        self.held: list[Item] = []

    def places(self) -> npt.NDArray[np.int32]:
        """The page table as row numbers of device memory."""
        return np.fromiter(map(place, self.table), np.int32, len(self.table))


@dataclass(frozen=True)
class Loaded:
    """The loads of a request ended; with an error the request ended too, and may begin again."""

    request: Request
    error: TransferError | None = None


@dataclass(frozen=True)
class _Flight:
    moves: list[Move]
    requests: list[Request]


_DEVICE_PAGE_TAG, _DEVICE_TAIL_TAG, _HOST_PAGE_TAG = 1, 2, 3


class TieredCache:
    """Device and host tiers of one model's cache."""

    def __init__(
        self,
        spec: CacheSpec,
        config: CacheConfig,
        *,
        device: str = "cpu",
        executors: dict[Direction, Executor] | None = None,
        pool_order: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        least = 2 * spec.pages_per_window
        if config.device_tails < least:
            why = f"{spec.model} keeps tails: a request needs {least} places for them"
            raise ConfigError("device_tails", config.device_tails, why)
        self.spec = spec
        self.config = config
        self.device = DeviceMemory(spec, config.device_pages, config.device_tails, device)
        order = pool_order or range
        self.pages: PagePool[DevicePageId] = PagePool(
            "device pages", config.device_pages, tag=_DEVICE_PAGE_TAG, order=order(config.device_pages)
        )
        self.tails: PagePool[DeviceTailId] = PagePool(
            "device tails", config.device_tails, tag=_DEVICE_TAIL_TAG, order=order(config.device_tails)
        )
        self._save = make_save_policy(config.save)
        self.tree = PrefixTree(
            evict=make_evict_policy(config.evict),
            save=self._save,
            pages_per_window=spec.pages_per_window,
            tails_per_path=config.tails_per_path,
        )
        self.host: HostMemory | None = None
        if config.host_bytes:
            self.host = HostMemory(spec, config.layout, config.host_bytes, huge_pages=config.huge_pages)
        host_pages = self.host.pages if self.host else 0
        self.host_pages: PagePool[HostPageId] = PagePool(
            "host pages", host_pages, tag=_HOST_PAGE_TAG, order=order(host_pages)
        )
        self._controller: Controller | None = None
        if self.host:
            copier = make_copier(config.copier, spec, self.device, self.host)
            self._controller = Controller(copier, spec.layers, executors)
        self._batch = 1
        self._loads = _Flight([], [])
        self._saves: list[Move] = []
        self._flights: dict[int, _Flight] = {}
        self._requests: set[Request] = set()
        self._observer: Callable[[Event], None] | None = None
        self.counters: Counter[str] = Counter()

    # A request's life

    def chain(self, tokens: Tokens = (), namespace: Namespace = ()) -> KeyChain:
        """The keys of a text: made once, kept by the caller while the request waits, extended as the text
        grows."""
        chain = KeyChain(self.spec.fingerprint, namespace, self.spec.page_tokens)
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
    ) -> Request | Wait:
        """Reuse what the tiers hold of a prompt.

        `turn_ends` are token positions after which this text may be continued differently: message ends and
        break points.
        `load=False` reuses only what the device has; `replay=True` allows to resume without a tail where
        computing the last tokens again is exact and cheaper (`request.reuse.replay_tokens` says how many).
        """
        spec, tree = self.spec, self.tree
        limit = 0 if self.config.force_miss else max(0, chain.tokens - 1) // spec.page_tokens
        match = tree.match(chain.keys, limit, device_only=not load)
        resume = choose_resume(
            found=match.found,
            boundary=match.boundary,
            page_tokens=spec.page_tokens,
            replay_tokens=spec.replay_tokens,
            replay=replay,
        )
        page = self._page_at(chain, resume.pages)
        tails = () if resume.replay_tokens else match.tails
        near = self._page_at(chain, min(match.device, resume.pages))
        far = [tree.index[key] for key in chain.keys[near.depth : resume.pages]]
        missing = [*far, *(tail for tail in tails if tail.device is None)]
        if any(self._is_arriving(item) for item in (near, *far, *tails)):
            return Wait(WaitFor.ARRIVING)
        held = [page, near, *tails]
        for item in held:
            tree.lock(item)
        room = self._reserve(len(far), len(missing) - len(far))
        if isinstance(room, Wait):
            self._unlock(held)
            return room
        request = Request(chain, priority, self._reuse(chain, match, resume, near, limit), page)
        with room:
            pages, places = room.ids(self.pages), room.ids(self.tails)
            self._loads.moves.extend(
                tree.load_start(item, device, self._batch)
                for item, device in zip(missing, pages + places, strict=True)
            )
            room.keep()
        request.held = held
        request.table = [self._device_of(tree.index[key]) for key in chain.keys[: page.depth]]
        request.resume_tails = tails
        request.prompt_pages = chain.tokens // spec.page_tokens
        request.extended_pages = (
            max(0, page.depth - spec.pages_per_window) if resume.replay_tokens else page.depth
        )
        request.tail_boundaries = self._tail_boundaries(request, match, turn_ends)
        if any(item.load is not None for item in (near, page, *tails) if item is not tree.root):
            request.state = RequestState.LOADING
            self._loads.requests.append(request)
        if page is not tree.root:
            tree.touch(page, tails, priority)
            if self._save.early_hits == 1:
                self._save_early([*tree.unsaved(page), *tails])
        self._requests.add(request)
        self._count_reuse(request.reuse)
        self._settle()
        return request

    def extend(self, request: Request, upto: int) -> Extended | Wait:
        """Room for positions below `upto`: device pages, and places for the tails to keep on the way.

        Tails are kept at the request's boundaries, and after the prompt at the latest boundary, since any
        token may end the turn. A tail that finds no place is left out and counted; it never makes a request
        wait.
        """
        assert request.state is not RequestState.ENDED
        pages = -(-upto // self.spec.page_tokens) - len(request.table)
        if pages + len(request.table) > self.pages.capacity:
            return Wait(WaitFor.LARGER_DEVICE, pages + len(request.table) - self.pages.capacity)
        boundaries = self._tails_between(request, request.extended_pages, upto // self.spec.page_tokens)
        room = self._reserve(max(0, pages), len(boundaries))
        if isinstance(room, Wait) and room.what is WaitFor.DEVICE_TAILS:
            self.counters["tails_skipped"] += len(boundaries)
            boundaries = []
            room = self._reserve(max(0, pages), 0)
        if isinstance(room, Wait):
            return room
        with room:
            request.table.extend(room.ids(self.pages))
            new = dict(zip(boundaries, room.ids(self.tails), strict=True))
            room.keep()
        request.tails.update(new)
        request.extended_pages = max(request.extended_pages, upto // self.spec.page_tokens)
        return Extended({boundary * self.spec.page_tokens: tail for boundary, tail in new.items()})

    def commit(self, request: Request, upto: int) -> None:
        """Positions below `upto` are written, and so are the tails at boundaries up to there: share them.

        Where another request was first, the table now names its pages and this request's copies are free
        again.
        """
        assert request.state is RequestState.RUNNING, (
            f"a request commits while it runs, not {request.state.value}"
        )
        self._unlock(request.held[1:])
        del request.held[1:]
        pages = min(upto, request.chain.tokens) // self.spec.page_tokens
        if pages > request.committed:
            self._share_pages(request, pages)
        self._share_tails(request, everything=False)
        self._settle()

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
        """Publish the transfers that ended and send those queued since the last step, merged into one load
        and one save."""
        if self._controller is None:
            return []
        loaded: list[Loaded] = []
        for done in self._controller.poll():
            loaded += self._publish(done.ticket, done.error)
        if self._loads.moves:
            loads, self._loads = self._loads, _Flight([], [])
            self._batch += 1
            ticket = self._send(Direction.LOAD, loads)
            for request in loads.requests:
                request.gate = ticket.gate
        if self._saves:
            saves, self._saves = self._saves, []
            self._send(Direction.SAVE, _Flight(saves, []))
        return loaded

    def _send(self, direction: Direction, flight: _Flight) -> Ticket:
        assert self._controller is not None
        pages = [(m.device, m.host[0]) for m in flight.moves if isinstance(m.item, Page)]
        tails = [(m.device, m.host) for m in flight.moves if isinstance(m.item, Tail)]
        ticket = self._controller.submit(Plan.of(direction, pages, tails))
        self._flights[ticket.number] = flight
        return ticket

    def _publish(self, ticket: Ticket, error: TransferError | None) -> list[Loaded]:
        flight = self._flights.pop(ticket.number)
        word = ticket.direction.value
        self.counters[f"{word}s_failed" if error else f"{word}s"] += 1
        if ticket.direction is Direction.SAVE:
            for move in flight.moves:
                self._count_bytes("saved", move, error)
                self.tree.save_done(move, ok=error is None)
            self._settle()
            return []
        for move in reversed(flight.moves):
            self._count_bytes("loaded", move, error)
            self.tree.load_done(move, ok=error is None)
        waiting = [request for request in flight.requests if request.state is RequestState.LOADING]
        for request in waiting:
            request.state = RequestState.RUNNING
            if error is not None:
                self._end(request)
        self._settle()
        return [Loaded(request, error) for request in waiting]

    def flush(self) -> int:
        """Forget everything no request holds and no transfer moves; answers how many pages stay."""
        stay = self.tree.flush()
        self._settle()
        return stay

    def watch(self, observer: Callable[[Event], None] | None) -> None:
        """Tell `observer` of everything that becomes readable in a tier or leaves it. Its errors are logged,
        not raised."""
        self._observer = observer
        self.tree.events = [] if observer else None

    def close(self) -> None:
        """Wait for the transfers and release host memory."""
        if self._controller is not None:
            self._controller.close()
        if self.host is not None:
            self.host.close()

    # Looking

    def stats(self) -> dict[str, Any]:
        """Places and true bytes per tier and stream, bytes moved, and counters."""
        pages = [page for page in self.tree.index.values()]
        tails = [page.tail for page in pages if page.tail is not None]
        held = {
            "device": (sum(p.device is not None for p in pages), sum(t.device is not None for t in tails)),
            "host": (sum(p.on_host for p in pages), sum(t.on_host for t in tails)),
        }
        tiers = {tier: self._bytes_by_stream(*counts) for tier, counts in held.items()}
        pools = {
            pool.name: {"capacity": pool.capacity, "free": pool.free}
            for pool in (self.pages, self.tails, self.host_pages)
        }
        moved = {
            word: self._bytes_by_stream(self.counters[f"pages_{word}"], self.counters[f"tails_{word}"])
            for word in ("loaded", "saved")
        }
        return {"cached_bytes": tiers, "pools": pools, "moved_bytes": moved, "counters": dict(self.counters)}

    def check(self) -> None:
        """Every invariant, counted again from nothing. For tests and for idle moments."""
        check(self.tree)
        for pool in (self.pages, self.tails, self.host_pages):
            pool.check()
        self._check_owners()

    def show(self) -> str:
        return show(self.tree)

    # How

    def _page_at(self, chain: KeyChain, pages: int) -> Page:
        return self.tree.index[chain.keys[pages - 1]] if pages else self.tree.root

    def _is_arriving(self, item: Item) -> bool:
        """On its way with a batch that was sent already (or away from the device and not readable on the
        host yet)."""
        if item is self.tree.root:
            return False
        assert isinstance(item, Page | Tail)
        if item.device is None:
            return not item.on_host
        return item.load is not None and item.load != self._batch

    def _device_of(self, page: Page) -> DevicePageId:
        assert page.device is not None
        return page.device

    def _reserve(self, pages: int, tails: int) -> Reservation | Wait:
        """Device places, made free by eviction where they are short."""
        take_host = self._take_host if self.host else None
        short = pages - self.pages.free - self._leaving(Page)
        if short > 0:
            self.tree.evict_pages(short, take_host)
        short = tails - self.tails.free - self._leaving(Tail)
        if short > 0:
            self.tree.evict_tails(short, self.spec.host_pages_per_tail, take_host)
        self._settle()
        room = reserve((self.pages, pages), (self.tails, tails))
        if isinstance(room, Short):
            pages_short = room.pool == self.pages.name
            return Wait(WaitFor.DEVICE_PAGES if pages_short else WaitFor.DEVICE_TAILS, room.missing)
        return room

    def _leaving(self, kind: type[Item]) -> int:
        """Device places that come free when the saves under way end."""
        flights = [flight.moves for flight in self._flights.values()]
        return sum(
            isinstance(move.item, kind) and self._has_left(move)
            for moves in (self._saves, *flights)
            for move in moves
        )

    @staticmethod
    def _has_left(move: Move) -> bool:
        assert isinstance(move.item, Page | Tail)
        return move.item.device != move.device

    def _take_host(self, count: int) -> tuple[HostPageId, ...] | None:
        self._settle()
        room = reserve((self.host_pages, count))
        if isinstance(room, Short):
            return None
        with room:
            ids = tuple(room.ids(self.host_pages))
            room.keep()
        return ids

    def _save_early(self, items: Iterable[Page | Tail]) -> None:
        """Copies into host memory that is free anyway (`policy.save`)."""
        if self.host is None:
            return
        for item in items:
            if item.host is None and item.load is None and not item.unsavable:
                host = self._take_host(1 if isinstance(item, Page) else self.spec.host_pages_per_tail)
                if host is None:
                    return
                self.tree.save_start(item, host)

    def _share_pages(self, request: Request, pages: int) -> None:
        first = request.committed
        shared = self.tree.insert(
            request.page, request.chain.keys[first:pages], request.table[first:pages], request.priority
        )
        if not shared:
            return
        request.table[first : first + len(shared)] = [self._device_of(page) for page in shared]
        request.committed += len(shared)
        self.tree.lock(shared[-1])
        self.tree.unlock(request.page)
        request.page = request.held[0] = shared[-1]
        if self._save.early_hits == 0:
            self._save_early(shared)

    def _share_tails(self, request: Request, *, everything: bool) -> None:
        """Wanted tails are shared; of the others only the latest are kept, privately, until the text ends."""
        ready = sorted(boundary for boundary in request.tails if boundary <= request.committed)
        for boundary in ready:
            if everything or boundary in request.tail_boundaries:
                page = self._page_at(request.chain, boundary)
                tail = self.tree.insert_tail(page, request.tails.pop(boundary), request.priority)
                if self._save.early_hits == 0:
                    self._save_early([tail])
            elif boundary <= ready[-1] - self.spec.pages_per_window:
                self.tails.release([request.tails.pop(boundary)])

    def _end(self, request: Request) -> None:
        assert request.state is not RequestState.ENDED, "I3: a request ends once"
        request.state = RequestState.ENDED
        self._requests.discard(request)
        self._unlock(request.held)
        self.pages.release(request.table[request.committed :])
        self.tails.release(list(request.tails.values()))
        request.held, request.table, request.tails = [], [], {}
        self._settle()

    def _unlock(self, items: Iterable[Item]) -> None:
        for item in items:
            self.tree.unlock(item)

    def _settle(self) -> None:
        """Carry out what the tree decided."""
        actions = self.tree.actions
        if actions.pages or actions.tails or actions.host or actions.saves:
            self.tree.actions = Actions()
            self.pages.release(actions.pages)
            self.tails.release(actions.tails)
            self.host_pages.release(actions.host)
            self._saves.extend(actions.saves)
        if self.tree.events:
            events, self.tree.events = self.tree.events, []
            for event in events:
                self._notify(event)

    def _notify(self, event: Event) -> None:
        assert self._observer is not None
        try:
            self._observer(event)
        except Exception:  # noqa: BLE001 - an observer is not ours; its error must not stop the cache
            self.counters["observer_errors"] += 1
            log.exception("the observer failed on %s", event)

    def _tail_boundaries(self, request: Request, match: Match, turn_ends: Iterable[int]) -> frozenset[int]:
        """Where the prompt gets tails; after a replay also at the boundary it went up to."""
        if not self.spec.tail_streams:
            return frozenset()
        first = request.extended_pages
        wanted = tail_boundaries(
            resumed_pages=first,
            total_pages=request.prompt_pages,
            turn_ends=turn_ends,
            branch_page=match.branch,
            every_pages=self.config.tail_every_pages,
            page_tokens=self.spec.page_tokens,
        )
        replayed = {request.committed} if request.committed > first else set()
        return with_window(
            wanted | replayed, pages_per_window=self.spec.pages_per_window, resumed_pages=first
        )

    def _tails_between(self, request: Request, first: int, last: int) -> list[int]:
        """Boundaries after `first` up to `last` whose tails are to be written."""
        window = self.spec.pages_per_window
        prompt = [b for b in range(first + 1, last + 1) if b in request.tail_boundaries]
        latest = range(max(first, request.prompt_pages, last - window) + 1, last + 1) if window else ()
        return sorted({*prompt, *latest})

    def _reuse(self, chain: KeyChain, match: Match, resume: Resume, near: Page, limit: int) -> Reuse:
        page_tokens = self.spec.page_tokens
        if self.config.force_miss:
            why = Why.FORCED_MISS
        elif resume.pages < match.found:
            why = Why.NO_TAIL
        elif resume.pages == limit:
            why = Why.COMPLETE
        else:
            held = chain.keys[resume.pages] in self.tree.index
            why = Why.NOT_ON_DEVICE if held else Why.NOT_CACHED
        cost = self.spec.replay_tokens
        found_tokens = match.found * page_tokens
        return Reuse(
            prompt_tokens=chain.tokens,
            device_tokens=near.depth * page_tokens,
            host_tokens=(resume.pages - near.depth) * page_tokens,
            store_tokens=0,
            found_tokens=found_tokens,
            replay_tokens=resume.replay_tokens,
            replay_cost_tokens=None if cost is None else min(cost, found_tokens),
            why=why,
        )

    def _count_reuse(self, reuse: Reuse) -> None:
        self.counters["requests"] += 1
        self.counters["tokens_asked"] += reuse.prompt_tokens
        self.counters["tokens_device"] += reuse.device_tokens
        self.counters["tokens_host"] += reuse.host_tokens

    def _count_bytes(self, word: str, move: Move, error: TransferError | None) -> None:
        if error is None:
            self.counters[f"{'pages' if isinstance(move.item, Page) else 'tails'}_{word}"] += 1

    def _bytes_by_stream(self, pages: int, tails: int) -> dict[str, int]:
        counts = [(self.spec.page_streams, pages), (self.spec.tail_streams, tails)]
        return {s.name: count * self.spec.bytes_of(s) for streams, count in counts for s in streams}

    def _check_owners(self) -> None:
        """I4: every owned place has exactly one owner: the tree, a request, or a transfer."""
        pages = [p.device for p in self.tree.index.values() if p.device is not None]
        own_tails = [p.tail for p in self.tree.index.values() if p.tail is not None]
        tails = [t.device for t in own_tails if t.device is not None]
        host = [h for item in (*self.tree.index.values(), *own_tails) for h in item.host or ()]
        for request in self._requests:
            pages += request.table[request.committed :]
            tails += request.tails.values()
        flights = [flight.moves for flight in self._flights.values()]
        for moves in (self._loads.moves, self._saves, *flights):
            for move in moves:
                if self._has_left(move) or move.item.gone:
                    (pages if isinstance(move.item, Page) else tails).append(move.device)  # type: ignore[arg-type]
                if move.item.gone:
                    host += move.host
        for pool, ids in ((self.pages, pages), (self.tails, tails), (self.host_pages, host)):
            assert len(ids) == len(set(ids)), f"I4: a place of {pool.name} has two owners"  # type: ignore[arg-type]
            assert set(ids) == pool.owned_ids(), f"I4: {pool.name}: owned and in use differ"  # type: ignore[arg-type]
