"""Whether a large cache makes a step slow: `python -m benchmarks.pauses [--pages N] [--quick] [--json]`.

A cache without bytes (`replay.null`) grows to so many pages, a fifth of them on the device, and goes on with
new texts until a third more have passed through it. All that decides is the code that serves: requests begin,
extend, commit and finish, copies land, device and host evict. A step computes 16 pages, as an engine's step
does. Its CPU time is told: p50, p99, p99.9 and the maximum. So are the garbage collections, which run inside
the steps, and the memory of a page: what the process has grown by.

    short    texts of 4 pages, every second one with the first page of another
    long     texts of 512 pages, every second one with the first 256 pages of another
"""

from __future__ import annotations

import gc
import json
import os
import random
import time
from array import array
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.machine import describe, parser_of
from tiercel.cache import Request, RequestState, TieredCache, Wait
from tiercel.config import CacheConfig
from tiercel.replay.null import Clock, null_cache
from tiercel.spec.attention import Heads, sliding_window
from tiercel.tree.keys import KeyChain
from tiercel.types import PageKey

PAGES = 1_000_000
QUICK_PAGES = 3_000
"""A long text must fit on the device."""

STEP_PAGES = 16
TEXTS = {"short": (4, 1), "long": (512, 256)}
"""Pages of a text, and those that it shares with an earlier one."""

PAGE_TOKENS = 16
LINK_BYTES_S = 1e12
STEP_S = 0.02


def make_cache(pages: int, evict: str, clock: Clock) -> TieredCache:
    heads = Heads(kv_heads=1, head_dim=16)
    spec = sliding_window(
        "pauses", PAGE_TOKENS, full_layers=(0, 1), window_layers=(2,), window=PAGE_TOKENS, heads=heads
    )
    device = pages // 5
    config = CacheConfig(
        device_pages=device * 3 // 2,  # so many pages, and tails for half of them
        staging_tails=8,
        host_bytes=pages * spec.place_bytes,
        evict=evict,
        save_step_bytes=1 << 40,
    )
    return null_cache(spec, config, clock, LINK_BYTES_S)


class Texts:
    """Texts without an end, each with the keys of its pages. Always the same ones."""

    def __init__(self, kind: str) -> None:
        self._pages, self._shared = TEXTS[kind]
        self._random = random.Random(0)
        self._earlier: deque[list[PageKey]] = deque(maxlen=100)
        self._made = 0

    def next(self) -> list[PageKey]:
        keys = [PageKey(self._random.randbytes(32)) for _ in range(self._pages)]
        if self._made % 2 and self._earlier:
            keys[: self._shared] = self._random.choice(self._earlier)[: self._shared]
        self._made += 1
        self._earlier.append(keys)
        return keys


class Engine:
    """One request after the other, `STEP_PAGES` computed pages in each step."""

    def __init__(self, cache: TieredCache, clock: Clock, texts: Texts) -> None:
        self.cache, self._clock = cache, clock
        self._texts = texts
        self._chain = self._next()
        self._request: Request | None = None

    def step(self) -> None:
        left = STEP_PAGES
        while left > 0 and (computed := self._compute(left)):
            left -= computed
        self._clock.now_s += STEP_S
        self.cache.step()

    def _next(self) -> KeyChain:
        keys = self._texts.next()
        return self.cache.chain((0,) * (len(keys) * PAGE_TOKENS + 1), keys=keys)

    def _compute(self, pages: int) -> int:
        """Up to so many pages of one request; 0: it has to wait."""
        if self._request is None:
            begun = self.cache.begin(self._chain)
            if isinstance(begun, Wait):
                return 0
            self._request, self._chain = begun, self._next()
        request, first = self._request, self._request.committed
        upto = min(first + pages, len(request.chain.keys)) * PAGE_TOKENS
        running = request.state is RequestState.RUNNING
        if not running or isinstance(self.cache.extend(request, upto), Wait):
            return 0
        self.cache.commit(request, upto)
        if request.committed == len(request.chain.keys):
            self.cache.finish(request)
            self._request = None
        return request.committed - first


class Collections:
    """The garbage collections of the process: how many of the oldest generation, and the longest of all."""

    def __init__(self) -> None:
        self.full, self.longest_s = 0, 0.0
        self._began_s = 0.0
        gc.callbacks.append(self._told)

    def _told(self, phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.thread_time()
        else:
            self.full += about["generation"] == 2
            self.longest_s = max(self.longest_s, time.thread_time() - self._began_s)

    def close(self) -> None:
        gc.callbacks.remove(self._told)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(pages: int, evict: str, kind: str) -> dict[str, Any]:
    """Steps until the tree has held so many pages, and a third more have passed through it."""
    before = resident_bytes()
    clock = Clock()
    cache = make_cache(pages, evict, clock)
    engine = Engine(cache, clock, Texts(kind))
    gc.collect()
    gc.freeze()  # as `tiercel serve` does when everything is loaded
    seen, times, computed, most = Collections(), array("d"), 0, 0
    while computed < pages * 4 // 3:
        begin_s = time.thread_time()
        engine.step()
        times.append(time.thread_time() - begin_s)
        computed += STEP_PAGES
        most = max(most, len(cache.tree.index))
        assert len(times) < pages, "the steps compute nothing"
    grown = resident_bytes() - before
    begin_s = time.thread_time()
    gc.collect()
    full_s = time.thread_time() - begin_s
    seen.close()
    if pages <= QUICK_PAGES:
        cache.check()
    ms = sorted(1e3 * each for each in times)
    held = list(cache.tree.index.values())
    return {
        "pages": most,
        "tails": sum(page.tail is not None for page in held),
        "steps": len(ms),
        "p50_ms": ms[len(ms) // 2],
        "p99_ms": ms[int(len(ms) * 0.99)],
        "p99.9_ms": ms[int(len(ms) * 0.999)],
        "max_ms": ms[-1],
        "collections_full": seen.full,
        "collection_longest_ms": 1e3 * seen.longest_s,
        "collection_full_after_ms": 1e3 * full_s,
        "bytes_per_page": grown / most,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--pages", type=int, default=PAGES)
    options = parser.parse_args()
    pages, run = (QUICK_PAGES, measure) if options.quick else (options.pages, alone)
    scenes = [(evict, kind) for evict in ("value", "lru") for kind in TEXTS]
    figures = {f"{evict}, {kind} texts": run(pages, evict, kind) for evict, kind in scenes}
    if options.json:
        print(json.dumps({"machine": describe(), **figures}, indent=2))
        return
    print(describe())
    names = list(figures[next(iter(figures))])
    print(f"{'':26}" + "".join(f"{scene:>20}" for scene in figures))
    for name in names:
        print(f"{name:26}" + "".join(f"{each[name]:>20,.6g}" for each in figures.values()))


def alone(pages: int, evict: str, kind: str) -> dict[str, Any]:
    """In a process of its own: memory that another scene gave back is not counted."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, pages, evict, kind).result()


if __name__ == "__main__":
    main()
