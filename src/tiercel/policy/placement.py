"""At which boundaries of a text tails are kept.

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
) -> frozenset[int]:
    """Boundaries, in pages, after what was resumed and up to the end of the prompt, that should get a tail.

    They are the ends of messages and turns (`turn_ends`, in tokens, break points a request names included),
    the branch point where this text leaves the others (0: none), the end of the prompt, and every so many
    pages.
    """
    ends = {tokens // page_tokens for tokens in turn_ends}
    regular = set(range(every_pages, total_pages + 1, every_pages))
    wanted = ends | regular | {branch_page, total_pages}
    return frozenset(page for page in wanted if resumed_pages < page <= total_pages)


def with_window(boundaries: Iterable[int], *, pages_per_window: int, resumed_pages: int) -> frozenset[int]:
    """A window longer than a page needs the tails before its boundary too, down to what was resumed."""
    return frozenset(
        page
        for boundary in boundaries
        for page in range(max(resumed_pages + 1, boundary - pages_per_window + 1), boundary + 1)
    )
