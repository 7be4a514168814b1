"""`tiercel replay`: recorded traffic on tiers of given sizes, without a model."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tiercel.cli import options as o
from tiercel.config import CacheConfig, parse_bytes
from tiercel.errors import ConfigError
from tiercel.progress import progress

if TYPE_CHECKING:
    from tiercel.replay.report import Report
    from tiercel.replay.run import Fitting, Serving
    from tiercel.replay.trace import Trace
    from tiercel.spec.cache_spec import CacheSpec

PIPE_WIDTH = 110
WITHOUT = ("host_memory", "evict", "layout", "copier", "huge_pages", "store_timeout_s", "sparse")
"""Settings of the cache that have options of their own here, or that change nothing without bytes."""

Files = Annotated[list[str], typer.Argument(metavar="TRACE...", help="Recorded traffic: docs/replay.md.")]
ModelSpec = Annotated[str, typer.Option("--model", help="A preset, a config.json or a spec in JSON.")]
PageTokens = Annotated[int | None, typer.Option(help="Tokens in one page.", min=1)]
Format = Annotated[str | None, typer.Option(help="Element format, such as fp8 or bf16.")]
Device = Annotated[str, typer.Option(help="Device memory for pages and tails.")]
Batch = Annotated[int, typer.Option(help="Requests that run at the same time.", min=1)]
OneAtATime = Annotated[bool, typer.Option("--one-at-a-time", help="No request overlaps another one.")]
Rate = Annotated[float | None, typer.Option(help="Prompt tokens computed per second.")]
TokenTime = Annotated[float | None, typer.Option(help="Seconds from token to token of running answers.")]
Link = Annotated[str, typer.Option(help="Bytes per second between host and device.")]
StoreRate = Annotated[str, typer.Option(help="Bytes per second that the store reads, and writes.")]
Every = Annotated[float, typer.Option(help="Each further file begins so many seconds later.", min=0)]
Limit = Annotated[int | None, typer.Option("--requests", help="Only the first requests.", min=1)]
Sparse = Annotated[
    bool, typer.Option("--sparse", help="Selected entries stay on the host where the device has no room.")
]
TextTokens = Annotated[
    int | None,
    typer.Option(help="Tell how many texts of so many tokens fit. Default: the longest of the trace.", min=1),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Plot = Annotated[str | None, typer.Option("--plot", help="Draw a picture: out.svg, out.png, …")]
MODEL = "deepseek-v4-flash"


@o.with_settings(CacheConfig, without=WITHOUT)
def replay(  # noqa: PLR0913
    files: Files,
    model: ModelSpec = MODEL,
    page_tokens: PageTokens = None,
    format: Format = None,
    device_memory: Device = "20GiB",
    host_memory: Annotated[str, typer.Option(help="0 turns the host tier off.")] = "200GiB",
    store_memory: Annotated[str, typer.Option(help="0: there is no store.")] = "0",
    policy: Annotated[str, typer.Option(help="What is evicted first.")] = CacheConfig().evict,
    batch: Batch = 64,
    one_at_a_time: OneAtATime = False,
    prefill_rate: Rate = None,
    token_time: TokenTime = None,
    link_rate: Link = "55GB",
    store_rate: StoreRate = "3GB",
    session_every: Every = 0.0,
    requests: Limit = None,
    sparse: Sparse = False,
    text_tokens: TextTokens = None,
    as_json: Json = False,
    plot: Plot = None,
    settings: Any = None,
) -> None:
    """What recorded traffic finds in tiers of these sizes: hits, losses, bytes, times. No model is run."""
    from tiercel.replay.figure import check_plot
    from tiercel.replay.plot import plot_replay
    from tiercel.replay.run import Sizes, texts_fitting
    from tiercel.replay.run import replay as run

    if plot is not None:
        check_plot(plot)
    sizes = Sizes(
        parse_bytes(device_memory, "--device-memory"),
        parse_bytes(host_memory, "--host-memory"),
        parse_bytes(store_memory, "--store-memory"),
    )
    spec, trace = opened(files, model, page_tokens, format, session_every, requests)
    serving = served(trace, (prefill_rate, token_time, link_rate, store_rate), batch, one_at_a_time, settings)
    with progress("replay", len(trace), counted="requests") as done:
        report = run(
            trace,
            parted(spec, sizes.host_bytes, sparse=sparse),
            sizes,
            policy=policy,
            serving=serving,
            progress=done,
        )
    fitting = texts_fitting(spec, sizes, text_tokens or trace.longest)
    if plot is not None:
        plot_replay(report, plot)
    if as_json:
        typer.echo(
            json.dumps(
                report.as_dict()
                | {"sizes": vars(sizes), "rates": vars(serving.rates)}
                | {"texts": fitting and fitting.as_dict()},
                indent=2,
            )
        )
    else:
        show(report, fitting)


def opened(  # noqa: PLR0913, PLR0917
    files: list[str],
    model: str,
    page_tokens: int | None,
    format: str | None,
    session_every: float,
    requests: int | None,
) -> tuple[CacheSpec, Trace]:
    """The model's declaration, and the trace in pages of its size."""
    from dataclasses import replace

    from tiercel.replay.formats import read_trace
    from tiercel.spec import load

    spec = load(model, page_tokens, format)
    trace = read_trace(files, spec.page_tokens, session_every_s=session_every)
    return spec, trace if requests is None else replace(trace, requests=trace.requests[:requests])


def parted(spec: CacheSpec, host_bytes: int, *, sparse: bool) -> CacheSpec:
    """The declaration that is replayed. `host_bytes`: the least host memory."""
    if sparse and not (spec.apart.selective and host_bytes):
        why = "there is no host memory" if spec.apart.selective else f"{spec.model} selects no entries"
        raise ConfigError("--sparse", "on", f"needs entries that may stay on the host: {why}")
    return spec.apart if sparse else spec


def served(
    trace: Trace,
    rates: tuple[float | None, float | None, str, str],
    batch: int,
    one_at_a_time: bool,
    settings: Any,
) -> Serving:
    """Rates that are not given are those of the server that wrote the trace, if its lines tell them."""
    from dataclasses import replace

    from tiercel.replay.run import Rates, Serving

    prefill, token, link, store = rates
    store_bytes_s = parse_bytes(store, "--store-rate")
    known = Rates(
        link_bytes_s=parse_bytes(link, "--link-rate"),
        store_read_bytes_s=store_bytes_s,
        store_write_bytes_s=store_bytes_s,
    ).measured(trace)
    given = {"prefill_tokens_s": prefill, "token_s": token}
    known = replace(known, **{name: value for name, value in given.items() if value is not None})
    return Serving(known, batch, one_at_a_time, cache=o.made(CacheConfig, settings))


def show(report: Report, fitting: Fitting | None) -> None:
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
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
    if fitting is not None:
        console.print(f"{fitting}")
    speed = f"{report.wall_s:,.1f} s: {report.requests_s:,.0f} requests/s"
    console.print(f"{report.simulated_s:,.0f} s of traffic in {speed}")
