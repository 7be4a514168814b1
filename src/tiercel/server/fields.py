"""Fields that several calls share: what may stand in a request, as types.

A limit that is known only when a server is made (`x-limit`) is written into its schema by `schema` and kept
by `asks`; all others are kept here, so that schema and server agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WrapValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from tiercel.server.body import UNSUPPORTED

TOP_LOGPROBS_MAX = 20
SALT_CHARS_MAX = 256
BIAS_TOKENS_MAX = 1024


class Body(BaseModel):
    """A request, or part of one. Unknown fields are errors, and "5" is not 5."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def limit(**keywords: str) -> FieldInfo:
    """Keywords of the schema whose values a server knows: `limit(maximum="n")`."""
    info: FieldInfo = Field(json_schema_extra={"x-limit": dict(keywords)})
    return info


def _refuse(value: Any, check: Callable[[Any], Any]) -> Any:
    try:
        return check(value)
    except ValidationError as error:
        raise PydanticCustomError(UNSUPPORTED, "is not supported by this server; leave it out") from error


T = TypeVar("T")
Only = Annotated[T, WrapValidator(_refuse)]
"""A field of which only values that change nothing are taken."""


def _constant(value: bool) -> tuple[AfterValidator, FieldInfo]:
    """Not a `Literal`: to Python 0 is False."""

    def check(given: bool) -> bool:
        if given is not value:
            raise ValueError(f"must be {value}")
        return given

    info: FieldInfo = Field(json_schema_extra={"const": value})
    return AfterValidator(check), info


No = Annotated[bool, *_constant(False)]
Yes = Annotated[bool, *_constant(True)]

Ignored = Any
"""A field that changes nothing here."""

TokenId = Annotated[int, Field(ge=0), limit(maximum="token_id")]
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Written = Annotated[str, Field(min_length=1)]

StopString = Annotated[str, Field(min_length=1), limit(maxLength="stop_chars")]
Stop = StopString | Annotated[list[StopString], limit(maxItems="stop")]

MaxTokens = Annotated[int, Field(ge=0), limit(maximum="context_tokens")]
Count = Annotated[int, Field(ge=1), limit(maximum="n")]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]
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
]
