"""The Jinja chat template of a model folder, with the functions that Hugging Face gives its templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tiercel.errors import AskError, WeightsError
from tiercel.text.answer import CALL, DSML, CallFormat
from tiercel.text.conversation import ChatFormat, Conversation

TEMPLATE_FAILS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)
STEPS_OF_CALL = 10
"""A call takes about as long as ten iterations."""
CHARS_MOST = 64 << 20
"""Characters that a template may write: several times the longest request."""
BOUND = "_bound"
"""The variable of a template that holds its `Bound`."""
RESERVED = ("messages", "tools", "add_generation_prompt", "chat_template", "tokenize")
"""Variables that a request must not set through `chat_template_kwargs`."""


class JinjaFormat(ChatFormat):
    """A folder's templates by name: `default`, and often `tool_use`."""

    def __init__(self, templates: Mapping[str, str], names: Mapping[str, str]) -> None:
        environment = BoundedEnvironment()
        self._templates = {name: environment.from_string(source) for name, source in templates.items()}
        self._names = names
        self.calls = next(filter(None, map(_call_format, templates.values())), None)

    def render(self, talk: Conversation) -> str:
        if taken := [name for name in RESERVED if name in talk.kwargs]:
            field = f"chat_template_kwargs.{taken[0]}"
            raise AskError(field, talk.kwargs[taken[0]], "can not be set by a request")
        template = self._templates.get("tool_use") if talk.tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise ValueError("the folder has no default template")
        # Hugging Face passes absent variables as None: templates compare them with none.
        every = {"documents": None, **self._names, **talk.kwargs} | {
            "messages": talk.messages,
            "tools": list(talk.tools) or None,
            "add_generation_prompt": talk.add_generation_prompt,
            BOUND: talk.bound,
        }
        written, chars = [], 0
        for part in template.generate(every):
            written.append(part)
            chars += len(part)
            if chars > CHARS_MOST:
                raise TemplateError(f"it writes more than {CHARS_MOST:,} characters")
        return "".join(written)


def _call_format(source: str) -> CallFormat | None:
    if DSML in source and "tool_calls" in source:
        return CallFormat.DSML
    # Some templates have XML in this tag: `<function=name>`.
    return CallFormat.JSON if CALL in source and "<function=" not in source else None


def read_template(folder: Path, config: Mapping[str, Any], names: Mapping[str, str]) -> JinjaFormat | None:
    """The template from its own file or from tokenizer_config.json; `names`: bos_token, eos_token, …"""
    plain, wrapped = folder / "chat_template.jinja", folder / "chat_template.json"
    try:
        given = config.get("chat_template")
        if plain.exists():
            given = plain.read_text(encoding="utf-8")
        elif wrapped.exists():
            given = json.loads(wrapped.read_text(encoding="utf-8"))["chat_template"]
        if isinstance(given, list):
            given = {each["name"]: each["template"] for each in given}
        if given is None:
            return None
        return JinjaFormat(given if isinstance(given, dict) else {"default": given}, names)
    except (TemplateError, OSError, ValueError, LookupError, TypeError) as error:
        raise WeightsError(folder, f"has a chat template that can not be read: {error}") from error


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Counts every loop iteration and every call, so that no template runs for ever.

    The work of a single filter or operator is not counted: a template is trusted as much as the weights it
    comes with.
    """

    def __init__(self) -> None:
        extensions = ["jinja2.ext.loopcontrols", Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.filters |= {"tojson": _tojson, "_count": _count}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.body.insert(0, nodes.ExprStmt(self._count()))
            if loop.test is not None:  # skipped iterations count, too
                loop.test = nodes.And(self._count(), loop.test)
        return template

    def _count(self) -> nodes.Filter:
        count = nodes.Filter(nodes.Const(None), "_count", [], [], None, None)
        count.set_lineno(1).set_environment(self)
        return count

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __context[BOUND].count(STEPS_OF_CALL)
        return super().call(__context, __obj, *args, **kwargs)


@pass_context  # otherwise Jinja evaluates it once, at compile time
def _count(context: Context, _value: None) -> bool:
    context[BOUND].count()
    return True


class Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}`: marks assistant text for training; plain text here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    """JSON without HTML escapes, as in Hugging Face's templates."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


def _raise_exception(why: str) -> NoReturn:
    raise TemplateError(why)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
