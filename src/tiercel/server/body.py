"""The body of a request: read up to a limit, parsed and validated. Every error names the field.

FastAPI does not read it, because here it is read after the key was checked, its bytes are counted while they
arrive, and only strict JSON is accepted (no NaN, no half characters, no numbers in quotes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect, Request

from tiercel.server.border import visit_of
from tiercel.server.errors import ApiError, ClientGone, refusal

Checked = TypeVar("Checked", bound=BaseModel)

UNSUPPORTED = "unsupported"
"""The error type for a field that is known and not supported."""


async def read_body(
    request: Request, model: type[Checked], bytes_max: int, *, strict: bool = True
) -> Checked:
    """The validated body. Unknown fields are refused if `strict`, or else noted in the visit."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # This also stops a web page from posting without a CORS preflight.
        raise refusal("content-type", kind, "must be application/json")
    ignored: set[str] = set()
    body = parse(await _read(request, bytes_max), model, None if strict else ignored)
    visit_of(request).ignored = sorted(ignored)
    return body


async def _read(request: Request, bytes_max: int) -> bytes:
    too_large = ApiError(413, f"the body is longer than {bytes_max:,} B", code="request_too_large")
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told) > bytes_max:
        raise too_large
    raw = bytearray()
    try:
        async for piece in request.stream():
            raw += piece
            if len(raw) > bytes_max:
                raise too_large
    except ClientDisconnect as gone:
        raise ClientGone from gone
    return bytes(raw)


def parse(raw: bytes, model: type[Checked], ignored: set[str] | None) -> Checked:
    """Unknown fields are added to `ignored`; None: they are refused."""
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
    """Turns 5.0 into 5: JSON has one kind of number. It is rare, so it is tried only after an error."""
    match data:
        case float() if data.is_integer():
            return int(data)
        case dict():
            return {name: _whole(value) for name, value in data.items()}
        case list():
            return [_whole(value) for value in data]
    return data


def _complaint(details: Sequence[ErrorDetails], data: Any) -> ApiError:
    """One error about one field.

    A union gives an error for each member. The deepest and last path belongs to the member that was meant.
    """
    places = [_place(detail, data) for detail in details]
    path, value = max(places, key=lambda each: (len(each[0]), [n for n in each[0] if isinstance(n, int)]))
    names = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in path).removeprefix(".")
    told = [detail for detail, place in zip(details, places, strict=True) if place[0] == path]
    kinds = {detail["type"] for detail in told}
    if kinds == {"extra_forbidden"}:
        message = f"{names} is not a field of this call"
        return ApiError(400, message, param=names, code="unknown_parameter")
    if kinds == {"missing"}:
        return ApiError(400, f"{names} is missing", param=names, code="missing_required_parameter")
    messages = " or ".join(dict.fromkeys(detail["msg"] for detail in told))
    code = "unsupported_parameter" if UNSUPPORTED in kinds else "invalid_value"
    return refusal(names or "body", value, messages, code)


def _place(detail: ErrorDetails, data: Any) -> tuple[tuple[str | int, ...], Any]:
    """The path of the error in the data, and the value there. pydantic's location also names union members:
    they are not in the data and are left out."""
    path: list[str | int] = []
    # An error of `fields.Body` has the location of the object; the field's name is in its context.
    loc = (*detail["loc"], detail["ctx"]["field"]) if detail["type"] == UNSUPPORTED else detail["loc"]
    for left, name in zip(range(len(loc) - 1, -1, -1), loc, strict=True):
        if isinstance(data, list if isinstance(name, int) else dict):
            try:
                data = cast(Any, data)[name]
            except LookupError:
                if left or detail["type"] != "missing":
                    continue
            path.append(name)
    return tuple(path), data
