"""From the fields of a call to the grammar of its answers.

OpenAI      response_format, tools, tool_choice
SGLang      json_schema, regex, ebnf
vLLM        structured_outputs, and its older names guided_json, guided_regex, guided_choice, guided_grammar

One of them may be given. What it asks for becomes a recipe, which is tried before the answer begins: a
grammar that can not be used is a 400 which names the field.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from tiercel.server.calls.trials import Outcome
from tiercel.server.http.body import Body, ListOf
from tiercel.server.http.errors import ApiError, conflict, refusal
from tiercel.text.calls import parameters_of
from tiercel.text.grammar import Compiled, Grammar
from tiercel.text.text import Text
from tiercel.text.trial import Recipe

NO_THOUGHTS_END = "the end of this model's thoughts is not one token: turn thinking off"
CODE = "invalid_grammar"
"""Its own code, because no schema can express which grammars can be used."""

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
    recipe: Recipe
    parts: tuple[str, ...] = ()
    """The fields of the recipe's parts."""


def _recipe(make: str, *given: Any, **how: Any) -> dict[str, Any]:
    return {"make": make, "given": given, "how": how}


MAKERS: Mapping[str, str] = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "ebnf",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
}
STRUCTURED: Mapping[str, tuple[str, type | tuple[type, ...]]] = {
    "json": ("json", (str, dict)),
    "regex": ("regex", str),
    "choice": ("choice", list),
    "grammar": ("ebnf", str),
    "json_object": ("json", bool),
}
"""The fields of `structured_outputs`: their recipes and their types."""
STRUCTURED_HINTS = {"disable_any_whitespace", "disable_fallback", "whitespace_pattern"}
"""Hints: they make no valid answer invalid."""


def _given(body: NamedGrammars) -> Iterator[Given]:
    for name, make in MAKERS.items():
        if value := getattr(body, name, None):
            yield Given(name, value, _recipe(make, value))
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
        yield Given(field, value, _recipe(make, ANY_OBJECT if value is True else value))
    match body.response_format:
        case ResponseFormat(type="json_object"):
            yield Given("response_format", ANY_OBJECT, _recipe("json", ANY_OBJECT))
        case ResponseFormat(type="json_schema", json_schema=named):
            schema = (named or {}).get("schema")
            if not isinstance(schema, dict):
                why = "must have the field schema, a JSON schema"
                raise refusal("response_format.json_schema", named, why, code=CODE)
            yield Given("response_format.json_schema.schema", schema, _recipe("json", schema))


def _only(body: NamedGrammars) -> Given | None:
    first, *others = *_given(body), None
    if others[:-1]:
        assert first is not None and others[0] is not None
        raise conflict(others[0].field, others[0].value, f"not together with {first.field}")
    return first


class Trying(NamedTuple):
    """The owner of a recipe, and how it is tried."""

    owner: str
    tried: Callable[[Recipe], Awaitable[tuple[Outcome, Compiled | None]]]


async def text_grammar(body: NamedGrammars, trying: Trying, prefix: str = "") -> Grammar | None:
    """The grammar of a text that is continued. `prefix`: put before field names in errors."""
    given = _only(body)
    return None if given is None else await _checked(given._replace(field=prefix + given.field), trying)


async def _checked(given: Given, trying: Trying, after: int | None = None) -> Grammar:
    outcome, compiled = await trying.tried(given.recipe)
    if compiled is None:
        field, value = given.field, given.value
        if outcome.part is not None:
            field, value = given.parts[outcome.part], given.recipe["parts"][outcome.part]["given"][0]
        raise refusal(field, value, outcome.error, code=CODE)
    return Grammar(outcome.source, after, trying.owner, compiled)


class ChatTools(NamedTuple):
    """What a chat says of tools."""

    functions: list[dict[str, Any]]
    """Functions that the model may call."""
    choice: str | NamedChoice | None
    several: bool
    """Whether an answer may have several calls."""


async def chat_grammar(
    body: GrammarFields, tools: ChatTools, text: Text, trying: Trying, *, thinks: bool
) -> Grammar | None:
    """The grammar of an answer in a conversation. `thinks`: it begins with thoughts, which are free."""
    given = await _call_grammar(_only(body), tools, text, trying)
    if given is None:
        return None
    if thinks and text.think_end is None:
        raise refusal(given.field, given.value, NO_THOUGHTS_END, code=CODE)
    return await _checked(given, trying, text.think_end if thinks else None)


async def _call_grammar(given: Given | None, tools: ChatTools, text: Text, trying: Trying) -> Given | None:
    """The grammar of calls, if they are forced or a function is strict; otherwise what was `given`."""
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
        return _calls(functions, _recipe("forced_calls", form.value, functions, several=several))
    if given is not None:
        await _checked(given, trying)
        if given.recipe["make"] != "json":
            return given
        (answer,) = given.recipe["given"]
        return _calls(functions, _recipe("free_calls", form.value, functions, answer=answer))
    if any(each.get("strict") for each in functions):
        return _calls(functions, _recipe("free_calls", form.value, functions))
    return None


def _calls(functions: list[dict[str, Any]], recipe: Recipe) -> Given:
    """The recipe for calls. If it can not be used, the error names the first function to blame."""
    parts = [_recipe("json", parameters_of(each), lenient=not each.get("strict")) for each in functions]
    fields = tuple(f"tools[{i}].function.parameters" for i in range(len(functions)))
    return Given("tools", functions, {**recipe, "parts": parts}, fields)
