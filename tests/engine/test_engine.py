"""Goal: asks are served in order, within bounds, and every way to end gives everything back. Method: the
embedded model, small devices, models and copies that fail."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.drive import (
    LOOPS,
    PAGE,
    TEXT,
    make_ask,
    make_engine,
    one_loop,
    run,
    settle,
    steps_of,
    tokens_of,
    words,
)
from tiercel.asks.ask import Finish, Sampling
from tiercel.engine.loop import plain_steps
from tiercel.engine.step import share
from tiercel.engine.task import PRIORITY_S
from tiercel.errors import AskError, QueueFull


def finishes(deltas):
    return {delta.request_id: delta.finish for delta in deltas if delta.finish}


# What is asked


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": (5, 4096)}, "prompt"),
        ({"prompt": (-1,)}, "prompt"),
        ({"sampling": Sampling(64 * PAGE)}, "max_tokens"),
        ({"sampling": Sampling(top_p=2.0)}, "top_p"),
    ],
)
def test_what_can_never_be_served_is_refused_by_name(change, field):
    engine = make_engine()
    with pytest.raises(AskError, match=field):
        engine.add(replace(make_ask("a", words(5)), **change))
    settle(engine)


def test_more_than_may_wait_are_refused_and_may_come_again():
    engine = make_engine(waiting_max=2)
    engine.add(make_ask("a", words(5)))
    engine.add(make_ask("b", words(5)))
    with pytest.raises(QueueFull, match="2 requests are waiting, 2 may"):
        engine.add(make_ask("c", words(5)))
    assert all(answer.tokens for answer in run(make_engine(), make_ask("c", words(5))))
    next(plain_steps(engine))
    engine.add(make_ask("c", words(5)))


def test_a_name_in_use_is_refused():
    engine = make_engine()
    engine.add(make_ask("a", words(5)))
    with pytest.raises(AskError, match="in use"):
        engine.add(make_ask("a", words(6)))


def test_an_answer_of_no_tokens_fills_the_cache():
    engine = make_engine()
    [answer] = run(engine, make_ask("a", words(2 * PAGE + 5), 0))
    assert not answer.tokens and answer.usage.completion_tokens == 0
    [again] = run(engine, make_ask("b", words(2 * PAGE + 5), 0))
    assert again.usage.device_tokens == 2 * PAGE


def test_the_higher_priority_goes_first_and_among_equals_the_earlier():
    engine, order = make_engine(running_max=1), []
    for name, priority in (("a", 0), ("b", 0), ("c", 5)):
        engine.add(make_ask(name, words(5), 1, priority=priority))
    for deltas in plain_steps(engine):
        order += finishes(deltas)
        if len(order) == 3:
            break
    assert order == ["c", "a", "b"]


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def test_who_has_waited_long_enough_goes_before_who_is_more_urgent():
    """A level of priority is worth PRIORITY_S of waiting: a stream of urgent asks starves nobody."""
    clock, order = Clock(), []
    engine = make_engine(running_max=1, clock=clock)
    engine.add(make_ask("patient", words(5), 1))
    steps = plain_steps(engine)
    for i in range(8):
        engine.add(make_ask(f"urgent{i}", words(5), 1, priority=1))
        order += finishes(next(steps))
        clock.now_s += PRIORITY_S / 4
    assert order.index("patient") in (4, 5), "urgent asks of the first ten seconds went before it"


@one_loop
@pytest.mark.parametrize("short_of", ["rings", "pages"])
def test_an_urgent_ask_takes_the_room_of_a_running_one_that_is_less_so(overlap, short_of):
    few = {"running_max": 1} if short_of == "rings" else {"pages": 12}
    engine, order, texts = make_engine(**few), [], {}
    long = 11 * PAGE  # two of these do not fit, also if nobody keeps tails
    alone = run(make_engine(), make_ask("slow", words(long + 9), 60))[0].text
    engine.add(make_ask("slow", words(long + 9), 60))
    with ThreadPoolExecutor(1) as executor:
        steps = steps_of(engine, overlap, executor)
        while not engine.counters["tokens_drawn"]:
            next(steps)
        engine.add(make_ask("equal", words(long, 2), 2))
        engine.add(make_ask("urgent", words(long, 1), 2, priority=1))
        while len(order) < 3:
            for delta in next(steps):
                texts[delta.request_id] = texts.get(delta.request_id, "") + delta.text
                order += [delta.request_id] * bool(delta.finish)
    assert order == ["urgent", "slow", "equal"] and engine.counters["preemptions"] == 1
    assert texts["slow"].endswith(alone[-20:]), "and the one that gave way says what it would have said"
    settle(engine)


def test_what_a_request_has_computed_itself_is_not_told_as_cached():
    """It gives way in the middle of its prompt, and then finds its own pages."""
    engine = make_engine(running_max=1, step_tokens=PAGE)
    run(engine, make_ask("before", words(PAGE + 5), 1))
    engine.add(make_ask("slow", words(4 * PAGE), 2))
    steps, ends = plain_steps(engine), {}
    while engine.counters["steps"] < 4:
        next(steps)
    engine.add(make_ask("urgent", words(PAGE, 1), 1, priority=1))
    while len(ends) < 2:
        ends |= {delta.request_id: delta.usage for delta in next(steps) if delta.finish}
    assert engine.counters["preemptions"] == 1
    assert ends["slow"].cached_tokens == PAGE == engine.explain("slow").reuse.cached_tokens
    stats = engine.stats()
    assert stats.hit_tokens["device"] == PAGE and stats.counters["tokens_asked"] == 6 * PAGE + 5
    settle(engine)


@LOOPS
def test_who_waits_for_pages_asks_again_only_when_something_has_changed(overlap, monkeypatch):
    engine, ends = make_engine(pages=12), {}
    engine.add(make_ask("first", words(11 * PAGE + 9), 60))
    asked, begin = [], engine.cache.begin
    monkeypatch.setattr(engine.cache, "begin", lambda *a, **k: asked.append(begin(*a, **k)) or asked[-1])
    with ThreadPoolExecutor(1) as executor:
        steps = steps_of(engine, overlap, executor)
        while not engine.counters["tokens_drawn"]:
            next(steps)
        engine.add(make_ask("second", words(11 * PAGE, 2), 2))
        while len(ends) < 2:
            ends |= finishes(next(steps))
    assert engine.counters["steps"] > 60 and len(asked) <= 6
    settle(engine)


def test_equal_prompts_at_the_same_moment_are_computed_once():
    engine, prompt = make_engine(), words(9 * PAGE + 48)
    answers = run(engine, *(make_ask(str(i), prompt, 1) for i in range(8)))
    assert len({tuple(tokens_of(answer)) for answer in answers}) == 1
    assert engine.counters["tokens_computed"] == len(prompt) + 7 * 48
    settle(engine)


@LOOPS
def test_who_waits_for_another_s_pages_is_not_harmed_when_that_one_leaves(overlap):
    engine, prompt = make_engine(step_tokens=PAGE, cache={"tail_every_pages": 1}), words(9 * PAGE + 48)
    [alone] = run(make_engine(), make_ask("alone", prompt, 3))
    engine.add(make_ask("first", prompt, 3))
    engine.add(make_ask("second", prompt, 3))
    ends, tokens = {}, []
    with ThreadPoolExecutor(1) as executor:
        steps = steps_of(engine, overlap, executor)
        for _ in range(4):
            next(steps)
        assert [task.ask.request_id for task in engine.scheduler.waiting] == ["second"]
        engine.abort("first")
        while "second" not in ends:
            deltas = next(steps)
            ends |= finishes(deltas)
            tokens += [t.token for d in deltas if d.request_id == "second" for t in d.tokens]
    assert ends == {"first": Finish.ABORT, "second": Finish.LENGTH} and tokens == tokens_of(alone)
    assert engine.counters["tokens_computed"] < len(prompt) + 2 * PAGE, "what was shared before is used"
    settle(engine)


def test_namespaces_never_share():
    engine, text = make_engine(), words(PAGE + 5)
    run(engine, make_ask("a", text, namespace=("one",)))
    [other] = run(engine, make_ask("b", text, namespace=("two",)))
    [same] = run(engine, make_ask("c", text, namespace=("one",)))
    assert (other.usage.cached_tokens, same.usage.cached_tokens) == (0, PAGE)


@given(st.integers(1, 600), st.lists(st.integers(1, 500), max_size=8))
def test_a_step_is_shared_so_that_everyone_gets_a_piece_before_anyone_gets_two(tokens, wanted):
    given = share(tokens, wanted, 128)
    assert sum(given) == min(tokens, sum(wanted))
    assert all(0 <= count <= want for count, want in zip(given, wanted, strict=True))
    for i, count in enumerate(given):
        if count < min(wanted[i], 128):
            assert all(later == 0 for later in given[i + 1 :])


# How an answer ends


def test_a_stop_string_ends_an_answer_and_is_not_shown():
    engine = make_engine()
    [whole] = run(engine, make_ask("a", words(9), 30))
    stop = whole.text[10:14]
    [cut] = run(engine, make_ask("b", words(9), 30, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    [kept] = run(engine, make_ask("c", words(9), 30, stop=(stop,), keep_stop=True))
    assert kept.text == whole.text[: whole.text.index(stop) + 4]


def test_a_stop_token_and_the_end_of_text_end_an_answer():
    engine = make_engine()
    [whole] = run(engine, make_ask("a", words(9), 30))
    [cut] = run(engine, make_ask("b", words(9), 30, stop_tokens=frozenset({whole.tokens[5].token})))
    assert tokens_of(cut) == tokens_of(whole)[: tokens_of(whole).index(whole.tokens[5].token) + 1]
    fact, question = TEXT.encode("<|bos|><|user|>Record: K V.\n"), TEXT.encode("\nWhich?<|assistant|>")
    [ended] = run(engine, make_ask("c", [*fact, *question], 64, ignore_eos=False, logit_bias={2: 100.0}))
    assert tokens_of(ended) == [2] and ended.text == ""


@LOOPS
def test_no_end_is_drawn_before_so_many_tokens(overlap):
    engine = make_engine()
    ends = {"ignore_eos": False, "logit_bias": {2: 100.0, 7: 50.0}, "stop_tokens": frozenset({7})}
    at_once, later = run(
        engine,
        make_ask("a", words(9), 30, **ends),
        make_ask("b", words(9), 30, min_tokens=5, **ends),
        overlap=overlap,
    )
    assert tokens_of(at_once) == [2]
    assert len(later.tokens) == 6
    assert tokens_of(later)[-1] == 2 and not {2, 7} & set(tokens_of(later)[:-1])


def test_special_tokens_are_shown_if_they_are_not_skipped():
    engine = make_engine()
    asks = [
        make_ask(str(skip), words(9), 3, logit_bias={2: 100.0}, skip_special_tokens=skip)
        for skip in (True, False)
    ]
    skipped, shown = run(engine, *asks)
    assert (skipped.text, shown.text) == ("", "<|end|>" * 3)


def test_without_a_seed_requests_differ():
    asks = [make_ask(name, words(30), 20, temperature=1.0) for name in "ab"]
    first, second = run(make_engine(), *asks)
    assert tokens_of(first) != tokens_of(second)


@LOOPS
def test_a_seed_gives_the_same_answer_whatever_runs_beside_it(overlap):
    asks = [make_ask(str(i), words(30, seed=i), 20, temperature=1.0, seed=i, top_p=0.9) for i in range(6)]
    alone = [tokens_of(run(make_engine(), ask)[0]) for ask in asks]
    together = [tokens_of(answer) for answer in run(make_engine(running_max=4), *asks, overlap=overlap)]
    assert alone == together


def test_logprobs_of_a_prompt_do_not_depend_on_the_cache_nor_on_how_it_is_cut():
    text = words(2 * PAGE + 30)
    asked = make_ask("a", text, 3, prompt_logprobs_from=0, logprobs=2)
    [cold] = run(make_engine(), asked)
    engine = make_engine(step_tokens=50)
    run(engine, make_ask("warm", text, turn_ends=(PAGE,)))
    [warm] = run(engine, asked)
    assert [out.token for out in cold.prompt] == text
    assert cold.prompt[0].logprob is None and all(len(out.top) == 2 for out in cold.prompt[1:])
    assert warm.prompt == cold.prompt and warm.tokens == cold.tokens
    [late] = run(engine, replace(asked, request_id="b", prompt_logprobs_from=PAGE + 7))
    assert late.prompt == cold.prompt[PAGE + 7 :]
    assert late.usage.device_tokens == PAGE, "what lies before is reused"


# Trouble


@one_loop
@pytest.mark.parametrize("after", range(0, 12, 2))
def test_an_abort_at_any_moment_gives_everything_back(after, overlap):
    engine = make_engine(pages=12, host_pages=100, step_tokens=PAGE, running_max=2)
    run(engine, make_ask("warm", words(4 * PAGE)), make_ask("other", words(5 * PAGE, seed=1)))
    asks = [make_ask(str(i), words(4 * PAGE + 9, seed=i % 2), 40) for i in range(4)]
    for ask in asks:
        engine.add(ask)
    seen = {}
    with ThreadPoolExecutor(1) as executor:
        drive = steps_of(engine, overlap, executor)
        for step, deltas in enumerate(drive):
            seen |= finishes(deltas)
            if step == after:
                engine.abort("0"), engine.abort("3"), engine.abort("nobody")
            if len(seen) == 4:
                break
    assert {name: seen[name] for name in "12"} == {"1": Finish.LENGTH, "2": Finish.LENGTH}
    assert {seen["0"], seen["3"]} == {Finish.ABORT}
    settle(engine)


def fail_once(model):
    """It raises at its third call."""
    forward, calls = model.forward, []

    def failing(spans, rows=None, before=None):
        calls.append(spans)
        if len(calls) == 3:
            raise RuntimeError("out of something")
        return forward(spans, rows)

    model.forward = failing


@LOOPS
def test_a_failing_step_ends_its_texts_and_nothing_else(overlap):
    engine = make_engine(change=fail_once)
    [failed] = run(engine, make_ask("a", words(20)), overlap=overlap)
    assert failed.error == "out of something"
    [well] = run(engine, make_ask("b", words(20)), overlap=overlap)
    assert len(well.tokens) == 8
    settle(engine)


def test_logits_that_are_no_numbers_end_one_text():
    def spoil(model):
        forward = model.forward

        def sick(spans, rows=None, before=None):
            logits = forward(spans, rows).clone()
            logits[0] = float("nan")
            return logits

        model.forward = sick

    engine = make_engine(change=spoil)
    sick, well = run(engine, make_ask("a", words(20), logprobs=None), make_ask("b", words(21), logprobs=None))
    assert "nan" in sick.error and not sick.tokens
    assert not well.error or well.tokens, "the other one goes on until it is first itself"
    settle(engine)


def test_a_load_that_fails_is_computed_instead():
    engine = make_engine(pages=8, host_pages=100)
    text = words(3 * PAGE + 5)
    [truth] = run(engine, make_ask("a", text))
    run(engine, make_ask("other", words(6 * PAGE, seed=4)))
    settle(engine)
    copier = engine.cache.flights.controller._copier
    copy = copier.copy

    def fail(direction, leg):
        if direction.value == "load":
            raise OSError("a cable")
        copy(direction, leg)

    copier.copy = fail
    [answer] = run(engine, make_ask("b", text))
    assert answer.tokens == truth.tokens and engine.counters["loads_failed"] == 1
    copier.copy = copy
    settle(engine)


def test_a_flush_forgets_everything_that_is_not_in_use():
    engine = make_engine(host_pages=100)
    run(engine, make_ask("a", words(3 * PAGE)))
    settle(engine)
    assert engine.flush() == 0
    [cold] = run(engine, make_ask("b", words(3 * PAGE)))
    assert cold.usage.cached_tokens == 0
    pools = engine.cache.stats().pools
    settle(engine)
    engine.flush()
    assert all(pool.free == pool.capacity for pool in engine.cache.stats().pools.values()), pools


def test_a_long_prompt_takes_places_for_tails_step_by_step():
    engine = make_engine(host_pages=400, cache={"tail_every_pages": 1}, step_tokens=2 * PAGE)
    run(engine, make_ask("a", words(20 * PAGE), 2))
    settle(engine)
    counted = engine.cache.counters
    assert counted["tails_saved"] >= 19
