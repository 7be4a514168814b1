"""From other calls to a chat: `responses` and `anthropic` translate their requests into a `ChatRequest`.

An error of the chat names fields of the chat. `Translated.in_clients_words` names those of the client's call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field
from pydantic_core import PydanticCustomError

from tiercel.errors import InputError
from tiercel.server.calls.protocol import ChatRequest
from tiercel.server.http.body import (
    UNSUPPORTED,
    DrawingFields,
    Priority,
    RequestId,
    Salt,
    Seed,
    TokenCount,
    checked,
    limit,
)
from tiercel.server.http.errors import ApiError, translate

Fields = dict[str, Any]

ToolName = Annotated[str, Field(pattern=r'^[^"<>\x00-\x20]{1,128}$')]


def one_of(names: Sequence[str]) -> BeforeValidator:
    """A validator for the field `type` of the object that stands for every unknown type."""

    def check(kind: Any) -> Any:
        if kind is not None and kind not in names:
            only = {"only": ", ".join(names), "field": "type"}
            raise PydanticCustomError(UNSUPPORTED, "this server supports only {only}", only)
        return kind

    return BeforeValidator(check)


def by_type(names: Sequence[str]) -> Discriminator:
    """Tells objects apart by their field `type`; the first name stands for every other type."""

    def kind(given: Any) -> str:
        found = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        return str(found) if found in names else names[0]

    return Discriminator(kind)


class PassedOn(DrawingFields):
    """Fields that a chat has too, under the same name: standard ones, and those of vLLM and SGLang."""

    model: Annotated[str, limit(enum="models")] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    seed: Seed | None = None
    min_tokens: TokenCount | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    rid: RequestId | None = None
    request_id: RequestId | None = None

    def passed_on(self) -> Fields:
        given = ((name, getattr(self, name)) for name in PassedOn.model_fields)
        return {name: value for name, value in given if value is not None}


@dataclass
class Messages:
    """Messages of a chat as they are collected, with the place in the client's call that each came from."""

    all: list[Fields] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)

    def add(self, origin: str, **message: Any) -> Fields:
        self.all.append(message)
        self.origins.append(origin)
        return message

    def assistant(self, origin: str) -> Fields:
        """A new message of the assistant. Its fields are filled in by the caller."""
        return self.add(origin, role="assistant", content=None)


@dataclass(frozen=True)
class Translated:
    """A request as a chat."""

    fields: Fields
    messages: Messages
    names: Mapping[str, str]
    """Fields of a chat that have another name in the client's call."""

    def as_chat(self) -> ChatRequest:
        try:
            return checked(self.fields | {"messages": self.messages.all}, ChatRequest)
        except ApiError as error:
            raise self.in_clients_words(error) from error

    def in_clients_words(self, error: ApiError | InputError) -> ApiError:
        """The error with the names of the client's call."""
        api = translate(error)
        if api.param is None:
            return api
        name = self._named(api.param)
        prefixed = api.message.startswith(api.param)
        message = name + api.message.removeprefix(api.param) if prefixed else api.message
        return ApiError(api.status, message, param=name, code=api.code, headers=api.headers)

    def _named(self, param: str) -> str:
        if found := re.match(r"messages\[(\d+)\]", param):
            return self.messages.origins[int(found[1])] + param[found.end() :]
        first = re.split(r"[.\[]", param)[0]
        return self.names.get(first, first) + param.removeprefix(first)
