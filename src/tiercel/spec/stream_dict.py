"""A stream as a plain dict, and back: the form of specs in JSON, and of their hash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.errors import SpecError
from tiercel.spec.stream import Keep, Part, Prefix, State, Stream, Window


def stream_to_dict(stream: Stream) -> dict[str, Any]:
    data = {
        "name": stream.name,
        "layers": list(stream.layers),
        "parts": {part.name: part.bytes for part in stream.parts},
        "keep": _keep_to_dict(stream.keep),
        "tokens_per_entry": stream.tokens_per_entry,
        "row_align": stream.row_align,
        "encoding": stream.encoding,
    }
    extras = ("rope", "group", "weights", "selected")
    data |= {name: value for name in extras if (value := getattr(stream, name))}
    if stream.encoding == "opaque":
        del data["encoding"]  # the form of an opaque stream has no such key, and must stay as it is
    return data


def stream_from_dict(where: str, data: Mapping[str, Any]) -> Stream:
    optional = {"keep", "tokens_per_entry", "row_align", "encoding", "rope", "group", "weights", "selected"}
    check_keys(where, data, {"name", "layers", "parts"}, optional=optional)
    check_list(f"{where}.layers", data["layers"])
    if not isinstance(data["parts"], Mapping):
        raise SpecError(f"{where}.parts", data["parts"], "must map part names to bytes")
    parts = tuple(Part(name, size) for name, size in data["parts"].items())
    keep = _keep_from_dict(f"{where}.keep", data.get("keep", "prefix"))
    return Stream(**{**data, "layers": tuple(data["layers"]), "parts": parts, "keep": keep})


def check_keys(where: str, data: Mapping[str, Any], required: set[str], *, optional: set[str]) -> None:
    if not isinstance(data, Mapping):
        raise SpecError(where, data, "must be an object")
    for key in sorted(required - data.keys()):
        raise SpecError(f"{where}.{key}", None, "is missing")
    for key in sorted(data.keys() - required - optional):
        raise SpecError(f"{where}.{key}", data[key], "is not a field of a spec")


def check_list(where: str, data: object) -> None:
    if not isinstance(data, list | tuple):
        raise SpecError(where, data, "must be a list")


def _keep_to_dict(keep: Keep) -> Any:
    match keep:
        case Prefix():
            return "prefix"
        case Window(tokens):
            return {"window": tokens}
        case State(entries, span):
            return {"state": entries, "span": span}


def _keep_from_dict(where: str, data: Any) -> Keep:
    match data:
        case "prefix":
            return Prefix()
        case {"window": int(tokens), **rest} if not rest:
            return Window(tokens)
        case {"state": int(entries), **rest} if rest.keys() <= {"span"}:
            span: Any = rest.get("span")  # checked by Stream
            return State(entries, span)
    forms = '"prefix", {"window": tokens}, {"state": entries, "span": tokens}'
    raise SpecError(where, data, f"is none of {forms}")
