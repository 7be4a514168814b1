"""`tiercel replay`: recorded traffic on tiers of given sizes, without a model."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tiercel.cli import options as o
from tiercel.cli import traffic as t
from tiercel.config import CacheConfig, parse_bytes
from tiercel.errors import ConfigError
from tiercel.progress import progress
from tiercel.replay.prices import GIB

if TYPE_CHECKING:
    from tiercel.replay.report import Report
    from tiercel.replay.sizes import Fitting


@o.with_settings(t.Asked, CacheConfig, without=t.WITHOUT)
def replay(  # noqa: PLR0913
    files: t.Files,
    device_memory: Annotated[
        str | None,
        typer.Option(help="Device memory for pages and tails.", show_default=f"{t.TRACES} {t.DEVICE_MEMORY}"),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(help="0 turns the host tier off.", show_default=f"{t.TRACES} {t.HOST_MEMORY}"),
    ] = None,
    store_memory: Annotated[str, typer.Option(help="0: there is no store.")] = "0",
    policy: Annotated[str, typer.Option(help="What is evicted first.")] = CacheConfig().evict,
    sparse: t.Sparse = None,
    as_json: t.Json = False,
    plot: t.Plot = None,
    settings: Any = None,
) -> None:
    """What recorded traffic finds in tiers of these sizes: hits, losses, bytes, times. No model is run."""
    from tiercel.replay.figure import check_plot
    from tiercel.replay.plot import plot_replay
    from tiercel.replay.run import replay as run
    from tiercel.replay.sizes import texts_fitting

    asked = o.made(t.Asked, settings)
    if plot is not None:
        check_plot(plot)
    traffic = t.opened(files, asked, sparse=sparse)
    serving = t.served(traffic, asked, o.made(CacheConfig, settings))
    host_bytes = traffic.server.host_bytes
    if host_memory is not None or host_bytes is None:
        host_bytes = parse_bytes(host_memory or t.HOST_MEMORY, "--host-memory")
    if sparse and not host_bytes:
        raise ConfigError(
            "--sparse", "on", "needs entries that may stay on the host: there is no host memory"
        )
    store_bytes = parse_bytes(store_memory, "--store-memory")
    sizes = replace(
        traffic.device_of(device_memory, asked.stages), host_bytes=host_bytes, store_bytes=store_bytes
    )
    spec, trace = traffic.replayed if host_bytes else traffic.spec, traffic.trace
    with progress("replay", len(trace), counted="requests") as done:
        report = run(trace, spec, sizes, policy=policy, serving=serving, progress=done)
    fitting = texts_fitting(
        spec,
        sizes,
        asked.text_tokens or trace.longest,
        context_tokens=serving.context_tokens,
        stages=asked.stages,
    )
    if plot is not None:
        plot_replay(report, plot)
    if as_json:
        served = {"model": spec.model, "model_named_by": traffic.why, "page_tokens": spec.page_tokens}
        served |= {name: vars(serving)[name] for name in ("batch", "step_tokens", "context_tokens", "stages")}
        own = {"sizes": sizes.as_dict(), "serving": served, "rates": vars(serving.rates)}
        texts = {"texts": fitting and fitting.as_dict()}
        typer.echo(json.dumps(report.as_dict() | own | texts, indent=2))
    else:
        typer.echo(f"{traffic}; device {sizes.device_bytes / GIB:,.1f} GiB, host {host_bytes / GIB:,.1f} GiB")
        show(report, fitting)


def show(report: Report, fitting: Fitting | None) -> None:
    console = Console(width=None if sys.stdout.isatty() else o.PIPE_WIDTH)
    refused = f", {report.refused:,} refused: they do not fit on the device" if report.refused else ""
    asked = max(1, report.tokens_asked)
    table = Table(title=f"{report.requests:,} requests{refused}; policy {report.policy}")
    table.add_column("prompt tokens")
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")

    def row(name: str, tokens: int) -> None:
        table.add_row(name, f"{tokens:,}", f"{tokens / asked:.2%}")

    for tier, tokens in report.hit_tokens.items():
        row(f"reused from {tier}", tokens)
    row("reused", report.hits)
    table.add_section()
    row("replayed: found, and computed again for want of a tail", report.replayed_tokens)
    for why, tokens in report.lost_tokens.items():
        row(f"lost: {why}", tokens)
    row("new: no request before had them", report.new_tokens)
    row("behind the last full page", report.rest_tokens)
    row("computed", report.computed_tokens)
    table.add_section()
    row("all", report.tokens_asked)
    console.print(table)
    gb = {
        "loaded to the device": report.loaded_bytes,
        "saved to the host": report.saved_bytes,
        "written to the store": report.store_written_bytes,
        "of these ever read": report.store_used_bytes,
        "read from the store": report.store_read_bytes,
    }
    console.print(", ".join(f"{what} {size / 1e9:,.1f} GB" for what, size in gb.items() if size))
    first = report.first_token
    console.print(
        f"time to first token: mean {first.mean_s:,.3f} s, median {first.p50_s:,.3f}, "
        f"90 % {first.p90_s:,.3f}, 99 % {first.p99_s:,.3f}; {report.preemptions:,} preemptions"
    )
    console.print(f"one device bears {report.requests_s_most:,.2f} requests/s of this kind")
    if overload := t.overload(report):
        console.print(overload)
    if fitting is not None:
        console.print(f"{fitting}")
    speed = f"{report.wall_s:,.1f} s: {report.requests_s:,.0f} requests/s"
    console.print(f"{report.simulated_s:,.0f} s of traffic, replayed in {speed}")
