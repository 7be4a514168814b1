"""From the fields of a call to the grammar of its answers.

OpenAI      response_format, tools, tool_choice
SGLang      json_schema, regex, ebnf
vLLM        structured_outputs, and its older names guided_json, guided_regex, guided_choice, guided_grammar

One of them may be given. A grammar is compiled here, so that a grammar that can not be used is a 400 which
names the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from tiercel.errors import GrammarError
from tiercel.server.body import Body, ListOf
from tiercel.server.errors import ApiError, conflict, refusal
from tiercel.text import grammar
from tiercel.text.calls import forced_calls, free_calls, parameters_of
from tiercel.text.grammar import Grammar
from tiercel.text.text import Text

NO_THOUGHTS_END = "the end of this model's thoughts is not one token: turn thinking off"
CODE = "invalid_grammar"
"""No schema can express which grammars can be used."""

SchemaText = str | dict[str, Any]
"""A JSON schema, or its text."""
ANY_OBJECT = {"type": "object"}


class ResponseFormat(Body):
    """OpenAI's field. `json_schema` has a name and a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class NamedGrammars(Body):
    """SGLang's fields, which its three calls share."""

    json_schema: SchemaText | None = None
    regex: str | None = None
    ebnf: str | None = None


class GrammarFields(NamedGrammars):
    """All fields of OpenAI's calls."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: SchemaText | None = None
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    guided_grammar: str | None = None


class FunctionName(Body):
    name: Annotated[str, Field(min_length=1)]


class NamedChoice(Body):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class Given(NamedTuple):
    """A field that asks for a grammar."""

    field: str
    value: Any
    make: Callable[[Any], str]


def _schema_of(value: SchemaText) -> dict[str, Any]:
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"it is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema must be an object")
    return schema


def _json(value: SchemaText) -> str:
    return grammar.json_schema(_schema_of(value))


MAKERS: Mapping[str, Callable[[Any], str]] = {
    "json_schema": _json,
    "regex": grammar.regex,
    "ebnf": grammar.ebnf,
    "guided_json": _json,
    "guided_regex": grammar.regex,
    "guided_choice": grammar.choice,
    "guided_grammar": grammar.ebnf,
}
STRUCTURED: Mapping[str, tuple[Callable[[Any], str], type | tuple[type, ...]]] = {
    "json": (_json, (str, dict)),
    "regex": (grammar.regex, str),
    "choice": (grammar.choice, list),
    "grammar": (grammar.ebnf, str),
    "json_object": (lambda _: _json(ANY_OBJECT), bool),
}
"""The fields of `structured_outputs`, and their types."""
STRUCTURED_HINTS = {"disable_any_whitespace", "disable_fallback", "whitespace_pattern"}
"""What these ask for changes no valid answer into an invalid one."""


def _given(body: NamedGrammars) -> Iterator[Given]:
    for name, make in MAKERS.items():
        if value := getattr(body, name, None):
            yield Given(name, value, make)
    if not isinstance(body, GrammarFields):
        return
    for name, value in (body.structured_outputs or {}).items():
        if not value or name in STRUCTURED_HINTS:
            continue
        field = f"structured_outputs.{name}"
        if name not in STRUCTURED:
            raise ApiError(400, f"{field} is not supported", param=field, code=CODE)
        make, kind = STRUCTURED[name]
        texts = not isinstance(value, list) or all(isinstance(each, str) for each in value)
        if not isinstance(value, kind) or not texts:
            raise refusal(field, value, "has the wrong type", code=CODE)
        yield Given(field, value, make)
    match body.response_format:
        case ResponseFormat(type="json_object"):
            yield Given("response_format", ANY_OBJECT, _json)
        case ResponseFormat(type="json_schema", json_schema=named):
            schema = (named or {}).get("schema")
            if not isinstance(schema, dict):
                why = "must have the field schema, a JSON schema"
                raise refusal("response_format.json_schema", named, why, code=CODE)
            yield Given("response_format.json_schema.schema", schema, _json)


def _only(body: NamedGrammars) -> Given | None:
    first, *others = *_given(body), None
    if others[:-1]:
        assert first is not None and others[0] is not None
        raise conflict(others[0].field, others[0].value, f"not together with {first.field}")
    return first


def text_grammar(body: NamedGrammars, text: Text, prefix: str = "") -> Grammar | None:
    """For a text that is continued. `prefix`: of the fields' names in an error."""
    given = _only(body)
    return None if given is None else _checked(given._replace(field=prefix + given.field), text)


def _checked(given: Given, text: Text, after: int | None = None) -> Grammar:
    try:
        made = Grammar(given.make(given.value), after)
        text.grammars.check(made)
    except GrammarError as error:
        raise refusal(given.field, given.value, str(error), code=CODE) from error
    return made


class ChatTools(NamedTuple):
    """What a chat says of tools."""

    functions: list[dict[str, Any]]
    """That the model may call."""
    choice: str | NamedChoice | None
    several: bool
    """Whether an answer may have several calls."""


def chat_grammar(body: GrammarFields, tools: ChatTools, text: Text, *, thinks: bool) -> Grammar | None:
    """For an answer in a conversation. `thinks`: it begins with thoughts, which are free."""
    given = _call_grammar(_only(body), tools, text)
    if given is None:
        return None
    if thinks and text.think_end is None:
        raise refusal(given.field, given.value, NO_THOUGHTS_END, code=CODE)
    try:
        return _checked(given, text, text.think_end if thinks else None)
    except ApiError:
        for i, each in enumerate(tools.functions if given.field == "tools" else ()):
            make = partial(grammar.json_schema, lenient=not each.get("strict"))
            _checked(Given(f"tools[{i}].function.parameters", parameters_of(each), make), text)
        raise


def _call_grammar(given: Given | None, tools: ChatTools, text: Text) -> Given | None:
    """The grammar of calls, where they are forced or a function is strict; or else what was `given`."""
    functions, choice = tools.functions, tools.choice
    if choice not in (None, "none", "auto"):
        if isinstance(choice, NamedChoice):
            functions = [each for each in functions if each["name"] == choice.function.name]
        if not functions:
            raise conflict("tool_choice", choice, "names no function of tools")
    if not functions:
        return given
    form = text.calls
    assert form is not None, "tools were refused where there is no format for calls"
    if choice not in (None, "auto"):
        several = tools.several and not isinstance(choice, NamedChoice)
        return Given("tools", functions, partial(forced_calls, form, several=several))
    if given is not None:
        _checked(given, text)
        if given.make is not _json:
            return given
        answer = grammar.json_rule(_schema_of(given.value))
        return Given("tools", functions, partial(free_calls, form, answer=answer))
    if any(each.get("strict") for each in functions):
        return Given("tools", functions, partial(free_calls, form))
    return None
