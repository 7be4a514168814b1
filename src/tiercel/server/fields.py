"""Types of the request fields that several calls share.

pydantic checks the limits that are fixed. Limits that depend on the server (`x-limit`) are checked by `asks`,
and `schema` writes them into the OpenAPI schema.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationInfo, model_validator
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from tiercel.server.body import UNSUPPORTED
from tiercel.server.border import ID_PATTERN
from tiercel.server.known import ANY, Known

TOP_LOGPROBS_MAX = 20
SALT_CHARS_MAX = 256
BIAS_TOKENS_MAX = 1024


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
        if not isinstance(data, dict) or data.keys() <= cls.model_fields.keys():
            return data
        served = {}
        for name, value in data.items():
            if name in cls.model_fields:
                served[name] = value
            elif name in cls.known:
                cls._check_known(name, value)
            elif info.context is None:
                served[name] = value  # pydantic refuses it
            else:
                info.context.add(name)
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


def limit(**keywords: str) -> FieldInfo:
    """JSON schema keywords with the name of a server's limit: `limit(maximum="n")`."""
    info: FieldInfo = Field(json_schema_extra={"x-limit": dict(keywords)})
    return info


TokenId = Annotated[int, Field(ge=0), limit(maximum="token_id")]
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Written = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Written], Field(min_length=1, fail_fast=True), limit(maxItems="batch")]
TokenLists = Annotated[list[Tokens], Field(min_length=1, fail_fast=True), limit(maxItems="batch")]

StopText = Annotated[str, Field(min_length=1), limit(maxLength="stop_chars")]
Stop = StopText | Annotated[list[StopText], limit(maxItems="stop")]

MaxTokens = Annotated[int, Field(ge=0), limit(maximum="context_tokens")]
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
]


class SamplingFields(Body):
    """How tokens are drawn and when to stop: fields with one name in every call."""

    n: Count | None = None
    stop: Stop | None = None
    stop_token_ids: list[TokenId] | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: Bias | None = None
