"""Goal: whoever runs a server attaches, watches, empties and detaches its store, and learns what went wrong,
but no password. Method: a scripted service."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.scripted import STORE as STATS
from tests.server.scripted import ScriptedService, call, client_of, talking
from tests.server.test_status import collected
from tiercel.errors import StoreError
from tiercel.server.options import ServerOptions
from tiercel.storage.open import hide

STORE = "/v1/cache/store"
URL = "memory://here"
ATTACHED = {
    "attached": True,
    "url": URL,
    "state": "working",
    "refused": False,
    "saved_bytes": 10,
    "read_bytes": 20,
    "read_bytes_s": None,
    "compute_tokens_s": None,
    "queued_bytes": 7,
    "flaws": {"CHECKSUM": 1},
    "counters": {"failures": 0},
    "records": 3,
    "bytes": 300,
    "store": {"records": 3},
}


def error_of(response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def test_a_store_is_attached_watched_emptied_and_detached():
    with talking(ScriptedService()) as talk:
        assert talk("GET", STORE).json() == {"attached": False}
        assert talk("PUT", STORE, json={"url": URL}).json() == ATTACHED
        assert talk("GET", STORE).json() == ATTACHED
        assert talk("POST", f"{STORE}/clear").json() == ATTACHED | {"records": 0, "bytes": 0}
        assert talk("DELETE", STORE).json() == {"attached": False}
        assert talk("GET", STORE).json() == {"attached": False}


def test_a_url_that_is_no_store_is_named():
    service = ScriptedService()
    response = call("PUT", STORE, service, json={"url": "file:///caches/nonsense"})
    assert error_of(response) == (400, "invalid_store", "url")
    assert response.json()["error"]["message"].startswith("url = 'file:///caches/nonsense': ")
    assert service.store is None


@pytest.mark.parametrize(
    "url", ["this:Class", "tiercel.cli.__main__:main", "file:///etc", "redis://other", "memory?", "nonsense"]
)
def test_a_store_in_no_named_place_is_not_attached(url):
    service = ScriptedService()
    response = call("PUT", STORE, service, json={"url": url})
    assert error_of(response) == (403, "store_not_allowed", "url")
    assert service.events == []
    assert error_of(call("PUT", STORE, service, ServerOptions(loopback=True), json={"url": URL}))[0] == 403


@pytest.mark.parametrize("body", [{}, {"url": ""}, {"url": 5}, {"url": "x" * 4097}, {"url": URL, "size": 1}])
def test_a_wrong_body_is_refused_before_the_service_hears_of_it(body):
    service = ScriptedService()
    response = call("PUT", STORE, service, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("url", "size")
    assert service.events == []


def test_a_web_page_can_not_attach_one():
    response = call("PUT", STORE, content='{"url": "memory:"}', headers={"content-type": "text/plain"})
    assert error_of(response) == (400, "invalid_value", "content-type")


def test_a_second_store_is_refused_and_the_first_one_stays():
    service = ScriptedService(store=STATS)
    assert error_of(call("PUT", STORE, service, json={"url": "memory://other"})) == (
        409,
        "store_attached",
        "url",
    )
    assert service.store == STATS


def test_of_two_who_attach_at_once_one_does():
    service = ScriptedService()

    async def both():
        async with client_of(service) as client:
            return await asyncio.gather(*[client.put(STORE, json={"url": URL}) for _ in range(2)])

    assert sorted(response.status_code for response in asyncio.run(both())) == [200, 409]
    assert service.events == [f"attach {URL}"]


@pytest.mark.parametrize(("method", "path"), [("DELETE", STORE), ("POST", f"{STORE}/clear")])
def test_without_a_store_there_is_nothing_to_detach_or_empty(method, path):
    assert error_of(call(method, path)) == (404, "store_not_attached", None)


@pytest.mark.parametrize(
    ("method", "path", "store"),
    [("PUT", STORE, None), ("DELETE", STORE, STATS), ("POST", f"{STORE}/clear", STATS)],
)
def test_a_store_that_fails_is_not_this_server_failing(method, path, store):
    service = ScriptedService(store=store, store_fails=StoreError("the disk is gone"))
    response = call(method, path, service, json={"url": URL} if method == "PUT" else None)
    assert error_of(response) == (502, "store_failed", None)
    assert "the disk is gone" in response.json()["error"]["message"]
    assert service.store == store


@pytest.mark.parametrize(("method", "path"), [("PUT", STORE), ("DELETE", STORE), ("POST", f"{STORE}/clear")])
def test_a_server_that_is_starting_changes_no_store(method, path):
    response = call(method, path, ScriptedService(ready=False), json={"url": URL})
    assert error_of(response) == (503, "not_ready", None)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", STORE), ("PUT", STORE), ("DELETE", STORE), ("POST", f"{STORE}/clear")],
)
def test_every_call_is_for_whoever_runs_the_server(method, path):
    keys = ServerOptions(api_key=("user",), admin_key="admin", store_allow=("memory:",))
    service = ScriptedService(store=STATS)
    for key in ("", "user"):
        response = call(method, path, service, keys, headers={"authorization": f"Bearer {key}"})
        assert error_of(response) == (401, "invalid_api_key", "authorization")
    body = {"json": {"url": URL}} if method == "PUT" else {}
    allowed = call(method, path, service, keys, headers={"authorization": "Bearer admin"}, **body)
    assert allowed.status_code == (409 if method == "PUT" else 200)
    assert error_of(call(method, path, service, ServerOptions()))[:2] == (403, "admin_key_not_configured")


def test_who_tries_another_method_is_told_of_all_there_are():
    for path, allowed in ((STORE, "DELETE, GET, PUT"), (f"{STORE}/clear", "POST")):
        response = call("PATCH", path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed)


# Passwords


SECRET = "sesame%2Fopen"
REDIS = f"redis://user:{SECRET}@host:6379/0"


def test_a_password_is_in_no_answer():
    secret = "memory://user:sesame%2Fopen@host"
    with talking(ScriptedService()) as talk:
        for response in (
            talk("PUT", STORE, json={"url": REDIS}),
            talk("PUT", STORE, json={"url": secret}),
            talk("GET", STORE),
            talk("PUT", STORE, json={"url": secret}),
            talk("POST", f"{STORE}/clear"),
            talk("DELETE", STORE),
        ):
            assert "sesame" not in response.text
    service = ScriptedService(
        store=None, store_fails=StoreError("no: user, sesame/open, redis://sesame%2Fopen@")
    )
    response = call("PUT", STORE, service, json={"url": REDIS})
    assert response.status_code == 502
    assert "sesame" not in response.text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:pw@host:6379/0", "redis://user:***@host:6379/0"),
        ("redis://:12345@host", "redis://:***@host"),
        ("redis://:p@ss@host", "redis://:***@host"),
        ("redis://:p/a#ss@host", "redis://:***@host"),
        ("redis://host?password=abc&size=1GiB", "redis://host?password=***&size=1GiB"),
        ("mooncake://host:1?auth_token=abc", "mooncake://host:1?auth_token=***"),
        ("redis://user@host", "redis://user@host"),
        ("redis://host:6379/0?prefix=a@b", "redis://host:6379/0?prefix=a@b"),
        ("file:///home/me@work/store?size=10GiB", "file:///home/me@work/store?size=10GiB"),
        ("nonsense", "nonsense"),
    ],
)
def test_a_password_is_hidden_and_nothing_else(url, shown):
    assert hide(url, url) == shown


# Numbers


def test_what_came_from_the_store_was_cached():
    with talking(ScriptedService(store_tokens=4)) as talk:
        for _ in range(2):
            told = talk("POST", "/generate", json={"text": "a prompt"}).json()["meta_info"]
        assert told["cached_tokens"] == 7
        assert told["cached_tokens_details"] == {"device": 1, "host": 2, "storage": 4}
        usage = talk("POST", "/v1/completions", json={"model": "scripted", "prompt": "a prompt"}).json()[
            "usage"
        ]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 7


def test_the_store_has_numbers_for_prometheus():
    stats = {
        "hit_tokens": {"device": 1, "host": 2, "store": 3},
        "store": {
            "attached": True,
            "state": "off",
            "saved_bytes": 10,
            "read_bytes": 20,
            "read_bytes_s": 2.5,
            "compute_tokens_s": None,
            "flaws": {"checksum": 2, "foreign": 1},
            "counters": {"failures": 4, "bytes_written": 10},
            "records": 5,
            "bytes": None,
            "queued_bytes": 6,
            "store": {"records": 5, "folder": "/here"},
        },
        "events": {"batches": 9, "dropped": 0, "errors": 0},
    }
    assert collected(stats) == {
        "tiercel_hit_tokens_total[('tier', 'device')]": 1,
        "tiercel_hit_tokens_total[('tier', 'host')]": 2,
        "tiercel_hit_tokens_total[('tier', 'store')]": 3,
        "tiercel_store_attached[]": 1,
        "tiercel_store_state[('state', 'working')]": 0,
        "tiercel_store_state[('state', 'off')]": 1,
        "tiercel_store_state[('state', 'trying')]": 0,
        "tiercel_store_saved_bytes_total[]": 10,
        "tiercel_store_read_bytes_total[]": 20,
        "tiercel_store_read_bytes_per_second[]": 2.5,
        "tiercel_store_flaws_total[('flaw', 'checksum')]": 2,
        "tiercel_store_flaws_total[('flaw', 'foreign')]": 1,
        **{
            f"tiercel_store_flaws_total[('flaw', '{flaw}')]": 0
            for flaw in ("version", "header", "form", "key", "unreadable")
        },
        "tiercel_store_failures_total[]": 4,
        "tiercel_store_records[]": 5,
        "tiercel_store_queued_bytes[]": 6,
        "tiercel_events_batches_total[]": 9,
        "tiercel_events_dropped_total[]": 0,
        "tiercel_events_errors_total[]": 0,
    }


def test_without_a_store_there_is_little_to_count():
    page = call("GET", "/metrics").text
    families = {family.name for family in text_string_to_metric_families(page)}
    assert {name for name in families if "store" in name} == {"tiercel_store_attached"}
