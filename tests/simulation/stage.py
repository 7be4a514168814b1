"""What every simulated cache has: its copies, its store, its faults, and steps that are numbers.

Each step is one integer, the seed of what happens in it, so a run is a list of integers and shrinks by
leaving some out. Freed host pages are poisoned, so a byte read from one is never right by luck.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import Any

import tiercel.cache.fetch as fetch_module
from tests.simulation.bytes import POISON, Bytes, HostRows
from tests.simulation.copies import FaultyCopier, HeldCopies
from tests.simulation.stores import FAULTS, LIES, FalseStore
from tiercel.cache import Transfer
from tiercel.cache.leases import Lease
from tiercel.errors import TransferError
from tiercel.policy.evict import EvictPolicy, Used
from tiercel.spec import CacheSpec
from tiercel.storage.record import RecordKey, record_key
from tiercel.transfer.controller import LocalController
from tiercel.transfer.mover import Workers
from tiercel.transfer.plan import Direction
from tiercel.tree.keys import KeyChain
from tiercel.tree.node import Item, Page


class Indifferent(EvictPolicy):
    """A user's policy that makes no difference at all."""

    def rank(self, use: Used) -> int:
        return 0


class Stage:
    """A cache that numbers drive. `cache` and `spec` are made by those who inherit."""

    tight = False
    """Hardly anything fits in either tier, there is no store, and askers leave while their loads are late."""

    cache: Any
    spec: CacheSpec
    bytes: Bytes
    copies: dict[Direction, HeldCopies]
    ACTIONS: tuple[tuple[str, int], ...]

    def set_up(self, random: Random) -> None:
        """Called once there is a cache."""
        controller = self.cache.flights.controller
        self.copier = FaultyCopier(getattr(controller, "_copier", None))
        if isinstance(controller, LocalController):
            controller._copier = self.copier
        self._poison_what_is_freed()
        self.now_s = 0.0
        fetch_module.READ_BYTES_LEAST = 64  # so that a fetch of these few bytes is several reads
        self.late = {direction for direction in Direction if random.random() < 0.3}
        if self.tight:
            self.late = {Direction.LOAD}
        """Copies of these directions land long after they were sent, and out of step with the other's."""
        self.store_copies = {name: HeldCopies() for name in ("ask", "read", "write")}
        self.store: FalseStore | None = None
        self.store_counters: Counter[str] = Counter()
        if random.random() < 0.7 and not self.tight:
            self._attach(random)
        self.events = 0
        self.observer_fails = False
        self.host = HostRows(self.cache.host)
        self.writing: list[Transfer] = []
        """Transfers whose host pages are still to be written."""
        self.leases: list[tuple[Lease, list[memoryview], list[bytes]]] = []
        """What peers read, and the bytes that they must find there."""
        self.seen: Counter[str] = Counter()
        self.cache.watch(self._observe)
        self.log: list[str] = []

    def limit_owners(self, setup: int) -> None:
        """Some caches limit what one owner may keep, to nothing, a little or much of the device."""
        random = Random(f"limits of {setup}")
        if random.random() < 0.5:
            most = random.choice([0, 2, 5, 20]) * self.spec.place_bytes
            self.cache.limit("a", most)

    def check_limits(self) -> None:
        """After a step an owner has no more than it may, unless what it has is in use."""
        for owner in self.cache.tree.owners.over():
            assert not self.cache.tree.oracle.may_go(owner), "an owner keeps more than it may"

    def chain_of(self, tokens: list[int], namespace: tuple[str, ...]) -> KeyChain:
        """The first word of a namespace is its owner."""
        return self.cache.chain(tokens, namespace, namespace[0] if namespace else "")

    def _land(self, chain: KeyChain, random: Random) -> Transfer:
        """A peer is going to write host pages; `bytes.texts` knows the text of every key."""
        pages = random.randint(0, len(chain.keys))
        first = random.choice([0, random.randint(0, pages)])
        tails = [n for n in range(1, pages + 1) if random.random() < 0.5] if self.spec.tail_streams else []
        transfer = self.cache.land(chain, first, pages - first, tails=tails)
        self.writing.append(transfer)
        self.seen["landings"] += bool(transfer.moves)
        return transfer

    def _do_landed(self, random: Random) -> None:
        """The engine, or the peer, has written its part of the host pages, or has failed to."""
        if not self.writing:
            return
        transfer = self.writing.pop(random.randrange(len(self.writing)))
        failed = random.random() < 0.1
        for item, _, hosts in transfer.moves:
            tail = not isinstance(item, Page)
            text = self.bytes.texts[item.page.key if tail else item.key]
            for row, data in self.bytes.expected(text, tail):
                if not self.copier_writes(transfer, row):
                    self.host.write(row, hosts, bytes(len(data)) if failed else bytes(data), tail=tail)
        self.cache.landed(transfer, TransferError("the simulation's peer") if failed else None)

    def _lease(self, random: Random) -> None:
        """A peer takes a lease on some of what the host has; or one of them ends."""
        if self.leases and random.random() < 0.4:
            lease, *_ = self.leases.pop(random.randrange(len(self.leases)))
            self.cache.leases.end(lease)
            return
        here = [item for item in self.cache.tree.items() if item.on_host]
        items = random.sample(here, min(len(here), random.randint(1, 4)))
        if items:
            lease = self.cache.leases.take([self._record_key(item) for item in items])
            assert list(lease.items) == items
            views = self._leased(lease)
            self.leases.append((lease, views, [*map(bytes, views)]))
            self.seen["leases"] = self.seen.get("leases", 0) + 1

    def _record_key(self, item: Item) -> RecordKey:
        page = item if isinstance(item, Page) else item.page
        return record_key(item.kind, self.spec.grains(item.kind)[-1].form, page.key)

    def _leased(self, lease: Lease) -> list[memoryview]:
        """Where the peer reads."""
        sizes = [
            self.spec.page_bytes if isinstance(item, Page) else self.spec.tail_bytes for item in lease.items
        ]
        pairs = zip(lease.places, sizes, strict=True)
        parts = [self.cache.host.views(places, [size])[0] for places, size in pairs]
        return [view for part in parts for view in part]

    def copier_writes(self, transfer: Transfer, row: tuple[str, int]) -> bool:
        """Whether a copy brings this row of a transfer."""
        return False

    def check(self) -> None:
        raise NotImplementedError

    def wind_down(self) -> None:
        raise NotImplementedError

    def calm_down(self) -> None:
        """No fault happens any more, and nobody writes host pages."""
        self.observer_fails = False
        if self.store is not None:
            self.store.mood = None
        if self.cache.host is not None:
            self.copier.copies_until_fault = None
        while self.writing:
            self._do_landed(Random(0))
        while self.leases:
            self.cache.leases.end(self.leases.pop()[0])

    def _poison_what_is_freed(self) -> None:
        def release_host(ids, real=self.cache.host_pages.release):
            for page_id in ids:
                for view in self.cache.host.views([page_id], [self.spec.place_bytes])[0]:
                    view[:] = bytes([POISON]) * len(view)
            real(ids)

        self.cache.host_pages.release = release_host

    def _attach(self, random: Random) -> None:
        if self.cache.host is None or self.cache.store is not None:
            return
        if self.store is None or self.store._closed:
            self.store = FalseStore(Random(random.getrandbits(32)))
        workers = Workers(*self.store_copies.values(), retry_after_s=(0.0,))
        self.cache.attach(self.store, clock=lambda: self.now_s, workers=workers)

    def _observe(self, event: object) -> None:
        self.events += 1
        if self.observer_fails:
            raise RuntimeError("the simulation made the observer fail")

    def step(self, number: int) -> None:
        random = Random(number)
        names, weights = zip(*self.ACTIONS, strict=True)
        (name,) = random.choices(names, weights)
        self.log.append(f"{number}: {name}")
        getattr(self, f"_do_{name}")(random)
        beside = Random(f"lease {number}")  # what peers do changes nothing of what is chosen otherwise
        if beside.random() < 0.05:
            self._lease(beside)
        self.check()
        for _, views, before in self.leases:
            assert views == before, "I3: somebody wrote where a peer reads"

    def run(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.step(number)
        self.wind_down()

    def _do_store_fault(self, random: Random) -> None:
        if self.store is not None:
            self.store.mood = random.choice([*LIES, *FAULTS])
            self.store.times = random.choice([1, 1, 2, 5, 20])

    def _do_store_change(self, random: Random) -> None:
        what = random.choice(["vanish", "vanish", "detach", "attach", "attach"])
        if what == "vanish" and self.store is not None:
            self.store._values.clear()
        elif what == "detach" and self.cache.store is not None:
            self._keep_counters()
            self.cache.detach()
        elif what == "attach" and not (self.cache.stores.detaching or self.tight):
            self._attach(random)

    def _keep_counters(self) -> None:
        if self.cache.store is not None:
            self.store_counters.update(self.cache.store.counters)
            self.store_counters.update({"flaws": sum(self.cache.store.mover.flaws.values())})

    def _do_copy(self, random: Random) -> None:
        """A copy ends, any of those under way."""
        for direction, copies in random.sample(list(self.copies.items()), 2):
            if copies.held and (direction not in self.late or random.random() < 0.08):
                copies.run(random.randrange(len(copies.held)))
                return

    def _do_fault(self, random: Random) -> None:
        """The next copy fails part way, or the observer fails for a while."""
        self.observer_fails = random.random() < 0.3
        if self.cache.host is not None and random.random() < 0.7:
            self.copier.copies_until_fault = random.randint(0, 6)

    def _do_flush(self, random: Random) -> None:
        if random.random() < (0.1 if self.cache.store is None else 0.8):
            self.cache.flush()

    def _run_all(self) -> None:
        for copies in (*self.copies.values(), *self.store_copies.values()):
            copies.shutdown()

    def fetching(self) -> list[KeyChain]:
        return list(self.cache.store.fetches.of) if self.cache.store else []

    def _store_works(self, random: Random) -> None:
        """A worker of the store ends something, perhaps all of them do; or speeds are measured."""
        if self.cache.store is not None and random.random() < 0.02:
            self.cache.compute.observe(random.choice([10, 1000, 100_000]), 1.0)
            self.cache.store.fetches.costs.read.observe(random.choice([1, 1000, 10**6]), 1.0)
        if self.store is not None and random.random() < 0.15:
            self.store.mood = None
        if random.random() < 0.3:  # a quiet moment: all of it
            prompt = [copies for direction, copies in self.copies.items() if direction not in self.late]
            for copies in (*prompt, *self.store_copies.values()):
                copies.shutdown()
            self._do_step(random)
        for copies in random.sample(list(self.store_copies.values()), 3):
            if copies.held:
                copies.run(random.randrange(len(copies.held)))
                return

    def _do_step(self, random: Random) -> None:
        raise NotImplementedError

    def _pass_time(self, random: Random) -> None:
        self.now_s += random.choice([0.0, 0.001, 0.001, 0.01, 0.01, 0.01, 0.1, 0.1, 0.1, 20.0])
