"""Goal: the engine knows when each request passed its stages, and every token is in the histograms once.
Method: the embedded model with a clock that ticks at every reading."""

from itertools import count
from random import Random

import pytest

from tests.engine.drive import LOOPS, PAGE, OracleDrafter, guess_with, make_ask, make_engine, run, words
from tiercel.asks.times import EngineTimes, Histogram, RequestTimes


def ticking():
    ticks = count()
    return lambda: float(next(ticks))


def total(stats):
    return sum(stats.counts)


@LOOPS
def test_every_stage_comes_after_the_one_before_and_every_token_is_counted_once(overlap):
    engine = make_engine(host_pages=40, clock=ticking())
    asks = [make_ask(f"{name}", words(200, name), 5) for name in range(3)]
    run(engine, *asks, overlap=overlap)
    run(engine, make_ask("again", words(200, 0), 5), make_ask("one", words(50, 9), 1), overlap=overlap)
    for name in ("0", "1", "2", "again"):
        stages = list(engine.explain(name).times.stages())
        assert [stage.name for stage in stages] == ["queue", "match", "prefill", "decode"]
        times = [time for stage in stages for time in (stage.start_s, stage.end_s)]
        assert times == sorted(times) and times[0] < times[-1]
    times = engine.stats().times
    assert total(times["queue_s"]) == 5
    assert total(times["inter_token_s"]) == 4 * 4, "a text's first token has none before it"
    assert {name: total(each) for name, each in times["first_token_s"].items()} == {
        "device": 1,
        "host": 0,
        "store": 0,
        "computed": 4,
    }


def test_what_is_loaded_from_the_host_has_a_stage_for_it():
    engine = make_engine(pages=4, host_pages=60, clock=ticking())
    first = words(2 * PAGE + 5, 1)
    run(engine, make_ask("first", first, 2))
    run(engine, make_ask("other", words(3 * PAGE, 2), 2))
    run(engine, make_ask("again", first, 2))
    known = engine.explain("again")
    assert known.reuse.host_tokens > 0
    assert [stage.name for stage in known.times.stages()] == ["queue", "match", "load", "prefill", "decode"]
    assert total(engine.stats().times["first_token_s"]["host"]) == 1


def test_tokens_of_one_step_each_count_as_a_part_of_its_time():
    text = words(40)
    truth = run(make_engine(), make_ask("truth", text, 12))[0]
    whole = [*text, *(out.token for out in truth.tokens)]
    engine = guess_with(
        make_engine(speculate="ngram", clock=ticking()), OracleDrafter([whole], 1.0, Random(1))
    )
    run(engine, make_ask("guessed", text, 12))
    assert engine.counters["guesses_accepted"] > 0
    told = engine.stats().times["inter_token_s"]
    known = engine.explain("guessed").times
    assert total(told) == 11 and told.sum == pytest.approx(known.ended_s - known.first_s, abs=12)


def test_a_histogram_counts_a_value_in_the_first_bound_that_it_does_not_exceed():
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        histogram.add(value)
    histogram.add(10, 4)
    stats = histogram.stats()
    assert (stats.counts, stats.sum) == ((2, 2, 5), 48)


def test_gaps_are_counted_for_all_texts_of_a_step():
    times = EngineTimes()
    times.drawn(1.0, {(0.5, 1): 3, (0.0, 2): 1})
    stats = times.inter_token.stats()
    assert sum(stats.counts) == 5 and stats.sum == 3 * 0.5 + 1.0


def test_a_request_that_waits_has_no_stage_that_ended():
    assert list(RequestTimes(1.0).stages()) == []
    assert [each.name for each in RequestTimes(1.0, store_s=2.0).stages()] == ["queue"]
    waited = RequestTimes(1.0, 2.0, 5.0, 6.0, 6.0, 8.0)
    assert [tuple(each) for each in waited.stages()] == [
        ("queue", 1.0, 2.0),
        ("fetch", 2.0, 5.0),
        ("match", 5.0, 6.0),
        ("prefill", 6.0, 8.0),
    ]
