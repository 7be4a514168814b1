"""Goal: the numbers of a server agree with each other and with what its answers said. Method: a real server
with a store and little memory, and texts of which some are found without a tail."""

import re

import httpx

from tests.server.test_metrics import every_name
from tests.server.test_status import samples_of
from tests.wait import until
from tests.whole.process import running
from tiercel.server.http.metric_families import FAMILIES

PAGE = 128
OPTIONS = ("--device-memory", "2MiB", "--host-memory", "24MiB", "--tail-every-pages", "64")


def words(count, seed):
    return [(seed * 7919 + i * i * 31 + i * 17) % 3800 + 200 for i in range(count)]


def generate(server, prompt, count=2):
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": count, "temperature": 0}}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=120)
    answer.raise_for_status()
    return answer.json()["meta_info"]


def leaves(value, path=()):
    if isinstance(value, dict):
        for name, below in value.items():
            yield from leaves(below, (*path, name))
    elif isinstance(value, int | float):
        yield path


def known(path):
    """Whether the table has this way, or says that another number tells it."""
    pattern = re.compile(r"\.".join(f"(?:{re.escape(name)}|\\*)" for name in path))
    return any(pattern.fullmatch(way) for way in FAMILIES)


def test_what_was_found_and_computed_again_is_told_alike_everywhere(tmp_path):
    """One story, because a server takes seconds to start."""
    with running(*OPTIONS, "--store", f"file://{tmp_path}/store?size=64MiB") as server:
        told = converse(server)
        check_sums(server, told)
        check_store(server)
        check_names(server)


def converse(server):
    begins = [words(12 * PAGE + 3, seed) for seed in range(4)]
    told = [generate(server, begin) for begin in begins]
    told += [generate(server, [*begin[: 9 * PAGE + 40], *words(20, 9)]) for begin in begins]
    assert sum(each["replayed_tokens"] for each in told) > 0
    one = next(each for each in told if each["replayed_tokens"])
    explained = httpx.get(f"{server.url}/v1/cache/explain/{one['id']}").json()
    parts = explained["reused_tokens"]
    assert parts == {"device": one["cached_tokens_details"]["device"]} | {
        "host": one["cached_tokens_details"]["host"],
        "store": one["cached_tokens_details"]["storage"],
    }
    assert explained["replayed_tokens"] == one["replayed_tokens"]
    assert explained["computed_tokens"] == one["prompt_tokens"] - one["cached_tokens"]
    assert f"replayed {one['replayed_tokens']}" in explained["summary"]
    return told


def check_sums(server, told):
    """Answers, statistics and metrics say the same, and every prompt token is somewhere."""
    samples = samples_of(httpx.get(f"{server.url}/metrics").text)
    hits = {
        tier: samples[f"tiercel_hit_tokens_total[('tier', '{tier}')]"] for tier in ("device", "host", "store")
    }
    details = [each["cached_tokens_details"] for each in told]
    assert hits == {
        "device": sum(each["device"] for each in details),
        "host": sum(each["host"] for each in details),
        "store": sum(each["storage"] for each in details),
    }
    replayed = samples["tiercel_tokens_replayed_total[]"]
    assert replayed == sum(each["replayed_tokens"] for each in told)
    asked = samples["tiercel_tokens_asked_total[]"]
    assert asked == sum(each["prompt_tokens"] for each in told)
    # The engine computed what no tier supplied, and one token less than it drew of each answer.
    drawn = samples["tiercel_engine_tokens_drawn_total[]"] - len(told)
    assert samples["tiercel_engine_tokens_computed_total[]"] == asked - sum(hits.values()) + drawn
    assert samples["tiercel_compute_saved_seconds_total[]"] > 0
    with httpx.stream("GET", f"{server.url}/feed", timeout=30) as feed:
        state = next(line for line in feed.iter_lines() if line.startswith("data: "))
    recent = httpx.Response(200, text=state[6:]).json()["requests"].values()
    parts = {part: sum(each["tokens"][part] for each in recent) for part in ("replayed", *hits)}
    assert (
        parts == {"replayed": replayed, **hits}
        and sum(sum(each["tokens"].values()) for each in recent) == asked
    )


def check_store(server):
    """After the writes the store tells how much it holds."""
    stats = f"{server.url}/v1/cache/stats"
    until(lambda: not httpx.get(stats).json()["store"]["queued_bytes"], "everything is in the store")

    def told():
        samples = samples_of(httpx.get(f"{server.url}/metrics").text)
        written = sum(samples[f"tiercel_store_{what}_written_total[]"] for what in ("pages", "tails"))
        return written > 40 and samples["tiercel_store_records[]"] == written and samples

    samples = until(told, "the store tells what was written", timeout_s=10)
    assert samples["tiercel_store_bytes[]"] >= samples["tiercel_store_saved_bytes_total[]"] > 0


def test_what_is_read_on_the_host_is_told_alike_everywhere():
    """A text whose pages are sparse goes on: its last pages are computed, the others are read on the host."""
    with running("--device-memory", "24MiB", "--host-memory", "64MiB", "--sparse", "always") as server:
        generate(server, words(12 * PAGE + 3, 1))
        told = generate(server, [*words(12 * PAGE + 3, 1), *words(40, 2)], 12)
        explained = httpx.get(f"{server.url}/v1/cache/explain/{told['id']}").json()
        stats = httpx.get(f"{server.url}/v1/cache/stats").json()
        samples = samples_of(httpx.get(f"{server.url}/metrics").text)
        assert stats["counters"]["pages_sparse"] >= explained["sparse_pages"] >= 8
        sparse = stats["sparse"]
        assert min(sparse["entries_hit"], sparse["entries_missed"], sparse["bytes_staged"]) > 0
        for name in ("entries_hit", "entries_missed", "bytes_gathered", "bytes_staged"):
            assert samples[f"tiercel_sparse_{name}_total[]"] == sparse[name]
        for name in ("pages_whole", "pages_sparse", "places_hot"):
            assert samples[f"tiercel_running_{name}[]"] == sparse[name]
        assert samples["tiercel_pages_sparse_total[]"] == stats["counters"]["pages_sparse"]
        assert [path for path in leaves(stats) if path[0] != "times" and not known(path)] == []


def check_names(server):
    """Every number of the statistics is known to the table, and every name to the documentation."""
    stats = httpx.get(f"{server.url}/v1/cache/stats").json()
    unknown = [path for path in leaves(stats) if path[0] != "times" and not known(path)]
    assert unknown == []
    page = httpx.get(f"{server.url}/metrics").text
    names = set(re.findall(r"^# HELP (tiercel_\w+)", page, re.MULTILINE))
    assert names <= every_name() and len(names) > 80
    samples = samples_of(page)
    leaving = [
        f"tiercel_evicted_total[('tier', 'device'), ('what', '{what}'), ('why', 'room')]"
        for what in ("pages", "tails")
    ]
    assert sum(samples[name] for name in leaving) > 0
