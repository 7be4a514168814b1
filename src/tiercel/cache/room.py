"""How a text finds room on the device: which places it is given, and what leaves for it.

    a prompt          whole ─► loaded pages sparse ─► pages of running texts sparse ─► it waits
    a running text    whole ─► tails of running texts shared ─► pages of running texts sparse ─► it waits

Eviction of what no text reads comes before each of these (`cache.places`). Without sparse pages (`residency`
is None) all pages are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeGuard

from tiercel.cache.core import Core
from tiercel.cache.request import Found, PagePlaces, Request, TailPlaces, Wait, WaitFor
from tiercel.cache.residency import Residency
from tiercel.config import CacheConfig
from tiercel.errors import ConfigError
from tiercel.pages.pool import Reservation
from tiercel.spec.cache_spec import CacheSpec
from tiercel.tree.keys import KeyChain
from tiercel.tree.node import ids_of
from tiercel.types import DevicePageId

FIRST_PAGES = 2
"""A text that computes many pages begins with places of the second pool for so many, where there is no room
for all. It gets more as they are computed."""
FEW_PAGES = 8
"""For a prompt of so few pages, pages of running texts become sparse at once, if that is enough."""


class Way(NamedTuple):
    """How the pages of a text are on the device when places are reserved for them."""

    sparse: int
    """The first so many are without a place in the second pool."""
    bodies: int
    """Places of the second pool for the others; if they are fewer, the last pages get theirs later."""
    hot: int = 0
    """Places of the second pool for hot rows."""
    shed: bool = False
    """Whether pages of running texts become sparse for it."""


class Given(NamedTuple):
    """What a prompt was given when it begins. The reservation is the caller's to keep."""

    room: Reservation
    pages: Sequence[PagePlaces]
    """First those that are loaded, then those that it computes."""
    tails: Sequence[TailPlaces]
    hot: Sequence[DevicePageId]
    bare: int
    """How many of the last pages have no place in the second pool yet."""


def pages_whole_most(spec: CacheSpec, config: CacheConfig) -> int:
    """Pages of the longest text that is whole on the device. It reads tails and writes others, and needs
    places for both."""
    if config.staging_tails < spec.pages_per_window:
        why = f"{spec.model} keeps tails: a text reads and writes {spec.pages_per_window} at once"
        raise ConfigError("staging_tails", config.staging_tails, why)
    tails = 2 * spec.pages_per_window * spec.units_per_tail
    most = config.device_pages - -(-tails // spec.frame_units)
    if most < 1:
        why = f"a page and its tails take {config.device_pages + 1 - most}"
        raise ConfigError("device_pages", config.device_pages, why)
    return most


def make_residency(core: Core, requests: Iterable[Request]) -> Residency | None:
    """None: all pages of running texts are whole on the device."""
    spec, config = core.spec, core.config
    if config.sparse == "off" or not spec.selective or not core.places.host.capacity:
        return None
    return Residency(
        spec,
        core.tree,
        core.places,
        core.flights,
        requests,
        core.counters,
        core.save_early,
        always=config.sparse == "always",
        staged_pages=config.staged_pages,
    )


def _lacks(room: Reservation | Wait) -> TypeGuard[Wait]:
    return isinstance(room, Wait) and room.what is WaitFor.DEVICE_PAGES


class Room:
    """The places of the device, as texts ask for them."""

    def __init__(
        self,
        core: Core,
        requests: Iterable[Request],
        residency: Residency | None,
        whole_most: int,
        share_all_tails: Callable[[], bool],
    ) -> None:
        """`share_all_tails`: shares what running texts keep for themselves, so that it can leave. It returns
        whether there was any."""
        self._spec, self._tree, self._places = core.spec, core.tree, core.places
        self._requests, self._residency, self._share_all_tails = requests, residency, share_all_tails
        self._staged_most = core.config.staged_pages
        self._whole_most = whole_most
        self.pages_most = whole_most
        """Pages of the longest text."""
        if residency is not None:
            self.pages_most = max(whole_most, residency.pages_most(core.config.device_pages))

    def reuse_most(self, found: Found) -> int | None:
        """How many tokens of what was found a step can read, if it is not all: too much is sparse."""
        more = self._sparse(found)[self._staged_most :]
        return more[0] * self._spec.page_tokens if more else None

    # A prompt

    def begin(self, found: Found, upto: int) -> Given | Wait:
        """Places for what is loaded, for the pages that a prompt computes up to this position, and for
        tails."""
        far, tails = len(found.far), self._tails(found, upto)
        own = max(0, -(-upto // self._spec.page_tokens) - found.page.depth)
        way, room = self._try(found, own, tails)
        if isinstance(room, Wait):
            return room
        pages, kept, hot = self._places.deal(room.ids, far + own, tails, way.sparse, way.bodies)
        return Given(room, pages, kept, hot, far + own - way.sparse - way.bodies)

    def _tails(self, found: Found, upto: int) -> int:
        loaded = sum(tail.device is None for tail in found.tails)
        return loaded + (self._spec.pages_per_window if upto else 0)

    def _try(self, found: Found, own: int, tails: int) -> tuple[Way, Reservation | Wait]:
        way = Way(0, 0)
        room: Reservation | Wait = Wait(WaitFor.DEVICE_PAGES)
        for way in self._ways(found, own):
            room = self._reserve(found.chain, len(found.far) + own, tails, way)
            if not _lacks(room):
                break
        if isinstance(room, Reservation) and self._residency is not None:
            # What it begins with may have become sparse to make room for it.
            sparse = len(self._sparse(found)) + way.sparse
            if way.hot < self._residency.hot_places(sparse) or sparse > self._staged_most:
                with room:
                    return way, Wait(WaitFor.LEAVING)
        return way, room

    def _ways(self, found: Found, own: int) -> Iterator[Way]:
        """In which ways a text may begin, one after the other: with all of its pages whole, or, where pages
        may be sparse, with what is loaded sparse; then pages of others become sparse for it. `own`: pages
        that it will compute. One text at a time begins without places for all of these: prompts that are
        computed side by side would take the places from each other."""
        residency, far = self._residency, len(found.far)
        if residency is None:
            yield Way(0, far + own)
            return
        sparse = len(self._sparse(found))
        may_stage = sparse + far <= self._staged_most
        if found.page.depth + own <= self._whole_most and not (residency.always and may_stage):
            yield Way(0, far + own, residency.hot_places(sparse, residency.hot[0]))
        if may_stage:
            for wish in residency.hot:
                hot = residency.hot_places(sparse + far, wish)
                yield Way(far, own, hot)
            if own <= FEW_PAGES:
                yield Way(far, own, hot, shed=True)
            if own > FIRST_PAGES and not any(request.bare for request in self._requests):
                yield Way(far, FIRST_PAGES, hot, shed=True)

    def _sparse(self, found: Found) -> list[int]:
        """The numbers of the pages of what was found that are sparse on the device."""
        if self._residency is None:
            return []
        keys = found.chain.keys[: found.page.depth - len(found.far)]
        return [at for at, key in enumerate(keys) if len(ids_of(self._tree.index[key].device)) == 1]

    def make_way(self, found: Found, upto: int) -> Wait:
        """Nobody else holds a place, and yet a text finds no room beside what it would reuse: where a device
        has two pools, its own units may break too many bodies. They leave, and are packed when it begins.
        Required: it holds nothing of what was found."""
        way, pages = None, -(-max(upto, found.chain.tokens) // self._spec.page_tokens)
        if self._residency is not None and pages <= self._staged_most:
            way = Way(pages, min(pages, FIRST_PAGES), self._residency.hot_places(pages))
        room = self._reserve(found.chain, pages, self._tails(found, upto), way)
        if isinstance(room, Wait):
            return room
        with room:
            return Wait(WaitFor.LEAVING, pages)

    # A running text

    def extend(
        self, request: Request, wanted: int, boundaries: Sequence[int], *, early: bool
    ) -> dict[int, TailPlaces] | Wait:
        """Have a text's table reach `wanted` pages, each with a place in every pool. Returns places for the
        tails at these boundaries."""
        known = len(request.table)
        pages, second = max(0, wanted - known), max(0, wanted - known + request.bare)
        way = Way(pages, second, shed=True)
        room = self._reserve(request, pages, len(boundaries), way, early=early)
        if isinstance(room, Wait):
            return room
        with room:
            own, tails, seconds = self._places.deal(room.ids, pages, len(boundaries), pages)
            request.table.extend(own)
            new = dict(zip(boundaries, tails, strict=True))
            room.keep()
        for at, place in enumerate(seconds, known - request.bare):
            request.table[at] = (*ids_of(request.table[at]), place)
            if at < known:
                request.changed.add(at)
        request.bare = len(request.table) - max(wanted, known - request.bare) if self._spec.second else 0
        return new

    def _reserve(
        self,
        asker: KeyChain | Request,
        pages: int,
        tails: int,
        way: Way | None = None,
        *,
        early: bool | None = None,
    ) -> Reservation | Wait:
        """Places for a prompt that begins (`early` is None), or for a running text. Where nothing else may
        leave the device, tails that running texts keep for themselves may, and then parts of their pages."""
        reserve = partial(
            self._places.reserve,
            asker,
            pages,
            tails,
            bodies=None if way is None else way.bodies + way.hot,
            running=early is not None,
            urgent=early is False,
        )
        room = reserve()
        if early or not _lacks(room):
            return room
        if self._share_all_tails() and not _lacks(room := reserve()):
            return room
        if self._residency is None or way is None or not way.shed:
            return room
        if self._residency.make_room(room.missing) and _lacks(room := reserve()):
            return Wait(WaitFor.LEAVING, room.missing)  # what is being saved leaves then
        return room
