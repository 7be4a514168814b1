"""Metrics for Prometheus: the engine's statistics, as `metric_families` names them, and the server's own."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from itertools import accumulate, chain
from math import inf
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tiercel.asks.ask import Usage
from tiercel.server.http.metric_families import FAMILIES, STARTED, described, family_of

PREFIX = "tiercel"

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Histogram buckets: from a cached answer of the embedded model to a long answer in a full queue."""


TENANT_TOKENS = ("prompt", "cached", "completion")
TENANT_TOKENS_ABOUT = (
    "Tokens of a tenant's requests: prompt, cached (those of the prompt that were not computed), completion"
)
TENANT_LIMITS = ("requests-in-flight", "requests-per-minute", "tokens-per-minute")


TIMES = {
    "queue_s": ("queue_time", "Seconds from a request's arrival at the engine to its beginning", ()),
    "first_token_s": (
        "first_token_by_source",
        "Seconds from a request's arrival at the engine to its first token, by the slowest tier it reused",
        ("source",),
    ),
    "inter_token_s": (
        "inter_token",
        "Seconds from token to token of an answer; tokens of one step count as equal parts of its time",
        (),
    ),
}
"""Histograms of the engine: their names, what they are, their labels."""


def histograms(times: Mapping[str, Any]) -> Iterator[HistogramMetricFamily]:
    """The engine's histograms (`asks.times`)."""
    for key, (name, about, labels) in TIMES.items():
        if key in times:
            text = described(about, STARTED)
            family = HistogramMetricFamily(f"{PREFIX}_{name}_seconds", text, labels=labels)
            for label, each in times[key].items() if labels else [("", times[key])]:
                counts = accumulate(each["counts"])
                buckets = [
                    ("+Inf" if bound == inf else str(float(bound)), count)
                    for bound, count in zip((*each["bounds"], inf), counts, strict=True)
                ]
                family.add_metric([label] if labels else [], buckets, each["sum"])
            yield family


class StatsCollector(Collector):
    """Writes the engine's statistics at the moment of the request."""

    def __init__(self) -> None:
        self.stats: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        metrics: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        yield from histograms(self.stats.get("times", {}))
        for path, value in chain(_zeros(self.stats), _leaves(self.stats, ())):
            found = family_of(path)
            if found is None or (not isinstance(value, int | float) and not found[0].states):
                continue
            family, labels = found
            if family.name not in metrics:
                make = CounterMetricFamily if family.grows else GaugeMetricFamily
                metrics[family.name] = make(f"{PREFIX}_{family.name}", family.help, labels=family.labels)
            for state in family.states:
                metrics[family.name].add_metric((state,), float(state == value))
            if not family.states:
                metrics[family.name].add_metric(labels, float(value))
        yield from metrics.values()


def _zeros(stats: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Labels that no value has yet."""
    for way, family in FAMILIES.items():
        if family is not None and family.words:
            first, second, _ = way.split(".")
            found = stats.get(first, {}).get(second)
            if found is not None:
                yield from (((first, second, word), 0) for word in family.words if word not in found)


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value that is not a mapping, with the names that lead to it."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from _leaves(below, (*path, str(name)))
    else:
        yield path, value


class ShownRegistry(CollectorRegistry):
    """Leaves out tenants that the reader may not see, and metrics without a value: SGLang's router adds pages
    of several servers up, and gives up if one of them has labels where another has none."""

    shown: Callable[[str], bool]
    """Whether the reader may see a tenant, by its name."""

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [
                each
                for each in metric.samples
                if not each.name.endswith("_created")  # all began with the process, whose start is a metric
                and ("tenant" not in each.labels or self.shown(each.labels["tenant"]))
            ]
            if metric.samples:
                yield metric


class Metrics:
    """One server's metrics. It has its own registry: two servers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = ShownRegistry()
        self._stats = StatsCollector()
        self.registry.register(self._stats)
        self._process = ProcessCollector(registry=self.registry)
        build = Info(
            f"{PREFIX}_build", "Versions of what runs here. The value is always 1.", registry=self.registry
        )
        build.info(
            {"python": platform.python_version(), "version": version("tiercel"), "torch": version("torch")}
        )
        self._requests = Counter(
            f"{PREFIX}_http_requests",
            described("HTTP requests that were answered, by call and status", STARTED),
            ("call", "status"),
            registry=self.registry,
        )
        self._seconds = self._histogram(
            "http_request_seconds", "Seconds from the first byte of a request to the last of its answer"
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "Seconds from the first byte of a request to the first token of its answer",
        )
        self._answers: frozenset[str] = frozenset()
        self._open = Gauge(
            f"{PREFIX}_http_requests_open",
            "HTTP requests that are being answered now.",
            registry=self.registry,
        )
        self._tenant_tokens = Counter(
            f"{PREFIX}_tenant_tokens",
            described(TENANT_TOKENS_ABOUT, STARTED),
            ("tenant", "tokens"),
            registry=self.registry,
        )
        self._tenant_refused = Counter(
            f"{PREFIX}_tenant_refused",
            described("Requests that a limit of their tenant refused", STARTED),
            ("tenant", "limit"),
            registry=self.registry,
        )
        self._tenant_requests = Counter(
            f"{PREFIX}_tenant_requests",
            described("Requests of a tenant that were answered", STARTED),
            ("tenant",),
            registry=self.registry,
        )

    def _histogram(self, name: str, about: str) -> Histogram:
        text = described(f"{about}, by call", STARTED)
        return Histogram(f"{PREFIX}_{name}", text, ("call",), buckets=SECONDS, registry=self.registry)

    def expect(self, calls: Iterable[str], *, answers: Iterable[str], tenants: Iterable[str] = ()) -> None:
        """These labels are there from the start, so that a rate has a first value. `answers`: calls that
        give tokens."""
        for call in calls:
            self._requests.labels(call, "200")
            self._seconds.labels(call)
        self._answers = frozenset(answers)
        for call in self._answers:
            self._first_token.labels(call)
        for tenant in tenants:
            self._tenant_requests.labels(tenant)
            for what in TENANT_TOKENS:
                self._tenant_tokens.labels(tenant, what)
            for limit in TENANT_LIMITS:
                self._tenant_refused.labels(tenant, limit)

    def used(self, tenant: str, usage: Usage) -> None:
        """A call of a tenant has ended."""
        self._tenant_requests.labels(tenant).inc()
        counts = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        for what, count in zip(TENANT_TOKENS, counts, strict=True):
            self._tenant_tokens.labels(tenant, what).inc(count)

    def refused(self, tenant: str, limit: str) -> None:
        self._tenant_refused.labels(tenant, limit).inc()

    def began(self) -> None:
        self._open.inc()

    def ended(self, call: str, status: int, seconds: float, first_token_s: float | None) -> None:
        self._open.dec()
        self._requests.labels(call, str(status)).inc()
        self._seconds.labels(call).observe(seconds)
        if first_token_s is not None:
            self._first_token.labels(call).observe(first_token_s)

    def counts(self) -> dict[str, Any]:
        """Numbers of the page that are not the engine's: requests of calls that give tokens, by call and
        status; requests and tokens of tenants; the bytes of this process, or 0 where nobody tells them."""
        requests: dict[str, dict[str, int]] = {}
        for (call, status), count in _values(self._requests):
            if call in self._answers:
                requests.setdefault(call, {})[status] = int(count)
        tenants: dict[str, dict[str, Any]] = {}
        for (tenant,), count in _values(self._tenant_requests):
            tenants[tenant] = {"requests": int(count), "tokens": {}, "refused": {}}
        for key, counter in (("tokens", self._tenant_tokens), ("refused", self._tenant_refused)):
            for (tenant, name), count in _values(counter):
                known = tenants.setdefault(tenant, {"requests": 0, "tokens": {}, "refused": {}})
                known[key][name] = int(count)
        process = {metric.name: metric.samples for metric in self._process.collect()}
        resident = process.get("process_resident_memory_bytes", ())
        own = sum(int(sample.value) for sample in resident)
        return {"requests": requests, "tenants": tenants, "process_bytes": own}

    def page(self, stats: Mapping[str, Any], *, shown: Callable[[str], bool]) -> bytes:
        """The page that Prometheus reads, with the engine's current statistics. `shown`: which tenants."""
        self._stats.stats, self.registry.shown = stats, shown
        return generate_latest(self.registry)


def _values(counter: Counter) -> Iterator[tuple[tuple[str, ...], float]]:
    """The labels of a counter, and their values."""
    for metric in counter.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                yield tuple(sample.labels.values()), sample.value
