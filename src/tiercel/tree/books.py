"""The books of the tree: what is cached, where, in which line it stands to leave, and who is told.

`Books` holds them; `tree.moving`, `tree.evicting` and `tree.prefix_tree` are built on top of each other. Here
is what they share: a page or tail leaves a tier, or leaves altogether, in one way only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tiercel.policy.evict import EvictPolicy
from tiercel.policy.save import SavePolicy
from tiercel.tree.actions import Actions, Cleared, Event, event
from tiercel.tree.candidates import Candidates
from tiercel.tree.doubles import Doubles
from tiercel.tree.match import descendants
from tiercel.tree.node import (
    Item,
    Page,
    Tail,
    inherit,
    may_leave_host,
    page_may_leave_device,
    parent_of,
    tail_may_leave_device,
)
from tiercel.types import PageKey, Tier


class Books:
    """Pages and tails in two tiers. All counts are in pages, all times are ticks of its own clock."""

    def __init__(
        self, *, evict: EvictPolicy, save: SavePolicy, pages_per_window: int = 0, tails_per_path: int = 64
    ) -> None:
        self.root = Page(PageKey(b""), None, None, 0, 0)
        self.index: dict[PageKey, Page] = {}
        self.actions = Actions()
        self.events: list[Event | Cleared] | None = None
        self.doubles = Doubles()
        self.pages_per_window = pages_per_window
        self._evict_policy = evict
        self._rank = evict.rank
        self._save = save
        self._tails_per_path = tails_per_path * max(1, pages_per_window)
        self._clock = 0
        self._saving = 0
        self.leaving: dict[type[Item], int] = {Page: 0, Tail: 0}
        """Device places that come free when the saves under way end."""
        self.on_device: dict[type[Item], int] = {Page: 0, Tail: 0}
        self.on_host: dict[type[Item], int] = {Page: 0, Tail: 0}
        """What each tier can read, counted as it changes: nobody walks the tree to tell."""
        self._line_up()

    def _line_up(self) -> None:
        """Everything that may leave a tier, in line to do so."""
        self.device_pages: Candidates[Page] = Candidates(self._evict_policy, page_may_leave_device)
        self.device_tails: Candidates[Tail] = Candidates(self._evict_policy, tail_may_leave_device)
        self.host: Candidates[Item] = Candidates(self._evict_policy, may_leave_host)
        for page in self.index.values():
            self._offer(page)
            if page.tail is not None:
                self._offer(page.tail)

    def items(self) -> Iterator[Item]:
        """Everything cached, parents before their children."""
        for page in self.index.values():
            yield page
            if page.tail is not None:
                yield page.tail

    def lock(self, item: Item) -> None:
        item.lock += 1

    def unlock(self, item: Item) -> None:
        assert item.lock > 0, "I3: more unlocks than locks"
        item.lock -= 1
        if item.lock == 0:
            self._offer(item)

    def mark_stored(self, item: Item, stored: bool = True) -> None:
        """Whether the store has it, as far as is known."""
        if item.stored != stored:
            item.stored = stored
            if item in self.doubles:
                self.doubles.add(item)
            if stored:
                self._tell(True, Tier.STORE, item)

    def _offer(self, item: Item) -> None:
        if isinstance(item, Page):
            self.device_pages.offer(item)
            self.host.offer(item)
        else:
            self.device_tails.offer(item)
            self.host.offer(item)
            self.host.offer(item.page)

    def _leave_device(self, item: Item) -> None:
        """Off the device. The place is given back, unless a save still reads it: then by `save_done`."""
        if item.save == item.device:
            self.leaving[type(item)] += 1
        else:
            self._give_device(item, item.device)
        item.device = None
        self.doubles.discard(item)
        if item.load is None:
            self._tell(False, Tier.DEVICE, item)
        if isinstance(item, Page):
            parent = parent_of(item)
            parent.children_device -= 1
            inherit(parent, item)
            self.device_pages.offer(parent)

    def _leave_host(self, item: Item) -> None:
        if item.host is not None and item.save is None:
            self.doubles.discard(item)
            self._tell(False, Tier.HOST, item)
            self._give_host(item)

    def _drop(self, item: Item) -> None:
        """Forget something altogether; with a page, all below it, of which the device holds nothing."""
        if isinstance(item, Tail):
            self._remove_tail(item)
            return
        if item.children:  # rare: a page that could not be saved, with descendants on the host
            for page in reversed(descendants(self.index.values(), item)):
                self._remove(page)
        self._remove(item)

    def _remove(self, page: Page) -> None:
        assert page.lock == 0 and page.children == 0 and page.load is None, "I3: a page in use is not removed"
        if page.tail is not None:
            self._remove_tail(page.tail)
        parent = parent_of(page)
        if page.device is not None:
            self._leave_device(page)
        else:
            inherit(parent, page)
        if page.host is not None:
            self._leave_host(page)
        page.gone = True
        del self.index[page.key]
        parent.children -= 1
        if parent.host is not None:
            self.host.offer(parent)

    def _remove_tail(self, tail: Tail) -> None:
        """Places that a transfer still uses are given back when it ends."""
        assert tail.lock == 0, "I3: a tail in use is not removed"
        if tail.load is None:
            if tail.device is not None:
                self._leave_device(tail)
            self._leave_host(tail)
        else:
            self._tell(False, Tier.HOST, tail)
        tail.gone = True
        tail.page.tail = None
        self.host.offer(tail.page)

    def _give_host(self, item: Item) -> None:
        """The host places, unless a load or a write to the store still reads them: then when that ended."""
        if item.host is not None and item.load is None and not item.storing:
            self.actions.host.extend(item.host)
            item.host = None

    def _give_device(self, item: Item, device: Any) -> None:
        (self.actions.pages if isinstance(item, Page) else self.actions.tails).append(device)

    def _tell(self, stored: bool, tier: Tier, item: Item) -> None:
        if tier is not Tier.STORE:
            counts = self.on_device if tier is Tier.DEVICE else self.on_host
            counts[type(item)] += 1 if stored else -1
        if self.events is not None:
            self.events.append(event(stored, tier, item))
