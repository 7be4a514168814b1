"""The core: keys, tree, places, copies, store. What every cache has, whoever owns the device memory.

    Core ──┬── HostCache      + loads and saves between the host and places that another engine names
           └── TieredCache    + a device pool of its own, and requests

A core is given its memories and the controller that copies between them (`cache.memories`). Copies run
elsewhere; the owner of the core publishes those that have landed, then calls `step`. Observers are called in
`step` too: between two steps nothing changes. One thread drives a cache.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Condition
from time import monotonic

from tiercel.cache import audit
from tiercel.cache.flights import Flights
from tiercel.cache.landings import Landings
from tiercel.cache.leases import Leases
from tiercel.cache.memories import Memories
from tiercel.cache.places import Places
from tiercel.cache.request import Found, Wait, WaitFor, find, find_nothing, pages_useful
from tiercel.cache.stores import Stores
from tiercel.config import CacheConfig
from tiercel.errors import ConfigError
from tiercel.policy.evict import make_evict_policy
from tiercel.policy.fetch import Rate
from tiercel.policy.resume import Reuse
from tiercel.policy.save import make_save_policy
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.identity import Identity
from tiercel.transfer.plan import Direction
from tiercel.tree.check import readable, show
from tiercel.tree.keys import KeyChain, Tokens
from tiercel.tree.node import Cleared, Event, Item
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import Kind, Namespace, PageKey

log = logging.getLogger(__name__)

Order = Callable[[int], Sequence[int]]
"""For a number of places: the order in which a pool first gives them out."""
Observer = Callable[[Sequence[Event | Cleared]], None]

TRIM_ITEMS = 64
"""How many pages and tails of owners above their limits leave in a step: about a millisecond."""

COUNTED = (
    *("requests", "requests_finished", "requests_preempted", "requests_aborted", "requests_failed"),
    *("tokens_asked", "tokens_device", "tokens_host", "tokens_store", "tokens_replayed"),
    "observer_errors",
    *("loads", "loads_failed", "pages_loaded", "tails_loaded"),
    *("saves", "saves_failed", "pages_saved", "tails_saved"),
    *("pages_sparse", "pages_back"),
)
"""What a cache counts: all counters are there from the start."""


def nobody_computes(key: PageKey, kind: Kind) -> bool:  # noqa: ARG001
    return False


class Core:
    """What the tiers hold of each text, and how it is found, fetched and kept.

    `device_places`: places in a device pool of the cache's own. `computes`: whether a
    running request is going to share this page, or the tail at its end. Without an `identity` the model's
    name identifies the cached numbers.
    """

    def __init__(
        self,
        spec: CacheSpec,
        config: CacheConfig,
        memories: Memories,
        *,
        device_places: int = 0,
        identity: Identity | None = None,
        pool_order: Order | None = None,
        computes: Callable[[PageKey, Kind], bool] = nobody_computes,
    ) -> None:
        if not (memories.host_pages or device_places):
            raise ConfigError("host_bytes", 0, "is all the memory that a cache without a device pool has")
        self.spec, self.config = spec, config
        self.identity = identity or Identity(spec.model)
        self.device_spec = memories.device.spec if memories.device is not None else spec
        """What the device's pools hold: all streams, or some of them. (For ranks: all of them together.)"""
        self.tree = PrefixTree(
            evict=make_evict_policy(config.evict),
            pages_per_window=spec.pages_per_window,
            tails_per_path=config.tails_per_path,
            item_bytes=audit.item_bytes(self.device_spec, spec),
            replay_pages=None if spec.replay_tokens is None else spec.replay_tokens // spec.page_tokens + 1,
            tail_places=spec.places_per_tail,
            pools=len(spec.pools),
        )
        self.host = memories.host
        self.controller = memories.controller
        self._landed = self.controller.tickets.landed if self.controller else Condition()
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.flights = Flights(self.controller, self.counters, spec, config.save_step_bytes)
        queue_saves = partial(self.flights.queue, Direction.SAVE)
        counts = device_places, memories.host_pages
        self.places = Places(self.tree, spec, counts, pool_order or range, queue_saves)
        self.leases = Leases(self.tree, spec, self.places, computes)
        """Host copies that other servers read."""
        self.saves_after = make_save_policy(config.save).early_hits
        """After how many finds a page is copied to the host; None: when it leaves the device."""
        self.compute = Rate()
        """Prompt tokens computed per second: what a fetch is compared with."""
        self.compute_saved_s = 0.0
        """How long computing what was reused would have taken, at the speed of that moment."""
        self._tokens_unpriced = 0
        """Tokens that were reused before any speed was known."""
        parts = spec, config, self.tree, self.places, self.compute, self.host
        self.stores = Stores(*parts, self._landed)
        self.landings = Landings(self.places, self.stores)
        self._trimming = False
        """Whether owners may still be above their limits: one step evicts only a part."""
        self._observer: Observer | None = None

    # Finding

    def chain(
        self,
        tokens: Tokens = (),
        namespace: Namespace = (),
        owner: str = "",
        *,
        keys: Sequence[PageKey] | None = None,
    ) -> KeyChain:
        """The keys of a text: made once, kept while the request waits, extended as the text grows. `owner`:
        whose pages they will be. Required: owners share no namespace. `keys`: names that the caller has for
        the pages of the text and of what it will be continued with; then tokens are only counted."""
        page_tokens = self.spec.page_tokens
        if keys is not None:
            chain = KeyChain.of_keys(keys, page_tokens, owner=owner)
        else:
            keep = self._observer is not None
            chain = KeyChain(self.identity.digest, namespace, page_tokens, keep_tokens=keep, owner=owner)
        chain.extend(tokens)
        return chain

    def find(
        self, chain: KeyChain, *, load: bool = True, replay: bool = False, reuse_most: int | None = None
    ) -> Found | Wait:
        """What the tiers hold of a text, all of it readable now. Nothing is locked: use the result before the
        next call of the cache.

        `load=False` finds only what the device has; `replay=True` allows to resume without a tail where
        computing the last tokens again is exact and cheaper (`reuse.replay_tokens` says how many).
        `reuse_most`: the caller needs the model's output from this position on, so nothing after it helps.
        """
        if self.config.force_miss:
            return find_nothing(self.tree, chain)
        if load and (store := self.stores.attached):
            useful = pages_useful(chain, self.spec, reuse_most)
            if not store.fetches.ready(store.fetches.want(chain, useful, replay=replay)):
                return Wait(WaitFor.STORE)
        found = find(self.tree, self.spec, chain, load=load, replay=replay, most=reuse_most)
        return Wait(WaitFor.ARRIVING) if any(map(self._is_arriving, found.items)) else found

    def _is_arriving(self, item: Item) -> bool:
        """Whether its load was sent, or it is off the device and not readable on the host yet."""
        if item.device is None:
            return not item.on_host
        return item.load is not None and item.load != self.flights.batch

    def prefetch(
        self, chain: KeyChain, *, replay: bool = False, reuse_most: int | None = None, wait_s: float = 0.0
    ) -> None:
        """This text will be looked for in about `wait_s`: ask the store for it now."""
        if (store := self.stores.attached) and not self.config.force_miss:
            useful = pages_useful(chain, self.spec, reuse_most)
            store.fetches.want(chain, useful, replay=replay, wait_s=wait_s)

    def pull(self, chain: KeyChain, upto: int, *, tail: bool) -> None:
        """Have a text's first `upto` pages and the tail behind them read to the host: a peer says that it has
        them. Required: no request of this chain waits."""
        if store := self.stores.attached:
            store.fetches.pull(chain, upto, tail=tail)

    def pulled(self, chain: KeyChain) -> bool:
        """Whether `pull` is over: what came is on the host."""
        store = self.stores.attached
        return store is None or store.fetches.pulled(chain)

    def withdraw(self, chain: KeyChain) -> None:
        """A text that was looked for or announced is not needed any more."""
        if store := self.stores.attached:
            store.fetches.forget(chain)

    def use(self, found: Found, priority: int) -> Reuse:
        """What was found is going to be read: end its fetch."""
        reuse = found.reuse
        if store := self.stores.attached:
            reuse = store.fetches.begun(found.chain, reuse)
        if found.page is not self.tree.root:
            self.tree.touch(found.page, found.tails, priority)
        self.stores.offer(found.tails)  # a tail that was not worth a write may be worth it now
        for far in found.far:
            far.fetched = False
        return reuse

    def count(self, chain: KeyChain, reuse: Reuse) -> None:
        """Count what a text reuses. A text that begins again finds its own work, which is not counted."""
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

    # Moving

    def save_early(self, items: Iterable[Item], *, by_force: bool = False) -> None:
        """Copies into host memory that is free, or holds what device and store have; by force, also into
        memory that holds older items (`policy.save`)."""
        if not self.places.host.capacity:
            return
        make_room = self.tree.evict_host_oldest if by_force else self.tree.evict_spare
        for item in items:
            if item.host is None and item.load is None and (by_force or self.tree.is_saved(item)):
                count = self.spec.places_of(item.kind)
                while (host := self.places.take_host(count)) is None:
                    if not make_room():
                        return
                self.tree.save_start(item, host)

    def step(self) -> None:
        """Take in the results of the stores; send what was queued since the last step, merged into one load
        and one save; tell the observer. What has landed was published before."""
        self.places.forget_promises()
        self.stores.step()
        self.trim()
        self.flights.send()
        if self.tree.copies.events:
            self._notify()

    def wait(self, timeout_s: float) -> None:
        """Block until a transfer ends, if one is under way."""
        if not self._trimming and (self.busy or self.stores.detaching):
            with self._landed:
                self._landed.wait_for(self._has_landed, timeout_s)

    @property
    def transfer_ended(self) -> Condition:
        """Notified when a transfer ends. Others may notify it too, to wake `wait_until`."""
        return self._landed

    def wait_until(self, woken: Callable[[], bool], timeout_s: float, *, store_s: float) -> None:
        """`wait`, or until `woken` holds; `store_s`: the longest wait if only a store is still working."""
        if not self._trimming and (self.busy or self.stores.detaching):
            longest_s = timeout_s if self.flights.busy or self.stores.detaching else store_s
            with self._landed:
                self._landed.wait_for(lambda: woken() or self._has_landed(), longest_s)

    def owners(self) -> list[str]:
        """Owners that have something in the cache, or a limit."""
        return list(self.tree.owners.all)

    def _has_landed(self) -> bool:
        return self.flights.has_landed or self.stores.has_landed

    @property
    def busy(self) -> bool:
        """Something is on its way, or is to be done by the next `step`."""
        return self._trimming or self.flights.busy or self.stores.busy

    def flush(self) -> int:
        """Drop everything that no request holds and no transfer moves. Returns how many pages stay."""
        stay = self.tree.flush()
        self.places.settle()
        return stay

    def limit(self, owner: str, bytes_most: int | None) -> None:
        """`bytes_most`: what an owner may cache on device and host together; None: there is no limit. Above
        it, its own coldest pages and tails leave in the next steps, as soon as they are not in use."""
        self.tree.limit(owner, bytes_most)
        self._trimming = True

    def trim(self) -> None:
        """Evict part of what owners have above their limits."""
        gone = self.tree.trim(TRIM_ITEMS) if self.tree.owners.all else 0
        self._trimming = gone == TRIM_ITEMS
        if gone:
            self.places.settle()

    def watch(self, observer: Observer | None) -> None:
        """Tell `observer` what each tier can read: at the next `step` everything, then each step's changes.
        Its errors are logged and counted, never raised."""
        self._observer = observer
        self.tree.copies.events = readable(self.tree) if observer else None

    def _notify(self) -> None:
        assert self._observer is not None and self.tree.copies.events is not None
        observer, events, self.tree.copies.events = self._observer, self.tree.copies.events, []
        try:
            observer(events)
        except Exception:  # noqa: BLE001 - an observer is not ours; its error must not stop the cache
            self.counters["observer_errors"] += 1
            log.exception("the observer failed on %d events", len(events))

    def lock(self, items: Iterable[Item]) -> None:
        for item in items:
            self.tree.lock(item)

    def unlock(self, items: Iterable[Item]) -> None:
        for item in items:
            self.tree.unlock(item)

    def close(self, step: Callable[[], object], store_wait_s: float) -> None:
        """Wait for the transfers, and up to `store_wait_s` for writes to the store; release everything.
        `step`: the step of the whole cache."""
        until = monotonic() + store_wait_s
        while monotonic() < until and self.stores.all():
            if not self.busy:
                self.stores.detach()
            step()
            self.wait(0.01)
        self.stores.detach()
        self.flights.close()
        if self.host is not None:
            self.host.close()

    # Looking

    def stats(self) -> audit.CacheStats:
        """Places and true bytes per tier and stream, bytes moved, and counters."""
        return audit.stats(self)

    def check(self) -> None:
        """Every invariant of tree, host and store, counted again from nothing. For tests and idle moments."""
        audit.check(self)

    def show(self) -> str:
        return show(self.tree)
