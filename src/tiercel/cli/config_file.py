"""`tiercel serve --config tiercel.toml`: options from a file, by the names they have on the command line.

command line  before  environment (TIERCEL_PORT)  before  file (port = 8000)  before  default
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from tiercel.errors import ConfigError

OWN_NAME = "config"


def read_config(path: Path, options: Mapping[str, bool]) -> dict[str, Any]:
    """The values of a file by the names of options, with underscores. `options`: may each be repeated?

    Required of the caller: it checks the values, as it checks those of the command line.
    """
    try:
        written = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(OWN_NAME, str(path), f"can not be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(OWN_NAME, str(path), f"is not TOML: {error}") from error
    values: dict[str, Any] = {}
    for name, value in written.items():
        option = name.replace("-", "_")
        if option not in options:
            raise ConfigError(OWN_NAME, str(path), f"{name} is not an option{_nearest(option, options)}")
        if option in values:
            raise ConfigError(OWN_NAME, str(path), f"{name} is there twice, with a dash and an underscore")
        values[option] = _checked(path, name, value, repeated=options[option])
    return values


def _nearest(name: str, options: Collection[str]) -> str:
    near = get_close_matches(name, options, n=1)
    return f"; the nearest is {near[0].replace('_', '-')}" if near else ""


def _checked(path: Path, name: str, value: Any, *, repeated: bool) -> Any:
    """The parser of the command line would take a list as one word, and a word as a list of letters."""
    if isinstance(value, dict) or (isinstance(value, list) and not repeated):
        what = "a table" if isinstance(value, dict) else "a list"
        raise ConfigError(OWN_NAME, str(path), f"{name} is {what}, but the option takes one value")
    return [value] if repeated and not isinstance(value, list) else value


def _use(context: typer.Context, path: Path | None) -> Path | None:
    """Called before the other options are read: what the file says is their default from now on."""
    if path is not None:
        options = {
            each.name: getattr(each, "multiple", False) for each in context.command.params if each.name
        }
        own = {OWN_NAME, "named"}
        context.default_map = read_config(path, {name: options[name] for name in options if name not in own})
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        f"--{OWN_NAME}",
        metavar="FILE",
        help="A TOML file with options: port = 8000. The command line and the environment go first.",
        envvar="TIERCEL_CONFIG",
        callback=_use,
        is_eager=True,
    ),
]
