"""When requests passed their stages: a few clock readings for a request, one for a step, none for a token.

added ──► waits for the store ──► matched ──► begun ──► running ──► first token ──► ended
   queue          fetch             match        load      prefill          decode
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SOURCES = ("device", "host", "store", "computed")
"""The slowest tier that the beginning of a text came from; from the fastest to the slowest."""

QUEUE_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Bounds up to the time-outs of patient clients."""

TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
"""Bounds from the embedded model to a step that computes a long prompt beside the answers."""


class StageTime(NamedTuple):
    """One stage of a request, on the engine's clock."""

    name: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class RequestTimes:
    """When a request passed each stage; None: it has not yet, or had nothing to do there."""

    added_s: float
    store_s: float | None = None
    """When it first waited for the store."""
    matched_s: float | None = None
    """When the cache was searched with success: then it could begin."""
    begun_s: float | None = None
    running_s: float | None = None
    """When all that it reuses was on the device. Equal to `begun_s` if nothing was loaded."""
    first_s: float | None = None
    """When its first token was drawn."""
    ended_s: float | None = None

    def stages(self) -> Iterator[StageTime]:
        """The stages that have ended, in order."""
        marks = (
            ("queue", self.added_s),
            ("fetch", self.store_s),
            ("match", self.matched_s),
            ("load", self.begun_s if self.running_s != self.begun_s else None),
            ("prefill", self.running_s),
            ("decode", self.first_s),
            ("", self.ended_s),
        )
        passed = [(name, at) for name, at in marks if at is not None]
        for (name, start), (_, end) in zip(passed, passed[1:], strict=False):
            yield StageTime(name, start, end)


@dataclass(frozen=True)
class HistogramStats:
    """How many values were at most each bound. The last count: values above all bounds."""

    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float


class Histogram:
    """Counts values by size."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count the same value `count` times."""
        self._counts[bisect_left(self.bounds, value)] += count
        self._sum += value * count

    def stats(self) -> HistogramStats:
        return HistogramStats(self.bounds, tuple(self._counts), self._sum)


class EngineTimes:
    """Times of all requests together."""

    def __init__(self) -> None:
        self.queue = Histogram(QUEUE_BOUNDS_S)
        self.first_token = {source: Histogram(QUEUE_BOUNDS_S) for source in SOURCES}
        self.inter_token = Histogram(TOKEN_BOUNDS_S)

    def drawn(self, now_s: float, gaps: Mapping[tuple[float, int], int]) -> None:
        """A step ended. `gaps`: for each time of the last token before, how many texts drew how many tokens.

        Tokens of one step arrive together: each counts as an equal part of the time since the last one.
        """
        for (before_s, tokens), texts in gaps.items():
            self.inter_token.add((now_s - before_s) / tokens, tokens * texts)

    def stats(self) -> dict[str, HistogramStats | dict[str, HistogramStats]]:
        return {
            "queue_s": self.queue.stats(),
            "first_token_s": {source: each.stats() for source, each in self.first_token.items()},
            "inter_token_s": self.inter_token.stats(),
        }
