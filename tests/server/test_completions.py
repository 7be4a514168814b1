"""Goal: `/v1/completions` takes every form of prompt and answers as OpenAI does. Method: a script."""

import json

import pytest

from tests.server.scripted import ScriptedService, events_of, post
from tiercel.asks.ask import Sampling


def complete(service: ScriptedService | None = None, **body):
    return post("/v1/completions", service, **({"model": "scripted", "prompt": "one two"} | body))


def test_an_answer_has_openais_shape():
    answer = complete().json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "Hello world!", "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer["usage"]["total_tokens"] == 5
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_without_a_wish_an_answer_has_16_tokens_or_what_fits():
    service = ScriptedService()
    complete(service)
    assert service.ask.sampling == Sampling(max_tokens=16)
    small = ScriptedService(context_tokens=5)
    complete(small)
    assert small.ask.sampling.max_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("one two", ["one two"]),
        (["one", " two"], ["one", " two"]),
        ([261, 262], ["one two"]),
        ([[261], [262, 120]], ["one", " twox"]),
    ],
    ids=str,
)
def test_a_prompt_is_text_or_tokens_one_or_many(prompt, asked):
    service = ScriptedService()
    answer = complete(service, prompt=prompt).json()
    assert [service.text.decode(ask.prompt) for ask in service.asks] == asked
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(asked)))
    assert len({ask.request_id for ask in service.asks}) == len(asked)
    assert service.asks[0].request_id == answer["id"]


def test_answers_are_in_the_order_of_the_prompts_n_to_each():
    service = ScriptedService()
    answer = complete(service, prompt=["one", " two"], n=2, echo=True).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["oneHello world!"] * 2 + [" twoHello world!"] * 2
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 12


def test_logprobs_are_lists_beside_each_other():
    logprobs = complete(logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["Hello", " world", "!"],
        "token_logprobs": [-0.25, -0.5, -0.75],
        "top_logprobs": [{"Hello": -0.25, "x": -5.0}, {" world": -0.5, "x": -5.0}, {"!": -0.75, "x": -5.0}],
        "text_offset": [0, 5, 11],
    }


def test_the_token_itself_is_always_among_the_best():
    logprobs = complete(logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][0] == {"Hello": -0.25}


def test_an_echo_brings_the_prompt_and_its_logprobs():
    service = ScriptedService()
    choice = complete(service, echo=True, logprobs=1).json()["choices"][0]
    assert service.ask.prompt_logprobs_from == 0
    assert choice["text"] == "one twoHello world!"
    assert choice["logprobs"]["tokens"] == ["one", " two", "Hello", " world", "!"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25, -0.5, -0.75]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {" two": -0.25}]
    assert choice["logprobs"]["text_offset"] == [0, 3, 7, 12, 18]


def test_an_echo_without_logprobs_asks_for_none():
    service = ScriptedService()
    assert complete(service, echo=True, prompt=[261]).json()["choices"][0]["text"] == "oneHello world!"
    assert service.ask.prompt_logprobs_from is None


def test_a_text_can_be_scored_without_an_answer():
    choice = complete(echo=True, logprobs=0, max_tokens=0).json()["choices"][0]
    assert choice["text"] == "one two"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25]
    assert choice["finish_reason"] == "length"


def test_of_several_answers_only_the_first_computes_the_logprobs_of_the_prompt_and_all_tell_them():
    service = ScriptedService()
    choices = complete(service, n=3, echo=True, logprobs=0).json()["choices"]
    assert [ask.prompt_logprobs_from for ask in service.asks] == [0, None, None]
    assert [choice["logprobs"]["token_logprobs"][:2] for choice in choices] == [[None, -0.25]] * 3


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_is_the_whole_in_pieces(n):
    wish = {"prompt": ["one", "x"], "n": n, "echo": True, "logprobs": 2, "prompt_logprobs": 1}
    whole = complete(**wish).json()
    *chunks, usage, done = events_of(complete(**wish, stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]"
    assert json.loads(usage)["usage"] == whole["usage"]
    pieces = [{"text": "", "logprobs": {}} for _ in whole["choices"]]
    for chunk in map(json.loads, chunks):
        (choice,) = chunk["choices"]
        piece = pieces[choice["index"]]
        piece["text"] += choice["text"]
        for name, values in choice["logprobs"].items():
            piece["logprobs"].setdefault(name, []).extend(values)
        piece["finish_reason"] = choice["finish_reason"]
        if "prompt_logprobs" in choice:
            piece["prompt_logprobs"] = choice["prompt_logprobs"]
    for piece, choice in zip(pieces, whole["choices"], strict=True):
        assert piece == {name: choice[name] for name in piece}


def test_best_of_is_taken_only_if_it_is_n():
    assert complete(n=2, best_of=2).status_code == 200
    response = complete(n=2, best_of=3)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "best_of"


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (["x", ""], "prompt[1]"),
        ([265], "prompt[0]"),
        ([[1], [1, 999]], "prompt[1][1]"),
        ([1, -1], "prompt[1]"),
        ([1, "x"], "prompt[1]"),
        ([1, True], "prompt[1]"),
        (5, "prompt"),
        (None, "prompt"),
    ],
    ids=str,
)
def test_a_prompt_that_is_none_is_refused_by_its_place(prompt, param):
    response = complete(prompt=prompt)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
