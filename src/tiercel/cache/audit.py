"""A look from outside: what a cache holds and has moved, in true bytes, and whether its books are right."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tiercel.pages.pool import PagePool
from tiercel.spec.cache_spec import CacheSpec
from tiercel.transfer.plan import Direction
from tiercel.tree import check as tree_check
from tiercel.tree.node import Page, Tail

WORDS = {Direction.LOAD: "loaded", Direction.SAVE: "saved"}

if TYPE_CHECKING:
    from tiercel.cache.tiered_cache import TieredCache


def stats(cache: TieredCache) -> dict[str, Any]:
    """Numbers that are kept as things change: telling them costs the same however much is cached."""
    counts = {"device": cache.tree.on_device, "host": cache.tree.on_host}
    held = {tier: (count[Page], count[Tail]) for tier, count in counts.items()}
    moved = {
        word: (cache.counters[f"pages_{word}"], cache.counters[f"tails_{word}"]) for word in WORDS.values()
    }
    return {
        "identity": {**asdict(cache.identity), "share": cache.identity.share},
        "cached_bytes": {tier: _bytes_by_stream(cache.spec, *counts) for tier, counts in held.items()},
        "moved_bytes": {word: _bytes_by_stream(cache.spec, *counts) for word, counts in moved.items()},
        "moved_s": _seconds(cache),
        "hit_tokens": {tier: cache.counters[f"tokens_{tier}"] for tier in ("device", "host", "store")},
        "pools": {pool.name: {"capacity": pool.capacity, "free": pool.free} for pool in _pools(cache)},
        "store": cache.store.stats() if cache.store else {"attached": False},
        "counters": dict(cache.counters),
    }


def _seconds(cache: TieredCache) -> dict[str, dict[str, float]]:
    """Time spent copying, by direction and by what was copied."""
    controller = cache.flights.controller
    spent = controller.seconds if controller else {}
    return {WORDS[direction]: dict(each) for direction, each in spent.items()}


def _bytes_by_stream(spec: CacheSpec, pages: int, tails: int) -> dict[str, int]:
    counts = [(spec.page_streams, pages), (spec.tail_streams, tails)]
    return {s.name: count * spec.bytes_of(s) for streams, count in counts for s in streams}


def _pools(cache: TieredCache) -> list[PagePool[Any]]:
    return [cache.pages, cache.tails, cache.host_pages]


def check(cache: TieredCache) -> None:
    """Every invariant of tree and pools; and I4: a place has one owner, the tree, a request or a transfer."""
    tree_check.check(cache.tree)
    pages: list[int] = []
    tails: list[int] = []
    host: list[int] = []
    for page in cache.tree.index.values():
        pages += [page.device] if page.device is not None else []
        host += page.host or ()
        if page.tail is not None:
            tails += [page.tail.device] if page.tail.device is not None else []
            host += page.tail.host or ()
    for request in cache.requests:
        pages += request.table[request.committed :]
        tails += request.tails.values()
    for move in cache.flights.moves():
        if move.item.gone or move.item.device != move.device:
            (pages if isinstance(move.item, Page) else tails).append(move.device)
        if move.item.gone:
            host += move.host
    for store in cache._stores():
        host += store.host_places()
    for pool, owned in zip(_pools(cache), (pages, tails, host), strict=True):
        pool.check()
        assert sorted(owned) == sorted(pool.owned_ids()), f"I4: owners of {pool.name}"
