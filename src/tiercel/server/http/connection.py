"""One connection: how long its client may take, and how it is closed.

    connected ── headers_s ──► request ── body_s ──► whole request ──► answer ── idle_s ──► next request …
                                                                        └── write_s without a reader

If too many connections are open, the one that has waited longest for its client is closed: idle and half-sent
requests never block new clients.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter, deque
from enum import Enum
from typing import Any

import httptools
from starlette.datastructures import Headers
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tiercel.server.http.errors import ApiError
from tiercel.server.http.keys import Owners
from tiercel.server.http.pace import Pace
from tiercel.server.options import ServerOptions

log = logging.getLogger("tiercel.server")

READ_BYTES = 32 << 10
"""The most bytes of one connection in one turn of the event loop."""

HEADERS_MAX, EARLY_MAX = 128, 8
"""The most headers of a request; the most requests that a client may send before the first is answered."""

LOG_EVERY_S = 60.0
"""One log line counts all connections closed since the line before."""

HEAD_BYTES_MAX = 64 << 10
"""The most bytes of a request's line and headers: the parser has no limit of its own."""


class Phase(Enum):
    """What a connection waits for."""

    HEADERS = "request"
    BODY = "body"
    ANSWER = "answer"
    IDLE = "next request"


class EndedCount:
    """Counts closed connections, and logs the counts now and then."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._next_s = 0.0

    def add(self, why: str, now_s: float) -> None:
        self._counts[why] += 1
        if now_s >= self._next_s:
            self._next_s = now_s + LOG_EVERY_S
            counts = ", ".join(f"{count} {why}" for why, count in self._counts.items())
            log.warning("connections ended: %s", counts)
            self._counts.clear()


class Connection(HttpToolsProtocol):
    """One HTTP/1.1 connection with time-outs."""

    def __init__(
        self,
        *given: Any,
        options: ServerOptions,
        ended: EndedCount,
        waiting: dict[Connection, None],
        pace: Pace,
        owners: Owners,
        **named: Any,
    ) -> None:
        """`waiting`: all connections that wait for their clients, the longest wait first."""
        super().__init__(*given, **named)
        self._options = options
        self._ended = ended
        self._waiting = waiting
        self._pace, self._owners = pace, owners
        self._cycles: deque[RequestResponseCycle] = deque()
        """Requests without a whole answer, the oldest first: a client may send the next one early."""
        self._coming: Phase | None = None
        """Which part of a request is still to come."""
        self._head_bytes = 0
        self._phase = Phase.IDLE
        self._address = self._owner = ""
        self._begins = False
        """Whether a request is whole enough to begin, and its owner's turn has not come."""
        self._refused: tuple[int, str, str] | None = None
        """Status, reason and code of the error that ends the connection, if what it sent is wrong."""
        self._pause: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # Events

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        self._address = self._owner = self.client[0] if self.client else ""
        self._follow()
        if len(self.connections) > self._options.connections_max:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        started_s = time.thread_time()
        self._read(data)
        if wait_s := self._pace.spend(self._owner, time.thread_time() - started_s):
            self.transport.pause_reading()
            if self._pause is None:
                self._pause = self.loop.call_later(wait_s, self._read_on)

    def _read_on(self) -> None:
        self._pause = None
        if not (self.flow.read_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def _read(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._head_bytes += len(data)  # until something is complete
        rest = data
        try:
            while rest:
                rest = self._parse(rest)
        except httptools.HttpParserError:
            self._end(*(self._refused or (400, "sent something that is not HTTP", "invalid_http")))
        if self._coming is Phase.HEADERS and self._head_bytes > HEAD_BYTES_MAX:
            self._end(431, f"sent more than {HEAD_BYTES_MAX:,} bytes of headers", "headers_too_large")
        self._follow()

    def _parse(self, data: bytes) -> bytes:
        """Parses what was received. Returns what is to be parsed next: if a request asks for another
        protocol, such as HTTP/2, the parser stops after the headers; it gets them again without that."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            if method == b"CONNECT":
                self._end(400, "is not for other hosts", "no_proxy")
                return b""
            head = [method + b" " + self.url + b" HTTP/" + version]
            head += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            return b"\r\n".join([*head, b"", data[upgrade.args[0] :]])
        return b""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._coming = Phase.HEADERS

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > HEADERS_MAX:
            self._refuse(431, f"sent more than {HEADERS_MAX} headers", "headers_too_large")

    def _refuse(self, *why: Any) -> None:
        """Ends the connection from within the parser, which stops at an exception."""
        self._refused = why
        raise ValueError

    def on_headers_complete(self) -> None:
        if len(self._cycles) >= EARLY_MAX:
            self._refuse(400, f"sent more than {EARLY_MAX} requests without an answer", "too_many_requests")
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        self._coming, self._head_bytes = Phase.BODY, 0

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        owner = self._owner = self._owners.find(Headers(raw=[*cycle.scope["headers"]]), self._address)
        start = super()._start_asgi_task
        self._begins = True

        def begin() -> bool:
            self._begins = False
            if cycle.disconnected:
                return False
            start(cycle, self._pace.counting(owner, app))
            return True

        self._pace.begin(owner, begin)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._coming, self._head_bytes = None, 0

    def on_response_complete(self) -> None:
        self._cycles.popleft()
        super().on_response_complete()
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._write_timer, self._pause):
            if timer is not None:
                timer.cancel()
        self._waiting.pop(self, None)
        self._disconnect()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def shutdown(self) -> None:
        """The server ends. Requests that have not begun are refused. A client of an idle TLS connection may
        take long to close it."""
        idle = self._phase is Phase.IDLE
        self.pipeline.clear()
        if self._cycles:
            self._cycles[0].keep_alive = False
        if self._begins or self._phase is Phase.BODY:
            self._end(503, "had a request that was not begun when the server shut down", "aborted")
        super().shutdown()
        if idle and self.transport.get_extra_info("ssl_object") is not None:
            self.transport.abort()

    # Time-outs

    def _follow(self) -> None:
        """Restarts the timer when the phase changes."""
        phase = self._phase_now()
        if phase is self._phase or self.transport.is_closing():
            return
        self._phase = phase
        self._waiting.pop(self, None)
        if phase is not Phase.ANSWER:
            self._waiting[self] = None
        if self._timer is not None:
            self._timer.cancel()
        limits = {Phase.HEADERS: self._options.headers_s, Phase.BODY: self._options.body_s}
        if limit_s := limits.get(phase):  # uvicorn closes idle connections
            why = f"sent no whole {phase.value} within {limit_s:g} s"
            self._timer = self.loop.call_later(limit_s, self._end, 408, why, "request_timeout")

    def _phase_now(self) -> Phase:
        if self._cycles:
            return Phase.BODY if self._cycles[0].more_body else Phase.ANSWER
        if self._coming is not None:
            return self._coming
        return Phase.HEADERS if self.cycle is None else Phase.IDLE

    def _make_room(self) -> None:
        """Closes the connection that has waited longest for its client; if none waits, this one."""
        most = self._options.connections_max
        oldest = next(iter(self._waiting))  # this one waits, too
        if oldest is not self:
            oldest._end(408, f"was idle longest when more than {most:,} were open", "too_many_connections")
        else:
            self._end(503, f"came when {most:,} were busy", "too_many_connections")

    def _watch_reader(self, left: int) -> None:
        self._write_timer = self.loop.call_later(self._options.write_s, self._unread, left)

    def _unread(self, before: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._watch_reader(left)
        else:
            self._ended.add(f"read nothing for {self._options.write_s:g} s", self.loop.time())
            self.transport.abort()

    def _end(self, status: int, why: str, code: str) -> None:
        """Closes the connection. If a request has no answer yet, the answer says why."""
        if self.transport.is_closing():
            return
        self._waiting.pop(self, None)
        self._ended.add(why, self.loop.time())
        asked = self._cycles or self._coming is Phase.HEADERS or status == 503
        if asked and not (self._cycles and self._cycles[0].response_started):
            body = json.dumps(ApiError(status, f"this connection {why}", code=code).body()).encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self._disconnect()
        self.transport.close()

    def _disconnect(self) -> None:
        """Tells every open request that its client is gone. (uvicorn tells the last one only.)"""
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
