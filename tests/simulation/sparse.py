"""What the simulations need where pages of running texts may be without their place in the second pool.

Most of it is steps under way (`UnderWay`): a step reads where it was told when it was planned, whatever has
become sparse, come back or ended since. Each part of it names what it reads, and is read when the step ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

import tiercel.cache.residency as residency_module
import tiercel.cache.room as room_module
from tests.simulation.bytes import Bytes, HostRows, Text
from tiercel.cache import Request, RequestState, TieredCache
from tiercel.cache.residency import Residency
from tiercel.models.base import Span
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
    options = {"sparse": mode, "staged_pages": random.choice([3, 8, 64, 64])}
    room_module.FEW_PAGES = random.choice([2, 8])
    residency_module.HOT_SHARE = random.choice([0.1, 1.0])
    return options


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


class HostReads:
    """What a scripted model reads of pages whose second part is on the host: single entries by hot rows,
    which keep them from step to step, or all rows of a page. (The model of `models.apart`, entry by
    entry.)"""

    def __init__(self, cache: TieredCache, own: Bytes, guesses_max: int) -> None:
        spec = cache.spec
        (self.stream,) = spec.pools[1]
        self._per_row = self.stream.entries_per_row(spec.page_tokens)
        self._least, self._page_tokens = spec.hot_places()[0], spec.page_tokens
        self._staged_most, self._tokens_most = cache.config.staged_pages, 1 + guesses_max
        self._bytes, self._host = own, HostRows(cache.host)
        self._hot: dict[int, tuple[int, ...]] = {}
        """The places that each ring has for hot rows."""
        self._held: dict[int, dict[tuple[int, int], int]] = {}
        """For each ring: the cell of its hot rows that holds an entry of a page."""
        self.seen: Counter[str] = Counter()

    def begin(self, ring: int) -> None:
        self._hot.pop(ring, None)

    def take_hot(self, ring: int, places: Sequence[int]) -> None:
        assert len(set(places)) == len(places)
        self._hot[ring], self._held[ring] = tuple(places), {}

    def row(self, row: tuple[str, int], host: int) -> np.ndarray:
        """The row of a page on the host."""
        return np.frombuffer(self._host.read(row, (host,), tail=False), np.uint8)

    def is_short(self, ring: int, tokens: int, sparse: int) -> bool:
        """Whether hot rows have room for all that so many tokens choose."""
        chosen = min(tokens * self.stream.selected, sparse * self._per_row)
        return tokens <= self._tokens_most and chosen <= len(self._hot.get(ring, ())) * self._per_row

    # What a step is told

    def check(self, spans: Sequence[Span]) -> None:
        """Each page that is read is whole, or it is on the host and the text has hot rows; each page that is
        written is whole; nobody has another's places; and all that is staged has room."""
        staged, whole, hot = set[int](), set[int](), list[int]()
        for span in spans:
            first, second, host = span.pages.tolist()
            end = span.start + len(span.tokens)
            written = max(span.start, span.write_from) // self._page_tokens
            for page in range(-(-end // self._page_tokens)):
                assert first[page] >= 0 and (second[page] >= 0) != (host[page] >= 0), (
                    f"I2: page {page} is at {first[page], second[page], host[page]}"
                )
                assert second[page] >= 0 or page < written, f"I2: page {page} is written, and is not whole"
            whole |= {place for place in second if place >= 0}
            far = {place for place in host if place >= 0}
            assert span.sparse == len(far)
            if not far:
                continue
            own = self._hot.get(span.ring, ())
            enough = len(own) >= min(len(far), self._least)
            assert enough, f"I2: {len(far)} sparse pages, hot rows in {len(own)} places"
            hot += own
            self.seen["sparse_read"] += len(far)
            if not self.is_short(span.ring, len(span.tokens), span.sparse):
                staged |= far
        assert len(set(hot)) == len(hot) and whole.isdisjoint(hot), "I3: hot rows of somebody else"
        assert len(staged) <= self._staged_most, (
            f"{len(staged)} pages to stage, {self._staged_most} have room"
        )
        self.seen["staged_read"] += len(staged)

    # Reading

    def read(self, span: Span, text: Sequence[int]) -> None:
        """A span reads the entries that it chooses, if it is short: those of sparse pages of this text."""
        here = span.pages[2, : len(text) // self._page_tokens].tolist()
        far = [page for page, host in enumerate(here) if host >= 0]
        if not far or not self.is_short(span.ring, len(span.tokens), span.sparse):
            return
        entries = [(page, entry) for page in far for entry in range(self._per_row)]
        chosen = dict[tuple[int, int], None]()
        for position in range(span.start, span.start + len(span.tokens)):
            choice = Random(f"{span.ring} {position}")
            chosen |= dict.fromkeys(choice.sample(entries, min(len(entries), self.stream.selected)))
        held = self._held[span.ring]
        others = [entry for entry in held if entry not in chosen]
        cells = [*set(range(len(self._hot[span.ring]) * self._per_row)).difference(held.values())]
        for entry in chosen:
            if entry not in held:
                held[entry] = cells.pop() if cells else held.pop(others.pop(0))
                self._bring(span, *entry, held[entry])
            self._check(span.ring, text, *entry, held[entry])
        self.seen["hot_read"] += len(chosen)

    def _bring(self, span: Span, page: int, entry: int, cell: int) -> None:
        host = int(span.pages[2, page])
        for layer in self.stream.layers:
            row = self.row((self.stream.name, layer), host)
            for here, there in zip(self._cell(span.ring, layer, cell), self._parts(row, entry), strict=True):
                here[:] = there

    def _check(self, ring: int, text: Sequence[int], page: int, entry: int, cell: int) -> None:
        rows = dict(self._bytes.expected(bytes(text[: (page + 1) * self._page_tokens]), False))
        for layer in self.stream.layers:
            wanted = self._parts(rows[self.stream.name, layer], entry)
            for here, part in zip(self._cell(ring, layer, cell), wanted, strict=True):
                assert (here == part).all(), f"I2: wrong bytes in hot rows, entry {entry} of page {page}"

    def _cell(self, ring: int, layer: int, cell: int) -> list[np.ndarray]:
        at, entry = divmod(cell, self._per_row)
        return self._parts(self._bytes.columns[self.stream.name, layer][self._hot[ring][at]], entry)

    def _parts(self, row: np.ndarray, entry: int) -> list[np.ndarray]:
        """The parts of one entry in a row."""
        parts, start = [], 0
        for part in self.stream.parts:
            parts.append(row[start + entry * part.bytes :][: part.bytes])
            start += self._per_row * part.bytes
        return parts
