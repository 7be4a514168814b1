"""Where tails are written: at boundaries of a prompt that deserve one, and after the prompt at the latest."""

from __future__ import annotations

from collections.abc import Iterable

from tiercel.cache.request import Found, Request
from tiercel.policy.placement import Boundary, tail_boundaries
from tiercel.spec.cache_spec import CacheSpec


def tails_of_prompt(
    spec: CacheSpec, found: Found, turn_ends: Iterable[int], every_pages: int
) -> dict[int, Boundary]:
    """Where the prompt gets tails. One is before the last token: there the same prompt, asked again, is
    resumed. One is where a replay ends: there the next text that goes on from these pages is resumed."""
    if not spec.tail_streams:
        return {}
    return tail_boundaries(
        resumed_pages=tails_after(spec, found),
        total_pages=found.chain.tokens // spec.page_tokens,
        turn_ends=(*turn_ends, found.chain.tokens - 1),
        branch_page=found.page.depth if found.reuse.replay_tokens else found.branch,
        every_pages=every_pages,
        page_tokens=spec.page_tokens,
        pages_per_window=spec.pages_per_window,
    )


def tails_after(spec: CacheSpec, found: Found) -> int:
    """The page after which tails can be written. A replay computes enough for those at its end."""
    replayed = spec.pages_per_window if found.reuse.replay_tokens else 0
    return max(0, found.page.depth - replayed)


def tails_to_write(spec: CacheSpec, request: Request, upto: int) -> list[int]:
    """Boundaries that were not asked for yet, up to token `upto`, whose tails are to be written: all
    boundaries of the prompt, and the latest one after it."""
    window, first, last = spec.pages_per_window, request.tails_upto, upto // spec.page_tokens
    prompt = [b for b in range(first + 1, last + 1) if b in request.tail_boundaries]
    latest = range(max(first, request.prompt_pages, last - window) + 1, last + 1) if window else ()
    return sorted({*prompt, *latest})
