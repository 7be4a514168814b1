"""The stupid model: sets of keys and linear scans, told of what happens and comparing after every step.

It keeps no tree. It knows which keys each tier can read (from the events), and how every page of a path was
used (touching all of them, where the real tree touches one). From that it says what a match must return and
what must be evicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from unittest.mock import patch

from tiercel.policy.evict import Rank
from tiercel.policy.worth import HIT, HITS_MOST
from tiercel.tree import prefix_tree
from tiercel.tree.copies import Copies
from tiercel.tree.node import Event, Item, Page, Tail
from tiercel.tree.prefix_tree import Match, PrefixTree
from tiercel.types import Kind, PageKey, Tier


@dataclass
class Use:
    used: int = 0
    hits: int = 0
    priority: int = -(10**9)


class WatchedCopies(Copies):
    oracle: Oracle

    def tell(self, stored, tier, item):
        page = item.page if isinstance(item, Tail) else item
        self.oracle.hear(Event(stored, tier, item.kind, page.key))
        super().tell(stored, tier, item)

    def remove(self, page):
        super().remove(page)
        self.oracle.uses.pop(page.key, None)


class WatchedTree(PrefixTree):
    """The real tree, reporting to an oracle what it decides at the moment it decides it."""

    def __init__(self, **options) -> None:
        with patch.object(prefix_tree, "Copies", WatchedCopies):
            super().__init__(**options)
        self.copies: WatchedCopies
        self.oracle = self.copies.oracle = Oracle(self)

    def match(self, keys, limit, *, device_only=False):
        match = super().match(keys, limit, device_only=device_only)
        self.oracle.check_match(keys[:limit], match, device_only)
        return match

    def touch(self, page, tails, priority):
        super().touch(page, tails, priority)
        self.oracle.use_path(page, self.copies.clock, priority, hit=True)

    def _grow(self, parent, brought, *, fetched=False, owner=""):
        before = len(self.index)
        grown = super()._grow(parent, brought, fetched=fetched, owner=owner)
        if grown:  # a new page has priority 0, one that was there keeps its own
            priority = 0 if len(self.index) > before else Use.priority
            self.oracle.use_path(grown[-1], self.copies.clock, priority, hit=False)
        return grown

    def insert(self, parent, keys, ids, priority=0, tokens=(), owner="", *, hold=False):
        pages = super().insert(parent, keys, ids, priority, tokens, owner, hold=hold)
        if pages:
            self.oracle.use_path(pages[-1], self.copies.clock, priority, hit=False)
        return pages

    def _evict(self, item, take_host):
        self.oracle.check_victim(item)
        return super()._evict(item, take_host)

    def _forget(self, item):
        self.oracle.check_owned_victim(item)
        super()._forget(item)

    def _trim(self, owner, most):
        gone = super()._trim(owner, most)
        assert gone == most or not owner.over or not self.oracle.may_go(owner), (
            "an owner keeps more than it may"
        )
        return gone

    def evict_host(self, *, for_item=None):
        doubles = set(self.doubles)
        coldest = None if doubles else self.host.coldest()
        if coldest is not None:
            self.oracle.check_host_victim(coldest)
        before = set(self.index)
        done = super().evict_host(for_item=for_item)
        assert not doubles or (done and set(self.index) == before), (
            "a double goes before the only copy of anything"
        )
        return done


class Oracle:
    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.readable: dict[tuple[Tier, bool], set[PageKey]] = {
            (tier, kind): set() for tier in (Tier.DEVICE, Tier.HOST) for kind in Kind
        }
        self.uses: dict[PageKey, Use] = {}

    def hear(self, event: Event) -> None:
        if event.tier is Tier.STORE:
            return
        keys = self.readable[event.tier, event.kind]
        assert (event.key in keys) != event.stored, f"told twice: {event}"
        (keys.add if event.stored else keys.discard)(event.key)

    # Uses

    def use_path(self, page: Page, clock: int, priority: int, *, hit: bool) -> None:
        """Everything up to the root was used; the priority of an insert belongs to the pages it visited and
        what they inherit."""
        here: Page | None = page
        while here is not None and here is not self.tree.root:
            use = self.uses.setdefault(here.key, Use())
            use.used = clock
            use.hits += hit
            use.priority = max(use.priority, priority)
            here = here.parent

    def rank(self, item: Item) -> Rank:
        """The rank of a page by what the oracle has counted; a tail inherits nothing, so its own use will
        do."""
        return self.tree.copies.rank(self.uses[item.key] if isinstance(item, Page) else item)

    def worth(self, item: Item, carrying: set[int], *, filed: bool) -> float:
        """What an item is worth, its weight taken from the bucket it waits in (`filed`), or computed from
        the texts, as the tree must do before the item leaves. `carrying`: the pages that others follow."""
        tree, tail = self.tree, item.tail if isinstance(item, Page) else item
        if tail is None and id(item) not in carrying:
            return 0.0
        use, chance = tail or self.uses[item.key], tail.chance if tail else tree.worth.chances.end
        if filed:
            lines = (tree.device, tree.host, getattr(item.owner, "order", None))
            weight = max(line.weight_of(item) for line in lines if line and item in line)
        else:
            exact = self._weight_of_tail(tail) if tail else 1.0 + HIT * min(use.hits, HITS_MOST)
            weight = 2.0 ** (round(2 * log2(exact)) / 2)
        return chance.factor * weight / (tree.copies.clock - use.used + 1)

    def _weight_of_tail(self, tail: Tail) -> float:
        path = [tail.page]
        while path[0].parent is not self.tree.root:
            path.insert(0, path[0].parent)
        texts = dict.fromkeys(path, 0)
        for page in self.tree.index.values():
            if page.parent in texts:
                texts[page.parent] += 1
        ends = [
            n
            for n, page in enumerate(path, 1)
            if page.tail and n <= len(path) - max(self.tree.pages_per_window, 1)
        ]
        first = max([0, *ends, len(path) - self.tree.worth.far])
        freed = self.tree.worth.tail_pages
        if not texts[tail.page]:
            freed += 1
            for page in path[first:-1][::-1]:
                if texts[page] > 1:
                    break
                freed += 1
        return (1.0 + HIT * min(tail.hits, HITS_MOST)) * (len(path) - first) / freed

    def check_coldest(self, item: Item, line: list[Item]) -> None:
        """Check that this is the coldest of all that may leave."""
        if self.tree.worth is None:
            assert self.rank(item) == min(map(self.rank, line)), "somebody colder was passed over"
            return
        carrying = {id(page.parent) for page in self.tree.index.values()}
        own = self.worth(item, carrying, filed=False)
        for other in line:
            least = own if other is item else self.worth(other, carrying, filed=True)
            assert own <= 1.000001 * least, "what is worth less was passed over"

    # Decisions

    def check_match(self, keys: list[PageKey], match: Match, device_only: bool) -> None:
        pages = []
        for key in keys:
            if key not in self.tree.index:
                break
            pages.append(self.tree.index[key])
        device = 0
        while device < len(pages) and pages[device].device is not None:
            device += 1
        if device_only:
            pages = pages[:device]
        assert (match.found, match.device) == (len(pages), device)
        window = self.tree.pages_per_window

        def legal(boundary: int) -> bool:
            needed = pages[max(0, boundary - window) : boundary] if window else []
            return all(p.tail is not None and not (device_only and p.tail.device is None) for p in needed)

        assert match.boundary == max(b for b in range(len(pages) + 1) if legal(b)), "I6"
        assert match.page is (pages[match.boundary - 1] if match.boundary else self.tree.root)
        wanted = pages[max(0, match.boundary - window) : match.boundary] if window else []
        assert [t.page for t in match.tails] == wanted[::-1]

    def check_victim(self, item: Page | Tail) -> None:
        """An item that leaves the device is unlocked, nothing hangs on it there, and it is the coldest."""
        pages = list(self.tree.index.values())
        tails = [page.tail for page in pages if page.tail and page.tail.device is not None]
        carrying = {id(p.parent) for p in pages if p.device is not None} | {id(t.page) for t in tails}
        line: list[Item] = [
            each
            for each in (*pages, *tails)
            if each.device is not None and each.load is None and each.lock == 0 and id(each) not in carrying
        ]
        assert item in line, "I3: this may not leave the device"
        self.check_coldest(item, line)

    def check_host_victim(self, item: Item) -> None:
        pages = list(self.tree.index.values())
        carrying = {id(p.parent) for p in pages}
        line: list[Item] = []
        for page in pages:
            tail = page.tail
            busy_tail = tail is not None and (tail.lock or tail.load is not None or tail.save is not None)
            if (
                page.on_host
                and page.device is None
                and not page.lock
                and not page.readers
                and id(page) not in carrying
                and not busy_tail
            ):
                line.append(page)
            if tail is not None and tail.on_host and tail.device is None and not (busy_tail or tail.readers):
                line.append(tail)
        assert item in line, "I3: this may not leave the host"
        self.check_coldest(item, line)

    def may_go(self, owner: object) -> list[Item]:
        """Items of an owner that are not used, read or moved, and that nothing hangs on."""
        pages = [page for page in self.tree.index.values() if page.owner is owner]
        carrying = {id(page.parent) for page in pages}

        def free(item: Item) -> bool:
            return not (item.lock or item.readers or item.load is not None or item.save is not None)

        line: list[Item] = [page.tail for page in pages if page.tail is not None and free(page.tail)]
        for page in pages:
            if free(page) and id(page) not in carrying and (page.tail is None or free(page.tail)):
                line.append(page)
        return line

    def check_owned_victim(self, item: Item) -> None:
        """An item that goes for its owner's limit is the coldest of that owner, and is not in use."""
        line = self.may_go(item.owner)
        assert item in line, "I3: this may not go"
        self.check_coldest(item, line)

    # After every step

    def check(self) -> None:
        real = {name: set() for name in self.readable}
        for page in self.tree.index.values():
            for item in (page, page.tail):
                if item is None:
                    continue
                if item.device is not None and item.load is None:
                    real[Tier.DEVICE, item.kind].add(page.key)
                if item.host is not None and item.save is None:
                    real[Tier.HOST, item.kind].add(page.key)
        assert real == self.readable, "the tree and the stupid model disagree about what can be read"
        for key, page in self.tree.index.items():
            above = page.parent
            assert above is self.tree.root or above.key in self.tree.index, "I6"
            assert page.lock == 0 or key in self.uses or page.host is not None
