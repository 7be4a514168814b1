"""How commands that call a running server are told its address and a key."""

from __future__ import annotations

from typing import Annotated

import typer

URL = "http://127.0.0.1:8000"

ApiKey = Annotated[str | None, typer.Option(envvar="TIERCEL_API_KEY")]


def address(url: str) -> str:
    """A server's address, which may be given with or without /v1."""
    return url.rstrip("/").removesuffix("/v1")


def headers(api_key: str | None) -> dict[str, str]:
    """Of several keys (the variable of a server has all of them) the first is taken."""
    keys = (api_key or "").split()
    return {"Authorization": f"Bearer {keys[0]}"} if keys else {}
