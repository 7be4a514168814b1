"""The rings of running texts: what each holds of the cache, and the changes that a runner has to be told."""

from __future__ import annotations

from collections.abc import Sequence

from tiercel.cache import Request, TieredCache, Wait
from tiercel.cache.request import PagePlaces, rows_of
from tiercel.cache.tails import tails_to_write
from tiercel.engine.step import Begin, Change, HotPlaces, PageTable, Step
from tiercel.engine.task import Seat, Stage, Task
from tiercel.types import place


class Seats:
    """The rings of one runner, and the texts in them."""

    def __init__(self, cache: TieredCache, rings: int, context_tokens: int) -> None:
        self.free = list(range(rings))
        self.in_ring: dict[int, Seat] = {}
        self._cache, self._page_tokens = cache, cache.spec.page_tokens
        self._pools = len(cache.spec.pools)
        self._context_tokens = context_tokens
        self._changes: list[Change] = []
        self._loads: list[int] = []

    def take(self, task: Task, request: Request) -> Seat:
        cached = request.reuse.cached_tokens
        task.seat = seat = Seat(task, request, self.free.pop(), cached, cached)
        self.in_ring[seat.ring] = seat
        return seat

    def leave(self, seat: Seat) -> None:
        self.free.append(seat.ring)
        del self.in_ring[seat.ring]
        seat.task.seat = None

    # What the next step tells

    def begin(self, seat: Seat) -> None:
        """All that the text reuses is on the device, or is there before a step reads it."""
        task, table = seat.task, seat.request.table
        tails, tokens = tuple(seat.request.tail_places(self._page_tokens)), tuple(task.tokens)
        begin = Begin(seat.ring, tokens, task.prompt_tokens, task.sampling, tails, seat.write_from)
        self._changes += begin, self._page_table(seat, 0, table)

    def wait_for(self, load: int) -> None:
        """The next step reads what this load brings."""
        if load not in self._loads:
            self._loads.append(load)

    def tell(self) -> tuple[tuple[Change, ...], tuple[int, ...]]:
        """Changes and loads since the last call, for one step."""
        if self._cache.residency is not None:
            for seat in self.in_ring.values():
                if seat.task.stage is Stage.RUNNING:
                    self._tell_residency(seat)
        changes, self._changes = tuple(self._changes), []
        loads, self._loads = tuple(self._loads), []
        return changes, loads

    def _tell_residency(self, seat: Seat) -> None:
        """Which of its pages became sparse, or whole again, and its hot rows."""
        request = seat.request
        if request.changed:
            first, end = min(request.changed), max(request.changed) + 1
            self._changes.append(self._page_table(seat, first, request.table[first:end]))
            request.changed.clear()
        if request.hot_changed:
            self._changes.append(HotPlaces(seat.ring, tuple(map(place, request.hot))))
            request.hot_changed = False

    def tell_again(self, step: Step) -> None:
        """This step was not run: the next one repeats its changes and loads."""
        self._changes[:0] = step.changes
        self._loads[:0] = step.loads

    def forget(self) -> None:
        """No step tells what was noted for it: the texts in these rings begin again."""
        assert not self.in_ring, "a text has a ring"
        self._changes.clear()
        self._loads.clear()

    # Pages

    def page_end(self, position: int) -> int:
        """The end of the page that this position lies in."""
        return min((position // self._page_tokens + 1) * self._page_tokens, self._context_tokens)

    def reach(self, seat: Seat) -> int:
        """Positions below this one can be computed: there is room for them, and for the tails on the way."""
        request = seat.request
        return min(request.extended_tokens, (request.tails_upto + 1) * self._page_tokens - 1)

    def add_pages(self, seat: Seat, position: int, *, early: bool = False) -> Wait | None:
        """Room up to the end of the page that a position lies in, and for the tail behind the position; or
        what the text waits for."""
        table = seat.request.table
        first = len(table)
        waits = self._extend(seat, self.page_end(position), position + 1, early=early)
        if waits is None and first < len(table):
            self._changes.append(self._page_table(seat, first, table[first:]))
        return waits

    def extend_prompt(self, seat: Seat, end: int) -> tuple[int, Wait | None]:
        """A step is going to compute a prompt up to `end`: reserve places for the tails that it writes. This
        is not done earlier, because a long prompt writes many tails. If there is no room for all of them,
        the step ends behind the first tail, or before it; or behind a page more than those that have
        places in the second pool, or before it. Returns that end, and what the text waits for."""
        request, page_tokens = seat.request, self._page_tokens
        asked = end <= request.extended_tokens and end // page_tokens <= request.tails_upto
        if (asked and end > seat.write_from) or (waits := self._extend_prompt(seat, end)) is None:
            return end, None
        first = min(tails_to_write(self._cache.spec, request, end), default=0) * page_tokens
        whole = (len(request.table) - request.bare) * page_tokens
        more = whole + page_tokens
        for sooner in sorted({end, first, first - 1, more, more - 1, whole}, reverse=True):
            if seat.planned < sooner <= end and (waits := self._extend(seat, sooner, sooner)) is None:
                return sooner, None
        self._extend(seat, seat.planned, seat.planned)  # it is promised nothing: texts that draw come first
        return seat.planned, waits

    def _extend_prompt(self, seat: Seat, end: int) -> Wait | None:
        return self._extend(seat, self.page_end(end), end)

    def _extend(self, seat: Seat, upto: int, tails_upto: int, *, early: bool = False) -> Wait | None:
        extended = self._cache.extend(seat.request, upto, tails_upto=tails_upto, early=early)
        return extended if isinstance(extended, Wait) else None

    def commit(self, seat: Seat) -> None:
        """Share what is computed. If another text shared the same pages first, its pages are used."""
        if seat.computed < seat.write_from:
            return  # a replay is not over
        seat.committed = seat.computed // self._page_tokens
        seat.task.name_pages()
        request, first = seat.request, seat.request.committed
        own = request.table[first : seat.committed]
        self._cache.commit(request, seat.computed)
        shared = request.table[first : seat.committed]
        if shared != own:
            self._changes.append(self._page_table(seat, first, shared))

    def _page_table(self, seat: Seat, first: int, pages: Sequence[PagePlaces]) -> PageTable:
        if (residency := self._cache.residency) is None:
            return PageTable(seat.ring, first, rows_of(pages, self._pools))
        return PageTable(seat.ring, first, residency.rows(seat.request, first, pages))
