"""Which pages running requests are computing now, so that nobody computes them a second time.

    request 1   ■ ■ ■ □ □ □ □ ▲       three pages are shared, four are being computed, a tail is kept at 7
    request 2   ■ ■ ■ □ □ □ □ ·       the same text: request 2 can begin at 3 now, or wait and begin at 7

Waiting is sooner than computing when request 1 is not less urgent: request 1 is ahead, so it has less left to
compute, and every step computes some of it. A request that waits holds no place. When request 1 ends early,
request 2 begins with what is there.
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
        """How many pages later a request could begin if it waited; 0: there is nothing to wait for.

        `keys`: of the pages that would help the request.
        """
        first, here, limit = found.pages_found, found.page.depth, len(keys)
        request = self._computing.get(keys[first]) if first < limit else None
        if request is None or request.priority < priority:
            return 0
        last = first + 1
        while last < limit and self._computing.get(keys[last]) is request:
            last += 1
        tails = {*range(here + 1), *(b for b in request.tail_boundaries if b > request.committed)}
        while last > here and not legal(last, self._pages_per_window, tails.__contains__):
            last -= 1
        return max(0, last - here)
