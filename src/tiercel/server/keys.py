"""Who may call: a key for users, another for whoever runs the server.

They are dependencies of the routes, checked before a body is read, and known to the schema.
"""

from __future__ import annotations

import hmac

from fastapi import Depends
from fastapi.params import Depends as Dependency
from fastapi.security import HTTPBearer
from starlette.requests import Request

from tiercel.server.errors import ApiError
from tiercel.server.options import ServerOptions


class BearerKey(HTTPBearer):
    """`Authorization: Bearer KEY`, compared in constant time."""

    def __init__(self, key: str, *, scheme_name: str) -> None:
        super().__init__(scheme_name=scheme_name, auto_error=False)
        self.key = key.encode()

    async def __call__(self, request: Request) -> None:  # type: ignore[override]
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Headers are read as Latin-1: this gives back the bytes that were sent.
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self.key):
            headers = {"www-authenticate": "Bearer"}
            message = f"the {self.scheme_name} is missing or wrong"
            raise ApiError(401, message, param="authorization", code="invalid_api_key", headers=headers)


async def _refuse() -> None:
    message = "this server was started without an admin key, and others than this machine can reach it"
    raise ApiError(403, message, param="authorization", code="admin_key_not_configured")


def user(options: ServerOptions) -> list[Dependency]:
    """For calls that want an answer."""
    return [Depends(BearerKey(options.api_key, scheme_name="API key"))] if options.api_key else []


def admin(options: ServerOptions) -> list[Dependency]:
    """For calls that act on the server itself."""
    if options.admin_key:
        return [Depends(BearerKey(options.admin_key, scheme_name="admin key"))]
    return [] if options.loopback else [Depends(_refuse)]
