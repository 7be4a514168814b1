"""Goal: the page gets what /metrics has, only what changed, only with a key. Method: listen to the feed."""

import asyncio
import json

import httpx
import pytest

from tests.server.scripted import LOOPBACK, REUSE, STORE, ScriptedService, call, client_of, served, talking
from tests.wait import until
from tiercel.asks.ask import Answer, Explanation, Usage
from tiercel.errors import EngineError
from tiercel.server.app import create_app
from tiercel.server.http.border import Visit
from tiercel.server.live import feed
from tiercel.server.live.history import SPANS, History, counters, growth, total
from tiercel.server.live.page import FILES
from tiercel.server.live.recent import REQUESTS, Recent
from tiercel.server.options import ServerOptions


def patched(state, change):
    """RFC 7396, as the page does it."""
    for name, value in change.items():
        if value is None:
            state.pop(name, None)
        elif isinstance(value, dict):
            state[name] = patched(dict(state.get(name) or {}), value)
        else:
            state[name] = value
    return state


@pytest.mark.parametrize("path", FILES)
def test_every_file_is_served_under_a_strict_policy(path):
    answer = call("GET", path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", ""), "nothing from another host"
    assert call("HEAD", path).status_code == 200


def test_pages_need_no_key_because_they_hold_no_secret_and_the_feed_needs_it():
    options = ServerOptions(api_key=("user",), admin_key="admin")
    with talking(ScriptedService(), options) as talk:
        for path in FILES:
            assert talk("GET", path).status_code == 200
        for key in ("", "user"):
            refused = talk("GET", "/feed", headers={"authorization": f"Bearer {key}"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert call("GET", "/feed", options=ServerOptions()).status_code == 403  # no key, and others can connect
    assert call("GET", "/feed", headers={"origin": "http://evil.example"}).status_code == 403
    assert call("GET", "/feed", headers={"host": "evil.example"}).status_code == 403


def test_redoc_is_gone():
    assert call("GET", "/redoc").status_code == 404


def test_a_merge_patch_makes_the_new_state_of_the_old():
    before = {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": [1], "g": {"h": 1}}
    after = {"a": 1, "b": {"c": 4, "d": {"e": 3}}, "f": [1, 2], "i": {}}
    patch = feed.changes(before, after)
    assert patch == {"b": {"c": 4}, "f": [1, 2], "g": None, "i": {}}
    assert patched(before, patch) == after
    assert feed.changes(after, after) == {}


def test_the_first_event_is_everything_and_the_next_only_what_changed():
    service = ScriptedService(store=STORE)
    with served(service) as url:
        state = {}
        with httpx.stream("GET", f"{url}/feed", timeout=10) as answer:
            lines = (line[6:] for line in answer.iter_lines() if line.startswith("data: "))
            first = json.loads(next(lines))
            patched(state, first)
            assert httpx.get(f"{url}/v1/cache/stats").json()["hit_tokens"] == state["stats"]["hit_tokens"]
            assert state["server"]["model"] == "scripted" and first["now_s"] > 0
            assert state["requests"] == {} and state["history"].keys() == state["server"]["spans"].keys()
            name = httpx.post(f"{url}/generate", json={"text": "x"}).headers["x-request-id"]
            second = {}
            while "requests" not in second:
                patched(second, json.loads(next(lines)))
        assert second["stats"] == {"queue": {"running": 1}}
        assert second["http"].pop("process_bytes", 1) > 0
        assert second["http"] == {"requests": {"/generate": {"200": 1}}}
        for steps in second["history"].values():
            (grown,) = steps.values()
            assert grown["http"] == {"requests": {"/generate": {"200": 1}}}
        (told,) = second["requests"].values()
        assert (told["id"], told["call"], told["status"]) == (name, "/generate", 200)
        assert told["why"] == str(REUSE)
        assert told["tokens"] == {"device": 0, "host": 0, "store": 0, "replayed": 0, "computed": 1}


def test_the_statistics_of_the_feed_are_those_of_the_metrics_page():
    service = ScriptedService(store=STORE)

    async def both():
        app = create_app(service, LOOPBACK)
        stats = (await app.state.feed.state())["stats"]
        async with client_of(service) as client:
            return stats, (await client.get("/v1/cache/stats")).json()

    stats, told = asyncio.run(both())
    assert json.loads(json.dumps(stats)) == told


def test_a_server_that_shuts_down_does_not_wait_for_listeners():
    with served(ScriptedService(), shutdown_s=30) as url:
        # `served` ends the server while this feed is open, and fails if that takes 10 seconds
        client = httpx.Client()
        answer = client.send(client.build_request("GET", f"{url}/feed"), stream=True)
        assert next(answer.iter_lines()).startswith("data: ")
    answer.close()
    client.close()


def test_a_feed_ends_when_the_engine_has_failed_and_a_new_one_is_refused():
    class Failing(ScriptedService):
        async def stats(self):
            if self.failure:
                raise self.failure
            return await super().stats()

    service = Failing()

    async def listen():
        app = create_app(service, LOOPBACK)
        app.state.feed._made_s = float("-inf")
        coming = app.state.feed.events()
        assert (await anext(coming)).startswith("data: ")
        service.failure = EngineError("the engine failed")
        return [event async for event in coming]

    assert asyncio.run(listen()) == []
    refused = call("GET", "/feed", service)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")


def visit(usage, first_token_s=0.5, request_id="a"):
    made = Visit(set(), request_id, status=200, first_token_s=first_token_s)
    made.answers = [Answer(request_id, usage)]
    return made


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def test_growth_is_what_a_counter_gained_and_one_that_fell_began_again():
    before = {"a": 1, "b": {"c": 2, "same": 3}, "h": [1, 0, 2], "fell": 9, "busy_s": 0.5}
    after = {
        "a": 4,
        "b": {"c": 2, "same": 3, "new": 1},
        "h": [1, 2, 3],
        "fell": 2,
        "busy_s": 1.75,
        "word": "x",
    }
    grown = growth(before, after)
    assert grown == {"a": 3, "b": {"new": 1}, "h": [0, 2, 1], "fell": 2, "busy_s": 1.25}
    assert growth(after, after) == {}
    assert growth({}, after) == {name: value for name, value in after.items() if name != "word"}
    assert total(grown, grown) == {"a": 6, "b": {"new": 2}, "h": [0, 4, 2], "fell": 4, "busy_s": 2.5}
    assert total(grown, {"b": {"x": 1}, "z": 1}) == {**grown, "b": {"new": 1, "x": 1}, "z": 1}


def test_every_span_has_the_whole_growth_in_the_steps_where_it_was():
    clock = Clock()
    kept = History(clock)
    for now_s, count in ((1009.9, 3), (1020.1, 3), (1030.1, 10), (1031.0, 11), (1799.9, 20), (1801, 20)):
        clock.now_s = now_s
        kept.add({"n": count})
    told = kept.json()
    assert told["5 minutes"] == {}, "all of it is older"
    assert told["1 hour"] == {"960": {"n": 11}, "1320": {"n": 9}}
    assert told["24 hours"] == {"0": {"n": 20}}
    kept = History(clock)
    for now_s, count in ((1809.9, 3), (1820.1, 3), (1830.1, 10), (1831.0, 11)):
        clock.now_s = now_s
        kept.add({"n": count})
    assert kept.json()["5 minutes"] == {"1800": {"n": 3}, "1820": {"n": 7}, "1830": {"n": 1}}


def test_what_is_older_than_a_span_is_forgotten_and_memory_is_bounded():
    clock = Clock()
    kept = History(clock)
    for number in range(1, 20_000):
        clock.now_s += 7
        kept.add({"n": number})
        assert all(len(kept.json()[name]) <= span.steps for name, span in SPANS.items())
    told = kept.json()
    assert all(len(told[name]) >= span.steps - 1 for name, span in SPANS.items()), "the newest may be empty"
    for name, span in SPANS.items():
        grown = sum(step["n"] for step in told[name].values())
        assert span.step_s * (span.steps - 1) - 7 <= 7 * grown <= span.step_s * span.steps + 7
    clock.now_s += SPANS["24 hours"].step_s * SPANS["24 hours"].steps
    kept.add({"n": number})
    assert all(steps == {} for steps in kept.json().values())


def test_the_history_of_a_server_adds_up_to_its_counters():
    async def ask():
        service = ScriptedService(store=STORE)
        app = create_app(service, LOOPBACK)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            for text in ("x", "y"):
                app.state.feed._made_s = float("-inf")
                await app.state.feed.state()
                await client.post("/generate", json={"text": text})
            await client.post("/generate", json={})
            app.state.feed._made_s = float("-inf")
            return await app.state.feed.state()

    state = asyncio.run(ask())
    now = counters(state["stats"], state["http"])
    assert now["http"]["requests"]["/generate"] == {"200": 2, "400": 1}
    for steps in state["history"].values():
        added = {}
        for step in steps.values():
            added = total(added, step)
        assert added == growth({}, now)
    assert added["stats"]["evicted"] == {"device": {"pages": {"room": 9}}}


def test_a_server_reads_its_counters_also_while_nobody_listens(monkeypatch):
    class Counting(ScriptedService):
        reads = 0

        async def stats(self):
            self.reads += 1
            return await super().stats()

    monkeypatch.setattr(feed, "READ_S", 0.1)
    monkeypatch.setattr(feed, "EVERY_S", 0.1)
    service = Counting()
    with served(service):
        until(lambda: service.reads >= 3, "they were read three times")


def test_the_last_requests_are_kept_and_no_more():
    clock = Clock()
    seen = Recent(lambda name: Explanation(REUSE, "bits"), clock)
    for number in range(300):
        clock.now_s += 1
        seen.add(visit(Usage(1), request_id=str(number)), "/generate")
    assert [each["id"] for each in seen.json().values()] == list(map(str, range(300 - REQUESTS, 300)))


def test_a_request_tells_which_tiers_its_prompt_came_from():
    seen = Recent(lambda name: Explanation(REUSE, "bits"), Clock())
    seen.add(visit(Usage(100, 4, host_tokens=10, store_tokens=20, replayed_tokens=50), 0.5), "/generate")
    (told,) = seen.json().values()
    assert told["tokens"] == {"device": 0, "host": 10, "store": 20, "replayed": 50, "computed": 20}
    assert (told["answer_tokens"], told["first_token_s"]) == (4, 0.5)


def test_a_request_that_never_began_has_no_tokens_and_says_so():
    seen = Recent(lambda name: None, Clock())
    seen.add(visit(Usage(0), None, ""), "/generate")
    (told,) = seen.json().values()
    assert told["why"] == "the request ended before it was let in" and told["first_token_s"] is None


def test_probes_are_no_requests_of_the_page():
    async def probe():
        app = create_app(ScriptedService(), LOOPBACK)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path, count in (("/health_generate", 0), ("/generate", 1)):
                await client.request("POST" if count else "GET", path, json={"text": "x"} if count else None)
                assert len(app.state.feed.recent.json()) == count, path

    asyncio.run(probe())
