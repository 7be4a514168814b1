"""The prefix tree: which pages and tails are cached, in which tier, and which of them may leave.

    root ── A ── B ── C ── D            A, B on the device and the host, C, D on the host only
                 │    └ tail            a tail at C: the text can be resumed after C
                 └── E ── F             E, F on the device: a second text with the same first two pages

Two facts make every question short. A key names its whole prefix (`tree.keys`), so the tree holds the pages
of a text up to some depth and none after it, and bisection over the keys finds that depth. The same is true
of the pages on the device. And only leaves are evicted, so a lock on the deepest page protects all its path.

The tree decides; it never copies a byte and owns no pool. Where copies are and how they move: `tree.copies`.
Places that are given back and saves that are wanted collect in its `actions`, and the cache carries them out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tiercel.collector import hide
from tiercel.policy.evict import EvictPolicy
from tiercel.policy.placement import Boundary
from tiercel.tree.copies import Copies
from tiercel.tree.node import (
    Item,
    ItemOwner,
    Page,
    Tail,
    depth_of,
    idle,
    ids_of,
    inherit,
    may_leave_device,
    parent_of,
)
from tiercel.tree.owners import ItemBytes, Owner
from tiercel.types import DevicePageId, HostPageId, Kind, PageKey, Tier

ArrivingPage = tuple[PageKey, tuple[HostPageId, ...], bytes]
"""A page that comes to the host: its key, its places there, its tokens."""

TakeHost = Callable[[int], tuple[HostPageId, ...] | None]
"""Takes this many host pages; None when fewer are free."""


class Match(NamedTuple):
    """What the tiers hold of a text. Counts are in pages from its start."""

    found: int
    """Pages in any tier."""
    device: int
    """Pages on the device, those a load is bringing included."""
    boundary: int
    """The longest prefix that can be resumed: all pages found, and the tails it needs."""
    page: Page
    """The page that ends at `boundary` (the root when it is 0)."""
    tails: tuple[Tail, ...]
    """The tails that a resume at `boundary` reads, the last one first."""
    branch: int
    """Where this text leaves the others: a boundary that deserves a tail; 0 when it does not branch off."""


class PrefixTree:
    """What is held of a text, how it grows, and what leaves a full tier. All counts are in pages."""

    def __init__(
        self,
        *,
        evict: EvictPolicy,
        pages_per_window: int = 0,
        tails_per_path: int = 64,
        item_bytes: ItemBytes | None = None,
        replay_pages: int | None = None,
        tail_places: int = 1,
        pools: int = 1,
    ) -> None:
        """`tail_places`: how many places a tail takes on the host. `pools`: how many pools the device has."""
        self.copies = copies = Copies(evict, pages_per_window, item_bytes, replay_pages, tail_places, pools)
        self.root, self.index = copies.root, copies.index
        self.device, self.host, self.doubles = copies.device, copies.host, copies.doubles
        self.owners, self.worth = copies.owners, copies.worth
        self.pages_per_window = pages_per_window
        self._tails_per_path = tails_per_path * max(1, pages_per_window)
        # What copies do has the same name here.
        self.items, self.lock, self.unlock, self.shed = copies.items, copies.lock, copies.unlock, copies.shed
        self.load_start, self.load_done = copies.load_start, copies.load_done
        self.save_start, self.save_done = copies.save_start, copies.save_done
        self.arrive_start, self.arrive_done = copies.arrive_start, copies.arrive_done
        self.read_start, self.read_done = copies.read_start, copies.read_done
        self.mark_stored, self.unsaved, self.is_saved = copies.mark_stored, copies.unsaved, copies.is_saved
        self.whole, self.is_whole, self.worth_keeping = copies.whole, copies.is_whole, copies.worth_keeping

    # Finding

    def match(self, keys: Sequence[PageKey], limit: int, *, device_only: bool = False) -> Match:
        """What is held of a text, looking at its first `limit` pages. Changes nothing."""
        index, shards = self.index, self.index.shards
        found = min(len(keys), limit)
        if found and keys[found - 1] not in index:
            found = bisect_left(keys, True, 0, found - 1, key=lambda key: key not in shards[key[0]])
        page = index[keys[found - 1]] if found else self.root
        device = found
        if found and page.device is None:
            device = bisect_left(keys, True, 0, found - 1, key=lambda key: index[key].device is None)
        if device_only and device < found:
            found = device
            page = index[keys[found - 1]] if found else self.root
        branches = page.children and found < len(keys) and keys[found] not in index
        branch = found if branches else 0
        if self.pages_per_window:
            tails = resumable(page, self.pages_per_window, device_only)
            page = tails[0].page if tails else self.root
            return Match(found, device, page.depth, page, tails, branch)
        return Match(found, device, found, page, (), branch)

    def touch(self, page: Page, tails: Sequence[Tail], priority: int) -> None:
        """A request found this prefix. Its other pages inherit the use when this one goes."""
        self.copies.clock += 1
        if self.worth is not None:
            for tail in tails:
                self.worth.used(tail, hit=True)
        for item in (page, *tails):
            item.used = self.copies.clock
            item.hits += 1
            if priority > item.priority:
                item.priority = priority

    # Growing

    def insert(
        self,
        parent: Page,
        keys: Sequence[PageKey],
        ids: Sequence[Any],
        priority: int = 0,
        tokens: Sequence[bytes] = (),
        owner: str = "",
        *,
        hold: bool = False,
    ) -> list[Page]:
        """Add full pages after `parent`, which is readable on the device (or the root). Returns the pages
        that are in the tree now. `hold`: the last of them is locked, before it could become a candidate.

        A page that is on the device already gives the new copy back; one that was only on the host takes it.
        The result ends before a page that a load is bringing: the caller keeps its copies and calls again.
        """
        assert parent is self.root or parent.on_device
        self.copies.clock += 1
        clock, index, new = self.copies.clock, self.index, 0
        shards, rows = index.shards, index.rows
        owned = self._owner_after(parent, owner)
        first = parent
        pages: list[Page] = []
        for key, device in zip(keys, ids, strict=True):
            row = shards[key[0]].get(key)
            page = None if row is None else rows[key[0]][row]
            if page is None:
                page = Page(device, clock, priority, key, parent, parent.depth + 1)
                hide(page)
                index.add(page)
                parent.children += 1
                parent.children_device += 1
                page.owner = owned
                if self.copies.events is None:  # `tell` for every new page would cost a tenth
                    new += 1
                else:
                    page.tokens = tokens[len(pages)] if tokens else b""
                    self.copies.tell(True, Tier.DEVICE, page)
            else:
                if page.device is None:
                    self._adopt(page, device)
                    parent.children_device += 1
                elif page.load is not None:
                    break
                else:
                    self.copies.actions.device += ids_of(device)
                page.used = clock
                if priority > page.priority:
                    page.priority = priority
            pages.append(page)
            parent = page
        self.copies.on_device[Kind.PAGE] += new
        if owned is not None:
            owned.count(Tier.DEVICE, Kind.PAGE, new)
        if pages:
            parent.lock += hold
            self.copies.followed(first)
            self.device.offer(parent)
            self.copies.offer_to_owner(parent)
        return pages

    def _owner_after(self, parent: Page, name: str) -> ItemOwner | None:
        """The owner of a page after `parent`; the first page of a text has the owner with this name."""
        return parent.owner if parent is not self.root or not name else self.owners.named(name)

    def insert_tail(
        self,
        page: Page,
        device: tuple[DevicePageId, ...],
        priority: int = 0,
        boundary: Boundary = Boundary.TURN,
    ) -> Tail:
        """Hang a tail on a page. If one is readable or arriving already, the new copy is given back."""
        self.copies.clock += 1
        tail = page.tail
        if tail is None:
            tail = self._hang(Tail(device, self.copies.clock, priority, page, boundary))
            self.copies.tell(True, Tier.DEVICE, tail)
            page.children_device += 1
        elif tail.device is None:
            self._adopt(tail, device)
            page.children_device += 1
        else:
            self.copies.actions.device += device
        if self.worth is not None:
            self.worth.used(tail, hit=False)
        tail.used = self.copies.clock
        tail.priority = max(tail.priority, priority)
        self.device.offer(tail)
        self.copies.offer_to_owner(tail)
        return tail

    def insert_arriving(
        self, parent: Page, brought: Sequence[ArrivingPage], *, owner: str = ""
    ) -> list[Page]:
        """Add pages that are brought to the host (until `arrive_done`), which has no copy of them yet."""
        pages = self._grow(parent, brought, owner=owner)
        for page, (_, host, _) in zip(pages, brought, strict=True):
            self.arrive_start(page, host)
        return pages

    def insert_arriving_tail(self, page: Page, host: tuple[HostPageId, ...]) -> Tail:
        """Add a tail that is brought to the host."""
        tail = self._grow_tail(page)
        self.arrive_start(tail, host)
        return tail

    def insert_fetched(
        self, parent: Page, fetched: Sequence[ArrivingPage], *, stored: bool = True, owner: str = ""
    ) -> None:
        """Add pages that the store has brought to the host, after `parent`, which is in the tree. `stored`:
        the store is ours, and keeps them."""
        pages = self._grow(parent, fetched, fetched=True, owner=owner)
        for page, (_, host, _) in zip(pages, fetched, strict=True):
            self._fetched(page, host, stored)

    def insert_fetched_tail(self, page: Page, host: tuple[HostPageId, ...], *, stored: bool = True) -> None:
        """Add a tail that the store has brought to the host."""
        self._fetched(self._grow_tail(page), host, stored)

    def _grow(
        self, parent: Page, brought: Sequence[ArrivingPage], *, fetched: bool = False, owner: str = ""
    ) -> list[Page]:
        """Nodes for pages that come to the host. New ones follow `parent`, or one another."""
        self.copies.clock += 1
        pages = []
        for key, _, tokens in brought:
            page = self.index.get(key)
            if page is None:
                page = Page(None, self.copies.clock, 0, key, parent, parent.depth + 1)
                hide(page)
                self.index.add(page)
                page.tokens, page.fetched = tokens, fetched
                page.owner = self._owner_after(parent, owner)
                parent.children += 1
                self.copies.followed(parent)
            page.used = self.copies.clock
            parent = page if page.depth > parent.depth else parent
            pages.append(page)
        here = parent  # the deepest page on the device was used just now, too
        while here is not self.root and here.device is None:
            inherit(parent_of(here), here)
            here = parent_of(here)
        return pages

    def _grow_tail(self, page: Page) -> Tail:
        self.copies.clock += 1
        return page.tail or self._hang(Tail(None, self.copies.clock, page.priority, page, Boundary.FETCHED))

    def _hang(self, tail: Tail) -> Tail:
        hide(tail)
        tail.page.tail = tail
        if self.worth is not None:
            self.worth.placed(tail)
        return tail

    def _fetched(self, item: Item, host: tuple[HostPageId, ...], stored: bool) -> None:
        """Add a host copy that is readable at once. If there is one already, the new one is given back."""
        if stored:
            self.mark_stored(item)
        if item.host is not None:
            self.copies.actions.host.extend(host)
            return
        self.arrive_start(item, host)
        self.arrive_done(item, host, True)

    def _adopt(self, item: Item, device: Any) -> None:
        """An item that was only on the host gets computed bytes on the device, without a load."""
        item.device = device
        self.copies.tell(True, Tier.DEVICE, item)
        self.copies.add_double(item)

    # Evicting: only leaves leave, and nothing that is locked or on its way

    def evict(self, places: int, take_host: TakeHost | None = None) -> int:
        """Free at least so many places of the device: pages and tails leave, coldest leaves first. Returns
        how many places come free, which may be fewer. With two pools: places of the first.

        Each item goes to the host: it is there already, or it is saved into pages from `take_host`. Otherwise
        it is gone. `save_done` gives back the places of those that are being saved.
        """
        gone = 0
        while gone < places:
            item = self.device.pop()
            size = len(item.device) if isinstance(item, Tail) else 1
            if item is None or not self._evict(item, take_host):
                break
            gone += size
        return gone

    def _evict(self, item: Item, take_host: TakeHost | None) -> bool:
        """Evict an item. False: it waits for saves, after which something colder leaves the host."""
        assert item.device is not None
        if item.host is None:
            host = None
            if take_host is not None and self.is_saved(item):
                host = self._host_for(item, take_host)
                if host is None and self._waits_for_saves(item):
                    self.copies.offer(item)
                    return False
            if host is None:
                self.copies.drop(item)
                return True
            self.save_start(item, host)
        self.copies.off_device(item)
        if item.save is None:  # otherwise it is offered when the save has ended
            self.copies.offer(item)
        return True

    def _waits_for_saves(self, item: Item) -> bool:
        """Whether a save under way brings something that will leave the host for this item. If pages follow
        the item on the host, which would be lost with it, anything will do; else only something colder. The
        coldest leave the device first, so a look at the oldest save is enough."""
        oldest = next(iter(self.copies.saving), None)
        return oldest is not None and (item.children > 0 or self.copies.rank(oldest) < self.copies.rank(item))

    def leave_device(self, page: Page) -> None:
        """Take a page, those before it and their tails off the device, the last first, as far as the host has
        them too. It stops at the first that is in use or that another text goes on from."""
        while page is not self.root:
            for item in (page.tail, page):
                if item is not None and item.device is not None:
                    if not (may_leave_device(item) and item.on_host):
                        return
                    self.copies.off_device(item)
                    self.copies.offer(item)
            page = parent_of(page)

    def _host_for(self, item: Item, take_host: TakeHost) -> tuple[HostPageId, ...] | None:
        """Host pages for an item about to leave the device. It displaces doubles and colder items."""
        item.lock += 1  # a tail must not displace the page it hangs on
        # Pages that follow it on the host are worth nothing without it: then whatever is coldest leaves.
        rival, count = None if item.children else item, self.copies.places[item.kind]
        while (host := take_host(count)) is None and self.evict_host(for_item=rival):
            pass
        item.lock -= 1  # not `unlock`: the item has left the candidates and must not be offered again
        return host

    def evict_host(self, *, for_item: Item | None = None) -> bool:
        """Take one item off the host: the latest double, or else the coldest that only the host has.
        `for_item`: only one that is not hotter than this item."""
        if (double := self.doubles.pop()) is not None:
            self.copies.off_host(double)
            return True
        coldest = self.host.coldest()
        if coldest is None or (
            for_item is not None and self.copies.rank(coldest) > self.copies.rank(for_item)
        ):
            return False
        self.copies.drop(coldest)
        return True

    def evict_spare(self) -> bool:
        """Take one item off the host that both device and store have."""
        if (spare := self.doubles.pop_stored()) is not None:
            self.copies.off_host(spare)
        return spare is not None

    def evict_host_oldest(self) -> bool:
        """Take one item off the host: the coldest that only the host has, or else the oldest double. So the
        latest saves stay, which another server will read there."""
        if (coldest := self.host.coldest()) is not None:
            self.copies.drop(coldest)
            return True
        if (double := self.doubles.pop_oldest()) is not None:
            self.copies.off_host(double)
        return double is not None

    def cap_tails(self, page: Page) -> None:
        """Enforce the limit of tails from the root to `page`: the coldest go, but none that a resume there
        reads. Tails where texts part are needed by others: if only the use counts, they go last."""
        tails: list[Tail] = []
        here: Page | None = page
        while here is not None:
            if here.tail is not None:
                tails.append(here.tail)
            here = here.parent
        excess = len(tails) - self._tails_per_path
        if excess > 0:
            older = [t for t in tails if t.page.depth <= page.depth - self.pages_per_window and idle(t)]
            forks = set() if self.worth else {t.page.depth for t in tails if t.page.children > 1}

            def order(tail: Tail) -> tuple[bool, Any]:
                reads = range(tail.page.depth, tail.page.depth + self.pages_per_window)
                return not forks.isdisjoint(reads), self.copies.rank(tail)

            with self.copies.leaving_for("path"):
                for tail in sorted(older, key=order)[:excess]:
                    self.copies.remove_tail(tail)

    def limit(self, owner: str, bytes_most: int | None) -> None:
        """Set the bytes that an owner may cache in both tiers together; None: there is no limit."""
        self.owners.named(owner).bytes_most = bytes_most

    def trim(self, most: int) -> int:
        """Forget the coldest items of owners above their limits, as far as they may go, at most `most` of
        them. Returns how many."""
        gone = 0
        with self.copies.leaving_for("limit"):
            for owner in self.owners.over():
                gone += self._trim(owner, most - gone)
        return gone

    def _trim(self, owner: Owner, most: int) -> int:
        gone = 0
        while gone < most and owner.over and (item := owner.order.pop()) is not None:
            self._forget(item)
            gone += 1
        return gone

    def _forget(self, item: Item) -> None:
        """Forget the coldest item of an owner that has too much."""
        self.copies.drop(item)

    def flush(self) -> int:
        """Forget everything that no request holds and no transfer moves. Returns how many pages stay."""
        with self.copies.leaving_for(None):
            for page in sorted(self.index.values(), key=depth_of, reverse=True):
                tail = page.tail
                if tail is not None and idle(tail):
                    self.copies.remove_tail(tail)
                if page.children == 0 and page.tail is None and idle(page):
                    self.copies.remove(page)
        for order in (self.device, self.host, *(owner.order for owner in self.owners.all.values())):
            order.sweep()
        return len(self.index)


def resumable(page: Page, pages_per_window: int, device_only: bool) -> tuple[Tail, ...]:
    """The tails to resume from: of the deepest page that has enough of them, the last first. I6."""
    run: list[Tail] = []
    here: Page | None = page
    while here is not None:
        tail = here.tail
        if tail is None or (device_only and tail.device is None):
            run = []
        else:
            run.append(tail)
            if len(run) == pages_per_window or here.depth == 1:
                return tuple(run)
        here = here.parent
        while here is not None and here.tail is None and not run:
            here = here.parent
    return ()
