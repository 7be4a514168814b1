"""Goal: clients that say nothing, half of something or too slowly are let go, keep nobody out, and every end
is told. Method: a real server, real sockets, short limits; what is waited for is that it closes a socket."""

import asyncio
import json
import logging
import socket
import sys
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import ModuleType
from urllib.parse import urlsplit

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tests.server.scripted import LOOPBACK, ScriptedService, events_of, served
from tests.wait import until
from tiercel.server.http.connection import EARLY_MAX, HEADERS_MAX, READ_BYTES, Connection
from tiercel.server.http.pace import LET_IN_AT_ONCE
from tiercel.server.listen import Server
from tiercel.server.options import ServerOptions

SHORT = replace(LOOPBACK, headers_s=0.2, body_s=0.2, idle_s=0.2, write_s=0.2)
HEAD = (
    b"POST /generate HTTP/1.1\r\nhost: localhost\r\n"
    b"content-type: application/json\r\ncontent-length: 13\r\n\r\n"
)
BODY = b'{"text": "x"}'
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@contextmanager
def connected(url):
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), timeout=20) as client:
        yield client


def to_end(client):
    """Everything until the server closes; a socket that stays open fails by its time-out."""
    said = b""
    try:
        while part := client.recv(65536):
            said += part
    except ConnectionResetError:  # something of ours was still on its way
        pass
    return said


def error_of(said):
    head, _, body = said.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", None),
        (b"GET", (408, "request_timeout")),
        (HEAD[:-2], (408, "request_timeout")),
        (HEAD, (408, "request_timeout")),
        (HEAD + BODY[:5], (408, "request_timeout")),
    ],
    ids=["nothing", "a word", "half of the headers", "no body", "half of the body"],
)
def test_who_sends_no_whole_request_is_let_go(sent, error):
    service = ScriptedService()
    with served(service, SHORT) as url, connected(url) as client:
        client.sendall(sent)
        said = to_end(client)
    assert (error_of(said) if said else None) == error
    assert service.asks == []


@pytest.mark.parametrize(
    "sent",
    [
        HEALTH,
        HEAD + BODY,
        HEALTH.replace(b"\r\n\r\n", b"\r\ncontent-length: 9\r\n\r\nhalf"),
        HEALTH + b"GET /he",
    ],
    ids=["a request", "a request with a body", "a request whose body nobody reads", "a request and a half"],
)
def test_who_was_answered_and_says_no_more_is_let_go(sent):
    with served(ScriptedService(), SHORT) as url, connected(url) as client:
        client.sendall(sent)
        assert to_end(client).startswith(b"HTTP/1.1 200 ")


def test_who_trickles_is_let_go_as_who_is_silent():
    with served(ScriptedService(), SHORT) as url, connected(url) as client:
        client.settimeout(0.02)
        said, sent = b"", 0
        while b"408" not in said:
            try:
                client.sendall(HEAD[sent : sent + 1])
                sent += 1
                said += client.recv(65536)
            except TimeoutError:
                continue
    assert sent < len(HEAD)


def test_a_connection_may_be_idle_for_longer_than_headers_may_take():
    with served(ScriptedService(), replace(SHORT, idle_s=20)) as url, connected(url) as client:
        for _ in range(2):
            client.sendall(HEALTH)
            said = b""
            while not said.endswith(b'{"status":"ok"}'):
                said += client.recv(65536)
            client.settimeout(1)
            with pytest.raises(TimeoutError):
                client.recv(1)


def test_an_answer_may_take_its_time():
    service = ScriptedService(hold_after=1)
    with served(service, SHORT) as url, connected(url) as client:
        client.sendall(HEAD + BODY)
        assert service.holding.wait(10)
        client.settimeout(1)  # longer than every limit
        with pytest.raises(TimeoutError):
            client.recv(1)


def test_who_reads_nothing_is_let_go_and_its_answer_ended():
    words = 40_000  # more bytes than the system keeps for a socket
    service = ScriptedService(script=("Hello",) * words, hold_after=words, context_tokens=2 * words)
    body = {"model": "scripted", "prompt": "x", "stream": True, "max_tokens": words + 1}
    raw = json.dumps(body).encode()
    head = HEAD.replace(b"/generate", b"/v1/completions").replace(b"13", str(len(raw)).encode())
    with served(service, SHORT) as url, connected(url) as client:
        client.sendall(head + raw)
        assert service.closed.wait(20)


FEW = ServerOptions(loopback=True, connections_max=10, headers_s=20, body_s=20)


@pytest.mark.parametrize(
    "sent", [b"", HEAD[:20], HEAD + BODY[:5], HEALTH], ids=["silent", "half", "body", "idle"]
)
def test_any_number_of_silent_connections_keeps_nobody_out(sent):
    with served(ScriptedService(), FEW) as url, ExitStack() as held:
        clients = [held.enter_context(connected(url)) for _ in range(50)]
        for client in clients:
            try:
                client.sendall(sent)
            except OSError:
                continue  # it had to go already
        assert httpx.get(f"{url}/health", timeout=10).status_code == 200
        to_end(clients[0])  # the oldest went first


def test_who_was_answered_last_waits_for_the_shortest_time():
    with served(ScriptedService(), replace(FEW, connections_max=2)) as url, ExitStack() as held:
        first, second = (held.enter_context(connected(url)) for _ in range(2))
        for client in (second, first):
            client.sendall(HEALTH)
            said = b""
            while not said.endswith(b'{"status":"ok"}'):
                said += client.recv(65536)
        held.enter_context(connected(url))
        assert to_end(second) == b""  # let go, though it came later
        first.sendall(HEALTH)
        assert first.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_crowd_of_connections_is_kept_by_the_system_and_let_in_little_by_little(monkeypatch):
    """Where the event loop is busy, they are neither lost nor all taken in one turn."""
    made, turns, busy = [], [], threading.Event()
    own = Connection.connection_made

    def connection_made(self, transport):
        if not made:
            assert busy.wait(10)  # as long as this takes, the event loop does nothing else
        made.append(len(turns))
        own(self, transport)
        self.loop.call_soon(turns.append, None)

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    with served(ScriptedService()) as url, ExitStack() as held:
        clients = [held.enter_context(connected(url)) for _ in range(200)]
        busy.set()
        clients[-1].sendall(HEALTH)
        assert clients[-1].recv(65536).startswith(b"HTTP/1.1 200 ")
        until(lambda: len(made) == 200, "all are let in")
    at_once = max(made.count(each) for each in made)
    assert at_once <= 2 * LET_IN_AT_ONCE


def test_when_all_are_being_answered_one_more_is_told_so():
    service = ScriptedService(hold_after=0)
    with served(service, FEW) as url, ExitStack() as held:
        for number in range(FEW.connections_max):
            client = held.enter_context(connected(url))
            client.sendall(HEAD + BODY)
            while len(service.asks) <= number:
                assert service.holding.wait(10)
        refused = held.enter_context(connected(url))
        refused.sendall(HEALTH)
        assert error_of(to_end(refused)) == (503, "too_many_connections")


def test_many_ended_connections_are_one_line_of_log(caplog):
    caplog.set_level(logging.WARNING)
    with served(ScriptedService(), replace(SHORT, connections_max=3)) as url, ExitStack() as held:
        clients = [held.enter_context(connected(url)) for _ in range(30)]
        for client in clients:
            to_end(client)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and lines[0].startswith("connections ended: 1 was idle longest"), lines
    assert not any(record.exc_info for record in caplog.records)


# Requests of other kinds


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"hello\r\n\r\n", (400, "invalid_http")),
        (HEAD.replace(b"13", b"x"), (400, "invalid_http")),
        (b"CONNECT other:80 HTTP/1.1\r\nhost: other\r\n\r\n", (400, "no_proxy")),
        (HEAD[:-2] + b"x-long: " + b"x" * 100_000, (431, "headers_too_large")),
        (HEAD[:-2] + b"x: y\r\n" * HEADERS_MAX + b"\r\n", (431, "headers_too_large")),
    ],
    ids=["not HTTP", "a length that is no number", "a proxy", "headers without an end", "many headers"],
)
def test_what_can_not_be_read_is_refused(sent, error):
    service = ScriptedService()
    with served(service) as url, connected(url) as client:
        client.sendall(sent)
        assert error_of(to_end(client)) == error
    assert service.asks == []


def test_a_client_that_would_rather_speak_http_2_is_answered_with_http_1():
    """Java's own client asks so, in a request that has a body."""
    asking = HEAD[:-2] + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n\r\n"
    service = ScriptedService()
    with served(service, SHORT) as url, connected(url) as client:
        client.sendall(asking + BODY[:5])
        client.sendall(BODY[5:] + asking + BODY)
        said = to_end(client)
    assert said.count(b"HTTP/1.1 200 ") == said.count(b"Hello world!") == len(service.asks) == 2


@pytest.mark.parametrize(("sent", "answered"), [(EARLY_MAX, EARLY_MAX), (EARLY_MAX + 1, 0)])
def test_a_client_may_send_a_few_requests_before_the_first_is_answered(sent, answered):
    service = ScriptedService()
    with served(service, SHORT) as url, connected(url) as client:
        client.sendall(sent * (HEAD + BODY))
        said = to_end(client)
    assert said.count(b"HTTP/1.1 200 ") == len(service.asks) == answered
    if not answered:
        assert error_of(said) == (400, "too_many_requests")


def test_a_thousand_requests_before_the_first_answer_are_not_even_read(monkeypatch):
    begun = []
    own = Connection.on_message_begin
    monkeypatch.setattr(Connection, "on_message_begin", lambda self: (begun.append(1), own(self)))
    with served(ScriptedService()) as url, connected(url) as client:
        client.sendall(1000 * HEALTH)
        to_end(client)
    assert len(begun) == EARLY_MAX + 1


def test_a_body_is_read_in_parts(monkeypatch):
    """So that other connections have their turn between them."""
    sizes = []
    own = Connection.data_received
    monkeypatch.setattr(
        Connection, "data_received", lambda self, data: (sizes.append(len(data)), own(self, data))
    )
    text = b'{"text": "%s"}' % (b"x " * 500_000)
    with served(ScriptedService()) as url, connected(url) as client:
        client.sendall(HEAD.replace(b"13", str(len(text)).encode()) + text)
        assert client.recv(65536).startswith(b"HTTP/1.1 4")  # longer than the context
    assert READ_BYTES / 2 < max(sizes) <= READ_BYTES


def test_who_sends_the_next_request_early_and_leaves_ends_the_first():
    service = ScriptedService(hold_after=1)
    with served(service) as url:
        with connected(url) as client:
            client.sendall(2 * (HEAD + BODY))
            assert service.holding.wait(10)
        assert service.closed.wait(10)
    assert len(service.asks) == 1


def test_what_is_replaced_of_uvicorn_is_there():
    """Otherwise nobody would call it. Another version of uvicorn may have other methods."""
    replaced = {
        *(
            "connection_made",
            "connection_lost",
            "data_received",
            "pause_writing",
            "resume_writing",
            "shutdown",
        ),
        *("on_message_begin", "on_header", "on_headers_complete", "on_message_complete"),
        *("on_response_complete", "_start_asgi_task"),
    }
    assert replaced == vars(HttpToolsProtocol).keys() & vars(Connection).keys() - {
        "__init__",
        "__module__",
        "__doc__",
    }
    used = {"more_body", "disconnected", "message_event", "response_started", "scope"}
    assert used <= {*RequestResponseCycle.__init__.__code__.co_names}


def test_the_event_loop_is_asyncios_where_another_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", ModuleType("uvloop"))
    server = Server(ScriptedService(), LOOPBACK)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        assert isinstance(runner.get_loop(), asyncio.SelectorEventLoop)


# The end


def test_an_answer_that_is_not_done_in_time_ends_with_an_error_of_its_own_form(caplog):
    service = ScriptedService(hold_after=1)
    answers = {}

    def ask(stream):
        answers[stream] = httpx.post(f"{url}/generate", json={"text": "x", "stream": stream}, timeout=20)

    with served(service, LOOPBACK, shutdown_s=1) as url:
        asking = [threading.Thread(target=ask, args=[stream]) for stream in (False, True)]
        for each in asking:
            each.start()
        while len(service.asks) < 2:
            assert service.holding.wait(10)
    for each in asking:
        each.join(10)
    assert answers[False].status_code == 503
    assert answers[False].json()["error"]["code"] == "aborted"
    *_, last = events_of(answers[True])
    assert json.loads(last)["error"]["code"] == "aborted"
    assert not any(record.exc_info for record in caplog.records)


def test_a_request_that_never_came_whole_does_not_hold_up_the_end():
    with served(ScriptedService(), LOOPBACK) as url, connected(url) as half, connected(url) as silent:
        half.sendall(HEAD + BODY[:5])
        silent.sendall(b"GET")
        assert httpx.get(f"{url}/health").status_code == 200
    # `served` waits until the server has ended.
