"""Work beside the event loop: large bodies, templates, tokenizing.

    small requests   ──► 4 threads      they never wait for large ones
    large requests   ──► 2 threads      one for each owner, at most

If no thread is free, owners (API keys, tenants, or else addresses) take turns. So an owner of many requests
waits for its own, and an owner of large requests occupies one thread, not all. Work on large requests holds
the interpreter, so the pace counts it: while other owners have requests, an owner's next one is delayed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tiercel.server.http.border import Visit
from tiercel.server.http.pace import Pace
from tiercel.text.text import tokenizing_s

T = TypeVar("T")

SMALL_THREADS, LARGE_THREADS = 4, 2
"""Most of the work holds Python's interpreter, so more threads would only be in the way of the engine's.
Tokenizing does not."""


class Turns:
    """Threads. Each owner has its own line (a queue), and the lines take turns. One event loop uses it."""

    def __init__(self, threads: int, name: str, *, each: int, pace: Pace | None = None) -> None:
        """`each`: how many threads one owner may have at a time. `pace`: counts the time of the work."""
        self._pace = pace
        self._threads = ThreadPoolExecutor(threads, name)
        self._free = threads
        self._each = each
        self._running: Counter[str] = Counter()
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting requests, by owner. The first line is served next."""

    async def run(self, owner: str, work: Callable[..., T], *given: Any) -> T:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._lines.setdefault(owner, deque()).append(turn)
        self._give_turns()
        held_s = 0.0

        def timed() -> T:
            nonlocal held_s
            start_s = time.thread_time() - tokenizing_s()
            try:
                return work(*given)
            finally:
                held_s = time.thread_time() - tokenizing_s() - start_s

        try:
            await turn
            return await loop.run_in_executor(self._threads, timed)
        finally:
            if turn.done() and not turn.cancelled():
                self._free += 1
                rest_s = self._pace.spend(owner, held_s) if self._pace is not None else 0.0
                if rest_s:
                    loop.call_later(rest_s, self._rested, owner)
                    self._give_turns()
                else:
                    self._rested(owner)

    def _rested(self, owner: str) -> None:
        self._running[owner] -= 1
        self._running += Counter()  # drop owners with no work
        if line := self._lines.pop(owner, None):
            self._lines[owner] = line  # behind the others
        self._give_turns()

    def _give_turns(self) -> None:
        for owner in [*self._lines]:
            while self._free and self._lines.get(owner) and self._running[owner] < self._each:
                line = self._lines.pop(owner)
                turn = line.popleft()
                if line:
                    self._lines[owner] = line  # behind the others
                if turn.done():
                    continue  # the waiting request has left
                turn.set_result(None)
                self._free -= 1
                self._running[owner] += 1
                break


class Aside:
    """The threads of one server."""

    def __init__(self, pace: Pace) -> None:
        self._small = Turns(SMALL_THREADS, "tiercel-text", each=SMALL_THREADS)
        self._large = Turns(LARGE_THREADS, "tiercel-large", each=1, pace=pace)

    async def text(self, visit: Visit, work: Callable[..., T], *given: Any) -> T:
        """Work on a request's texts, in a thread."""
        return await (self._large if visit.large else self._small).run(visit.payer, work, *given)

    async def body(self, visit: Visit, work: Callable[..., T], *given: Any) -> T:
        """Work on a request's body: in a thread if it is large, or else at once."""
        return await self._large.run(visit.payer, work, *given) if visit.large else work(*given)
