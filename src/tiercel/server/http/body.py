"""The body of a request: the types of its fields, and how it is read, parsed and validated.

FastAPI does not read it, because here it is read after the key was checked, its bytes are counted while they
arrive, and only strict JSON is accepted (no NaN, no half characters, no numbers in quotes). Every error names
the field. pydantic checks the limits that are fixed. Limits that depend on the server (`x-limit`) are checked
by `asks`, and `schema` writes them into the OpenAPI schema.

No body can keep the server busy for long. Its values are counted before they are built, no list is walked
beyond its limit or behind its first mistake, and a large body is parsed and checked beside the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, from_json
from starlette.requests import ClientDisconnect, Request

from tiercel.server.http.border import ID_PATTERN, NAMES_TOLD, visit_of
from tiercel.server.http.errors import ApiError, ClientGone, refusal
from tiercel.server.http.known import ANY, Known

Checked = TypeVar("Checked", bound=BaseModel)
T = TypeVar("T")

UNSUPPORTED = "unsupported"
"""The error type for a field that is known and not supported."""

LARGE_BYTES = 16 << 10
"""A larger body is worked on in a thread. One of this size takes 3 ms on the event loop at worst: 500
messages (a 2 GHz core, November 2026). A thread costs 0.1 ms."""

TOP_LOGPROBS_MAX = 20
SALT_CHARS_MAX = 256
BIAS_TOKENS_MAX = 1024
STOP_TOKENS_MAX = 1024
METADATA_MAX = 64
"""OpenAI allows 16."""

EACH_MAX = 1024
"""The most values of a field that has one for each prompt. How many prompts a server takes is its own
limit."""

DETAILS_MAX = 64
"""How many errors of a body are looked at, to report one. An object has few fields, and of a list only the
first mistake counts, so there are hardly ever more."""


class Body(BaseModel):
    """A request, or an object in one. Types are strict: "5" is not 5.

    A field in `known` is not supported: it may only have a value that changes nothing. An unknown field is an
    error; if the validation's context is a set, the field's name is added to it instead.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    known: ClassVar[Known] = {}

    @model_validator(mode="before")
    @classmethod
    def _only_served(cls, data: Any, info: ValidationInfo) -> Any:
        names = _names(cls)
        if not isinstance(data, dict) or data.keys() <= names:
            return data
        served, refused = {}, False
        for name, value in data.items():
            if name in names:
                served[name] = value
            elif name in cls.known:
                cls._check_known(name, value)
            elif info.context is not None:
                if len(info.context) < NAMES_TOLD:
                    info.context.add(name)
            elif not refused:  # pydantic refuses it; one such error is enough
                served[name], refused = value, True
        return served

    @classmethod
    def _check_known(cls, name: str, value: Any) -> None:
        accepted = [None, *cls.known[name]]
        # In JSON, unlike in Python, false is not 0 and true is not 1.
        same = (isinstance(value, bool) == isinstance(each, bool) and value == each for each in accepted)
        if cls.known[name] != ANY and not any(same):
            context = {"only": " or ".join(map(json.dumps, accepted)), "field": name}
            raise PydanticCustomError(UNSUPPORTED, "this server supports only {only}", context)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        own = handler.resolve_ref_schema(schema)
        known = {
            name: {} if neutral == ANY else {"enum": [None, *neutral]} for name, neutral in cls.known.items()
        }
        own["properties"] = known | own.get("properties", {})
        own["x-limit"] = {"additionalProperties": "unknown_fields"}
        return schema


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    """The names of a model's fields in JSON."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def limit(**keywords: str) -> FieldInfo:
    """JSON schema keywords with the name of a server's limit: `limit(maximum="n")`."""
    info: FieldInfo = Field(json_schema_extra={"x-limit": dict(keywords)})
    return info


def few(most: int) -> BeforeValidator:
    """A validator for a list, or an object with any names: checks the length before the values. (pydantic
    does it afterwards.)"""

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > most:
            counts = {"count": len(value), "most": most}
            raise PydanticCustomError("too_long", "has {count} values, {most} are allowed", counts)
        return value

    return BeforeValidator(check)


ListOf = Annotated[list[T], Field(fail_fast=True)]
SomeOf = Annotated[list[T], Field(fail_fast=True, min_length=1)]
EachOf = Annotated[list[T], Field(fail_fast=True), few(EACH_MAX)]

TokenId = Annotated[int, Field(ge=0), limit(maximum="token_id")]
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Written = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Written], Field(min_length=1, fail_fast=True), limit(maxItems="batch")]
TokenLists = Annotated[list[Tokens], Field(min_length=1, fail_fast=True), limit(maxItems="batch")]

StopText = Annotated[str, Field(min_length=1), limit(maxLength="stop_chars")]
Stop = StopText | Annotated[list[StopText], Field(fail_fast=True), limit(maxItems="stop")]
StopTokens = Annotated[ListOf[TokenId], Field(max_length=STOP_TOKENS_MAX), few(STOP_TOKENS_MAX)]

TokenCount = Annotated[int, Field(ge=0), limit(maximum="context_tokens")]
Count = Annotated[int, Field(ge=1), limit(maximum="n")]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Priority = Annotated[
    int, Field(ge=-(2**31), lt=2**31), limit(minimum="priority_least", maximum="priority_most")
]
RequestId = Annotated[str, Field(pattern=ID_PATTERN)]
Salt = Annotated[str, Field(max_length=SALT_CHARS_MAX)]

Share = Annotated[float, Field(ge=0, le=1)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Repetition = Annotated[float, Field(gt=0, le=2)]
TopLogprobs = Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)]

BiasKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Bias = Annotated[
    dict[BiasKey, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=BIAS_TOKENS_MAX, json_schema_extra={"additionalProperties": False}),
    few(BIAS_TOKENS_MAX),
]
Metadata = Annotated[dict[str, str], Field(max_length=METADATA_MAX), few(METADATA_MAX)]


class DrawingFields(Body):
    """How tokens are drawn, with one name in every call."""

    stop_token_ids: StopTokens | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: Bias | None = None


class SamplingFields(DrawingFields):
    """The same, and when to stop: for calls that say it as OpenAI's and SGLang's do."""

    n: Count | None = None
    stop: Stop | None = None
    no_stop_trim: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None


Run = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs work on a body: in a thread, if the visit says that the body is large."""


@dataclass(frozen=True)
class BodyLimits:
    """How much a body may have."""

    bytes_max: int
    numbers_max: int = 1 << 17
    others_max: int = 1 << 17
    """Objects, lists, strings and names of fields. 131,072: 26,000 messages, or tools with large schemas.

    Parsing holds the interpreter, 50 to 400 ns for each of them: with these numbers 60 ms at most, and with
    a million numbers (token ids of the longest prompts) as much again (`benchmarks.hostile_bodies`)."""


async def read_body(
    request: Request, model: type[Checked], limits: BodyLimits, run: Run, *, strict: bool = True
) -> Checked:
    """The validated body. Unknown fields are refused if `strict`, or else noted in the visit.

    The visit also notes whether the body is large, before the work is `run`.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # This also stops a web page from posting without a CORS preflight.
        raise refusal("content-type", kind, "must be application/json")
    ignored: set[str] = set()
    visit = visit_of(request)
    raw = await _read(request, limits.bytes_max)
    visit.large = len(raw) > LARGE_BYTES
    body: Checked = await run(partial(parse, raw, model, limits, None if strict else ignored))
    visit.ignored = sorted(ignored)
    return body


async def _read(request: Request, bytes_max: int) -> bytes:
    too_large = ApiError(413, f"the body is longer than {bytes_max:,} B", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > bytes_max:
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


def check_count(raw: bytes, limits: BodyLimits) -> None:
    """Refuses JSON with too many values. Only its punctuation is counted: nothing is built."""
    numbers, others = limits.numbers_max, limits.others_max
    least = min(numbers, others)
    if len(raw) <= least or sum(map(raw.count, (b"{", b"[", b",", b'"'))) <= least:
        return  # the punctuation in texts is counted as well, and yet there is little
    # Without escapes every quotation mark begins or ends a string, so every second piece is outside.
    bare = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    strings = bare.count(b'"') // 2
    if strings <= others:
        outside = b"".join(bare.split(b'"')[::2])
        within = strings + outside.count(b"{") + outside.count(b"[") <= others
        if within and outside.count(b",") <= numbers + others:
            return
    message = f"the body has more than {others:,} objects, lists, strings and names, or {numbers:,} numbers"
    raise ApiError(413, message, code="request_too_large")


def parse(raw: bytes, model: type[Checked], limits: BodyLimits, ignored: set[str] | None) -> Checked:
    """Parse and validate. Unknown fields are added to `ignored`; None: they are refused."""
    check_count(raw, limits)
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    try:
        return model.model_validate(data, context=ignored)
    except ValidationError:
        return checked(_whole(data), model, ignored)


def checked(data: Any, model: type[Checked], ignored: set[str] | None = None) -> Checked:
    """Validate data that is no longer JSON, as `parse` does."""
    try:
        return model.model_validate(data, context=ignored)
    except ValidationError as error:
        raise _complaint(error.errors(include_url=False)[:DETAILS_MAX], data) from error


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
    meant = [detail for detail, place in zip(details, places, strict=True) if place[0] == path]
    kinds = {detail["type"] for detail in meant}
    if kinds == {"extra_forbidden"}:
        message = f"{names} is not a field of this call"
        return ApiError(400, message, param=names, code="unknown_parameter")
    if kinds == {"missing"}:
        return ApiError(400, f"{names} is missing", param=names, code="missing_required_parameter")
    messages = " or ".join(dict.fromkeys(detail["msg"] for detail in meant))
    code = "unsupported_parameter" if UNSUPPORTED in kinds else "invalid_value"
    return refusal(names or "body", value, messages, code)


def _place(detail: ErrorDetails, data: Any) -> tuple[tuple[str | int, ...], Any]:
    """The path of the error in the data, and the value there. pydantic's location also names union members:
    they are not in the data and are left out."""
    path: list[str | int] = []
    # An error of `Body` has the location of the object; the field's name is in its context.
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
