"""Goal: what one client does neither holds up the others nor tells it of them. Method: count and look, no
clocks: which thread works, what was encoded, who is told what."""

import asyncio
import json
import threading

import pytest

from tests.server.scripted import TOKEN_BYTES_MOST, ScriptedService, call, client_of, events_of, post, talking
from tiercel.server.options import ServerOptions

CALLS = {
    "/v1/chat/completions": lambda text: {
        "messages": [{"role": "user", "content": text}],
        "model": "scripted",
    },
    "/v1/completions": lambda text: {"prompt": ["x", text], "model": "scripted"},
    "/generate": lambda text: {"text": ["x", text]},
}
FIELDS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt[1]", "/generate": "text[1]"}


def error_of(response):
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


# Work


@pytest.mark.parametrize("path", CALLS)
def test_texts_are_encoded_beside_the_event_loop(path):
    service = ScriptedService()
    assert post(path, service, **CALLS[path]("hello")).status_code == 200
    assert service.text.threads and threading.current_thread() not in service.text.threads


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_text_that_can_not_fit_is_refused_before_it_is_encoded(path):
    service = ScriptedService(context_tokens=100)
    response = post(path, service, **CALLS[path]("x" * (TOKEN_BYTES_MOST * 101)))
    assert error_of(response) == (400, "context_length_exceeded", FIELDS[path])
    assert response.json()["error"]["message"].startswith(f"{FIELDS[path]} has at least 101 tokens")


# Priority


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(
    ("most", "priority", "taken"),
    [(0, 0, True), (0, 1, False), (0, -1, False), (3, -3, True), (3, 3, True), (3, 4, False), (3, -4, False)],
)
def test_a_priority_is_taken_within_what_the_server_allows(path, most, priority, taken):
    service = ScriptedService()
    body = CALLS[path]("x") | {"priority": priority}
    response = call("POST", path, service, ServerOptions(priority_max=most), json=body)
    if taken:
        assert response.status_code == 200 and {ask.priority for ask in service.asks} == {priority}
    else:
        assert error_of(response) == (400, "invalid_value", "priority") and not service.asks
        assert "--priority-max" in response.json()["error"]["message"]


# Ids

TENANTS = ServerOptions(api_key=("one", "two"))


def ask(talk, path, key, **more):
    headers = {"authorization": f"Bearer {key}", "x-request-id": "mine"}
    response = talk("POST", path, headers=headers, json=CALLS[path]("x") | more)
    assert response.status_code == 200, response.text
    return response


def explained(talk, key, name="mine", **query):
    headers = {"authorization": f"Bearer {key}"}
    return talk("GET", f"/v1/cache/explain/{name}", headers=headers, params=query).status_code


@pytest.mark.parametrize("path", CALLS)
def test_an_id_belongs_to_the_key_that_made_it(path):
    service = ScriptedService()
    with talking(service, TENANTS) as talk:
        response = ask(talk, path, "one")
        assert response.headers["x-request-id"] == "mine"
        assert (explained(talk, "one"), explained(talk, "two")) == (200, 404)
        ask(talk, path, "two")
        assert len({each.request_id for each in service.asks}) == len(service.asks)  # nobody overwrites
        assert explained(talk, "two") == 200


@pytest.mark.parametrize("path", CALLS)
def test_an_id_belongs_to_the_salt_it_came_with(path):
    with talking(ScriptedService()) as talk:
        ask(talk, path, "", cache_salt="tenant")
        assert explained(talk, "", cache_salt="tenant") == 200
        assert [explained(talk, "", **each) for each in ({}, {"cache_salt": "other"})] == [404, 404]
        assert explained(talk, "", cache_salt="x" * 257) == 400


def test_what_is_not_known_and_what_is_anothers_look_the_same():
    with talking(ScriptedService(), TENANTS) as talk:
        ask(talk, "/generate", "one")
        headers = {"authorization": "Bearer two"}
        other, nobodys = (
            talk("GET", f"/v1/cache/explain/{name}", headers=headers) for name in ("mine", "none")
        )
        assert other.text.replace("mine", "none") == nobodys.text


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("field", ["rid", "x-request-id"])
def test_nobody_learns_that_an_id_of_another_is_in_use(path, field):
    service = ScriptedService(hold_after=0)

    async def main():
        async with client_of(service, TENANTS) as client:

            def send(key):
                headers = {"authorization": f"Bearer {key}"} | ({field: "mine"} if field != "rid" else {})
                body = CALLS[path]("x") | ({"rid": "mine"} if field == "rid" else {})
                return asyncio.create_task(client.post(path, headers=headers, json=body))

            first = send("one")
            await asyncio.to_thread(service.holding.wait, 10)
            others = [send("one"), send("two")]
            count = 3 if field != "rid" else 2
            while len({each.request_id.split(".")[0] for each in service.asks}) < count:
                await asyncio.sleep(0)
            service.ending.set()
            await asyncio.gather(first, *others)
            return [other.result() for other in others]

    same, other = asyncio.run(main())
    assert other.headers["x-request-id"] == "mine"
    if field == "rid":
        assert error_of(same) == (400, "conflicting_values", "rid")
    else:
        assert same.headers["x-request-id"] != "mine"


def test_an_answer_names_the_id_as_its_client_does():
    service = ScriptedService()
    with talking(service, TENANTS) as talk:
        answers = talk(
            "POST",
            "/generate",
            headers={"authorization": "Bearer one"},
            json={
                "text": ["x", "y"],
                "rid": ["a", "b"],
                "cache_salt": ["s", "t"],
                "sampling_params": {"n": 2},
            },
        ).json()
    assert [each["meta_info"]["id"] for each in answers] == ["a", "a.n1", "b", "b.n1"]


# Streams that tell everything again


def stream(words, **more):
    service = ScriptedService(script=("Hello", " two") * (words // 2), context_tokens=10 * words)
    pieces = []
    own = service.text.piece
    service.text.piece = lambda token: pieces.append(token) or own(token)
    body = {"text": "a prompt", "sampling_params": {"max_new_tokens": words}, **more}
    events = events_of(post("/generate", service, stream=True, **body))
    assert events.pop() == "[DONE]"
    service.text.piece = own
    return [json.loads(event) for event in events], sum(map(len, events)), len(pieces), body


LOGGED = {
    "return_logprob": True,
    "top_logprobs_num": 3,
    "logprob_start_len": 0,
    "return_text_in_logprobs": True,
}


@pytest.mark.parametrize("more", [{}, LOGGED], ids=["plain", "logprobs"])
def test_a_stream_of_ever_longer_events_costs_as_much_as_its_answer_is_long(more):
    short, bytes_short, work_short, _ = stream(2000, **more)
    long, bytes_long, work_long, _ = stream(8000, **more)
    assert bytes_long < 6 * bytes_short  # 4 times the answer; 16 times if it were the square
    assert work_long < 5 * work_short or not more  # each token is written once
    assert work_long <= 4 * (8000 + 10)


@pytest.mark.parametrize("more", [{}, LOGGED], ids=["plain", "logprobs"])
def test_every_event_is_what_is_known_so_far_and_the_last_is_the_whole_answer(more):
    events, _, _, body = stream(600, **more)
    whole = post(
        "/generate", ScriptedService(script=("Hello", " two") * 300, context_tokens=6000), **body
    ).json()
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert counts[:20] == [*range(1, 21)]  # every token, at first
    for event in events:
        known = event["meta_info"]["completion_tokens"]
        assert event["output_ids"] == whole["output_ids"][:known]
        assert whole["text"].startswith(event["text"])
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert event["meta_info"].get(name) == whole["meta_info"].get(name, [])[:known] or not more
        for name in ("input_token_logprobs", "input_top_logprobs"):
            assert event["meta_info"].get(name) == whole["meta_info"].get(name)
    last = events[-1]
    for each in (last, whole):
        del each["meta_info"]["e2e_latency"], each["meta_info"]["id"]
    assert last == whole
