"""Which pages of running texts are whole on the device, and which are sparse: their part in the second pool
was given back, and is read on the host.

    resident    first pool ■   second pool ■   host ■        rows are read in place
    sparse      first pool ■                   host ■        single entries come to hot rows

A page that is full, shared and saved may become sparse: nothing is copied for it. It is sparse for all texts
that read it, from the next step on. The steps under way still read its place, so the place is free when they
have ended. Places of pages that leave become hot rows of the texts that read them: a text has as many places
for hot rows as it has sparse pages, up to those that a step needs.

Texts begin resident. Where a place of the second pool is missing and nothing else may leave, pages of running
texts become sparse; where there is room again, they come back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from tiercel.cache.flights import Flights
from tiercel.cache.places import Places
from tiercel.cache.request import PagePlaces, Request, rows_of
from tiercel.pages.frames import Frames
from tiercel.spec.cache_spec import CacheSpec
from tiercel.transfer.plan import NO_PLACE, Direction
from tiercel.tree.node import Move, Page, ids_of
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import DevicePageId, PageKey, place

TOGETHER = 8
"""Pages become sparse at least so many at a time, if a text has as many: it needs places again soon."""
LAST_PAGES = 2
"""Pages that a text computes are whole: so many at least."""
CALM_STEPS = 64
"""Pages come back when for so many steps none became sparse."""
HOT_SHARE = 0.1
"""A long text gets more hot rows than its steps need, as long as all of them take at most this share of what
its sparse pages take on the device. With twice the cells tiny-v4 finds 0.53 of its choices in them, 0.37
without (docs/log.md)."""
BACK_BYTES = 32 * 1024**2
"""Bytes of pages that come back in one step: they share the link with loads and hot rows."""


class Texts(NamedTuple):
    """How many texts fit at once."""

    whole: int
    sparse: int


def units_of(spec: CacheSpec, pages: int, bodies: int) -> int:
    """Units of a text on the device: the first parts of its pages, so many places of the second pool, tails
    that it reads and others that it writes."""
    return pages + bodies * (spec.frame_units - 1) + 2 * spec.pages_per_window * spec.units_per_tail


class Hot(NamedTuple):
    """What a text gets hot rows for."""

    guesses: int = 0
    """The most guesses of its steps."""
    more: bool = False
    """Whether it gets more of them where it is long: then it reads the host less often."""


LEAST = Hot()


def texts_most(spec: CacheSpec, frames: int, pages: int, *, host_places: int, staged_pages: int) -> Texts:
    """How many texts of so many pages fit at once: whole on the device, and with all but their last pages
    sparse. No page is shared. A sparse text has hot rows for steps without guesses, and its pages and a tail
    on the host."""
    assert pages > 0, "a text has pages"
    units = frames * spec.frame_units
    whole = units // units_of(spec, pages, pages)
    if not spec.selective or pages > staged_pages:
        return Texts(whole, 0)
    last = min(pages, LAST_PAGES)
    bodies = last + min(pages - last, spec.hot_places()[0])
    on_device = min(units // units_of(spec, pages, bodies), frames // bodies)
    return Texts(whole, min(on_device, host_places // (pages + spec.places_per_tail)))


class _Later(NamedTuple):
    """What is given back when so many steps have ended."""

    steps: int
    ids: Sequence[DevicePageId] = ()
    locked: Page | None = None
    """A page that is unlocked then."""
    read: Page | None = None
    """A page whose host copy may leave then. It is unlocked too."""


class Residency:
    """What running texts have in the second pool."""

    def __init__(  # noqa: PLR0913
        self,
        spec: CacheSpec,
        tree: PrefixTree,
        places: Places,
        flights: Flights,
        requests: Iterable[Request],
        counters: Counter[str],
        save: Callable[..., None],
        *,
        always: bool,
        staged_pages: int,
    ) -> None:
        """`save`: starts saves of pages, also of memory that holds older pages. `always`: every page becomes
        sparse as soon as it may. `staged_pages`: the most sparse pages of one text."""
        (stream,) = spec.pools[1]
        self._spec, self._tree, self._places, self._flights = spec, tree, places, flights
        self._requests, self._counters, self._save = requests, counters, save
        assert isinstance(places.pages, Frames), "sparse pages need a second pool"
        self._pages = places.pages
        self.always, self._most = always, staged_pages
        self._entries, self._selected = stream.entries_per_row(spec.page_tokens), stream.selected
        self._body_bytes, self._body_units = spec.bytes_of(stream), spec.frame_units - 1
        self._hot_sizes: dict[int, tuple[int, int]] = {}
        """For each number of guesses: the least and the most places for hot rows."""
        self.under_way: Callable[[], int] = lambda: 0
        """How many steps are under way that were planned before now."""
        self.guesses_max = 0
        self._later: deque[_Later] = deque()
        """What is given back when steps have ended, in the order of that."""
        self._unsaved: set[Page] = set()
        """Pages whose save failed: they stay."""
        self._calm_steps = 0
        """Steps since a page became sparse."""
        self._back: dict[Page, DevicePageId] = {}
        """Pages that are coming back, and their places."""

    def pages_most(self, frames: int) -> int:
        """Pages of the longest text, if all but the last are sparse: the device has their first parts, hot
        rows and tails, the host has all of them, and one layer of them fits into a staging area."""
        taken = units_of(self._spec, 0, self.hot_places(frames) + LAST_PAGES)
        host = self._places.host.capacity - self._spec.places_per_tail
        return min(frames * self._spec.frame_units - taken, host, self._most)

    # Hot rows

    def hot_places(self, sparse: int, hot: Hot = LEAST) -> int:
        """How many places for hot rows a text with so many sparse pages has."""
        if hot.guesses not in self._hot_sizes:
            self._hot_sizes[hot.guesses] = self._spec.hot_places(hot.guesses)
        least, most = self._hot_sizes[hot.guesses]
        more = int(sparse * HOT_SHARE / self._body_units) if hot.more else 0
        return min(sparse, max(least, min(most, more)))

    @property
    def hot(self) -> Sequence[Hot]:
        """What texts get hot rows for: the first of these that there is room for."""
        most = self.guesses_max
        return (Hot(most, True), Hot(most), LEAST) if most else (Hot(0, True), LEAST)

    def guesses_of(self, request: Request) -> int:
        """The most guesses that a step may compute for this text: all they read has room in hot rows."""
        hot, sparse = len(request.hot) * self._entries, len(request.sparse) * self._entries
        return self.guesses_max if hot >= sparse else hot // self._selected - 1

    def staged(self, request: Request, tokens: int) -> Sequence[int]:
        """Host pages whose rows have to be staged for a span of so many tokens; none if hot rows do."""
        if not request.sparse or self.is_short(request, tokens):
            return ()
        index, keys = self._tree.index, request.chain.keys
        return [place(host[0]) for at in request.sparse if (host := index[keys[at]].host)]

    def is_short(self, request: Request, tokens: int) -> bool:
        """Whether hot rows have room for all that a span of so many tokens reads."""
        needed = min(tokens * self._selected, len(request.sparse) * self._entries)
        return tokens <= 1 + self.guesses_max and needed <= len(request.hot) * self._entries

    def rows(self, request: Request, first: int, pages: Sequence[PagePlaces]) -> tuple[tuple[int, ...], ...]:
        """A part of a text's page table, from page `first` on, as a step is told it."""
        index, keys = self._tree.index, request.chain.keys

        def host(number: int) -> int:
            at = first + number
            return place((index[keys[at]].host or ())[0]) if at in request.sparse else -1

        return rows_of(pages, 2, host)

    # Leaving

    def make_room(self, missing: int) -> bool:
        """Have pages become sparse, until so many places are free or leaving. Returns whether any are, or
        will be as soon as a save has ended."""
        coming, order = False, sorted(self._requests, key=lambda each: (not each.hot, -len(each.table)))
        for request in order:
            if missing <= 0:
                break
            pages: Sequence[Page] = list(self._may_leave(request))
            if self._gain({request: len(pages)}, len(pages)) <= 0:
                continue  # its own hot rows would take them all
            pages = self._allowed(pages)
            ready = [page for page in pages if page.on_host]
            gain = self._shed(ready, missing) or self._save_first(pages, ready, missing, by_force=not coming)
            missing, coming = missing - gain, coming or gain > 0
        self._places.settle()
        return coming

    def _save_first(
        self, pages: Sequence[Page], ready: Sequence[Page], missing: int, *, by_force: bool
    ) -> int:
        """These pages of one path have to be saved before they may become sparse: see that enough of them
        are. Returns how many places that gives. `by_force`: also into memory that holds others. Only the
        first text that gives places is saved so: else texts would push one another's pages out for ever."""
        if self._gain(self._readers(pages), len(pages)) <= 0:
            return 0
        saved = [page for page in pages if page.host is not None]
        if self._gain(self._readers(saved), len(saved)) <= 0:
            unsaved = [page for page in pages if page.host is None]
            for page in ready:
                self._hold(page)  # what is there already makes no room for the others
            count = max(missing, TOGETHER) + self.hot_places(len(pages))
            self._save(unsaved[:count], by_force=by_force)
            for page in ready:
                self._let_go(page)
            saved = [page for page in pages if page.host is not None]
        return max(0, self._gain(self._readers(saved), len(saved)))

    def _may_leave(self, request: Request) -> Iterator[Page]:
        """The pages of a text that may become sparse, the first ones first: the latest are read most."""
        index, keys, most = self._tree.index, request.chain.keys, self._most - len(request.sparse)
        while request.left in request.sparse:
            request.left += 1
        for at in range(request.left, request.committed):
            if most <= 0:
                return
            page = index[keys[at]]
            if page.on_device and self._tree.is_whole(page) and page not in self._unsaved:
                most -= 1
                yield page

    def _allowed(self, pages: Sequence[Page]) -> Sequence[Page]:
        """The first ones of these pages of one path, so many that each text that reads them can still have
        its sparse pages staged."""
        readers = ((own, self._most - len(each.sparse)) for each, own in self._readers(pages).items())
        return pages[: max(0, min((room for own, room in readers if own > room), default=len(pages)))]

    def _readers(self, pages: Sequence[Page]) -> dict[Request, int]:
        """The texts that read these pages of one path: how many of the first ones each of them reads."""
        readers = dict[Request, int]()
        if not pages:
            return readers
        first = pages[0].depth - 1
        for request in self._requests:
            keys, upto = request.chain.keys, request.committed
            if upto <= first or keys[first] != pages[0].key:
                continue

            def foreign(page: Page, keys: Sequence[PageKey] = keys, upto: int = upto) -> bool:
                return page.depth > upto or keys[page.depth - 1] != page.key

            if count := bisect_left(pages, True, key=foreign):
                readers[request] = count
        return readers

    def _needs(self, readers: Mapping[Request, int], count: int, hot: Hot) -> dict[Request, int]:
        """How many places for hot rows each reader lacks once the first `count` pages are sparse."""
        return {
            request: max(0, self.hot_places(len(request.sparse) + min(own, count), hot) - len(request.hot))
            for request, own in readers.items()
        }

    def _gain(self, readers: Mapping[Request, int], count: int, hot: Hot = LEAST) -> int:
        """How many places come free if so many pages become sparse, less the hot rows of their readers."""
        return count - sum(self._needs(readers, count, hot).values())

    def _shed(self, pages: Sequence[Page], missing: int) -> int:
        """Have the first of these pages of one path become sparse, as many as are needed. Returns how many
        places that gives. All or nothing: no text is without its hot rows."""
        readers = self._readers(pages)
        for hot in self.hot:
            if (most := self._gain(readers, len(pages), hot)) > 0:
                wanted = min(most, max(missing, TOGETHER))
                counts = range(wanted, len(pages) + 1)
                count = next(n for n in counts if self._gain(readers, n, hot) >= wanted)
                self.leave(pages[:count], hot)
                return wanted
        return 0

    def leave(self, pages: Sequence[Page], hot: Hot) -> None:
        """These pages of one path become sparse. Required: their places, and free ones, are enough for hot
        rows."""
        readers = self._readers(pages)
        needs = self._needs(readers, len(pages), hot)
        left = [self._tree.shed(page) for page in pages]
        if (lack := sum(needs.values()) - len(left)) > 0:
            left += self._pages.take(0, lack)
        self._calm_steps = 0
        for request, count in readers.items():
            own = [page.depth - 1 for page in pages[:count]]
            for at in own:
                request.table[at] = self._tree.index[request.chain.keys[at]].device
            request.sparse.update(own)
            request.changed.update(own)
            if needs[request]:
                self._give_hot(request, left, needs[request])
        self._counters["pages_sparse"] += len(pages)
        self.release(left)

    def _give_hot(self, request: Request, left: list[DevicePageId], count: int) -> None:
        """A text takes places for hot rows from these."""
        if count:
            request.hot += tuple(left[:count])
            request.hot_changed = True
            del left[:count]

    def release(
        self, ids: Sequence[DevicePageId], *, locked: Page | None = None, read: Page | None = None
    ) -> None:
        """Give places back, unlock a page, or let go of one that is held: when the steps under way have
        ended, which may read them."""
        later = _Later(self.under_way(), ids, locked, read)
        if later.steps:
            self._pages.leave(ids)
            self._later.append(later)
        else:
            self._release(later)

    def _release(self, later: _Later) -> None:
        self._pages.release(later.ids)
        if later.locked is not None:
            self._tree.unlock(later.locked)
        if later.read is not None:
            self._let_go(later.read)

    def _hold(self, page: Page) -> None:
        """The host copy of a page is read: it stays, also if the page is whole."""
        self._tree.lock(page)
        self._tree.read_start(page)

    def _let_go(self, page: Page) -> None:
        self._tree.read_done(page)
        self._tree.unlock(page)

    def advanced(self) -> None:
        """A step has ended."""
        self._later = deque(later._replace(steps=later.steps - 1) for later in self._later)
        while self._later and not self._later[0].steps:
            self._release(self._later.popleft())

    def saved(self, move: Move, ok: bool) -> None:
        """A save of a page has ended."""
        if not ok and isinstance(move.item, Page) and not move.item.gone:
            self._unsaved.add(move.item)

    # Beginning and ending

    def begin(self, request: Request, hot: Sequence[DevicePageId]) -> None:
        """A text begins with these places for hot rows."""
        table = enumerate(request.table[: request.committed])
        request.sparse = {at for at, places in table if len(ids_of(places)) == 1}
        request.hot, request.hot_changed = tuple(hot), bool(hot)

    def end(self, request: Request) -> None:
        """A text ends. A step under way may still read its hot rows, and what it reads on the host."""
        if request.sparse:
            self._tree.lock(request.page)
            self.release(request.hot, locked=request.page)
        request.hot, request.sparse = (), set()

    def adopt(self, page: Page, own: tuple[DevicePageId, ...]) -> tuple[DevicePageId, ...]:
        """A text computed a page that is shared already. If that is sparse, it gets the text's place in the
        second pool: all its readers have it whole again. Returns the places that are left."""
        if self._tree.is_whole(page) or not page.on_device:
            return own
        first, second = own
        self._whole(page, second)
        return (first,)

    # Coming back

    def step(self) -> None:
        """Have pages leave that always do, or come back where there is room."""
        self._unsaved = {page for page in self._unsaved if not page.gone}
        self._calm_steps += 1
        if self.always:
            for request in self._requests:
                self._leave_always(request)
        elif (
            self._calm_steps > CALM_STEPS
            and not self._places.waits
            and any(request.sparse for request in self._requests)
        ):
            self._come_back()
        self._places.settle()

    def _leave_always(self, request: Request) -> None:
        """All pages of a text that may become sparse do, if there are places for the hot rows."""
        pages = self._allowed([page for page in self._may_leave(request) if page.on_host])
        readers = self._readers(pages)
        for hot in self.hot if pages else ():
            lack = -self._gain(readers, len(pages), hot)
            if self._pages.lack(0, max(0, lack)) <= 0:
                self.leave(pages, hot)
                return

    def _come_back(self) -> None:
        """Load the second part of a few sparse pages again, the latest of a text first. What no text reads
        leaves the device for them."""
        texts = sorted((each for each in self._requests if each.sparse), key=lambda each: len(each.sparse))
        numbers = ((request, at) for request in texts for at in sorted(request.sparse, reverse=True))
        pages = (self._tree.index[request.chain.keys[at]] for request, at in numbers)
        back = (page for page in pages if page.on_device and page.on_host and page not in self._back)
        chosen = dict.fromkeys(islice(back, max(0, BACK_BYTES // self._body_bytes - len(self._back))))
        if not chosen or self._places.make_room((0, len(chosen) + TOGETHER)) > 0:
            return
        if self._pages.lack(0, len(chosen)) > 0:
            return  # they come as soon as what leaves has been saved
        moves = list[Move]()
        for page, second in zip(chosen, self._pages.take(0, len(chosen)), strict=True):
            self._back[page] = second
            self._hold(page)
            moves.append(Move(page, (NO_PLACE, second), page.host or ()))
        self._flights.queue(Direction.LOAD, moves)

    def is_back(self, move: Move) -> bool:
        """Whether this load brings the second part of a page only."""
        return move.near[0] == NO_PLACE

    def came_back(self, move: Move, ok: bool) -> None:
        page, second = move.item, DevicePageId(move.near[1])
        assert isinstance(page, Page)
        del self._back[page]
        if ok and not self._tree.is_whole(page):
            self._whole(page, second)
            self._counters["pages_back"] += 1
        else:
            self._pages.release([second])
        self._let_go(page)

    def _whole(self, page: Page, second: DevicePageId) -> None:
        """A page is whole again. Steps under way may still read it on the host."""
        self._hold(page)
        self._tree.whole(page, second)
        self.release((), read=page)
        at = page.depth - 1
        for request in self._readers([page]):
            request.table[at] = page.device
            request.sparse.discard(at)
            request.changed.add(at)
            request.left = min(request.left, at)
            if not request.sparse:
                self.release(request.hot)
                request.hot = ()
            elif len(request.hot) > (enough := self.hot_places(len(request.sparse), self.hot[0])):
                self.release(request.hot[enough:])
                request.hot, request.hot_changed = request.hot[:enough], True

    def stats(self) -> dict[str, int]:
        """Pages of running texts now, each text for itself, and places of hot rows."""
        pages = sum(len(each.table) - each.bare for each in self._requests)
        sparse = sum(len(each.sparse) for each in self._requests)
        hot = sum(len(each.hot) for each in self._requests)
        return {"pages_whole": pages - sparse, "pages_sparse": sparse, "places_hot": hot}

    def owned(self) -> Iterator[DevicePageId]:
        """The places that belong to no page and no text: of pages that are coming back, and those that steps
        under way may still read."""
        yield from self._back.values()
        for later in self._later:
            yield from later.ids
