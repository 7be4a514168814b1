"""The outermost layer: every request gets an id and is counted; every error becomes an answer.

    Border ── id, clock ────► routes ──► handlers
       ▲                                     │
       └── x-request-id, count, 500, access log, trace ◄─┘

A HEAD gets the answer of a GET without its body: load balancers probe with it.

The border is plain ASGI, because it must see the end of a streamed answer.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from urllib.parse import quote
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiercel.asks.ask import Answer, Ask, Usage
from tiercel.server.http.errors import log, translate
from tiercel.server.http.logs import CURRENT
from tiercel.server.http.metrics import Metrics
from tiercel.server.http.tenants import OverLimit, Tenant

if TYPE_CHECKING:
    pass

ID_PATTERN = r"^[A-Za-z0-9_-]{1,128}$"
"""Ids that a client may choose. Only ids that the server derives have a dot, so the two never clash."""

NAME_CHARS, NAMES_TOLD, NAMES_LOGGED = 64, 32, 256
"""Limits for unknown fields: characters of a name, names in a header, names in the log."""

PATH_CHARS = 200
"""The log shows no more characters of a path."""

_KEY = "tiercel.visit"

access = logging.getLogger("tiercel.access")


@dataclass(eq=False)
class Visit:
    """One request and its answer, from the first byte to the last."""

    live: dict[str, Visit]
    """All open visits by the engine's ids of their requests: one dictionary that all visits share."""
    request_id: str = ""
    owner: str = ""
    """A digest of the API key that was given. Empty: no key is needed."""
    address: str = ""
    """The address of the client's machine, or of the last proxy."""
    large: bool = False
    """Whether its body is long: work on it is done beside the event loop, in threads for such requests."""
    started_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    status: int | None = None
    answers: Sequence[Answer] = ()
    """What has come so far, if the call asks for answers."""
    ignored: Sequence[str] = ()
    """Unknown fields of the request."""
    claimed: set[str] = field(default_factory=set)
    abort: Callable[[str], None] | None = None
    """Ends answers early, by the engine's id of their request; None: no answer is being computed."""
    tenant: Tenant | None = None
    """Whose API key it was, if keys come from a file."""
    admitted: bool = False
    """Whether the tenant's limits let it in."""
    asks: Sequence[Ask] = ()
    usage: Usage = Usage(0)
    """Tokens of all its answers."""

    def begin(self) -> OverLimit | None:
        """A call for an answer begins, unless a limit of its tenant is reached."""
        over = None if self.tenant is None else self.tenant.begin()
        self.admitted = over is None
        return over

    def end(self) -> None:
        for claimed in self.claimed:
            del self.live[claimed]
        if self.tenant is not None and self.admitted:
            self.tenant.end(self.usage.prompt_tokens + self.usage.completion_tokens)

    def bind(self, ask: Ask) -> Ask:
        """An ask as the engine gets it: a tenant's pages are in its own namespace, whatever the call says."""
        if self.tenant is None:
            return ask
        name = self.tenant.name
        return replace(ask, namespace=("tenant", name, *ask.namespace), tenant=name)

    def claim(self, ids: Sequence[str]) -> bool:
        """Reserves ids until the end of the visit. False: another visit has one of them."""
        if not self.live.keys().isdisjoint(ids):
            return False
        self.live.update(dict.fromkeys(ids, self))
        self.claimed.update(ids)
        return True

    def name(self, chosen: str | None, ids_of: Callable[[str], Sequence[str]]) -> bool:
        """Sets the id that the client chose in the body, and claims the engine's ids that follow from it.

        False if they are in use. An id from the headers is replaced by a new one instead.
        """
        if self.claim(ids_of(chosen or self.request_id)):
            self.request_id = chosen or self.request_id
            return True
        if chosen is None:
            self.request_id = _new_id()
            return self.claim(ids_of(self.request_id))
        return False

    @property
    def payer(self) -> str:
        """The owner, or else the address: those who take turns if something is short."""
        return self.owner or self.address

    def token_seen(self) -> None:
        if self.first_token_s is None:
            self.first_token_s = self.age_s

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_s


@dataclass(frozen=True)
class VisitNames(Mapping[str, str]):
    """Request id and tenant of a visit, for the log. They become known while the request is read."""

    visit: Visit

    def __getitem__(self, name: str) -> str:
        tenant = self.visit.tenant
        return {"request_id": self.visit.request_id, "tenant": tenant.name if tenant else ""}[name]

    def __iter__(self) -> Iterator[str]:
        return iter(("request_id", "tenant"))

    def __len__(self) -> int:
        return 2


PROBES = ("/health", "/ready", "/metrics")
"""Probes call these all the time: their lines have the level debug, unless they fail."""


def log_access(scope: Scope, visit: Visit) -> None:
    """One line for a request: what it was, how it ended, and its tokens. No query: it may have secrets."""
    used, status = visit.usage, visit.status or 499
    path = quote(scope["path"][:PATH_CHARS])
    fields = {
        "method": scope["method"],
        "path": path,
        "status": status,
        "ms": round(1e3 * visit.age_s, 1),
        "tokens_in": used.prompt_tokens,
        "tokens_cached": used.cached_tokens,
        "tokens_replayed": used.replayed_tokens,
        "tokens_out": used.completion_tokens,
    }
    replayed = f" {used.replayed_tokens} replayed," if used.replayed_tokens else ""
    cached = f", {used.prompt_tokens} tokens in, {used.cached_tokens} cached,{replayed}"
    tokens = f"{cached} {used.completion_tokens} out"
    message = f"{scope['method']} {path} {status}, {fields['ms']} ms{tokens if visit.asks else ''}"
    level = logging.DEBUG if path in PROBES and status == 200 else logging.INFO
    access.log(level, "%s", message, extra={"fields": fields})


def _new_id() -> str:
    return f"req-{uuid4().hex}"


_VISIT: ContextVar[Visit] = ContextVar("visit")


def visit_now() -> Visit:
    """The visit that the running task belongs to."""
    return _VISIT.get()


def visit_of(request: Request) -> Visit:
    visit = request.scope[_KEY]
    assert isinstance(visit, Visit)
    return visit


class Border:
    """The outermost layer of the application."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        ended: Callable[[Visit, str], None],
        access_log: bool = False,
        traced: Callable[[Scope, Visit, str], None] | None = None,
    ) -> None:
        """`ended` is told of every visit that asked for answers, with the call's name; `traced` of every
        visit."""
        self.app = app
        self.metrics = metrics
        self.ended = ended
        self.access_log, self.traced = access_log, traced
        self.live: dict[str, Visit] = {}
        self._warned: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        head = scope["method"] == "HEAD"
        if head:
            scope = {**scope, "method": "GET"}
        self.metrics.began()
        visit = scope[_KEY] = Visit(self.live, address=(scope.get("client") or ("",))[0])
        wanted = Headers(scope=scope).get("x-request-id", "")
        visit.request_id = wanted if re.fullmatch(ID_PATTERN, wanted) else _new_id()
        _VISIT.set(visit)
        CURRENT.set(VisitNames(visit))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = visit.request_id
                if visit.ignored:
                    headers["x-ignored-fields"] = self._warn(visit.ignored)
            elif head and message["type"] == "http.response.body":
                message["body"] = b""
            await send(message)

        try:
            await self.app(scope, receive, send_named)
        except (Exception, asyncio.CancelledError) as error:
            if visit.status is not None:
                if isinstance(error, asyncio.CancelledError):
                    return  # shutdown, after `shutdown_s`: uvicorn closes the connection
                raise
            await translate(error).response(scope["path"])(scope, receive, send_named)
        finally:
            self._ended(scope, visit)

    def _ended(self, scope: Scope, visit: Visit) -> None:
        visit.end()
        # The path of the route, not of the request: metrics need few names.
        call = getattr(scope.get("route"), "path", "other")
        self.metrics.ended(call, visit.status or 499, visit.age_s, visit.first_token_s)
        if visit.answers:
            self.ended(visit, call)
        if visit.tenant is not None and visit.asks:
            self.metrics.used(visit.tenant.name, visit.usage)
        if self.access_log:
            log_access(scope, visit)
        if self.traced is not None:
            self.traced(scope, visit, call)

    def _warn(self, ignored: Sequence[str]) -> str:
        """Logs each name once; returns all for a header. Clients choose them, so they are cut."""
        names = [re.sub(r"[^\w.-]", "?", name[:NAME_CHARS], flags=re.ASCII) for name in ignored[:NAMES_TOLD]]
        for name in names:
            if name not in self._warned and len(self._warned) < NAMES_LOGGED:
                self._warned.add(name)
                log.warning("requests have an unknown field, which is ignored: %s", name)
        return ", ".join(names)
