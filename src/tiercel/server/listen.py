"""The server: its listeners and connections, from the start to the shutdown.

At shutdown, running answers have `shutdown_s` to finish; then the service aborts them, and each answer ends
with an error. Requests that have not begun are refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import ssl
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn

from tiercel.asks.service import Service
from tiercel.errors import ConfigError
from tiercel.server.app import create_app
from tiercel.server.http.connection import Connection, EndedCount
from tiercel.server.http.keys import Owners
from tiercel.server.http.pace import Door, Pace
from tiercel.server.http.traces import Traces
from tiercel.server.options import ServerOptions

log = logging.getLogger("tiercel.server")

FILES_BESIDE = 256
"""Open files besides connections: weights, stores, libraries."""

HELD = 2
"""How many connections may wait at the door, for each that may be open."""

FAREWELL_S = 5.0
"""Time to send the rest of the answers after they were aborted."""

CANCELLED_S = 1.0
"""Time for requests that did not end by then, such as one whose grammar is still tried: they are cancelled,
and get a 503."""


class Server(uvicorn.Server):
    """Serves until it is told to stop. The caller closes the service."""

    def __init__(
        self, service: Service, options: ServerOptions, traces: Traces | None = None, **more: Any
    ) -> None:
        options = _with_files(options)
        pace = Pace()
        shared = {"ended": EndedCount(), "waiting": {}, "pace": pace, "owners": Owners(options)}
        connection = partial(Connection, options=options, **shared)  # type: ignore[arg-type]
        app = create_app(service, options, traces, pace)
        config = uvicorn.Config(
            app,
            http=connection,  # type: ignore[arg-type]
            ws="none",
            loop="asyncio",  # also where uvloop is installed, whose connections read more at once
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
        bound = [each for server in self.servers for each in server.sockets]
        listeners = [socket.socket(fileno=os.dup(each.fileno())) for each in bound]
        for server in self.servers:
            server.close()
        protocol: Any = self.config.http_protocol_class
        known = {"server_state": self.server_state, "app_state": self.lifespan.state}
        protocol = partial(protocol, config=self.config, **known)
        held_max = HELD * self._options.connections_max
        self._watching = asyncio.create_task(self._feed.watch())
        self.servers = [Door(listeners, protocol, self.config.ssl, held_max)]  # type: ignore[list-item]
        if threading.current_thread() is threading.main_thread():  # signals are for the main thread only
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.read_again)

    def read_again(self) -> None:
        """Read the files of keys and certificates again. New connections get the new certificate. A file that
        can not be used is logged and has no effect."""
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
        if unanswered := self.server_state.tasks:  # uvicorn has cancelled them; each tells its client
            await asyncio.wait(unanswered, timeout=CANCELLED_S)
        for connection in [*self.server_state.connections]:
            connection.transport.abort()
        await asyncio.sleep(0)  # until they are closed


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
    wanted = options.connections_max * (1 + HELD) + FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            options = replace(options, connections_max=max(1, (soft - FILES_BESIDE) // (1 + HELD)))
            most = options.connections_max
            log.warning("%s connections at most: this process may open %s files", most, soft)
    return options
