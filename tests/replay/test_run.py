"""Goal: a replay counts what the shipping scheduler and cache do. Method: the same requests on both. One at a
time: a scheduler that is driven token by token, on a cache with bytes. Together: the same on a clock, each
step at the moment when the replay takes it."""

from collections import Counter, deque
from concurrent.futures import Executor, Future
from random import Random
from unittest.mock import patch

import pytest

from tests.replay.traffic import conversations, trace_of
from tests.simulation.specs import SPECS
from tiercel.asks.ask import Ask, Sampling, TokenOut
from tiercel.cache import TieredCache
from tiercel.cache.memories import make_memories
from tiercel.config import CacheConfig
from tiercel.engine.admission import Admission
from tiercel.engine.config import EngineConfig
from tiercel.engine.scheduler import Scheduler
from tiercel.engine.step import Drawn
from tiercel.errors import ConfigError
from tiercel.policy.resume import Why
from tiercel.replay.null import Clock, null_cache
from tiercel.replay.run import POLL_S, Rates, Serving, replay, replay_places
from tiercel.replay.sizes import Sizes
from tiercel.replay.store import ClockMover, NullStore
from tiercel.spec import load
from tiercel.transfer.plan import Direction

FLASH = load("deepseek-v4-flash")
GB = 10**9
FAST = Rates(prefill_tokens_s=1e6, token_s=1e-3, link_bytes_s=1e15)


class AtOnce(Executor):
    """Does what it is given before it returns."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def served(asked, spec, config, *, batch=8, step_tokens=16):
    """The same requests, one at a time, on a cache with bytes; answers how many tokens each tier gave."""
    memories = make_memories(spec, config, executors=dict.fromkeys(Direction, AtOnce()))
    cache = TieredCache(spec, config, memories)
    scheduler = Scheduler(cache, EngineConfig(config, running_max=batch, step_tokens=step_tokens))
    reused = []
    for number, (prompt, answer) in enumerate(asked):
        cache.step()
        while cache.busy:
            cache.step()
        scheduler.add(Ask(str(number), tuple(prompt), Sampling(len(answer), seed=0)), None, frozenset())
        drawn = iter(answer)
        while scheduler.tasks:
            step = scheduler.seal(scheduler.plan())
            results = [(TokenOut(next(drawn)),) if part.draws else None for part in step.parts]
            scheduler.advance(step, Drawn(results, {}, 0.001))
        reused.append(scheduler.explained[str(number)].reuse)
    while cache.busy:
        cache.step()
    cache.check()
    counted = {name: cache.counters[name] for name in MOVED}
    cache.close()
    tiers = {
        tier: sum(getattr(each, f"{tier}_tokens") for each in reused) for tier in ("device", "host", "store")
    }
    return tiers, sum(each.replay_tokens for each in reused), counted


MOVED = ("pages_saved", "tails_saved", "pages_loaded", "tails_loaded", "requests_finished")


@pytest.mark.parametrize("policy", ["lru", "slru", "value"])
@pytest.mark.parametrize("name", ["full attention", "short window", "long window", "compressed"])
def test_a_replay_counts_what_the_cache_does_with_bytes(tmp_path, name, policy):
    spec, hits = SPECS[name], 0
    for seed in range(6):
        asked = conversations(seed, 60)
        config = CacheConfig(
            device_pages=24 + 2 * spec.pages_per_window * spec.places_per_tail,
            staging_tails=2 * spec.pages_per_window,
            host_bytes=(30 if seed % 2 else 200) * spec.place_bytes,
            evict=policy,
        )
        serving = Serving(FAST, batch=8, one_at_a_time=True, step_tokens=16, cache=config)
        report = replay_places(trace_of(tmp_path, asked, spec.page_tokens), spec, serving)
        tiers, replayed, counted = served(asked, spec, config)
        assert report.hit_tokens == tiers and report.replayed_tokens == replayed, seed
        assert {name: report.counters[name] for name in MOVED} == counted, seed
        hits += tiers["host"]
    assert hits, "no request found anything on the host: the test shows nothing"


real_refusal = Admission._refusal


def doubted_refusal(self, task):
    """Asks the cache again where it need not: a refusal must still hold, and asking must change nothing."""
    refusal = real_refusal(self, task)
    if refusal is not None:
        task.refused, leaving = None, self._cache.pages.leaving
        assert self._begin(task) is not None and self._cache.pages.leaving == leaving
        task.refused = self._cache.changes, refusal
    return refusal


class Clocked:
    """The scheduler, step by step on a clock. Every step plans, computes one token of each answer and what it
    can of prompts, and takes the time that a replay says it takes."""

    def __init__(self, trace, spec, serving, store_bytes):
        self.clock, self.rates, self.store_bytes = Clock(), serving.rates, store_bytes
        self.cache = null_cache(spec, serving.cache, self.clock, self.rates.link_bytes_s)
        if store_bytes:
            read_s, write_s = self.rates.store_read_bytes_s, self.rates.store_write_bytes_s
            store = NullStore(store_bytes)
            mover = ClockMover(store, spec, self.clock, read_bytes_s=read_s, write_bytes_s=write_s)
            self.cache.stores.attach_mover(mover, self.clock)
        config = EngineConfig(serving.cache, running_max=serving.batch, step_tokens=serving.step_tokens)
        self.scheduler = Scheduler(self.cache, config, self.clock)
        self.arrivals = deque(enumerate(trace.requests))
        self.first_reuse = {}

    def run(self):
        while self.arrivals or self.scheduler.tasks:
            self._arrive()
            step = self._plan()
            if not step.parts and self.clock.next_s() is None:
                step = self._plan()
            if not step.parts:
                self._sleep()
            else:
                self._compute(step)
        ended_s = self.clock.now_s
        self.scheduler.collect()
        self._pass(float("inf"))
        hits = Counter(device=0, host=0, store=0)
        for reuse in self.first_reuse.values():
            hits.update(device=reuse.device_tokens, host=reuse.host_tokens, store=reuse.store_tokens)
        return dict(hits), self.scheduler.counters["preemptions"], ended_s, dict(self.cache.counters)

    def _pass(self, until_s):
        while (next_s := self.clock.next_s()) is not None and next_s < until_s:
            self.clock.now_s = max(self.clock.now_s, next_s)
            self.scheduler.collect()

    def _arrive(self):
        if not self.scheduler.tasks:
            self._pass(self.arrivals[0][1].time_s)
            self.clock.now_s = max(self.clock.now_s, self.arrivals[0][1].time_s)
        while self.arrivals and self.arrivals[0][1].time_s <= self.clock.now_s:
            number, each = self.arrivals.popleft()
            sampling = Sampling(max(1, each.output_tokens), seed=0)
            if each.prompt_tokens + sampling.max_tokens > self.scheduler.context_tokens:
                continue  # the server would refuse it
            ask = Ask(str(number), (0,) * each.prompt_tokens, sampling, keys=each.keys)
            self.scheduler.add(ask, None, frozenset())

    def _plan(self):
        step = self.scheduler.seal(self.scheduler.plan())
        for name, told in self.scheduler.explained.items():
            self.first_reuse.setdefault(name, told.reuse)
        return step

    def _sleep(self):
        next_s = [self.arrivals[0][1].time_s] if self.arrivals else []
        if (landing_s := self.clock.next_s()) is not None:
            next_s.append(landing_s)
        if self.scheduler.waiting and self.store_bytes:
            next_s.append(self.clock.now_s + POLL_S)
        self.clock.now_s = max(self.clock.now_s, min(next_s))

    def _compute(self, step):
        prompts, answers = 0, False
        for part in step.parts:
            if part.draws and part.end - part.start == 1:
                answers = True
            else:
                prompts += part.end - part.start
        seconds = self.rates.token_s * answers + prompts / self.rates.prefill_tokens_s
        self.clock.now_s += seconds
        tokens = [(TokenOut(0),) if part.draws else None for part in step.parts]
        self.scheduler.advance(step, Drawn(tokens, {}, seconds))


class Overlapping:
    """Requests that overlap, of one seed: replayed, and step by step."""

    def __init__(self, tmp_path, spec, policy, store, seed):
        random, self.spec, page_bytes = Random(seed), spec, spec.place_bytes
        config = CacheConfig(
            device_pages=24 + 2 * spec.pages_per_window * spec.places_per_tail,
            staging_tails=2 * spec.pages_per_window,
            staged_pages=64,
            host_bytes=random.choice([40 if spec.selective else 15, 30, 200]) * page_bytes,
            save_step_bytes=random.choice([2, 1000]) * page_bytes,
            evict=policy,
        )
        link_s = random.choice([1e15, 1e3 * page_bytes])
        store_s = {"a fast store": 1e6}.get(store, 100) * page_bytes
        rates = Rates(1e4, 1e-3, link_s, store_read_bytes_s=store_s, store_write_bytes_s=store_s)
        self.serving = Serving(rates, batch=8, step_tokens=16, cache=config)
        # Not a multiple of a step's time: sums of the same times in another order differ in their last bit.
        every_s = random.choice([0.00213, 0.01017])
        asked = conversations(seed, 80, turn=random.choice([7, 20]), recent=30)
        self.trace = trace_of(tmp_path, asked, spec.page_tokens, every_s=every_s)
        self.store_bytes = {"no store": 0, "a fast store": GB}.get(store, 40 * page_bytes)

    def replayed(self):
        report = replay_places(self.trace, self.spec, self.serving, self.store_bytes)
        return report.hit_tokens, report.preemptions, pytest.approx(report.simulated_s), report.counters

    def step_by_step(self):
        with patch.object(Admission, "_refusal", doubted_refusal):
            return Clocked(self.trace, self.spec, self.serving, self.store_bytes).run()


@pytest.mark.rotate("policy")
@pytest.mark.parametrize("store", ["no store", "a fast store", "a slow and small store"])
@pytest.mark.parametrize("policy", ["lru", "value"])
@pytest.mark.parametrize("name", ["full attention", "short window", "compressed", "two pools"])
def test_a_replay_of_requests_that_overlap_does_what_the_scheduler_does_step_by_step(
    tmp_path, name, policy, store
):
    used = Counter()
    for seed in range(4):
        requests = Overlapping(tmp_path, SPECS[name], policy, store, seed)
        truth = requests.step_by_step()
        assert requests.replayed() == truth, seed
        used.update(truth[0], preemptions=truth[1], sparse=truth[3]["pages_sparse"])
    assert used["host"] and (used["store"] or store != "a fast store"), "the test shows nothing"
    assert used["sparse"] or not SPECS[name].selective, "the test shows nothing"


def test_a_replay_that_lets_nobody_in_while_steps_are_taken_together_is_noticed(tmp_path):
    for seed in range(8):
        requests = Overlapping(tmp_path, SPECS["short window"], "lru", "a slow and small store", seed)
        truth = requests.step_by_step()
        with patch.object(Admission, "quiet", True):
            if requests.replayed() != truth:
                return
    raise AssertionError("nothing was noticed")


def test_every_token_of_a_prompt_is_reused_replayed_lost_new_or_behind_the_last_page(tmp_path):
    spec = SPECS["compressed"]
    asked = conversations(1, 80)
    trace = trace_of(tmp_path, asked, spec.page_tokens)
    config = CacheConfig(
        device_pages=24 + 2 * spec.pages_per_window * spec.places_per_tail,
        staging_tails=spec.pages_per_window,
    )
    report = replay_places(trace, spec, Serving(FAST, cache=config, one_at_a_time=True))
    useful = sum((len(prompt) - 1) // spec.page_tokens * spec.page_tokens for prompt, _ in asked)
    assert report.tokens_asked == sum(len(prompt) for prompt, _ in asked)
    assert report.replayed_tokens > 0
    found = report.hits + report.replayed_tokens
    assert found + sum(report.lost_tokens.values()) + report.new_tokens == useful
    assert report.lost_tokens and report.requests == 80


def long_conversations(tmp_path, requests=60, **options):
    asked = conversations(5, requests, shared=700, turn=900, most=20_000, recent=40)
    return trace_of(tmp_path, asked, 256, **options)


def test_the_same_input_gives_the_same_report_with_every_tier_and_overlapping_requests(tmp_path):
    trace = long_conversations(tmp_path, 100, every_s=0.3)
    reports = [
        replay(trace, FLASH, Sizes(GB // 20, GB // 30, GB), policy="lru", serving=Serving(batch=8)).as_dict()
        for _ in range(2)
    ]
    for report in reports:
        del report["wall_s"], report["requests_s"]
    assert reports[0] == reports[1]
    assert reports[0]["hit_tokens"]["host"] and reports[0]["store_read_bytes"], "each tier was used"
    assert 0 < reports[0]["store_used_bytes"] <= reports[0]["store_written_bytes"]


def test_memory_without_bytes_may_be_larger_than_the_machine(tmp_path):
    report = replay(long_conversations(tmp_path), FLASH, Sizes(2 * GB, 200 * GB, 2000 * GB))
    assert report.hits and set(report.lost_tokens) == {Why.NO_TAIL.value}, "no page has left"


def test_a_slower_machine_answers_later_and_finds_as_much_one_at_a_time(tmp_path):
    trace, sizes = long_conversations(tmp_path), Sizes(GB // 8, GB // 16)
    slow, fast = (
        replay(trace, FLASH, sizes, serving=Serving(Rates(prefill_tokens_s=rate), one_at_a_time=True))
        for rate in (1_000.0, 100_000.0)
    )
    assert slow.hit_tokens == fast.hit_tokens and slow.first_token.p50_s > fast.first_token.p50_s


def test_requests_that_come_faster_than_they_are_computed_wait_and_share_what_is_computed(tmp_path):
    prompt = list(range(5, 2005))
    trace = trace_of(tmp_path, [(prompt, [1, 2]), (prompt, [3, 4])], 256, every_s=0.001)
    report = replay(trace, FLASH, Sizes(GB), serving=Serving(Rates(prefill_tokens_s=10_000)))
    assert report.hits == 1792, "the second waits for the pages that the first computes"
    assert 0.2 < report.first_token.p99_s < 0.3


def test_where_the_device_is_short_requests_give_way_and_all_of_them_end(tmp_path):
    asked = [([number] * 1000, [7] * 1500) for number in range(2, 8)]
    trace = trace_of(tmp_path, asked, 256, every_s=0.0)
    config = CacheConfig(device_pages=18 + 2 * FLASH.places_per_tail, staging_tails=2, host_bytes=GB)
    report = replay_places(trace, FLASH, Serving(cache=config, batch=6))
    assert report.preemptions > 0 and report.counters["requests_finished"] == 6


def test_a_text_that_does_not_fit_on_the_device_is_counted_as_refused(tmp_path):
    asked = [([1] * 300, [2]), ([1] * 9000, [2])]
    config = CacheConfig(device_pages=8 + 2 * FLASH.places_per_tail, staging_tails=2)
    report = replay_places(trace_of(tmp_path, asked, 256), FLASH, Serving(cache=config))
    assert (report.requests, report.refused) == (1, 1)


def test_rates_and_sizes_that_can_not_be_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="token_s"):
        Rates(token_s=0)
    with pytest.raises(ConfigError, match="store_memory"):
        replay(long_conversations(tmp_path, 2), FLASH, Sizes(GB, 0, GB))
    with pytest.raises(ConfigError, match="host_bytes"):
        replay(long_conversations(tmp_path, 2), FLASH, Sizes(GB, 100))


def test_rates_are_those_that_the_trace_tells():
    from tiercel.replay.trace import Recorded, Trace, TraceRequest

    said = TraceRequest(0.0, [], 300, 11, recorded=Recorded(100, 0, 0, prefill_s=0.1, decode_s=0.5))
    rates = Rates().measured(Trace([said], 256))
    assert (rates.prefill_tokens_s, rates.token_s) == pytest.approx((2000.0, 0.05))
    assert Rates().measured(Trace([replace_recorded(said)], 256)) == Rates()


def replace_recorded(request):
    return request._replace(recorded=None)
