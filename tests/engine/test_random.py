"""Goal: whatever comes, everything asked ends, and says what it would have said alone. Method: from a seed,
asks that share prefixes and come at the same moment, with priorities, aborts and tiny pools."""

from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from tests.engine.drive import (
    PAGE,
    OracleDrafter,
    guess_with,
    make_ask,
    make_engine,
    one_loop,
    run,
    settle,
    steps_of,
    tokens_of,
    words,
)
from tiercel.asks.ask import Finish
from tiercel.engine import queue_runner

STEPS_MOST = 2000
"""Far more than all asks of a seed need."""


class Alone:
    """What a prompt is answered when nothing is cached and nobody else is there."""

    def __init__(self):
        self._engine = make_engine(cache={"force_miss": True})
        self._answers = {}

    def tokens(self, prompt):
        known = self._answers
        if prompt not in known:
            known[prompt] = tokens_of(run(self._engine, make_ask(str(len(known)), prompt, 6))[0])
        return known[prompt]


@pytest.fixture(scope="module")
def alone():
    return Alone()


def prompt_of(random):
    text = words(2 * PAGE + 20, random.randrange(2))[
        : random.choice([9, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 20])
    ]
    return tuple(text + words(random.choice([0, 0, 5]), 7))


def engine_of(random, speculate):
    clock = lambda: clock.now_s  # noqa: E731
    clock.now_s = 0.0  # type: ignore[attr-defined]
    return make_engine(
        pages=random.randint(4, 9),
        host_pages=random.choice([0, 12, 60]),
        running_max=random.randint(1, 4),
        step_tokens=random.choice([PAGE, 2 * PAGE]),
        cache={"tail_every_pages": random.choice([1, 4])},
        clock=clock,
        speculate=speculate,
        draft_tokens_max=random.randint(1, 5),
    ), clock


@one_loop
@pytest.mark.parametrize("speculate", ["off", "mtp"])
@pytest.mark.parametrize("seed", range(5))
def test_everything_asked_ends_and_says_what_it_would_have_said_alone(alone, seed, speculate, overlap):
    random = Random(seed)
    engine, clock = engine_of(random, speculate)
    logprobs = None if overlap == "queued" else 0  # with logprobs a step is waited for
    asks = {
        str(i): make_ask(str(i), prompt_of(random), 6, priority=random.randrange(3), logprobs=logprobs)
        for i in range(14)
    }
    if speculate == "mtp":
        texts = [[*ask.prompt, *alone.tokens(ask.prompt)] for ask in asks.values()]
        guess_with(engine, OracleDrafter(texts, 0.7, Random(seed)), random.randint(1, 5))
    coming, told, ends, aborted = list(asks.values()), {name: [] for name in asks}, {}, set()
    with ThreadPoolExecutor(1) as executor:
        steps = steps_of(engine, overlap, executor)
        for _ in range(STEPS_MOST):
            while coming and random.random() < 0.4:
                engine.add(coming.pop())
            if random.random() < 0.05 and engine.tasks:
                aborted.add(name := random.choice(sorted(engine.tasks)))
                engine.abort(name)
            clock.now_s += random.choice([0.0, 1.0, 30.0])
            for delta in next(steps):
                told[delta.request_id] += [out.token for out in delta.tokens]
                if delta.finish is not None:
                    assert delta.request_id not in ends, "an answer ends once"
                    ends[delta.request_id] = delta.finish
            if len(ends) == len(asks):
                break
    assert set(ends) == set(asks), f"seed {seed}: these never ended: {sorted(set(asks) - set(ends))}"
    for name, ask in asks.items():
        assert ends[name] is Finish.LENGTH or (name in aborted and ends[name] is Finish.ABORT)
        assert told[name] == alone.tokens(ask.prompt)[: len(told[name])]
    settle(engine)


@pytest.mark.parametrize("logprobs", [None, 0], ids=["drawn on the device", "drawn here"])
def test_a_queued_step_takes_no_longer_because_its_result_is_asked_for_late(logprobs, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(queue_runner, "perf_counter", lambda: now[0])
    engine = make_engine()
    engine.add(make_ask("a", words(9), 2, logprobs=logprobs))
    queue = queue_runner.QueueRunner(engine.runner.model, staging=engine.runner._staging)
    result = queue.start(engine.scheduler.seal(engine.scheduler.plan()))
    now[0] = 1000.0
    assert result().seconds == 0.0
