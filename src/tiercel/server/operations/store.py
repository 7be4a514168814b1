"""The store of a running server: attach, show, clear, detach.

    PUT     /v1/cache/store         200   400 invalid_store   409 store_attached   502 store_failed
                                          403 store_not_allowed
    GET     /v1/cache/store         200
    DELETE  /v1/cache/store         200   404 store_not_attached   502 store_failed
    POST    /v1/cache/store/clear   200   404 store_not_attached   502 store_failed

While a server starts or shuts down, the calls that change something answer 503 not_ready. All are admin calls
(`keys.admin`). The server opens a store's path or address with its own rights, so only stores that were
allowed at its start can be attached (`storage.open`). A password in a URL is never shown again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tiercel.cache.audit import StoreStats
from tiercel.errors import ConfigError, StoreError
from tiercel.server.calls import schema
from tiercel.server.calls.reply import Api
from tiercel.server.calls.schema import gives
from tiercel.server.http import keys
from tiercel.server.http.body import BodyLimits, read_body
from tiercel.server.http.errors import ApiError, refusal, shown
from tiercel.storage.open import hide, why_not

URL_CHARS_MAX = 4096
BODY_BYTES_MAX = 64 << 10


class AttachRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    url: Annotated[
        str,
        Field(
            min_length=1,
            max_length=URL_CHARS_MAX,
            description="The store's URL: file:///path?size=10GiB, redis://host:6379 …",
        ),
    ]


class StoreStatus(BaseModel):
    """The state of the store. Without a store, only `attached`."""

    model_config = ConfigDict(extra="allow")

    attached: bool
    url: str | None = Field(None, description="Without its password.")
    state: Literal["working", "off", "trying"] | None = Field(
        None, description="off: the store failed; requests go on without it until it works again."
    )
    refused: bool | None = Field(
        None, description="Whether the store did not keep the last write: it is full."
    )
    records: int | None = Field(None, description="Records in the store, up to 4 of a page; null: not known.")
    bytes: int | None = None
    read_bytes_s: float | None = Field(None, description="Recent read speed; null: not known.")
    counters: dict[str, Any] | None = None


def store_json(store: StoreStats | None) -> dict[str, Any]:
    return {"attached": True, **asdict(store)} if store else {"attached": False}


class StoreCalls:
    """The calls of one server. Calls that change something run one after the other."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.service = api.service
        self._turn = asyncio.Lock()

    async def status(self) -> Response:
        """The attached store and its state."""
        store = (await self.service.stats()).store
        return JSONResponse(store_json(store) | ({"url": self._url()} if store else {}))

    async def attach(self, request: Request) -> Response:
        """Use a store from now on. Cached pages are written to it and found again after a restart."""
        self.api.check_ready()
        url = (await read_body(request, AttachRequest, BodyLimits(BODY_BYTES_MAX), self.api.on_body)).url
        if why := why_not(url, self.api.options.store_allow):
            message = f"url = {shown(hide(url, url))}: {hide(why, url)}"
            raise ApiError(403, message, param="url", code="store_not_allowed")
        async with self._turn:
            if (await self.service.stats()).store:
                message = "a store is attached; detach it first (DELETE /v1/cache/store)"
                raise ApiError(409, message, param="url", code="store_attached")
            with _failures(url):
                await self.service.attach_store(url)
                return await self.status()

    async def detach(self) -> Response:
        """Stop using the store. It keeps its records."""
        return await self._change(self.service.detach_store)

    async def clear(self) -> Response:
        """Remove every record of the store."""
        return await self._change(self.service.clear_store)

    async def _change(self, change: Callable[[], Awaitable[None]]) -> Response:
        self.api.check_ready()
        async with self._turn:
            if not (await self.service.stats()).store:
                raise ApiError(404, "no store is attached", code="store_not_attached")
            with _failures(self._url()):
                await change()
                return await self.status()

    def _url(self) -> str:
        """The store's URL without its password, whatever the service says."""
        return hide(self.service.store_url, self.service.store_url)


@contextmanager
def _failures(url: str) -> Iterator[None]:
    """Translates a store's errors for clients. `from None`: a cause could show the password."""
    try:
        yield
    except ConfigError as error:
        raise refusal("url", hide(url, url), hide(error.why, url), code="invalid_store") from None
    except StoreError as error:
        raise ApiError(502, f"the store failed: {hide(str(error), url)}", code="store_failed") from None


class StoreRoute(APIRoute):
    """Starlette makes one route per method; here a 405 lists the methods of all routes of the path."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            allowed = "POST" if self.path.endswith("/clear") else "DELETE, GET, PUT"
            raise HTTPException(405, headers={"allow": allowed})
        await super().handle(scope, receive, send)


def router(api: Api) -> APIRouter:
    calls = StoreCalls(api)
    routes = APIRouter(
        prefix="/v1/cache", tags=["store"], dependencies=keys.admin(api.options), route_class=StoreRoute
    )
    routes.add_api_route("/store", calls.status, responses=gives(StoreStatus, 401, 403))
    routes.add_api_route(
        "/store",
        calls.attach,
        methods=["PUT"],
        responses=gives(StoreStatus, 400, 401, 403, 409, 413, 502, 503),
        openapi_extra=schema.Reads(AttachRequest),
    )
    changed = gives(StoreStatus, 401, 403, 404, 502, 503)
    routes.add_api_route("/store", calls.detach, methods=["DELETE"], responses=changed)
    routes.add_api_route("/store/clear", calls.clear, methods=["POST"], responses=changed)
    return routes
