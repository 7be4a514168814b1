"""Goal: Anthropic's `/v1/messages`. Method: a script that answers as a model does; what is asked is read from
the prompt, what is answered by the official `anthropic` client, in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.scripted import LOOPBACK, ScriptedService, call, post, served, talking
from tests.server.test_responses import named_events
from tests.server.test_tools import ARGUMENTS, CALL, THOUGHT, prompt_of, service_of
from tests.text.test_deepseek_v4 import v4_folder
from tiercel.errors import QueueFull
from tiercel.server.calls.anthropic import MessagesRequest
from tiercel.server.options import ServerOptions
from tiercel.text.text import Text

PATH = "/v1/messages"
HOME = Path(sys.prefix) / "clients"
USER = {"role": "user", "content": "Weather?"}
TOOLS = [{"name": "weather", "description": "Of a city", "input_schema": {"type": "object"}}]
TOOLS += [{"name": "clock", "input_schema": {}, "type": "custom", "cache_control": {"type": "ephemeral"}}]
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(v4_folder(tmp_path_factory.mktemp("v4") / "model"))


def body_of(**body: Any) -> dict[str, Any]:
    return {"model": "scripted", "max_tokens": 100, "messages": [USER]} | body


def ask(service: ScriptedService, **body: Any):
    return post(PATH, service, **body_of(**body))


def text_block(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said} | more


# What is asked


def test_blocks_become_the_messages_of_a_chat(text: Text) -> None:
    messages = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "opaque"},
                text_block("I ask."),
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [text_block("warm")],
                    "is_error": False,
                },
                text_block("Thanks"),
            ],
        },
    ]
    service = service_of(text, "Yes")
    thinking = {"type": "enabled", "budget_tokens": 2000}
    response = ask(
        service,
        messages=messages,
        system=[text_block("Be"), text_block("brief.", **MARK)],
        tools=TOOLS,
        thinking=thinking,
    )
    assert response.status_code == 200, response.text
    told = prompt_of(service)
    assert "Be\n\nbrief." in told.partition("<｜User｜>")[0]
    assert told.partition("<｜User｜>")[2] == (
        "Weather?<｜Assistant｜><think>Hm.</think>I ask.\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>"
        "<｜User｜><tool_result>warm</tool_result>\n\nThanks<｜Assistant｜><think>"
    )


def test_break_points_are_named_where_cache_control_stands(text: Text) -> None:
    """The end of a part is a point after which texts may differ only if it is marked."""
    parts = [text_block("one two three four"), text_block("five six")]
    ends = []
    for marks in ({}, MARK):
        service = service_of(text, "Yes")
        ask(service, messages=[{"role": "user", "content": [parts[0] | marks, parts[1]]}])
        ends.append(service.ask.turn_ends)
        prompt = service.ask.prompt
    (named,) = set(ends[1]) - set(ends[0])
    assert set(ends[0]) < set(ends[1])
    assert b"".join(map(text.piece_bytes, prompt[:named])).decode().endswith("one two three four")


def test_a_mark_on_the_whole_request_a_result_or_a_call_is_its_messages() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "x"} | MARK
    use = {"type": "tool_use", "id": "t", "name": "weather", "input": {}} | MARK
    messages = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}, USER]
    chat = MessagesRequest.model_validate(body_of(messages=messages, **MARK)).translated().as_chat()
    marked = [bool(message.cache_control) for message in chat.messages]
    assert marked == [False, True, True, True]


def test_a_last_message_of_the_assistant_is_the_beginning_of_the_answer(text: Text) -> None:
    service = service_of(text, " warm.")
    messages = [USER, {"role": "assistant", "content": "It is"}]
    answer = ask(service, messages=messages, thinking={"type": "disabled"}).json()
    assert prompt_of(service).endswith("It is")
    assert answer["content"] == [text_block(" warm.")]


@pytest.mark.parametrize(
    ("given", "chats"),
    [
        ({"tool_choice": {"type": "auto"}}, {"tool_choice": "auto", "parallel_tool_calls": True}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tool_choice": {"type": "tool", "name": "clock"}},
            {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
        ),
        ({"thinking": {"type": "disabled"}}, {"thinking": {"type": "disabled"}}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {"include_reasoning": False}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}},
                }
            },
        ),
        ({"stop_sequences": ["a"], "top_k": 5}, {"stop": ["a"], "top_k": 5}),
    ],
    ids=str,
)
def test_choices_and_formats_are_those_of_a_chat(given: dict[str, Any], chats: dict[str, Any]) -> None:
    fields = MessagesRequest.model_validate(body_of(tools=TOOLS) | given).translated().fields
    assert fields | chats == fields


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [USER, {"role": "user", "content": "impossible"}], "system": "x"},
            "messages[1].content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0].content[0].type",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"stop_sequences": ["x" * 1000]}, "stop_sequences"),
    ],
    ids=lambda each: str(each)[:80],
)
def test_what_can_not_be_served_is_named_in_anthropics_shape(body: dict[str, Any], param: str) -> None:
    response = ask(ScriptedService(), **body)
    told = response.json()
    assert (response.status_code, told["type"], told["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )
    assert told["error"]["param"] == param
    assert told["error"]["message"].startswith(param)


@pytest.mark.parametrize(
    ("more", "status", "kind"),
    [
        ({"json": body_of(model="claude")}, 404, "not_found_error"),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "invalid_request_error"),
        ({"json": body_of(), "headers": {"x-api-key": "wrong"}}, 401, "authentication_error"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_every_error_has_anthropics_shape(more: dict[str, Any], status: int, kind: str) -> None:
    options = ServerOptions(api_key=("right",)) if status == 401 else LOOPBACK
    response = call("POST", PATH, options=options, **more)
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)


def test_so_has_a_full_queue_and_a_stream_that_fails_midway() -> None:
    full = ask(ScriptedService(fail_first=QueueFull(waiting=1, waiting_max=1)))
    assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
    failing = ScriptedService(fail_after=(1, QueueFull(waiting=1, waiting_max=1)))
    name, event = named_events(ask(failing, stream=True))[-1]
    assert (name, event["error"]["type"]) == ("error", "rate_limit_error")


def test_the_key_may_be_in_anthropics_header() -> None:
    with talking(ScriptedService(), ServerOptions(api_key=("right",))) as talk:
        for path, body in ((PATH, body_of()), ("/v1/completions", {"prompt": "x"})):
            assert talk("POST", path, json=body, headers={"x-api-key": "right"}).status_code == 200
            assert talk("POST", path, json=body).status_code == 401


# What is answered


def test_a_stream_tells_every_block_from_its_beginning_to_its_end(text: Text) -> None:
    service = service_of(text, *THOUGHT, "Let me", " see.", *CALL)
    events = named_events(ask(service, tools=TOOLS, stream=True))
    told = [event.get("content_block", event.get("delta", {})).get("type") or name for name, event in events]
    short: list[str] = []
    for each in told:
        if not short or short[-1] != each:
            short.append(each)
    end = "content_block_stop"
    assert short == [
        *("message_start", "ping"),
        *("thinking", "thinking_delta", "signature_delta", end),
        *("text", "text_delta", end),
        *("tool_use", "input_json_delta", end) * 2,
        *("message_delta", "message_stop"),
    ]
    parts = [event for name, event in events if name == "content_block_delta" and event["index"] == 2]
    assert json.loads("".join(event["delta"]["partial_json"] for event in parts)) == ARGUMENTS
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_a_whole_answer_says_the_same(text: Text) -> None:
    answer = ask(service_of(text, *THOUGHT, "Let me", " see.", *CALL), tools=TOOLS).json()
    thoughts, words, call, clock = answer["content"]
    assert (thoughts["type"], thoughts["thinking"]) == ("thinking", "I ask.")
    assert words == text_block("Let me see.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", ARGUMENTS)
    assert (clock["name"], clock["input"], answer["stop_reason"]) == ("clock", {}, "tool_use")


@pytest.mark.parametrize(
    ("body", "stop"),
    [
        ({"max_tokens": 1}, ("max_tokens", None)),
        ({"stop_sequences": ["wor"]}, ("stop_sequence", "wor")),
        ({}, ("end_turn", None)),
    ],
    ids=str,
)
def test_the_end_has_a_reason(body: dict[str, Any], stop: tuple[str, str | None]) -> None:
    answer = ask(ScriptedService(), **body).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == stop


def test_a_call_that_is_cut_off_is_not_given_as_a_whole_one(text: Text) -> None:
    answer = ask(service_of(text, *CALL), tools=TOOLS, thinking={"type": "disabled"}, max_tokens=8).json()
    assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")


def test_tokens_are_counted_as_read_written_or_neither() -> None:
    service = ScriptedService(page_tokens=7)
    with talking(service) as talk:
        first, second = (talk("POST", PATH, json=body_of()).json()["usage"] for _ in range(2))
        counted = talk("POST", f"{PATH}/count_tokens", json={"model": "scripted", "messages": [USER]}).json()
    prompt = len(service.asks[0].prompt)
    assert counted == {"input_tokens": prompt}
    written = prompt // 7 * 7
    assert first == {
        "input_tokens": prompt - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": 0,
        "output_tokens": 3,
    }
    assert (second["input_tokens"], second["cache_read_input_tokens"]) == (1, prompt - 1)


CLIENT = """
import json, sys, anthropic
url, tools = sys.argv[1], json.loads(sys.argv[2])
client = anthropic.Anthropic(base_url=url, api_key="right", max_retries=0)
ask = dict(model="scripted", max_tokens=100, tools=tools)
messages = [{"role": "user", "content": "Weather?"}]
system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
with client.messages.stream(messages=messages, system=system, **ask) as stream:
    words = "".join(stream.text_stream)
    final = stream.get_final_message()
whole = client.messages.create(messages=messages, system=system, **ask)
results = [
    {"type": "tool_result", "tool_use_id": block.id, "content": block.name}
    for block in final.content
    if block.type == "tool_use"
]
messages += [{"role": "assistant", "content": final.content}, {"role": "user", "content": results}]
again = client.messages.create(messages=messages, system=system, thinking={"type": "adaptive"}, **ask)
count = client.messages.count_tokens(model="scripted", messages=messages, system=system, tools=tools)
try:
    client.messages.create(messages=[], **ask)
except anthropic.BadRequestError as error:
    refused = error.body["error"]["param"]
try:
    client.with_options(api_key="wrong").messages.create(messages=messages, **ask)
except anthropic.AuthenticationError as error:
    kept_out = error.type
print(json.dumps({
    "words": words,
    "final": [block.to_dict() for block in final.content],
    "types": [block.type for block in whole.content],
    "reason": final.stop_reason,
    "usage": whole.usage.to_dict(),
    "again": again.stop_reason,
    "request_id": whole._request_id == whole.id,
    "count": count.input_tokens,
    "refused": refused,
    "kept_out": kept_out,
}))
"""


@pytest.mark.skipif(
    not (HOME / "installed").exists(), reason="tests/install-clients.sh did not install the client"
)
def test_the_official_client_calls_tools_and_gives_results(text: Text) -> None:
    service = service_of(text, *THOUGHT, "Let me", " see.", *CALL)
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with served(service, ServerOptions(api_key=("right",), loopback=True, strict=True)) as url:
        command = [HOME / "bin/python", "-c", CLIENT, url, json.dumps(TOOLS)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=own, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["words"] == "Let me see."
    assert (
        [block["type"] for block in told["final"]]
        == ["thinking", "text", "tool_use", "tool_use"]
        == told["types"]
    )
    assert told["final"][2]["input"] == ARGUMENTS
    assert told["reason"] == told["again"] == "tool_use"
    prompt = len(service.asks[1].prompt)
    assert told["usage"]["cache_read_input_tokens"] == prompt - 1
    assert told["request_id"]
    assert told["count"] == len(service.asks[2].prompt)
    assert (told["refused"], told["kept_out"]) == ("messages", "authentication_error")
    said = b"".join(map(text.piece_bytes, service.asks[2].prompt)).decode()
    assert "<think>I ask.</think>Let me see." in said
    assert "<tool_result>weather</tool_result>\n\n<tool_result>clock</tool_result>" in said
