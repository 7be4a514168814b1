"""Goal: an answer follows its grammar, and nothing else about it changes. Method: random bounded schemas on
the embedded model; the same answers in every loop, with and without guesses, cached, preempted, alone."""

import json
import random
import re

import jsonschema_rs
import numpy as np
import pytest

from tests.engine.drive import (
    LOOPS,
    TEXT,
    OracleDrafter,
    guess_with,
    make_ask,
    make_engine,
    one_loop,
    run,
    settle,
    words,
)
from tests.engine.drive import tokens_of as tokens
from tiercel.asks.ask import Finish
from tiercel.engine.sampling import Sampler
from tiercel.errors import AskError, GrammarError
from tiercel.text import grammar
from tiercel.text.grammar import Asked, Grammar, Grammars, choice, ebnf, fill_masks, json_schema, regex

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(json_schema(PERSON))


def asks(count=4, **more):
    """Every second one has no grammar."""
    drawn = {"temperature": 1.0, "logprobs": None} | more
    return [
        make_ask(
            f"{i}", words(20 + i, i), 60, **drawn, seed=i, grammar=None if i % 2 else GRAMMAR, ignore_eos=True
        )
        for i in range(count)
    ]


def random_schema(random, depth=0):
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    kinds += ["object", "array", "anyOf"] * (depth < 2)
    match random.choice(kinds):
        case "string":
            return {"type": "string", "minLength": random.randint(0, 2), "maxLength": random.randint(2, 6)}
        case "integer":
            low = random.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 99)}
        case "number":
            return {"type": "string", "pattern": "^[a-c]{1,3}[0-9]$"}
        case "enum":
            return {"enum": random.sample(["x", "yes", 'a "quote"', "ü", 5, 2.5, None, True], 3)}
        case "const":
            return {"const": random.choice([7, "seven", [1, {"a": "b"}]])}
        case "object":
            names = random.sample(["a", "bee", "c d", "ö"], random.randint(1, 3))
            properties = {name: random_schema(random, depth + 1) for name in names}
            return {
                "type": "object",
                "properties": properties,
                "required": random.sample(names, random.randint(0, len(names))),
                "additionalProperties": False,
            }
        case "array":
            low = random.randint(0, 1)
            items = random_schema(random, depth + 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + 1}
        case "anyOf":
            return {"anyOf": [random_schema(random, depth + 1) for _ in range(2)]}
        case kind:
            return {"type": kind}


def test_answers_follow_random_schemas():
    schemas = [random_schema(random.Random(seed)) for seed in range(24)]
    many = [
        make_ask(f"{i}", words(8, i), 90, temperature=1.0, seed=i, grammar=Grammar(json_schema(schema)))
        for i, schema in enumerate(schemas)
    ]
    engine = make_engine()
    answers = run(engine, *many)
    ended = [answer.finish is Finish.STOP for answer in answers]
    assert sum(ended) > 20
    for schema, answer in zip(schemas, answers, strict=True):
        if answer.finish is Finish.STOP:
            assert jsonschema_rs.is_valid(schema, json.loads(answer.text)), (schema, answer.text)
            assert answer.stopped_by in TEXT.eos
    settle(engine)


@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        (regex(r"[a-f]{3}-\d{2}"), r"[a-f]{3}-\d{2}"),
        (choice(["yes", "no", "mäßig"]), "yes|no|mäßig"),
        (ebnf('root ::= ("ab" | "c"){2} digit\ndigit ::= [0-9]'), "(ab|c){2}[0-9]"),
        (ebnf('start: "x" num ("," num)~2\nnum: /[1-3]/'), "x[1-3](,[1-3]){2}"),
    ],
)
def test_an_answer_matches_an_expression_a_choice_and_a_grammar(source, pattern):
    engine = make_engine()
    many = [make_ask(f"{i}", words(8, i), 30, temperature=1.0, grammar=Grammar(source)) for i in range(3)]
    for answer in run(engine, *many):
        assert answer.finish is Finish.STOP
        assert re.fullmatch(pattern, answer.text), answer.text


@pytest.fixture(scope="module")
def plain():
    """Each alone, one after the other."""
    answers = [run(make_engine(), ask)[0] for ask in asks()]
    assert [answer.finish for answer in answers[::2]] == [Finish.STOP, Finish.STOP]
    return [tokens(answer) for answer in answers]


@one_loop
@pytest.mark.parametrize(
    ("logprobs", "guesses", "speculate"), [(None, 0, "off"), (2, 0, "off"), (None, 3, "mtp")], ids=str
)
def test_loops_logprobs_guesses_and_company_change_nothing(plain, overlap, logprobs, guesses, speculate):
    engine = make_engine(guesses=guesses, speculate=speculate)
    found = run(engine, *asks(logprobs=logprobs), overlap=overlap)
    assert [tokens(each) for each in found] == plain
    settle(engine)


@LOOPS
def test_guesses_that_are_often_wrong_change_nothing(plain, overlap):
    """Wrong guesses end the row before: masks of the rows behind them are not used."""
    texts = [words(20 + i, i) + each for i, each in enumerate(plain)]
    engine = guess_with(
        make_engine(guesses=4, speculate="ngram"), OracleDrafter(texts, 0.7, random.Random(1))
    )
    assert [tokens(each) for each in run(engine, *asks(), overlap=overlap)] == plain
    counters = engine.counters
    assert 0 < counters["guesses_accepted"] <= counters["guesses"]


def test_a_guess_that_the_grammar_forbids_is_not_computed():
    forbidden = next(iter(TEXT.tokens_within("never")))

    class Wrong(OracleDrafter):
        def _guess(self, tokens, count):
            return [forbidden] * count

    engine = guess_with(make_engine(guesses=4, speculate="ngram"), Wrong([], 0, None))
    (answer,) = run(engine, make_ask("a", words(9), 20, grammar=Grammar(regex("[0-9]{8}"))))
    assert re.fullmatch("[0-9]{8}", answer.text)
    assert engine.counters["guesses"] == 0


def test_a_preempted_answer_goes_on_in_its_grammar():
    """Each answer needs a second page and a tail. There are three answers, and room for three pages and two
    tails."""
    many = [
        make_ask(f"{i}", words(110, i), 60, temperature=1.0, logprobs=None, seed=i, grammar=GRAMMAR)
        for i in range(3)
    ]
    calm = [tokens(each) for each in run(make_engine(), *many)]
    assert all(len(each) > 20 for each in calm)
    for overlap in (False, True, "queued"):
        engine = make_engine(pages=3)
        assert [tokens(each) for each in run(engine, *many, overlap=overlap)] == calm
        assert engine.counters["preemptions"] > 0


def test_a_cached_prompt_changes_nothing():
    engine = make_engine()
    prompt = words(300)
    first, second = (
        run(engine, make_ask("a", prompt, 60, grammar=GRAMMAR, temperature=1.0, seed=3))[0] for _ in range(2)
    )
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 256)
    assert tokens(first) == tokens(second)


def test_thoughts_are_free_and_do_not_end_the_answer():
    """Any token may stand for the end of thoughts here."""
    after = tokens(run(make_engine(), make_ask("a", words(20), 12))[0])[7]
    for overlap in (False, "queued"):
        (answer,) = run(
            make_engine(),
            make_ask("a", words(20), 40, grammar=Grammar(regex("[0-9]{4}"), after), logprobs=None),
            overlap=overlap,
        )
        drawn = tokens(answer)
        free = drawn.index(after) + 1
        assert free > 1
        assert re.fullmatch("[0-9]{4}", TEXT.decode(drawn[free:]))
        assert answer.finish is Finish.STOP


def test_the_end_is_drawn_when_nothing_else_is_left_whatever_else_was_asked_for():
    ask = make_ask("a", words(20), 30, min_tokens=20, grammar=Grammar(choice(["yes"])), ignore_eos=True)
    (answer,) = run(make_engine(), ask)
    assert (answer.text, answer.finish) == ("yes", Finish.STOP)


def test_penalties_and_bias_do_not_lift_a_mask():
    bias = dict.fromkeys(TEXT.tokens_within("never again"), 100.0)
    ask = make_ask(
        "a", words(20), 30, grammar=Grammar(regex("[0-9]{5}")), logit_bias=bias, repetition_penalty=1.5
    )
    (answer,) = run(make_engine(), ask)
    assert re.fullmatch("[0-9]{5}", answer.text)


def test_logprobs_are_those_of_all_tokens():
    prompt = words(20)
    free = run(make_engine(), make_ask("a", prompt, 1, logprobs=1))[0].tokens[0]
    held = run(make_engine(), make_ask("a", prompt, 1, logprobs=1, grammar=Grammar(choice(["yes"]))))[0]
    assert held.tokens[0].top == free.top
    assert held.tokens[0].logprob < free.logprob


def allowed(matcher):
    masks = np.full((1, 128), -1, np.int32)
    fill_masks(masks, [Asked(matcher, 0)])
    bits = np.unpackbits(masks.view(np.uint8)[0], bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_a_token_of_the_user_that_stops_is_allowed_where_the_grammar_is_complete():
    stop = TEXT.tokens_within("!")[0]
    matcher = TEXT.grammars.matcher(Grammar(regex("[0-9]{1,2}")), TEXT.eos | {stop})
    assert not allowed(matcher) & {stop, *TEXT.eos}
    matcher.take(TEXT.tokens_within("5")[0])
    assert allowed(matcher) >= {stop, *TEXT.eos}


def test_in_thoughts_everything_is_allowed_but_the_end_of_the_answer():
    matcher = TEXT.grammars.matcher(Grammar(choice(["yes"]), after=99), TEXT.eos)
    assert allowed(matcher) == set(range(4096)) - TEXT.eos
    assert matcher.valid([5, 99, *TEXT.tokens_within("no")]) == 2
    matcher.take(99)
    assert len(allowed(matcher)) < 4


def test_an_object_with_very_many_properties_is_refused():
    with pytest.raises(GrammarError, match="an object has 501 properties, 500 are allowed"):
        json_schema({"items": [{"properties": {f"p{i}": {} for i in range(501)}}]})


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (json_schema({"type": "array", "uniqueItems": True}), r'Unimplemented keys: \["uniqueItems"\]'),
        (json_schema({"type": "string", "pattern": "(?=a)"}), "look-around"),
        (json_schema({"$ref": "#"}), "no text matches"),
        (regex("(a"), "unclosed group"),
        (json_schema({"enum": ["x" * 200_000]}), "longer than 131,072 B"),
    ],
)
def test_what_can_not_be_used_is_refused_with_its_reason(source, why):
    with pytest.raises(AskError, match=why):
        make_engine().check(make_ask("a", words(5), grammar=Grammar(source)))


def test_an_expression_that_becomes_too_complex_ends_its_own_answer_only(monkeypatch):
    monkeypatch.setattr(grammar, "ANSWER_S", 1e9)
    bad = make_ask("bad", words(9), 8, grammar=Grammar(regex("((a{1000}){1000}){1000}")), logprobs=None)
    good = make_ask("good", words(9), 8, grammar=Grammar(choice(["yes"])), logprobs=None)
    for overlap in (False, "queued"):
        engine = make_engine()
        failed, answer = run(engine, bad, good, overlap=overlap)
        assert failed.finish is Finish.GRAMMAR and "too many expressions" in failed.error
        assert (answer.text, answer.finish) == ("yes", Finish.STOP)
        settle(engine)


def test_an_answer_whose_grammar_has_failed_does_not_end_as_if_it_were_complete():
    matcher = TEXT.grammars.matcher(Grammar(regex("[0-9]{3}")), TEXT.eos)
    with pytest.raises(GrammarError):
        matcher.take(TEXT.tokens_within("a")[0])
    with pytest.raises(GrammarError):
        matcher.take(min(TEXT.eos))


def test_masks_that_take_too_long_end_their_own_answer_and_refuse_its_grammar(monkeypatch):
    """No mask is fast enough, so the test needs no slow one. An answer without a grammar has no masks."""
    monkeypatch.setattr(grammar, "ANSWER_S", 0.0)
    monkeypatch.setattr(grammar, "TOKEN_S", 0.0)
    for number, overlap in enumerate((False, "queued")):
        slow = Grammar(choice([f"yes {number}", "no"]), owner=f"me {number}")
        engine = make_engine()
        bad = make_ask("bad", words(9), 8, grammar=slow, logprobs=None)
        failed, answer = run(engine, bad, make_ask("good", words(9), 8, logprobs=None), overlap=overlap)
        assert failed.finish is Finish.GRAMMAR and "masks take too long" in failed.error
        assert answer.finish is Finish.LENGTH
        with pytest.raises(AskError, match="masks take too long"):
            engine.check(bad)
        assert TEXT.grammars.pause_s(slow.owner) > 0
        assert TEXT.grammars.pause_s("you") <= 0
        settle(engine)


def test_a_refusal_ends_and_the_oldest_is_forgotten_first(monkeypatch):
    monkeypatch.setattr(grammar, "REFUSED_MOST", 2)
    now = [0.0]
    grammars = Grammars(TEXT, lambda: now[0])
    first, second = (Grammar(choice([each]), owner=each) for each in "ab")
    grammars.matcher(first, TEXT.eos).time.add(1.0)
    with pytest.raises(GrammarError, match="take too long"):
        grammars.check(first)
    grammars.matcher(second, TEXT.eos).time.add(1.0)
    grammars.check(first)
    now[0] += grammar.REFUSED_S + 1
    grammars.check(second)


def test_compiled_grammars_are_kept_up_to_a_number_of_bytes():
    grammars = Grammars(TEXT)
    first, second, third = (Grammar(choice([each])) for each in "abc")
    half = grammar.COMPILED_BYTES_MOST // 2
    used = grammars.check(first, half)
    grammars.check(second, half)
    assert grammars.check(first) is used and grammars.keeps(second.source)
    grammars.check(third, half)
    assert [grammars.keeps(each.source) for each in (first, second, third)] == [True, False, True]


def test_masks_computed_together_are_the_same_and_slow_ones_are_timed_alone_again(monkeypatch):
    matchers = [TEXT.grammars.matcher(GRAMMAR, TEXT.eos) for _ in range(3)]
    asked = [Asked(matcher, row) for row, matcher in enumerate(matchers)]
    alone, together = (np.zeros((3, 128), np.int32) for _ in range(2))
    fill_masks(alone, asked)
    monkeypatch.setattr(grammar, "CORES_LEAST", 1)
    for matcher in matchers:
        matcher.time.alone = 0
    monkeypatch.setattr(grammar, "BATCH_S", 1e9)
    fill_masks(together, asked)
    assert (alone == together).all() and [each.time.alone for each in matchers] == [0, 0, 0]
    monkeypatch.setattr(grammar, "BATCH_S", 0.0)
    fill_masks(together, asked)
    assert [each.time.alone for each in matchers] == [grammar.ALONE] * 3
    fill_masks(together, asked)
    assert (alone == together).all() and [each.time.alone for each in matchers] == [grammar.ALONE - 1] * 3


def test_a_sampler_goes_on_after_the_output_it_is_given():
    answer = run(make_engine(), make_ask("a", words(20), 60, grammar=GRAMMAR))[0]
    drawn = tokens(answer)
    for cut in range(len(drawn)):
        matcher = TEXT.grammars.matcher(GRAMMAR, TEXT.eos)
        Sampler(make_ask("a", (1,), grammar=GRAMMAR).sampling, (1,), 4096, drawn[:cut], matcher)
        assert matcher.valid(drawn[cut:]) == len(drawn) - cut
