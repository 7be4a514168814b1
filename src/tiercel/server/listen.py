"""Connections: how many may be open, how long a client may take, and how they are closed.

    connected ── headers_s ──► request ── body_s ──► whole request ──► answer ── idle_s ──► next request …
                                                                        └── write_s without a reader

If too many connections are open, the one that has waited longest for its client is closed: idle and half-sent
requests never block new clients. At shutdown, running answers have `shutdown_s` to finish; then the service
aborts them, and each answer ends with an error.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
import socket
import ssl
import threading
from collections import Counter
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from tiercel.errors import ConfigError
from tiercel.server.app import create_app
from tiercel.server.errors import ApiError
from tiercel.server.options import ServerOptions
from tiercel.server.traces import Traces

if TYPE_CHECKING:
    from tiercel.engine.service import EngineService


log = logging.getLogger("tiercel.server")

LOG_EVERY_S = 60.0
"""One log line counts all connections closed since the line before."""

FILES_BESIDE = 256
"""Open files besides connections: weights, stores, libraries."""

FAREWELL_S = 5.0
"""For sending the rest of the answers after they were aborted."""


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


class Connection(H11Protocol):
    """One HTTP/1.1 connection with time-outs."""

    def __init__(self, *given: Any, options: ServerOptions, ended: EndedCount, **named: Any) -> None:
        super().__init__(*given, **named)
        self._options = options
        self._ended = ended
        self._phase = Phase.IDLE
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # Events

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._follow()
        if len(self.connections) > self._options.connections_max:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def shutdown(self) -> None:
        """The server ends. A client of an idle TLS connection may not say goodbye for a long time."""
        idle = self._phase is Phase.IDLE
        super().shutdown()
        if idle and self.transport.get_extra_info("ssl_object") is not None:
            self.transport.abort()

    # Time-outs

    def _follow(self) -> None:
        """Restarts the timer when the phase changes."""
        phase = self._phase_now()
        if phase is self._phase or self.transport.is_closing():
            return
        self._phase, self._since_s = phase, self.loop.time()
        if self._timer is not None:
            self._timer.cancel()
        limits = {Phase.HEADERS: self._options.headers_s, Phase.BODY: self._options.body_s}
        if limit_s := limits.get(phase):  # uvicorn closes idle connections
            why = f"sent no whole {phase.value} within {limit_s:g} s"
            self._timer = self.loop.call_later(limit_s, self._end, 408, why, "request_timeout")

    def _phase_now(self) -> Phase:
        if self.conn.their_state is h11.SEND_BODY:
            return Phase.BODY
        if self.cycle is not None and not self.cycle.response_complete:
            return Phase.ANSWER
        begun = self.cycle is None or self.conn.trailing_data[0]
        return Phase.HEADERS if begun else Phase.IDLE

    def _make_room(self) -> None:
        """Closes the connection that has waited longest for its client; if none waits, this one."""
        others = [each for each in self.connections if isinstance(each, Connection) and each is not self]
        waiting = [each for each in others if each._phase is not Phase.ANSWER]
        most = self._options.connections_max
        if waiting:
            oldest = min(waiting, key=lambda each: each._since_s)
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
        self._ended.add(why, self.loop.time())
        asked = self.cycle is not None or self.conn.trailing_data[0] or status == 503
        if asked and self._phase is not Phase.IDLE and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(ApiError(status, f"this connection {why}", code=code).body()).encode()
            headers = {"content-type": "application/json", "connection": "close"}
            headers["content-length"] = str(len(body))
            head = h11.Response(status_code=status, headers=[*headers.items()], reason=STATUS_PHRASES[status])
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


class Server(uvicorn.Server):
    """Serves until it is told to stop. The caller closes the service."""

    def __init__(
        self, service: EngineService, options: ServerOptions, traces: Traces | None = None, **more: Any
    ) -> None:
        options = _with_files(options)
        connection = partial(Connection, options=options, ended=EndedCount())
        app = create_app(service, options, traces)
        config = uvicorn.Config(
            app,
            http=connection,  # type: ignore[arg-type]
            log_level="warning",
            access_log=False,
            timeout_keep_alive=options.idle_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=options.shutdown_s + FAREWELL_S,  # type: ignore[arg-type]
            host=options.host,
            port=options.port,
            ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
            **{"log_config": None} | more,
        )
        super().__init__(config)
        self._options = options
        self._service = service
        self._feed = app.state.feed
        self._shutdown_s = options.shutdown_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if threading.current_thread() is threading.main_thread():  # signals are for the main thread only
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.read_again)

    def read_again(self) -> None:
        """Read the files of keys and certificates again. New connections get the new certificate; what can
        not be used is logged, and stays as it was."""
        tenants, tls = self._options.tenants, self.config.ssl
        if tenants is not None and tenants.read_again():
            self._service.limit_tenants(tenants.cache_limits)
        if tls is not None and self._options.tls_cert is not None:
            try:
                check_certificate(self._options)
                tls.load_cert_chain(self._options.tls_cert, self._options.tls_key)
            except ConfigError as error:
                log.error("the certificate stays as it was: %s", error)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets answers finish for `shutdown_s`, then has the service abort them; closes all connections."""
        self._feed.close()
        ending = asyncio.get_running_loop().call_later(self._shutdown_s, self._service.abort_all)
        await super().shutdown(sockets)
        ending.cancel()


def check_certificate(options: ServerOptions) -> None:
    """Raises `ConfigError` if the files of the certificate can not be used."""
    if options.tls_cert is not None:
        try:
            ssl.create_default_context().load_cert_chain(options.tls_cert, options.tls_key)
        except OSError as error:
            why = f"can not be used with {options.tls_key}: {error}"
            raise ConfigError("tls_cert", options.tls_cert, why) from error


def _with_files(options: ServerOptions) -> ServerOptions:
    """Raises the limit of open files, or lowers `connections_max`: every connection is an open file."""
    wanted = options.connections_max + FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            options = replace(options, connections_max=max(1, soft - FILES_BESIDE))
            most = options.connections_max
            log.warning("%s connections at most: this process may open %s files", most, soft)
    return options
