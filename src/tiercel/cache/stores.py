"""The store that a cache uses, and those that it has left and that are not closed yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Condition
from time import monotonic

from tiercel.cache.places import Places
from tiercel.cache.store_tier import StoreTier
from tiercel.config import CacheConfig
from tiercel.errors import ConfigError
from tiercel.memory.buffers import HostMemory
from tiercel.policy.fetch import Rate
from tiercel.spec.cache_spec import CacheSpec
from tiercel.storage.base import Store
from tiercel.transfer.mover import Mover, StoreMover, Workers
from tiercel.tree.node import Item
from tiercel.tree.prefix_tree import PrefixTree

Clock = Callable[[], float]


@dataclass(eq=False)
class Stores:
    """At most one attached store. Only the thread that drives the cache calls it, except for `mover_for`."""

    spec: CacheSpec
    config: CacheConfig
    tree: PrefixTree
    places: Places
    compute: Rate
    host: HostMemory | None
    landed: Condition
    """Notified when an operation ends."""
    attached: StoreTier | None = None
    left: list[StoreTier] = field(default_factory=list)

    def attach(self, store: Store, *, clock: Clock = monotonic, workers: Workers | None = None) -> None:
        """Use a store from now on, and write to it what the host has. The cache closes the store."""
        self.attach_mover(self.mover_for(store, clock=clock, workers=workers), clock)

    def mover_for(
        self, store: Store, *, clock: Clock = monotonic, workers: Workers | None = None
    ) -> StoreMover:
        """The part of `attach` that may take time (stores register host memory), for any thread."""
        if self.host is None:
            raise ConfigError("store", type(store).__name__, "needs a host tier to read into (host_bytes)")
        return StoreMover(store, self.spec, self.host, landed=self.landed, clock=clock, workers=workers)

    def attach_mover(self, mover: Mover, clock: Clock = monotonic) -> None:
        """The part of `attach` that takes no time."""
        if self.attached is not None:
            raise ConfigError("store", None, "one is attached already")
        parts = self.tree, self.spec, self.config, self.places, self.compute
        self.attached = StoreTier(mover, *parts, clock)
        self.offer(self.tree.items())

    def detach(self) -> None:
        """Go on without the store. It is closed when the operations under way have ended."""
        if self.attached is not None:
            self.attached.leave()
            self.left.append(self.attached)
            self.attached = None

    def all(self) -> list[StoreTier]:
        return self.left if self.attached is None else [*self.left, self.attached]

    def offer(self, items: Iterable[Item]) -> None:
        """Have the store write those items that are readable on the host."""
        if self.attached is not None:
            self.attached.writes.offer(item for item in items if item.on_host and not item.gone)

    def step(self) -> None:
        """Take in what ended, and close stores that were left."""
        if not self.all():
            return
        if self.attached is not None:
            self.attached.step()
        for left in list(self.left):
            left.step()
            if not left.busy and left.close():
                left.step()
                self.left.remove(left)
            returned, left.returned = left.returned, []
            self.offer(returned)
        self.places.settle()

    @property
    def busy(self) -> bool:
        return any(store.busy for store in self.all())

    @property
    def has_landed(self) -> bool:
        return any(store.mover.landed for store in self.all())

    @property
    def detaching(self) -> bool:
        """Whether a store that was left is not closed yet."""
        return bool(self.left)

    @property
    def pending(self) -> bool:
        """Writes wait for a store, it fails and is to be tried again, or a store is being closed: call `step`
        now and then."""
        attached = self.attached
        return bool(self.left or (attached and (attached.writes.backlog or attached.tries_again)))
