"""Which pages running requests are computing now, so that nobody computes them a second time.

    request 1   ■ ■ ■ □ □ □ □ ▲       three pages are shared, four are being computed, a tail is kept at 7
    request 2   ■ ■ ■ □ □ □ □ □       the same text: it may begin at 3 and compute everything after it, or
                              ▲       wait and begin at 7

Waiting is sooner whenever the other request is ahead and is not less urgent: it has less left to compute, and
gets its share of every step. Who waits holds nothing. If the other request ends early, it waits no longer.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiercel.cache.found import Found
from tiercel.cache.request import Request
from tiercel.policy.fetch import legal
from tiercel.types import PageKey


class Sharing:
    """Pages of prompts that are not shared yet, and who computes each."""

    def __init__(self, pages_per_window: int) -> None:
        self._computing: dict[PageKey, Request] = {}
        self._pages_per_window = pages_per_window

    def begin(self, request: Request) -> None:
        for key in request.chain.keys[request.committed : request.prompt_pages]:
            self._computing.setdefault(key, request)

    def end(self, request: Request, first: int, upto: int) -> None:
        """The request has shared these pages, or will not share them."""
        for key in request.chain.keys[first:upto]:
            if self._computing.get(key) is request:
                del self._computing[key]

    def pages_to_come(self, keys: Sequence[PageKey], found: Found, priority: int) -> int:
        """How many pages further a request could begin if it waited. 0: there is nothing to wait for.
        `keys` are those of the pages that help it."""
        first, here, limit = found.pages_found, found.page.depth, len(keys)
        request = self._computing.get(keys[first]) if first < limit else None
        if request is None or request.priority < priority:
            return 0
        last = first + 1
        while last < limit and self._computing.get(keys[last]) is request:
            last += 1
        tails = request.tail_boundaries.union(range(here + 1))
        while last > here and not legal(last, self._pages_per_window, tails.__contains__):
            last -= 1
        return max(0, last - here)
