"""A picture of a run: times to first token by source, and the spread of all times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from tiercel.bench.client import SOURCES, Measured
from tiercel.replay.figure import figure_for, save


def plot_run(measured: Sequence[Measured], file: str) -> None:
    figure = figure_for(file, figsize=(9, 4))
    first, spread = figure.subplots(1, 2)
    good = [each for each in measured if not each.error and each.ttft_s is not None]
    for name in (*reversed(SOURCES), "computed"):
        own = [each for each in good if each.source == name]
        if own:
            times = [each.ttft_s for each in own]
            first.scatter([each.prompt_tokens for each in own], times, s=8, label=name)
    first.set_xlabel("prompt tokens")
    first.set_ylabel("time to first token (s)")
    first.set_ylim(bottom=0)
    if good:
        first.legend(title="slowest source")
    _shares(spread, "first token", [each.ttft_s for each in good if each.ttft_s is not None])
    _shares(spread, "between tokens", list(chain.from_iterable(each.gaps_s for each in good)))
    _shares(spread, "whole answer", [each.e2e_s for each in good])
    spread.set_xscale("log")
    spread.set_xlabel("seconds")
    spread.set_ylabel("share that took at most so long")
    if good:
        spread.legend()
    for axes in (first, spread):
        axes.grid(alpha=0.3)
    save(figure, file)


def _shares(axes: Any, name: str, times: list[float]) -> None:
    if times:
        ordered = sorted(times)
        axes.plot(ordered, [(n + 1) / len(ordered) for n in range(len(ordered))], label=name)
