"""The page at `/`, and the list of calls at `/docs`: files of this package, nothing from elsewhere.

The files hold no secret and need no key. What the page shows comes from `/feed`, which does.
"""

from __future__ import annotations

from functools import partial
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

WEB = files("tiercel.server.live") / "web"

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

PAGES = {"page.html": "/", "docs.html": "/docs"}

FILES = {PAGES.get(name, f"/{name}"): name for name in sorted(file.name for file in WEB.iterdir())}

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
"""What browsers allow: only files of this server, no script in the HTML, no other page around it."""


async def _file(content: bytes, media_type: str) -> Response:
    return Response(content, media_type=media_type, headers=HEADERS)


def router() -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    for path, name in FILES.items():
        content, media_type = (WEB / name).read_bytes(), TYPES[Path(name).suffix]
        routes.add_api_route(
            path, partial(_file, content, media_type), methods=["GET", "HEAD"], response_class=Response
        )
    return routes
