"""Host copies that other servers read: found by the keys of their records, held for a lease. All records of a
page are on the host, or none.

    find ──► HERE: on the host, readable     COMING: being computed, or on its way to the host     ABSENT
    take ──► the host copies stay ── end ──► they may leave again

A lease holds places, not the tree: a page may leave the tree meanwhile, and its bytes stay where they are.
The caller that took a lease ends it in time: nothing here looks at the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tiercel.cache.places import Places
from tiercel.spec.cache_spec import CacheSpec
from tiercel.storage.peer.wire import Readiness
from tiercel.storage.record import RecordKey, page_key_of, record_key, start_of
from tiercel.tree.node import Item
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import HostPageId, Kind, PageKey


@dataclass(frozen=True, eq=False)
class Lease:
    """Items whose host copies stay until the lease ends, and the place of each."""

    items: tuple[Item, ...]
    places: tuple[tuple[HostPageId, ...], ...]


@dataclass(eq=False)
class Leases:
    """The leases of one cache. Only the thread that drives the cache calls it."""

    tree: PrefixTree
    spec: CacheSpec
    places: Places
    computes: Callable[[PageKey, Kind], bool]
    """Whether a running request is going to share this page, or the tail at its end."""

    def __post_init__(self) -> None:
        self._taken: set[Lease] = set()
        grains = [(kind, grain) for kind in Kind for grain in self.spec.grains(kind)]
        self.forms = [grain.form for _, grain in grains]
        """The forms of its records: keys of another form are not there."""
        self._kinds = {bytes(record_key(kind, grain.form, b"")): kind for kind, grain in grains}

    def look(self, keys: Sequence[RecordKey]) -> list[Readiness]:
        """Whether the host has each of these records, or will soon."""
        known: dict[tuple[Kind | None, PageKey], Readiness] = {}
        names = [(self._kind(key), PageKey(page_key_of(key))) for key in keys]
        for name in names:
            if name not in known:
                known[name] = self._look(*name)
        return [known[name] for name in names]

    def _look(self, kind: Kind | None, key: PageKey) -> Readiness:
        item = self._item(kind, key)
        if item is not None and item.on_host:
            return Readiness.HERE
        coming = (item is not None and item.save is not None) or (kind and self.computes(key, kind))
        return Readiness.COMING if coming else Readiness.ABSENT

    def take(self, keys: Sequence[RecordKey]) -> Lease:
        """Hold the host copies of these records. Required: all of them are HERE."""
        found = (self._item(self._kind(key), PageKey(page_key_of(key))) for key in keys)
        items = tuple(item for item in found if item is not None)
        assert len(items) == len(keys), "I2: a lease is taken of what is here"
        for item in items:
            self.tree.read_start(item)
        lease = Lease(items, tuple(item.host or () for item in items))
        self._taken.add(lease)
        return lease

    def end(self, lease: Lease) -> None:
        """Let go of the copies: they are not read any more."""
        assert lease in self._taken, "I3: a lease ends once"
        self._taken.discard(lease)
        for item in lease.items:
            self.tree.read_done(item)
        self.places.settle()

    def items(self) -> Iterator[Item]:
        return (item for lease in self._taken for item in lease.items)

    def __len__(self) -> int:
        return len(self._taken)

    def _kind(self, key: RecordKey) -> Kind | None:
        """The kind of item that this is a record of. None: its form is not ours."""
        return self._kinds.get(start_of(key))

    def _item(self, kind: Kind | None, key: PageKey) -> Item | None:
        page = self.tree.index.get(key) if kind is not None else None
        return page.tail if page is not None and kind is Kind.TAIL else page
