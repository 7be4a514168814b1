"""Which sizes of host and store bring which hit ratio: one replay for each size and policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from tiercel.replay.report import Report
from tiercel.replay.run import Serving, Sizes, replay
from tiercel.replay.trace import Trace
from tiercel.spec.cache_spec import CacheSpec

GIB = 2**30
POINTS = 7
"""Host sizes of a plan that names none: each is twice the one before it."""


@dataclass(frozen=True)
class Point:
    """One replay of a plan."""

    sizes: Sizes
    report: Report
    knee: bool = False
    """The last size of its curve that is still worth its bytes (`knee_of`)."""
    saved_tokens_per_gib: float | None = None
    """Prompt tokens that need not be computed for each GiB more than the size before; None: the first."""

    def as_dict(self) -> dict[str, Any]:
        own = vars(self.sizes) | {"knee": self.knee, "saved_tokens_per_gib": self.saved_tokens_per_gib}
        return own | self.report.as_dict()


def default_host_sizes(trace: Trace, spec: CacheSpec) -> list[int]:
    """Sizes that double, up to the size of all pages of the trace."""
    pages = len({key for request in trace.requests for key in request.keys})
    least = spec.place_bytes * max(1, spec.places_per_tail)
    largest = max(pages * spec.place_bytes, least)
    return sorted({max(least, largest >> shift) for shift in range(POINTS)})


def plan(
    trace: Trace,
    spec: CacheSpec,
    sizes: Sequence[Sizes],
    policies: Sequence[str],
    serving: Serving,
    *,
    processes: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Point]:
    """A curve for each policy and size of the store, along the sizes of the host; each with its knee.

    `progress` is called with 1 whenever a replay has ended.
    """
    works = [(each, policy) for policy in policies for each in sizes]
    most = min(len(works), processes or os.cpu_count() or 1)
    if most == 1:
        reports = {work: _tell(_replay(trace, spec, serving, *work), progress) for work in works}
    else:
        state = trace, spec, serving
        with ProcessPoolExecutor(most, get_context("spawn"), _begin, state) as pool:
            futures = {pool.submit(_work, *work): work for work in works}
            reports = {futures[done]: _tell(done.result(), progress) for done in as_completed(futures)}
    points: list[Point] = []
    for policy in policies:
        for store in sorted({each.store_bytes for each in sizes}):
            own = sorted((each for each in sizes if each.store_bytes == store), key=lambda s: s.host_bytes)
            points += _curve([(each, reports[each, policy]) for each in own])
    return points


def _curve(curve: Sequence[tuple[Sizes, Report]]) -> Iterable[Point]:
    knee = knee_of([(each.host_bytes, report.hit_ratio) for each, report in curve])
    for number, (sizes, report) in enumerate(curve):
        saved = None
        if number:
            before, last = curve[number - 1]
            more = (sizes.host_bytes - before.host_bytes) / GIB
            saved = (last.computed_tokens - report.computed_tokens) / more if more else None
        yield Point(sizes, report, number == knee, saved)


def knee_of(curve: Sequence[tuple[float, float]]) -> int | None:
    """The point of a curve that lies farthest above the straight line from its first to its last point.

    None: fewer than three points, or none lies above the line.
    """
    if len(curve) < 3:
        return None
    (x0, y0), (x1, y1) = curve[0], curve[-1]
    above = [y - (y0 + (y1 - y0) * (x - x0) / (x1 - x0)) for x, y in curve]
    best = max(range(len(curve)), key=above.__getitem__)
    return best if above[best] > 1e-9 else None


def _tell(report: Report, progress: Callable[[int], None]) -> Report:
    progress(1)
    return report


def _replay(trace: Trace, spec: CacheSpec, serving: Serving, sizes: Sizes, policy: str) -> Report:
    return replay(trace, spec, sizes, policy=policy, serving=serving)


# In a process of the plan

_STATE: list[tuple[Trace, CacheSpec, Serving]] = []


def _begin(trace: Trace, spec: CacheSpec, serving: Serving) -> None:
    _STATE.append((trace, spec, serving))


def _work(sizes: Sizes, policy: str) -> Report:
    return _replay(*_STATE[0], sizes, policy)
