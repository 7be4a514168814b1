"""What a client is told when something is wrong: one shape, OpenAI's, for every call.

{"error": {"message": …, "type": …, "param": the field, "code": for programs}}

InputError          400   a field that can not be used; named
LengthError         400   a text that can not fit
CancelledError      503   the server ends
QueueFull           429   with Retry-After
EngineError         503   the engine has failed; nothing is served until a restart
ApiError            as it says
HTTPException       404, 405 of the routes
anything else       500   a bug: logged once, told nothing about
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
"""Of a wrong value: enough to recognise it, and no echo of a whole prompt."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is not the one asked for."""

    error: ErrorDetail


class ApiError(TiercelError):
    """An answer other than 200, ready to be sent."""

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

    @property
    def kind(self) -> str:
        if self.status in (401, 403):
            return "authentication_error" if self.status == 401 else "permission_error"
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        # Escaped to ASCII: a header or a path may hold what UTF-8 can not.
        return Response(json.dumps(self.body()), self.status, self.headers, "application/json")


class ClientGone(TiercelError):
    """Nobody is there to read the answer."""


def shown(value: object) -> str:
    """A value in a message: short."""
    text = repr(value[:SHOWN_CHARS] if isinstance(value, str | list | tuple) else value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"


def refusal(param: str, value: object, why: str, code: str = "invalid_value") -> ApiError:
    """A field that can not be used as given."""
    return ApiError(400, f"{param} = {shown(value)}: {why}", param=param, code=code)


def conflict(param: str, value: object, why: str) -> ApiError:
    """A field that does not go with another one: what no schema can say."""
    return refusal(param, value, why, code="conflicting_values")


def unexpected() -> ApiError:
    return ApiError(500, "the server made a mistake; its log says which", code="internal_error")


def translate(error: Exception | asyncio.CancelledError) -> ApiError:
    """What a client is told about an error. What nobody foresaw is logged here, and only here."""
    match error:
        case ApiError():
            return error
        case asyncio.CancelledError():
            return ApiError(503, "the server is ending", code="aborted")
        case LengthError():
            least = f"{error.field} has at least {error.tokens} tokens"
            message = f"{least}, the longest context has {error.tokens_max}"
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
            name = str(first["loc"][-1])
            return refusal(name, first.get("input"), first["msg"])
        case HTTPException():
            reason = HTTPStatus(error.status_code).phrase
            code = reason.lower().replace(" ", "_")
            return ApiError(error.status_code, reason, code=code, headers=error.headers)
    log.error("a request failed", exc_info=error)
    return unexpected()


async def _answer(_request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=499)
    return translate(error).response()


def install(app: FastAPI) -> None:
    for kind in (
        ApiError,
        EngineError,
        QueueFull,
        InputError,
        RequestValidationError,
        HTTPException,
        ClientGone,
    ):
        app.add_exception_handler(kind, _answer)
