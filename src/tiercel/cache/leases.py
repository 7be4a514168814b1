"""Host copies that other servers read: found by the keys of their records, held for a lease.

    find ──► HERE: on the host, readable     COMING: being computed, or on its way to the host     ABSENT
    take ──► the host copies stay ── end ──► they may leave again

A lease holds places, not the tree: a page may leave the tree meanwhile, and its bytes stay where they are.
Who took a lease ends it in time: nothing here looks at the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tiercel.cache.places import Places
from tiercel.spec.cache_spec import CacheSpec
from tiercel.storage.peer.wire import Readiness
from tiercel.storage.record import KEY_BYTES, RecordKey, page_key_of
from tiercel.tree.node import Item
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import HostPageId, Kind, PageKey


@dataclass(frozen=True, eq=False)
class Lease:
    """Items whose host copies stay until the lease ends, and where each lies."""

    items: tuple[Item, ...]
    places: tuple[tuple[HostPageId, ...], ...]


@dataclass(eq=False)
class Leases:
    """The leases of one cache. The thread that drives the cache calls."""

    tree: PrefixTree
    spec: CacheSpec
    places: Places
    computes: Callable[[PageKey, Kind], bool]
    """Whether a running request is going to share this page, or the tail at its end."""

    def __post_init__(self) -> None:
        self._taken: set[Lease] = set()

    def look(self, key: RecordKey) -> Readiness:
        """Whether the host has this record, or will soon."""
        item = self._item(key)
        if item is not None and item.on_host:
            return Readiness.HERE
        if item is not None and item.save is not None:
            return Readiness.COMING
        ours = self._is_ours(key)
        return Readiness.COMING if ours and self.computes(_page_key(key), Kind(key[0])) else Readiness.ABSENT

    def take(self, keys: Sequence[RecordKey]) -> Lease:
        """Hold the host copies of these records. All of them are HERE."""
        items = tuple(item for item in map(self._item, keys) if item is not None)
        assert len(items) == len(keys), "I2: a lease is taken of what is here"
        for item in items:
            self.tree.read_start(item)
        lease = Lease(items, tuple(item.host or () for item in items))
        self._taken.add(lease)
        return lease

    def end(self, lease: Lease) -> None:
        """Nobody reads its copies any more."""
        assert lease in self._taken, "I3: a lease ends once"
        self._taken.discard(lease)
        for item in lease.items:
            self.tree.read_done(item)
        self.places.settle()

    def items(self) -> Iterator[Item]:
        return (item for lease in self._taken for item in lease.items)

    def __len__(self) -> int:
        return len(self._taken)

    def _is_ours(self, key: RecordKey) -> bool:
        return len(key) == KEY_BYTES and key[0] in set(Kind) and key[1:17] == self.spec.form

    def _item(self, key: RecordKey) -> Item | None:
        page = self.tree.index.get(_page_key(key)) if self._is_ours(key) else None
        return page.tail if page is not None and key[0] == Kind.TAIL else page


def _page_key(key: RecordKey) -> PageKey:
    return PageKey(page_key_of(key))
