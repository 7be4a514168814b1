"""The rings of running texts: what each holds of the cache, and the changes that a runner has to be told."""

from __future__ import annotations

from tiercel.cache import Request, TieredCache, Wait
from tiercel.engine.step import Begin, PageTable, Step
from tiercel.engine.task import Seat, Task
from tiercel.types import place


class Seats:
    """The rings of one runner, and the texts in them."""

    def __init__(self, cache: TieredCache, rings: int, context_tokens: int) -> None:
        self.free = list(range(rings))
        self.in_ring: dict[int, Seat] = {}
        self._cache, self._page_tokens = cache, cache.spec.page_tokens
        self._context_tokens = context_tokens
        self._changes: list[Begin | PageTable] = []
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
        task, table = seat.task, tuple(map(place, seat.request.table))
        tails, tokens = tuple(seat.request.tail_places(self._page_tokens)), tuple(task.tokens)
        begin = Begin(seat.ring, tokens, task.prompt_tokens, task.sampling, tails, seat.write_from)
        self._changes += begin, PageTable(seat.ring, 0, table)

    def wait_for(self, load: int) -> None:
        """The next step reads what this load brings."""
        if load not in self._loads:
            self._loads.append(load)

    def tell(self) -> tuple[tuple[Begin | PageTable, ...], tuple[int, ...]]:
        """Changes and loads since the last call, for one step."""
        changes, self._changes = tuple(self._changes), []
        loads, self._loads = tuple(self._loads), []
        return changes, loads

    def tell_again(self, step: Step) -> None:
        """This step was not run: the next one repeats its changes and loads."""
        self._changes[:0] = step.changes
        self._loads[:0] = step.loads

    # Pages

    def page_end(self, position: int) -> int:
        """The end of the page that this position lies in."""
        return min((position // self._page_tokens + 1) * self._page_tokens, self._context_tokens)

    def add_pages(self, seat: Seat, upto: int, *, early: bool = False) -> Wait | None:
        """Room up to the end of the page that position `upto` lies in; or what the text waits for."""
        table = seat.request.table
        first = len(table)
        waits = self._extend(seat, upto, early=early)
        if waits is None:
            self._changes.append(PageTable(seat.ring, first, tuple(map(place, table[first:]))))
        return waits

    def extend_prompt(self, seat: Seat, end: int) -> None:
        """A step is going to compute a prompt up to `end`: reserve places for the tails that it writes. This
        is not done earlier, because a long prompt writes more tails than there are places."""
        if end > seat.request.extended_tokens or end <= seat.write_from:
            waits = self._extend(seat, end)
            assert waits is None, "the pages were reserved by `begin`"

    def _extend(self, seat: Seat, upto: int, *, early: bool = False) -> Wait | None:
        extended = self._cache.extend(seat.request, self.page_end(upto), early=early)
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
            self._changes.append(PageTable(seat.ring, first, tuple(map(place, shared))))
