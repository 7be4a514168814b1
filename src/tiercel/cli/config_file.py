"""`tiercel serve --config tiercel.toml`: options from a file, by the names they have on the command line.

command line  before  environment (TIERCEL_PORT)  before  file (port = 8000)  before  default
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import typer

from tiercel.cli.options import MOST, SIZE
from tiercel.errors import ConfigError

OWN_NAME = "config"
OWN = {OWN_NAME, "named"}
"""Options that a file can not set."""


class Kind(NamedTuple):
    """What an option takes."""

    types: tuple[type, ...]
    what: str
    repeated: bool = False


BY_TYPE = {
    bool: Kind((bool,), "true or false"),
    int: Kind((int,), "a whole number"),
    float: Kind((int, float), "a number"),
}
TEXT = Kind((str,), "a text in quotes")
SIZES = Kind((str, int), "a size, as a text in quotes or a whole number")


def kind_of(annotation: Any) -> Kind:
    """What a parameter of a command takes: `Annotated[int | None, typer.Option(…)]`."""
    kept_as, about = get_args(annotation)[:2]
    if about.metavar == SIZE:
        return SIZES
    types = {kept_as, *get_args(kept_as)}
    found = next((kind for each, kind in BY_TYPE.items() if each in types), TEXT)
    return found._replace(repeated=any(get_origin(each) is list for each in types))


def read_config(path: Path, options: Mapping[str, Kind]) -> dict[str, Any]:
    """The values of a file by the names of `options`, with underscores. Types are TOML's: "5" is not 5, and
    "yes" is not true.

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
        values[option] = _checked(path, name, value, options[option])
    return values


def _nearest(name: str, options: Collection[str]) -> str:
    near = get_close_matches(name, options, n=1)
    return f"; the nearest is {near[0].replace('_', '-')}" if near else ""


def _checked(path: Path, name: str, value: Any, kind: Kind) -> Any:
    """The command line's parser would take a list as one word, and a word as a list of letters."""
    if isinstance(value, dict) or (isinstance(value, list) and not kind.repeated):
        what = "a table" if isinstance(value, dict) else "a list"
        raise ConfigError(OWN_NAME, str(path), f"{name} is {what}, but the option takes one value")
    for one in value if isinstance(value, list) else [value]:
        if type(one) not in kind.types:  # a bool is an int for `isinstance`
            raise ConfigError(OWN_NAME, str(path), f"{name} = {one!r}, but it must be {kind.what}")
    return [value] if kind.repeated and not isinstance(value, list) else value


def _use(context: typer.Context, path: Path | None) -> Path | None:
    """Called before the other options are read: the file's values become their defaults."""
    if path is not None:
        assert context.command.callback is not None
        every = signature(context.command.callback).parameters
        options = {name: kind_of(each.annotation) for name, each in every.items() if name not in OWN}
        context.default_map = read_config(path, options)
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
        rich_help_panel=MOST,
        show_default="none",
    ),
]
