"""SGLang's `/abort_request`: ends answers early. Their clients get what there is, with the reason `abort`."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request

from tiercel.server.calls import schema
from tiercel.server.calls.asks import own_id
from tiercel.server.calls.reply import Api
from tiercel.server.calls.schema import gives
from tiercel.server.http import keys, known
from tiercel.server.http.body import Body, RequestId, Salt
from tiercel.server.http.border import visit_of
from tiercel.server.http.errors import conflict


class AbortRequest(Body):
    known = known.ABORT

    rid: RequestId | None = None
    """As the client has named the request: `rid`, `request_id`, or the header `x-request-id`."""
    abort_all: bool | None = None
    cache_salt: Salt | None = None
    """The salt of the request, if it has one. Not SGLang's: an id belongs to a key and a salt."""


class Aborted(BaseModel):
    aborted: int
    """Requests that were told to end."""


class Aborts:
    """The call of one server."""

    def __init__(self, api: Api) -> None:
        self.api = api

    async def abort(self, request: Request) -> Aborted:
        """End one request by its id, or all. An id that is not known, or not any more, is no error."""
        body = await self.api.read(request, AbortRequest)
        if (body.rid is None) == (not body.abort_all):
            raise conflict("rid", body.rid, "either rid or abort_all must be given, not both")
        visit = visit_of(request)
        if body.abort_all:
            await keys.check_admin(request, self.api.options)
            ids = list(visit.live)
        else:
            ids = [own_id(body.rid or "", visit.owner, body.cache_salt)]
        aborted = 0
        for each in ids:
            found = visit.live.get(each)
            if found and found.abort:
                found.abort(each)
                aborted += 1
        return Aborted(aborted=aborted)


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["native"], dependencies=keys.user_or_admin(api.options))
    routes.add_api_route(
        "/abort_request",
        Aborts(api).abort,
        methods=["POST"],
        responses=gives(Aborted, 400, 401, 403, 413, 503),
        openapi_extra=schema.Reads(AbortRequest),
    )
    return routes
