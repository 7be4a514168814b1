"""Metrics for Prometheus: the engine's statistics and the server's own.

The statistics are nested (`status.stats_json`); `FAMILIES` says which levels are labels:

    {"cached_bytes": {"host": {"kv": 5}}}   →   tiercel_cached_bytes{tier="host",stream="kv"} 5
    {"store": {"state": "off"}}             →   tiercel_store_state{state="off"} 1, and 0 for the others

A dot in a key of `FAMILIES` goes one level down. Levels below the labels, and names that are not in the
table, are joined to the metric's name. Values that are not numbers are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain
from math import inf
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tiercel.engine.ask import Usage
from tiercel.storage.record import Flaw

PREFIX = "tiercel"

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Histogram buckets: from a cached answer of the embedded model to a long answer in a full queue."""


TENANT_TOKENS = ("prompt", "cached", "completion")
TENANT_LIMITS = ("requests-in-flight", "requests-per-minute", "tokens-per-minute")


@dataclass(frozen=True)
class MetricFamily:
    """How one part of the statistics becomes a metric."""

    about: str
    labels: tuple[str, ...] = ()
    grows: bool = False
    """Whether it is a counter: it never falls while the server runs."""
    states: tuple[str, ...] = ()
    """For a value that is one of these words: written as 1 for this word and 0 for the others."""
    name: str | None = None
    """None: the key in the table, with underscores."""
    words: tuple[str, ...] = ()
    """Labels that are there from the start, as 0."""


FAMILIES: Mapping[str, MetricFamily] = {
    "cached_bytes": MetricFamily("Bytes cached, by tier and stream.", ("tier", "stream")),
    "cached_items": MetricFamily("Pages and tails cached, by tier.", ("tier", "what")),
    "capacity_bytes": MetricFamily("Bytes that a tier holds when it is full.", ("tier",)),
    "compute_tokens_s": MetricFamily(
        "Recent speed of computing prompt tokens.", name="compute_tokens_per_second"
    ),
    "moved_bytes": MetricFamily(
        "Bytes moved between tiers, by direction and stream.", ("direction", "stream"), True
    ),
    "moved_s": MetricFamily("Time spent moving pages and tails, by direction.", ("direction", "what"), True),
    "hit_tokens": MetricFamily("Prompt tokens that were reused, by tier.", ("tier",), True),
    "pools": MetricFamily("Places of a pool.", ("pool",), name="pool"),
    "queue": MetricFamily("Requests, by where they are."),
    "counters": MetricFamily("Counted by the cache.", grows=True, name=""),
    "engine": MetricFamily("Counted by the engine.", grows=True),
    "accept_length": MetricFamily(
        "Tokens per step with guesses, over the first 8 tokens after requests began, by the slowest tier "
        "that their beginnings came from.",
        ("source",),
    ),
    "store.attached": MetricFamily("Whether there is a store."),
    "store.state": MetricFamily(
        "Whether the store is used.", ("state",), states=("working", "off", "trying")
    ),
    "store.records": MetricFamily("Pages and tails in the store, where that is known."),
    "store.bytes": MetricFamily("Bytes in the store, where that is known."),
    "store.saved_bytes": MetricFamily("Bytes written to the store.", grows=True),
    "store.read_bytes": MetricFamily("Bytes read from the store.", grows=True),
    "store.queued_bytes": MetricFamily("Bytes waiting to be written to the store."),
    "store.read_bytes_s": MetricFamily("Recent read speed of the store.", name="store_read_bytes_per_second"),
    "store.compute_tokens_s": MetricFamily(
        "Recent speed of computing prompt tokens.", name="store_compute_tokens_per_second"
    ),
    "store.flaws": MetricFamily(
        "Records that were not what was asked for.",
        ("flaw",),
        True,
        words=tuple(flaw.name.lower() for flaw in Flaw),
    ),
    "store.counters": MetricFamily("Counted by the store tier.", grows=True, name="store"),
    "store.store": MetricFamily("The store's own statistics.", name="store_own"),
    "shared": MetricFamily("Host pages offered to other servers.", name="shared"),
    "owners": MetricFamily(
        "Bytes of a tenant on device and host, and how many it may have.", ("tenant",), name="tenant"
    ),
    "events": MetricFamily("KV events: batches published, dropped, failed.", grows=True),
}


UNKNOWN = MetricFamily("As the engine says.")

TIMES = {
    "queue_s": ("queue_time", "From a request's arrival at the engine to its beginning.", ()),
    "first_token_s": (
        "first_token_by_source",
        "From a request's arrival at the engine to its first token, by the slowest tier it reused.",
        ("source",),
    ),
    "inter_token_s": ("inter_token", "From token to token of an answer, as the engine draws them.", ()),
}
"""Histograms of the engine: their names, what they are, their labels."""


def histograms(times: Mapping[str, Any]) -> Iterator[HistogramMetricFamily]:
    """The engine's histograms (`engine.times`)."""
    for key, (name, about, labels) in TIMES.items():
        if key in times:
            family = HistogramMetricFamily(f"{PREFIX}_{name}_seconds", about, labels=labels)
            for label, each in times[key].items() if labels else [("", times[key])]:
                counts = accumulate(each["counts"])
                buckets = [
                    ("+Inf" if bound == inf else str(float(bound)), count)
                    for bound, count in zip((*each["bounds"], inf), counts, strict=True)
                ]
                family.add_metric([label] if labels else [], buckets, each["sum"])
            yield family


class StatsCollector(Collector):
    """Writes the engine's statistics of the moment the page was requested."""

    def __init__(self) -> None:
        self.stats: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        metrics: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        yield from histograms(self.stats.get("times", {}))
        for path, value in chain(_zeros(self.stats), _leaves(self.stats, ())):
            depth = 2 if ".".join(path[:2]) in FAMILIES else 1
            family = FAMILIES.get(".".join(path[:depth]), UNKNOWN)
            count = len(family.labels)
            labels, words = path[depth : depth + count], path[depth + count :]
            stem = "_".join(path[:depth]) if family.name is None else family.name
            name = _name((stem, *words))
            if path[0] == "times" or (not isinstance(value, int | float) and not family.states):
                continue
            if name not in metrics:
                make = CounterMetricFamily if family.grows else GaugeMetricFamily
                metrics[name] = make(name, family.about, labels=family.labels)
            for state in family.states:
                metrics[name].add_metric((state,), float(state == value))
            if not family.states:
                metrics[name].add_metric(labels, float(value))
        yield from metrics.values()


def _zeros(stats: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Labels that no value has yet."""
    for key, family in FAMILIES.items():
        if family.words:
            first, second = key.split(".")
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


def _name(words: tuple[str, ...]) -> str:
    joined = re.sub(r"[^a-z0-9_]+", "_", "_".join((PREFIX, *filter(None, words))).lower())
    return re.sub(r"_s$", "_seconds", joined)


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
                if "tenant" not in each.labels or self.shown(each.labels["tenant"])
            ]
            if metric.samples:
                yield metric


class Metrics:
    """One server's metrics. It has its own registry: two servers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = ShownRegistry()
        self._stats = StatsCollector()
        self.registry.register(self._stats)
        self._requests = Counter(
            f"{PREFIX}_http_requests", "Requests answered.", ("call", "status"), registry=self.registry
        )
        self._seconds = self._histogram(
            "http_request_seconds", "From the first byte of a request to the last of its answer."
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "From the first byte of a request to the first token of its answer.",
        )
        self._open = Gauge(f"{PREFIX}_http_requests_open", "Requests now open.", registry=self.registry)
        self._tenant_tokens = Counter(
            f"{PREFIX}_tenant_tokens",
            "Tokens of a tenant's requests: prompt, of these cached, and completion.",
            ("tenant", "tokens"),
            registry=self.registry,
        )
        self._tenant_refused = Counter(
            f"{PREFIX}_tenant_refused",
            "Requests that a limit of their tenant refused.",
            ("tenant", "limit"),
            registry=self.registry,
        )
        self._tenant_requests = Counter(
            f"{PREFIX}_tenant_requests",
            "Requests of a tenant that the engine was asked.",
            ("tenant",),
            registry=self.registry,
        )

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", about, ("call",), buckets=SECONDS, registry=self.registry)

    def expect(self, calls: Iterable[str], *, answers: Iterable[str], tenants: Iterable[str] = ()) -> None:
        """These labels are there from the start, so that a rate has a first value. `answers`: calls that
        give tokens."""
        for call in calls:
            self._requests.labels(call, "200")
            self._seconds.labels(call)
        for call in answers:
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

    def page(self, stats: Mapping[str, Any], *, shown: Callable[[str], bool]) -> bytes:
        """The page that Prometheus reads, with the engine's current statistics. `shown`: which tenants."""
        self._stats.stats, self.registry.shown = stats, shown
        return generate_latest(self.registry)
