"""Recorded requests, served by the scheduler and the cache that serve, on a clock and without a model.

    arrival ──► Tasks (order, room, preemption, waits) ──► a step: prompts at a rate, answers a token each
                    └── TieredCache: begin, extend, commit, finish ──► copies and the store on the same clock

A step takes the time of its prompt tokens and, if answers are drawn, the time of one token. Steps that draw
answers only are taken together, up to the next one that matters: a page is full, an answer ends, a request
arrives, a transfer lands. So the time of a replay does not grow with the tokens that are drawn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import ceil
from time import perf_counter
from typing import cast

from tiercel.cache import TieredCache, Wait
from tiercel.config import CacheConfig
from tiercel.engine.ask import Ask, Finish, Sampling
from tiercel.engine.config import EngineConfig, places_of
from tiercel.engine.scheduler import PROMPT_TOKENS, STEP_TOKENS, Scheduler
from tiercel.engine.step import share
from tiercel.engine.task import Seat, Stage, Task
from tiercel.errors import ConfigError
from tiercel.policy.resume import Reuse
from tiercel.replay.null import Clock, null_cache
from tiercel.replay.report import Report, Times
from tiercel.replay.store import ClockMover, NullStore
from tiercel.replay.trace import Trace, TraceRequest
from tiercel.spec.cache_spec import CacheSpec
from tiercel.text.stream import TextStream
from tiercel.types import PageKey

POLL_S = 0.005
"""A request that waits for the store is looked at so often, besides whenever the store answers."""

DEFAULT_POLICY = CacheConfig().evict

NOBODY: set[Task] = set()
"""No task is in a step while decisions are made: a replay decides between steps."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of each tier. 0 turns the host or the store off."""

    device_bytes: int
    host_bytes: int = 0
    store_bytes: int = 0


@dataclass(frozen=True)
class Rates:
    """How fast the machine is. The defaults are those of one H200 with DeepSeek V4 Flash (docs/log.md)."""

    prefill_tokens_s: float = 15_000.0
    token_s: float = 0.015
    """A step that draws a token for each running answer, however many they are."""
    link_bytes_s: float = 55e9
    """Between host and device, each direction."""
    store_read_bytes_s: float = 3e9
    store_write_bytes_s: float = 3e9

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < 1e18:
                raise ConfigError(name, value, "must be more than 0")

    def measured(self, trace: Trace) -> Rates:
        """With the rates of the server that wrote the trace, as far as its lines tell them."""
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


class Replayer(Scheduler):
    """The scheduler, with steps of its own."""

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
        super().__init__(cache, config, clock)
        self.clock, self.rates = clock, rates
        self.first_token_s: list[float] = []
        self.asked = self.new = self.replayed = self.refused = 0
        self.hits: Counter[str] = Counter(device=0, host=0, store=0)
        self.lost: Counter[str] = Counter()
        self._arrivals = deque(enumerate(trace.requests))
        self._one_at_a_time = one_at_a_time
        self._arrived_s: dict[Task, float] = {}
        """Of tasks that have not drawn a token yet."""
        self._seen: set[PageKey] = set()
        """Pages of prompts that have begun, and of answers that have ended."""
        self._steps = 0
        self._prompts: dict[Task, Seat] = {}
        self._answers: dict[Task, tuple[int, int]] = {}
        """Who draws, since which step, and the step that it is looked at again."""
        self._due: list[tuple[int, tuple[float, int], Task]] = []
        self._collected = False
        """What has landed was taken in for the next step already."""
        self._stalled: list[Task] = []
        """Answers that ask for room before the next step."""
        self.ended_s = 0.0
        """When the last answer ended."""

    def run(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Until every request has ended. `progress` is called with how many have, now and then."""
        ended = 0
        while self._arrivals or self.tasks:
            self._take_arrivals()
            self._decide()
            if self._prompts or self._answers:
                self._take_steps()
            elif self.tasks:
                self._sleep()
            if (now_ended := self.counters["finished_length"]) > ended + 100:
                progress(now_ended - ended)
                ended = now_ended
        progress(self.counters["finished_length"] - ended)
        self.ended_s = self.clock.now_s
        self._let_land()

    def _decide(self) -> None:
        """What the scheduler does before each step."""
        if not self._collected:
            self.collect()
        self._collected = False
        self._serve_standing()
        self._admit(NOBODY)
        self._changes.clear()
        self._make_room()

    # Requests come in

    def _take_arrivals(self) -> None:
        if self._one_at_a_time:
            while not self.tasks and self._arrivals:
                self._let_land()
                self._arrive(*self._arrivals.popleft(), self.clock.now_s)
            return
        if not self.tasks and self._arrivals:
            self._pass(self._arrivals[0][1].time_s)
        while (
            self._arrivals
            and self._arrivals[0][1].time_s <= self.clock.now_s
            and len(self.waiting) < self.config.waiting_max
        ):
            number, request = self._arrivals.popleft()
            self._arrive(number, request, request.time_s)

    def _pass(self, until_s: float) -> None:
        """Time passes, and what is under way goes on."""
        while (next_s := self.clock.next_s()) is not None and next_s < until_s:
            self.clock.now_s = max(self.clock.now_s, next_s)
            self.collect()
        self.clock.now_s = max(self.clock.now_s, until_s)

    def _let_land(self) -> None:
        """Everything under way ends."""
        self.collect()
        while (next_s := self.clock.next_s()) is not None:
            self.clock.now_s = max(self.clock.now_s, next_s)
            self.collect()

    def _arrive(self, number: int, request: TraceRequest, time_s: float) -> None:
        if request.prompt_tokens + max(1, request.output_tokens) > self.context_tokens:
            self.refused += 1
            return
        sampling = Sampling(max_tokens=max(1, request.output_tokens), seed=0)
        ask = Ask(
            str(number),
            (0,) * request.prompt_tokens,
            sampling,
            request.turn_ends,
            priority=request.priority,
            keys=request.keys,
        )
        self.add(ask, cast(TextStream, None), frozenset())  # no text is made of tokens here
        self._arrived_s[self.tasks[ask.request_id]] = time_s

    def _begin(self, task: Task, instead_of: Task | None = None) -> Wait | None:
        first = task.times.begun_s is None
        waits = super()._begin(task, instead_of)
        if waits is None and first and task.seat is not None:
            self._count(task, task.seat.request.reuse)
        return waits

    def _count(self, task: Task, reuse: Reuse) -> None:
        """What a request found when it first began, and what it could have found."""
        keys = task.ask.keys or ()
        useful = (task.prompt_tokens - 1) // self.page_tokens
        known = bisect_left(keys, True, 0, useful, key=lambda key: key not in self._seen)
        self._seen.update(keys[known : task.prompt_tokens // self.page_tokens])
        self.asked += task.prompt_tokens
        self.new += (useful - known) * self.page_tokens
        self.replayed += reuse.replay_tokens
        self.hits["device"] += reuse.device_tokens
        self.hits["host"] += reuse.host_tokens
        self.hits["store"] += reuse.store_tokens
        if (lost := known * self.page_tokens - reuse.tokens) > 0:
            self.lost[reuse.why.value] += lost

    def _end(self, task: Task, finish: Finish) -> None:
        keys = task.ask.keys or ()
        self._seen.update(
            keys[task.prompt_tokens // self.page_tokens : (task.longest - 1) // self.page_tokens]
        )
        super()._end(task, finish)

    # Steps

    def _resume(self, task: Task) -> None:
        super()._resume(task)
        self._plan_next(task)

    def _take_steps(self) -> None:
        """One step with prompts, or all steps up to the next that matters."""
        shares, count = dict[Task, int](), 1
        seconds = self.rates.token_s if self._answers else 0.0
        if self._prompts:
            prompts = sorted(self._prompts, key=lambda task: task.order)
            missing = [len(task.tokens) - self._prompts[task].computed for task in prompts]
            room = max((self.config.step_tokens or STEP_TOKENS) - len(self._answers), self.page_tokens)
            shares = dict(zip(prompts, share(room, missing, self.page_tokens), strict=True))
            for task, tokens in shares.items():
                if tokens:
                    self._extend_prompt(self._prompts[task], self._prompts[task].computed + tokens)
            computed = sum(shares.values())
            seconds += computed / self.rates.prefill_tokens_s
            if computed > PROMPT_TOKENS * len(prompts):
                self.cache.compute.observe(computed, seconds)
        else:
            count = self._take_first(self._steps_together())
            seconds *= count
        self.clock.now_s += seconds
        self._steps += count
        self._look_at_answers()
        for task, tokens in shares.items():
            if tokens:
                self._prompt_computed(task, tokens)

    def _take_first(self, count: int) -> int:
        """The first of steps that are taken together: each takes in what has landed, as the scheduler does
        before every step. When nothing is under way, nothing changes any more. Returns how many are left."""
        while count > 1:
            self.clock.now_s += self.rates.token_s
            self._steps += 1
            count -= 1
            self.collect()
            if self._prompts or self.loading or self._stalled or not self._nobody_begins:
                self._collected = True
                return 0
            if not self.cache.busy:
                break
        return count

    @property
    def _nobody_begins(self) -> bool:
        """Whether nobody waits, or the first who waits would be refused again: nobody passes it then."""
        return not self.waiting or self._refusal(self.waiting[0]) is not None

    def _steps_together(self) -> int:
        """How many steps draw answers only, before one of them matters."""
        while self._is_old(self._due[0]):
            heappop(self._due)
        count = self._due[0][0] - self._steps
        next_s = [self._arrivals[0][1].time_s] if self._arrivals and not self._one_at_a_time else []
        if (self.waiting or self.loading or self._stalled) and (landing_s := self.clock.next_s()) is not None:
            next_s.append(landing_s)
        if self.waiting and self.cache.store is not None:
            next_s.append(self.clock.now_s + POLL_S)
        if next_s:
            count = min(count, max(1, ceil((min(next_s) - self.clock.now_s) / self.rates.token_s)))
        return count

    def _is_old(self, due: tuple[int, tuple[float, int], Task]) -> bool:
        return self._answers.get(due[2], (0, -1))[1] != due[0]

    def _prompt_computed(self, task: Task, tokens: int) -> None:
        """A step has computed so many tokens of a prompt, or of a text that goes on after a preemption."""
        seat = self._prompts.pop(task)
        self._advance(task, seat, tokens)
        if seat.computed == len(task.tokens):
            self._drew(task, 1)
        self._plan_next(task)

    def _plan_next(self, task: Task) -> None:
        """What the next step computes of a text: more of its prompt, or one token more. The scheduler counts
        the last token of a prompt, if nothing else is missing, as an answer's."""
        seat = task.seat
        assert seat is not None
        if len(task.tokens) - seat.computed > 1:
            self._prompts[task] = seat
        else:
            self._draw_on(task)

    def _drew(self, task: Task, tokens: int) -> None:
        """A text is so many tokens longer. When its first token came is told."""
        task.tokens += [0] * tokens
        if tokens and (arrived_s := self._arrived_s.pop(task, None)) is not None:
            self.first_token_s.append(self.clock.now_s - arrived_s)

    def _advance(self, task: Task, seat: Seat, tokens: int) -> None:
        seat.computed += tokens
        seat.planned = seat.computed
        if seat.computed // self.page_tokens != seat.committed:
            self._commit(task, seat)

    def _look_at_answers(self) -> None:
        """Answers that have filled a page or have ended."""
        while self._due and self._due[0][0] <= self._steps:
            entry = heappop(self._due)
            if not self._is_old(entry):
                self._settle(entry[2])
                self._draw_on(entry[2])

    def _settle(self, task: Task) -> None:
        """Count what an answer has drawn since it was last looked at."""
        assert task.seat is not None
        drawn = self._steps - self._answers.pop(task)[0]
        self._drew(task, drawn)
        self._advance(task, task.seat, drawn)

    def _draw_on(self, task: Task) -> None:
        """A text draws on, or it ends now, or asks for room first."""
        assert (seat := task.seat) is not None
        if len(task.tokens) >= task.longest:
            self._end(task, Finish.LENGTH)
        elif self._steps_of_room(task, seat) > 0:
            self._draw(task, seat)
        else:
            self._stalled.append(task)

    def _steps_of_room(self, task: Task, seat: Seat) -> int:
        """So many steps before a text asks for room, as the scheduler does it: early, if it will need it."""
        room = seat.request.extended_tokens
        return room - seat.planned - (self._ahead if room < task.longest else 0)

    def _draw(self, task: Task, seat: Seat) -> None:
        """Until its page is full, it ends or asks for room. Its first token alone: timed, and committed."""
        to_page_end = self.page_tokens - seat.computed % self.page_tokens
        steps = to_page_end, task.longest - 1 - seat.computed, self._steps_of_room(task, seat)
        count = 1 if task in self._arrived_s or seat.committed < 0 else max(1, min(steps))
        self._answers[task] = self._steps, self._steps + count
        heappush(self._due, (self._steps + count, task.order, task))

    def _make_room(self) -> None:
        """As the scheduler does it: after what has landed was taken in, the first in order first."""
        stalled, self._stalled = sorted(self._stalled, key=lambda task: task.order), []
        for task in stalled:
            seat = task.seat
            if task.stage is not Stage.RUNNING or seat is None:
                continue  # it was preempted for one before it
            if self._steps_of_room(task, seat) > 0 or self._room_for(task, seat, NOBODY):
                self._draw(task, seat)
            elif task.stage is Stage.RUNNING:
                self._stalled.append(task)

    def _preempt(self, task: Task) -> None:
        if task in self._answers:
            self._settle(task)
        self._prompts.pop(task, None)
        super()._preempt(task)

    def _sleep(self) -> None:
        """Nothing can be computed: the next thing that happens is an arrival or the end of a transfer."""
        if self.clock.next_s() is None:
            self._decide()  # sends what was queued since the last time
            if self._prompts or self._answers:
                return
        next_s = [] if self._one_at_a_time or not self._arrivals else [self._arrivals[0][1].time_s]
        if (landing_s := self.clock.next_s()) is not None:
            next_s.append(landing_s)
        if self.waiting and self.cache.store is not None:
            next_s.append(self.clock.now_s + POLL_S)
        assert next_s, "a request waits, and nothing is under way"
        self.clock.now_s = max(self.clock.now_s, min(next_s))


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
    """Serve a trace with tiers of these sizes. `policy`: what leaves first. `progress`: as `Replayer.run`.

    Device memory is split into places for pages and for tails as the engine splits it.
    """
    pages, tails = places_of(sizes.device_bytes, spec, serving.batch, host_bytes=sizes.host_bytes)
    config = replace(
        serving.cache,
        device_pages=pages,
        device_tails=tails,
        host_bytes=sizes.host_bytes,
        evict=policy,
    )
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
    engine = EngineConfig(config, running_max=serving.batch, step_tokens=serving.step_tokens)
    replayer = Replayer(cache, engine, rates, trace, clock, one_at_a_time=serving.one_at_a_time)
    began_s = perf_counter()
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
        preemptions=replayer.counters["preemptions"],
        first_token=Times.of(replayer.first_token_s),
        simulated_s=replayer.ended_s,
        wall_s=perf_counter() - began_s,
        counters=dict(counted),
    )
