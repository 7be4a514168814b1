"""Error answers: one shape, OpenAI's, for every call but Anthropic's.

{"error": {"message": …, "type": …, "param": the field, "code": for programs}}
{"type": "error", "error": {"type": …, "message": …, "param": …, "code": …}}      /v1/messages

InputError          400   names the field and what is wrong with it
LengthError         400   a text is too long
CancelledError      503   the server is shutting down
QueueFull           429   with Retry-After
EngineError         503   the engine has failed; nothing is served until a restart
ApiError            its own status
HTTPException       404, 405 of the routes
anything else       500   a bug: logged once, no details for the client
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tiercel.errors import EngineError, InputError, LengthError, QueueFull, TiercelError

log = logging.getLogger("tiercel.server")

SHOWN_CHARS = 200
"""How much of a wrong value a message repeats: enough to recognise it, not a whole prompt."""


KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
ANTHROPIC_KINDS = KINDS | {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}

MESSAGES_PATH = "/v1/messages"
"""Anthropic's calls: their errors have Anthropic's shape."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error answer."""

    error: ErrorDetail


class ApiError(TiercelError):
    """An error answer, ready to be sent."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> Response:
        """`path`: the call's, which decides about the shape."""
        body = anthropic_body(self) if path.startswith(MESSAGES_PATH) else self.body()
        # ASCII escapes: a message may quote bytes that are not UTF-8.
        return Response(json.dumps(body), self.status, self.headers, "application/json")


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    kind = ANTHROPIC_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    fields = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
    return {"type": "error", "error": fields}


class ClientGone(TiercelError):
    """The client has closed its connection."""


def shown(value: object) -> str:
    """A value for a message, cut to `SHOWN_CHARS`."""
    text = repr(value[:SHOWN_CHARS] if isinstance(value, str | list | tuple) else value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"


def refusal(param: str, value: object, why: str, code: str = "invalid_value") -> ApiError:
    """A field that can not be used as given."""
    return ApiError(400, f"{param} = {shown(value)}: {why}", param=param, code=code)


def conflict(param: str, value: object, why: str) -> ApiError:
    """A field that is valid alone but not with another field or request. No schema can express this."""
    return refusal(param, value, why, code="conflicting_values")


def translate(error: Exception | asyncio.CancelledError) -> ApiError:
    """The error answer for an exception. Unexpected errors are logged here, and only here."""
    match error:
        case ApiError():
            return error
        case asyncio.CancelledError():
            return ApiError(503, "the server is shutting down", code="aborted")
        case LengthError():
            least = f"{error.field} has at least {error.tokens} tokens"
            message = f"{least}, but the context is {error.tokens_max} tokens long"
            return ApiError(400, message, param=error.field, code="context_length_exceeded")
        case QueueFull():
            headers = {"retry-after": str(error.retry_after_s)}
            return ApiError(429, str(error), code="queue_full", headers=headers)
        case EngineError():
            return ApiError(503, str(error), code="engine_failed")
        case InputError():
            return refusal(error.field, error.value, error.why)
        case RequestValidationError():
            first = error.errors()[0]
            return refusal(str(first["loc"][-1]), first.get("input"), first["msg"])
        case HTTPException():
            reason = HTTPStatus(error.status_code).phrase
            code = reason.lower().replace(" ", "_")
            return ApiError(error.status_code, reason, code=code, headers=error.headers)
    log.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; see the server's log", code="internal_error")


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=499)
    return translate(error).response(request.url.path)


def install(app: FastAPI) -> None:
    for kind in (TiercelError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer)
