"""`tiercel key`: makes an API key for a tenant."""

from __future__ import annotations

import re
import secrets
from typing import Annotated

import typer

from tiercel.errors import ConfigError


def key(tenant: Annotated[str, typer.Argument(help="The tenant's name.")]) -> None:
    """Make an API key: the key to stderr, for the tenant; its table to stdout, for --keys-file."""
    from tiercel.server.http.tenants import NAME, digest_of

    if not re.fullmatch(NAME, tenant):
        raise ConfigError("tenant", tenant, "has 1 to 64 letters, digits, dots, dashes and underscores")
    made = f"tk-{secrets.token_urlsafe(32)}"
    typer.echo(f"the key of {tenant}, which is kept nowhere: {made}", err=True)
    typer.echo(f'[{_quoted(tenant)}]\nsha256 = ["{digest_of(made.encode())}"]')


def _quoted(name: str) -> str:
    """A dot in a name would make a table inside another."""
    return f'"{name}"' if "." in name else name
