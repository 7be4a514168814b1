"""Requests that compute the same pages: one computes them, the others wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tiercel.cache.request import Found, Request
from tiercel.policy.fetch import window
from tiercel.types import Kind, PageKey


@dataclass
class Sharing:
    """Which pages of prompts running requests are computing now, so that no page is computed twice.

    request 1   ■ ■ ■ □ □ □ □ ▲       three pages are shared, four are being computed, a tail is kept at 7
    request 2   ■ ■ ■ □ □ □ □ ·       the same text: request 2 can begin at 3 now, or wait and begin at 7

    Waiting is sooner than computing when request 1 is not less urgent: request 1 is ahead, so it has less
    left to compute, and every step computes some of it. A request that waits holds no place. When request 1
    ends early, request 2 begins with what is there.
    """

    pages_per_window: int
    _computing: dict[PageKey, Request] = field(default_factory=dict)

    def begin(self, request: Request) -> None:
        for key in request.chain.keys[request.committed : request.prompt_pages]:
            self._computing.setdefault(key, request)

    def end(self, request: Request, first: int, upto: int) -> None:
        """The request has shared these pages, or is not going to."""
        for key in request.chain.keys[first:upto]:
            if self._computing.get(key) is request:
                del self._computing[key]

    def computes(self, key: PageKey, kind: Kind) -> bool:
        """Whether a request is going to share this page, or the tail at its end."""
        request = self._computing.get(key)
        if request is None or kind is Kind.PAGE:
            return request is not None
        return request.chain.keys.index(key) + 1 in request.tail_boundaries

    def pages_to_come(self, keys: Sequence[PageKey], found: Found, priority: int) -> int:
        """How many pages later a request could begin if it waited; 0: there is nothing to wait for.

        `keys`: the keys of the pages that would help it.
        """
        first, here, limit = found.pages_found, found.page.depth, len(keys)
        request = self._computing.get(keys[first]) if first < limit else None
        if request is None or request.priority < priority:
            return 0
        last = first + 1
        while last < limit and self._computing.get(keys[last]) is request:
            last += 1
        tails = {*range(here + 1), *(b for b in request.tail_boundaries if b > request.committed)}
        while last > here and not tails.issuperset(window(last, self.pages_per_window)):
            last -= 1
        return max(0, last - here)
