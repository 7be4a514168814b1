"""`tiercel verify`: checks that no tier changes an answer, for this model and machine. With `--sparse`: that
reading selected entries on the host changes none."""

from __future__ import annotations

import dataclasses
import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from secrets import token_hex
from tempfile import gettempdir
from typing import Annotated, Any

import typer

from tiercel.cli import options as o
from tiercel.cli.ending import ends_at_once
from tiercel.config import CacheConfig
from tiercel.engine.config import Build, EngineConfig

WITHOUT = (
    "store",
    "store_required",
    "peer",
    "share_pages",
    "share_key",
    "share_mooncake",
    "role",
    "prefill_wait_s",
    "fetch",
    "fetch_deadline_s",
    "force_miss",
    "overlap",
    "waiting_max",
    "sparse",
)
"""Settings that the runs choose themselves, or that change nothing here."""


@o.with_settings(Build, EngineConfig, CacheConfig, without=WITHOUT, host_memory="256MiB")
def verify(
    model: o.Model = o.MODEL,
    named: o.NamedModel = None,
    kl: Annotated[float, typer.Option(help="The largest KL that passes.", min=0)] = 0.0,
    dlogprob: Annotated[float, typer.Option(help="The largest |Δlogprob| that passes.", min=0)] = 0.0,
    far: Annotated[
        bool,
        typer.Option("--sparse", help="Compare texts that are read on the host with whole ones instead."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    settings: Any = None,
) -> None:
    """Compare branching conversations on every tier with a run without cache. Exit code 1: a difference.

    This takes about a minute with the embedded model.
    """
    build = o.made(Build, settings, model=named or model)
    config = o.made(EngineConfig, settings, cache=o.made(CacheConfig, settings))
    folder = Path(gettempdir(), f"tiercel-verify-{token_hex(8)}")
    with ends_at_once(lambda: _remove(folder)), ExitStack() as ending:
        ending.callback(_remove, folder)
        folder.mkdir(0o700)
        from tiercel.verify import verify as run_verify
        from tiercel.verify import verify_sparse

        report = verify_sparse(build, config) if far else run_verify(build, config, folder)
    holds = report.holds(kl=kl, dlogprob=dlogprob)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        for name, value in dataclasses.asdict(report).items():
            typer.echo(f"{name:18} {value}")
        unused = "no page was sparse" if far else "a tier was not used"
        typer.echo("nothing differs" if holds else f"something differs, or {unused}")
    if not holds:
        raise typer.Exit(1)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
