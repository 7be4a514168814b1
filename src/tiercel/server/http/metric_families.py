"""What every metric counts: names, labels and words for the engine's statistics (`status.stats_json`).

A key of `FAMILIES` is the way to a number; a star stands for a name that becomes a label:

    "cached_bytes.*.*"   {"cached_bytes": {"host": {"kv": 5}}}   →   …_cached_bytes{tier="host",stream="kv"} 5

If the value is `None`, the number is left out, because another metric has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tiercel.storage.record import Flaw

STARTED = "since the server started"
ATTACHED = "since the store was attached"


@dataclass(frozen=True)
class Family:
    """How one number, or the numbers with the same name, become a metric."""

    name: str
    """The name without the prefix, and without the `_total` of a counter."""
    about: str
    """What is counted, and in which unit."""
    labels: tuple[str, ...] = ()
    """One label for each star."""
    since: str = ""
    """When a counter, which never falls, began to count."""
    states: tuple[str, ...] = ()
    """For a value that is one of these words: written as 1 for this word and 0 for the others."""
    words: tuple[str, ...] = ()
    """Labels that are there from the start, as 0."""

    @property
    def grows(self) -> bool:
        return bool(self.since)

    @property
    def help(self) -> str:
        return described(self.about, self.since)


def described(about: str, since: str) -> str:
    """The help of a metric."""
    return f"{about}. Counted {since}." if since else f"{about}."


def _counted(way: str, start: str, texts: Mapping[str, str | None], since: str) -> dict[str, Family | None]:
    """Counters of one mapping: `texts` has what each counts, `start` begins their names."""
    return {
        f"{way}.{key}": None if text is None else Family(f"{start}{key}", text, since=since)
        for key, text in texts.items()
    }


def _now(way: str, start: str, texts: Mapping[str, str]) -> dict[str, Family | None]:
    """Gauges of one mapping: numbers that rise and fall."""
    return {f"{way}.{key}": Family(f"{start}{key}", text) for key, text in texts.items()}


def _labelled(families: Mapping[str, Family | None], label: str) -> dict[str, Family | None]:
    return {way: each and replace(each, labels=(label,)) for way, each in families.items()}


CACHE = {
    "requests": "Requests that began: what they reuse was found, and their places were reserved. A request "
    "that was preempted, or whose load failed, begins again and counts again",
    "requests_finished": None,  # finished_stop and finished_length of the engine
    "requests_preempted": None,  # preemptions of the engine
    "requests_aborted": None,  # finished_abort and finished_error of the engine
    "requests_failed": None,  # loads_failed of the engine
    "tokens_asked": "Prompt tokens of requests, each request once. hit_tokens tells how many of them a tier "
    "supplied; all others were computed",
    "tokens_device": None,  # hit_tokens
    "tokens_host": None,
    "tokens_store": None,
    "tokens_replayed": "Prompt tokens that were computed although their pages were found, because no tail "
    "follows these pages (exact replay). They are not among hit_tokens",
    "observer_errors": "Batches of cache events that could not be told because the observer failed",
    "loads": "Copies from the host to the device that ended well. One copy moves many pages and tails",
    "loads_failed": "Copies from the host to the device that failed",
    "pages_loaded": "Pages copied from the host to the device",
    "tails_loaded": "Tails copied from the host to the device",
    "saves": "Copies from the device to the host that ended well. One copy moves many pages and tails",
    "saves_failed": "Copies from the device to the host that failed",
    "pages_saved": "Pages copied from the device to the host",
    "tails_saved": "Tails copied from the device to the host",
    "pages_sparse": "Pages that became sparse: from then on, the entries of them that attention selects are "
    "read on the host",
    "pages_back": "Sparse pages that were loaded back and are whole on the device again",
}

SPARSE_NOW = {
    "pages_whole": "Pages of running texts that are whole on the device now. A page that several texts read "
    "counts for each of them",
    "pages_sparse": "Pages of running texts that are sparse now: their selected entries are on the host. A "
    "page that several texts read counts for each of them",
    "places_hot": "Places of the device that hold hot rows now: single entries of sparse pages",
}

SPARSE = {
    "entries_hit": "Selected entries of sparse pages that were in hot rows already, over all layers",
    "entries_missed": "Selected entries of sparse pages that were in no hot row and came from the host, over "
    "all layers",
    "bytes_gathered": "Bytes of single entries that were brought from the host to hot rows",
    "bytes_staged": "Bytes of whole rows of sparse pages that were brought from the host, for steps with "
    "many tokens of a text",
}

ENGINE = {
    "asks": "Texts that the engine was asked to continue. A call for n answers asks n times",
    "steps": "Steps that the model computed",
    "steps_failed": "Steps that failed. All texts of such a step end with an error",
    "tokens_drawn": "Tokens of answers that the model drew",
    "tokens_computed": "Tokens that the model computed, of prompts and answers, the replayed ones with them",
    "preemptions": "Times that a running request gave its device pages up for another one, and waited again",
    "loads_failed": "Requests whose load from the host failed. They began again, and computed those tokens",
    "begun_early": "Requests that were computed while their load was under way, layer by layer",
    "guesses": "Guessed tokens that were computed (speculation)",
    "guesses_accepted": "Guessed tokens that were right",
    "guessing_steps": "Steps of a text that had guesses, each text of a step for itself",
    "guessing_tokens": "Tokens that were drawn in steps with guesses",
    "prompts_elsewhere": "Prompts that another server computed for this one",
    "pages_elsewhere": "Pages of prompts that another server computed and this one pulled",
    "finished_stop": "Answers that ended with a stop token or a stop string",
    "finished_length": "Answers that ended because they reached their longest length",
    "finished_abort": "Answers that ended because the client left or aborted them",
    "finished_error": "Answers that ended with an error of the engine",
    "finished_grammar": "Answers that ended because they could not follow their grammar",
}

STORE_TIER = {
    "writes_dropped": "Pages and tails that were not written to the store because too many were waiting",
    "writes_passed": "Pages and tails that were not written to the store because they had left the host, or "
    "were not worth it, when their turn came",
    "writes_lost": "Pages and tails that were not written to the store because writing failed several times",
    "writes_refused": "Pages and tails that the store did not keep, because it is full or they are too large",
    "pages_written": "Pages written to the store",
    "tails_written": "Tails written to the store",
    "bytes_written": None,  # store.saved_bytes
    "bytes_read": None,  # store.read_bytes
    "timeouts": "Calls to the store that did not return in time",
    "failures": "Calls to the store that failed, after they were tried again",
    "fetches": "Requests for which the store was asked",
    "fetches_late": "Fetches that were given up because the store took too long",
    "fetches_not_worth": "Fetches that were not begun because computing was expected to be faster",
}

STORE_NUMBERS = {
    "bytes_on_disk": "Bytes of the files of the store, with what compaction can still free",
    "bytes_most": "Bytes that the store may hold",
    "segments": "Segment files of the store",
    "segment_bytes": "Bytes of a full segment file of the store",
    "direct": "Whether the store reads and writes past the page cache of the system: 1 or 0",
    "read_only": "Whether the store can only be read: 1 or 0",
    "server_bytes": "Bytes of memory of the whole Redis server, all its users together",
    "server_bytes_most": "Bytes of memory that the Redis server may use (its maxmemory)",
}

STORE_COUNTS = {
    "evicted": "Records, of this model and of others, that the store removed to make room",
    "damaged": "Records that the store could not read when it was opened or checked",
}

PEERS = {
    "reads": "Reads from a peer",
    "bytes_read": "Bytes read from a peer",
    "failures": "Calls to a peer that failed: it is not there, refuses, or is too slow",
    "other_form": "Answers of a peer that runs with another model or format, and can not be used",
    "connections": "Connections opened to a peer",
    "restarts": "Times that a peer was found to have restarted",
}

SHARED = {
    "bytes_sent": "Bytes of host pages sent to other servers",
    "records_sent": "Records sent to other servers (up to 4 for a page or tail)",
    "leases": "Times that other servers were promised that host pages stay while they read them",
    "leases_timed_out": "Such promises that ended before the other server had read everything",
    "keys_refused": "Connections of other servers that were refused because their key was wrong",
    "readers_refused": "Connections of other servers that were refused because there were too many",
    "errors": "Connections of other servers that ended with an error",
}

EVENTS = {
    "batches": "Batches of KV events that were sent to at least one subscriber",
    "unheard": "Batches of KV events for which nobody had subscribed",
    "dropped": "Batches of KV events that were dropped because the queue of the publisher was full",
    "errors": "Batches of KV events, and questions for missed ones, that failed with an error",
}

FAMILIES: Mapping[str, Family | None] = {
    "cached_bytes.*.*": Family("cached_bytes", "Bytes cached now, by tier and stream", ("tier", "stream")),
    "cached_items.*.*": Family("cached_items", "Pages and tails cached now, by tier", ("tier", "what")),
    "capacity_bytes.*": Family("capacity_bytes", "Bytes that a tier holds when it is full", ("tier",)),
    "device_use.*": Family(
        "device_memory_bytes",
        "Bytes of the memory of the model's device now, by what they are used for. weights and cache (all "
        "its places, full or empty): ours; other (scratch, other programs) and free: where the device tells "
        "it. Not told with stages",
        ("what",),
    ),
    "compute_tokens_s": Family(
        "compute_tokens_per_second", "Prompt tokens computed per second in the last steps with long prompts"
    ),
    "compute_saved_s": Family(
        "compute_saved_seconds",
        "Estimated seconds of computing that the cache spared: for each request the tokens of hit_tokens, "
        "divided by compute_tokens_per_second at the moment when it began",
        since=STARTED,
    ),
    "moved_bytes.*.*": Family(
        "moved_bytes",
        "Bytes copied between device and host: loaded is towards the device, saved away from it; by stream",
        ("direction", "stream"),
        STARTED,
    ),
    "moved_s.*.*": Family(
        "moved_seconds",
        "Seconds that copies between device and host took, by direction, for pages and for tails",
        ("direction", "what"),
        STARTED,
    ),
    "hit_tokens.*": Family(
        "hit_tokens",
        "Prompt tokens that were not computed because a tier supplied them, each request once",
        ("tier",),
        STARTED,
    ),
    "evicted.*.*.*": Family(
        "evicted",
        "Pages and tails that left a tier; what leaves the device may stay on the host. why: room (others "
        "needed the place), limit (their tenant had too much), path (a text had too many tails)",
        ("tier", "what", "why"),
        STARTED,
    ),
    "pools.*.capacity": Family("pool_capacity", "Places of a pool, taken or free", ("pool",)),
    "pools.*.free": Family("pool_free", "Places of a pool that are free now", ("pool",)),
    **_now(
        "queue",
        "queue_",
        {
            "waiting": "Requests that wait to begin now",
            "loading": "Requests that wait now for what they reuse to be loaded to the device",
            "running": "Requests that are computed now",
            "tokens": "Tokens of all requests that wait, load or run now: prompts, and answers so far",
        },
    ),
    **_counted("counters", "", CACHE, STARTED),
    **_now("sparse", "running_", SPARSE_NOW),
    **_counted("sparse", "sparse_", SPARSE, STARTED),
    **_counted("engine", "engine_", ENGINE, STARTED),
    "accept_length.*": Family(
        "accept_length",
        "Tokens for each step with guesses, over the first 8 tokens after requests began, by the slowest "
        "tier that their beginnings came from; a mean over all requests",
        ("source",),
    ),
    "stages.*.busy_s": Family(
        "stage_busy_seconds",
        "Seconds that a stage has computed (--stages). The stage that computes longest decides how fast "
        "all are",
        ("stage",),
        STARTED,
    ),
    "store.attached": Family("store_attached", "Whether there is a store: 1 or 0"),
    "store.state": Family(
        "store_state",
        "Whether the store is used: 1 for the state it is in",
        ("state",),
        states=("working", "off", "trying"),
    ),
    "store.refused": Family(
        "store_refused", "Whether the store works, but did not keep the last write (it is full): 1 or 0"
    ),
    "store.records": Family("store_records", "Records in the store now: up to 4 of a page or tail"),
    "store.bytes": Family("store_bytes", "Bytes of all records in the store now, if the store can tell"),
    "store.saved_bytes": Family("store_saved_bytes", "Bytes written to the store", since=ATTACHED),
    "store.read_bytes": Family("store_read_bytes", "Bytes read from the store", since=ATTACHED),
    "store.queued_bytes": Family("store_queued_bytes", "Bytes that wait to be written to the store now"),
    "store.read_bytes_s": Family(
        "store_read_bytes_per_second", "Bytes per second that the last reads from the store brought"
    ),
    "store.compute_tokens_s": None,  # compute_tokens_s
    "store.flaws.*": Family(
        "store_flaws",
        "Records that were read and were not what was asked for, by what was wrong. They were not used",
        ("flaw",),
        ATTACHED,
        words=tuple(flaw.name.lower() for flaw in Flaw),
    ),
    **_counted("store.counters", "store_", STORE_TIER, ATTACHED),
    "store.store.records": None,  # store.records
    "store.store.bytes": None,  # store.bytes
    **_now("store.store", "store_own_", STORE_NUMBERS),
    **_counted("store.store", "store_own_", STORE_COUNTS, "since the store was opened"),
    "store.store.*": Family(
        "store_own_number", "A number that the store reports about itself, by its name there", ("number",)
    ),
    **_labelled(_counted("store.store.peers.*", "store_peer_", PEERS, ATTACHED), "peer"),
    "shared.readers": Family("shared_readers", "Other servers that are connected now to read host pages"),
    **_counted("shared", "shared_", SHARED, STARTED),
    **_labelled(
        _now(
            "owners.*",
            "tenant_",
            {
                "device_bytes": "Bytes that a tenant has on the device now",
                "host_bytes": "Bytes that a tenant has on the host now",
                "bytes_most": "Bytes that a tenant may have on device and host together",
            },
        ),
        "tenant",
    ),
    "events.subscribers": Family("events_subscribers", "Subscribers of KV events that are connected now"),
    **_counted("events", "events_", EVENTS, STARTED),
}


def _tree() -> dict[str, Any]:
    """The keys of `FAMILIES`, level by level."""
    tree: dict[str, Any] = {}
    for way, family in FAMILIES.items():
        *above, last = way.split(".")
        node = tree
        for name in above:
            node = node.setdefault(name, {})
        node[last] = family
    return tree


_TREE = _tree()


def family_of(path: Sequence[str]) -> tuple[Family, tuple[str, ...]] | None:
    """The metric of a number of the statistics, and its labels. None: it is left out, or not known."""
    node: Any = _TREE
    labels: list[str] = []
    for name in path:
        if not isinstance(node, dict):
            return None
        if name not in node:
            labels.append(name)
        node = node.get(name, node.get("*"))
    return (node, tuple(labels)) if isinstance(node, Family) else None
