"""Who may call: API keys for users, one admin key for the operator.

    --admin-key given                       admin calls need the admin key
    --keys-file given                       admin calls are refused: they are not for tenants
    only --api-key given                    admin calls need an API key, as all calls do
    no key, only this machine can connect   admin calls need a Host of this machine, and no proxy
    no key, others can connect              admin calls are refused

A web page of another origin can never make an admin call. The checks are dependencies of the routes: they run
before a body is read, and the schema lists the keys.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from fastapi import Depends
from fastapi.params import Depends as Dependency
from fastapi.security import HTTPBearer
from starlette.requests import Request

from tiercel.config import is_loopback
from tiercel.server.http.border import visit_of
from tiercel.server.http.errors import ApiError
from tiercel.server.http.tenants import Tenant, Tenants, digest_of
from tiercel.server.options import ServerOptions

PROXY_HEADERS = ("forwarded", "via", "x-forwarded-for")
"""A request with one of these comes from a proxy, so its sender may be on any machine."""


def given_key(headers: Mapping[str, str]) -> bytes:
    """The key of `Authorization: Bearer KEY`, or of Anthropic's `x-api-key: KEY`. Empty: there is none."""
    scheme, _, text = headers.get("authorization", "").partition(" ")
    if not text and "x-api-key" in headers:
        scheme, text = "bearer", headers["x-api-key"]
    # Headers are decoded as Latin-1: this restores the bytes that were sent.
    return text.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


def _name(given: bytes, tenant: Tenant | None) -> str:
    """The name of a key: a digest, so it may be logged."""
    owner = given if tenant is None else f"tenant {tenant.name}".encode()
    return hashlib.blake2b(owner, digest_size=8).hexdigest()


class Owners:
    """The owner of each request, before anything is done with it."""

    def __init__(self, options: ServerOptions) -> None:
        keys = [*options.api_key, *([options.admin_key] if options.admin_key else ())]
        self._names = {digest_of(key.encode()): _name(key.encode(), None) for key in keys}
        self._tenants = options.tenants

    def find(self, headers: Mapping[str, str], address: str) -> str:
        """The owner of a right key, or else the address: a wrong key is no owner."""
        given = given_key(headers)
        if given and self._tenants is not None and (tenant := self._tenants.find(given)) is not None:
            return _name(given, tenant)
        return self._names.get(digest_of(given), address) if given and self._names else address


class BearerKey(HTTPBearer):
    """Compares the given key with every key in constant time."""

    def __init__(self, keys: Sequence[str], *, scheme_name: str, tenants: Tenants | None = None) -> None:
        super().__init__(scheme_name=scheme_name, auto_error=False)
        self.tenants = tenants
        self.keys = [key.encode() for key in keys]

    async def __call__(self, request: Request) -> None:  # type: ignore[override]
        given = given_key(request.headers)
        known = [hmac.compare_digest(given, key) for key in self.keys]
        tenant = self.tenants.find(given) if self.tenants is not None else None
        if not (tenant or any(known)):
            wanted = {"www-authenticate": "Bearer"}
            message = f"the {self.scheme_name} is missing or wrong"
            raise ApiError(401, message, param="authorization", code="invalid_api_key", headers=wanted)
        visit = visit_of(request)
        visit.tenant = tenant
        visit.owner = _name(given, tenant)


async def _refuse(_request: Request) -> None:
    message = "this server has no key, and other machines can reach it; start it with --admin-key"
    raise ApiError(403, message, param="authorization", code="admin_key_not_configured")


async def _refuse_tenants() -> None:
    message = "tenants may not act on the server itself; start it with --admin-key"
    raise ApiError(403, message, param="authorization", code="admin_key_not_configured")


async def _own_origin(request: Request) -> None:
    """A browser names the page that sends a request. Only this server's own pages may make admin calls."""
    origin = request.headers.get("origin")
    if origin is not None and _host_of(origin) != request.headers.get("host", "").lower():
        message = f"a page of {origin[:100]!r} may not act on this server"
        raise ApiError(403, message, param="origin", code="foreign_origin")


async def _this_machine(request: Request) -> None:
    """The connection comes from this machine, but a proxy or a foreign DNS name may have led it here."""
    host = request.headers.get("host", "")
    name = urlsplit(f"//{host}").hostname if _host_of(f"//{host}") else None
    between = [header for header in PROXY_HEADERS if header in request.headers]
    if between or name is None or not is_loopback(name):
        what = f"Host is {host[:100]!r}" if not between else f"there is a header {between[0]}"
        message = f"without a key this call is for this machine only, but {what}; start with --admin-key"
        raise ApiError(403, message, param=between[0] if between else "host", code="foreign_host")


def _host_of(url: str) -> str:
    """Host and port as written; empty if it is not a URL."""
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""


def user(options: ServerOptions) -> list[Dependency]:
    """The check of calls that want an answer."""
    if not (options.api_key or options.tenants):
        return []
    return [Depends(BearerKey(options.api_key, scheme_name="API key", tenants=options.tenants))]


def user_or_admin(options: ServerOptions) -> list[Dependency]:
    """The check of calls that users make about their own requests, and the operator about all."""
    if not (options.admin_key and (options.api_key or options.tenants)):
        return user(options)
    either = (*options.api_key, options.admin_key)
    return [Depends(BearerKey(either, scheme_name="API key", tenants=options.tenants))]


def optional(options: ServerOptions) -> list[Dependency]:
    """The check of a call that needs no key and tells more with one. A wrong key is refused."""

    async def check(request: Request) -> None:
        if {"authorization", "x-api-key"} & {*request.headers}:
            await _check(request, user_or_admin(options))

    return [Depends(check)]


async def check_admin(request: Request, options: ServerOptions) -> None:
    """The check of a call that is an admin call only with some of its fields."""
    await _check(request, admin(options))


async def _check(request: Request, dependencies: Sequence[Dependency]) -> None:
    for each in dependencies:
        assert each.dependency is not None
        await each.dependency(request)


def admin(options: ServerOptions) -> list[Dependency]:
    """The check of calls that act on the server itself."""
    own = Depends(_own_origin)
    if options.admin_key:
        return [own, Depends(BearerKey([options.admin_key], scheme_name="admin key"))]
    if options.tenants:
        return [own, Depends(_refuse_tenants)]
    if options.api_key:
        return [own, *user(options)]
    return [own, Depends(_this_machine if options.loopback else _refuse)]
