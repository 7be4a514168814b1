"""Goal: clients that ask for tools and objects work unmodified with what ships. Method: LangChain,
instructor, the AI SDK and the clients of OpenAI and Anthropic against a server with the embedded model."""

import json
import subprocess
from typing import Literal

import openai
import pydantic
import pytest

from tests.server.test_ai_sdk import needs_sdk, talked
from tests.whole.process import running
from tests.whole.test_clients import HOME, environment, installed  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def server():
    with running("--device-memory", "24MiB") as own:
        yield own


CLIENTS = '''
import sys
from typing import Literal
import instructor, openai
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

class City(BaseModel):
    """A city."""
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    people: int = Field(ge=0, le=9999)
    climate: Literal["warm", "cold"]
    capital: bool

@tool
def weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather of the next days."""
    return f"{city}: sun, {days} days"

url = sys.argv[1]
how = dict(temperature=0, max_tokens=400, max_retries=0)
model = ChatOpenAI(model="tiny-v4", base_url=url, api_key="none", **how)
asked = [("user", "Which city?")]
for method in ("json_schema", "function_calling"):
    city = model.with_structured_output(City, method=method).invoke(asked)
    assert isinstance(city, City), city
assert isinstance(model.with_structured_output(City, method="json_schema", strict=True).invoke(asked), City)
for choice in ("any", "weather"):
    said = model.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False).invoke(asked)
    (call,) = said.tool_calls
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage) and "sun" in result.content
whole = None
for chunk in model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).stream(asked):
    whole = chunk if whole is None else whole + chunk
assert [each["args"] for each in whole.tool_calls] == [call["args"]], whole.tool_calls
again = model.bind_tools([weather]).invoke([*asked, said, result], max_tokens=8)
assert again.usage_metadata["input_token_details"]["cache_read"] >= 128, again.usage_metadata
print("LangChain")

own = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
Mode = instructor.Mode
for mode in (Mode.TOOLS, Mode.JSON, Mode.JSON_SCHEMA, Mode.TOOLS_STRICT):
    client = instructor.from_openai(own, mode=mode)
    if mode is Mode.JSON:  # it asks for any object, which need not be a city, nor end in time
        try:
            client.chat.completions.create(
                model="tiny-v4", messages=[{"role": "user", "content": "Which city?"}],
                response_model=City, max_tokens=60, temperature=0, max_retries=0,
            )
        except (IncompleteOutputException, InstructorRetryException) as error:
            said = error.last_completion.choices[0]
            assert said.message.content.startswith("{") and said.finish_reason in ("stop", "length"), said
        continue
    city = client.chat.completions.create(
        model="tiny-v4", messages=[{"role": "user", "content": "Which city?"}],
        response_model=City, max_tokens=400, temperature=0, max_retries=0,
    )
    assert isinstance(city, City), city
print("instructor")
'''


@pytest.mark.usefixtures("installed")
def test_langchain_and_instructor_get_tools_and_objects(server):
    command = [HOME / "bin/python", "-c", CLIENTS, f"{server.url}/v1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["LangChain", "instructor"]


@needs_sdk
def test_the_ai_sdk_gets_objects(server):
    for task in talked(server.url, "tiny-v4", "generateObject", "outputObject").values():
        city = task["outcome"]["object"]
        assert len(city["name"]) <= 8 and 1 <= city["days"] <= 9 and city["sky"] in ("clear", "grey")


class City(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(max_length=8)
    climate: Literal["warm", "cold"]


ASKED = {"model": "tiny-v4", "messages": [{"role": "user", "content": "Which city?"}], "temperature": 0}
VISIT = openai.pydantic_function_tool(City, name="visit")
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
}
NAMED = {"type": "function", "function": {"name": "visit"}}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as own:
        yield own


def test_openais_client_parses_objects(client):
    whole = client.chat.completions.parse(**ASKED, response_format=City)
    assert isinstance(whole.choices[0].message.parsed, City)
    assert whole.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**ASKED, response_format=City) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.parsed == whole.choices[0].message.parsed


def test_openais_client_forces_calls_and_forbids_them(client):
    for how in ({"tool_choice": NAMED}, {"tool_choice": "required", "parallel_tool_calls": False}):
        (choice,) = client.chat.completions.parse(**ASKED, tools=[VISIT], **how).choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        assert isinstance(call.function.parsed_arguments, City)
    ask = {**ASKED, "tools": [VISIT, CLOCK]}
    (choice,) = client.chat.completions.create(**ask, tool_choice="required").choices
    assert choice.finish_reason == "tool_calls"  # it ends, although this model repeats its calls
    assert all(isinstance(json.loads(each.function.arguments), dict) for each in choice.message.tool_calls)
    for choice in ("auto", "none"):
        (said,) = client.chat.completions.create(**ask, tool_choice=choice, max_tokens=4).choices
        assert said.message.content and not said.message.tool_calls and said.finish_reason == "length"


def test_a_forced_call_is_streamed_and_one_that_max_tokens_cuts_is_no_whole_call(client):
    ask = {**ASKED, "tools": [VISIT], "tool_choice": NAMED}
    (whole,) = client.chat.completions.create(**ask).choices[0].message.tool_calls
    for most, finish in ((None, "tool_calls"), (25, "length")):
        (choice,) = client.chat.completions.create(**ask, max_tokens=most).choices
        *_, last = chunks = list(client.chat.completions.create(**ask, max_tokens=most, stream=True))
        assert last.choices[0].finish_reason == choice.finish_reason == finish
        parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
        assert len(parts) > 2 and [part.function.name for part in parts if part.id] == ["visit"]
        arguments = "".join(part.function.arguments for part in parts)
        assert arguments == choice.message.tool_calls[0].function.arguments
        assert (arguments == whole.function.arguments) is (finish == "tool_calls")
        assert whole.function.arguments.startswith(arguments) and not choice.message.content


@pytest.mark.parametrize("stream", [False, True])
def test_what_came_of_a_call_is_told_and_the_rest_is_in_the_cache(client, stream):
    """The second turn goes on behind the pages of the first."""
    question = {"role": "user", "content": f"{stream} " + "Which of these cities is the largest? " * 20}
    ask = {**ASKED, "tools": [VISIT], "max_tokens": 100}
    first = client.chat.completions.create(**ask | {"messages": [question]}, tool_choice=NAMED)
    said = first.choices[0].message
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "It is sunny."}
    ask |= {"messages": [question, said, result], "max_tokens": 4}
    if stream:
        *_, second = client.chat.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}
        )
    else:
        second = client.chat.completions.create(**ask)
    assert first.usage.prompt_tokens_details.cached_tokens < 128 * 2
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens // 128 * 128 >= 256


def test_responses_have_calls_and_take_their_outputs(client):
    tool = {"type": "function", "strict": True, **VISIT["function"]}
    ask = {"model": "tiny-v4", "temperature": 0, "tools": [tool]}
    forced = {"tool_choice": {"type": "function", "name": "visit"}, "parallel_tool_calls": False}
    question = {"role": "user", "content": "Which of these cities is the largest? " * 20}
    first = client.responses.create(**ask, **forced, input=[question])
    (call,) = first.output
    assert (call.type, call.name, call.status) == ("function_call", "visit", "completed")
    assert City.model_validate_json(call.arguments)
    events = list(client.responses.create(**ask, **forced, input=[question], stream=True))
    parts = [each.delta for each in events if each.type == "response.function_call_arguments.delta"]
    assert len(parts) > 2 and "".join(parts) == call.arguments == events[-1].response.output[0].arguments
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "It is sunny."}
    told = client.responses.create(**ask, input=[question, call, output], max_output_tokens=4)
    assert told.output_text
    assert told.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 128 * 128 > 0


ANTHROPIC = """
import sys, anthropic
client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
sky, days = {"enum": ["clear", "grey"]}, {"type": "integer", "maximum": 9}
schema = {"type": "object", "properties": {"sky": sky, "days": days}, "required": ["sky", "days"]}
tools = [{"name": "weather", "description": "Of a city.", "input_schema": schema}]
question = {"role": "user", "content": "Which of these cities is the largest? " * 20}
ask = dict(model="tiny-v4", tools=tools, max_tokens=100, extra_body={"temperature": 0})
for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
    said = client.messages.create(messages=[question], tool_choice=choice, **ask)
    (use,) = said.content
    assert (said.stop_reason, use.type, use.name) == ("tool_use", "tool_use", "weather"), said
    assert use.input["sky"] in sky["enum"] and type(use.input["days"]) is int and len(use.input) == 2, use
with client.messages.stream(messages=[question], tool_choice=choice, **ask) as stream:
    parts = [event.partial_json for event in stream if event.type == "input_json"]
    (streamed,) = stream.get_final_message().content
assert len(parts) > 2 and streamed.input == use.input, parts
result = {"type": "tool_result", "tool_use_id": use.id, "content": "It is sunny."}
turns = [question, {"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
usage = client.messages.create(messages=turns, **ask | {"max_tokens": 4}).usage
first = said.usage.input_tokens + said.usage.cache_read_input_tokens + said.usage.cache_creation_input_tokens
print(usage.cache_read_input_tokens >= first // 128 * 128 > 0)
"""


@pytest.mark.usefixtures("installed")
def test_anthropics_client_forces_calls_and_tells_what_came_of_them(server):
    command = [HOME / "bin/python", "-c", ANTHROPIC, server.url]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())
    assert (ran.returncode, ran.stdout.strip()) == (0, "True"), ran.stderr
