"""Goal: a client that leaves, at any moment, ends what it asked for. Method: leave, at every moment."""

import asyncio
import json
import socket

import pytest

from tests.server.scripted import LOOPBACK, ScriptedService, served
from tiercel.server.app import create_app

PATHS = {
    "/v1/chat/completions": {"model": "scripted", "messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"model": "scripted", "prompt": ["x", "y"], "n": 2},
    "/generate": {"text": "x"},
}


class Visitor:
    """A client at the level of ASGI: says when it leaves, and may stop reading."""

    def __init__(self, path, body, *, reads=1000):
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "scheme": "http",
        }
        self.body = json.dumps(body).encode()
        self.left = asyncio.Event()
        self.stuck = asyncio.Event()
        self.reads = reads
        self.sent = []
        self._asked = False

    async def receive(self):
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if len(self.sent) == self.reads:
            self.stuck.set()
            await asyncio.Event().wait()
        self.sent.append(message)


def leave(service, path, *, stream, when, reads=1000):
    """Leaves when `when(visitor)` has come."""

    async def visit():
        visitor = Visitor(path, PATHS[path] | {"stream": stream}, reads=reads)
        app = create_app(service, LOOPBACK)
        task = asyncio.create_task(app(visitor.scope, visitor.receive, visitor.send))
        await when(visitor)
        visitor.left.set()
        await asyncio.wait_for(task, 10)
        # Nothing is left running: the task is this one.
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(visit())


def begun_and_ended(service):
    begun = sorted(event.split()[1] for event in service.events if event.startswith("begin"))
    ended = sorted(event.split()[1] for event in service.events if event.startswith("end"))
    return begun, ended


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 2])
@pytest.mark.parametrize("path", PATHS)
def test_who_leaves_while_an_answer_is_made_ends_it(path, tokens, stream):
    service = ScriptedService(hold_after=tokens)

    async def held(_visitor):
        assert await asyncio.to_thread(service.holding.wait, 10)

    leave(service, path, stream=stream, when=held)
    begun, ended = begun_and_ended(service)
    assert begun
    assert begun == ended


@pytest.mark.parametrize("reads", [0, 1, 2, 3])
@pytest.mark.parametrize("path", PATHS)
def test_who_stops_reading_and_leaves_ends_it(path, reads):
    service = ScriptedService()

    async def stuck(visitor):
        await visitor.stuck.wait()

    leave(service, path, stream=True, when=stuck, reads=reads)
    begun, ended = begun_and_ended(service)
    assert begun
    assert begun == ended


@pytest.mark.parametrize("path", PATHS)
def test_who_leaves_while_sending_asks_nothing(path):
    service = ScriptedService()

    async def visit():
        visitor = Visitor(path, {})
        messages = [
            {"type": "http.request", "body": b'{"te', "more_body": True},
            {"type": "http.disconnect"},
        ]

        async def receive():
            return messages.pop(0)

        await create_app(service, LOOPBACK)(visitor.scope, receive, visitor.send)

    asyncio.run(visit())
    assert service.asks == []


def test_a_body_that_is_told_to_be_too_long_is_not_read():
    async def visit():
        visitor = Visitor("/generate", {})
        visitor.scope["headers"].append((b"content-length", b"999999999"))

        async def receive():
            raise AssertionError("it was read")

        await create_app(ScriptedService(), LOOPBACK)(visitor.scope, receive, visitor.send)
        return visitor.sent

    assert asyncio.run(visit())[0]["status"] == 413


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_ends_the_request_of_a_real_server(stream):
    service = ScriptedService(hold_after=1)
    body = json.dumps(PATHS["/generate"] | {"stream": stream}).encode()
    head = ("POST /generate HTTP/1.1", "host: x", "content-type: application/json")
    raw = "\r\n".join((*head, f"content-length: {len(body)}", "", "")).encode() + body
    with served(service) as address:
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as connection:
            connection.sendall(raw)
            assert service.holding.wait(10)
        assert service.closed.wait(10)


def test_a_cancelled_server_task_ends_its_requests():
    service = ScriptedService(hold_after=1)

    async def visit():
        visitor = Visitor("/generate", PATHS["/generate"])
        task = asyncio.create_task(
            create_app(service, LOOPBACK)(visitor.scope, visitor.receive, visitor.send)
        )
        assert await asyncio.to_thread(service.holding.wait, 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(visit())
    assert service.closed.is_set()
