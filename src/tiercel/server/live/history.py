"""What the last minutes, the last hour and the last day brought, for the page: how much the counters grew.

    reading ──── 10 s ────► reading ──── 10 s ────► reading        counters, which never fall
             growth                  growth                        added to one step of every span

A span is some steps of one length. The memory is bounded by their number: a step has only counters that grew.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

Numbers = dict[str, Any]
"""Numbers by name, to any depth, and lists of numbers: the counts of a histogram."""

READ_S = 10
"""Counters are read at least so often: the length of the shortest step. Every step is a multiple of it."""


@dataclass(frozen=True)
class Span:
    step_s: int
    steps: int


SPANS = {"5 minutes": Span(READ_S, 30), "1 hour": Span(120, 30), "24 hours": Span(1800, 48)}
"""As many steps as a narrow chart can show."""


def counters(stats: Numbers, http: Numbers) -> Numbers:
    """The counters whose past the page shows, where the page finds them in the state of the feed."""
    store, times = stats["store"], stats["times"]
    names = ("hit_tokens", "evicted", "engine", "stages", "shared")
    return {
        "http": {name: http[name] for name in ("requests", "tenants")},
        "stats": {name: stats[name] for name in names if name in stats}
        | {
            "counters": {
                name: stats["counters"].get(name, 0) for name in ("tokens_asked", "tokens_replayed")
            },
            "store": {"counters": store.get("counters", {}), "flaws": store.get("flaws", {})}
            | {"store": {"peers": (store.get("store") or {}).get("peers", {})}},
            "times": {
                "inter_token_s": _counts(times.get("inter_token_s")),
                "first_token_s": {
                    name: _counts(each) for name, each in times.get("first_token_s", {}).items()
                },
            },
        },
    }


def _counts(histogram: Numbers | None) -> Numbers:
    return {} if histogram is None else {"counts": histogram["counts"]}


def growth(before: Numbers, after: Numbers) -> Numbers:
    """How much each number grew. One that fell began again at 0. What did not grow, and what is no number, is
    left out."""
    grown: Numbers = {}
    for name, value in after.items():
        old = before.get(name)
        more: Any = None
        if isinstance(value, dict):
            more = growth(old if isinstance(old, dict) else {}, value)
        elif isinstance(value, list | tuple):
            more = [new - was for new, was in zip(value, old or [0] * len(value), strict=True)]
            more = more if any(more) else None
        elif isinstance(value, int | float):
            more = value - old if isinstance(old, int | float) and old <= value else value
        if more:
            grown[name] = more
    return grown


def total(first: Numbers, second: Numbers) -> Numbers:
    """Growth and growth, added up."""
    added = {**first, **second}
    for name in first.keys() & second.keys():
        one, other = first[name], second[name]
        if isinstance(one, dict):
            added[name] = total(one, other)
        elif isinstance(one, list):
            added[name] = [a + b for a, b in zip(one, other, strict=True)]
        else:
            added[name] = one + other
    return added


class History:
    """Growth by span and step. It begins with counters at 0."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.started_s = self._read_s = clock()
        self._before: Numbers = {}
        self._spans: dict[str, dict[int, Numbers]] = {name: {} for name in SPANS}

    def add(self, now: Numbers) -> None:
        """The counters were read. What they grew belongs to the step that most of the time since the last
        reading was in."""
        now_s, grown = self._clock(), growth(self._before, now)
        middle_s = (self._read_s + now_s) / 2
        for name, span in SPANS.items():
            steps = self._spans[name]
            if grown:
                at = _begin(middle_s, span)
                steps[at] = total(steps.get(at, {}), grown)
            oldest = _begin(now_s, span) - span.step_s * (span.steps - 1)
            for at in [at for at in steps if at < oldest]:
                del steps[at]
        self._before, self._read_s = now, now_s

    def json(self) -> dict[str, Any]:
        """Steps by their begin, so that two results differ in few entries."""
        return {name: {str(at): each for at, each in steps.items()} for name, steps in self._spans.items()}

    def about(self) -> dict[str, Any]:
        """What does not change."""
        return {
            "started_s": self.started_s,
            "spans": {name: asdict(span) for name, span in SPANS.items()},
        }


def _begin(at_s: float, span: Span) -> int:
    return int(at_s // span.step_s) * span.step_s
