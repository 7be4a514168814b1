"""Goal: a tier changes nothing but the time. Method: the embedded model; the same asks cold, from the device,
from the host, shared, in company, resumed and replayed; every logprob equal bit by bit, and the tokens that
must have come from each tier counted. Then bytes are broken on purpose, and the comparison must notice."""

import pytest
import torch

from tests.engine.drive import (
    LOOPS,
    PAGE,
    cold_engine,
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
from tiercel.verify import EXAMS, answer_one, exams_of, k3, score_of

SMALL = {"pages": 6, "host_pages": 400}
"""A device for one of the texts below: what was asked before comes back from the host."""


@pytest.fixture(scope="module")
def cold():
    return cold_engine()


def differences(answer, truth):
    assert tokens_of(answer) == tokens_of(truth)
    return [mine - own for mine, own in zip(logprobs_of(answer), logprobs_of(truth), strict=True)]


POOLS = pytest.mark.parametrize(
    "second", [(), ("c128",), ("c4", "c4_index")], ids=["one pool", "c128 apart", "c4 apart"]
)


@POOLS
def test_a_prefill_hit_is_exact_on_both_tiers(cold, second):
    """Texts that begin alike: the second reuses the first's pages."""
    begin = words(3 * PAGE + 20)
    first, other = [*begin, 300, 301, 302], [*begin, 400, 401]
    [truth] = run(cold, make_ask("t", other))
    near = make_engine(second=second)
    run(near, make_ask("a", first, turn_ends=(3 * PAGE,)))
    [hit] = run(near, make_ask("b", other))
    assert (hit.usage.device_tokens, hit.usage.host_tokens) == (3 * PAGE, 0)
    assert differences(hit, truth) == [0.0] * 8
    far = make_engine(**SMALL, second=second)
    run(far, make_ask("a", first, turn_ends=(3 * PAGE,)))
    for i in range(3):
        run(far, make_ask(f"other{i}", words(5 * PAGE, seed=i + 5)))
    [hit] = run(far, make_ask("b", other))
    assert (hit.usage.device_tokens, hit.usage.host_tokens) == (0, 3 * PAGE)
    assert differences(hit, truth) == [0.0] * 8
    settle(near), settle(far)


def test_the_number_of_threads_changes_no_bit(cold):
    usual, answers = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            answers += run(cold, make_ask("t", words(5 * PAGE + 20), 12))
    finally:
        torch.set_num_threads(usual)
    assert logprobs_of(answers[0]) == logprobs_of(answers[1]) == logprobs_of(answers[2])


def test_a_decode_hit_is_exact_pages_that_were_decoded_are_as_those_that_were_prefilled(cold):
    """The second turn reuses pages that the first wrote token by token."""
    begin = words(100)
    engine = make_engine()
    [first] = run(engine, make_ask("a", begin, 200))
    turn = [*begin, *tokens_of(first), *words(30, seed=3)]
    [hit] = run(engine, make_ask("b", turn))
    assert hit.usage.device_tokens == 2 * PAGE, "the prompt filled no page, the answer did"
    [truth] = run(cold, make_ask("t", turn))
    assert differences(hit, truth) == [0.0] * 8
    settle(engine)


def test_a_decode_is_a_prefill_replay(cold):
    """KL between what was said while decoding and a cold prefill of the same text: not small but zero."""
    prompt = words(150)
    [said] = run(cold, make_ask("a", prompt, 150))
    whole = [*prompt, *tokens_of(said)]
    [replayed] = run(cold, make_ask("b", whole, 0, prompt_logprobs_from=len(prompt)))
    pairs = zip(replayed.prompt, said.tokens, strict=True)
    assert k3([mine.logprob - own.logprob for mine, own in pairs]) == 0.0


@pytest.mark.parametrize("where", ["device", "host"])
def test_conversations_that_branch_and_take_turns_are_exact(where):
    """Three beginnings, three branches each, three turns, one after the other in turn."""
    engine = make_engine(pages=200) if where == "device" else make_engine(**SMALL)
    texts = [words(PAGE + 40, seed=i % 3) + words(9, seed=20 + i) for i in range(9)]
    reused = 0
    for turn in range(3):
        for i, text in enumerate(texts):
            truth = truth_of(tuple(text))
            [answer] = run(engine, make_ask("a", text))
            assert differences(answer, truth) == [0.0] * 8, (turn, i)
            reused += answer.usage.device_tokens if where == "device" else answer.usage.host_tokens
            full = (len(text) - 1) // PAGE * PAGE
            expected = min(full, PAGE) if turn == 0 and i >= 3 else full if turn else 0
            assert answer.usage.cached_tokens >= expected - PAGE, "at most the page that was not full before"
            text += tokens_of(truth) + words(PAGE // 2, seed=40 + i)
    assert reused >= (20 if where == "device" else 6) * PAGE
    settle(engine)


@LOOPS
def test_company_does_not_change_an_answer(overlap):
    prompts = [words(20 + 61 * i, seed=i) for i in range(12)]
    truths = [truth_of(tuple(prompt)) for prompt in prompts]
    engine = make_engine(running_max=5)
    answers = run(engine, *(make_ask(str(i), prompt) for i, prompt in enumerate(prompts)), overlap=overlap)
    for answer, truth in zip(answers, truths, strict=True):
        assert differences(answer, truth) == [0.0] * 8
    settle(engine)


def test_a_text_resumed_by_replay_is_exact(cold):
    """No tail is kept in a prompt of this length, but the pages are there: the last tokens are computed
    again."""
    begin = words(12 * PAGE + 3)
    engine = make_engine(cache={"tail_every_pages": 64})
    run(engine, make_ask("a", begin))
    turn = [*begin[: 9 * PAGE + 40], *words(20, seed=2)]
    [hit] = run(engine, make_ask("b", turn))
    told = engine.explain("b")
    replayed = told.reuse.replay_tokens
    assert 0 < replayed < 9 * PAGE and (hit.usage.device_tokens, hit.usage.replayed_tokens) == (
        9 * PAGE - replayed,
        replayed,
    )
    assert told.reuse.computed_tokens == len(turn) - 9 * PAGE + replayed
    [truth] = run(cold, make_ask("t", turn))
    assert differences(hit, truth) == [0.0] * 8
    turn = [*begin[: 9 * PAGE + 40], *words(20, seed=3)]
    [hit] = run(engine, make_ask("c", turn))
    told = engine.explain("c")
    assert told.reuse.tokens == 9 * PAGE and told.reuse.replay_tokens == 0, "the replay has left a tail"
    [truth] = run(cold, make_ask("u", turn))
    assert differences(hit, truth) == [0.0] * 8
    settle(engine)


@POOLS
@one_loop
def test_a_preempted_text_goes_on_exactly(overlap, second):
    """Three answers outgrow the device together; who came last gives way and comes back."""
    prompts = [words(PAGE + 10, seed=i) for i in range(3)]
    engine = make_engine(pages=8, host_pages=100, second=second)
    asks = [make_ask(str(i), prompt, 2 * PAGE) for i, prompt in enumerate(prompts)]
    answers = run(engine, *asks, overlap=overlap)
    assert engine.counters["preemptions"] > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert differences(answer, truth_of(tuple(prompt), 2 * PAGE)) == [0.0] * (2 * PAGE)
    settle(engine)


# Recall: the model answers from its context, so wrong bytes give wrong answers


@pytest.fixture(scope="module")
def exams(cold):
    return list(exams_of(cold, "tiny-v4"))


def test_the_second_pass_from_the_host_scores_as_the_first_one_cold(exams):
    engine = make_engine(pages=14, host_pages=600)
    first = score_of(engine, exams)
    second = score_of(engine, exams)
    assert engine.cache.counters["tokens_host"] > 20 * PAGE
    assert first == second >= 0.9
    settle(engine)


def test_broken_host_pages_lower_the_score_and_raise_the_kl(cold, exams):
    """The control: if this comparison did not notice flipped bytes, the ones above would prove nothing."""
    engine = make_engine(pages=14, host_pages=600)
    whole = score_of(engine, exams)
    for i in range(3):
        answer_one(engine, words(8 * PAGE, seed=90 + i), 0)  # nothing of the exams stays on the device
    settle(engine)
    flat = engine.cache.host.flat.view(-1)
    flat[::7] ^= 0x55
    broken = score_of(engine, exams)
    assert engine.cache.counters["tokens_host"] > 10 * PAGE
    assert broken <= whole - 0.25, (whole, broken)
    context, question, answer = exams[-1]
    truth = answer_one(cold, [*context, *question], len(answer))
    wrong = answer_one(engine, [*context, *question], len(answer))
    pairs = zip(wrong.tokens, truth.tokens, strict=True)
    assert k3([mine.logprob - own.logprob for mine, own in pairs]) > 1e-3
    assert len(exams) >= EXAMS
