"""Goal: the official `openai` client understands every answer. Method: it talks to a real server."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.server.scripted import ScriptedService, served
from tiercel.errors import QueueFull
from tiercel.server.options import ServerOptions

USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def address():
    with served(ScriptedService()) as url:
        yield url


@pytest.fixture
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as each:
        yield each


def test_a_chat(client):
    answer = client.chat.completions.create(
        model="scripted", messages=USER, logprobs=True, top_logprobs=2, n=2, extra_body={"cache_salt": "a"}
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello world!"] * 2
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs.content[0].top_logprobs[1].token == "x"
    assert answer.usage.prompt_tokens == 17
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.id == answer._request_id


def test_a_chat_as_a_stream(client):
    stream = client.chat.completions.create(
        model="scripted", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello world!"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage.completion_tokens == 3


def test_a_chat_with_the_clients_own_helper_for_streams(client):
    with client.chat.completions.stream(model="scripted", messages=USER) as stream:
        stream.until_done()
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello world!"


def test_a_completion_with_an_echo_and_logprobs(client):
    answer = client.completions.create(
        model="scripted", prompt=["one", "x"], echo=True, logprobs=1, max_tokens=2
    )
    assert [choice.text for choice in answer.choices] == ["oneHello world", "xHello world"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs.tokens == ["one", "Hello", " world"]
    assert answer.choices[0].logprobs.text_offset == [0, 3, 8]


def test_a_completion_as_a_stream(client):
    stream = client.completions.create(model="scripted", prompt=[[261], [262]], stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["Hello world!"] * 2


def test_models(client):
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").owned_by == "tiercel"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_errors_are_the_clients_own_kinds(client):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="scripted", messages=USER, temperature=5)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt", messages=USER)
    assert missing.value.code == "model_not_found"


def test_a_full_queue_is_a_rate_limit_and_an_error_in_a_stream_is_raised():
    service = ScriptedService(fail_first=QueueFull(waiting=1, waiting_max=1))
    with (
        served(service) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model="scripted", messages=USER, stream=True)
        service.fail_first, service.fail_after = None, (1, QueueFull(waiting=1, waiting_max=1))
        stream = client.chat.completions.create(model="scripted", messages=USER, stream=True)
        with pytest.raises(openai.APIError) as error:
            list(stream)
        assert error.value.code == "queue_full"


def test_the_asynchronous_client_streams_many_at_once(address):
    async def one(client, number):
        stream = await client.chat.completions.create(
            model="scripted", messages=USER, stream=True, extra_headers={"x-request-id": f"n-{number}"}
        )
        return [chunk async for chunk in stream]

    async def many():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            whole = await client.completions.create(model="scripted", prompt="x")
            streams = await asyncio.gather(*(one(client, number) for number in range(32)))
            return whole, streams

    whole, streams = asyncio.run(many())
    assert whole.choices[0].text == "Hello world!"
    for number, chunks in enumerate(streams):
        assert {chunk.id for chunk in chunks} == {f"n-{number}"}
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello world!"


def test_a_stream_that_is_closed_early_ends_the_request():
    service = ScriptedService(hold_after=1)
    with (
        served(service) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(model="scripted", messages=USER, stream=True)
        assert next(iter(stream)).choices[0].delta.content == "Hello"  # type: ignore[attr-defined]
        stream.close()
        assert service.closed.wait(10)


def test_the_clients_key_is_the_users_key():
    with served(ScriptedService(), ServerOptions(api_key=("right",), loopback=True)) as url:
        for key, raised in (("right", None), ("wrong", openai.AuthenticationError)):
            with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
                if raised is None:
                    assert client.models.list()
                else:
                    with pytest.raises(raised):
                        client.models.list()


def test_a_long_body_is_answered_and_not_cut_off():
    options = ServerOptions(loopback=True, body_bytes_max=1000)
    headers = {"content-type": "application/json"}

    def pieces():
        for _ in range(64):
            yield b"x" * 65_536

    with served(ScriptedService(), options) as url, httpx.Client(base_url=url) as client:
        for content in (b"x" * (4 << 20), pieces()):
            assert client.post("/generate", content=content, headers=headers).status_code == 413
        assert client.get("/health").status_code == 200


def test_two_servers_in_one_process_do_not_mix():
    gate = threading.Barrier(2, timeout=60)

    def one(url):
        with httpx.Client(base_url=url) as client:
            gate.wait()
            text = client.post("/generate", json={"text": "x"}).json()["text"]
            counted = client.get("/metrics").text
            gate.wait()
            return text, 'requests_total{call="/generate",status="200"} 1.0' in counted

    # One application is made after the other: FastAPI turns warnings off meanwhile, for all threads.
    first, second = (served(ScriptedService(script=(word,))) for word in ("one", " two"))
    with first as url, second as other, ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, (url, other))) == [("one", True), (" two", True)]
