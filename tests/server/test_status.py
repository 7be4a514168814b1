"""Goal: the server tells how it is, and forgets when told to. Method: ask, and read as Prometheus does."""

from dataclasses import asdict

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.scripted import LOOPBACK, REUSE, STORE, ScriptedService, call, served, talking
from tiercel.asks.ask import Finish
from tiercel.errors import EngineError, QueueFull
from tiercel.server.app import create_app
from tiercel.server.http.metrics import StatsCollector


def samples_of(page: str) -> dict[str, float]:
    """By name and labels."""
    return {
        sample.name + str(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def collected(stats) -> dict[str, float]:
    collector = StatsCollector()
    collector.stats = stats
    return {
        sample.name + str(sorted(sample.labels.items())): sample.value
        for metric in collector.collect()
        for sample in metric.samples
    }


def test_health_is_of_the_process_and_readiness_of_the_model():
    loading = ScriptedService(ready=False)
    assert call("GET", "/health", loading).json() == {"status": "ok"}
    assert call("GET", "/ready", loading).status_code == 503
    assert call("GET", "/ready").json() == {"status": "ok"}


def test_an_engine_that_failed_is_neither_healthy_nor_asked():
    failed = ScriptedService(failure=EngineError("the engine failed"), ready=False)
    body = {"model": "tiny-v4", "prompt": "a"}
    for method, path in (("GET", "/health"), ("GET", "/ready"), ("POST", "/v1/completions")):
        answer = call(method, path, failed, **({"json": body} if method == "POST" else {}))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")


def test_numbers_of_the_engine_have_names_and_labels():
    samples = samples_of(call("GET", "/metrics").text)
    assert samples["tiercel_queue_waiting[]"] == 2
    assert samples["tiercel_cached_bytes[('stream', 'kv'), ('tier', 'host')]"] == 300
    assert samples["tiercel_cached_bytes[('stream', 'index'), ('tier', 'device')]"] == 7
    assert samples["tiercel_moved_bytes_total[('direction', 'loaded'), ('stream', 'kv')]"] == 5
    assert samples["tiercel_moved_seconds_total[('direction', 'loaded'), ('what', 'pages')]"] == 0.5
    assert samples["tiercel_pool_free[('pool', 'device pages')]"] == 3
    assert samples["tiercel_pages_saved_total[]"] == 4
    assert samples["tiercel_engine_tokens_drawn_total[]"] == 6
    assert samples["tiercel_accept_length[('source', 'computed')]"] == 1.75
    assert samples["tiercel_evicted_total[('tier', 'device'), ('what', 'pages'), ('why', 'room')]"] == 9
    assert samples["tiercel_compute_saved_seconds_total[]"] == 1.5
    assert samples["tiercel_running_pages_sparse[]"] == 6
    assert samples["tiercel_sparse_entries_hit_total[]"] == 11


def test_what_the_table_does_not_know_is_left_out_except_numbers_of_a_store_of_your_own():
    assert collected({"some": {"new thing": {"wait_s": 1.5}}, "exact": True}) == {}
    own = {"store": {"store": {"shards": 3, "name": "x", "peers": {"1": {"reads": 2, "boot": "ab"}}}}}
    assert collected(own) == {
        "tiercel_store_own_number[('number', 'shards')]": 3,
        "tiercel_store_peer_reads_total[('peer', '1')]": 2,
    }


def test_requests_are_counted_by_call_and_status_and_the_first_token_is_timed():
    with talking(ScriptedService()) as talk:
        for body in ({"text": "x"}, {"text": "x", "stream": True}, {}):
            talk("POST", "/generate", json=body)
        for path in ("/v1/cache/explain/a", "/v1/cache/explain/b", "/nothing/1", "/nothing/2"):
            talk("GET", path)
        samples = samples_of(talk("GET", "/metrics").text)
    requests = {
        name: value
        for name, value in samples.items()
        if name.startswith("tiercel_http_requests_total") and value
    }
    assert requests == {
        "tiercel_http_requests_total[('call', '/generate'), ('status', '200')]": 2,
        "tiercel_http_requests_total[('call', '/generate'), ('status', '400')]": 1,
        "tiercel_http_requests_total[('call', '/v1/cache/explain/{request_id}'), ('status', '404')]": 2,
        "tiercel_http_requests_total[('call', 'other'), ('status', '404')]": 2,
    }
    assert samples["tiercel_http_request_seconds_count[('call', '/generate')]"] == 3
    assert samples["tiercel_time_to_first_token_seconds_count[('call', '/generate')]"] == 2
    assert samples["tiercel_http_requests_open[]"] == 1


def test_every_call_is_counted_from_the_start_and_those_that_give_tokens_are_timed():
    samples = samples_of(call("GET", "/metrics").text)
    paths = create_app(ScriptedService(), LOOPBACK).openapi()["paths"]
    for path in {*paths} - {"/v1/models/{model}"}:  # FastAPI and the schema write this one differently
        assert samples[f"tiercel_http_requests_total[('call', '{path}'), ('status', '200')]"] == 0
    posts = {path: each["post"]["responses"]["200"] for path, each in paths.items() if "post" in each}
    streamed = {path for path, answer in posts.items() if "text/event-stream" in answer.get("content", {})}
    assert {"/generate", "/v1/messages"} <= streamed and "/abort_request" not in streamed
    timed = {name for name in samples if name.startswith("tiercel_time_to_first_token_seconds_count")}
    assert timed == {f"tiercel_time_to_first_token_seconds_count[('call', '{each}')]" for each in streamed}


def test_a_metric_without_a_value_is_left_out():
    """SGLang's router adds metrics of servers up, and can not where one has labels and another has none."""
    families = list(text_string_to_metric_families(call("GET", "/metrics").text))
    assert families and all(family.samples for family in families)


def test_a_server_is_well_if_its_model_computes_a_token():
    service = ScriptedService()
    assert call("GET", "/health_generate", service).json() == {"status": "ok"}
    assert service.ask.sampling.max_tokens == 1
    busy = ScriptedService(asks=[service.ask], hold_after=0)  # another request would wait for ever
    assert call("GET", "/health_generate", busy).json() == {"status": "ok"}
    assert len(busy.asks) == 1


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ({"ready": False}, 503),
        ({"end": Finish.ERROR}, 500),
        ({"fail_first": QueueFull(waiting=3, waiting_max=3)}, 429),
    ],
)
def test_a_server_that_computes_no_token_is_not_well(how, status):
    assert call("GET", "/health_generate", ScriptedService(**how)).status_code == status


def test_routers_are_told_the_load_in_requests_and_tokens():
    with talking(ScriptedService()) as talk:
        for _ in range(3):
            talk("POST", "/generate", json={"text": "x"})
        (load,) = talk("GET", "/get_load").json()
        assert load == {
            "dp_rank": 0,
            "num_reqs": 5,
            "num_running_reqs": 3,
            "num_waiting_reqs": 2,
            "num_tokens": 40,
            "num_total_tokens": 40,
        }
        total = {"total_running_reqs": 3, "total_waiting_reqs": 2, "total_tokens": 40}
        assert talk("GET", "/v1/loads?include=core").json() == {"loads": [load], "aggregate": total}


@pytest.mark.parametrize("path", ["/get_server_info", "/server_info"])
def test_server_info_has_what_clients_of_sglang_look_for(path):
    info = call("GET", path).json()
    assert info["model_path"] == "scripted"
    assert info["disable_radix_cache"] is False
    assert info["internal_states"] == [{"avg_spec_accept_length": 2.5}]
    assert info["stats"]["queue"]["waiting"] == 2


def test_model_info_and_the_nested_numbers():
    info = call("GET", "/get_model_info").json()
    assert info["is_generation"] is True
    assert info["context_length"] == 4096
    assert call("GET", "/v1/cache/stats").json() == {
        "identity": {"weights": "w", "share": "bits"},
        "cached_bytes": {"device": {"kv": 100, "index": 7}, "host": {"kv": 300}},
        "cached_items": {"device": {"pages": 2, "tails": 1}, "host": {"pages": 3, "tails": 0}},
        "capacity_bytes": {"device": 1000, "host": 2000},
        "tail_streams": ["index"],
        "compute_tokens_s": 50.0,
        "moved_bytes": {"loaded": {"kv": 5}},
        "moved_s": {"loaded": {"pages": 0.5}},
        "hit_tokens": {"device": 10, "host": 20, "store": 30},
        "compute_saved_s": 1.5,
        "evicted": {"device": {"pages": {"room": 9}}},
        "copier": "direct",
        "pools": {"device pages": {"capacity": 8, "free": 3}},
        "store": {"attached": False},
        "counters": {"pages_saved": 4},
        "queue": {"waiting": 2, "loading": 0, "running": 0, "tokens": 40},
        "engine": {"tokens_drawn": 6, "guessing_steps": 2, "guessing_tokens": 5},
        "accept_length": {"device": 2.5, "computed": 1.75},
        "sparse": {"pages_sparse": 6, "entries_hit": 11},
        "stages": {},
        "device_use": {},
        "owners": {},
        "times": {},
        "exact": True,
        "device": "cpu",
    }
    attached = call("GET", "/v1/cache/stats", ScriptedService(store=STORE)).json()["store"]
    assert attached == {"attached": True} | asdict(STORE)


def test_a_request_can_be_explained_by_its_id_until_it_is_forgotten():
    with talking(ScriptedService()) as talk:
        name = talk("POST", "/generate", json={"text": "x"}).headers["x-request-id"]
        known = talk("GET", f"/v1/cache/explain/{name}")
        assert known.json() == {
            "prompt_tokens": 100,
            "reused_tokens": {"device": 16, "host": 8, "store": 4},
            "computed_tokens": 72,
            "replayed_tokens": 3,
            "sparse_pages": 2,
            "found_tokens": 32,
            "why_not_more": REUSE.why.value,
            "summary": str(REUSE),
            "share": "bits",
            "accept_length": 1.5,
            "stages_ms": {"queue": 500.0, "match": 250.0, "prefill": 1000.0},
        }
        unknown = talk("GET", "/v1/cache/explain/other")
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "request_not_found"


def test_a_flush_waits_as_long_as_it_is_told():
    service = ScriptedService()
    response = call("POST", "/flush_cache?timeout=2.5", service)
    assert response.status_code == 200
    assert response.text == "Cache flushed.\n"
    assert service.events == ["flush 2.5"]


def test_a_flush_that_had_to_leave_something_says_how_much():
    response = call("POST", "/flush_cache", ScriptedService(pages_in_use=3))
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("3 pages")


@pytest.mark.parametrize("timeout", ["-1", "601", "nan", "inf", "x", ""])
def test_a_flush_with_a_wrong_timeout_flushes_nothing(timeout):
    service = ScriptedService()
    response = call("POST", f"/flush_cache?timeout={timeout}", service)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "timeout"
    assert service.events == []


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/v1/models", "/metrics", "/get_load", "/health_generate"]
)
def test_a_head_is_a_get_without_its_body(path):
    head, get = call("HEAD", path), call("GET", path)
    assert (head.status_code, head.content) == (get.status_code, b"") == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_a_head_over_the_network_keeps_the_connection():
    with served(ScriptedService()) as url, httpx.Client(base_url=url) as client:
        assert client.head("/health").status_code == 200
        assert client.head("/nowhere").status_code == 404
        assert client.head("/generate").status_code == 405
        assert client.get("/health").json() == {"status": "ok"}
