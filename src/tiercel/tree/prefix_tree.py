"""The prefix tree: which pages and tails are cached, in which tier, and which of them may go.

    root ── A ── B ── C ── D            A, B on the device and the host, C, D on the host only
                 │    └ tail            a tail at C: the text can be resumed after C
                 └── E ── F             E, F on the device: a second text with the same first two pages

Two facts make every question short. A key names its whole prefix (`tree.keys`), so the tree holds the pages
of a text up to some depth and none after it, and that depth is found by bisection over the keys; the same
for what the device holds. And only leaves are evicted, so locking the deepest page of a path protects all of
it.

The tree decides and keeps the books; it never copies a byte and owns no pool. Places it lets go of and saves
it wants collect in `actions`, and whoever drives it (`TieredCache`) carries them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiercel.tree.evicting import Evicting
from tiercel.tree.match import Match, prefix, resumable
from tiercel.tree.node import Item, Page, Tail, inherit, parent_of
from tiercel.types import DevicePageId, DeviceTailId, HostPageId, PageKey, Tier

Brought = tuple[PageKey, tuple[HostPageId, ...], bytes]
"""A page that comes to the host: its key, its places there, its tokens."""


class PrefixTree(Evicting):
    """What is held of a text, and how it grows."""

    # Finding

    def match(self, keys: Sequence[PageKey], limit: int, *, device_only: bool = False) -> Match:
        """What is held of a text, looking at its first `limit` pages. Changes nothing."""
        index = self.index
        found = prefix(keys, min(len(keys), limit), index.__contains__)
        page = index[keys[found - 1]] if found else self.root
        device = found
        if found and page.device is None:
            device = prefix(keys, found, lambda key: index[key].device is not None)
        if device_only and device < found:
            found = device
            page = index[keys[found - 1]] if found else self.root
        leaves = found and page.children and found < len(keys) and keys[found] not in index
        branch = found if leaves else 0
        if self.pages_per_window:
            tails = resumable(page, self.pages_per_window, device_only)
            page = tails[0].page if tails else self.root
            return Match(found, device, page.depth, page, tails, branch)
        return Match(found, device, found, page, (), branch)

    def touch(self, page: Page, tails: Sequence[Tail], priority: int) -> None:
        """A request found this prefix. Its other pages inherit the use when this one goes."""
        self._clock += 1
        for item in (page, *tails):
            item.used = self._clock
            item.hits += 1
            if priority > item.priority:
                item.priority = priority

    # Growing

    def insert(
        self,
        parent: Page,
        keys: Sequence[PageKey],
        ids: Sequence[DevicePageId],
        priority: int = 0,
        tokens: Sequence[bytes] = (),
    ) -> list[Page]:
        """Add full pages after `parent`, which is readable on the device (or the root). Answers the pages
        now in the tree.

        A page that is there already gives the new copy back; one that was only on the host takes it. A page
        that a load is bringing just now ends the answer early: the caller keeps its copy and comes again.
        """
        assert parent is self.root or (parent.device is not None and parent.load is None)
        self._clock += 1
        clock, index, pages, new = self._clock, self.index, [], 0
        for number, (key, device) in enumerate(zip(keys, ids, strict=True)):
            page = index.get(key)
            if page is None:
                page = index[key] = Page(key, parent, device, clock, priority)
                parent.children += 1
                parent.children_device += 1
                if self.events is None:  # `_tell` for every new page would cost a tenth
                    new += 1
                else:
                    page.tokens = tokens[number] if tokens else b""
                    self._tell(True, Tier.DEVICE, page)
            else:
                if page.device is None:
                    self._adopt(page, device)
                    parent.children_device += 1
                elif page.load is not None:
                    break
                else:
                    self.actions.pages.append(device)
                page.used = clock
                if priority > page.priority:
                    page.priority = priority
            pages.append(page)
            parent = page
        self.on_device[Page] += new
        if pages:
            self.device_pages.offer(parent)
        return pages

    def insert_tail(self, page: Page, device: DeviceTailId, priority: int = 0) -> Tail:
        """Hang a tail on a page; where one is readable or arriving already, the new copy is given back."""
        self._clock += 1
        tail = page.tail
        if tail is None:
            tail = page.tail = Tail(page, device, self._clock, priority)
            self._tell(True, Tier.DEVICE, tail)
        elif tail.device is None:
            self._adopt(tail, device)
        else:
            self.actions.tails.append(device)
        tail.used = self._clock
        tail.priority = max(tail.priority, priority)
        self.device_tails.offer(tail)
        return tail

    def insert_arriving(self, parent: Page, brought: Sequence[Brought]) -> list[Page]:
        """Pages that somebody brings to the host (until `arrive_done`), which has no copy of them yet."""
        grown = self._grow(parent, brought)
        for page, host in grown:
            self.arrive_start(page, host)
        return [page for page, _ in grown]

    def insert_arriving_tail(self, page: Page, host: tuple[HostPageId, ...]) -> Tail:
        """The same for a tail."""
        tail = self._grow_tail(page)
        self.arrive_start(tail, host)
        return tail

    def insert_fetched(self, parent: Page, fetched: Sequence[Brought]) -> Page:
        """Pages that the store has brought to the host, after `parent`, which is in the tree; the last."""
        for page, host in self._grow(parent, fetched, fetched=True):
            self._fetched(page, host)
            parent = page
        return parent

    def insert_fetched_tail(self, page: Page, host: tuple[HostPageId, ...]) -> None:
        """The same for a tail."""
        self._fetched(self._grow_tail(page), host)

    def _grow(
        self, parent: Page, brought: Sequence[Brought], *, fetched: bool = False
    ) -> list[tuple[Page, tuple[HostPageId, ...]]]:
        """Nodes for pages that come to the host. New ones follow `parent`, or one another."""
        self._clock += 1
        grown = []
        for key, host, tokens in brought:
            page = self.index.get(key)
            if page is None:
                page = self.index[key] = Page(key, parent, None, self._clock, 0)
                page.tokens, page.fetched = tokens, fetched
                parent.children += 1
            page.used = self._clock
            parent = page if page.depth > parent.depth else parent
            grown.append((page, host))
        here = parent  # the deepest page on the device was used just now, too
        while here is not self.root and here.device is None:
            inherit(parent_of(here), here)
            here = parent_of(here)
        return grown

    def _grow_tail(self, page: Page) -> Tail:
        self._clock += 1
        if page.tail is None:
            page.tail = Tail(page, None, self._clock, page.priority)
        return page.tail

    def _fetched(self, item: Item, host: tuple[HostPageId, ...]) -> None:
        """A host copy that is readable at once; where there is one already, the new one is given back."""
        self.mark_stored(item)
        if item.host is not None:
            self.actions.host.extend(host)
            return
        self.arrive_start(item, host)
        self.arrive_done(item, host, True)

    def _adopt(self, item: Item, device: Any) -> None:
        """Something that was only on the host gets fresh bytes on the device, without a copy."""
        item.device = device
        self._tell(True, Tier.DEVICE, item)
        if item.on_host and not item.storing:
            self.doubles.add(item)
