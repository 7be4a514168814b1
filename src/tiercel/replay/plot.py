"""Pictures of replays and plans."""

from __future__ import annotations

from collections.abc import Sequence

from tiercel.replay.figure import figure_for, save
from tiercel.replay.plan import GIB, Point
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
    """Hit ratio and time to the first token along the host memory; a line for each policy and store."""
    figure = figure_for(file, figsize=(9, 4))
    ratio, first = figure.subplots(1, 2)
    lines: dict[str, list[Point]] = {}
    for point in points:
        store = f", store {point.sizes.store_bytes / GIB:,.0f} GiB" if point.sizes.store_bytes else ""
        lines.setdefault(point.report.policy + store, []).append(point)
    for name, own in lines.items():
        sizes = [point.sizes.host_bytes / GIB for point in own]
        (line,) = ratio.plot(sizes, [point.report.hit_ratio for point in own], marker=".", label=name)
        first.plot(sizes, [point.report.first_token.p50_s for point in own], marker=".", label=name)
        for point in own:
            if point.knee:
                at = point.sizes.host_bytes / GIB, point.report.hit_ratio
                ratio.plot(*at, marker="o", markersize=10, fillstyle="none", color=line.get_color())
    for axes, what in ((ratio, "hit ratio (circle: knee)"), (first, "time to first token, median (s)")):
        axes.set_xlabel("host memory (GiB)")
        axes.set_ylabel(what)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    ratio.legend()
    save(figure, file)
