"""A server's host pages, offered to readers: an address, and a thread for each reader.

    listener ── accept ──► Reader: its thread asks the engine's thread, and sends host pages (`peers.reader`)

No thread here touches the tree. A reader that died or stopped holds its pages for the time of its lease, and
nothing else.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from tiercel.cache import HostCache, TieredCache
from tiercel.config import parse_address
from tiercel.errors import ConfigError, StoreError
from tiercel.memory.buffers import HostMemory
from tiercel.peers.questions import Questions
from tiercel.peers.reader import Ask, Offer, Reader
from tiercel.peers.records import Records
from tiercel.storage.peer.link import Link

log = logging.getLogger(__name__)

READERS_MOST = 256
"""The most connections. A server that reads has a few."""
MOONCAKE_S = 5.0
"""The time-outs of our side, which only sends."""
Withdraw = Callable[[], None]
PAUSE_S = 0.1
"""The pause when the process has no files left: others may be closed meanwhile."""


class Offering:
    """The host pages of one cache on one address. It is closed before the cache."""

    def __init__(
        self,
        cache: TieredCache | HostCache,
        ask: Ask,
        listener: socket.socket,
        *,
        key: str = "",
        mooncake: str | None = None,
    ) -> None:
        """`mooncake`: offer the pages through Mooncake too, with this protocol: tcp, rdma, rdma:mlx5_0."""
        if cache.host is None:
            raise ConfigError("share_pages", None, "there are none: the host tier is off (--host-memory)")
        self.questions = Questions(cache.leases)
        transports: dict[str, Any] = {"tcp": {}}
        self._withdraw: Withdraw | None = None
        if mooncake is not None:
            self._withdraw, transports["mooncake"] = _start_mooncake(cache.host, listener, mooncake)
        records = Records(cache.host, cache.spec)
        self._offer = Offer(self.questions, ask, records, cache.leases.forms, key, transports)
        self._listener = listener
        self._readers: dict[Reader, threading.Thread] = {}
        self._lock = threading.Lock()
        self._pause = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="tiercel-share", daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, int]:
        return {"readers": len(self._readers), **self._offer.counters}

    def close(self) -> None:
        """End all connections. When it returns, no thread of them reads a host page."""
        self._pause.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        with self._lock:
            readers = dict(self._readers)
        for reader in readers:
            reader.link.close()
        for thread in readers.values():
            thread.join()
        if self._withdraw is not None:
            self._withdraw()

    def _accept(self) -> None:
        while not self._pause.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._pause.wait(PAUSE_S):
                    log.warning("a reader could not be accepted: %s", error)
                continue
            with self._lock:
                if len(self._readers) >= READERS_MOST:
                    self._offer.counters["readers_refused"] += 1
                    connection.close()
                    continue
                reader = Reader(self._offer, Link(connection))
                name = "tiercel-share-reader"
                thread = threading.Thread(target=self._serve, args=(reader,), name=name, daemon=True)
                self._readers[reader] = thread
            thread.start()

    def _serve(self, reader: Reader) -> None:
        try:
            reader.run()
        except StoreError as error:
            log.debug("a reader of our pages is gone: %s", error)
        except Exception:  # noqa: BLE001 - a bug in one connection ends that connection
            log.exception("a reader of our pages could not be answered")
            self._offer.counters["errors"] += 1
        finally:
            reader.close()
            with self._lock:
                self._readers.pop(reader, None)


def _start_mooncake(host: HostMemory, listener: socket.socket, how: str) -> tuple[Withdraw, dict[str, Any]]:
    """Register our host memory with Mooncake. Returns how to end that, and what readers must know."""
    from tiercel.storage.peer.mooncake import engine_of  # its library is large

    protocol, _, devices = how.partition(":")
    name = str(listener.getsockname()[0])
    if name in ("0.0.0.0", "::"):
        raise ConfigError("share_pages", name, "with Mooncake it must be an address that readers can use")
    engine = engine_of(name, protocol, devices, MOONCAKE_S)
    try:
        memory = engine.register(host.mapped)
    except StoreError as error:
        raise ConfigError("share_mooncake", how, str(error)) from error
    fields = {"session": f"{name}:{engine.port}", "base": memory.start}
    return partial(engine.unregister, memory), fields


def where(listener: socket.socket) -> str:
    """The address of a listener, as `host:port`."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_listener(address: str) -> socket.socket:
    """Listen on `host:port`."""
    host, port = parse_address("share_pages", address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(READERS_MOST)
    except OSError as error:
        listener.close()
        raise ConfigError("share_pages", address, f"can not listen there: {error}") from error
    return listener
