"""Goal: the token that was asked for is drawn, with the odds that were asked for. Method: small vocabularies,
a plain twin written out in Python, frequencies of many draws."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiercel.asks.ask import Sampling, TokenOut, check_sampling
from tiercel.engine.sampling import Sampler, token_logprobs, uniform
from tiercel.errors import AskError, LogitsError

INF, NAN = math.inf, math.nan
CHI_SQUARE_7 = 29.9
"""Of 7 degrees of freedom; a fair sampler exceeds it once in 10,000 seeds."""


def make_row(*logits: float) -> Tensor:
    return torch.tensor(logits, dtype=torch.float32)


def make_random_rows(count: int, vocab_size: int, seed: int = 0) -> Tensor:
    return torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def tokens_drawn(
    sampling: Sampling, rows: Sequence[Tensor] | Tensor, prompt: Sequence[int] = ()
) -> list[int]:
    sampler = Sampler(sampling, prompt, len(rows[0]))
    return [sampler.draw(row).token for row in rows]


def support(sampling: Sampling, row: Tensor, draws: int = 300) -> set[int]:
    """What comes out of many requests that differ in nothing but the seed."""
    return {Sampler(replace(sampling, seed=seed), (), len(row)).draw(row).token for seed in range(draws)}


def odds_of_twin(
    sampling: Sampling, row: Tensor, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """The weights of all tokens, written out plainly in double precision."""
    logits = row.tolist()
    for token in {*prompt, *output}:
        by = sampling.repetition_penalty
        logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
    for token, times in Counter(output).items():
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * times
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if sampling.temperature == 0:
        best = max(range(len(logits)), key=lambda token: (logits[token], -token))
        return [float(token == best) for token in range(len(logits))]
    weights = [math.exp((logit - max(logits)) / sampling.temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    kept = order[: sampling.top_k or None]
    whole, so_far, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        nucleus.append(token)
        so_far += weights[token]
        if so_far >= sampling.top_p * whole:
            break
    allowed = {token for token in nucleus if weights[token] >= sampling.min_p}
    return [weight if token in allowed else 0.0 for token, weight in enumerate(weights)]


# What can be asked for


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0},
        {"temperature": 1e300},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"top_k": 10**30},
        {"min_p": 1.0},
        {"seed": -(2**63)},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1e-300},
        {"logit_bias": {0: 100, 7: -100.0}},
        {"logprobs": 20, "max_tokens": 0},
        {"stop": ("a",), "stop_tokens": frozenset({7})},
        {"min_tokens": 5, "max_tokens": 5},
    ],
)
def test_what_can_be_sampled_is_let_pass(asked: dict[str, Any]) -> None:
    check_sampling(Sampling(**asked), vocab_size=8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            (name, bad)
            for name in ("temperature", "top_p", "min_p")
            for bad in (NAN, INF, -0.1, True, "1", None)
        ],
        *[("top_p", bad) for bad in (0, 1.1)],
        ("min_p", 1.1),
        *[("top_k", bad) for bad in (-1, 1.0, True, None)],
        *[("max_tokens", bad) for bad in (-1, 0.5, False, None)],
        *[("min_tokens", bad) for bad in (-1, 0.5, True, None, 129)],
        *[
            (name, bad)
            for name in ("presence_penalty", "frequency_penalty")
            for bad in (-2.1, 2.1, NAN, True)
        ],
        *[("repetition_penalty", bad) for bad in (0, -1.0, INF, NAN)],
        *[("logprobs", bad) for bad in (-1, 21, True, 1.0)],
        *[("seed", bad) for bad in (2**63, -(2**63) - 1, 0.5, True)],
    ],
)
def test_a_number_that_can_not_be_used_is_named(field: str, value: object) -> None:
    with pytest.raises(AskError) as caught:
        check_sampling(Sampling(**{field: value}), vocab_size=8)  # type: ignore[arg-type]
    assert (caught.value.field, repr(caught.value.value)) == (field, repr(value))


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"logit_bias": {8: 0.0}}, "logit_bias"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias"),
        ({"logit_bias": {True: 0.0}}, "logit_bias"),
        ({"logit_bias": {"1": 0.0}}, "logit_bias"),
        ({"logit_bias": {1: 101}}, "logit_bias[1]"),
        ({"logit_bias": {1: NAN}}, "logit_bias[1]"),
        ({"stop_tokens": frozenset({8})}, "stop_tokens"),
        ({"stop": ("a", "")}, "stop[1]"),
        ({"stop": (1,)}, "stop[0]"),
    ],
)
def test_a_token_or_text_that_can_not_be_used_is_named(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(AskError) as caught:
        check_sampling(Sampling(**asked), vocab_size=8)
    assert caught.value.field == field


def test_a_refusal_says_what_would_do() -> None:
    with pytest.raises(AskError, match=r"^top_p = 0: must be a finite number above 0 and at most 1$"):
        check_sampling(Sampling(top_p=0), vocab_size=8)
    with pytest.raises(AskError, match=r"^top_k = -2: must be a whole number of at least 0$"):
        check_sampling(Sampling(top_k=-2), vocab_size=8)


# The best token


def test_without_temperature_the_best_token_is_taken_and_of_equals_the_lowest() -> None:
    rows = torch.stack([make_row(0, 3, 1, 3), make_row(5, 5, 5, 5), make_row(-9, -9, -9, -8)])
    assert tokens_drawn(Sampling(temperature=0), rows) == [1, 0, 3]


@pytest.mark.parametrize("vocab_size", [7, 64, 1000])
def test_of_equals_the_lowest_is_taken_wherever_they_are(vocab_size: int) -> None:
    rows = torch.ones(vocab_size, vocab_size).triu()
    assert tokens_drawn(Sampling(temperature=0), rows) == list(range(vocab_size))


def test_a_temperature_of_almost_nothing_is_none() -> None:
    assert tokens_drawn(Sampling(temperature=1e-300), [make_row(1, 1)] * 20) == [0] * 20


def test_one_token_left_by_any_filter_is_the_best() -> None:
    rows = make_random_rows(30, 50)
    best = tokens_drawn(Sampling(temperature=0), rows)
    for only in (Sampling(top_k=1), Sampling(top_p=1e-9), Sampling(min_p=1.0)):
        assert tokens_drawn(only, rows) == best


def test_a_row_that_names_no_token_is_refused_and_leaves_no_trace() -> None:
    good = make_random_rows(1, 4)[0]
    for sampling in (Sampling(seed=1), Sampling(seed=1, temperature=0, repetition_penalty=2.0, logprobs=1)):
        sampler = Sampler(sampling, (0,), 4)
        for bad in (make_row(0, NAN, 1, 2), make_row(INF, 0, 1, 2), make_row(-INF, -INF, -INF, -INF)):
            with pytest.raises(LogitsError):
                sampler.draw(bad)
        assert sampler.draw(good) == Sampler(sampling, (0,), 4).draw(good)


# Odds


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    row, draws = make_row(0, 1, -1, 2, 0.5, 0, -2, 1.5), 20_000
    counts = Counter(tokens_drawn(Sampling(temperature=temperature, seed=7), [row] * draws))
    expected = (torch.softmax(row.double() / temperature, 0) * draws).tolist()
    assert sum((counts[token] - each) ** 2 / each for token, each in enumerate(expected)) < CHI_SQUARE_7


def test_frequencies_follow_the_softmax_over_seeds_too() -> None:
    row, draws = make_row(0, 1, -1, 2, 0.5, 0, -2, 1.5), 20_000
    counts = Counter(Sampler(Sampling(seed=seed), (), 8).draw(row).token for seed in range(draws))
    expected = (torch.softmax(row.double(), 0) * draws).tolist()
    assert sum((counts[token] - each) ** 2 / each for token, each in enumerate(expected)) < CHI_SQUARE_7


def test_top_k_draws_exactly_the_best_and_of_equals_the_lowest() -> None:
    row = make_row(1, 2, 1, 2, 1, 1)
    assert support(Sampling(top_k=3), row) == {1, 3, 0}
    assert support(Sampling(top_k=5, temperature=50.0), row) == {0, 1, 2, 3, 4}
    assert support(Sampling(top_k=99, temperature=50.0), row) == set(range(6))


def test_top_p_draws_exactly_the_fewest_that_are_enough() -> None:
    row = make_row(*[math.log(p) for p in (0.1, 0.4, 0.1, 0.3, 0.1)])
    assert support(Sampling(top_p=0.39), row) == {1}
    assert support(Sampling(top_p=0.41), row) == {1, 3}
    assert support(Sampling(top_p=0.75), row) == {0, 1, 3}
    assert support(Sampling(top_p=0.99), row) == {0, 1, 2, 3, 4}


def test_min_p_draws_exactly_what_is_near_enough_to_the_best() -> None:
    row = make_row(*[math.log(p) for p in (0.1, 0.4, 0.15, 0.3, 0.05)])
    assert support(Sampling(min_p=0.5), row) == {1, 3}
    assert support(Sampling(min_p=0.2), row) == {0, 1, 2, 3}


def test_top_p_is_of_what_top_k_left() -> None:
    row = make_row(*[math.log(p) for p in (0.4, 0.2, 0.2, 0.2)])
    assert support(Sampling(top_k=2, top_p=0.65), row) == {0}
    assert support(Sampling(top_p=0.65), row) == {0, 1, 2}


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0, 12.0])
def test_top_p_of_many_tokens_is_right_however_flat_they_are(spread: float) -> None:
    row = make_random_rows(1, 5000)[0] * spread / 3
    sampling = Sampling(top_p=0.8)
    allowed = {token for token, odds in enumerate(odds_of_twin(sampling, row, (), ())) if odds > 0}
    drawn = set(tokens_drawn(replace(sampling, seed=5), [row] * 200))
    edge = 0.8 / 5000  # fp32 weights may disagree with the twin about the last one
    assert sum(torch.softmax(row.double(), 0)[token].item() for token in drawn - allowed) <= edge


def test_a_token_without_weight_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    row = make_row(-INF, 0, -INF, -1, -INF)
    assert support(Sampling(temperature=50.0), row) == {1, 3}
    for number, token in ((0.0, 1), (1 - 2**-53, 3)):
        monkeypatch.setattr("tiercel.engine.sampling.uniform", lambda *_, number=number: number)
        assert support(Sampling(temperature=50.0), row, draws=1) == {token}


def test_a_bias_makes_or_breaks_a_token() -> None:
    row = make_row(0, 1, 2, 3)
    assert tokens_drawn(Sampling(temperature=0, logit_bias={0: 100, 3: -100}), [row] * 2) == [0, 0]
    assert support(Sampling(logit_bias={3: -100, 2: -100}), row) == {0, 1}


@st.composite
def askings(draw: st.DrawFn) -> tuple[Sampling, Tensor, list[int]]:
    vocab_size = draw(st.integers(1, 12))
    tokens = st.integers(0, vocab_size - 1)
    sampling = Sampling(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_k=draw(st.integers(0, 13)),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.5, 0.1])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.4])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -0.75])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        logit_bias=draw(st.dictionaries(tokens, st.sampled_from([-3.0, 0.5, 2.0]), max_size=3)),
    )
    rows = make_random_rows(6, vocab_size, seed=draw(st.integers(0, 1000)))
    return sampling, rows, draw(st.lists(tokens, max_size=4))


@settings(max_examples=300, deadline=None)
@given(askings())
def test_every_draw_is_where_the_twin_has_it(asked: tuple[Sampling, Tensor, list[int]]) -> None:
    sampling, rows, prompt = asked
    sampler, output = Sampler(sampling, prompt, rows.shape[1]), []
    for index, row in enumerate(rows):
        token = sampler.draw(row).token
        odds = odds_of_twin(sampling, row, prompt, output)
        share = uniform(sampling.seed or 0, index) * sum(odds)
        rounding = 1e-5 * sum(odds)
        assert sum(odds[:token]) - rounding <= share <= sum(odds[: token + 1]) + rounding
        output.append(token)


@pytest.mark.parametrize(
    "sampling", [Sampling(repetition_penalty=1e-300), Sampling(repetition_penalty=1e300)]
)
def test_the_strongest_penalties_still_draw_something(sampling: Sampling) -> None:
    for temperature in (0.0, 1e-5, 1.0, 1e300):
        drawn = tokens_drawn(
            replace(sampling, temperature=temperature), make_random_rows(20, 6), prompt=(0, 1)
        )
        assert all(0 <= token < 6 for token in drawn)


# Randomness


def test_a_seed_gives_the_same_draws_and_another_seed_others() -> None:
    rows = make_random_rows(40, 100) / 10
    assert tokens_drawn(Sampling(seed=3), rows) == tokens_drawn(Sampling(seed=3), rows)
    assert tokens_drawn(Sampling(seed=3), rows) != tokens_drawn(Sampling(seed=4), rows)


def test_a_request_made_anew_from_its_output_goes_on_as_if_nothing_had_been() -> None:
    rows = make_random_rows(30, 20) / 3
    sampling = Sampling(seed=9, frequency_penalty=0.5, presence_penalty=0.3, repetition_penalty=1.2)
    whole = tokens_drawn(sampling, rows, prompt=(1, 2))
    resumed = Sampler(sampling, (1, 2), 20, output=whole[:11])
    assert [resumed.draw(row).token for row in rows[11:]] == whole[11:]


def test_a_filter_that_lets_all_pass_changes_no_draw() -> None:
    rows = make_random_rows(50, 30) / 3
    plain = tokens_drawn(Sampling(seed=2), rows)
    assert plain == tokens_drawn(Sampling(seed=2, top_k=30), rows)
    assert plain == tokens_drawn(Sampling(seed=2, min_p=1e-9, top_p=1 - 1e-12), rows)


def test_uniform_numbers_fill_their_interval_evenly() -> None:
    numbers = [uniform(seed, index) for seed in range(-50, 50) for index in range(80)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    eighths = Counter(int(number * 8) for number in numbers)
    assert sum((eighths[part] - 1000) ** 2 / 1000 for part in range(8)) < CHI_SQUARE_7


def test_uniform_numbers_stay_the_same_from_release_to_release() -> None:
    assert [uniform(0, 0), uniform(-1, 5)] == [0.12311943861730146, 0.18406937836312898]


# Logprobs


def test_logprobs_are_those_of_the_model_whatever_the_sampling() -> None:
    row = make_random_rows(1, 50)[0]
    truth = torch.log_softmax(row.double(), 0)
    sampling = Sampling(
        temperature=0.2, top_k=3, frequency_penalty=1.0, logit_bias={4: 5.0}, logprobs=3, seed=1
    )
    out = Sampler(sampling, (1,), 50).draw(row)
    assert out.logprob == pytest.approx(truth[out.token].item(), abs=1e-6)
    best = truth.topk(3)
    assert [token for token, _ in out.top] == best.indices.tolist()
    assert [logprob for _, logprob in out.top] == pytest.approx(best.values.tolist(), abs=1e-6)


def test_logprobs_are_reported_only_if_asked_for() -> None:
    row = make_row(0, 1)
    assert Sampler(Sampling(temperature=0), (), 2).draw(row) == TokenOut(1)
    out = Sampler(Sampling(temperature=0, logprobs=0), (), 2).draw(row)
    assert out.logprob is not None and out.top == ()


def test_of_equally_likely_tokens_the_lower_are_reported() -> None:
    (out,) = token_logprobs(make_row(1, 2, 1, 2, 1)[None], [4], top=3)
    assert [token for token, _ in out.top] == [1, 3, 0]
    assert out.logprob == out.top[2][1]


def test_more_logprobs_than_tokens_are_all_there_are() -> None:
    (out,) = token_logprobs(make_row(0, 1, -INF)[None], [0], top=20)
    assert [token for token, _ in out.top] == [1, 0, 2]
    assert out.top[2][1] == -INF


@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 4096, 9001])
def test_logprobs_are_equal_to_the_bit_alone_in_a_batch_and_for_a_prompt(vocab_size: int) -> None:
    rows = make_random_rows(5, vocab_size)
    alone = [Sampler(Sampling(temperature=0, logprobs=4), (), vocab_size).draw(row.clone()) for row in rows]
    tokens = [out.token for out in alone]
    assert token_logprobs(rows, tokens, top=4) == alone
    assert token_logprobs(rows.T.contiguous().T, tokens, top=4) == alone
    shifted = torch.empty(5 * vocab_size + 1)[1:].view(5, vocab_size).copy_(rows)
    assert token_logprobs(shifted, tokens, top=4) == alone


def test_the_logits_are_not_changed() -> None:
    row = make_random_rows(1, 20)[0]
    before = row.clone()
    for sampling in (
        Sampling(top_k=3, top_p=0.5),
        Sampling(repetition_penalty=2.0, logit_bias={1: 1.0}, logprobs=2),
    ):
        Sampler(sampling, (1, 2), 20).draw(row)
    assert torch.equal(row, before)


# Not before `min_tokens` tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e30])
def test_a_token_that_ends_an_answer_is_not_drawn_too_early(temperature: float) -> None:
    rows = [make_row(9, 1, 8, 0)] * 6
    sampling = Sampling(temperature=temperature, min_tokens=4, stop_tokens=frozenset({0, 2}))
    early = {token for seed in range(50) for token in tokens_drawn(replace(sampling, seed=seed), rows)[:4]}
    assert early == ({1} if temperature == 0 else {1, 3})
    late = {token for seed in range(50) for token in tokens_drawn(replace(sampling, seed=seed), rows)[4:]}
    assert 0 in late


def test_after_a_preemption_the_tokens_are_still_counted() -> None:
    row = make_row(9, 1, 8, 0)
    sampling = Sampling(temperature=0, min_tokens=2, stop_tokens=frozenset({0}))
    assert [Sampler(sampling, (), 4, [2] * drawn).draw(row).token for drawn in range(4)] == [2, 2, 0, 0]


def test_logprobs_are_those_of_the_model_while_an_end_is_not_drawn() -> None:
    row = make_row(9, 1, 8, 0)
    plain, later = Sampling(temperature=0, logprobs=2), Sampling(temperature=0, logprobs=2, min_tokens=1)
    drawn = Sampler(replace(later, stop_tokens=frozenset({0})), (), 4).draw(row)
    assert drawn.token == 2
    assert drawn.top == Sampler(plain, (), 4).draw(row).top
