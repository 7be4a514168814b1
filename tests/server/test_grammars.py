"""Goal: every way to ask for a form of the answer reaches the engine as a grammar, or is refused by its name.
Method: a scripted service; the grammar that it was asked for is tried on texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.scripted import ScriptedService, post
from tests.text.test_deepseek_v4 import CLOCK, v4_folder
from tests.text.test_text import TEXT
from tiercel.text.answer import CallFormat
from tiercel.text.calls import CALLS_MOST
from tiercel.text.text import Text

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
USER = {"role": "user", "content": "Weather?"}
GOOD = {CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": "one"}, GENERATE: {"text": "one"}}
AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
CITY_AND_DAYS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY_AND_DAYS}}
EBNF = 'root ::= "yes" | "no"'
DSML_CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
CLOCK_CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="clock">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)
STRICT = {"type": "function", "function": {"name": "weather", "parameters": CITY_AND_DAYS, "strict": True}}


def matches(service: ScriptedService, text: str) -> bool:
    """Whether the answer that the engine was asked for may be this text."""
    grammar = service.ask.sampling.grammar
    assert grammar is not None
    matcher = service.text.grammars.matcher(grammar, service.text.eos)
    tokens = [*service.text.tokens_within(text), min(service.text.eos)]
    return matcher.valid(tokens) == len(tokens)


@pytest.mark.parametrize(
    ("path", "asked", "right", "wrong"),
    [
        (CHAT, {"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": AGE}}},
            '{"age": 3}',
            '{"age": "3"}',
        ),
        (COMPLETIONS, {"response_format": {"type": "json_object"}}, "{}", "x"),
        (COMPLETIONS, {"json_schema": json.dumps(AGE)}, '{"age": 3}', "{}"),
        (CHAT, {"regex": "[ab]{2}"}, "ab", "abc"),
        (CHAT, {"ebnf": EBNF}, "no", "maybe"),
        (COMPLETIONS, {"structured_outputs": {"json": AGE}}, '{"age":3}', "{}"),
        (COMPLETIONS, {"structured_outputs": {"regex": "a+"}}, "aaa", "b"),
        (COMPLETIONS, {"structured_outputs": {"choice": ["yes", "no"]}}, "yes", "y"),
        (CHAT, {"structured_outputs": {"grammar": 'start: "a" "b"'}}, "ab", "a"),
        (CHAT, {"structured_outputs": {"json_object": True, "regex": None}}, "{}", "[]"),
        (CHAT, {"guided_json": AGE}, '{"age": 3}', "{}"),
        (CHAT, {"guided_regex": "a+"}, "aaa", "b"),
        (CHAT, {"guided_choice": ["yes", "no"]}, "no", "n"),
        (CHAT, {"guided_grammar": EBNF}, "yes", "ye"),
        (GENERATE, {"sampling_params": {"json_schema": json.dumps(AGE)}}, '{"age": 3}', "{}"),
        (GENERATE, {"sampling_params": {"regex": "a+"}}, "a", "b"),
        (GENERATE, {"sampling_params": {"ebnf": EBNF}}, "yes", "x"),
    ],
    ids=str,
)
def test_a_grammar_reaches_the_engine(path: str, asked: dict[str, Any], right: str, wrong: str) -> None:
    service = ScriptedService()
    response = post(path, service, **GOOD[path], **asked)
    assert response.status_code == 200, response.text
    assert matches(service, right)
    assert not matches(service, wrong)


@pytest.mark.parametrize("path", GOOD)
def test_empty_fields_ask_for_nothing(path: str) -> None:
    empty: dict[str, Any] = {"regex": "", "ebnf": None, "json_schema": ""}
    if path == GENERATE:
        empty = {"sampling_params": empty}
    else:
        empty |= {"response_format": {"type": "text"}, "structured_outputs": {}, "guided_choice": []}
    service = ScriptedService()
    assert post(path, service, **GOOD[path], **empty).status_code == 200
    assert service.ask.sampling.grammar is None


UNIQUE = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize(
    ("path", "asked", "param", "why"),
    [
        (CHAT, {"regex": "(a"}, "regex", "unclosed group"),
        (CHAT, {"ebnf": "root ::= foo"}, "ebnf", "Rule 'foo' not found"),
        (CHAT, {"json_schema": "{"}, "json_schema", "not JSON"),
        (CHAT, {"json_schema": "5"}, "json_schema", "must be an object"),
        (CHAT, {"guided_json": UNIQUE}, "guided_json", 'Unimplemented keys: ["uniqueItems"]'),
        (COMPLETIONS, {"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice", "wrong type"),
        (COMPLETIONS, {"structured_outputs": {"choice": [1]}}, "structured_outputs.choice", "wrong type"),
        (COMPLETIONS, {"structured_outputs": {"tag": "a"}}, "structured_outputs.tag", "not supported"),
        (GENERATE, {"sampling_params": {"regex": "(?=a)"}}, "sampling_params.regex", "look-around"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema",
            "must have the field schema",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": UNIQUE}}},
            "response_format.json_schema.schema",
            "uniqueItems",
        ),
        (CHAT, {"regex": "a", "guided_choice": ["b"]}, "guided_choice", "not together with regex"),
    ],
    ids=str,
)
def test_what_can_not_be_used_is_named(path: str, asked: dict[str, Any], param: str, why: str) -> None:
    service = ScriptedService()
    response = post(path, service, **GOOD[path], **asked)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["code"] in ("invalid_grammar", "conflicting_values")
    assert why in error["message"]
    assert service.asks == []


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(v4_folder(tmp_path_factory.mktemp("v4") / "model"))


def asked(text: Text, **body: Any) -> ScriptedService:
    service = ScriptedService(script=("Yes",), text=text)
    body = {"messages": [USER], "tools": [WEATHER, CLOCK], "reasoning_effort": "none"} | body
    response = post(CHAT, service, **body)
    assert response.status_code == 200, response.text
    return service


def test_calls_are_free_unless_something_else_is_asked_for(text: Text) -> None:
    for choice in (None, "auto", "none"):
        assert asked(text, tool_choice=choice).ask.sampling.grammar is None


def test_a_required_call_is_a_call_of_any_function(text: Text) -> None:
    service = asked(text, tool_choice="required")
    assert matches(service, DSML_CALL)
    assert matches(service, CLOCK_CALL)
    assert not matches(service, "It rains.")
    assert not matches(service, DSML_CALL.replace(">3<", ">three<"))


def test_a_named_call_is_a_call_of_that_function(text: Text) -> None:
    service = asked(text, tool_choice={"type": "function", "function": {"name": "clock"}})
    assert matches(service, CLOCK_CALL)
    assert not matches(service, DSML_CALL)


def test_one_call_is_forced_if_only_one_is_wanted(text: Text) -> None:
    twice = CLOCK_CALL.replace(
        "\n</｜DSML｜tool", '\n<｜DSML｜invoke name="clock">\n\n</｜DSML｜invoke>\n</｜DSML｜tool'
    )
    assert matches(asked(text, tool_choice="required"), twice)
    assert not matches(asked(text, tool_choice="required", parallel_tool_calls=False), twice)
    assert not matches(asked(text, tool_choice={"type": "function", "function": {"name": "clock"}}), twice)


def test_forced_calls_are_limited(text: Text) -> None:
    """A model that repeats its call for ever ends too."""
    one = '<｜DSML｜invoke name="clock">\n\n</｜DSML｜invoke>\n'
    service = asked(text, tool_choice="required")
    assert matches(service, CLOCK_CALL.replace(one, one * CALLS_MOST))
    assert not matches(service, CLOCK_CALL.replace(one, one * (CALLS_MOST + 1)))


def test_a_strict_function_is_called_as_its_schema_says_or_not_at_all(text: Text) -> None:
    service = asked(text, tools=[STRICT, CLOCK])
    assert matches(service, "It rains.")
    assert matches(service, "Let me see." + DSML_CALL)
    assert not matches(service, "Let me see." + DSML_CALL.replace(">3<", ">three<"))


def test_with_tools_and_a_schema_an_answer_is_either(text: Text) -> None:
    service = asked(text, response_format={"type": "json_object"})
    assert matches(service, DSML_CALL)
    assert matches(service, '{"a": 1}')
    assert not matches(service, "It rains.")


def test_a_grammar_begins_behind_the_thoughts(text: Text) -> None:
    service = asked(text, reasoning_effort="low", tool_choice="required")
    assert service.ask.sampling.grammar.after == text.think_end is not None
    assert matches(service, "It may rain.</think>" + CLOCK_CALL)
    assert not matches(service, "It may rain.</think>It rains.")


def test_a_schema_of_a_function_that_can_not_be_enforced_is_refused_only_if_it_is_strict(text: Text) -> None:
    parameters = {"type": "object", "properties": {"days": UNIQUE}}
    for strict in (False, True):
        function = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
        service = ScriptedService(script=("Yes",), text=text)
        body = {"messages": [USER], "tools": [CLOCK, function], "tool_choice": "required"}
        response = post(CHAT, service, **body)
        assert (response.status_code == 400) is strict
    error = response.json()["error"]
    assert error["param"] == "tools[1].function.parameters"
    assert "uniqueItems" in error["message"]


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    '<tool_call>{"name": …, "arguments": …}</tool_call>'
)
JSON_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'


def test_calls_are_json_where_the_template_writes_them_so(tmp_path: Path) -> None:
    folder = v4_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    text = Text(folder)
    assert text.calls is CallFormat.JSON
    service = asked(text, tool_choice="required")
    assert matches(service, JSON_CALL)
    assert matches(service, "\n".join([JSON_CALL] * CALLS_MOST))
    assert not matches(service, "\n".join([JSON_CALL] * (CALLS_MOST + 1)))
    assert not matches(
        asked(text, tool_choice="required", parallel_tool_calls=False), f"{JSON_CALL}\n{JSON_CALL}"
    )
    assert not matches(service, JSON_CALL.replace("3", '"three"'))
    assert matches(asked(text, tools=[STRICT]), f"Let me see.\n{JSON_CALL}")
    service = ScriptedService(script=("Let me see.", *JSON_CALL), text=text)
    (choice,) = post(CHAT, service, messages=[USER], tools=[WEATHER]).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris", "days": 3}


NOTE = {"type": "object", "properties": {"text": {"type": "string"}}}
NOTES = {"type": "array", "items": {"$ref": "#/$defs/Note"}}
MAYBE = {"anyOf": [NOTE, {"type": "null"}]}
FREE = {"type": "object"}
MORE = {"properties": {"more": {"type": "integer"}}}
PARTS = {"$defs": {"Note": NOTE}, "allOf": [{"$ref": "#/$defs/Note"}, MORE]}


@pytest.mark.parametrize(
    ("parameters", "right", "wrong"),
    [
        (NOTE, '{"text": "a"}', '{"text": "a", "more": 1}'),
        (NOTE, '{"text": "a"}', '{"text":"a"}'),
        ({"type": "object", "properties": {}}, "{}", '{"more": 1}'),
        (
            {"type": "object", "properties": {"notes": NOTES}, "$defs": {"Note": NOTE}},
            '{"notes": [{"text": "a"}, {}]}',
            '{"notes": [{"more": 1}]}',
        ),
        (
            {"type": "object", "properties": {"note": MAYBE, "free": FREE}},
            '{"note": null, "free": {"a": 1, "b": 2}}',
            '{"note": {"more": 1}}',
        ),
        (NOTE | {"additionalProperties": True}, '{"text": "a", "more": 1}', '{"text": 1}'),
        (PARTS, '{"text": "a", "more": 1}', "[]"),
    ],
)
def test_arguments_are_those_that_a_function_names(
    parameters: dict[str, Any], right: str, wrong: str
) -> None:
    """In one line, as chat templates write them."""
    function = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    service = asked(TEXT, tools=[function], tool_choice="required")
    call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    assert matches(service, call % right)
    assert not matches(service, call % wrong)
