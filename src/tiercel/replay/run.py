"""Recorded requests, served by the scheduler and the cache that serve, on a clock and without a model.

    arrival ──► Scheduler ── a step ──► a clock: prompts at a rate, answers a token each ──► advance
                    └── TieredCache: begin, extend, commit, finish ──► copies and the store on the same clock

A step takes the time of its prompt tokens and, if answers are drawn, the time of one token. Steps that draw
answers only are taken together, as far as the scheduler says that nothing can change
(`Scheduler.quiet_steps`) and no request arrives. So longer answers hardly make a replay slower.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from math import ceil
from time import perf_counter
from typing import cast

from tiercel.asks.ask import Ask, Sampling, TokenOut
from tiercel.cache import TieredCache
from tiercel.collector import resting
from tiercel.config import CacheConfig
from tiercel.engine.config import EngineConfig
from tiercel.engine.scheduler import Scheduler
from tiercel.engine.step import Drawn, Step, StepPart
from tiercel.engine.task import Task
from tiercel.errors import ConfigError
from tiercel.policy.resume import Reuse
from tiercel.replay.null import Clock, null_cache
from tiercel.replay.report import Report, Times
from tiercel.replay.sizes import Sizes
from tiercel.replay.store import ClockMover, NullStore
from tiercel.replay.trace import Trace, TraceRequest
from tiercel.spec.cache_spec import CacheSpec
from tiercel.text.stream import TextStream
from tiercel.types import PageKey

POLL_S = 0.005
"""The time between two looks at a request that waits for the store, unless the store answers before."""

DEFAULT_POLICY = CacheConfig().evict

TOLD_EVERY = 100
"""After how many requests the progress of a replay is told."""

TOKEN = TokenOut(0)
"""A replay knows no tokens."""


@dataclass(frozen=True)
class Rates:
    """How fast the machine is. The defaults are those of one H200 with DeepSeek V4 Flash (docs/log.md)."""

    prefill_tokens_s: float = 15_000.0
    token_s: float = 0.015
    """The time of a step that draws a token for each running answer, whatever their number."""
    link_bytes_s: float = 55e9
    """Between host and device, in each direction."""
    store_read_bytes_s: float = 3e9
    store_write_bytes_s: float = 3e9

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < 1e18:
                raise ConfigError(name, value, "must be more than 0")

    def measured(self, trace: Trace) -> Rates:
        """The rates of the server that wrote the trace, as far as its lines have them."""
        rows = [(each, each.recorded) for each in trace.requests if each.recorded is not None]
        computed = [
            (each.prompt_tokens - said.device_tokens - said.host_tokens - said.store_tokens, said.prefill_s)
            for each, said in rows
            if said.prefill_s
        ]
        drawn = [(each.output_tokens - 1, said.decode_s) for each, said in rows if said.decode_s]
        tokens, seconds = sum(each for each, _ in computed), sum(each for _, each in computed)
        more, more_s = sum(max(0, each) for each, _ in drawn), sum(each for _, each in drawn)
        return replace(
            self,
            prefill_tokens_s=tokens / seconds if tokens and seconds else self.prefill_tokens_s,
            token_s=more_s / more if more and more_s else self.token_s,
        )


class Replayer:
    """A clock under the scheduler: requests arrive, steps take time, transfers land."""

    def __init__(
        self,
        cache: TieredCache,
        config: EngineConfig,
        rates: Rates,
        trace: Trace,
        clock: Clock,
        *,
        one_at_a_time: bool,
    ) -> None:
        self.cache, self.clock, self.rates = cache, clock, rates
        self.scheduler = Scheduler(cache, config, clock)
        self.scheduler.finished = self._ended
        self.first_token_s: list[float] = []
        self.asked = self.new = self.replayed = self.refused = 0
        self.computed = self.drawn = 0
        """Tokens that steps computed of prompts and of texts that began again; tokens of answers."""
        self.text_tokens = 0
        """Tokens of all texts that ended."""
        self.hits: Counter[str] = Counter(device=0, host=0, store=0)
        self.lost: Counter[str] = Counter()
        self._arrivals = deque(enumerate(trace.requests))
        self._one_at_a_time = one_at_a_time
        self._arrived_s: dict[Task, float] = {}
        self._begun: str | None = None
        """The last request that has begun for the first time."""
        self._seen: set[PageKey] = set()
        """Pages of prompts that have begun, and of answers that have ended."""
        self.ended_s = 0.0
        """When the last answer ended."""

    def run(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Run until every request has ended. `progress` is called now and then with the number that have."""
        told, scheduler = 0, self.scheduler
        while self._arrivals or scheduler.tasks:
            self._take_arrivals()
            step = self._plan()
            if not step.parts and self.clock.next_s() is None:
                step = self._plan()  # sends what was queued by the last one
            if step.parts:
                self._compute(step)
            elif scheduler.tasks:
                self._sleep()
            ended = scheduler.counters["finished_length"] + self.refused
            if ended > told + TOLD_EVERY:
                progress(ended - told)
                told = ended
        progress(scheduler.counters["finished_length"] + self.refused - told)
        self.ended_s = self.clock.now_s
        self._let_land()

    @property
    def together(self) -> int:
        """How many answers a device draws at the same time when it is never idle: as many as run, or as texts
        of the mean length fit."""
        scheduler = self.scheduler
        fit = scheduler.cache.pages_most * scheduler.page_tokens * len(self.first_token_s)
        return max(1, min(scheduler.config.running_max, fit // max(1, self.text_tokens)))

    # Requests come in

    def _take_arrivals(self) -> None:
        scheduler = self.scheduler
        if self._one_at_a_time:
            while not scheduler.tasks and self._arrivals:
                self._let_land()
                self._arrive(*self._arrivals.popleft(), self.clock.now_s)
            return
        if not scheduler.tasks and self._arrivals:
            self._pass(self._arrivals[0][1].time_s)
        while (
            self._arrivals
            and self._arrivals[0][1].time_s <= self.clock.now_s
            and len(scheduler.waiting) < scheduler.config.waiting_max
        ):
            number, request = self._arrivals.popleft()
            self._arrive(number, request, request.time_s)

    def _pass(self, until_s: float) -> None:
        """Let time pass, and what is under way go on."""
        while (next_s := self.clock.next_s()) is not None and next_s < until_s:
            self.clock.now_s = max(self.clock.now_s, next_s)
            self.scheduler.collect()
        self.clock.now_s = max(self.clock.now_s, until_s)

    def _let_land(self) -> None:
        """Let everything under way end."""
        self.scheduler.collect()
        while (next_s := self.clock.next_s()) is not None:
            self.clock.now_s = max(self.clock.now_s, next_s)
            self.scheduler.collect()

    def _arrive(self, number: int, request: TraceRequest, time_s: float) -> None:
        scheduler = self.scheduler
        if request.prompt_tokens + max(1, request.output_tokens) > scheduler.context_tokens:
            self.refused += 1
            return
        sampling = Sampling(max_tokens=max(1, request.output_tokens), seed=0)
        prompt, keys = (0,) * request.prompt_tokens, request.keys
        ask = Ask(str(number), prompt, sampling, request.turn_ends, priority=request.priority, keys=keys)
        scheduler.add(ask, cast(TextStream, None), frozenset())  # no text is made of tokens here
        self._arrived_s[scheduler.tasks[ask.request_id]] = time_s

    # Steps

    def _plan(self) -> Step:
        step = self.scheduler.seal(self.scheduler.plan())
        explained = self.scheduler.explained
        for name in reversed([*takewhile(lambda name: name != self._begun, reversed(explained))]):
            self._count(self.scheduler.tasks[name], explained[name].reuse)
            self._begun = name
        return step

    def _compute(self, step: Step) -> None:
        """Run a step; or, if it draws answers only, all steps up to the next one that changes something."""
        prompts = list(takewhile(lambda part: not _is_answer(part), reversed(step.parts)))
        answers, tokens = len(step.parts) - len(prompts), sum(part.end - part.start for part in prompts)
        steps = 1 if prompts else self._steps_together()
        self.computed += tokens
        self.drawn += answers * steps
        seconds = tokens / self.rates.prefill_tokens_s + (self.rates.token_s if answers else 0.0)
        self._pass_steps(steps, seconds)
        drew = (TOKEN,) * steps
        results: list[tuple[TokenOut, ...] | Exception | None] = [drew] * answers
        results += (drew if part.draws else None for part in reversed(prompts))
        self.scheduler.advance(step, Drawn(results, {}, seconds * steps, steps=steps))

    def _steps_together(self) -> int:
        """How many steps draw answers only, until one of them changes something or a request arrives."""
        if self.cache.residency is not None and any(each.sparse for each in self.cache.requests):
            return 1  # pages may come back
        steps = self.scheduler.quiet_steps()
        if steps > 1 and self._arrivals and not self._one_at_a_time:
            left_s = self._arrivals[0][1].time_s - self.clock.now_s
            steps = min(steps, max(1, ceil(left_s / self.rates.token_s)))
        return steps

    def _pass_steps(self, steps: int, seconds: float) -> None:
        """Before each step but the first, take in what has landed, as `plan` does. When nothing is under way,
        nothing changes any more."""
        while steps > 1:
            self.clock.now_s += seconds
            steps -= 1
            self.scheduler.collect()
            if not self.cache.busy:
                break
        self.clock.now_s += seconds * steps

    def _sleep(self) -> None:
        """Nothing can be computed: the next thing that happens is an arrival or the end of a transfer."""
        next_s = [] if self._one_at_a_time or not self._arrivals else [self._arrivals[0][1].time_s]
        if (landing_s := self.clock.next_s()) is not None:
            next_s.append(landing_s)
        if self.scheduler.waiting and self.cache.store is not None:
            next_s.append(self.clock.now_s + POLL_S)
        assert next_s, "a request waits, and nothing is under way"
        self.clock.now_s = max(self.clock.now_s, min(next_s))

    # What came of it

    def _count(self, task: Task, reuse: Reuse) -> None:
        """What a request found when it first began, and what it could have found."""
        keys, page_tokens = task.ask.keys or (), self.scheduler.page_tokens
        useful = (task.prompt_tokens - 1) // page_tokens
        known = bisect_left(keys, True, 0, useful, key=lambda key: key not in self._seen)
        self._seen.update(keys[known : task.prompt_tokens // page_tokens])
        self.asked += task.prompt_tokens
        self.new += (useful - known) * page_tokens
        self.replayed += reuse.replay_tokens
        self.hits["device"] += reuse.device_tokens
        self.hits["host"] += reuse.host_tokens
        self.hits["store"] += reuse.store_tokens
        if (lost := known * page_tokens - reuse.tokens) > 0:
            self.lost[reuse.why.value] += lost

    def _ended(self, task: Task) -> None:
        assert task.times.first_s is not None
        self.first_token_s.append(task.times.first_s - self._arrived_s.pop(task))
        self.text_tokens += len(task.tokens)
        keys, page_tokens = task.ask.keys or (), self.scheduler.page_tokens
        self._seen.update(keys[task.prompt_tokens // page_tokens : (task.longest - 1) // page_tokens])


def _is_answer(part: StepPart) -> bool:
    """Answers come first in a step, one token each; then prompts."""
    return part.draws and part.end - part.start == 1


@dataclass(frozen=True)
class Serving:
    """How requests are served, besides the sizes of the tiers."""

    rates: Rates = Rates()
    batch: int = 64
    """Requests that run at the same time."""
    one_at_a_time: bool = False
    """Each request begins when all before it have ended and every copy has landed, whatever the times of the
    trace are: so hit ratios do not depend on rates."""
    step_tokens: int = 8192
    context_tokens: int | None = None
    """The longest text; None: what fits on the device."""
    stages: int = 1
    """Processes that the layers are cut into. The one that keeps the most of a page says how many fit."""
    cache: CacheConfig = CacheConfig()
    """All settings of the cache besides sizes and policy."""


def replay(
    trace: Trace,
    spec: CacheSpec,
    sizes: Sizes,
    *,
    policy: str = DEFAULT_POLICY,
    serving: Serving = Serving(),  # noqa: B008 - a frozen value
    progress: Callable[[int], None] = lambda _: None,
) -> Report:
    """Serve a trace with tiers of these sizes. `policy`: the eviction policy. `progress`: as `Replayer.run`.

    Device memory is split into places and staging places as the engine splits it. With `spec.apart` pages of
    running texts may be sparse.
    """
    places = sizes.split(spec, serving.context_tokens, serving.stages)
    config = replace(serving.cache, **places._asdict(), host_bytes=sizes.host_bytes, evict=policy)
    return replay_places(trace, spec, replace(serving, cache=config), sizes.store_bytes, progress=progress)


def replay_places(
    trace: Trace,
    spec: CacheSpec,
    serving: Serving,
    store_bytes: int = 0,
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> Report:
    """The same with the places on the device, the host memory and the policy that `serving.cache` names."""
    assert trace.page_tokens == spec.page_tokens, "the trace was read for pages of another size"
    config, rates, clock, store = serving.cache, serving.rates, Clock(), NullStore(store_bytes)
    cache = null_cache(spec, config, clock, rates.link_bytes_s)
    if store_bytes and config.host_bytes:
        read_s, write_s = rates.store_read_bytes_s, rates.store_write_bytes_s
        mover = ClockMover(store, spec, clock, read_bytes_s=read_s, write_bytes_s=write_s)
        cache.stores.attach_mover(mover, clock)
    elif store_bytes:
        raise ConfigError("store_memory", store_bytes, "a store needs host memory to read into")
    engine = EngineConfig(
        config,
        running_max=serving.batch,
        step_tokens=serving.step_tokens,
        context_tokens=serving.context_tokens,
    )
    replayer = Replayer(cache, engine, rates, trace, clock, one_at_a_time=serving.one_at_a_time)
    began_s = perf_counter()
    with resting():  # a replay leaves no circles, and its trace would be visited again and again
        replayer.run(progress)
    counted = cache.counters
    moved = {
        word: counted[f"pages_{word}"] * spec.page_bytes + counted[f"tails_{word}"] * spec.tail_bytes
        for word in ("loaded", "saved")
    }
    return Report(
        policy=config.evict,
        requests=len(trace) - replayer.refused,
        refused=replayer.refused,
        tokens_asked=replayer.asked,
        hit_tokens=dict(replayer.hits),
        replayed_tokens=replayer.replayed,
        new_tokens=replayer.new,
        lost_tokens=dict(replayer.lost.most_common()),
        loaded_bytes=moved["loaded"],
        saved_bytes=moved["saved"],
        store_written_bytes=store.bytes_written,
        store_read_bytes=store.bytes_read,
        store_used_bytes=store.bytes_of_use,
        preemptions=replayer.scheduler.counters["preemptions"],
        first_token=Times.of(replayer.first_token_s),
        busy_s=replayer.computed / rates.prefill_tokens_s
        + replayer.drawn * rates.token_s / replayer.together,
        arrivals_s=trace.seconds,
        simulated_s=replayer.ended_s,
        wall_s=perf_counter() - began_s,
        counters=dict(counted),
    )
