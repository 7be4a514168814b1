"""Goal: `/v1/chat/completions` asks what was wished and answers as OpenAI does. Method: a script."""

import asyncio
import json

import pytest

from tests.server.scripted import ScriptedService, client_of, events_of, post, talking
from tiercel.asks.ask import Sampling

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "Hello"}


def chat(service: ScriptedService | None = None, **body):
    return post(PATH, service, **({"model": "scripted", "messages": [USER]} | body))


def chunks_of(response):
    *chunks, done = events_of(response)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def test_an_answer_has_openais_shape():
    answer = chat().json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "scripted"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 17,
        "completion_tokens": 3,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_the_engine_gets_the_tokens_of_the_conversation_and_where_its_messages_end():
    service = ScriptedService()
    chat(service, messages=[{"role": "system", "content": "x"}, USER])
    text = service.text
    assert text.decode(service.ask.prompt) == "system:x\nuser:Hello\nassistant:"
    assert service.ask.turn_ends == (
        len(text.encode("system:x\n")),
        len(text.encode("system:x\nuser:Hello\n")),
    )


def test_parts_of_a_message_and_their_break_points_reach_the_template():
    service = ScriptedService()
    seen = []
    original = service.text.chat
    service.text.chat = lambda messages, **_: (seen.extend(messages), original(messages))[1]
    part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    assert chat(service, messages=[{"role": "user", "content": [part], "name": "ann"}]).status_code == 200
    assert seen == [{"role": "user", "content": [part]}]


def test_without_wishes_the_answer_may_fill_the_context_and_the_rest_is_openais_default():
    service = ScriptedService(context_tokens=100)
    chat(service)
    assert service.ask.sampling == Sampling(max_tokens=100 - 17)
    assert service.ask.namespace == ()
    assert service.ask.prompt_logprobs_from is None


def test_every_wish_reaches_the_engine():
    service = ScriptedService()
    chat(
        service,
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        seed=-3,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"65": -100},
        stop=["x", "y"],
        ignore_eos=True,
        cache_salt="tenant",
        priority=5,
    )
    assert service.ask.sampling == Sampling(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        seed=-3,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        logit_bias={65: -100.0},
        stop=("x", "y"),
        ignore_eos=True,
    )
    assert service.ask.namespace == ("tenant",)
    assert service.ask.priority == 5


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        ({"max_tokens": 2}, 2),
        ({"max_completion_tokens": 2}, 2),
        ({"max_tokens": 9, "max_completion_tokens": 2}, 2),
        ({"max_tokens": 0}, 0),
    ],
)
def test_an_answer_that_is_cut_says_so(wish, told):
    answer = chat(**wish).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == told


def test_null_is_as_good_as_nothing():
    service = ScriptedService()
    assert chat(service, temperature=None, stop=None, n=None, tools=None, top_k=-1).status_code == 200
    assert service.ask.sampling.temperature == 1.0
    assert service.ask.sampling.top_k == 0


def test_a_stop_string_ends_an_answer_and_is_not_part_of_it():
    choice = chat(stop=" world").json()["choices"][0]
    assert choice["message"]["content"] == "Hello"
    assert choice["finish_reason"] == "stop"


def test_logprobs_come_with_text_and_bytes_and_no_infinity():
    content = chat(logprobs=True, top_logprobs=4).json()["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in content] == ["Hello", " world", "!"]
    first = content[0]
    assert first["logprob"] == -0.25
    assert first["bytes"] == list(b"Hello")
    assert first["top_logprobs"][1] == {"token": "x", "logprob": -5.0, "bytes": [120]}
    assert first["top_logprobs"][2] == {"token": "\ufffd", "logprob": -6.0, "bytes": [0xC3]}
    assert first["top_logprobs"][3]["logprob"] == -9999.0


def test_logprobs_without_a_number_are_of_the_token_alone():
    content = chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"] == []


def test_logprobs_of_the_prompt_have_vllms_form_and_do_not_bring_those_of_the_answer():
    answer = chat(prompt_logprobs=1).json()
    assert answer["choices"][0]["logprobs"] is None
    first, second, *others = answer["prompt_logprobs"]
    assert first is None
    assert second == {str(ord("s")): {"logprob": -0.25, "rank": 1, "decoded_token": "s"}}
    assert len(others) == 15


def test_a_stream_says_the_role_once_and_ends_with_a_reason():
    chunks = chunks_of(chat(stream=True))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": "Hello"},
        {"content": " world"},
        {"content": "!"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_comes_last_in_a_stream_if_it_is_asked_for():
    *chunks, last = chunks_of(chat(stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_the_logprobs_of_a_stream_are_those_of_the_whole():
    whole = chat(logprobs=True, top_logprobs=2, prompt_logprobs=1).json()
    chunks = chunks_of(chat(logprobs=True, top_logprobs=2, prompt_logprobs=1, stream=True))
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [token for each in told if each for token in each["content"]] == whole["choices"][0]["logprobs"][
        "content"
    ]
    assert chunks[0]["prompt_logprobs"] == whole["prompt_logprobs"]
    assert all("prompt_logprobs" not in chunk for chunk in chunks[1:])


def test_the_second_time_a_prompt_is_cached_and_another_tenant_does_not_share_it():
    service = ScriptedService()
    cached = [
        chat(service, **wish).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for wish in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": ""})
    ]
    assert cached == [0, 16, 0, 0, 16]


def test_several_answers_follow_the_first_and_find_its_prompt():
    service = ScriptedService()
    answer = chat(service, n=3, seed=7).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    names = [answer["id"], f"{answer['id']}.n1", f"{answer['id']}.n2"]
    assert [ask.request_id for ask in service.asks] == names
    assert service.events.index(f"begin {names[1]}") > service.events.index(f"delta {names[0]}")
    assert answer["usage"]["prompt_tokens"] == 17
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_several_answers_have_seeds_of_their_own_that_are_always_the_same():
    seeds = []
    for seed in (7, 7, 8):
        service = ScriptedService()
        chat(service, n=3, seed=seed)
        seeds.append([ask.sampling.seed for ask in service.asks])
    assert seeds[0] == seeds[1]
    assert seeds[0][0] == 7
    assert len({*seeds[0], *seeds[2]}) == 6


def test_several_answers_without_a_seed_have_none():
    service = ScriptedService()
    chat(service, n=2)
    assert [ask.sampling.seed for ask in service.asks] == [None, None]


def test_several_answers_are_told_apart_in_a_stream():
    chunks = chunks_of(chat(n=2, stream=True))
    texts = ["", ""]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["Hello world!", "Hello world!"]


def test_the_id_of_an_answer_is_the_clients_if_that_is_sane_and_free():
    got = []
    with talking(ScriptedService()) as talk:
        for wanted in ("mine-1", "mine-1", "no spaces", "no.dots", "", "x" * 129):
            body = {"model": "scripted", "messages": [USER]}
            response = talk("POST", PATH, json=body, headers={"x-request-id": wanted})
            assert response.headers["x-request-id"] == response.json()["id"]
            got.append(response.json()["id"])
    first, again, *others = got
    assert (first, again) == ("mine-1", "mine-1")
    assert all(other.startswith("req-") for other in others)


def test_two_requests_at_once_never_have_one_id():
    async def both():
        service = ScriptedService(hold_after=1)
        async with client_of(service) as client:
            body = {"model": "scripted", "messages": [USER]}
            headers = {"x-request-id": "twin"}
            first = asyncio.create_task(client.post(PATH, json=body, headers=headers))
            await asyncio.to_thread(service.holding.wait, 10)
            service.hold_after = None
            second = await client.post(PATH, json=body, headers=headers)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            return service, second

    service, second = asyncio.run(both())
    assert service.asks[0].request_id == "twin"
    assert second.json()["id"].startswith("req-")


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "ann"},
        {"metadata": {"a": "b"}},
        {"store": True},
        {"service_tier": "auto"},
        {"tools": []},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"prompt_cache_key": "k"},
        {"parallel_tool_calls": True},
        {"stream_options": {"include_usage": True}},
    ],
    ids=str,
)
def test_fields_that_change_nothing_are_taken(harmless):
    assert chat(**harmless).status_code == 200


@pytest.mark.parametrize(
    "unsupported",
    [
        {"audio": {"voice": "alloy", "format": "mp3"}},
        {"modalities": ["text", "audio"]},
        {"functions": [{"name": "f"}]},
        {"web_search_options": {}},
    ],
    ids=str,
)
def test_fields_that_would_change_the_answer_are_refused_by_name(unsupported):
    response = chat(**unsupported)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(unsupported))
    assert response.json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("asked", "prompt"),
    [
        ({}, "user:Hello\nassistant:So\nassistant:"),
        ({"add_generation_prompt": False}, "user:Hello\nassistant:So\n"),
        ({"continue_final_message": True}, "user:Hello\nassistant:So"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "user:Hello\nassistant:So"),
    ],
    ids=str,
)
def test_an_answer_may_go_on_from_the_last_message(asked, prompt):
    service = ScriptedService()
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "So"}]
    assert post("/v1/chat/completions", service, messages=messages, **asked).status_code == 200
    assert service.text.decode(service.ask.prompt) == prompt
