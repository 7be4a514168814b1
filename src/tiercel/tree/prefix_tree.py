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

The life of a place on the device, and who gives it back:

    insert ──────────────► readable ── evict, copy on the host ─────────► given back at once
    load_start ─ load_done ─►│
                             └────── evict, no copy yet: save ─ save_done ► given back when the copy ended
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tiercel.policy.evict import EvictPolicy, Rank
from tiercel.policy.save import SavePolicy
from tiercel.tree.actions import Actions, Cleared, Event, Move, event
from tiercel.tree.candidates import Candidates
from tiercel.tree.doubles import Doubles
from tiercel.tree.match import Match, descendants, prefix, resumable
from tiercel.tree.node import (
    Item,
    Page,
    Tail,
    idle,
    inherit,
    may_leave_host,
    page_may_leave_device,
    parent_of,
    tail_may_leave_device,
)
from tiercel.types import DevicePageId, DeviceTailId, HostPageId, PageKey, Tier

Line = Candidates[Page] | Candidates[Tail]

Fetched = tuple[PageKey, tuple[HostPageId, ...], bytes]
"""A page from the store: its key, where it is on the host, its tokens."""

TakeHost = Callable[[int], tuple[HostPageId, ...] | None]
"""So many host pages, or None when there are not so many free."""


class PrefixTree:
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

    def lock(self, item: Item) -> None:
        item.lock += 1

    def unlock(self, item: Item) -> None:
        assert item.lock > 0, "I3: more unlocks than locks"
        item.lock -= 1
        if item.lock == 0:
            self._offer(item)

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

    def insert_fetched(self, parent: Page, fetched: Sequence[Fetched]) -> Page:
        """Pages that the store has brought to the host, after `parent`, which is in the tree; the last."""
        self._clock += 1
        for key, host, tokens in fetched:
            page = self.index.get(key)
            if page is None:
                page = self.index[key] = Page(key, parent, None, self._clock, 0)
                page.tokens, page.fetched = tokens, True
                parent.children += 1
            page.used = self._clock
            self._fetched(page, host)
            parent = page
        here = parent  # the deepest page on the device was used just now, too
        while here is not self.root and here.device is None:
            inherit(parent_of(here), here)
            here = parent_of(here)
        return parent

    def insert_fetched_tail(self, page: Page, host: tuple[HostPageId, ...]) -> None:
        """The same for a tail."""
        self._clock += 1
        if page.tail is None:
            page.tail = Tail(page, None, self._clock, page.priority)
        self._fetched(page.tail, host)

    def _fetched(self, item: Item, host: tuple[HostPageId, ...]) -> None:
        """A host copy that is readable at once; where there is one already, the new one is given back."""
        self.mark_stored(item)
        if item.host is not None:
            self.actions.host.extend(host)
            return
        item.host = host
        self._tell(True, Tier.HOST, item)
        if item.device is not None and item.load is None:
            self.doubles.add(item)
        self._offer(item)

    def cap_tails(self, page: Page) -> None:
        """At most so many tails from the root to `page`; the coldest go, but none a resume there reads."""
        tails: list[Tail] = []
        here: Page | None = page
        while here is not None:
            if here.tail is not None:
                tails.append(here.tail)
            here = here.parent
        excess = len(tails) - self._tails_per_path
        if excess > 0:
            older = [t for t in tails if t.page.depth <= page.depth - self.pages_per_window and idle(t)]
            for tail in sorted(older, key=self._rank)[:excess]:
                self._remove_tail(tail)

    def _adopt(self, item: Item, device: Any) -> None:
        """Something that was only on the host gets fresh bytes on the device, without a copy."""
        item.device = device
        self._tell(True, Tier.DEVICE, item)
        if item.on_host and not item.storing:
            self.doubles.add(item)

    # Moving between the tiers

    def load_start(self, item: Item, device: Any, batch: int) -> Move:
        """A load is going to fill `device` from the host copy."""
        assert item.device is None and item.on_host and item.host is not None, (
            "I2: a load reads a readable copy"
        )
        item.device = device
        item.load = batch
        if isinstance(item, Page):
            parent = parent_of(item)
            assert parent is self.root or parent.device is not None, "the device holds a prefix"
            parent.children_device += 1
        return Move(item, device, item.host)

    def load_done(self, move: Move, ok: bool) -> None:
        """The load ended. If it failed, the host copy is what it was. Children come before their parents."""
        item = move.item
        if item.gone:
            self._give_device(item, move.device)
            item.device = item.load = None
            self._give_host(item)
            return
        if ok:
            if not item.storing:
                self.doubles.add(item)
            self._tell(True, Tier.DEVICE, item)
        else:
            self._leave_device(item)
        item.load = None
        self._offer(item)

    def save_start(self, item: Item, host: tuple[HostPageId, ...]) -> None:
        """A save is going to fill `host` from the device copy, whose place it holds until it ended."""
        assert item.device is not None and item.load is None and item.host is None
        item.host = host
        item.save = item.device
        self._saving += 1
        self.actions.saves.append(Move(item, item.device, host))

    def save_done(self, move: Move, ok: bool) -> None:
        """The save ended. What was evicted meanwhile gives its place back now, and is lost if it failed."""
        item = move.item
        self._saving -= 1
        if item.device != move.device:
            self._give_device(item, move.device)
            self.leaving[type(item)] -= 1
        if item.gone:
            self.actions.host.extend(move.host)
            return
        item.save = None
        if ok:
            self._tell(True, Tier.HOST, item)
            if item.device is not None:
                self.doubles.add(item)
        else:
            item.host = None
            self.actions.host.extend(move.host)
            if item.device is None:
                self._drop(item)
                return
        self._offer(item)

    def store_start(self, item: Item) -> None:
        """The host copy is being written to the store, and stays until that ended."""
        assert item.on_host and not item.storing and not item.gone, "I2: the store is given a readable copy"
        item.storing = True
        self.doubles.discard(item)

    def store_done(self, item: Item, ok: bool) -> None:
        item.storing = False
        if item.gone:
            self._give_host(item)
            return
        if item.device is not None and item.load is None:
            self.doubles.add(item)
        if ok:
            self.mark_stored(item)
        self._offer(item)

    def mark_stored(self, item: Item, stored: bool = True) -> None:
        """Whether the store has it, as far as is known."""
        if item.stored != stored:
            item.stored = stored
            if item in self.doubles:
                self.doubles.add(item)
            if stored:
                self._tell(True, Tier.STORE, item)

    def unsaved(self, page: Page) -> list[Page]:
        """Pages at the end of a path that have no host copy and none on its way, the deepest last."""
        pages = []
        while page is not self.root and page.host is None:
            pages.append(page)
            page = parent_of(page)
        return pages[::-1]

    # Evicting

    def evict_pages(self, count: int, take_host: TakeHost | None = None) -> int:
        """Take up to `count` pages off the device, coldest leaves first; answers how many went.

        Each goes to the host: it is there already, or it is saved into places from `take_host`; otherwise it
        is gone. Places of pages being saved are given back by `save_done`.
        """
        return self._evict_from(self.device_pages, count, 1, take_host)

    def evict_tails(self, count: int, host_pages: int = 0, take_host: TakeHost | None = None) -> int:
        """The same for tails, each of which takes `host_pages` on the host."""
        return self._evict_from(self.device_tails, count, host_pages, take_host)

    def _evict_from(self, line: Line, count: int, host_pages: int, take_host: TakeHost | None) -> int:
        for going in range(count):
            item = line.pop()
            if item is None or not self._evict(item, host_pages, take_host):
                return going
        return count

    def _evict(self, item: Item, host_pages: int, take_host: TakeHost | None) -> bool:
        """False when it has to wait: saves are filling the host, and their end will show who is colder."""
        assert item.device is not None
        if item.host is None:
            host = None
            if take_host is not None and item.hits >= self._save.evict_hits:
                host = self._host_for(item, host_pages, take_host)
                if host is None and self._saving:
                    self._offer(item)
                    return False
            if host is None:
                self._drop(item)
                return True
            self.save_start(item, host)
        self._leave_device(item)
        self._offer(item)
        return True

    def _host_for(self, item: Item, count: int, take_host: TakeHost) -> tuple[HostPageId, ...] | None:
        """Host pages for something about to leave the device. It displaces doubles, and what is colder."""
        rank = self._rank(item)
        item.lock += 1  # a tail must not displace the page it hangs on
        while (host := take_host(count)) is None and self.evict_host(colder_than=rank):
            pass
        item.lock -= 1  # not `unlock`: the item was taken out of the line and must not be offered to it again
        return host

    def evict_host(self, *, colder_than: Rank | None = None) -> bool:
        """Take one thing off the host: the latest double, or else the coldest that only the host has."""
        if (double := self.doubles.pop()) is not None:
            self._leave_host(double)
            return True
        coldest = self.host.coldest()
        if coldest is None:
            return False
        if colder_than is not None and self._rank(coldest) > colder_than:  # type: ignore[operator]
            return False
        self._drop(coldest)
        return True

    def evict_spare(self) -> bool:
        """Take one thing off the host that both device and store have."""
        if (spare := self.doubles.pop_stored()) is not None:
            self._leave_host(spare)
        return spare is not None

    def flush(self) -> int:
        """Forget everything that no request holds and no transfer moves; answers how many pages stay."""
        for page in reversed(list(self.index.values())):
            tail = page.tail
            if tail is not None and idle(tail):
                self._remove_tail(tail)
            if page.children == 0 and page.tail is None and idle(page):
                self._remove(page)
        self._line_up()
        return len(self.index)

    # The books

    def items(self) -> Iterator[Item]:
        """Everything cached, parents before their children."""
        for page in self.index.values():
            yield page
            if page.tail is not None:
                yield page.tail

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
