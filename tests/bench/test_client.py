"""Goal: streams of other servers are read rightly, and what is wrong with one is named. Method: a server on
loopback that sends given bytes, piece by piece."""

import asyncio
import json

import pytest

from tiercel.bench.client import Connections, Measured, connected

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
DONE = "data: [DONE]\n\n"


def event(text=None, **more):
    return (
        f"data: {json.dumps({'choices': [] if text is None else [{'index': 0, 'text': text}], **more})}\n\n"
    )


def chat(**delta):
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n"


def asked(*pieces, head=HEAD):
    """What the client notes of an answer with these bytes, which come one piece after the other."""

    async def answer(reader, writer):
        writer.write(head)
        for piece in pieces:
            writer.write(piece if isinstance(piece, bytes) else piece.encode())
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.close()

    async def models(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b'HTTP/1.1 200 OK\r\ncontent-length: 22\r\nconnection: close\r\n\r\n{"data":[{"id": "m"}]}'
        )
        writer.close()

    handlers = []

    async def both(reader, writer):
        handlers.append(asyncio.current_task())
        line = await reader.readline()
        await (models if b"/v1/models" in line else answer)(reader, writer)

    async def ask():
        server = await asyncio.start_server(both, "127.0.0.1", 0)
        url = "http://{}:{}".format(*server.sockets[0].getsockname())
        async with server, connected(url, {}, model=None, plain=True) as client:
            measured = Measured(0, 0)
            await client.ask("/v1/completions", client.body({"prompt": "x"}, 3), measured)
            await asyncio.gather(*handlers, return_exceptions=True)  # the client may leave before they end
            return measured

    return asyncio.run(ask())


def test_an_event_may_come_in_pieces_and_several_at_once():
    said = event("one ") + event("two ")
    found = asked(said[:30], said[30:] + event("three"), event(usage={"completion_tokens": 5}), DONE)
    assert (found.text, found.error, len(found.gaps_s), found.answer_tokens) == ("one two three", "", 2, 5)


def test_lines_may_end_as_in_http():
    assert asked((event("a") + DONE).replace("\n", "\r\n")).text == "a"


def test_what_says_nothing_is_no_first_token():
    """vLLM's chats begin with an event that has a role only. A thought is a token, and is not sent back."""
    found = asked(chat(role="assistant", content=""), chat(reasoning_content="hm"), chat(content="yes"), DONE)
    assert (found.text, len(found.gaps_s), found.answer_tokens) == ("yes", 1, 2)
    assert asked(chat(role="assistant", content=""), DONE).ttft_s is None


def test_tokens_have_the_source_that_the_server_tells():
    def found(**more):
        return asked(event("a"), event(**more), DONE)

    plain = found(usage={"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}})
    assert (plain.tokens_by_source, plain.source, plain.prompt_tokens) == ({"cached": 4}, "cached", 9)
    assert found(usage={"prompt_tokens": 9, "prompt_tokens_details": None}).source == "computed"
    told = found(sglext={"cached_tokens_details": {"device": 3, "host": 0, "storage": 2}})
    assert (told.tokens_by_source, told.source) == ({"device": 3, "store": 2}, "store")


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([event("a")], "the stream ended early"),
        ([event("a"), 'data: {"error": {"code": "aborted", "message": "it ends"}}\n\n'], "200 aborted"),
        ([event("a"), "data: nonsense\n\n", DONE], "not a stream as OpenAI's"),
        ([event("a"), "data: [1]\n\n", DONE], "not a stream as OpenAI's"),
    ],
)
def test_what_is_wrong_with_a_stream_is_named(pieces, error):
    assert asked(*pieces).error == error


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('{"error": {"code": "queue_full", "message": "later"}}', "429 queue_full"),
        ('{"error": {"code": 429, "type": "x", "message": "later"}}', "429"),
        ('{"object": "error", "message": "vLLM of old"}', "429"),
        ("<html>", "429"),
    ],
)
def test_an_error_has_its_status_and_its_code(body, error):
    assert asked(body, head=b"HTTP/1.1 429 No\r\nconnection: close\r\n\r\n").error == error


def test_as_many_connections_as_requests_at_once_and_a_pool_of_httpx_has_one():
    """Such a pool looks at all its connections for each request."""

    async def work():
        connections = Connections("http://127.0.0.1:1", {})
        with connections.one() as first:
            with connections.one() as second:
                assert first is not second
            with connections.one() as third:
                assert third is second
        with connections.one() as again:
            assert again is first
        await connections.close()
        assert first.is_closed and second.is_closed

    asyncio.run(work())
