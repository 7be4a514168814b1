"""Who leaves a tier when it is full, coldest first."""

from __future__ import annotations

from collections.abc import Callable

from tiercel.policy.evict import Rank
from tiercel.tree.candidates import Candidates
from tiercel.tree.moving import Moving
from tiercel.tree.node import Item, Page, Tail, idle
from tiercel.types import HostPageId

Line = Candidates[Page] | Candidates[Tail]

TakeHost = Callable[[int], tuple[HostPageId, ...] | None]
"""So many host pages, or None when there are not so many free."""


class Evicting(Moving):
    """Only leaves go, and nothing that is locked or on its way."""

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
