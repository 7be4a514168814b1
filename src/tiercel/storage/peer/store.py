"""Another server's host pages as a store: this side pulls, and no other side ever writes into its memory.

    contains    one question for all keys
    get         find: hold what is there ─► read its bytes into the parts ─► the lease ends; it must have held
    watch       the same question, with a time to wait: what is being computed is told as it comes

The peer need not be there when the store is opened, and may come, go and come back: connections are opened
when they are needed, and a connection that broke since its last use is opened again once. A peer that does
not answer, or sends too slowly, is given up after `timeout_s`: a `StoreError`, and the next call tries again.

What is read is not trusted: its reader verifies every record. The worst a peer can do is be slow. A read of
Mooncake can not be ended from here: while one takes too long, the peer is asked nothing more.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from tiercel.errors import ConfigError, StoreError
from tiercel.storage.base import Get, Put, Store
from tiercel.storage.peer.link import Link, LinkLost
from tiercel.storage.peer.transport import TRANSPORTS, TcpTransport, Transport, Wanted
from tiercel.storage.peer.wire import (
    GREETING_MOST,
    KEYS_MOST,
    NONCE_BYTES,
    Find,
    Found,
    Hello,
    Message,
    Readiness,
    Welcome,
    pack_bytes,
    proof,
)
from tiercel.storage.record import RecordKey, form_of

log = logging.getLogger(__name__)

KEY_VARIABLE = "TIERCEL_SHARE_KEY"
LEAST_BYTES_S = 8 << 20
"""A read may take `timeout_s`, and as long as its bytes take at this rate. Slower is not worth waiting."""

T = TypeVar("T")


class News(NamedTuple):
    """What `watch` heard. Often nothing: then the peer only shows that it is alive."""

    here: list[RecordKey]
    absent: list[RecordKey]
    """These do not come: they are not computed any more, or the wait is over."""


COUNTED = ("reads", "bytes_read", "failures", "other_form", "connections", "restarts")
"""Each is there from the start, as 0."""


@contextmanager
def _failures_counted(counters: Counter[str], lock: Lock) -> Iterator[None]:
    try:
        yield
    except StoreError:
        with lock:
            counters["failures"] += 1
        raise


class PeerStore(Store):
    """The records of a server that was started with `--share-pages host:port`. It can not be written to."""

    writes = False

    def __init__(  # noqa: PLR0913 - each is an option of the URL
        self,
        address: str,
        *,
        key: str = "",
        transport: str = "tcp",
        protocol: str = "tcp",
        device: str = "",
        timeout_s: float = 5.0,
        hold_s: float = 30.0,
    ) -> None:
        """`key`: the one that the server was started with; by default the environment variable
        TIERCEL_SHARE_KEY. `protocol` and `device`: for Mooncake. `hold_s`: a read that takes longer fails,
        since the peer holds its pages no longer."""
        if transport not in TRANSPORTS:
            raise ConfigError("transport", transport, f"must be one of {', '.join(TRANSPORTS)}")
        host, _, port = address.rpartition(":")
        self.address = address
        self._at = host.strip("[]"), int(port)
        self._key = key or os.environ.get(KEY_VARIABLE, "")
        self._name, self._protocol, self._device = transport, protocol, device
        self._timeout_s, self._hold_s = timeout_s, hold_s
        self._lock = Lock()
        self._transport: Transport | None = None
        self._memory: list[memoryview] = []
        self._idle: list[_Peer] = []
        self._open: set[_Peer] = set()
        self._reads_due_s: list[float] = []
        """When each read that is under way should have ended."""
        self._boot = b""
        self._counters = Counter(dict.fromkeys(COUNTED, 0))
        self._closed = False

    # The contract of a store

    def contains(self, keys: Sequence[RecordKey]) -> list[bool]:
        self._check_open()
        here = [False] * len(keys)
        for first in range(0, len(keys), KEYS_MOST):
            question = Find(keys[first : first + KEYS_MOST])
            for entry in self._call(partial(self._find, question)).entries:
                here[first + entry.number] = entry.readiness is Readiness.HERE
        return here

    def kept(self, keys: Sequence[RecordKey]) -> list[bool]:
        return [False] * len(keys)

    def get(self, wanted: Sequence[Get]) -> list[bool]:
        self._check_open()
        answers: list[bool] = []
        for first in range(0, len(wanted), KEYS_MOST):
            answers += self._call(partial(self._get, wanted[first : first + KEYS_MOST]))
        return answers

    def put(self, values: Sequence[Put]) -> list[bool]:
        self._check_open()
        return [False] * len(values)

    def delete(self, keys: Sequence[RecordKey]) -> int:
        self._check_open()
        if keys:
            raise StoreError("a peer's pages can only be read")
        return 0

    def clear(self) -> None:
        self._check_open()
        raise StoreError("a peer's pages can only be read")

    def keys(self) -> Iterator[tuple[RecordKey, int]]:
        self._check_open()
        raise StoreError("a peer does not list what it holds")

    def stats(self) -> dict[str, Any]:
        """As of several stores with one peer. `boot` names the last known start of the peer's process."""
        self._check_open()
        own = {"boot": self._boot.hex(), "transport": self._name}
        return {"records": None, "bytes": None, "peers": {"1": own | dict(self._counters)}}

    def register(self, memory: memoryview) -> None:
        with self._lock:
            self._memory.append(memory)
            if self._transport is not None:
                self._transport.register(memory)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            peers, transport = list(self._open), self._transport
            self._transport, self._idle = None, []
        for peer in peers:
            peer.link.close()
        if transport is not None:
            transport.close()

    # What is being computed

    def watch(self, keys: Sequence[RecordKey], wait_s: float) -> Iterator[News]:
        """Tells which of these records are on the peer's host as they come there, until all are decided or
        `wait_s` are over: a record does not come if the request that computed it has ended without it.

        What was told stays on the peer's host until the next is asked for (for `hold_s` at most), so the
        caller can `get` it in the body of its loop. Leaving the loop ends the watch on both sides. Raises
        StoreError if the peer is lost; earlier news stay true.
        """
        self._check_reads()
        with self._lock:
            peer = self._idle.pop() if self._idle else None
        if peer is not None and not peer.works():
            self._drop(peer)
            peer = None
        peer = peer or self._connect()
        question = Find(keys, self._hold_s, wait_s)
        leases, last = 0, False
        try:
            peer.link.within(self._timeout_s)
            peer.link.send(Message.FIND, question.pack())
            while leases or not last:
                kind, body = peer.link.receive()
                if kind is Message.END:
                    leases -= 1
                    continue
                found = _found(kind, body, len(keys))
                last = found.last
                here = [keys[e.number] for e in found.entries if e.readiness is Readiness.HERE]
                gone = [keys[e.number] for e in found.entries if e.readiness is Readiness.ABSENT]
                yield News(here, gone)
                peer.link.within(self._timeout_s)  # while there is no news, the peer says so
                if found.lease:
                    peer.link.send(Message.DONE, pack_bytes(found.lease))
                    leases += 1
        except BaseException:  # also when the caller leaves: then the connection ends, and the leases with it
            self._drop(peer)
            raise
        self._give_back(peer)

    # One question

    def _get(self, wanted: Sequence[Get], peer: _Peer) -> list[bool]:
        link, transport = peer.link, self._transport_to(peer)
        keys = [each.key for each in wanted]
        found = self._find(Find(keys, self._hold_s, places=transport.places, align=self.align), peer)
        reads, answers = list[Wanted](), [False] * len(wanted)
        for entry in found.entries:
            each = wanted[entry.number]
            if entry.readiness is Readiness.HERE and len(entry.header) + entry.payload_bytes == each.bytes:
                reads.append(Wanted(entry, _fill(each.parts, entry.header)))
                answers[entry.number] = True
        if not found.lease:
            return [False] * len(wanted)
        size = sum(each.entry.payload_bytes for each in reads)
        time_s = self._timeout_s + size / LEAST_BYTES_S
        link.within(time_s)
        with self._due(monotonic() + time_s):
            end = transport.read(link, peer.offer(self._name), found.lease, reads)
        if end.lease != found.lease or not end.held:
            raise StoreError("the peer no longer holds what was read: it took too long")
        with self._lock:
            self._counters["reads"] += 1
            self._counters["bytes_read"] += size
        return answers

    def _find(self, question: Find, peer: _Peer) -> Found:
        if not any(form_of(key) in peer.welcome.forms for key in question.keys):
            self._tell_form(question.keys)
            return Found([])
        peer.link.within(self._timeout_s)
        peer.link.send(Message.FIND, question.pack())
        return _found(*peer.link.receive(), len(question.keys))

    def _tell_form(self, keys: Sequence[RecordKey]) -> None:
        if keys and not self._counters["other_form"]:
            log.warning("peer %s has records of another form: other streams, layers or lengths", self.address)
        self._counters["other_form"] += 1

    # Connections

    def _call(self, do: Callable[[_Peer], T]) -> T:
        """Call `do` with a free connection; if that has broken since its last use, with another. A call that
        fails is counted."""
        with _failures_counted(self._counters, self._lock):
            while True:
                self._check_open()
                self._check_reads()
                with self._lock:
                    peer = self._idle.pop() if self._idle else None
                used = peer is not None
                peer = peer or self._connect()
                try:
                    answer = do(peer)
                except BaseException as error:
                    self._drop(peer)
                    if isinstance(error, LinkLost) and used and not self._closed:
                        continue
                    if isinstance(error, StoreError):
                        raise StoreError(f"peer {self.address}: {error}") from error
                    raise
                self._give_back(peer)
                return answer

    def _connect(self) -> _Peer:
        self._check_open()
        try:
            connection = socket.create_connection(self._at, self._timeout_s)
        except OSError as error:
            raise StoreError(f"no peer at {self.address}: {error}") from error
        own_host, link = str(connection.getsockname()[0]), Link(connection)
        try:
            link.within(self._timeout_s)
            peer = _Peer(link, own_host, *_greet(link, self._key))
            peer.offer(self._name)
        except BaseException as error:
            link.close()
            if isinstance(error, StoreError):
                raise StoreError(f"peer {self.address}: {error}") from error
            raise
        with self._lock:
            self._counters["connections"] += 1
            self._counters["restarts"] += bool(self._boot) and self._boot != peer.boot
            self._boot = peer.boot
            self._open.add(peer)
        return peer

    def _transport_to(self, peer: _Peer) -> Transport:
        with self._lock:
            self._check_open()
            if self._transport is None:
                self._transport = self._make_transport(peer.own_host)
                for memory in self._memory:
                    self._transport.register(memory)
            return self._transport

    def _make_transport(self, own_host: str) -> Transport:
        if self._name == "tcp":
            return TcpTransport()
        from tiercel.storage.peer.mooncake import MooncakeTransport  # its library is large

        return MooncakeTransport(own_host, self._protocol, self._device, self._timeout_s)

    def _give_back(self, peer: _Peer) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(peer)
                return
        self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        with self._lock:
            self._open.discard(peer)
        peer.link.close()

    @contextmanager
    def _due(self, due_s: float) -> Iterator[None]:
        with self._lock:
            self._reads_due_s.append(due_s)
        try:
            yield
        finally:
            with self._lock:
                self._reads_due_s.remove(due_s)

    def _check_reads(self) -> None:
        """Raises StoreError while a read takes too long: the next one would keep a thread and memory, too."""
        with self._lock:
            late = any(due_s < monotonic() for due_s in self._reads_due_s)
        if late:
            raise StoreError(f"peer {self.address} sends too slowly: a read of it has not ended yet")

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")


class _Peer:
    """A connection after the greeting."""

    def __init__(self, link: Link, own_host: str, boot: bytes, welcome: Welcome) -> None:
        self.link, self.own_host, self.boot, self.welcome = link, own_host, boot, welcome

    def offer(self, transport: str) -> Any:
        """What the peer said about a transport."""
        if transport not in self.welcome.transports:
            known = ", ".join(map(str, self.welcome.transports))
            raise StoreError(f"it does not offer the transport {transport}, but {known}")
        return self.welcome.transports[transport]

    def works(self) -> bool:
        """Whether nothing has arrived since the last answer, not even the end of the connection."""
        try:
            return not self.link.arrived(0)
        except LinkLost:
            return False


def _greet(link: Link, key: str) -> tuple[bytes, Welcome]:
    kind, body = link.receive(most=GREETING_MOST)
    if kind is not Message.HELLO:
        raise StoreError("it does not speak the protocol of peers")
    hello, nonce = Hello.parse(body), os.urandom(NONCE_BYTES)
    link.send(Message.PROOF, nonce + proof(key, b"reader", hello, nonce))
    kind, body = link.receive(most=GREETING_MOST)
    if kind is Message.REFUSED:
        raise StoreError(f"it refuses this reader: {body.decode(errors='replace')}")
    welcome = Welcome.parse(body)
    if kind is not Message.WELCOME or not hmac.compare_digest(
        welcome.proof, proof(key, b"server", hello, nonce)
    ):
        raise StoreError("it does not have the key")
    return hello.boot, welcome


def _found(kind: Message, body: bytes, keys: int) -> Found:
    if kind is not Message.FOUND:
        raise StoreError(f"it answered a question with {kind.name}")
    return Found.parse(body, keys)


def _fill(parts: Sequence[memoryview], header: bytes) -> list[memoryview]:
    """Copies the header to the beginning of the parts. Returns the rest of them."""
    left = list(parts)
    while header:
        size = min(len(header), len(left[0]))
        left[0][:size] = header[:size]
        header, left[0] = header[size:], left[0][size:]
        if not len(left[0]):
            left.pop(0)
    return left
