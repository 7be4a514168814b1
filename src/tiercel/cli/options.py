"""Options of commands, made from settings: a field that is a `setting` is an option."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import Field, fields
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from tiercel.config import parse_bytes
from tiercel.errors import ConfigError
from tiercel.models.families import EMBEDDED

T = TypeVar("T")

Model = Annotated[
    str,
    typer.Argument(
        metavar="[MODEL]",
        help="A Hugging Face folder, or a model of the Hub: owner/name or owner/name@revision. "
        "Default: the embedded tiny-v4.",
    ),
]
MODEL = EMBEDDED
MOST = "What most people set"
EXPERTS = "For experts"
GROUPS = {
    MOST: "model config host port device device_memory host_memory store api_key served_model_name",
    "Requests": "context_tokens running_max waiting_max priority_max strict responses_memory",
    "Who may call": "admin_key keys_file cors_origin tls_cert tls_key connections_max shutdown_s store_allow",
    "Logs and events": "log_format log_level access_log trace kv_events kv_events_replay",
    "The cache": "page_tokens format save evict tail_every_pages replay fetch fetch_deadline_s"
    " share store_required",
    "Guesses": "speculate draft draft_tokens_max",
    "The traffic": "batch one_at_a_time session_every requests text_tokens",
    "Rates and prices": "prefill_rate token_time link_rate store_rate device_price host_price store_price",
    "Other servers": "peer share_pages share_key share_mooncake role prefill_wait_s",
}
"""Options of each group of the help, in this order. All others are for experts."""
_PLACES = {name: at for at, name in enumerate(" ".join(GROUPS.values()).split())}


def group_of(name: str) -> str:
    return next((title for title, names in GROUPS.items() if name in names.split()), EXPERTS)


NamedModel = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="The same as MODEL.", rich_help_panel=MOST),
]
PREFIX = "TIERCEL_"
"""Of a variable of the environment that gives an option its value."""
SIZE = "SIZE"
"""What the help calls a value such as 40GiB or 4096."""
UNITS = {"GiB": 1024**3, "MiB": 1024**2}
PIPE_WIDTH = 120
"""Columns of a table that is not printed to a terminal."""
Command = Callable[..., None]


def with_settings(
    *kinds: type, without: tuple[str, ...] = (), **defaults: str
) -> Callable[[Command], Command]:
    """Adds the settings of these classes to a command as options. They are the command's last parameter.

    `without`: settings that are not options of this command. `defaults`: sizes other than the class's.
    """

    def decorate(command: Command) -> Command:
        hints = get_type_hints(command, include_extras=True)
        parameters = signature(command).parameters.values()
        *own, taken = [each.replace(annotation=hints[each.name]) for each in parameters]
        options = [_option(kind, each, defaults) for kind in kinds for each in _settings(kind)]
        options = [option for option in options if option.name not in without]
        options.sort(key=lambda option: _PLACES.get(option.name, len(_PLACES)))
        names = {option.name for option in options}

        @wraps(command)
        def run(**values: Any) -> None:
            _check_environment(each.annotation for each in (*own, *options))
            settings = {name: values.pop(name) for name in names}
            command(**values, **{taken.name: settings})

        run.__signature__ = Signature([*own, *options])  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in (*own, *options)}
        return run

    return decorate


def made(kind: type[T], settings: dict[str, Any], **more: Any) -> T:
    """An object of one class, from the user's settings and `more` values that are not options."""
    values = {}
    for each in _settings(kind):
        name = _name(each)
        if name not in settings:
            continue
        value = settings[name]
        if "memory" in each.metadata:
            value = None if value is None else parse_bytes(value, f"--{name.replace('_', '-')}")
        values[each.name] = tuple(value or ()) if isinstance(each.default, tuple) else value
    return kind(**values, **more)


def _settings(kind: type) -> Iterator[Field[Any]]:
    return (each for each in fields(kind) if "help" in each.metadata)


def _name(each: Field[Any]) -> str:
    return str(each.metadata.get("option", each.name))


def _check_environment(annotations: Iterable[Any]) -> None:
    """Refuse an empty variable: it would count as not set, and a server without a key would be open."""
    for name in _variables(annotations):
        if not os.environ.get(name, "unset").strip():
            raise ConfigError(name, os.environ[name], "must not be empty; unset it, or give it a value")


def unread_variables(command: Command) -> Iterator[str]:
    """Variables of the environment that look like options, and that no option of a command reads."""
    every = {*_variables(each.annotation for each in signature(command).parameters.values())}
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in every:
            near = get_close_matches(name, every, n=1)
            yield f"{name} (meant: {near[0]}?)" if near else name


def _variables(annotations: Iterable[Any]) -> Iterator[str]:
    """The variables that options of these types are read from."""
    for each in annotations:
        for about in getattr(each, "__metadata__", ()):
            if (name := getattr(about, "envvar", None)) is not None:
                yield name


def env_name(option: str) -> str:
    """The variable of the environment that gives an option its value. A list has blanks between values."""
    return f"{PREFIX}{option.upper()}"


def _option(kind: type, each: Field[Any], defaults: dict[str, str]) -> Parameter:
    name, rules = _name(each), each.metadata
    default: Any = each.default
    kept_as = get_type_hints(kind)[each.name]
    if "memory" in rules:
        if default is not None:
            default = next(
                (f"{default // size}{unit}" for unit, size in UNITS.items() if default >= size), "0"
            )
        kept_as, default = str | None, defaults.get(name, default)
    elif isinstance(default, tuple):
        kept_as, default = list[str] | None, None
    choices = f" {', '.join(rules['one_of'])}." if "one_of" in rules else ""
    flag = [rules["flag"]] if "flag" in rules else []
    option = typer.Option(
        *flag,
        help=rules["help"] + choices,
        envvar=env_name(name),
        show_default=rules.get("otherwise", True if default not in (None, ()) else "none"),
        rich_help_panel=group_of(name),
        metavar=SIZE if "memory" in rules else None,
    )
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kept_as, option])
