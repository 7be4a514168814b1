"""The host tier: keys, tree, host pages, store. What every cache has, whoever owns the device memory.

    HostTier ──┬── HostCache      + loads and saves between the host and places that another engine names
               └── TieredCache    + a device pool of its own, and requests

One thread drives a cache. Copies run in other threads (`transfer.controller`) and become visible in `step`.
Observers are called in `step` too: between two steps nothing changes.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from threading import Condition
from time import monotonic
from typing import Generic, TypeVar

from tiercel.cache import audit
from tiercel.cache.flights import Flight, Flights
from tiercel.cache.leases import Leases
from tiercel.cache.places import Places
from tiercel.cache.request import Found, Transfer, Wait, WaitFor, find, find_nothing, pages_useful
from tiercel.cache.store_tier import StoreTier
from tiercel.config import CacheConfig
from tiercel.errors import ConfigError, TransferError
from tiercel.memory.buffers import HostMemory, Memory, pci_address
from tiercel.memory.host import node_of
from tiercel.policy.evict import make_evict_policy
from tiercel.policy.fetch import Rate
from tiercel.policy.resume import Reuse
from tiercel.policy.save import make_save_policy
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.identity import Identity
from tiercel.storage.base import Store
from tiercel.transfer.controller import Controller, make_controller
from tiercel.transfer.mover import StoreMover, Workers
from tiercel.transfer.plan import Direction
from tiercel.tree.check import readable, show
from tiercel.tree.keys import KeyChain, Tokens
from tiercel.tree.node import Cleared, Event, Item, Move
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import Kind, Namespace, PageKey

log = logging.getLogger(__name__)

Clock = Callable[[], float]
Executors = Mapping[Direction, Executor]
Order = Callable[[int], Sequence[int]]
"""The order in which a pool of so many places first gives them out."""
Observer = Callable[[Sequence[Event | Cleared]], None]

TRIM_ITEMS = 64
"""So many pages and tails of owners above their limits leave in a step: about a millisecond."""

COUNTED = (
    *("requests", "requests_finished", "requests_preempted", "requests_aborted", "requests_failed"),
    *("tokens_asked", "tokens_device", "tokens_host", "tokens_store", "tokens_replayed"),
    *("tails_skipped", "observer_errors"),
    *("loads", "loads_failed", "pages_loaded", "tails_loaded"),
    *("saves", "saves_failed", "pages_saved", "tails_saved"),
)
"""What a cache counts: all of it is there from the start."""

AnyEnd = TypeVar("AnyEnd")


class HostTier(ABC, Generic[AnyEnd]):
    """What a cache holds on the host and in the store: how it is found, brought and kept.

    `device` is the memory on the other side of every copy, or, where other processes have that memory, the
    controller that hands plans to them. Without an `identity` the model's name identifies the cached numbers.
    """

    def __init__(
        self,
        spec: CacheSpec,
        config: CacheConfig,
        device: Memory | Controller,
        *,
        identity: Identity | None = None,
        executors: Executors | None = None,
        pool_order: Order | None = None,
    ) -> None:
        self.spec = spec
        self.config = config
        if not (config.host_bytes or any(self._device_places())):
            raise ConfigError("host_bytes", 0, "is all the memory that a cache without a device pool has")
        self.identity = identity or Identity(spec.model)
        self.device_spec = device.spec if isinstance(device, Memory) else spec
        """What the device's pools hold: all streams, or some of them. (For ranks: all of them together.)"""
        self._save = make_save_policy(config.save)
        self.tree = PrefixTree(
            evict=make_evict_policy(config.evict),
            pages_per_window=spec.pages_per_window,
            tails_per_path=config.tails_per_path,
            item_bytes=audit.item_bytes(self.device_spec, spec),
            replay_pages=None if spec.replay_tokens is None else spec.replay_tokens // spec.page_tokens + 1,
        )
        self.host = self._host_memory(device) if config.host_bytes else None
        controller = device if isinstance(device, Controller) else None
        if self.host and isinstance(device, Memory):
            controller = self._controller(device, self.host, executors)
        self._landed = controller.landed if controller else Condition()
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.flights = Flights(controller, self.counters, spec, config.save_step_bytes)
        counts = (*self._device_places(), self.host.pages if self.host else 0)
        queue_saves = partial(self.flights.queue, Direction.SAVE)
        self.places = Places(self.tree, spec, counts, pool_order or range, queue_saves)
        self.host_pages = self.places.host
        self.leases = Leases(self.tree, spec, self.places, self._computes)
        """Host copies that other servers read."""
        self.compute = Rate()
        """Prompt tokens computed per second: what a fetch is compared with."""
        self.compute_saved_s = 0.0
        """How long computing what was reused would have taken, at the speed of that moment."""
        self._tokens_unpriced = 0
        """Tokens that were reused before any speed was known."""
        self.store: StoreTier | None = None
        self._stores_left: list[StoreTier] = []
        self.landings: set[Transfer] = set()
        """Host pages that are being filled otherwise than by a save of the tree's own."""
        self._trimming = False
        """More of an owner may have to leave than one step takes."""
        self._ended: list[AnyEnd] = []
        self._observer: Observer | None = None

    def _device_places(self) -> tuple[int, int]:
        """Places for pages and for tails in a device pool of the cache's own."""
        return 0, 0

    def _host_memory(self, device: Memory | Controller) -> HostMemory:
        """Made where the cache has a host tier. (A replay has one without bytes.)"""
        spec, config = self.spec, self.config
        cuda = device.device if isinstance(device, Memory) and device.device.type == "cuda" else None
        host = HostMemory(
            spec,
            config.layout,
            config.host_bytes,
            huge_pages=config.huge_pages,
            pin=cuda is not None,
            node=None if cuda is None else node_of(pci_address(cuda)),
            shared=config.host_shared,
        )
        if host.pages < spec.host_pages_per_tail:
            host.close()
            why = f"a tail takes {spec.host_pages_per_tail} host pages of {spec.host_page_bytes:,} B"
            raise ConfigError("host_bytes", config.host_bytes, why)
        return host

    def _controller(self, device: Memory, host: HostMemory, executors: Executors | None) -> Controller:
        """Who copies between device and host."""
        return make_controller(self.config.copier, device, host, executors)

    def _computes(self, key: PageKey, kind: Kind) -> bool:  # noqa: ARG002
        """Whether a running request is going to share this page, or the tail at its end."""
        return False

    # Finding

    def chain(self, tokens: Tokens = (), namespace: Namespace = (), owner: str = "") -> KeyChain:
        """The keys of a text: made once, kept while the request waits, extended as the text grows. `owner`:
        whose pages they will be. Required: owners share no namespace."""
        keep, page_tokens = self._observer is not None, self.spec.page_tokens
        chain = KeyChain(self.identity.digest, namespace, page_tokens, keep_tokens=keep, owner=owner)
        chain.extend(tokens)
        return chain

    def find(
        self, chain: KeyChain, *, load: bool = True, replay: bool = False, reuse_most: int | None = None
    ) -> Found | Wait:
        """What the tiers hold of a text, all of it readable now. Nothing is locked: use the answer before the
        next call of the cache.

        `load=False` finds only what the device has; `replay=True` allows to resume without a tail where
        computing the last tokens again is exact and cheaper (`reuse.replay_tokens` says how many).
        `reuse_most`: the caller needs the model's output from this position on, so nothing after it helps.
        """
        if self.config.force_miss:
            return find_nothing(self.tree, chain)
        if load and self.store:
            fetches, useful = self.store.fetches, pages_useful(chain, self.spec, reuse_most)
            if not fetches.ready(fetches.want(chain, useful, replay=replay)):
                return Wait(WaitFor.STORE)
        found = find(self.tree, self.spec, chain, load=load, replay=replay, most=reuse_most)
        return Wait(WaitFor.ARRIVING) if any(map(self._is_arriving, found.items)) else found

    def _is_arriving(self, item: Item) -> bool:
        """Its load was sent already, or it is off the device and not readable on the host yet."""
        if item.device is None:
            return not item.on_host
        return item.load is not None and item.load != self.flights.batch

    def prefetch(
        self, chain: KeyChain, *, replay: bool = False, reuse_most: int | None = None, wait_s: float = 0.0
    ) -> None:
        """This text will be looked for in about `wait_s`: ask the store for it now."""
        if self.store is not None and not self.config.force_miss:
            useful = pages_useful(chain, self.spec, reuse_most)
            self.store.fetches.want(chain, useful, replay=replay, wait_s=wait_s)

    def pull(self, chain: KeyChain, upto: int, *, tail: bool) -> None:
        """Have the first `upto` pages of a text read to the host, and the tail behind them: a peer says that
        it has them. Required: no request of this chain waits."""
        if self.store is not None:
            self.store.fetches.pull(chain, upto, tail=tail)

    def pulled(self, chain: KeyChain) -> bool:
        """Whether `pull` is over: what came is on the host."""
        return self.store is None or self.store.fetches.pulled(chain)

    def withdraw(self, chain: KeyChain) -> None:
        """A text that was looked for or announced is not needed any more."""
        if self.store is not None:
            self.store.fetches.forget(chain)

    def _use(self, found: Found, priority: int) -> Reuse:
        """What was found is going to be read: end its fetch."""
        reuse = found.reuse
        if self.store is not None:
            reuse = self.store.fetches.begun(found.chain, reuse)
        if found.page is not self.tree.root:
            self.tree.touch(found.page, found.tails, priority)
        if self.store is not None:  # a tail that was not worth a write may be worth it now
            self.store.writes.offer(tail for tail in found.tails if tail.on_host)
        for far in found.far:
            far.fetched = False
        return reuse

    def _count(self, chain: KeyChain, reuse: Reuse) -> None:
        """What a text reuses is readable. If it begins again it finds its own work, which is not counted."""
        if chain.counted:
            return
        chain.counted = True
        self.counters["tokens_asked"] += reuse.prompt_tokens
        self.counters["tokens_device"] += reuse.device_tokens
        self.counters["tokens_host"] += reuse.host_tokens
        self.counters["tokens_store"] += reuse.store_tokens
        self.counters["tokens_replayed"] += reuse.replay_tokens
        self._tokens_unpriced += reuse.cached_tokens
        if (seconds := self.compute.seconds(self._tokens_unpriced)) is not None:
            self.compute_saved_s += seconds
            self._tokens_unpriced = 0

    # Host pages that somebody fills

    def land(self, chain: KeyChain, first: int, pages: int, *, tails: Iterable[int] = ()) -> Transfer:
        """Reserve host pages that the caller writes: `pages` pages of a text from number `first` on, and the
        tails at these boundaries, in pages. The transfer says where. Left out are pages that the host has
        already or has no room for, and all of them if the text's pages before `first` are not cached.

        They become readable when the writer calls `landed`; until then nobody else touches them.
        """
        return self._arrive(chain, first, [0] * pages, dict.fromkeys(tails, 0))

    def landed(self, transfer: Transfer, error: TransferError | None = None) -> None:
        """A writer has finished. With an error nothing of the transfer becomes readable."""
        transfer.writers -= 1
        assert transfer.writers >= 0 and transfer in self.landings, "I3: a transfer ends once"
        transfer.error = transfer.error or error
        if transfer.writers:
            return
        self.landings.discard(transfer)
        for item, _, host in transfer.moves:
            self.tree.arrive_done(item, host, transfer.error is None)
        if self.store is not None and transfer.error is None:
            self.store.writes.offer(move.item for move in transfer.moves if not move.item.gone)
        self.places.settle()

    def _arrive(
        self, chain: KeyChain, first: int, places: Sequence[int], tails: Mapping[int, int]
    ) -> Transfer:
        """Reserve host pages for what comes from these places, as far as there is room."""
        tree, keys, transfer = self.tree, chain.keys[: first + len(places)], Transfer()
        self.landings.add(transfer)
        depth = tree.match(keys, len(keys)).found
        if self.config.force_miss or depth < first:
            return transfer
        anchor = tree.index[keys[depth - 1]] if depth else tree.root
        tree.lock(anchor)  # its places must not be taken for its own children
        texts = chain.texts or [b""] * len(keys)
        brought = []
        for n in range(first, len(keys)):
            if n >= depth or tree.index[keys[n]].host is None:
                host = self.places.take_host_by_force(1)
                if host is None:
                    break
                brought.append((keys[n], host, texts[n]))
        pages = tree.insert_arriving(anchor, brought, owner=chain.owner)
        transfer.moves += [
            Move(page, places[page.depth - 1 - first], host)
            for page, (_, host, _) in zip(pages, brought, strict=True)
        ]
        for boundary, place in sorted(tails.items()):
            self._arrive_tail(chain, boundary, place, transfer)
        tree.unlock(anchor)
        self.places.settle()
        return transfer

    def _arrive_tail(self, chain: KeyChain, boundary: int, place: int, transfer: Transfer) -> None:
        page = self.tree.index.get(chain.keys[boundary - 1])
        if page is None or (page.tail is not None and page.tail.host is not None):
            return
        self.tree.lock(page)
        host = self.places.take_host_by_force(self.spec.host_pages_per_tail)
        if host is not None:
            transfer.moves.append(Move(self.tree.insert_arriving_tail(page, host), place, host))
            self.tree.cap_tails(page)
        self.tree.unlock(page)

    # Moving

    def step(self) -> list[AnyEnd]:
        """Publish what ended; send what was queued since the last step, merged into one load and one save.
        Returns each request or transfer whose copies ended, once."""
        for flight in self.flights.landed():
            self._publish(flight)
        self.places.forget_promises()
        if self._stores():
            self._step_stores()
        self._trim()
        self.places.make_room_ahead()
        self.flights.send()
        if self.tree.events:
            self._notify()
        ended, self._ended = self._ended, []
        return ended

    @abstractmethod
    def _publish(self, landed: Flight) -> None:
        """Update the tree, and add to `_ended` what the caller waits for."""

    def wait(self, timeout_s: float) -> None:
        """Block until a transfer ends, if one is under way."""
        if not self._trimming and (self.busy or self.detaching):
            with self._landed:
                self._landed.wait_for(self._has_landed, timeout_s)

    def _has_landed(self) -> bool:
        return self.flights.has_landed or any(store.mover.landed for store in self._stores())

    @property
    def pending(self) -> bool:
        """Writes wait for a store that is off, or a store is being closed: call `step` now and then."""
        return bool(self._stores_left or (self.store and self.store.writes.backlog))

    @property
    def busy(self) -> bool:
        """Something is on its way, or is to be done by the next `step`."""
        return self._trimming or self.flights.busy or any(store.busy for store in self._stores())

    def flush(self) -> int:
        """Drop everything that no request holds and no transfer moves. Returns how many pages stay."""
        stay = self.tree.flush()
        self.places.settle()
        return stay

    def limit(self, owner: str, bytes_most: int | None) -> None:
        """An owner may cache so many bytes on device and host together; None: there is no limit. Above it,
        its own coldest pages and tails leave in the next steps, as soon as they are not in use."""
        self.tree.limit(owner, bytes_most)
        self._trimming = True

    def _trim(self) -> None:
        gone = self.tree.trim(TRIM_ITEMS) if self.tree.owners.all else 0
        self._trimming = gone == TRIM_ITEMS
        if gone:
            self.places.settle()

    def watch(self, observer: Observer | None) -> None:
        """Tell `observer` what each tier can read: at the next `step` everything, then each step's changes.
        Its errors are logged and counted, never raised."""
        self._observer = observer
        self.tree.events = readable(self.tree) if observer else None

    def _notify(self) -> None:
        assert self._observer is not None and self.tree.events is not None
        observer, events, self.tree.events = self._observer, self.tree.events, []
        try:
            observer(events)
        except Exception:  # noqa: BLE001 - an observer is not ours; its error must not stop the cache
            self.counters["observer_errors"] += 1
            log.exception("the observer failed on %d events", len(events))

    def _unlock(self, items: Iterable[Item]) -> None:
        for item in items:
            self.tree.unlock(item)

    # The store

    def attach(self, store: Store, *, clock: Clock = monotonic, workers: Workers | None = None) -> None:
        """Use a store from now on, and write to it what the host has. The cache closes the store."""
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
        self.store.writes.offer(item for item in self.tree.items() if item.on_host)

    def detach(self) -> None:
        """Go on without the store. It is closed when the operations under way have ended."""
        if self.store is not None:
            self.store.leave()
            self._stores_left.append(self.store)
            self.store = None

    @property
    def detaching(self) -> bool:
        """Whether a detached store is not closed yet."""
        return bool(self._stores_left)

    def _stores(self) -> list[StoreTier]:
        return self._stores_left if self.store is None else [*self._stores_left, self.store]

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
                self.store.writes.offer(item for item in returned if item.on_host)
        self.places.settle()

    def close(self, store_wait_s: float = 10.0) -> None:
        """Wait for the transfers, and up to `store_wait_s` for writes to the store; release everything."""
        until = monotonic() + store_wait_s
        while monotonic() < until and (self.store or self.detaching):
            if self.store is not None and not self.busy:
                self.detach()
            self.step()
            self.wait(0.01)
        self.detach()
        self.flights.close()
        if self.host is not None:
            self.host.close()

    # Looking

    def stats(self) -> audit.CacheStats:
        """Places and true bytes per tier and stream, bytes moved, and counters."""
        return audit.stats(self)

    def check(self) -> None:
        """Every invariant, counted again from nothing. For tests and for idle moments."""
        audit.check(self)

    def show(self) -> str:
        return show(self.tree)
