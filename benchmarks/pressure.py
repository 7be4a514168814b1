"""Many running texts on a device and a host that are full: `python -m benchmarks.pressure [--json]`.

The scheduler and the cache that serve, without a model or bytes (`tiercel.replay.null`), DeepSeek V4 Flash.
Every page that a text needs has to be evicted, saved and waited for.

    advance         how many of the running texts a step computes, on average and at least
    plan_us         time of a plan for each running text, on average; at most: of the slowest plan
    advance_us      the same for `advance`, which shares pages and tails

`….sparse.PAGES`: texts of so many pages, all but the last of which are read on the host.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import cast

from benchmarks.machine import describe, parser_of, tell
from tiercel.asks.ask import Ask, Sampling, TokenOut
from tiercel.cache.residency import units_of
from tiercel.config import CacheConfig
from tiercel.engine.config import EngineConfig
from tiercel.engine.scheduler import Scheduler
from tiercel.engine.step import Drawn, Step
from tiercel.replay.null import Clock, null_cache
from tiercel.spec import CacheSpec
from tiercel.spec.presets import load
from tiercel.text.stream import TextStream
from tiercel.types import PageKey

SPEC = load("deepseek-v4-flash")
PAGE_TOKENS = SPEC.page_tokens
STEP_S, LINK_BYTES_S = 0.015, 55e9
COLD_PAGES, COLD_TEXT, PROMPT = 4000, 20, 2
"""Pages of the device and of the host that hold other texts, of one of these, and of a text that runs."""


class Scene:
    """A scheduler and a cache on a clock."""

    def __init__(self, spec: CacheSpec, config: CacheConfig, running: int, step_tokens: int = 8192) -> None:
        self.clock, self._asked, self._page_tokens = Clock(), 0, spec.page_tokens
        self.cache = null_cache(spec, config, self.clock, LINK_BYTES_S)
        engine = EngineConfig(config, running_max=running, step_tokens=step_tokens)
        self.scheduler = Scheduler(self.cache, engine, self.clock)
        self.spent = {"plan": list[float](), "advance": list[float]()}

    def ask(self, tokens: int, answer: int, text: str = "") -> None:
        """Texts of one name begin with the same pages; without a name nobody else has the pages."""
        name = str(self._asked)
        self._asked += 1
        pages = range((tokens + answer) // self._page_tokens + 1)
        keys = [PageKey(f"{text or name} {i}".encode()) for i in pages]
        sampling = Sampling(answer, temperature=0.0, ignore_eos=True, seed=0)
        stream = cast(TextStream, None)  # no text is made of tokens here
        self.scheduler.add(Ask(name, (0,) * tokens, sampling, keys=keys), stream, frozenset())

    def plan(self) -> Step:
        start = time.thread_time()
        step = self.scheduler.seal(self.scheduler.plan())
        self.spent["plan"].append(time.thread_time() - start)
        return step

    def advance(self, step: Step) -> None:
        drawn = Drawn([(TokenOut(0),) if part.draws else None for part in step.parts], {}, 0.0)
        start = time.thread_time()
        self.scheduler.advance(step, drawn)
        self.spent["advance"].append(time.thread_time() - start)
        self.clock.now_s += STEP_S

    def step(self) -> Step:
        self.advance(step := self.plan())
        return step

    def draw(self, steps_most: int) -> None:
        """Steps until each text has drawn a token."""
        for _ in range(steps_most):
            if all(task.drawn for task in self.scheduler.tasks.values()):
                return
            self.step()


def full(running: int, evict: str, cold_pages: int = COLD_PAGES) -> Scene:
    """Running texts, and tiers that are full of others that nobody asks for again."""
    pages = cold_pages + running * (PROMPT + 1)
    config = CacheConfig(
        device_pages=pages + 2 * running * SPEC.pages_per_window * SPEC.places_per_tail,
        staging_tails=64,
        host_bytes=cold_pages * SPEC.place_bytes,
        evict=evict,
    )
    scene = Scene(SPEC, config, running)
    for _ in range(2 * (pages + cold_pages) // COLD_TEXT):
        scene.ask(COLD_TEXT * PAGE_TOKENS + 1, 1)
        while scene.scheduler.tasks:
            scene.step()
    assert scene.cache.host_pages.free < SPEC.places_per_tail and scene.cache.pages.free < COLD_TEXT
    for i in range(running):  # they need their pages at different times
        scene.ask(PROMPT * PAGE_TOKENS + 7 * i % 200, 5000)
    scene.draw(8 * running)
    return scene


def sparse(running: int, pages: int, frames: int | None = None) -> Scene:
    """Running texts of so many pages that need their next pages in the same steps. `frames`: of the device;
    None: as many as they need if all but the last pages are sparse."""
    spec, most = SPEC.apart, pages + 20
    if frames is None:
        frames = running * units_of(spec, most, spec.hot_places()[0] + 4) // spec.frame_units
    host_bytes = 2 * running * (most + 3 * spec.places_per_tail) * spec.place_bytes
    scene = Scene(spec, CacheConfig(frames, 64, host_bytes=host_bytes, staged_pages=most), running)
    for _ in range(running):
        scene.ask(pages * PAGE_TOKENS, 20 * PAGE_TOKENS)
    scene.draw((100 + pages) * running)
    assert len(scene.scheduler.running) == running and scene.cache.counters["pages_sparse"] > running
    return scene


def told(name: str, scene: Scene, steps: int) -> Iterator[tuple[str, float]]:
    running = len(scene.scheduler.running)
    for spent in scene.spent.values():
        spent.clear()
    parts = [len(scene.step().parts) for _ in range(steps)]
    yield f"advance.{name}", sum(parts) / steps
    yield f"advance_least.{name}", min(parts)
    for what, spent in scene.spent.items():
        yield f"{what}_us.{name}", 1e6 * sum(spent) / steps / running
        yield f"{what}_us_most.{name}", 1e6 * max(spent) / running


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--evict", nargs="+", default=["value", "lru"])
    parser.add_argument("--sparse-pages", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--steps", type=int, default=240)
    options = parser.parse_args()
    if options.quick:
        options.running, options.sparse_pages, options.steps = [16], [64], 40
    figures = dict[str, float]()
    for running in options.running:
        for evict in options.evict:
            figures |= told(f"{running}.{evict}", full(running, evict), options.steps)
    for pages in options.sparse_pages:
        running = options.running[0]
        figures |= told(f"{running}.sparse.{pages}", sparse(running, pages), options.steps)
    tell({"machine": describe(), **figures}, as_json=options.json)


if __name__ == "__main__":
    main()
