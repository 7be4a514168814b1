"""Goal: thinking and tools, as clients ask for them and as they read them. Method: DeepSeek V4's own format,
a script that answers as the model does, and the official `openai` client."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from tests.server.scripted import ScriptedService, events_of, post, served
from tests.text.test_deepseek_v4 import CLOCK, WEATHER, v4_folder
from tests.text.test_text import TURNS, make_folder
from tiercel.text.text import Text

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "Weather?"}
THOUGHT = ("I", " ask", ".", "</think>")
CALL = (
    "\n\n<",
    "｜DSML｜",
    "tool_calls",
    ">\n<",
    '｜DSML｜invoke name="weather',
    '">\n',
    '<｜DSML｜parameter name="city" string="true">',
    "Par",
    "is",
    "</｜DSML｜parameter>\n<｜DSML｜parameter name",
    '="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke',
    ' name="clock">\n</｜DSML｜invoke>\n',
    "</｜DSML｜tool_calls>",
)
ARGUMENTS = {"city": "Paris", "days": 3}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(v4_folder(tmp_path_factory.mktemp("v4") / "model"))


def service_of(text: Text, *script: str, **more: Any) -> ScriptedService:
    return ScriptedService(script=script, text=text, **more)


def chat(service: ScriptedService, **body: Any):
    return post(PATH, service, **({"model": "scripted", "messages": [USER]} | body))


def prompt_of(service: ScriptedService) -> str:
    return b"".join(map(service.text.piece_bytes, service.ask.prompt)).decode()


def deltas_of(response) -> list[dict[str, Any]]:
    *chunks, done = events_of(response)
    assert done == "[DONE]"
    return [json.loads(chunk)["choices"][0] for chunk in chunks]


# What is asked


@pytest.mark.parametrize(
    ("body", "end"),
    [
        ({}, "<think>"),
        ({"reasoning_effort": "none"}, "</think>"),
        ({"thinking": {"type": "disabled"}}, "</think>"),
        ({"thinking": {"type": "enabled"}}, "<think>"),
        ({"chat_template_kwargs": {"thinking": False}}, "</think>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "</think>"),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": True}}, "<think>"),
    ],
    ids=str,
)
def test_thinking_is_turned_on_and_off_as_clients_do(text: Text, body: dict[str, Any], end: str) -> None:
    service = service_of(text, "Yes")
    assert chat(service, **body).status_code == 200
    assert prompt_of(service).endswith("<｜Assistant｜>" + end)


@pytest.mark.parametrize(
    "body", [{"reasoning_effort": "max"}, {"chat_template_kwargs": {"reasoning_effort": "max"}}]
)
def test_an_effort_reaches_the_model(text: Text, body: dict[str, Any]) -> None:
    service = service_of(text, "Yes")
    chat(service, **body)
    assert "Reasoning Effort: Beyond maximum" in prompt_of(service)


def test_tools_are_told_as_they_were_given_and_not_at_all_if_none_may_be_called(text: Text) -> None:
    for choice, told in ((None, True), ("auto", True), ("none", False)):
        service = service_of(text, *CALL)
        body = {"tools": [WEATHER, CLOCK], "tool_choice": choice, "reasoning_effort": "none"}
        (answer,) = chat(service, **body).json()["choices"]
        assert (json.dumps(WEATHER["function"], ensure_ascii=False) in prompt_of(service)) is told
        assert ('{"parameters": {}, "name": "clock"}' in prompt_of(service)) is told
        assert ("tool_calls" in answer["message"]) is told
        assert (answer["message"]["content"] is None) is told


def test_a_conversation_with_calls_thoughts_and_results_is_read(text: Text) -> None:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    calls = [{"id": "c1", "type": "function", "index": 0, "function": function}]
    messages = [
        USER,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": calls,
        },
        {"role": "tool", "content": "warm", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Warm.", "reasoning": "So.", "tool_calls": []},
        USER,
    ]
    service = service_of(text, "Yes")
    assert chat(service, messages=messages, tools=[WEATHER]).status_code == 200
    assert prompt_of(service).partition("<｜User｜>")[2] == (
        "Weather?<｜Assistant｜><think>Hm.</think>\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>"
        "<｜User｜><tool_result>warm</tool_result><｜Assistant｜><think>So.</think>Warm.<｜end▁of▁sentence｜>"
        "<｜User｜>Weather?<｜Assistant｜><think>"
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"description": "x"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "tools[0].function.name"),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"chat_template_kwargs": {"thinking": "on"}}, "chat_template_kwargs.thinking"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ],
    ids=str,
)
def test_what_can_not_be_served_is_named(text: Text, body: dict[str, Any], param: str) -> None:
    response = chat(service_of(text, "Yes"), **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_tools_are_refused_where_the_model_has_no_format_for_them(tmp_path: Path) -> None:
    response = chat(ScriptedService(text=Text(make_folder(tmp_path / "model", TURNS))), tools=[WEATHER])
    assert response.status_code == 400
    assert response.json()["error"] | {"message": ""} == {
        "message": "",
        "type": "invalid_request_error",
        "param": "tools",
        "code": "no_tools",
    }


# What is answered


def test_an_answer_tells_thoughts_words_and_calls_apart(text: Text) -> None:
    service = service_of(text, *THOUGHT, "Let me", " see.", *CALL)
    (choice,) = chat(service, tools=[WEATHER, CLOCK]).json()["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["reasoning_content"], message["content"]) == ("I ask.", "Let me see.")
    assert [call["type"] for call in message["tool_calls"]] == ["function", "function"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "clock"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    assert message["tool_calls"][1]["function"]["arguments"] == "{}"
    ids = {call["id"] for call in message["tool_calls"]}
    assert len(ids) == 2 and all(each.startswith("call_") for each in ids)


def test_a_stream_says_the_same_in_pieces(text: Text) -> None:
    service = service_of(text, *THOUGHT, "Let me", " see.", *CALL)
    choices = deltas_of(chat(service, tools=[WEATHER, CLOCK], stream=True))
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "reasoning_content": "I"}
    assert "".join(each["delta"].get("reasoning_content", "") for each in choices) == "I ask."
    assert "".join(each["delta"].get("content", "") for each in choices) == "Let me see."
    parts = [part for each in choices for part in each["delta"].get("tool_calls", ())]
    begun = [part for part in parts if "id" in part]
    assert [(part["index"], part["type"], part["function"]["name"]) for part in begun] == [
        (0, "function", "weather"),
        (1, "function", "clock"),
    ]
    arguments = ["", ""]
    for part in parts:
        arguments[part["index"]] += part["function"]["arguments"]
    assert [json.loads(each) for each in arguments] == [ARGUMENTS, {}]
    assert [each["finish_reason"] for each in choices if each["finish_reason"]] == ["tool_calls"]


def test_without_thinking_and_tools_nothing_is_read_into_an_answer(text: Text) -> None:
    service = service_of(text, "a", *CALL)
    (choice,) = chat(service, reasoning_effort="none").json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "a" + "".join(CALL), "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_thoughts_are_left_in_the_words_or_out_of_the_answer_if_that_is_asked_for(text: Text) -> None:
    for asked, content in (("separate_reasoning", "I ask.</think>Yes"), ("include_reasoning", "Yes")):
        whole = chat(service_of(text, *THOUGHT, "Yes"), **{asked: False})
        (choice,) = whole.json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": content, "refusal": None}
        pieces = deltas_of(chat(service_of(text, *THOUGHT, "Yes"), **{asked: False}, stream=True))
        assert "".join(each["delta"].get("content", "") for each in pieces) == content
        assert all("reasoning_content" not in each["delta"] for each in pieces)


def test_thoughts_without_an_end_leave_no_words(text: Text) -> None:
    service = service_of(text, "I", " ask")
    (choice,) = chat(service, max_tokens=2).json()["choices"]
    assert choice["message"]["reasoning_content"] == "I ask"
    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "length"


def test_a_call_that_is_cut_off_ends_as_the_answer_does(text: Text) -> None:
    for stream in (False, True):
        service = service_of(text, *CALL)
        response = chat(service, tools=[WEATHER], reasoning_effort="none", max_tokens=8, stream=stream)
        if stream:
            choices = deltas_of(response)
            parts = [part for each in choices for part in each["delta"].get("tool_calls", ())]
        else:
            choices = response.json()["choices"]
            parts = choices[0]["message"]["tool_calls"]
        assert choices[-1]["finish_reason"] == "length"
        assert "".join(part["function"]["arguments"] for part in parts) == '{"city": "Par'


def test_one_call_is_given_if_only_one_is_wanted(text: Text) -> None:
    for stream in (False, True):
        body = {
            "tools": [WEATHER],
            "parallel_tool_calls": False,
            "reasoning_effort": "none",
            "stream": stream,
        }
        response = chat(service_of(text, "".join(CALL)), **body)
        choices = deltas_of(response) if stream else response.json()["choices"]
        saying = [each["delta" if stream else "message"] for each in choices]
        names = [call["function"].get("name") for said in saying for call in said.get("tool_calls", ())]
        assert names == ["weather"]


def test_several_answers_are_read_each_by_itself(text: Text) -> None:
    service = service_of(text, *THOUGHT, *CALL)
    for choice in chat(service, tools=[WEATHER], n=2).json()["choices"]:
        assert choice["message"]["reasoning_content"] == "I ask."
        assert len(choice["message"]["tool_calls"]) == 2


def test_logprobs_are_of_all_tokens_whatever_they_say(text: Text) -> None:
    choices = deltas_of(chat(service_of(text, *THOUGHT, "Yes"), logprobs=True, stream=True))
    tokens = [
        each["token"] for choice in choices if choice["logprobs"] for each in choice["logprobs"]["content"]
    ]
    assert "".join(tokens) == "I ask.</think>Yes"


# The official client


class City(pydantic.BaseModel):
    city: str
    days: int


def test_the_official_client_calls_tools_and_gives_results(text: Text) -> None:
    service = service_of(text, *THOUGHT, *CALL)
    tools = [WEATHER, CLOCK]
    with (
        served(service) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        whole = client.chat.completions.create(model="scripted", messages=[USER], tools=tools)
        (choice,) = whole.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.reasoning_content == "I ask."  # type: ignore[attr-defined]
        assert json.loads(choice.message.tool_calls[0].function.arguments) == ARGUMENTS

        results = [
            {"role": "tool", "tool_call_id": call.id, "content": call.function.name}
            for call in reversed(choice.message.tool_calls)
        ]
        service.script = ("So.", "</think>", "Warm.")
        again = client.chat.completions.create(
            model="scripted",
            messages=[USER, choice.message, *results],
            tools=tools,
            reasoning_effort="low",
            extra_body={"thinking": {"type": "enabled"}},
        )
        assert again.choices[0].message.content == "Warm."
        said = b"".join(map(text.piece_bytes, service.asks[-1].prompt)).decode()
        assert said.endswith(
            "<｜User｜><tool_result>weather</tool_result>\n\n<tool_result>clock</tool_result><｜Assistant｜><think>"
        )


def test_the_official_client_parses_a_stream_of_calls(text: Text) -> None:
    service = service_of(text, *THOUGHT, *CALL)
    tool = openai.pydantic_function_tool(City, name="weather")
    with (
        served(service) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(
            model="scripted", messages=[USER], tools=[tool], parallel_tool_calls=False
        ) as stream,
    ):
        stream.until_done()
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.parsed_arguments == City(city="Paris", days=3)


def test_the_chat_in_the_terminal_shows_thoughts_before_words(text: Text) -> None:
    service = service_of(text, *THOUGHT, "Yes", ".")
    with served(service) as url:
        command = [sys.executable, "-m", "tiercel.cli", "chat", "--url", url]
        done = subprocess.run(command, input="Hi\nBye\n\n", capture_output=True, text=True, check=True)
    assert done.stdout.count("I ask.\n\nYes.\n") == 2
    said = b"".join(map(text.piece_bytes, service.asks[-1].prompt)).decode()
    assert "<｜Assistant｜></think>Yes.<｜end▁of▁sentence｜><｜User｜>Bye" in said
