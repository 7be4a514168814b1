"""Goal: OpenAI's `/v1/responses`. Method: a script that answers as a model does; what is asked is read from
the prompt, what is answered by the official `openai` client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.scripted import ScriptedService, post, served
from tests.server.test_tools import ARGUMENTS, CALL, THOUGHT, prompt_of, service_of
from tests.text.test_deepseek_v4 import v4_folder
from tiercel.errors import QueueFull
from tiercel.server.calls.responses import ResponsesRequest, decoded, encoded
from tiercel.text.text import Text

PATH = "/v1/responses"
TOOLS = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None},
    {"type": "function", "name": "clock", "parameters": None, "strict": False},
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(v4_folder(tmp_path_factory.mktemp("v4") / "model"))


def ask(service: ScriptedService, **body: Any):
    return post(PATH, service, **({"model": "scripted", "input": "Weather?"} | body))


def named_events(response) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream; each is named as it says itself, and counted."""
    blocks = [block.split("\n") for block in response.text.split("\n\n")]
    assert blocks.pop() == [""]
    events = [
        (name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks
    ]
    assert all(name == event["type"] for name, event in events)
    return events


# What is asked


def test_items_become_the_messages_of_a_chat(text: Text) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I ask.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "warm"}]},
        {"type": "message", "role": "assistant", "content": "Warm."},
        {"role": "user", "content": "Thanks"},
    ]
    service = service_of(text, "Yes")
    assert ask(service, input=items, instructions="Be brief.", tools=TOOLS).status_code == 200
    told = prompt_of(service)
    assert "Be brief." in told.partition("<｜User｜>")[0]
    assert told.partition("<｜User｜>")[2] == (
        "Weather?<｜Assistant｜><think>Hm.</think>I ask.\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>"
        "<｜User｜><tool_result>warm</tool_result><｜Assistant｜><think></think>Warm.<｜end▁of▁sentence｜>"
        "<｜User｜>Thanks<｜Assistant｜><think>"
    )


def test_fields_reach_the_engine_by_their_chat_names() -> None:
    service = ScriptedService()
    body = {
        "max_output_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 3,
        "stop": "x",
        "cache_salt": "a",
    }
    body |= {"stop_token_ids": [7], "min_tokens": 1, "seed": 5}
    response = ask(service, **body, store=True, metadata={"a": "b"})
    sampling = service.ask.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (2, 0.5, 0.5, 3)
    assert (sampling.stop, service.ask.namespace) == (("x",), ("a",))
    assert (sampling.stop_tokens, sampling.min_tokens, sampling.seed) == ({7}, 1, 5)
    answer = response.json()
    assert (answer["metadata"], answer["store"], answer["status"]) == ({"a": "b"}, True, "incomplete")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}


def test_break_points_are_where_parts_say() -> None:
    parts = [
        {"type": "input_text", "text": "one", "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}},
        {"type": "input_text", "text": " two"},
    ]
    message = ResponsesRequest(input=[{"role": "user", "content": parts}]).translated().as_chat().messages[0]
    assert message.as_dict()["content"] == [
        {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": " two"},
    ]


@pytest.mark.parametrize(
    ("given", "chats"),
    [
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        (
            {"tool_choice": {"type": "function", "name": "weather"}},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "object"}},
                }
            },
        ),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
    ],
    ids=str,
)
def test_choices_and_formats_are_those_of_a_chat(given: dict[str, Any], chats: dict[str, Any]) -> None:
    fields = ResponsesRequest.model_validate({"input": "x"} | given).translated().fields
    assert fields | chats == fields


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": "a"}, {"role": "user", "content": "impossible"}]},
            "input[1].content",
        ),
        ({"input": "x" * 100_000}, "input"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
    ],
    ids=lambda each: str(each)[:80],
)
def test_what_can_not_be_served_is_named_as_the_client_knows_it(body: dict[str, Any], param: str) -> None:
    response = ask(ScriptedService(), **body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param
    assert error["message"].startswith(param)


def test_thoughts_come_back_encoded_and_those_of_others_are_left_out() -> None:
    assert decoded(encoded("Hm. é")) == "Hm. é"
    assert decoded("gAAAA not ours") == decoded("/w==") == ""


# What is answered


def test_a_stream_tells_every_item_from_its_beginning_to_its_end(text: Text) -> None:
    service = service_of(text, *THOUGHT, "Let me", " see.", *CALL)
    events = named_events(ask(service, tools=TOOLS, stream=True))
    names: list[str] = []
    for name, _ in events:
        if not names or names[-1] != name:
            names.append(name)
    part = ["response.content_part.added", "{}.delta", "{}.done", "response.content_part.done"]
    call = ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    begin, end = ["response.output_item.added"], ["response.output_item.done"]
    assert names == [
        *("response.created", "response.in_progress"),
        *(begin + [each.format("response.reasoning_text") for each in part] + end),
        *(begin + [each.format("response.output_text") for each in part] + end),
        *(begin + call + end) * 2,
        "response.completed",
    ]
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    done = [event["item"] for name, event in events if name == "response.output_item.done"]
    assert events[-1][1]["response"]["output"] == done
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call", "function_call"]


def test_a_whole_answer_says_the_same_as_a_stream(text: Text) -> None:
    script = (*THOUGHT, "Let me", " see.", *CALL)
    for body in ({}, {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}):
        whole = ask(service_of(text, *script), tools=TOOLS, **body).json()
        streamed = named_events(ask(service_of(text, *script), tools=TOOLS, stream=True, **body))[-1][1][
            "response"
        ]
        for response in (whole, streamed):
            for item in response["output"]:
                assert item.pop("id").partition("_")[0] in ("rs", "msg", "fc")
                item.pop("call_id", "")
            assert response.pop("id") and response.pop("created_at")
        assert whole == streamed
        thoughts = whole["output"][0]
        assert thoughts["summary" if body else "content"][0]["text"] == "I ask."
        assert thoughts.get("encrypted_content") == (encoded("I ask.") if body else None)
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}


def test_a_call_that_is_cut_off_is_not_complete(text: Text) -> None:
    body = {"tools": TOOLS, "reasoning": {"effort": "none"}, "max_output_tokens": 8}
    (item,) = ask(service_of(text, *CALL), **body).json()["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"city": "Par')


def test_logprobs_are_of_the_tokens_of_the_text(text: Text) -> None:
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = ask(service_of(text, *THOUGHT, "Let me", " see."), **body).json()
    (part,) = whole["output"][1]["content"]
    assert "".join(each["token"] for each in part["logprobs"]) == "Let me see."
    events = named_events(ask(service_of(text, *THOUGHT, "Let me", " see."), **body, stream=True))
    deltas = [event for name, event in events if name == "response.output_text.delta"]
    assert [[each["token"] for each in delta["logprobs"]] for delta in deltas] == [
        ["Let", " me"],
        [" see", "."],
    ]


def test_a_response_that_fails_midway_says_so() -> None:
    failing = ScriptedService(fail_after=(1, QueueFull(waiting=1, waiting_max=1)))
    name, event = named_events(ask(failing, stream=True))[-1]
    assert name == "response.failed"
    assert event["response"]["error"]["code"] == "rate_limit_exceeded"
    assert event["response"]["status"] == "failed"


def test_the_official_client_calls_tools_and_gives_results(text: Text) -> None:
    service = service_of(text, *THOUGHT, "Let me", " see.", *CALL)
    with (
        served(service) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        with client.responses.stream(model="scripted", input="Weather?", tools=TOOLS) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        assert {"response.output_text.delta", "response.function_call_arguments.done"} <= kinds
        assert final.output_text == "Let me see."
        calls = [item for item in final.output if item.type == "function_call"]
        assert json.loads(calls[0].arguments) == ARGUMENTS
        assert final.usage.input_tokens_details.cached_tokens == 0

        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": call.name} for call in calls
        ]
        service.script = ("So.", "</think>", "Warm.")
        items = [{"role": "user", "content": "Weather?"}, *final.output, *results]
        again = client.responses.create(model="scripted", input=items, tools=TOOLS, store=False)
        assert again.output_text == "Warm."
        assert again.output[0].content[0].text == "So."
        said = b"".join(map(text.piece_bytes, service.asks[-1].prompt)).decode()
        assert "<think>I ask.</think>Let me see." in said
        assert "<tool_result>weather</tool_result>\n\n<tool_result>clock</tool_result>" in said
