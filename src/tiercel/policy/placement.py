"""At which boundaries of a prompt tails are kept.

tokens     0        256       512       768       1024      1280
           ├─────────┼─────────┼─────────┼─────────┼─────────┼──
message ends            ▲(400)                 ▲(1000)
tails               at 256              at 768                      the last boundary at or before each end
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Boundary(Enum):
    """Why a tail is kept where it is."""

    EVERY = "every so many pages"
    TURN = "the end of a message, or a named break point"
    PROMPT = "the end of a prompt"
    ANSWER = "the end of an answer"
    BRANCH = "texts branch off here"
    WINDOW = "a window longer than a page reads it together with the next tail"
    FETCHED = "another server or an earlier process kept it"


def tail_boundaries(
    *,
    resumed_pages: int,
    total_pages: int,
    turn_ends: Iterable[int],
    branch_page: int,
    every_pages: int,
    page_tokens: int,
    pages_per_window: int,
) -> dict[int, Boundary]:
    """The boundaries, in pages, that get a tail, and why. They lie after the resumed pages.

    They are the ends of messages, turns and named break points (`turn_ends`, in tokens), the page where this
    text branches off from cached ones (0: none), the end of the prompt, and every `every_pages` pages; and,
    for a window longer than a page, the boundaries before each of these that it reads too.
    """
    wanted = dict.fromkeys(range(every_pages, total_pages + 1, every_pages), Boundary.EVERY)
    wanted |= dict.fromkeys((tokens // page_tokens for tokens in turn_ends), Boundary.TURN)
    wanted |= {total_pages: Boundary.PROMPT, branch_page: Boundary.BRANCH}
    wanted = {page: why for page, why in wanted.items() if resumed_pages < page <= total_pages}
    parts = {
        page: Boundary.WINDOW
        for boundary in wanted
        for page in range(max(resumed_pages + 1, boundary - pages_per_window + 1), boundary)
    }
    return parts | wanted
