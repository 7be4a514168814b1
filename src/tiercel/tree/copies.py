"""The copies of pages and tails: where they are, how they move between tiers and how they leave.

The life of a device place, and who gives it back:

    insert ──────────────► readable ── evict, copy on the host ─────────► given back at once
    load_start ─ load_done ─►│
                             └────── evict, no copy yet: save ─ save_done ► given back when the copy ended

A host copy arrives from a device place of ours (`save_start`) or from elsewhere (`arrive_start`: another
engine's memory, a peer). It is readable when all of it is there, and not before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from weakref import proxy

from tiercel.policy.evict import EvictPolicy, Value
from tiercel.tree.candidates import Doubles
from tiercel.tree.index import Index
from tiercel.tree.node import (
    FOREIGN,
    Actions,
    Cleared,
    Event,
    Item,
    Move,
    Page,
    Tail,
    depth_of,
    event,
    ids_of,
    inherit,
    may_leave_device,
    may_leave_host,
    parent_of,
)
from tiercel.tree.owners import ItemBytes, Owners, tail_in_pages
from tiercel.tree.valued import Worth, make_order
from tiercel.types import DevicePageId, HostPageId, Kind, PageKey, Tier

STORE_LEAST = 0.01
"""The least worth of a tail that is written to a store. A new tail at the end of a text is worth 0.2 to 0.9.
So only tails of classes that are almost never found are left out: 5 to 10 % of the bytes. (With 0.1 it is 18
%, and 1 % of hits is lost where the store has room for everything: docs/log.md.)"""


class Copies:
    """Pages and tails in two tiers. All counts are in pages, all times are ticks of its own clock.

    Every move has a start and an end, and between them its places stay where they are.
    """

    def __init__(
        self,
        evict: EvictPolicy,
        pages_per_window: int,
        item_bytes: ItemBytes | None,
        replay_pages: int | None,
        tail_places: int,
        pools: int,
    ) -> None:
        self.places = {Kind.PAGE: 1, Kind.TAIL: tail_places}
        """Places of one item on the host."""
        self.pools = pools
        """How many pools the device has: so many places has a page there, if it is whole."""
        self.root = Page(None, 0, 0, PageKey(b""), None, 0)
        self.index = Index()
        self.actions = Actions()
        self.events: list[Event | Cleared] | None = None
        self.doubles = Doubles()
        self.worth: Worth | None = None
        """What items are worth; None: the policy looks at their use alone."""
        if isinstance(evict, Value) and pages_per_window:
            tail_pages = tail_in_pages(item_bytes or {})
            copies = proxy(self)  # pages know their owner and its order: they must not keep this alive
            self.worth = Worth(pages_per_window, tail_pages, replay_pages, lambda: copies.clock)
        ordered = partial(make_order, evict, self.worth)
        self.device = ordered(may_leave_device, "in_device")
        self.host = ordered(may_leave_host, "in_host")
        self.owners = Owners(ordered, item_bytes)
        self.on_device: dict[Kind, int] = dict.fromkeys(Kind, 0)
        self.on_host: dict[Kind, int] = dict.fromkeys(Kind, 0)
        """What each tier can read, counted as it changes: no call walks the tree for it."""
        self.sparse = 0
        """How many of the pages on the device are sparse."""
        self.evicted: Counter[tuple[Tier, Kind, str]] = Counter()
        """How many items left a tier, and why: `room`, an owner's `limit`, or other tails of its `path`."""
        self._why: str | None = "room"
        """Why something leaves now; None: that is no eviction."""
        self.rank: Callable[[Any], Any] = self.worth or evict.rank
        self.clock = 0
        self._offers = 0
        self.saving: dict[Item, None] = {}
        """Saves under way, the oldest first."""

    def items(self) -> Iterator[Item]:
        """Everything cached, parents before their children."""
        for page in sorted(self.index.values(), key=depth_of):
            yield page
            if page.tail is not None:
                yield page.tail

    @property
    def changes(self) -> tuple[int, int]:
        """Two counters: items used or added, and items that may have become free to leave."""
        return self.clock, self._offers

    def lock(self, item: Item) -> None:
        item.lock += 1

    def unlock(self, item: Item) -> None:
        assert item.lock > 0, "I3: more unlocks than locks"
        item.lock -= 1
        if item.lock == 0:
            self.offer(item)

    # Moving

    def load_start(self, item: Item, device: Any, batch: int) -> Move:
        """A load is going to fill `device` from the host copy."""
        assert item.device is None and item.on_host and item.host, "I2: a load reads a readable copy"
        item.device, item.load = device, batch
        parent = parent_of(item) if isinstance(item, Page) else item.page
        assert parent is self.root or parent.device is not None, "I6: the device holds a prefix"
        parent.children_device += 1
        return Move(item, device, item.host)

    def load_done(self, move: Move, ok: bool) -> None:
        """The load ended. If it failed, the host copy stays as it was. Children come before their parents."""
        item = move.item
        if not ok:
            self.off_device(item)
        item.load = None
        if ok:
            self.add_double(item)
            self.sparse += not self.is_whole(item)
            self.tell(True, Tier.DEVICE, item)
        self.offer(item)

    def save_start(self, item: Item, host: tuple[HostPageId, ...]) -> None:
        """A save is going to fill `host` from the device copy, whose place it holds until it has ended."""
        assert item.on_device and item.host is None
        item.host, item.save = host, item.device
        self.saving[item] = None
        self.actions.saves.append(Move(item, item.device, host))

    def save_done(self, move: Move, ok: bool) -> None:
        """The save ended. What was evicted meanwhile gives its place back now, and is lost if it failed."""
        del self.saving[move.item]
        if move.item.device != move.device:
            self.actions.device += ids_of(move.device)
        self.arrive_done(move.item, move.host, ok)

    def arrive_start(self, item: Item, host: tuple[HostPageId, ...]) -> None:
        """Another engine or a peer is going to fill `host`."""
        assert item.host is None and not item.gone, "I1: a host copy is written once"
        item.host, item.save = host, FOREIGN

    def arrive_done(self, item: Item, host: tuple[HostPageId, ...], ok: bool) -> None:
        """`host` is not written any more. If it is not whole, what no other tier holds is lost."""
        if item.gone:
            self.actions.host.extend(host)
            return
        item.save = None
        if ok:
            self.tell(True, Tier.HOST, item)
            self.add_double(item)
        else:
            item.host = None
            self.actions.host.extend(host)
            if item.device is None:
                self.drop(item)
                return
        if item.device is not None or not item.children:  # a page with others after it stays on the host
            self.offer(item)

    def read_start(self, item: Item) -> None:
        """A store or a peer reads the host copy: it stays until all of them have ended."""
        assert item.on_host and not item.gone, "I2: stores and peers are given a readable copy"
        item.readers += 1
        self.doubles.discard(item)

    def read_done(self, item: Item) -> None:
        assert item.readers > 0, "I3: more reads ended than began"
        item.readers -= 1
        if item.readers:
            return
        if item.gone:
            self._give_host(item)
            return
        self.add_double(item)
        self.offer(item)

    def mark_stored(self, item: Item, stored: bool = True) -> None:
        """Note whether the store has an item, as far as is known."""
        if item.stored != stored:
            item.stored = stored
            if item in self.doubles:
                self.doubles.add(item)
            if stored:
                self.tell(True, Tier.STORE, item)

    def worth_keeping(self, item: Item) -> bool:
        """Whether a store should have an item. A tail that hardly any text will resume from is not worth its
        bytes; a request that finds the tail makes it worth more."""
        if self.worth is None or isinstance(item, Page):
            return True
        return self.worth.young(item) >= STORE_LEAST

    def is_saved(self, item: Item) -> bool:
        """Whether an item is copied to the host at all: its owner may keep nothing."""
        return item.owner is None or item.owner.keeps

    def unsaved(self, page: Page) -> list[Page]:
        """Pages at the end of a path that have no host copy and none on its way, the deepest last."""
        pages = []
        while page is not self.root and page.host is None:
            pages.append(page)
            page = parent_of(page)
        return pages[::-1]

    # Leaving

    def offer(self, item: Item) -> None:
        """The item may be free to leave a tier now."""
        self._offers += 1
        self.device.offer(item)
        self.host.offer(item)
        if isinstance(item, Tail):
            self.host.offer(item.page)
        self.offer_to_owner(item)

    def offer_to_owner(self, item: Item) -> None:
        if item.owner is not None:
            item.owner.offer(item)
            if isinstance(item, Tail):
                item.owner.offer(item.page)

    def followed(self, page: Page) -> None:
        """The number of pages that follow this one has changed."""
        if self.worth is not None and page.tail is not None and self.worth.followed(page.tail):
            self.offer(page.tail)

    def off_device(self, item: Item) -> None:
        """Take an item off the device. Its place comes free now, or in `save_done` if a save reads it."""
        if item.save == item.device:
            self.actions.leaving += ids_of(item.device)
        else:
            self.actions.device += ids_of(item.device)
        self.sparse -= item.load is None and not self.is_whole(item)
        item.device = None
        self.doubles.discard(item)
        if item.load is None:
            self.tell(False, Tier.DEVICE, item)
        if isinstance(item, Page):
            inherit(parent := parent_of(item), item)
        else:
            parent = item.page
        parent.children_device -= 1
        self.device.offer(parent)

    def shed(self, page: Page) -> DevicePageId:
        """A page gives up its place in the second pool of the device: it is sparse from now on, and that part
        is read on the host. Returns the place: it is the caller's."""
        assert page.on_device and page.on_host and self.is_whole(page), "I2: the host has what leaves"
        first, second = page.device
        page.device = (first,)
        self.sparse += 1
        self.doubles.discard(page)
        return cast(DevicePageId, second)

    def whole(self, page: Page, second: DevicePageId) -> None:
        """A sparse page has a place in the second pool again, with all its bytes there."""
        assert page.on_device and not self.is_whole(page), "I2: the device has the first part"
        page.device = (*page.device, second)
        self.sparse -= 1
        self.add_double(page)

    def is_whole(self, item: Item) -> bool:
        """Whether the device has all of an item that is there, and the host copy is not needed."""
        return isinstance(item, Tail) or len(ids_of(item.device)) == self.pools

    def add_double(self, item: Item) -> None:
        """Note an item that both tiers can read: its host copy may leave first. That follows from its copies:
        the host copy of a sparse page is the only one of a part of it."""
        if item.on_device and item.on_host and not item.readers and self.is_whole(item):
            self.doubles.add(item)

    @contextmanager
    def leaving_for(self, why: str | None) -> Iterator[None]:
        """Everything that leaves inside the block leaves for this reason."""
        before, self._why = self._why, why
        try:
            yield
        finally:
            self._why = before

    def off_host(self, item: Item) -> None:
        if item.host is not None and item.save is None:
            self.doubles.discard(item)
            self.tell(False, Tier.HOST, item)
            self._give_host(item)

    def drop(self, item: Item) -> None:
        """Forget an item altogether; for a page, also all pages below it (the device has none of them)."""
        if isinstance(item, Tail):
            self.remove_tail(item)
            return
        if item.children:  # rare: a page that could not be saved, with descendants on the host
            below = {item: None}
            for page in sorted(self.index.values(), key=depth_of):  # parents come before their children
                if page.parent in below:
                    below[page] = None
            for page in list(below)[:0:-1]:
                self.remove(page)
        self.remove(item)

    def remove(self, page: Page) -> None:
        assert page.lock == 0 and page.children == 0 and page.load is None, "I3: a page in use is not removed"
        if page.tail is not None:
            self.remove_tail(page.tail)
        parent = parent_of(page)
        page.gone = True
        self.index.remove(page)
        parent.children -= 1
        self.followed(parent)
        if page.device is not None:
            self.off_device(page)
        else:
            inherit(parent, page)
            self.device.offer(parent)
        if page.host is not None:
            self.off_host(page)
        if parent.host is not None:
            self.host.offer(parent)
        self.offer_to_owner(parent)

    def remove_tail(self, tail: Tail) -> None:
        """Remove a tail. Places that a transfer still uses are given back when it ends."""
        assert tail.lock == 0 and tail.load is None, "I3: a tail in use is not removed"
        if tail.device is not None:
            self.off_device(tail)
        self.off_host(tail)
        tail.gone = True
        if self.worth is not None:
            self.worth.left(tail)
        tail.page.tail = None
        self.offer(tail.page)

    def _give_host(self, item: Item) -> None:
        """Give the host places back: now, or when no store or peer reads them any more."""
        if item.host is not None and not item.readers:
            self.actions.host.extend(item.host)
            item.host = None

    def tell(self, stored: bool, tier: Tier, item: Item) -> None:
        if tier is not Tier.STORE:
            counts = self.on_device if tier is Tier.DEVICE else self.on_host
            counts[item.kind] += 1 if stored else -1
            if item.owner is not None:
                item.owner.count(tier, item.kind, 1 if stored else -1)
            if not stored and self._why is not None:
                self.evicted[tier, item.kind, self._why] += 1
        if self.events is not None:
            self.events.append(event(stored, tier, item))
