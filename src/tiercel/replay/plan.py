"""Which sizes of the tiers are worth their price: one replay for each size and policy.

    cost = device seconds × price of a device  +  GiB of host and store × their prices × time

Memory that saves no computing only costs, and memory that does makes the device's share smaller. The size
with the least cost is marked. So the mark depends on what was found with each size and on the prices, and not
on which other sizes were tried: another size takes the mark only if it costs less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from tiercel.replay.prices import GIB, Prices
from tiercel.replay.report import Report
from tiercel.replay.run import Rates, Serving
from tiercel.replay.sizes import Sizes
from tiercel.replay.trace import Trace
from tiercel.replay.workers import Work, replay_all
from tiercel.spec.cache_spec import CacheSpec

POINTS = 7
"""Host sizes of a plan that names none: each is twice the one before it."""

HOUR_S = 3600.0


@dataclass(frozen=True)
class Point:
    """One replay of a plan."""

    sizes: Sizes
    report: Report
    cost: float = 0.0
    """Of all requests: the time that a device computes, and memory for as long as they come, or as they take
    where that is longer."""
    best: bool = False
    """It costs less than all others with the same device memory and policy."""
    saved_tokens_per_gib: float | None = None
    """Prompt tokens that need not be computed for each GiB of host memory more than the size before has.
    None: it is the first."""

    @property
    def hours(self) -> float:
        """How long memory is paid for."""
        return max(self.report.arrivals_s, self.report.busy_s) / HOUR_S

    @property
    def memory_bytes(self) -> int:
        return self.sizes.host_bytes + self.sizes.store_bytes

    def as_dict(self) -> dict[str, Any]:
        own = {"best": self.best, "cost": self.cost, "saved_tokens_per_gib": self.saved_tokens_per_gib}
        return self.sizes.as_dict() | own | self.report.as_dict()


def default_host_sizes(trace: Trace, spec: CacheSpec) -> list[int]:
    """Sizes that double, up to the size of all pages of the trace."""
    pages = len({key for request in trace.requests for key in request.keys})
    least = spec.place_bytes * max(1, spec.places_per_tail)
    largest = max(pages * spec.place_bytes, least)
    return sorted({max(least, largest >> shift) for shift in range(POINTS)})


def sizes_of(devices: Sequence[Sizes], hosts: Sequence[int], stores: Sequence[int]) -> list[Sizes]:
    """Each device memory alone, then with every store and host memory."""
    more = [(host, store) for store in sorted({*stores}) for host in sorted({*hosts}) if host]
    return [
        Sizes(device.device_bytes, host, store, device.places)
        for device in devices
        for host, store in [(0, 0), *more]
    ]


def plan(  # noqa: PLR0913
    trace: Trace,
    spec: CacheSpec,
    sizes: Sequence[Sizes],
    policies: Sequence[str],
    serving: Serving,
    *,
    prices: Prices = Prices(),  # noqa: B008 - a frozen value
    sparse: bool = False,
    processes: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Point]:
    """A curve for each policy, device memory and size of the store, along the sizes of the host.

    `sparse`: with host memory, pages of running texts may be sparse. `progress` is called with the number of
    requests that have ended in any of the replays.
    """
    works = [Work(each, policy) for policy in policies for each in sizes]
    reports = replay_all(trace, spec, serving, works, sparse=sparse, processes=processes, progress=progress)
    found = list(zip(works, reports, strict=True))
    curves = groupby(found, key=lambda each: (each[0].policy, each[0].sizes.device_bytes))
    return [point for _, own in curves for point in curve_of([*own], prices)]


def curve_of(found: Sequence[tuple[Work, Report]], prices: Prices) -> Iterator[Point]:
    """The points of one policy and device memory. The one that costs the least is the best; of equal ones,
    the one with the least memory."""
    points: list[Point] = []
    for (sizes, _), report in found:
        saved = None
        if points and points[-1].sizes.store_bytes == sizes.store_bytes:
            before = points[-1]
            more = (sizes.host_bytes - before.sizes.host_bytes) / GIB
            saved = (before.report.computed_tokens - report.computed_tokens) / more
        point = Point(sizes, report, saved_tokens_per_gib=saved)
        busy = report.busy_s / HOUR_S * prices.device
        points.append(replace(point, cost=busy + point.hours * prices.of_memory(sizes)))
    best = min(points, key=lambda point: (point.cost, point.memory_bytes))
    return (replace(point, best=point is best) for point in points)


def verdict(curve: Sequence[Point], prices: Prices, rates: Rates) -> str:
    """Which size of a curve is worth its price, and why, in a sentence."""
    (best,) = (point for point in curve if point.best)
    none, *others = curve
    must_save = prices.host_gib * best.hours * HOUR_S / prices.device * rates.prefill_tokens_s
    must = f"{must_save:,.0f} tokens in {best.hours:,.1f} h"
    if not others:
        return (
            f"only the device alone was tried: to be worth its price, a GiB of host memory must save {must}"
        )
    if not best.memory_bytes:
        tried = [(_saved(none, point), point.sizes.host_bytes / GIB) for point in others]
        near = "".join(
            f"; {size:,.1f} GiB saves {saved:,.0f} with each" for saved, size in sorted(tried)[-1:]
        )
        return f"host memory does not help here: to be worth its price, a GiB must save {must}{near}"
    store = f" with a store of {best.sizes.store_bytes / GIB:,.0f} GiB" if best.sizes.store_bytes else ""
    less = 1 - best.cost / none.cost
    text = (
        f"host {best.sizes.host_bytes / GIB:,.1f} GiB{store} is worth its price: {less:.0%} cheaper than the "
        f"device alone. A GiB must save {must}; each of these saves {_saved(none, best):,.0f}"
    )
    for point in others:
        if (
            point.sizes.store_bytes == best.sizes.store_bytes
            and point.sizes.host_bytes > best.sizes.host_bytes
        ):
            more = f"{point.saved_tokens_per_gib:,.0f}"
            return f"{text}; each more, up to {point.sizes.host_bytes / GIB:,.1f} GiB, would save {more}"
    return f"{text}. It is the largest that was tried"


def _saved(none: Point, point: Point) -> float:
    """Prompt tokens that each GiB of host memory saves, beside a device alone."""
    less = none.report.computed_tokens - point.report.computed_tokens
    return less / (point.sizes.host_bytes / GIB)
