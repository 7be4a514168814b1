"""Plots of replays and plans, by matplotlib. The ending of the file says which kind of picture it is."""

from __future__ import annotations

from collections.abc import Sequence

from tiercel.replay.figure import figure_for, save
from tiercel.replay.plan import Point
from tiercel.replay.prices import GIB
from tiercel.replay.report import Report

TIERS = ("device", "host", "store")


def plot_replay(report: Report, file: str) -> None:
    """Where the prompts' tokens came from, as one bar."""
    figure = figure_for(file, figsize=(8, 2.6))
    axes = figure.subplots()
    lost = sum(report.lost_tokens.values())
    rest = report.tokens_asked - report.hits - report.replayed_tokens - lost - report.new_tokens
    parts = [(tier, report.hit_tokens[tier]) for tier in TIERS]
    parts += [("replayed", report.replayed_tokens), ("lost", lost)]
    parts += [("new", report.new_tokens), ("behind the last page", rest)]
    left = 0.0
    for name, tokens in parts:
        share = tokens / max(1, report.tokens_asked)
        axes.barh([report.policy], [share], left=left, label=f"{name} {share:.1%}")
        left += share
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the prompts' tokens")
    figure.legend(loc="outside upper center", ncols=3)
    save(figure, file)


def plot_plan(points: Sequence[Point], file: str) -> None:
    """Hit ratio and time to the first token along the host memory; a line for each policy, device memory and
    store. A line begins at the device alone."""
    figure = figure_for(file, figsize=(10, 4.5))
    ratio, first = figure.subplots(1, 2)
    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(_line_of(point), []).append(point)
    for name, own in lines.items():
        sizes = [point.sizes.host_bytes / GIB for point in own]
        (line,) = ratio.plot(sizes, [point.report.hit_ratio for point in own], marker=".", label=name)
        first.plot(sizes, [point.report.first_token.p50_s for point in own], marker=".")
        for point in own:
            if point.best:
                at = point.sizes.host_bytes / GIB, point.report.hit_ratio
                ratio.plot(*at, marker="o", markersize=10, fillstyle="none", color=line.get_color())
    for axes, what in (
        (ratio, "hit ratio (circle: costs the least)"),
        (first, "median time to first token (s)"),
    ):
        axes.set_xlabel("host memory (GiB)")
        axes.set_ylabel(what)
        axes.margins(0.06)
        axes.set_ylim(0, max(axes.get_ylim()[1], 1e-3))
        axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=2)
    save(figure, file)


def _line_of(point: Point) -> str:
    sizes = point.sizes
    store = f", store {sizes.store_bytes / GIB:,.0f} GiB" if sizes.store_bytes else ""
    return f"{point.report.policy}, device {sizes.device_bytes / GIB:,.1f} GiB{store}"
