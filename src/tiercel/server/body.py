"""The body of a request: read within a limit, parsed, checked; every complaint names the field.

It is read here and not by the framework: after the key was checked, counted while it arrives, and as JSON
alone (no NaN, no half characters, no numbers in quotes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect, Request

from tiercel.server.border import visit_of
from tiercel.server.errors import ApiError, ClientGone, refusal

Model = TypeVar("Model", bound=BaseModel)

UNSUPPORTED = "unsupported"
"""The kind of complaint about a field that this server knows of and does not serve."""


async def read_body(request: Request, model: type[Model], bytes_max: int, *, strict: bool = True) -> Model:
    """The body as a checked value. Fields that nobody knows are refused, or else noted in the visit."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also what keeps a web page from posting here without the browser asking first.
        raise refusal("content-type", kind, "must be application/json")
    ignored: set[str] = set()
    body = parse(await _read(request, bytes_max), model, None if strict else ignored)
    visit_of(request).ignored = sorted(ignored)
    return body


async def _read(request: Request, bytes_max: int) -> bytes:
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told) > bytes_max:
        raise _too_large(bytes_max)
    raw = bytearray()
    try:
        async for piece in request.stream():
            raw += piece
            if len(raw) > bytes_max:
                raise _too_large(bytes_max)
    except ClientDisconnect as gone:
        raise ClientGone from gone
    return bytes(raw)


def _too_large(bytes_max: int) -> ApiError:
    return ApiError(413, f"the body is longer than {bytes_max:,} B", code="request_too_large")


def parse(raw: bytes, model: type[Model], ignored: set[str] | None) -> Model:
    """`ignored` is filled with unknown fields; None: they are refused."""
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    try:
        return model.model_validate(data, context=ignored)
    except ValidationError:
        data = _whole(data)
    try:
        return model.model_validate(data, context=ignored)
    except ValidationError as error:
        raise _complaint(error.errors(include_url=False), data) from error


def _whole(data: Any) -> Any:
    """5.0 is a whole number in JSON. Rare, so it is looked for only when something was wrong."""
    match data:
        case float() if data.is_integer():
            return int(data)
        case dict():
            return {name: _whole(value) for name, value in data.items()}
        case list():
            return [_whole(value) for value in data]
    return data


def _complaint(details: Sequence[ErrorDetails], data: Any) -> ApiError:
    """One field, and all that is said about it.

    A union complains once per member: the deepest and furthest is of the member that was meant.
    """
    paths = [_path(detail, data) for detail in details]
    deepest = max(paths, key=lambda path: (len(path), [name for name in path if isinstance(name, int)]))
    names = _spelled(deepest)
    told = [detail for detail, path in zip(details, paths, strict=True) if path == deepest]
    kinds = {detail["type"] for detail in told}
    if kinds == {"extra_forbidden"}:
        message = f"{names} is not a field of this call"
        return ApiError(400, message, param=names, code="unknown_parameter")
    if kinds == {"missing"}:
        return ApiError(400, f"{names} is missing", param=names, code="missing_required_parameter")
    messages = " or ".join(dict.fromkeys(detail["msg"] for detail in told))
    code = "unsupported_parameter" if UNSUPPORTED in kinds else "invalid_value"
    return refusal(names or "body", _at(data, deepest), messages, code)


def _path(detail: ErrorDetails, data: Any) -> tuple[str | int, ...]:
    """Where in the data it is. A location also names members of unions: what is not in the data is that."""
    path: list[str | int] = []
    here = data
    # A complaint of `fields.Body` is about the part of the request, and names the field beside it.
    loc = (*detail["loc"], detail["ctx"]["field"]) if detail["type"] == UNSUPPORTED else detail["loc"]
    for position, name in enumerate(loc):
        last = position == len(loc) - 1
        if _has(here, name):
            here = here[name]
        elif not (last and detail["type"] == "missing"):
            continue
        path.append(name)
    return tuple(path)


def _at(data: Any, path: Sequence[str | int]) -> Any:
    for name in path:
        data = data[name]
    return data


def _has(data: Any, name: str | int) -> bool:
    if isinstance(name, int):
        return isinstance(data, list) and name < len(data)
    return isinstance(data, dict) and name in data


def _spelled(path: Sequence[str | int]) -> str:
    """("messages", 0, "content") → messages[0].content"""
    words = [f"[{name}]" if isinstance(name, int) else f".{name}" for name in path]
    return "".join(words).removeprefix(".")
