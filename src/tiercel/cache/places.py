"""Places in the pools of one cache: had when there is room, made free by eviction where there is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tiercel.cache.request import Wait, WaitFor
from tiercel.pages.pool import PagePool
from tiercel.pages.reservation import Reservation, Short, reserve
from tiercel.spec.cache_spec import CacheSpec
from tiercel.tree.actions import Actions, Move
from tiercel.tree.node import Page, Tail
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import DevicePageId, DeviceTailId, HostPageId

_DEVICE_PAGE_TAG, _DEVICE_TAIL_TAG, _HOST_PAGE_TAG = 1, 2, 3


class HostPlaces:
    """The pool of host pages, beside the tree that decides who goes."""

    def __init__(
        self, tree: PrefixTree, spec: CacheSpec, host: int, order: Callable[[int], Sequence[int]]
    ) -> None:
        self.host: PagePool[HostPageId] = PagePool("host pages", host, tag=_HOST_PAGE_TAG, order=order(host))
        self._tree = tree
        self._spec = spec

    @property
    def pools(self) -> tuple[PagePool[Any], ...]:
        return (self.host,)

    def make_room_ahead(self) -> None:
        """What has to be free before anybody asks: on the host nothing."""

    def take_host(self, count: int) -> tuple[HostPageId, ...] | None:
        """Host pages that are free."""
        self.settle()
        room = reserve((self.host, count))
        if isinstance(room, Short):
            return None
        with room:
            ids = tuple(room.ids(self.host))
            room.keep()
        return ids

    def take_host_by_force(self, count: int) -> tuple[HostPageId, ...] | None:
        """Host pages, if need be of what the host could do without."""
        while (host := self.take_host(count)) is None and self._tree.evict_host():
            pass
        return host

    def settle(self) -> None:
        """Carry out what the tree decided."""
        actions = self._tree.actions
        if actions.pages or actions.tails or actions.host or actions.saves:
            self._tree.actions = Actions()
            self._carry_out(actions)

    def _carry_out(self, actions: Actions) -> None:
        self.host.release(actions.host)


class Places(HostPlaces):
    """The pools of both tiers."""

    def __init__(
        self,
        tree: PrefixTree,
        spec: CacheSpec,
        counts: tuple[int, int, int],
        order: Callable[[int], Sequence[int]],
        queue_saves: Callable[[Iterable[Move]], None],
    ) -> None:
        pages, tails, host = counts
        self.pages: PagePool[DevicePageId] = PagePool(
            "device pages", pages, tag=_DEVICE_PAGE_TAG, order=order(pages)
        )
        self.tails: PagePool[DeviceTailId] = PagePool(
            "device tails", tails, tag=_DEVICE_TAIL_TAG, order=order(tails)
        )
        super().__init__(tree, spec, host, order)
        self._queue_saves = queue_saves

    @property
    def pools(self) -> tuple[PagePool[Any], ...]:
        return self.pages, self.tails, self.host

    def reserve(self, pages: int, tails: int) -> Reservation | Wait:
        """Device places, made free by eviction where they are short."""
        take_host = self.take_host if self.host.capacity else None
        self._tree.evict_pages(pages - self.pages.free - self._tree.leaving[Page], take_host)
        self._make_room_for_tails(tails)
        self.settle()
        room = reserve((self.pages, pages), (self.tails, tails))
        if isinstance(room, Short):
            pages_short = room.pool == self.pages.name
            return Wait(WaitFor.DEVICE_PAGES if pages_short else WaitFor.DEVICE_TAILS, room.missing)
        return room

    @property
    def pages_leaving(self) -> int:
        """Device pages that are free again as soon as their copies have landed."""
        return self._tree.leaving[Page]

    def make_room_ahead(self) -> None:
        """No request waits for places for tails, so an eighth is kept free for what one step writes."""
        if self.host.capacity and self._spec.tail_streams:
            self._make_room_for_tails(max(self._spec.pages_per_window, self.tails.capacity // 8))
            self.settle()

    def _make_room_for_tails(self, tails: int) -> None:
        take_host = self.take_host if self.host.capacity else None
        short = min(tails, self.tails.capacity) - self.tails.free - self._tree.leaving[Tail]
        self._tree.evict_tails(short, self._spec.host_pages_per_tail, take_host)

    def owns(self, move: Move) -> bool:
        device: PagePool[Any] = self.pages if isinstance(move.item, Page) else self.tails
        return device.owns(move.device) and all(map(self.host.owns, move.host))

    def _carry_out(self, actions: Actions) -> None:
        self.pages.release(actions.pages)
        self.tails.release(actions.tails)
        super()._carry_out(actions)
        assert all(map(self.owns, actions.saves)), "I3: a save of a place that was given back"
        self._queue_saves(actions.saves)
