"""Goal: `/abort_request` ends answers early, as SGLang's clients expect. Method: a service that waits in the
middle of its answers."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from tests.server.scripted import LOOPBACK, ScriptedService, call, client_of
from tiercel.server.http.tenants import Tenants, digest_of
from tiercel.server.options import ServerOptions

CALLS = {
    "/generate": {"text": "x"},
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
}
KEYED = ServerOptions(api_key=("one", "two"), admin_key="admin", loopback=True)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@asynccontextmanager
async def waiting(service: ScriptedService, *requests, options=LOOPBACK):
    """A client, and requests that wait for the rest of their answers."""
    async with client_of(service, options) as client:
        tasks = [asyncio.create_task(client.post(path, **more)) for path, more in requests]
        while len(service.asks) < len(requests) or not service.holding.is_set():
            await asyncio.sleep(0)
        yield client, tasks


def end_of(path: str, answer: dict) -> tuple:
    match path:
        case "/generate":
            return answer["text"], answer["meta_info"]["finish_reason"]["type"]
        case "/v1/completions":
            return answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
        case "/v1/chat/completions":
            return answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]
        case "/v1/responses":
            return answer["output"][0]["content"][0]["text"], answer["incomplete_details"]["reason"]
    return answer["content"][0]["text"], answer["stop_reason"]


def test_a_tenant_that_may_begin_no_more_ends_what_it_has(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(f'[a]\nsha256 = ["{digest_of(b"a")}"]\nrequests-in-flight = 1\n')
    options, body = ServerOptions(tenants=Tenants(file)), {"text": "x", "rid": "r-1"}

    async def talk():
        request = "/generate", {"json": body, "headers": bearer("a")}
        async with waiting(ScriptedService(hold_after=1), request, options=options) as (client, (task,)):
            client.headers = bearer("a")
            refused = await client.post("/generate", json={"text": "y"})
            counted = await client.post("/tokenize", json={"prompt": "Hello"})
            ended = await client.post("/abort_request", json={"rid": "r-1"})
            answer = await asyncio.wait_for(task, 20)
            return [each.status_code for each in (refused, counted, ended, answer)]

    assert asyncio.run(talk()) == [429, 200, 200, 200]


@pytest.mark.parametrize("path", CALLS)
def test_an_aborted_request_answers_what_it_has(path):
    async def talk():
        service = ScriptedService(hold_after=2)
        async with waiting(service, (path, {"json": CALLS[path] | {"rid": "r-1"}})) as (client, (task,)):
            assert (await client.post("/abort_request", json={"rid": "other"})).json() == {"aborted": 0}
            assert not task.done()
            assert (await client.post("/abort_request", json={"rid": "r-1"})).json() == {"aborted": 1}
            response = await task
            again = await client.post("/abort_request", json={"rid": "r-1"})
        assert again.json() == {"aborted": 0}
        assert service.events[-1] == "end r-1"
        return response

    response = asyncio.run(talk())
    assert response.status_code == 200
    reason = {"/v1/responses": "aborted", "/v1/messages": "pause_turn"}.get(path, "abort")
    assert end_of(path, response.json()) == ("Hello world", reason)


def test_a_stream_ends_with_the_reason():
    async def talk():
        request = ("/generate", {"json": {"text": "x", "rid": "r", "stream": True}})
        async with waiting(ScriptedService(hold_after=1), request) as (client, (task,)):
            await client.post("/abort_request", json={"rid": "r"})
            return await task

    *_, last, done = asyncio.run(talk()).text.strip().split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"


def test_before_its_first_token_an_answer_is_empty_and_knows_its_prompt():
    async def talk():
        async with waiting(
            ScriptedService(hold_after=0), ("/generate", {"json": {"text": "xyz", "rid": "r"}})
        ) as (
            client,
            (task,),
        ):
            await client.post("/abort_request", json={"rid": "r"})
            return (await task).json()

    answer = asyncio.run(talk())
    assert (answer["text"], answer["output_ids"], answer["meta_info"]["prompt_tokens"]) == ("", [], 3)


def test_one_prompt_of_a_batch_ends_with_all_its_answers_and_the_others_go_on():
    async def talk():
        service = ScriptedService(hold_after=1)
        body = {"text": ["one", " two"], "rid": ["a", "b"], "sampling_params": {"n": 2, "max_new_tokens": 9}}
        async with client_of(service) as client:
            task = asyncio.create_task(client.post("/generate", json=body))
            while len(service.asks) < 4:
                await asyncio.sleep(0)
            await client.post("/abort_request", json={"rid": "a"})
            while service.events.count("end a") + service.events.count("end a.n1") < 2:
                await asyncio.sleep(0)
            assert not task.done()
            await client.post("/abort_request", json={"rid": "b"})
            return (await task).json()

    assert [each["meta_info"]["finish_reason"]["type"] for each in asyncio.run(talk())] == ["abort"] * 4


def test_an_id_belongs_to_a_key_and_a_salt_and_only_the_operator_ends_all():
    async def talk():
        service = ScriptedService(hold_after=1)
        bodies = [{"text": "x", "rid": "r"}, {"text": "x", "rid": "r", "cache_salt": "s"}]
        requests = [("/generate", {"json": body, "headers": bearer("one")}) for body in bodies]
        async with waiting(service, *requests, options=KEYED) as (client, tasks):

            async def abort(key, **body):
                response = await client.post("/abort_request", json=body, headers=bearer(key))
                return response.json().get("aborted", response.status_code)

            assert await abort("two", rid="r") == 0
            assert await abort("none", rid="r") == 401
            assert await abort("one", abort_all=True) == 401
            assert not any(task.done() for task in tasks)
            assert await abort("one", rid="r", cache_salt="s") == 1
            await tasks[1]
            assert not tasks[0].done()
            assert await abort("admin", abort_all=True) == 1
            await tasks[0]

    asyncio.run(talk())


def test_without_a_key_others_can_not_end_all():
    response = call("POST", "/abort_request", options=ServerOptions(), json={"abort_all": True})
    assert response.status_code == 403
    assert call("POST", "/abort_request", options=ServerOptions(), json={"rid": "r"}).status_code == 200


@pytest.mark.parametrize(
    "body", [{}, {"rid": "a", "abort_all": True}, {"abort_all": False}, {"rid": ""}], ids=str
)
def test_what_to_end_must_be_clear(body):
    response = call("POST", "/abort_request", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "rid")
