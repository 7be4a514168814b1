"""`tiercel plan`: which sizes of host and store bring which hit ratio, for recorded traffic."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tiercel.cli import options as o
from tiercel.cli import replay as r
from tiercel.config import CacheConfig, parse_bytes
from tiercel.errors import ConfigError
from tiercel.progress import progress

if TYPE_CHECKING:
    from tiercel.replay.plan import Point

Sizes = Annotated[list[str] | None, typer.Option(help="Host memory to try. Repeatable.")]
Stores = Annotated[list[str] | None, typer.Option(help="Size of the store to try. Repeatable.")]
Policies = Annotated[list[str] | None, typer.Option("--policy", help="What is evicted first. Repeatable.")]
Processes = Annotated[int | None, typer.Option(help="Replays at the same time. Default: the cores.", min=1)]


@o.with_settings(CacheConfig, without=r.WITHOUT)
def plan(  # noqa: PLR0913
    files: r.Files,
    model: r.ModelSpec = r.MODEL,
    page_tokens: r.PageTokens = None,
    format: r.Format = None,
    device_memory: r.Device = "20GiB",
    host_memory: Sizes = None,
    store_memory: Stores = None,
    policy: Policies = None,
    batch: r.Batch = 64,
    one_at_a_time: r.OneAtATime = False,
    prefill_rate: r.Rate = None,
    token_time: r.TokenTime = None,
    link_rate: r.Link = "55GB",
    store_rate: r.StoreRate = "3GB",
    session_every: r.Every = 0.0,
    requests: r.Limit = None,
    processes: Processes = None,
    sparse: r.Sparse = False,
    text_tokens: r.TextTokens = None,
    as_json: r.Json = False,
    plot: r.Plot = None,
    settings: Any = None,
) -> None:
    """Which sizes of host and store bring which hit ratio and latency; where one more GiB stops to help."""
    from tiercel.replay import plan as p
    from tiercel.replay.figure import check_plot
    from tiercel.replay.plot import plot_plan
    from tiercel.replay.run import Sizes as TierSizes
    from tiercel.replay.run import texts_fitting

    if plot is not None:
        check_plot(plot)
    spec, trace = r.opened(files, model, page_tokens, format, session_every, requests)
    rates = prefill_rate, token_time, link_rate, store_rate
    serving = r.served(trace, rates, batch, one_at_a_time, settings)
    hosts = [parse_bytes(each, "--host-memory") for each in host_memory or ()]
    stores = [parse_bytes(each, "--store-memory") for each in store_memory or ("0",)]
    device = parse_bytes(device_memory, "--device-memory")
    hosts = sorted(set(hosts)) or p.default_host_sizes(trace, spec)
    if any(stores) and not all(hosts):
        raise ConfigError("--store-memory", stores, "a store needs host memory to read into")
    sizes = [TierSizes(device, host, store) for store in dict.fromkeys(stores) for host in hosts]
    policies = list(dict.fromkeys(policy or [CacheConfig().evict]))
    with progress("plan", len(sizes) * len(policies), counted="replays") as done:
        parted = r.parted(spec, min(hosts), sparse=sparse)
        points = p.plan(trace, parted, sizes, policies, serving, processes=processes, progress=done)
    fitting = {each: texts_fitting(spec, each, text_tokens or trace.longest) for each in sizes}
    if plot is not None:
        plot_plan(points, plot)
    if as_json:
        texts = ({"texts": (found := fitting[point.sizes]) and found.as_dict()} for point in points)
        rows = [point.as_dict() | each for point, each in zip(points, texts, strict=True)]
        typer.echo(json.dumps(rows, indent=2))
    else:
        show(points)
        for text in dict.fromkeys(
            f"host {each.host_bytes / p.GIB:,.1f} GiB: {found}" for each, found in fitting.items() if found
        ):
            typer.echo(text)


def show(points: list[Point]) -> None:
    from tiercel.replay.plan import GIB

    table = Table(
        title=f"device memory {points[0].sizes.device_bytes / GIB:,.1f} GiB; ◄ the knee of its curve"
    )
    for heading in (
        "policy",
        "store GiB",
        "host GiB",
        "hit ratio",
        "",
        "first token",
        "99 %",
        "1 GiB more saved",
    ):
        table.add_column(heading, justify="left" if heading in ("policy", "") else "right")
    curve = None
    for point in points:
        report, sizes = point.report, point.sizes
        if curve is not None and curve != (report.policy, sizes.store_bytes):
            table.add_section()
        curve = report.policy, sizes.store_bytes
        saved = point.saved_tokens_per_gib
        table.add_row(
            report.policy,
            f"{sizes.store_bytes / GIB:,.0f}",
            f"{sizes.host_bytes / GIB:,.1f}",
            f"{report.hit_ratio:.2%}",
            "◄" if point.knee else "",
            f"{report.first_token.p50_s:,.3f} s",
            f"{report.first_token.p99_s:,.3f} s",
            "" if saved is None else f"{saved:,.0f} tokens",
        )
    console = Console(width=None if sys.stdout.isatty() else r.PIPE_WIDTH)
    console.print(table)
    console.print(f"a cache without an end: {points[0].report.hit_ratio_most:.2%}")
