"""Metrics for Prometheus: the engine's statistics and the server's own.

The statistics are nested (`status.stats_json`); `FAMILIES` says which levels are labels:

    {"cached_bytes": {"host": {"kv": 5}}}   →   tiercel_cached_bytes{tier="host",stream="kv"} 5
    {"store": {"state": "off"}}             →   tiercel_store_state{state="off"} 1, and 0 for the others

A dot in a key of `FAMILIES` goes one level down. Levels below the labels, and names that are not in the
table, are joined to the metric's name. Values that are not numbers are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "tiercel"

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Histogram buckets: from a cached answer of the embedded model to a long answer in a full queue."""


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
    "store.flaws": MetricFamily("Records that were not what was asked for.", ("flaw",), True),
    "store.counters": MetricFamily("Counted by the store tier.", grows=True, name="store"),
    "store.store": MetricFamily("The store's own statistics.", name="store_own"),
    "shared": MetricFamily("Host pages offered to other servers.", name="shared"),
    "events": MetricFamily("KV events: batches published, dropped, failed.", grows=True),
}


UNKNOWN = MetricFamily("As the engine says.")


class StatsCollector(Collector):
    """Writes the engine's statistics of the moment the page was requested."""

    def __init__(self) -> None:
        self.stats: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        metrics: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for path, value in _leaves(self.stats, ()):
            depth = 2 if ".".join(path[:2]) in FAMILIES else 1
            family = FAMILIES.get(".".join(path[:depth]), UNKNOWN)
            count = len(family.labels)
            labels, words = path[depth : depth + count], path[depth + count :]
            stem = "_".join(path[:depth]) if family.name is None else family.name
            name = _name((stem, *words))
            if not isinstance(value, int | float) and not family.states:
                continue
            if name not in metrics:
                make = CounterMetricFamily if family.grows else GaugeMetricFamily
                metrics[name] = make(name, family.about, labels=family.labels)
            for state in family.states:
                metrics[name].add_metric((state,), float(state == value))
            if not family.states:
                metrics[name].add_metric(labels, float(value))
        yield from metrics.values()


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


class FilledRegistry(CollectorRegistry):
    """Leaves out metrics without a value. SGLang's router adds pages of several servers up, and gives up if
    one of them has labels where another has none."""

    def collect(self) -> Iterator[Metric]:
        return (metric for metric in super().collect() if metric.samples)


class Metrics:
    """One server's metrics. It has its own registry: two servers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = FilledRegistry()
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

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", about, ("call",), buckets=SECONDS, registry=self.registry)

    def began(self) -> None:
        self._open.inc()

    def ended(self, call: str, status: int, seconds: float, first_token_s: float | None) -> None:
        self._open.dec()
        self._requests.labels(call, str(status)).inc()
        self._seconds.labels(call).observe(seconds)
        if first_token_s is not None:
            self._first_token.labels(call).observe(first_token_s)

    def page(self, stats: Mapping[str, Any]) -> bytes:
        """The page that Prometheus reads, with the engine's current statistics."""
        self._stats.stats = stats
        return generate_latest(self.registry)
