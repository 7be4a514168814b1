"""`tiercel plan`: which sizes of the tiers bring which hit ratio, and which of them is worth its price."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tiercel.cli import options as o
from tiercel.cli import traffic as t
from tiercel.config import CacheConfig, parse_bytes
from tiercel.errors import ConfigError
from tiercel.progress import progress
from tiercel.replay.prices import GIB, Prices

if TYPE_CHECKING:
    from tiercel.replay.plan import Point
    from tiercel.replay.run import Rates

Devices = Annotated[
    list[str] | None,
    typer.Option(help="Device memory to try. Repeatable.", show_default=f"{t.TRACES} {t.DEVICE_MEMORY}"),
]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        help="Host memory to try. Repeatable. The device alone is always tried.",
        show_default="sizes that double",
    ),
]
Stores = Annotated[list[str] | None, typer.Option(help="Size of the store to try. Repeatable.")]
Policies = Annotated[list[str] | None, typer.Option("--policy", help="What is evicted first. Repeatable.")]
Processes = Annotated[int | None, typer.Option(help="Replays at the same time. Default: the cores.", min=1)]


@o.with_settings(t.Asked, Prices, CacheConfig, without=t.WITHOUT)
def plan(  # noqa: PLR0913
    files: t.Files,
    device_memory: Devices = None,
    host_memory: Hosts = None,
    store_memory: Stores = None,
    policy: Policies = None,
    processes: Processes = None,
    sparse: t.Sparse = None,
    as_json: t.Json = False,
    plot: t.Plot = None,
    settings: Any = None,
) -> None:
    """Which sizes of the tiers bring which hit ratio and latency, and which of them is worth its price."""
    from tiercel.replay import plan as p
    from tiercel.replay.figure import check_plot
    from tiercel.replay.plot import plot_plan
    from tiercel.replay.sizes import texts_fitting

    asked, prices = o.made(t.Asked, settings), o.made(Prices, settings)
    if plot is not None:
        check_plot(plot)
    stores = [parse_bytes(each, "--store-memory") for each in store_memory or ("0",)]
    hosts = {parse_bytes(each, "--host-memory") for each in host_memory or ()} - {0}
    if host_memory and not hosts and any(stores):
        raise ConfigError("--store-memory", store_memory, "a store needs host memory to read into")
    if host_memory and not hosts and sparse:
        raise ConfigError(
            "--sparse", "on", "needs entries that may stay on the host: there is no host memory"
        )
    traffic = t.opened(files, asked, sparse=sparse)
    serving = t.served(traffic, asked, o.made(CacheConfig, settings))
    trace, spec = traffic.trace, traffic.spec
    named: list[str | None] = [*device_memory] if device_memory else [None]
    devices = {traffic.device_of(each, asked.stages) for each in named}
    tried = sorted(hosts) if host_memory else p.default_host_sizes(trace, spec)
    sizes = p.sizes_of(sorted(devices, key=lambda each: each.device_bytes), tried, stores)
    policies = list(dict.fromkeys(policy or [CacheConfig().evict]))
    signal.signal(signal.SIGTERM, _ended)  # its processes end with it
    with progress("plan", len(sizes) * len(policies) * len(trace), counted="requests") as done:
        points = p.plan(
            trace,
            spec,
            sizes,
            policies,
            serving,
            prices=prices,
            sparse=traffic.sparse,
            processes=processes,
            progress=done,
        )
    if plot is not None:
        plot_plan(points, plot)
    tokens = asked.text_tokens or trace.longest
    fitting = {
        each: texts_fitting(spec, each, tokens, context_tokens=serving.context_tokens, stages=asked.stages)
        for each in sizes
    }
    if as_json:
        told = {"model": spec.model, "model_named_by": traffic.why, "page_tokens": spec.page_tokens}
        texts = {each: {"texts": found and found.as_dict()} for each, found in fitting.items()}
        typer.echo(json.dumps([told | each.as_dict() | texts[each.sizes] for each in points], indent=2))
        return
    typer.echo(f"{traffic}; {len(trace):,} requests in {trace.seconds:,.0f} s")
    show(points, prices, serving.rates)
    for each, found in fitting.items():
        if found is not None:
            device, host = each.device_bytes / GIB, each.host_bytes / GIB
            typer.echo(f"device {device:,.1f} GiB, host {host:,.1f} GiB: {found}")


def _ended(number: int, _: object) -> None:
    sys.exit(128 + number)


HEADINGS = (
    *(
        "policy",
        "device\nGiB",
        "store\nGiB",
        "host\nGiB",
        "hit\nratio",
        "",
        "median time to\nfirst token",
        "99 %",
    ),
    *("1 GiB more\nsaves tokens", "requests/s", "cost of\n1,000", "devices\nneeded"),
)


def show(points: list[Point], prices: Prices, rates: Rates) -> None:
    from tiercel.replay.plan import verdict

    table = Table(title="◄ costs the least; requests/s: what one device bears; devices: what the trace needs")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("policy", "") else "right")
    console = Console(width=None if sys.stdout.isatty() else o.PIPE_WIDTH)
    curves = [
        (name, [*own])
        for name, own in groupby(points, lambda each: (each.report.policy, each.sizes.device_bytes))
    ]
    for _, curve in curves:
        for point in curve:
            table.add_row(*_cells(point))
        table.add_section()
    console.print(table)
    console.print(
        f"prices of an hour: device {prices.device:g}, 1 GiB of host {prices.host_gib:g}, of store "
        f"{prices.store_gib:g}; a cache without an end: {points[0].report.hit_ratio_most:.2%}"
    )
    for (policy, device_bytes), curve in curves:
        what = f"{policy}, device {device_bytes / GIB:,.1f} GiB: " if len(curves) > 1 else ""
        console.print(what + verdict(curve, prices, rates))
    overloaded = max((point.report for point in points), key=lambda report: report.devices)
    if told := t.overload(overloaded):
        fewest = min(point.report.devices for point in points)
        less = f" (with the sizes that find the most: {fewest})" if fewest < overloaded.devices else ""
        console.print(told + less)


def _cells(point: Point) -> Sequence[str]:
    report, sizes, saved = point.report, point.sizes, point.saved_tokens_per_gib
    return (
        report.policy,
        f"{sizes.device_bytes / GIB:,.1f}",
        f"{sizes.store_bytes / GIB:,.0f}",
        f"{sizes.host_bytes / GIB:,.1f}",
        f"{report.hit_ratio:.2%}",
        "◄" if point.best else "",
        f"{report.first_token.p50_s:,.3f} s",
        f"{report.first_token.p99_s:,.3f} s",
        "" if saved is None else f"{saved:,.0f}",
        f"{report.requests_s_most:,.2f}",
        f"{1000 * point.cost / max(1, report.requests):,.3g}",
        f"{report.devices:,}",
    )
