"""`tiercel verify`: does a tier change an answer on this model and machine?"""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from tiercel.cli import options as o
from tiercel.config import parse_bytes
from tiercel.engine.config import Build, EngineConfig


def verify(  # noqa: PLR0913 - a command has as many arguments as options
    model: o.Model = o.MODEL,
    device_memory: o.DeviceMemory = o.DEVICE_MEMORY,
    host_memory: o.HostMemory = "256MiB",
    format: o.Format = "fp32",
    kernels: o.Kernels = "auto",
    share: o.Share = o.BUILD.share,
    kl: Annotated[float, typer.Option(help="The largest KL that passes.", min=0)] = 0.0,
    dlogprob: Annotated[float, typer.Option(help="The largest |Δlogprob| that passes.", min=0)] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Conversations that branch, with every tier forced, compared with a cold run. Exit code 1: it differs.

    It takes about a minute on the embedded model.
    """
    from tiercel.verify import verify as run_verify

    config = EngineConfig(o.cache_config(host_memory, o.CACHE.layout, o.CACHE.copier, "through", "lru", 16))
    device_bytes = parse_bytes(device_memory, "--device-memory")
    build = Build(model, format=format, device_bytes=device_bytes, kernels=kernels, share=share)
    report = run_verify(build, config)
    holds = report.holds(kl=kl, dlogprob=dlogprob)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        for name, value in dataclasses.asdict(report).items():
            typer.echo(f"{name:18} {value}")
        typer.echo("nothing differs" if holds else "something differs, or a tier was not used")
    if not holds:
        raise typer.Exit(1)
