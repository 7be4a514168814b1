"""Goal: no body keeps the server from others for long. Method: count what is built, which thread works and
who waits for whom; no clocks."""

import asyncio
import json
import threading
from collections import Counter
from dataclasses import replace

import pytest
from benchmarks.hostile_bodies import bodies
from hypothesis import given
from hypothesis import strategies as st

from tests.server.scripted import LOOPBACK, ScriptedService, client_of, post, talking
from tiercel.server.calls.anthropic import CountRequest, MessagesRequest
from tiercel.server.calls.native import GenerateRequest
from tiercel.server.calls.protocol import ChatRequest, CompletionRequest
from tiercel.server.calls.reply import Api
from tiercel.server.calls.responses import ResponsesRequest
from tiercel.server.calls.tokens import DetokenizeRequest, TokenizeRequest
from tiercel.server.http import body
from tiercel.server.http.aside import Aside, Turns
from tiercel.server.http.body import LARGE_BYTES, Body, BodyLimits, check_count
from tiercel.server.http.errors import ApiError
from tiercel.server.http.metrics import Metrics
from tiercel.server.http.pace import Pace

MODELS = (
    ChatRequest,
    CompletionRequest,
    CountRequest,
    DetokenizeRequest,
    GenerateRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
)
ITEMS = 3000
VALID = ("many_tools", "large_tool", "just_few_enough_messages", "just_few_enough_ids")
HEADERS = {"content-type": "application/json"}
LONG = "x" * LARGE_BYTES

# What is built


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
def test_of_a_hostile_body_few_errors_are_built_and_one_is_told(monkeypatch, strict):
    built = []
    own = body._complaint
    monkeypatch.setattr(
        body, "_complaint", lambda details, data: built.append(len(details)) or own(details, data)
    )
    small = replace(BodyLimits(8 << 20), numbers_max=ITEMS, others_max=4 * ITEMS)
    monkeypatch.setattr("tiercel.server.calls.reply.Api.body_limits", small)
    with talking(ScriptedService(context_tokens=ITEMS), replace(LOOPBACK, strict=strict)) as talk:
        for name, (path, raw) in bodies(ITEMS).items():
            response = talk("POST", path, content=raw, headers=HEADERS)
            if name.startswith("unknown") and not strict:
                assert response.status_code == 200, name
                assert response.headers["x-ignored-fields"].count(",") == 31, name
                continue
            assert response.status_code in ((200,) if name in VALID else (400, 413)), name
    assert max(built) < 10


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_no_list_of_a_request_is_walked_beyond_its_first_mistake(model):
    """And the length of an object with any names is checked before its values."""

    def walk(schema, checked_before):
        if isinstance(schema, list | tuple):
            for each in schema:
                walk(each, False)
        if not isinstance(schema, dict):
            return
        if schema.get("type") == "list":
            assert schema.get("fail_fast"), schema
        if schema.get("type") == "dict":
            assert checked_before or schema.get("values_schema", {"type": "any"})["type"] == "any", schema
        for each in schema.values():
            walk(each, schema.get("type") == "function-before")

    walk(model.__pydantic_core_schema__, False)
    assert issubclass(model, Body)


VALUES = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text('a{}[],:"\\漢'),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text('a,{"\\'), inner, max_size=5),
    max_leaves=30,
)


def counted(data):
    """Numbers, null and the like; all others."""
    match data:
        case dict():
            every = [counted(each) for each in data.values()]
            return sum(n for n, _ in every), 1 + len(data) + sum(o for _, o in every)
        case list():
            every = [counted(each) for each in data]
            return sum(n for n, _ in every), 1 + sum(o for _, o in every)
        case str():
            return 0, 1
    return 1, 0


@given(VALUES, st.booleans())
def test_values_are_counted_without_what_texts_have_inside(data, ascii_only):
    raw = json.dumps([data], ensure_ascii=ascii_only).encode()
    numbers, others = counted([data])
    check_count(raw, BodyLimits(0, numbers_max=numbers, others_max=others))
    with pytest.raises(ApiError) as caught:
        check_count(raw, BodyLimits(0, numbers_max=numbers, others_max=others - 1))
    assert caught.value.status == 413


def test_too_many_numbers_are_refused_and_both_limits_told():
    limits = BodyLimits(0, numbers_max=100, others_max=10)
    check_count(b"[" + b"1," * 99 + b"1]", limits)
    with pytest.raises(ApiError, match="more than 10 objects, lists, strings and names, or 100 numbers"):
        check_count(b"[" + b"1," * 120 + b"1]", limits)


def test_a_prompt_may_have_as_many_token_ids_as_the_context():
    for context_tokens, most in ((100, 1 << 17), (1 << 20, 4 << 20)):
        api = Api(ScriptedService(context_tokens=context_tokens), LOOPBACK, Metrics(), Aside(Pace()))
        assert api.body_limits.numbers_max == most


# Which thread works


def chat(text):
    return {"messages": [{"role": "user", "content": text}]}


CALLS = {
    "/v1/chat/completions": chat,
    "/v1/completions": lambda text: {"prompt": text},
    "/generate": lambda text: {"text": text},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: chat(text) | {"max_tokens": 1},
    "/tokenize": lambda text: {"prompt": text},
}


@pytest.mark.parametrize("path", CALLS)
def test_a_large_body_is_read_beside_the_event_loop_which_answers_others(monkeypatch, path):
    others_answered, threads = threading.Event(), []
    own = body.parse

    def parse(*given):
        threads.append(threading.current_thread())
        assert others_answered.wait(10), "the event loop waited for the body"
        return own(*given)

    monkeypatch.setattr(body, "parse", parse)

    async def main():
        async with client_of(ScriptedService(context_tokens=100_000)) as client:
            asked = asyncio.create_task(client.post(path, json=CALLS[path](LONG)))
            while not threads:
                await asyncio.sleep(0)
            assert (await client.get("/health")).status_code == 200
            others_answered.set()
            return await asked

    assert asyncio.run(main()).status_code == 200
    assert threads and threading.main_thread() not in threads


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_large_body_is_also_translated_beside_the_event_loop(monkeypatch, path):
    threads = []
    monkeypatch.setattr(
        "tiercel.server.calls.translate.checked",
        lambda *given: threads.append(threading.current_thread()) or body.checked(*given),
    )
    for text, aside in ((LONG, True), ("short", False)):
        threads.clear()
        post(path, ScriptedService(context_tokens=100_000), **CALLS[path](text))
        assert [thread is not threading.main_thread() for thread in threads] == [aside]


def test_a_small_request_does_not_wait_for_large_ones(monkeypatch):
    """Not even where large ones of several owners have all threads that there are for them."""
    ended = threading.Event()
    own = body.parse
    begun = []

    def parse(raw, *given):
        if len(raw) > LARGE_BYTES:
            begun.append(raw)
            assert ended.wait(10)
        return own(raw, *given)

    monkeypatch.setattr(body, "parse", parse)
    options = replace(LOOPBACK, api_key=("a", "b", "c"))

    async def main():
        async with client_of(ScriptedService(context_tokens=100_000), options) as client:

            def send(key, text):
                headers = {"authorization": f"Bearer {key}"}
                return asyncio.create_task(client.post("/generate", json={"text": text}, headers=headers))

            large = [send(key, LONG) for key in "aabbcc"]
            while len(begun) < 2:
                await asyncio.sleep(0)
            assert (await send("a", "short")).status_code == 200
            assert len(begun) == 2
            ended.set()
            return await asyncio.gather(*large)

    assert {each.status_code for each in asyncio.run(main())} == {200}


# Who waits for whom


async def in_turns(turns, owners, *, leaving=()):
    """The order in which owners get a thread, one after the other; and how many of one owner ran at once."""
    order, running, most = [], Counter(), Counter()
    going = threading.Semaphore(0)

    def work(owner):
        running[owner] += 1
        most[owner] = max(most[owner], running[owner])
        order.append(owner)
        assert going.acquire(timeout=10)
        running[owner] -= 1

    tasks = [asyncio.create_task(turns.run(owner, work, owner)) for owner in owners]
    await asyncio.sleep(0)
    for index in leaving:
        tasks[index].cancel()
    for _ in range(len(owners) - len(leaving)):
        going.release()
    await asyncio.gather(*tasks, return_exceptions=True)
    return "".join(order), most


def test_owners_take_turns_whoever_came_first():
    order, _ = asyncio.run(in_turns(Turns(1, "test", each=1), "aaaabbc"))
    assert order == "abcabaa"


def test_one_owner_has_no_more_threads_than_it_may():
    order, most = asyncio.run(in_turns(Turns(3, "test", each=1), "aaab"))
    assert sorted(order) == [*"aaab"] and most == {"a": 1, "b": 1}


def test_who_leaves_while_waiting_is_passed_over_and_no_thread_is_lost():
    turns = Turns(1, "test", each=1)
    assert asyncio.run(in_turns(turns, "abab", leaving=(1, 2)))[0] == "ab"
    assert asyncio.run(in_turns(turns, "ab"))[0] == "ab"
    assert not turns._lines and not +turns._running
