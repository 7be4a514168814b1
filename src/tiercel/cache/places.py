"""Places in the pools of one cache: taken where they are free, made free by eviction where they are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tiercel.cache.request import Wait, WaitFor
from tiercel.pages.pool import PagePool, Reservation, Short, reserve
from tiercel.spec.cache_spec import CacheSpec
from tiercel.tree.node import Actions, Move, Page, Tail
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import DevicePageId, DeviceTailId, HostPageId, Kind


class Places:
    """The pools of both tiers, and the tree that decides what is evicted. Without a device pool, or without
    a host tier, the pool has no places.

    `order` is the order in which a pool first gives out its places.
    """

    def __init__(
        self,
        tree: PrefixTree,
        spec: CacheSpec,
        counts: tuple[int, int, int],
        order: Callable[[int], Sequence[int]],
        queue_saves: Callable[[Iterable[Move]], None],
    ) -> None:
        pages, tails, host = counts
        self.pages = PagePool[DevicePageId]("device pages", pages, tag=1, order=order(pages))
        self.tails = PagePool[DeviceTailId]("device tails", tails, tag=2, order=order(tails))
        self.host = PagePool[HostPageId]("host pages", host, tag=3, order=order(host))
        self._tree = tree
        self._spec = spec
        self._queue_saves = queue_saves
        self._promised: dict[object, int] = {}
        """Device pages that were promised since the last step, by the request that waits for them."""
        self._promised_pages = 0

    def take_host(self, count: int) -> tuple[HostPageId, ...] | None:
        """Host pages that are free."""
        given = self._tree.copies.actions.host
        if given and self.host.free < count:  # only these: to settle for each evicted page is too slow
            self._tree.copies.actions.host = []
            self.host.release(given)
        return tuple(self.host.take(count)) if self.host.free >= count else None

    def take_host_by_force(self, count: int) -> tuple[HostPageId, ...] | None:
        """Host pages; the coldest pages and tails leave the host for them if none are free."""
        while (host := self.take_host(count)) is None and self._tree.evict_host():
            pass
        return host

    def reserve(self, asker: object, pages: int, tails: int, *, urgent: bool = False) -> Reservation | Wait:
        """Device places. Eviction frees some if too few are free.

        An asker that has to wait is promised its pages until the next step, when it asks again. So a page
        that is leaving counts for one asker only, and every asker causes the evictions that it needs. Only an
        `urgent` asker takes free pages that are promised to others; then other pages are evicted for them.
        """
        self._promised_pages -= self._promised.pop(asker, 0)
        self._tree.evict(Kind.PAGE, pages - self._pages_to_come, self._saves_to)
        self._make_room_for_tails(tails)
        self.settle()
        missing = pages - self.pages.free + (0 if urgent else self._promised_pages)
        if pages and missing > 0:
            # If something may still be evicted, it waits for host memory, which saves are filling.
            if pages > self._pages_to_come and self._tree.device[Kind.PAGE].coldest() is None:
                return Wait(WaitFor.DEVICE_PAGES, missing)
            self._promised[asker] = pages
            self._promised_pages += pages
            return Wait(WaitFor.LEAVING, missing)
        room = reserve((self.pages, pages), (self.tails, tails))
        return Wait(WaitFor.DEVICE_TAILS, room.missing) if isinstance(room, Short) else room

    @property
    def pages_leaving(self) -> int:
        """Device pages that are free again as soon as their copies have landed."""
        return self._tree.copies.leaving[Kind.PAGE]

    @property
    def _pages_to_come(self) -> int:
        """Pages that are free or leaving, less those that were promised."""
        return self.pages.free + self.pages_leaving - self._promised_pages

    def forget_promises(self) -> None:
        """Copies may have landed since: a request that still waits asks again."""
        self._promised.clear()
        self._promised_pages = 0

    @property
    def _saves_to(self) -> Callable[[int], tuple[HostPageId, ...] | None] | None:
        return self.take_host if self.host.capacity else None

    def make_room_ahead(self) -> None:
        """Keep an eighth of the tail places free for one step's writes: no request waits for them."""
        if self.host.capacity and self._spec.tail_streams:
            self._make_room_for_tails(max(self._spec.pages_per_window, self.tails.capacity // 8))
            self.settle()

    def _make_room_for_tails(self, tails: int) -> None:
        short = min(tails, self.tails.capacity) - self.tails.free - self._tree.copies.leaving[Kind.TAIL]
        self._tree.evict(Kind.TAIL, short, self._saves_to, host_pages=self._spec.host_pages_per_tail)

    def own(self, moves: Sequence[Move]) -> bool:
        """Whether the pools have given out all places of these moves."""
        pages = [move.device for move in moves if isinstance(move.item, Page)]
        tails = [move.device for move in moves if isinstance(move.item, Tail)]
        host = [page for move in moves for page in move.host]
        return self.pages.own(pages) and self.tails.own(tails) and self.host.own(host)

    def settle(self) -> None:
        """Carry out what the tree decided."""
        actions = self._tree.copies.actions
        if actions.pages or actions.tails or actions.host or actions.saves:
            self._tree.copies.actions = Actions()
            self.pages.release(actions.pages)
            self.tails.release(actions.tails)
            self.host.release(actions.host)
            if actions.saves:
                assert self.own(actions.saves), "I3: a save of a place that was given back"
                self._queue_saves(actions.saves)
