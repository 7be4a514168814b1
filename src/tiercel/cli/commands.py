"""The list of commands, and their common error handling."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from tiercel.cli.bench import bench
from tiercel.cli.chat import chat
from tiercel.cli.key import key
from tiercel.cli.plan import plan
from tiercel.cli.replay import replay
from tiercel.cli.serve import serve
from tiercel.cli.spec import spec
from tiercel.cli.store import app as store
from tiercel.cli.verify import verify
from tiercel.errors import TiercelError

SPINS = "3000"
"""How often a thread of OpenMP looks for work before it sleeps. The default is 300,000: where other programs
use the cores, a thread that looks keeps the one that computes from its core. It is read when torch is
imported."""

app = typer.Typer(no_args_is_help=True, add_completion=False)
for command in (serve, chat, verify, spec, key, replay, plan, bench):
    app.command()(command)
app.add_typer(store, name="store")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"tiercel {version('tiercel')}")
        raise typer.Exit


@app.callback()
def tiercel(
    _: Annotated[
        bool, typer.Option("--version", help="Say the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """A tiered KV cache for hybrid-attention language models, and the server built on it."""
    sys.path.append(str(Path.cwd()))  # a store or policy of your own (`module:Class`) may lie here


def main() -> None:
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    try:
        app()
    except TiercelError as error:
        typer.echo(f"tiercel: {error}", err=True)
        sys.exit(2)
