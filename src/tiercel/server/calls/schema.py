"""The OpenAPI schema, with this server's limits.

FastAPI does not know the request models, because `body` reads the requests: they are added here. Each
`x-limit` (see `body`) is replaced by this server's number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tiercel.server.calls.reply import Api
from tiercel.server.http.errors import ErrorBody

STREAM = "text/event-stream"
"""The media type of a call that can stream its answer."""

REF = "#/components/schemas/{model}"

Responses = dict[int | str, dict[str, Any]]


class Reads(dict[str, Any]):
    """For a route's `openapi_extra`: the call reads a body of this model."""

    def __init__(self, model: type[BaseModel]) -> None:
        content = {"application/json": {"schema": {"$ref": REF.format(model=model.__name__)}}}
        super().__init__(requestBody={"required": True, "content": content})
        self.model = model


def gives(
    model: Any, *problems: int, media_type: str | None = None, error: type[BaseModel] = ErrorBody
) -> Responses:
    """The `responses` of a route: the model, perhaps another media type, and the error codes.

    Errors are references: FastAPI would build a validator for each, which took most of the time to make an
    application. `install` has their models.
    """
    answer: dict[str, Any] = {"description": "The answer"}
    if model is not None:
        answer["model"] = model
    if media_type is not None:
        answer["content"] = {media_type: {}}
    responses: Responses = {200: answer}
    for status in (*problems, 500):
        content = {"application/json": {"schema": {"$ref": REF.format(model=error.__name__)}}}
        responses[status] = {"content": content, "description": HTTPStatus(status).phrase}
    return responses


def limits_of(api: Api) -> dict[str, Any]:
    service, options = api.service, api.options
    return {
        "batch": options.batch_max,
        "context_tokens": service.context_tokens,
        "models": list(api.names_accepted),
        "n": options.n_max,
        "stop": options.stop_max,
        "priority_least": -options.priority_max,
        "priority_most": options.priority_max,
        "stop_chars": options.stop_chars_max,
        "token_id": service.vocab_size - 1,
        "unknown_fields": not options.strict,
    }


def can_stream(route: APIRoute) -> bool:
    """Whether a call gives tokens: then it can also stream them."""
    return STREAM in route.responses.get(200, {}).get("content", {})


def bodies_of(routes: Sequence[APIRoute]) -> list[type[BaseModel]]:
    """The models of all bodies."""
    extras = (route.openapi_extra for route in routes)
    return list(dict.fromkeys(extra.model for extra in extras if isinstance(extra, Reads)))


def install(app: FastAPI, models: list[type[BaseModel]], limits: Mapping[str, Any]) -> None:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app, models, limits)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _schema(app: FastAPI, models: list[type[BaseModel]], limits: Mapping[str, Any]) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    _, requests = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    schema["components"]["schemas"] |= requests["$defs"]
    for operations in schema["paths"].values():
        for operation in operations.values():
            # FastAPI's validation error; this server answers 400.
            if operation["responses"].pop("422", None):
                operation["responses"].setdefault("400", operation["responses"]["500"])
    for unused in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(unused, None)
    _fill(schema, limits)
    return schema


def _fill(node: Any, limits: Mapping[str, Any]) -> None:
    """Replaces every `x-limit` in `node`."""
    if isinstance(node, dict):
        for keyword, name in node.pop("x-limit", {}).items():
            node[keyword] = limits[name]
        for below in node.values():
            _fill(below, limits)
    elif isinstance(node, list):
        for below in node:
            _fill(below, limits)
