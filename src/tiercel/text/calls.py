"""Grammars of tool calls, in the two formats that `answer.py` reads.

forced      an answer is one call or several, and nothing else
free        an answer is text; from the opening of a call on it follows the functions' schemas

A function's arguments follow the JSON schema of its parameters. Keywords of a schema that can not be enforced
are ignored, unless the function is `strict`: then they are refused. An object with `properties` gets no
others, unless its schema says `additionalProperties`: a weak model would write them until no token is left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from tiercel.errors import GrammarError
from tiercel.text.answer import CALL, CALLS, DSML, END_CALL, END_CALLS, END_INVOKE, END_VALUE, CallFormat
from tiercel.text.grammar import json_rule

Function = Mapping[str, Any]
"""A function as a request has it: `name`, perhaps `parameters` and `strict`."""

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
PLAIN = {"type", "description", "title", "default", "examples"}
"""Keywords of a string that may be written as it is."""
WRITTEN_OUT = {"type", "properties", "required", "additionalProperties", "description", "title"}
"""Keywords of parameters that DeepSeek's format writes one by one. Other parameters are one JSON object."""
SHARED = {"$defs", "definitions"}
NAMED = {"type", "properties", "required", "description", "title", "default", "examples", "$schema", *SHARED}
"""Keywords of an object that says nothing about further properties."""
CALLS_MOST = 32
"""The most calls of a forced answer. Only the model ends it, and weak models repeat a call until no token is
left: `tiny-v4` always does, and writes so many in about 1,600 tokens. OpenAI names no limit: a program that
wants one call for each item of a text must not lose any of them."""
STRING, NO_STRING = '"true">', '"false">'
LINE, BREAK = "\n", "\n\n"
WORDS = r"WORDS: /(.|\n)*/"
SPACE = r"SPACE: /\s*/"


def forced_calls(form: CallFormat, functions: Sequence[Function], *, several: bool) -> str:
    """Calls of these functions and nothing else: exactly one, unless there may be `several`."""
    if form is CallFormat.DSML:
        calls = f"call{{1,{CALLS_MOST}}}" if several else "call"
        start = f"{_text(BREAK + CALLS + LINE)} {calls} {_text(END_CALLS)}"
    else:
        more = f" ({_text(LINE + CALL)} call){{0,{CALLS_MOST - 1}}}" if several else ""
        start = f"{_text(CALL)} call{more}"
    return "\n".join([f"start: {start}", *_rules(form, functions)])


def free_calls(form: CallFormat, functions: Sequence[Function], *, answer: str | None = None) -> str:
    """Text, in which calls of these functions follow their schemas. `answer`: a rule for the text of an
    answer without calls."""
    if form is CallFormat.DSML:
        begun, called = CALLS, f"{_text(LINE)} call+ {_text(END_CALLS)}"
    else:
        begun, called = CALL, "call"
    if answer is None:
        rules = ["start: called* WORDS", f"begun[lazy]: WORDS {_text(begun)}", WORDS]
    else:
        rules = ["start: called+ | answer", f"answer: {answer}", f"begun[lazy]: SPACE {_text(begun)}", SPACE]
    return "\n".join([*rules, f"called: begun {called}", *_rules(form, functions)])


def parameters_of(function: Function) -> dict[str, Any]:
    """The JSON schema of the function's arguments."""
    return {"type": "object", **(function.get("parameters") or NO_PARAMETERS)}


def closed(schema: Any) -> Any:
    """The schema, in which an object has the properties that it names and no others."""
    return schema if _combines(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    inner = dict(schema)
    for name, value in schema.items():
        if name in ("properties", *SHARED) and isinstance(value, Mapping):
            inner[name] = {each: _closed(own) for each, own in value.items()}
        elif name in ("anyOf", "oneOf", "prefixItems") and isinstance(value, list):
            inner[name] = [_closed(each) for each in value]
        elif name in ("items", "additionalProperties"):
            inner[name] = _closed(value)
    if "properties" in schema and schema.keys() <= NAMED:
        inner["additionalProperties"] = False
    return inner


def _combines(schema: Any) -> bool:
    """Whether several schemas describe one object: each names some of its properties."""
    if isinstance(schema, Mapping):
        beside = "properties" in schema and not schema.keys().isdisjoint(("anyOf", "oneOf", "$ref"))
        return "allOf" in schema or beside or any(map(_combines, schema.values()))
    return isinstance(schema, list) and any(map(_combines, schema))


def _rules(form: CallFormat, functions: Sequence[Function]) -> Iterator[str]:
    """`call` and the rules below it. In the JSON format it begins behind its tag."""
    yield f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"
    if form is CallFormat.DSML:
        yield f"text_value[lazy]: /(.|\\n)*/ {_text(END_VALUE + LINE)}"
    for i, function in enumerate(functions):
        schema = closed(parameters_of(function))
        how = partial(json_rule, lenient=not function.get("strict"), one_line=True)
        if form is CallFormat.DSML:
            yield from _invocation(f"call_{i}", function["name"], schema, how)
        else:
            name = json.dumps(function["name"], ensure_ascii=False)
            head, end = f'\n{{"name": {name}, "arguments": ', f"}}\n{END_CALL}"
            yield f"call_{i}: {_text(head)} {how(schema)} {_text(end)}"


def _invocation(rule: str, name: str, schema: Mapping[str, Any], how: Callable[..., str]) -> Iterator[str]:
    head, end = _text(f'<{DSML}invoke name="{name}">\n'), _text(END_INVOKE + LINE)
    if not schema.keys() <= WRITTEN_OUT | SHARED or _refers_to_root(schema):
        yield f"{rule}: {head} {how(schema)} {_text(LINE)} {end}"
        return
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    if not isinstance(properties, Mapping) or not set(required) <= properties.keys():
        raise GrammarError("required has a name that is not in properties")
    each = (f"{rule}_{i}{'' if name in required else '?'}" for i, name in enumerate(properties))
    yield f"{rule}: {head} {' '.join(each) or _text(LINE)} {end}"
    shared = {name: schema[name] for name in SHARED if name in schema}
    for i, (name, own) in enumerate(properties.items()):
        tag = f'<{DSML}parameter name="{name}" string='
        own = own if isinstance(own, Mapping) else {}
        if own.get("type") == "string" and own.keys() <= PLAIN:
            yield f"{rule}_{i}: {_text(tag + STRING)} text_value"
        elif own.get("type") == "string" and own.keys() == own.keys() & PLAIN | {"enum"} and own["enum"]:
            texts = " | ".join(_text(f"{text}{END_VALUE}\n") for text in own["enum"])
            yield f"{rule}_{i}: {_text(tag + STRING)} ({texts})"
        else:
            yield f"{rule}_{i}: {_text(tag + NO_STRING)} {how({**own, **shared})} {_text(END_VALUE + LINE)}"


def _refers_to_root(schema: Any) -> bool:
    """Whether a reference leads to anything but a shared definition."""
    if isinstance(schema, Mapping):
        target = schema.get("$ref")
        elsewhere = isinstance(target, str) and not target.startswith(("#/$defs/", "#/definitions/"))
        return elsewhere or any(map(_refers_to_root, schema.values()))
    return isinstance(schema, list) and any(map(_refers_to_root, schema))


def _text(text: str) -> str:
    """A literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)
