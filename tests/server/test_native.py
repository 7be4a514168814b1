"""Goal: `/generate` and its neighbours answer as clients of SGLang expect. Method: a script."""

import asyncio
import json

import pytest

from tests.server.scripted import EOS, ScriptedService, client_of, events_of, post
from tiercel.asks.ask import Sampling


def generate(service: ScriptedService | None = None, **body):
    return post("/generate", service, **(body if "input_ids" in body else {"text": "one two"} | body))


def test_an_answer_has_text_tokens_and_what_it_cost():
    service = ScriptedService()
    generate(service)
    answer = generate(service).json()
    assert answer["text"] == "Hello world!"
    assert answer["output_ids"] == [256, 257, 258]
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") >= 0
    assert meta == {
        "id": service.asks[1].request_id,
        "finish_reason": {"type": "stop", "matched": EOS},
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "cached_tokens": 1,
        "cached_tokens_details": {"device": 0, "host": 1, "storage": 0},
        "replayed_tokens": 0,
    }


def test_without_wishes_the_defaults_are_sglangs():
    service = ScriptedService()
    generate(service)
    assert service.ask.sampling == Sampling(max_tokens=128)


def test_every_wish_reaches_the_engine():
    service = ScriptedService()
    generate(
        service,
        sampling_params={
            "max_new_tokens": 7,
            "min_new_tokens": 2,
            "temperature": 3,
            "top_p": 0.9,
            "top_k": -1,
            "min_p": 0.1,
            "sampling_seed": 5,
            "presence_penalty": 1,
            "frequency_penalty": 1,
            "repetition_penalty": 1.1,
            "logit_bias": {"3": 4},
            "stop": "x",
            "stop_token_ids": [7],
            "ignore_eos": True,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        },
        cache_salt="tenant",
        priority=-1,
    )
    assert service.ask.sampling == Sampling(
        max_tokens=7,
        min_tokens=2,
        temperature=3.0,
        top_p=0.9,
        top_k=0,
        min_p=0.1,
        seed=5,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        repetition_penalty=1.1,
        logit_bias={3: 4.0},
        stop=("x",),
        stop_tokens=frozenset({7}),
        ignore_eos=True,
        keep_stop=True,
        skip_special_tokens=False,
    )
    assert service.ask.namespace == ("tenant",)
    assert service.ask.priority == -1


@pytest.mark.parametrize(
    ("params", "finish", "text"),
    [
        ({"max_new_tokens": 2}, {"type": "length", "length": 2}, "Hello world"),
        ({"max_new_tokens": 0}, {"type": "length", "length": 0}, ""),
        ({"stop": ["!"]}, {"type": "stop", "matched": "!"}, "Hello world"),
        ({"stop_token_ids": [257]}, {"type": "stop", "matched": 257}, "Hello"),
        ({}, {"type": "stop", "matched": EOS}, "Hello world!"),
    ],
    ids=str,
)
def test_an_answer_says_why_it_ended(params, finish, text):
    answer = generate(sampling_params=params).json()
    assert answer["meta_info"]["finish_reason"] == finish
    assert answer["text"] == text


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({"text": "one"}, ["one"]),
        ({"input_ids": [261, 262]}, ["one two"]),
        ({"text": ["one", "x"]}, ["one", "x"]),
        ({"input_ids": [[261], [262]]}, ["one", " two"]),
        ({"text": ["one"]}, ["one"]),
    ],
    ids=str,
)
def test_a_list_is_answered_by_a_list(body, asked):
    service = ScriptedService()
    answer = generate(service, **body).json()
    assert [service.text.decode(ask.prompt) for ask in service.asks] == asked
    prompt = next(iter(body.values()))
    many = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert isinstance(answer, list) == many
    if many:
        assert [each["meta_info"]["id"] for each in answer] == [ask.request_id for ask in service.asks]


def test_what_is_said_as_a_list_is_said_about_each_prompt():
    service = ScriptedService()
    answer = generate(
        service,
        text=["one", " two"],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        return_logprob=[True, False],
        logprob_start_len=[0, 0],
        top_logprobs_num=[1, 0],
        rid=["a", "b"],
        cache_salt=["s", ""],
    ).json()
    assert [ask.sampling.max_tokens for ask in service.asks] == [1, 2]
    assert [ask.prompt_logprobs_from for ask in service.asks] == [0, None]
    assert [ask.namespace for ask in service.asks] == [("s",), ()]
    assert [each["meta_info"]["id"] for each in answer] == ["a", "b"]
    assert "output_token_logprobs" in answer[0]["meta_info"]
    assert "output_token_logprobs" not in answer[1]["meta_info"]


def test_several_answers_to_one_prompt_are_a_list():
    service = ScriptedService()
    answer = generate(service, sampling_params={"n": 2, "sampling_seed": 1}, rid="r").json()
    assert [each["meta_info"]["id"] for each in answer] == ["r", "r.n1"]
    assert answer[1]["meta_info"]["cached_tokens"] == 1


def test_logprobs_are_triples_whose_text_is_null_unless_asked_for():
    meta = generate(return_logprob=True).json()["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs"] == [[-0.25, 256, None], [-0.5, 257, None], [-0.75, 258, None]]
    assert "output_top_logprobs" not in meta
    meta = generate(return_logprob=True, return_text_in_logprobs=True).json()["meta_info"]
    assert meta["output_token_logprobs"][0] == [-0.25, 256, "Hello"]


def test_logprobs_of_the_prompt_begin_where_they_are_asked_for():
    service = ScriptedService()
    body = {"input_ids": [261, 262, 120], "return_logprob": True, "top_logprobs_num": 1}
    meta = generate(service, **body, logprob_start_len=0).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 261, None], [-0.25, 262, None], [-0.5, 120, None]]
    assert meta["input_top_logprobs"] == [None, [[-0.25, 262, None]], [[-0.5, 120, None]]]
    assert meta["output_top_logprobs"][0] == [[-0.25, 256, None]]
    meta = generate(service, **body, logprob_start_len=2).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[-0.5, 120, None]]
    for start in (-1, 3):
        meta = generate(service, **body, logprob_start_len=start).json()["meta_info"]
        assert meta["input_token_logprobs"] == []
    assert [ask.prompt_logprobs_from for ask in service.asks] == [0, 2, None, None]


def test_a_prompt_can_be_scored_without_an_answer():
    body = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    answer = generate(**body).json()
    assert answer["output_ids"] == []
    assert answer["meta_info"]["input_token_logprobs"] == [[None, 261, None], [-0.25, 262, None]]
    assert answer["meta_info"]["output_token_logprobs"] == []


def test_a_stream_grows_to_the_whole():
    whole = generate(return_logprob=True, logprob_start_len=0, rid="r").json()
    *pieces, done = events_of(generate(return_logprob=True, logprob_start_len=0, rid="r", stream=True))
    assert done == "[DONE]"
    pieces = [json.loads(piece) for piece in pieces]
    assert [piece["text"] for piece in pieces] == ["Hello", "Hello world", "Hello world!", "Hello world!"]
    assert [piece["meta_info"]["finish_reason"] is None for piece in pieces] == [True, True, True, False]
    for answer in (whole, pieces[-1]):
        del answer["meta_info"]["e2e_latency"]
    assert pieces[-1] == whole


def test_a_stream_of_many_says_which():
    *pieces, _ = events_of(generate(text=["one", "x"], stream=True))
    last = {}
    for piece in map(json.loads, pieces):
        last[piece["index"]] = piece
    assert [last[index]["text"] for index in (0, 1)] == ["Hello world!"] * 2


def test_an_answer_is_known_by_the_id_of_the_body():
    response = generate(rid="mine")
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["meta_info"]["id"] == "mine"


@pytest.mark.parametrize("rid", ["mine", ["other", "mine"]], ids=str)
def test_an_id_that_is_in_use_is_refused(rid):
    async def both():
        service = ScriptedService(hold_after=1)
        async with client_of(service) as client:
            first = asyncio.create_task(client.post("/generate", json={"text": "x", "rid": "mine"}))
            await asyncio.to_thread(service.holding.wait, 10)
            service.hold_after = None
            text = "x" if isinstance(rid, str) else ["x", "y"]
            refused = await client.post("/generate", json={"text": text, "rid": rid})
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            again = await client.post("/generate", json={"text": text, "rid": rid})
            return refused, again

    refused, again = asyncio.run(both())
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == ("rid" if isinstance(rid, str) else "rid[1]")
    assert error["message"] == f"{error['param']} = 'mine': is in use"
    assert again.status_code == 200


def test_an_id_twice_in_one_call_is_refused_by_its_place_unless_the_salts_differ():
    twice = {"text": ["x", "y", "z"], "rid": ["a", "b", "a"]}
    assert generate(**twice).json()["error"]["message"] == "rid[2] = 'a': is the same as rid[0]"
    answers = generate(**twice, cache_salt=["s", "t", "u"]).json()
    assert [each["meta_info"]["id"] for each in answers] == ["a", "b", "a"]


@pytest.mark.parametrize(
    "harmless",
    [
        {"lora_path": ""},
        {"lora_path": None, "image_data": None},
        {"stream_options": {"include_usage": True}},
        {"return_routed_experts": False},
        {"log_metrics": True},
        {"sampling_params": {"skip_special_tokens": True, "spaces_between_special_tokens": True}},
        {"logprob_start_len": -1, "return_logprob": False, "top_logprobs_num": 3},
    ],
    ids=str,
)
def test_what_test_and_benchmark_clients_send_besides_is_taken(harmless):
    assert generate(**harmless).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": None}, "text"),
        ({"text": "x", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": [1, 265]}, "input_ids[1]"),
        ({"input_ids": [[1], [1, -1]]}, "input_ids[1][1]"),
        ({"input_ids": "x"}, "input_ids"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"top_k": -2}}, "sampling_params.top_k"),
        ({"sampling_params": {"max_new_tokens": 5000}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"stop_token_ids": [265]}}, "sampling_params.stop_token_ids"),
        ({"sampling_params": {"logit_bias": {"265": 1}}}, "sampling_params.logit_bias.265"),
        ({"sampling_params": {"n": 17}}, "sampling_params.n"),
        ({"sampling_params": {"stop": ["x"] * 17}}, "sampling_params.stop"),
        ({"sampling_params": {"structural_tag": "x"}}, "sampling_params.structural_tag"),
        ({"sampling_params": [{"beam_width": 2}]}, "sampling_params[0].beam_width"),
        ({"sampling_params": {"regex": "(a"}}, "sampling_params.regex"),
        ({"sampling_params": {"min_new_tokens": 129}}, "sampling_params.min_new_tokens"),
        ({"logprob_start_len": 3, "return_logprob": True}, "logprob_start_len"),
        ({"lora_path": "x"}, "lora_path"),
        ({"rid": "a b"}, "rid"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid[1]"),
        ({"token_ids_logprob": [1]}, "token_ids_logprob"),
    ],
    ids=str,
)
def test_what_can_not_be_served_is_refused_by_name(body, param):
    service = ScriptedService()
    response = generate(service, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert service.asks == []
