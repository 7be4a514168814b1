"""How fast the prefix tree is: `python -m benchmarks.tree [--pages 256] [--json] [--quick]`.

Two parts. The loop a scheduler runs (tokens → keys → match → lock → evict if short → take pages → insert →
unlock) on
`benchmarks.workload`, 2 M tokens of capacity, one thread, keys included. And single operations in a tree of
100,000 pages. Every figure is the median of several rounds; the machine and the versions are printed beside
them.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from benchmarks import workload
from benchmarks.machine import describe, parser_of
from tiercel.cache import TieredCache
from tiercel.config import CacheConfig
from tiercel.pages.pool import PagePool
from tiercel.policy.evict import make_evict_policy
from tiercel.spec.attention import mha
from tiercel.tree.keys import KeyChain
from tiercel.tree.node import Actions
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import DevicePageId, PageKey

CAPACITY_TOKENS = 2_000_000
PROMPT_PAGES = 512


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    requests: int = 10_000
    pages: int = 100_000
    calls: int = 1000
    """Of an operation that is measured, each time."""
    rounds: int = 5


QUICK = Sizes(requests=20, pages=2 * PROMPT_PAGES, calls=10, rounds=1)


def make_tree(pages_per_window: int = 0, evict: str = "value") -> PrefixTree:
    return PrefixTree(evict=make_evict_policy(evict), pages_per_window=pages_per_window)


# The loop


def serve(requests: list[Any], page_tokens: int) -> tuple[float, float]:
    """(requests per second, hit rate)."""
    tree = make_tree()
    pool: PagePool[DevicePageId] = PagePool("device pages", CAPACITY_TOKENS // page_tokens, tag=1)
    asked = hit = 0
    start = time.perf_counter()
    for tokens in requests:
        chain = KeyChain(b"benchmark", (), page_tokens)
        chain.extend(tokens)
        keys = chain.keys
        match = tree.match(keys, len(keys))
        page = match.page
        if match.boundary:
            tree.touch(page, (), 0)
        tree.lock(page)
        need = len(keys) - match.boundary
        if need > pool.free:
            tree.evict(need - pool.free)
            pool.release(tree.copies.actions.device)
            tree.copies.actions = Actions()
        tree.insert(page, keys[match.boundary :], pool.take(need))
        tree.unlock(page)
        asked += len(tokens)
        hit += match.boundary * page_tokens
    return len(requests) / (time.perf_counter() - start), hit / asked


# Single operations


def random_keys(seed: int) -> list[PageKey]:
    data = np.random.default_rng(seed).bytes(32 * PROMPT_PAGES)
    return [PageKey(data[i : i + 32]) for i in range(0, len(data), 32)]


def timed(operation: Callable[[], object], *, calls: int = 1) -> float:
    """Microseconds per call."""
    gc.collect()
    start = time.perf_counter()
    operation()
    return (time.perf_counter() - start) / calls * 1e6


def median(sizes: Sizes, measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(sizes.rounds))


def key_us() -> float:
    tokens = np.arange(PROMPT_PAGES * 256)
    return timed(lambda: KeyChain(b"benchmark", (), 256).extend(tokens), calls=PROMPT_PAGES)


def big_tree(sizes: Sizes, pages_per_window: int = 0) -> tuple[PrefixTree, list[list[PageKey]]]:
    """100,000 pages: texts of 512 pages, every one a path of its own."""
    tree, ids = make_tree(pages_per_window), count(1 << 56)
    texts = [random_keys(i) for i in range(sizes.pages // PROMPT_PAGES)]
    for keys in texts:
        tree.insert(tree.root, keys, [DevicePageId(next(ids)) for _ in keys])
    return tree, texts


def match_us(sizes: Sizes, tail_every: int | None) -> float:
    """A prompt of 512 pages, keys given, of which the tree holds the first 400."""
    tree, texts = big_tree(sizes, pages_per_window=0 if tail_every is None else 1)
    for keys in texts:
        for page in range(tail_every, PROMPT_PAGES, tail_every) if tail_every else ():
            tree.insert_tail(tree.index[keys[page - 1]], (DevicePageId(0),))
    fresh = random_keys(10**6)
    prompts = [keys[:400] + fresh[400:] for keys in texts]

    def once() -> None:
        for prompt in prompts:
            tree.match(prompt, PROMPT_PAGES)

    return median(sizes, lambda: timed(once, calls=len(prompts)))


def insert_us(sizes: Sizes) -> float:
    tree, _ = big_tree(sizes)
    rounds = count(10**7)

    def once() -> float:
        keys, ids = random_keys(next(rounds)), [DevicePageId(i) for i in range(PROMPT_PAGES)]
        return timed(lambda: tree.insert(tree.root, keys, ids), calls=PROMPT_PAGES)

    return median(sizes, once)


def evict_us(sizes: Sizes) -> float:
    """One page at a time from 100,000 evictable leaves, all children of the root."""
    tree, calls = make_tree(), sizes.calls
    for i in range(sizes.pages):
        tree.insert(tree.root, [PageKey(i.to_bytes(32, "little"))], [DevicePageId(i)])

    def once() -> None:
        for _ in range(calls):
            tree.evict(1)

    return median(sizes, lambda: timed(once, calls=calls))


def evict_with_tails_us(sizes: Sizes, evict: str) -> float:
    """One page or tail at a time from 195 texts of 512 pages with a tail every 16 pages."""
    tree, calls, ids = make_tree(1, evict), sizes.calls, count(1 << 56)
    for text in range(sizes.pages // PROMPT_PAGES):
        page = tree.root
        for key in random_keys(text):
            page = tree.insert(page, [key], [DevicePageId(next(ids))])[0]
            if page.depth % 16 == 0:
                tree.insert_tail(page, (DevicePageId(next(ids)),))

    def once() -> None:
        for _ in range(calls):
            tree.evict(1)

    return median(sizes, lambda: timed(once, calls=calls))


def idle_step_us(sizes: Sizes) -> float:
    spec = mha("benchmark", 16, layers=2, kv_heads=1, head_dim=16)
    cache = TieredCache(spec, CacheConfig(device_pages=64, host_bytes=64 * spec.page_bytes))
    calls = 10 * sizes.calls

    def once() -> None:
        for _ in range(calls):
            cache.step()

    figure = median(sizes, lambda: timed(once, calls=calls))
    cache.close()
    return figure


def python_bytes_per_page(sizes: Sizes, tail_every: int = 0) -> float:
    """Everything the tree and its pools keep for a page: the node, its key, its ids, its share of every
    table, and its share of a tail every so many pages."""
    gc.collect()
    tracemalloc.start()
    pool: PagePool[DevicePageId] = PagePool("device pages", sizes.pages, tag=1)
    tails: PagePool[DevicePageId] = PagePool(
        "device pages of tails", sizes.pages // tail_every if tail_every else 0, tag=2
    )
    tree, pages = make_tree(1 if tail_every else 0), 0
    for seed in range(sizes.pages // PROMPT_PAGES):
        path = tree.insert(tree.root, random_keys(seed), pool.take(PROMPT_PAGES))
        for page in path[tail_every - 1 :: tail_every] if tail_every else ():
            tree.insert_tail(page, tuple(tails.take(1)))
        pages += PROMPT_PAGES
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / pages


def measure(page_sizes: list[int], sizes: Sizes) -> dict[str, Any]:
    requests = workload.make(sizes.requests)
    rates: dict[str, float] = {}
    hits: dict[str, float] = {}
    for page_tokens in page_sizes:
        rounds = [serve(requests, page_tokens) for _ in range(min(3, sizes.rounds))]
        rates[str(page_tokens)] = statistics.median(rate for rate, _ in rounds)
        hits[str(page_tokens)] = rounds[0][1]
    return {
        "requests_per_s": rates,
        "hit_rate": hits,
        "key_us_per_page": median(sizes, key_us),
        "match_us": match_us(sizes, tail_every=16),
        "match_us_no_tails_needed": match_us(sizes, tail_every=None),
        "match_us_no_tail_found": match_us(sizes, tail_every=10**9),
        "insert_us_per_page": insert_us(sizes),
        "evict_us": evict_us(sizes),
        **{f"evict_with_tails_us_{evict}": evict_with_tails_us(sizes, evict) for evict in ("lru", "value")},
        "idle_step_us": idle_step_us(sizes),
        "python_bytes_per_page": python_bytes_per_page(sizes),
        "python_bytes_per_page_tail_every_16": python_bytes_per_page(sizes, 16),
        "python_bytes_per_page_tail_every_4": python_bytes_per_page(sizes, 4),
        "machine": describe(),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--pages", type=int, action="append", help="page size in tokens (default: 64 and 256)"
    )
    options = parser.parse_args()
    figures = measure(options.pages or [64, 256], QUICK if options.quick else Sizes())
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    print(figures.pop("machine"))
    hits = figures.pop("hit_rate")
    for page_tokens, rate in figures.pop("requests_per_s").items():
        name = f"requests/s, pages of {page_tokens}"
        print(f"{name:36} {rate:12,.0f}   hit rate {hits[page_tokens]:.4f}")
    for name, figure in figures.items():
        print(f"{name:36} {figure:12.2f}")


if __name__ == "__main__":
    main()
