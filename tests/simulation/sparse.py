"""What the simulations need where pages of running texts may be without their place in the second pool.

Most of it is steps under way (`UnderWay`): a step reads where it was told when it was planned, whatever has
become sparse, come back or ended since. Each part of it names what it reads, and is read when the step ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

import tiercel.cache.residency as residency_module
from tests.simulation.bytes import Bytes, HostRows, Text
from tiercel.cache import Request, RequestState, TieredCache
from tiercel.cache.residency import Residency
from tiercel.spec import CacheSpec
from tiercel.types import DevicePageId, PageKey

STEPS_MOST = 2
"""So many steps are under way at most, as in the loop that queues them."""


def sparse_options(spec: CacheSpec, setup: int) -> dict[str, object]:
    """The part of a `CacheConfig` that is about sparse pages. What else is drawn for a world stays as it
    is. Pages come back soon, and few leave at a time: a text of a simulation has few of them."""
    if not spec.selective:
        return {}
    random = Random(f"sparse of {setup}")
    residency_module.CALM_STEPS = random.choice([1, 4, 16])
    residency_module.TOGETHER = random.choice([1, 2, 8])
    residency_module.BACK_BYTES = random.choice([200, 32 * 1024**2])
    mode = random.choice(["auto", "auto", "auto", "always", "always", "off"])
    return {"sparse": mode, "staged_pages": random.choice([3, 8, 64, 64])}


@dataclass
class Told:
    """What the next step of a text is told of it."""

    request: Request
    rows: list[tuple[int, ...]] = field(default_factory=list)
    """For each page: its place in each pool, and on the host; -1: it has none."""
    hot: tuple[DevicePageId, ...] = ()
    stamp: int = 0
    """What its steps have written into its hot rows; 0: nothing yet."""

    def tell(self, residency: Residency) -> None:
        """As `engine.seats` does: new pages, those that changed, and hot rows."""
        request = self.request
        new = range(len(self.rows), len(request.table))
        self.rows += [()] * len(new)
        for at in sorted({*new, *request.changed}):
            self.tell_page(residency, at)
        request.changed.clear()
        if request.hot_changed:
            self.hot, self.stamp, request.hot_changed = request.hot, 0, False

    def tell_page(self, residency: Residency, at: int) -> None:
        (self.rows[at],) = zip(*residency.rows(self.request, at, [self.request.table[at]]), strict=True)


@dataclass
class Reading:
    """What a step reads of one text."""

    told: Told
    rows: Sequence[tuple[int, ...]]
    hot: tuple[DevicePageId, ...]
    keys: Sequence[PageKey]
    texts: Sequence[Text]

    @property
    def sparse(self) -> int:
        return sum(second < 0 for _, second, _ in self.rows)


class UnderWay:
    """The steps under way of one world. (A world without a `Residency` has none.)"""

    def __init__(self, cache: TieredCache, own: Bytes) -> None:
        self._cache, self._bytes = cache, own
        self.steps: list[list[Reading]] = []
        self._stamps = 0
        self.sparse_read = 0
        """How many sparse pages steps have read."""
        self.late_read = 0
        """How many of them were whole again, or belonged to no text any more, when they were read."""
        if cache.residency is not None:
            cache.residency.under_way = lambda: len(self.steps)

    @property
    def residency(self) -> Residency:
        assert self._cache.residency is not None
        return self._cache.residency

    def plan(self, texts: Iterable[tuple[Told, Sequence[Text]]]) -> None:
        """A step that reads these pages of these texts."""
        step = list[Reading]()
        for told, pages in texts:
            told.tell(self.residency)
            keys = told.request.chain.keys[: len(pages)]
            step.append(Reading(told, tuple(told.rows[: len(pages)]), told.hot, keys, pages))
            assert len(step[-1].rows) == len(pages)
        self.steps.append(step)

    def end(self) -> None:
        """The first step is run, and has ended."""
        step = self.steps[0]
        for reading in step:
            self._fill_hot(reading)
        for reading in step:
            self._check(reading)
        self.residency.advanced()
        del self.steps[0]

    def _fill_hot(self, reading: Reading) -> None:
        """Hot rows keep what earlier steps brought, and take more."""
        told = reading.told
        if not reading.sparse:
            return
        least = self._cache.spec.hot_places()[0]
        enough = len(reading.hot) >= min(reading.sparse, least)
        assert enough, f"I2: {reading.sparse} sparse pages, hot rows in {len(reading.hot)} places"
        assert self._cache.pages.own(reading.hot), "I3: hot rows were given back while a step reads them"
        kept = told.stamp and told.hot == reading.hot
        self._stamps += not kept
        stamp = told.stamp if kept else 1 + self._stamps % 200
        for place in reading.hot:
            body = self._bytes.body(place)
            if kept:
                self._bytes.check_filled(body, stamp, "hot rows")
            self._bytes.fill(body, stamp)
        if told.hot == reading.hot:
            told.stamp = stamp

    def _check(self, reading: Reading) -> None:
        """A text that has ended meanwhile may read anything on the device, but for its hot rows."""
        spec, request = self._cache.spec, reading.told.request
        here = request.state is not RequestState.ENDED
        for (first, second, host), key, text in zip(reading.rows, reading.keys, reading.texts, strict=True):
            ids = (first, second) if second >= 0 else (first,)
            if here:
                self._bytes.check(ids, text, tail=False, who="a step under way")
            if second >= 0:
                continue
            assert host >= 0, "I2: a step reads a page that has its second part nowhere"
            expected = [
                (row, data)
                for row, data in self._bytes.expected(text, False)
                if spec.pool_of(spec.stream(row[0])) == 1
            ]
            HostRows(self._cache.host).check(expected, (host,), tail=False, who="a step under way")
            self.sparse_read += 1
            page = self._cache.tree.index.get(key)
            self.late_read += not here or page is None or self._cache.tree.is_whole(page)
