"""Which tails of one request are kept (`policy.placement`)."""

from __future__ import annotations

from collections.abc import Iterable

from tiercel.cache.request import Request
from tiercel.config import CacheConfig
from tiercel.policy.placement import tail_boundaries, with_window
from tiercel.spec.cache_spec import CacheSpec


def tails_of_prompt(
    spec: CacheSpec, config: CacheConfig, request: Request, branch: int, turn_ends: Iterable[int]
) -> frozenset[int]:
    """Where the prompt gets tails. None at the resumed boundary: a replay computes too little for one.

    One is where the same prompt, asked again, goes on: before its last token.
    """
    if not spec.tail_streams:
        return frozenset()
    wanted = tail_boundaries(
        resumed_pages=request.committed,
        total_pages=request.prompt_pages,
        turn_ends=(*turn_ends, request.chain.tokens - 1),
        branch_page=branch,
        every_pages=config.tail_every_pages,
        page_tokens=spec.page_tokens,
    )
    return with_window(wanted, pages_per_window=spec.pages_per_window, resumed_pages=request.committed)


def tails_between(spec: CacheSpec, request: Request, upto: int) -> list[int]:
    """Boundaries after what the request has room for, up to token `upto`, whose tails are to be written."""
    first, last = request.extended_tokens // spec.page_tokens, upto // spec.page_tokens
    window = spec.pages_per_window
    prompt = [b for b in range(first + 1, last + 1) if b in request.tail_boundaries]
    latest = range(max(first, request.prompt_pages, last - window) + 1, last + 1) if window else ()
    return sorted({*prompt, *latest})
