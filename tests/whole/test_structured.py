"""Goal: clients that ask for tools and objects work unmodified with what ships. Method: LangChain, instructor,
the AI SDK and the clients of OpenAI and Anthropic against one real server with the embedded model."""

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

@tool
def weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather of the next days."""
    return f"{city}: sun, {days} days"

url = sys.argv[1]
how = dict(temperature=0, max_tokens=200, max_retries=0)
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
assert again.usage_metadata["output_tokens"] > 0
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
        response_model=City, max_tokens=200, temperature=0, max_retries=0,
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


def test_openais_client_parses_objects_and_calls(server):
    asked = {"model": "tiny-v4", "messages": [{"role": "user", "content": "Which city?"}], "temperature": 0}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.parse(**asked, response_format=City)
        assert isinstance(whole.choices[0].message.parsed, City)
        assert whole.choices[0].finish_reason == "stop"
        with client.chat.completions.stream(**asked, response_format=City) as stream:
            stream.until_done()
            assert stream.get_final_completion().choices[0].message.parsed == whole.choices[0].message.parsed
        tool = openai.pydantic_function_tool(City, name="visit")
        called = client.chat.completions.parse(
            **asked, tools=[tool], tool_choice="required", parallel_tool_calls=False
        )
        assert called.choices[0].finish_reason == "tool_calls"
        for call in called.choices[0].message.tool_calls:
            assert isinstance(call.function.parsed_arguments, City)
