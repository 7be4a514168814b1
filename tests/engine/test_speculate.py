"""Goal: guesses change no bit of an answer, and leave no trace where they are refused. Method: the embedded
model; the same asks with and without guesses, of every kind, in every loop; and guesses that are right and
wrong at random around every kind of boundary, after which the text is resumed."""

import inspect
from argparse import ArgumentParser
from random import Random

import pytest

from tests.engine.drive import (
    PAGE,
    TEXT,
    OracleDrafter,
    guess_with,
    logprobs_of,
    make_ask,
    make_engine,
    one_loop,
    run,
    settle,
    tokens_of,
    truth_of,
    words,
)
from tiercel.asks.ask import Finish
from tiercel.engine.drafting import TEXT_DRAFTERS

CODE = TEXT.encode(inspect.getsource(ArgumentParser))
"""Like what the embedded model was trained on."""

PROMPTS = [[1, *CODE[at : at + length]] for at, length in ((0, 120), (300, 127), (700, 250), (1200, 20))]

SAMPLINGS = {
    "greedy": {},
    "greedy, plain": {"logprobs": None},
    "sampled": {"temperature": 0.8, "seed": 5, "top_p": 0.95, "logprobs": 2},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "stop": {"stop": ("self", "e"), "logprobs": None},
    "stop tokens": {"stop_tokens": frozenset(CODE[:40:3])},
    "ends": {"ignore_eos": False, "logit_bias": {2: 3.0}},
}


KINDS = ["mtp", *TEXT_DRAFTERS]


def asks(sampling, count=40):
    return [
        make_ask(str(i), prompt, count - 7 * i, **SAMPLINGS[sampling]) for i, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def truths():
    engine = make_engine(cache={"force_miss": True})
    return {name: run(engine, *asks(name)) for name in SAMPLINGS}


def told(answer):
    return answer.tokens, answer.text, answer.finish, answer.stopped_by, answer.usage.completion_tokens


@one_loop
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_the_same_with_guesses(truths, kind, sampling, overlap):
    engine = make_engine(speculate=kind, guesses=3)
    answers = run(engine, *asks(sampling), overlap=overlap)
    assert [told(each) for each in answers] == [told(each) for each in truths[sampling]]
    counters = engine.counters
    right = counters["guesses_accepted"]
    assert counters["guesses"] > right > 0, "the texts of PROMPTS must show right guesses and wrong ones"
    assert counters["tokens_drawn"] == sum(len(answer.tokens) for answer in answers)
    settle(engine)


def test_a_stop_string_in_the_middle_of_accepted_tokens_ends_the_text_there():
    prompt, engine = PROMPTS[0], make_engine()
    [whole] = run(engine, make_ask("a", prompt, 20))
    drafter = OracleDrafter([[*prompt, *tokens_of(whole)]], 1.0, Random(0))
    drafter._random.randint = lambda _, count: count
    text = TEXT.decode(tokens_of(whole)[:8])
    for stop in {text[-1], text[-2:]}:
        [truth] = run(engine, make_ask("b", prompt, 20, stop=(stop,)))
        guessing = guess_with(make_engine(speculate="ngram"), drafter)
        [answer] = run(guessing, make_ask("b", prompt, 20, stop=(stop,)))
        assert told(answer) == told(truth) and answer.finish is Finish.STOP
        settle(guessing)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6])
def test_no_more_tokens_come_than_were_asked_for(count):
    prompt = PROMPTS[0]
    [whole] = run(make_engine(), make_ask("a", prompt, 20))
    drafter = OracleDrafter([[*prompt, *tokens_of(whole)]], 1.0, Random(0))
    drafter._random.randint = lambda _, count: count
    engine = guess_with(make_engine(speculate="ngram"), drafter)
    [answer] = run(engine, make_ask("a", prompt, count))
    assert answer.tokens == whole.tokens[:count] and answer.finish is Finish.LENGTH
    assert engine.counters["steps"] == 1 + -(-(count - 1) // 5), "every guess was right"
    settle(engine)


@one_loop
@pytest.mark.parametrize("kind", KINDS)
def test_preempted_texts_go_on_exactly_with_guesses(kind, overlap):
    prompts = [words(PAGE + 10, seed=i) for i in range(3)]
    truths = [truth_of(tuple(prompt), 2 * PAGE) for prompt in prompts]
    engine = make_engine(pages=4, host_pages=100, speculate=kind)
    texts = [[*prompt, *tokens_of(truth)] for prompt, truth in zip(prompts, truths, strict=True)]
    guess_with(engine, OracleDrafter(texts, 0.7, Random(1)))
    asked = [make_ask(str(i), prompt, 2 * PAGE) for i, prompt in enumerate(prompts)]
    answers = run(engine, *asked, overlap=overlap)
    assert engine.counters["preemptions"] > 0 and engine.counters["guesses_accepted"] > 100
    for answer, truth in zip(answers, truths, strict=True):
        assert answer.tokens == truth.tokens
    settle(engine)


@pytest.fixture(scope="module")
def crossings():
    """(prompt, its answer, the next turn, its answer). The first answer crosses two pages' end."""
    cold, found = make_engine(cache={"force_miss": True}), []
    for begin in range(2 * PAGE - 7, 2 * PAGE, 2):
        prompt = words(begin)
        [truth] = run(cold, make_ask("t", prompt, 12))
        turn = [*prompt, *tokens_of(truth)][: 2 * PAGE] + words(9, seed=4)
        found.append((prompt, truth, turn, run(cold, make_ask("t", turn, 6))[0]))
    return found


@one_loop
@pytest.mark.parametrize("where", ["device", "host"])
def test_a_text_is_resumed_where_guesses_were_refused(crossings, overlap, where):
    """The answer ends a page, entries of each kind and a tail while guesses are right and wrong at random.
    The next turn goes on from there, with all that was written by steps with guesses."""
    for prompt, truth, turn, after in crossings:
        text, begin = [*prompt, *tokens_of(truth)], len(prompt)
        pages = {"pages": 64} if where == "device" else {"pages": 5, "host_pages": 100}
        engine = make_engine(speculate="mtp", **pages)
        guess_with(engine, OracleDrafter([text], 0.6, Random(begin)))
        [answer] = run(engine, make_ask("a", prompt, 12), overlap=overlap)
        assert answer.tokens == truth.tokens
        if where == "host":
            run(engine, make_ask("other", words(4 * PAGE, seed=9), 1))
        [hit] = run(engine, make_ask("b", turn, 6), overlap=overlap)
        assert hit.tokens == after.tokens, begin
        reused = hit.usage.device_tokens, hit.usage.host_tokens
        assert reused == ((2 * PAGE, 0) if where == "device" else (0, 2 * PAGE))
        settle(engine)


def test_a_draft_that_came_back_with_its_prefix_guesses_as_one_that_was_computed():
    """Guess by guess: the draft's window and streams are part of the tail."""
    prompt = [1, *CODE[: 2 * PAGE + 30]]
    engine = make_engine(speculate="mtp", guesses=3, pages=6, host_pages=100)
    heard = []
    propose = engine.runner.model.draft.propose
    engine.runner.model.draft.propose = lambda *asked: heard.append(propose(*asked)) or heard[-1]
    came = []
    for name in ("computed", "device", "host"):
        if name == "host":
            run(engine, make_ask("other", words(5 * PAGE, seed=9), 1))
        heard.clear()
        [answer] = run(engine, make_ask(name, prompt, 16))
        came.append((tokens_of(answer), [each.tolist() for each in heard]))
        assert engine.explain(name).accept_length > 1
    assert came[0] == came[1] == came[2]
    first = engine.stats().accept_length
    assert first["computed"] > 1 and first["device"] == first["host"]
    settle(engine)


ACCEPTED = [("mtp", 1, 1.6), ("mtp", 3, 2.2), ("ngram", 3, 1.5)]
"""Who guesses, how many tokens, and how many tokens a step must then give at least."""


def test_every_drafter_is_measured():
    assert not {*KINDS} - {kind for kind, _, _ in ACCEPTED}, "add it to ACCEPTED"


@pytest.mark.parametrize(("kind", "guesses", "least"), ACCEPTED)
def test_guesses_of_code_are_mostly_right(kind, guesses, least):
    engine = make_engine(speculate=kind, guesses=guesses)
    run(engine, *(make_ask(str(i), prompt, 48) for i, prompt in enumerate(PROMPTS)))
    assert engine.stats().accept_length_mean > least


def test_a_draft_that_fails_stops_no_text(caplog):
    class Broken:
        def begin(self, ring):
            pass

        def guess(self, texts, counts):
            raise RuntimeError("the draft is broken")

    engine = guess_with(make_engine(speculate="ngram"), Broken())
    [answer] = run(engine, make_ask("a", PROMPTS[0], 5))
    [truth] = run(make_engine(), make_ask("a", PROMPTS[0], 5))
    assert answer.tokens == truth.tokens and "nothing could be guessed" in caplog.text


def test_logprobs_of_a_prompt_are_told_beside_guesses():
    truth, engine = make_engine(), make_engine(speculate="ngram", guesses=4)
    ask = make_ask("a", PROMPTS[0], 12, prompt_logprobs_from=3)
    [expected], [answer] = run(truth, ask), run(engine, ask)
    assert answer.prompt == expected.prompt and logprobs_of(answer) == logprobs_of(expected)
