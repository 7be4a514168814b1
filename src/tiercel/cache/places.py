"""Places in the pools of one cache: taken where they are free, made free by eviction where they are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tiercel.cache.request import PagePlaces, TailPlaces, Wait, WaitFor
from tiercel.pages.frames import Frames
from tiercel.pages.pool import PagePool, Reservation, Short, reserve
from tiercel.spec.cache_spec import CacheSpec
from tiercel.tree.node import Actions, Move
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import DevicePageId, HostPageId

Counts = tuple[int, ...]
"""How many places of each pool of the device."""


class Places:
    """The pool of each tier, and the tree that decides what is evicted. Without a device pool, or without
    a host tier, the pool has no places. Pages and tails share a pool: what they are worth decides how many of
    each it holds. (Two device pools are `Frames`: two kinds of places in one memory.)

    `counts`: whole pages that the device has room for, and host pages. `order` is the order in which a pool
    first gives out its places.
    """

    def __init__(
        self,
        tree: PrefixTree,
        spec: CacheSpec,
        counts: tuple[int, int],
        order: Callable[[int], Sequence[int]],
        queue_saves: Callable[[Iterable[Move]], None],
    ) -> None:
        pages, host = counts
        self.pages: PagePool[DevicePageId] | Frames[DevicePageId]
        if spec.second:
            self.pages = Frames("device units", pages, spec.frame_units, tags=(1, 2), order=order(pages))
        else:
            self.pages = PagePool("device pages", pages, tag=1, order=order(pages))
        self.host = PagePool[HostPageId]("host pages", host, tag=3, order=order(host))
        self._tree = tree
        self.pools, self._tail_units = len(spec.pools), spec.units_per_tail
        self._queue_saves = queue_saves
        self._promised: dict[object, tuple[bool, Counts]] = {}
        """Device places that were promised since the last step, by who waits for them, and whether that is a
        running text."""
        self._promised_to: dict[bool, Counts] = dict.fromkeys((True, False), (0,) * self.pools)
        """All that is promised to running texts (True), and to prompts that wait."""

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

    def reserve(
        self,
        asker: object,
        pages: int,
        tails: int = 0,
        *,
        bodies: int | None = None,
        running: bool = False,
        urgent: bool = False,
    ) -> Reservation | Wait:
        """Device places for pages and tails (`deal` tells which is whose). Eviction frees some if too few are
        free. `bodies`: places in the second pool; None: as many as pages.

        An asker that has to wait is promised its places until the next step, when it asks again. So a place
        that is leaving counts for one asker only, and every asker causes the evictions that it needs. Only an
        `urgent` asker takes free places that are promised to others; then other places are freed for them. A
        `running` text comes before prompts that wait: it takes what is leaving for these.
        """
        seconds = pages if bodies is None else bodies
        wanted: Counts = (pages + tails * self._tail_units, seconds)[: self.pools]
        if (before := self._promised.pop(asker, None)) is not None:
            self._promise(*before, -1)
        if not any(wanted):
            return Reservation(self.pages, [])
        with_others = _sum(wanted, self._before(running))
        lack = self.make_room(with_others)
        missing = self.pages.lack(*(wanted if urgent else with_others))
        if missing > 0:
            # If something may still be evicted, it waits for host memory, which saves are filling.
            if lack > 0 and self._tree.device.coldest() is None:
                return Wait(WaitFor.DEVICE_PAGES, missing)
            self._promised[asker] = running, wanted
            self._promise(running, wanted)
            return Wait(WaitFor.LEAVING, missing)
        room = reserve(self.pages, *wanted)
        if isinstance(room, Short):
            return Wait(WaitFor.DEVICE_PAGES, room.missing)
        if urgent and self._promised:
            self.make_room(self._before(False))  # for those that it took places from
        return room

    def make_room(self, counts: Counts) -> int:
        """Evict until so many places are free when all that leaves has left. Returns how many are missing."""
        while (lack := self.pages.lack(*counts, later=True)) > 0 and self._tree.evict(lack, self._saves_to):
            self.settle()
        self.settle()
        return lack

    def deal(
        self, ids: Sequence[DevicePageId], pages: int, tails: int, sparse: int = 0, bodies: int | None = None
    ) -> tuple[list[PagePlaces], list[TailPlaces], list[DevicePageId]]:
        """The places of each page and of each tail, from those that were reserved for all of them; and the
        places of the second pool that are left. The first pages are the sparse ones, the next `bodies` are
        whole; None: all of them."""
        each = self._tail_units
        end = pages + tails * each
        firsts, seconds = ids[:pages], list(ids[end:])
        upto = pages if bodies is None else min(pages, sparse + bodies)
        whole: list[PagePlaces] = [*firsts]
        if self.pools > 1:
            both = zip(firsts[sparse:upto], seconds[: upto - sparse], strict=True)
            whole = [*((first,) for first in firsts[:sparse]), *both, *((first,) for first in firsts[upto:])]
            del seconds[: upto - sparse]
        return whole, [tuple(ids[at : at + each]) for at in range(pages, end, each or 1)], seconds

    @property
    def waits(self) -> bool:
        """Whether somebody was promised places since the last step."""
        return bool(self._promised)

    def _before(self, running: bool) -> Counts:
        """What was promised to those that an asker does not come before."""
        return self._promised_to[True] if running else _sum(self._promised_to[True], self._promised_to[False])

    def _promise(self, running: bool, counts: Counts, sign: int = 1) -> None:
        self._promised_to[running] = _sum(self._promised_to[running], counts, sign)

    def forget_promises(self) -> None:
        """Copies may have landed since: a request that still waits asks again."""
        if self._promised:
            self._promised.clear()
            self._promised_to = dict.fromkeys((True, False), (0,) * self.pools)

    @property
    def _saves_to(self) -> Callable[[int], tuple[HostPageId, ...] | None] | None:
        return self.take_host if self.host.capacity else None

    def own(self, moves: Sequence[Move]) -> bool:
        """Whether the pools have given out all places of these moves."""
        device = [page for move in moves for page in move.near]
        host = [page for move in moves for page in move.host]
        return self.pages.own(device) and self.host.own(host)

    def settle(self) -> None:
        """Carry out what the tree decided."""
        actions = self._tree.copies.actions
        if actions.device or actions.leaving or actions.host or actions.saves:
            self._tree.copies.actions = Actions()
            self.pages.leave(actions.leaving)
            self.pages.release(actions.device)
            self.host.release(actions.host)
            if actions.saves:
                assert self.own(actions.saves), "I3: a save of a place that was given back"
                self._queue_saves(actions.saves)


def _sum(counts: Counts, others: Counts, sign: int = 1) -> Counts:
    return tuple(count + sign * other for count, other in zip(counts, others, strict=True))
