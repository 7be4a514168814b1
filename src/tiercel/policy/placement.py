"""At which boundaries of a prompt tails are kept.

tokens     0        256       512       768       1024      1280
           ├─────────┼─────────┼─────────┼─────────┼─────────┼──
message ends            ▲(400)                 ▲(1000)
tails               at 256              at 768                      the last boundary at or before each end
"""

from __future__ import annotations

from collections.abc import Iterable


def tail_boundaries(
    *,
    resumed_pages: int,
    total_pages: int,
    turn_ends: Iterable[int],
    branch_page: int,
    every_pages: int,
    page_tokens: int,
    pages_per_window: int,
) -> frozenset[int]:
    """The boundaries, in pages, that get a tail. They lie after the resumed pages.

    They are the ends of messages, turns and named break points (`turn_ends`, in tokens), the page where this
    text branches off from cached ones (0: none), the end of the prompt, and every `every_pages` pages; and
    before each of them the tails that a window longer than a page reads too.
    """
    ends = {tokens // page_tokens for tokens in turn_ends}
    regular = set(range(every_pages, total_pages + 1, every_pages))
    wanted = ends | regular | {branch_page, total_pages}
    return frozenset(
        page
        for boundary in wanted
        if resumed_pages < boundary <= total_pages
        for page in range(max(resumed_pages + 1, boundary - pages_per_window + 1), boundary + 1)
    )
