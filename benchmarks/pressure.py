"""Many running texts on a device and a host that are full: `python -m benchmarks.pressure [--json]`.

The scheduler and the cache that serve, without a model or bytes (`tiercel.replay.null`), DeepSeek V4 Flash.
Every page that a text needs has to be evicted, saved and waited for.

    advance         how many of the running texts a step computes, on average and at least
    plan_us         time of a plan for each running text, on average; at most: of the slowest plan
    advance_us      the same for `advance`, which shares pages and tails
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import cast

from benchmarks.machine import describe, parser_of, tell
from tiercel.asks.ask import Ask, Sampling, TokenOut
from tiercel.config import CacheConfig
from tiercel.engine.config import EngineConfig
from tiercel.engine.scheduler import Scheduler
from tiercel.engine.step import Drawn, Step
from tiercel.replay.null import Clock, null_cache
from tiercel.spec.presets import load
from tiercel.text.stream import TextStream
from tiercel.types import PageKey

SPEC = load("deepseek-v4-flash")
PAGE_TOKENS = SPEC.page_tokens
STEP_S, LINK_BYTES_S = 0.015, 55e9
COLD_PAGES, COLD_TEXT, PROMPT = 4000, 20, 2
"""Pages of the device and of the host that hold other texts, of one of these, and of a text that runs."""


class Pressure:
    """A scheduler whose tiers are full of texts that nobody asks for again."""

    def __init__(self, running: int, evict: str, cold_pages: int = COLD_PAGES) -> None:
        self.clock, self._asked = Clock(), 0
        pages = cold_pages + running * (PROMPT + 1)
        config = CacheConfig(
            device_pages=pages + 2 * running * SPEC.pages_per_window * SPEC.places_per_tail,
            staging_tails=64,
            host_bytes=cold_pages * SPEC.place_bytes,
            evict=evict,
        )
        self.cache = null_cache(SPEC, config, self.clock, LINK_BYTES_S)
        engine = EngineConfig(config, running_max=running, step_tokens=8192)
        self.scheduler = Scheduler(self.cache, engine, self.clock)
        self.spent = {"plan": list[float](), "advance": list[float]()}
        for _ in range(2 * (pages + cold_pages) // COLD_TEXT):
            self.ask(COLD_TEXT * PAGE_TOKENS + 1, 1)
            while self.scheduler.tasks:
                self.step()
        assert self.cache.host_pages.free < SPEC.places_per_tail and self.cache.pages.free < COLD_TEXT
        for i in range(running):  # they need their pages at different times
            self.ask(PROMPT * PAGE_TOKENS + 7 * i % 200, 5000)
        for _ in range(8 * running):
            if all(task.drawn for task in self.scheduler.tasks.values()):
                break
            self.step()

    def ask(self, tokens: int, answer: int) -> None:
        name = str(self._asked)
        self._asked += 1
        keys = [PageKey(f"{name} {i}".encode()) for i in range((tokens + answer) // PAGE_TOKENS + 1)]
        sampling = Sampling(answer, temperature=0.0, ignore_eos=True, seed=0)
        stream = cast(TextStream, None)  # no text is made of tokens here
        self.scheduler.add(Ask(name, (0,) * tokens, sampling, keys=keys), stream, frozenset())

    def step(self) -> Step:
        scheduler, start = self.scheduler, time.thread_time()
        step = scheduler.seal(scheduler.plan())
        self.spent["plan"].append(time.thread_time() - start)
        drawn = Drawn([(TokenOut(0),) if part.draws else None for part in step.parts], {}, 0.0)
        start = time.thread_time()
        scheduler.advance(step, drawn)
        self.spent["advance"].append(time.thread_time() - start)
        self.clock.now_s += STEP_S
        return step


def measure(counts: list[int], policies: list[str], steps: int) -> Iterator[tuple[str, float]]:
    for running in counts:
        for evict in policies:
            scene = Pressure(running, evict)
            for spent in scene.spent.values():
                spent.clear()
            parts = [len(scene.step().parts) for _ in range(steps)]
            name = f"{running}.{evict}"
            yield f"advance.{name}", sum(parts) / steps
            yield f"advance_least.{name}", min(parts)
            for what, spent in scene.spent.items():
                yield f"{what}_us.{name}", 1e6 * sum(spent) / steps / running
                yield f"{what}_us_most.{name}", 1e6 * max(spent) / running


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--evict", nargs="+", default=["value", "lru"])
    parser.add_argument("--steps", type=int, default=240)
    options = parser.parse_args()
    if options.quick:
        options.running, options.steps = [16], 40
    figures = dict(measure(options.running, options.evict, options.steps))
    tell({"machine": describe(), **figures}, as_json=options.json)


if __name__ == "__main__":
    main()
