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

    name: str
    about: str
    labels: tuple[str, ...] = ()
    grows: bool = False
    """Whether it is a counter: it never falls while the server runs."""
    states: tuple[str, ...] = ()
    """For a value that is one of these words: written as 1 for this word and 0 for the others."""

    def spread(self, value: Any) -> Any:
        return {state: state == value for state in self.states} if self.states else value


FAMILIES: Mapping[str, MetricFamily] = {
    "cached_bytes": MetricFamily("cached_bytes", "Bytes cached, by tier and stream.", ("tier", "stream")),
    "moved_bytes": MetricFamily(
        "moved_bytes", "Bytes moved between tiers, by direction and stream.", ("direction", "stream"), True
    ),
    "moved_s": MetricFamily(
        "moved_seconds", "Time spent moving pages and tails, by direction.", ("direction", "what"), True
    ),
    "hit_tokens": MetricFamily("hit_tokens", "Prompt tokens that were reused, by tier.", ("tier",), True),
    "pools": MetricFamily("pool", "Places of a pool.", ("pool",)),
    "queue": MetricFamily("queue", "Requests, by where they are."),
    "counters": MetricFamily("", "Counted by the cache.", grows=True),
    "engine": MetricFamily("engine", "Counted by the engine.", grows=True),
    "store.attached": MetricFamily("store_attached", "Whether there is a store."),
    "store.state": MetricFamily(
        "store_state", "Whether the store is used.", ("state",), states=("working", "off", "trying")
    ),
    "store.records": MetricFamily("store_records", "Pages and tails in the store, where that is known."),
    "store.bytes": MetricFamily("store_bytes", "Bytes in the store, where that is known."),
    "store.saved_bytes": MetricFamily("store_saved_bytes", "Bytes written to the store.", grows=True),
    "store.read_bytes": MetricFamily("store_read_bytes", "Bytes read from the store.", grows=True),
    "store.queued_bytes": MetricFamily("store_queued_bytes", "Bytes waiting to be written to the store."),
    "store.read_bytes_s": MetricFamily("store_read_bytes_per_second", "How fast the store was, lately."),
    "store.compute_tokens_s": MetricFamily(
        "store_compute_tokens_per_second", "How fast tokens are computed that a store might spare, lately."
    ),
    "store.flaws": MetricFamily("store_flaws", "Records that were not what was asked for.", ("flaw",), True),
    "store.counters": MetricFamily("store", "Counted by the store tier.", grows=True),
    "store.store": MetricFamily("store_own", "As the store says."),
    "events": MetricFamily("events", "KV events: batches published, dropped, failed.", grows=True),
}


class StatsCollector(Collector):
    """Writes the engine's statistics of the moment the page was requested."""

    def __init__(self) -> None:
        self.stats: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        metrics: dict[str, Metric] = {}
        for family, value in _parts(self.stats):
            for labels, words, number in _leaves(family.spread(value), family.labels, (), (family.name,)):
                name = _name(words)
                if name not in metrics:
                    make = CounterMetricFamily if family.grows else GaugeMetricFamily
                    metrics[name] = make(name, family.about, labels=family.labels[: len(labels)])
                metric = metrics[name]
                assert isinstance(metric, CounterMetricFamily | GaugeMetricFamily)
                metric.add_metric(labels, number)
        yield from metrics.values()


def _parts(stats: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[MetricFamily, Any]]:
    """The statistics, split into the families of the table."""
    for key, value in stats.items():
        here = (*path, key)
        name = ".".join(here)
        if name in FAMILIES:
            yield FAMILIES[name], value
        elif isinstance(value, Mapping) and any(known.startswith(f"{name}.") for known in FAMILIES):
            yield from _parts(value, here)
        else:
            yield MetricFamily("_".join(here), "As the engine says."), value


Leaf = tuple[tuple[str, ...], tuple[str, ...], float]


def _leaves(
    value: Any, names: tuple[str, ...], labels: tuple[str, ...], words: tuple[str, ...]
) -> Iterator[Leaf]:
    """(label values, words of the name, number) for every number in `value`."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            if names:
                yield from _leaves(below, names[1:], (*labels, str(key)), words)
            else:
                yield from _leaves(below, names, labels, (*words, str(key)))
    elif isinstance(value, int | float):
        yield labels, words, float(value)


def _name(words: tuple[str, ...]) -> str:
    joined = re.sub(r"[^a-z0-9_]+", "_", "_".join((PREFIX, *filter(None, words))).lower())
    return re.sub(r"_s$", "_seconds", joined)


class Metrics:
    """One server's metrics. It has its own registry: two servers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._stats = StatsCollector()
        self.registry.register(self._stats)
        self._requests = Counter(
            f"{PREFIX}_http_requests", "Requests answered.", ("call", "status"), registry=self.registry
        )
        self._seconds = self._histogram(
            "http_request", "From the first byte of a request to the last of its answer."
        )
        self._first_token = self._histogram(
            "time_to_first_token", "From the first byte of a request to the first token of its answer."
        )
        self._open = Gauge(f"{PREFIX}_http_requests_open", "Requests now open.", registry=self.registry)

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(
            f"{PREFIX}_{name}_seconds", about, ("call",), buckets=SECONDS, registry=self.registry
        )

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
