"""KV events over ZMQ: they tell routers what is cached here (docs/events.md).

    engine's thread                            publisher's thread
    events ──► Ledger ──► encoded ──► queue ──► XPUB ──► every subscriber
               merged     numbered       └────► kept ◄── ROUTER ◄── subscribers that missed batches

A page without its second part on the device (a sparse one) stays told there, since its first part is there,
and on the host, where all of it is.

The format is that of vLLM and SGLang, so their routers can read it. An XPUB socket is a PUB socket that tells
who subscribes.
"""

from __future__ import annotations

import logging
import socket as sockets
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from tiercel.errors import ConfigError
from tiercel.tree.node import Cleared, Event
from tiercel.types import Kind, Tier

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU_PINNED", Tier.STORE: "DISK"}
"""SGLang's words, which every version of Dynamo reads. Dynamo takes an unknown word for the GPU."""

HASHES_MOST = 1024
"""Limit for one event. SGLang's router refuses more than 65,536, and messages should be short."""

QUEUE_BATCHES = 10_000
"""Limit between the two threads, and for each subscriber. A batch is a step, so this is minutes of them."""

LINGER_MS = 500
"""How long sending the last batches may take when the publisher is closed."""

RANK = 0
"""Data-parallel rank. It is always written, because older routers need it."""

CONNECT = "connect:"
"""Put before an endpoint: the other side listens there. Without it the address is one of this machine."""

EVERYWHERE = ("*", "0.0.0.0", "::")  # noqa: S104 (they are recognized here, not listened on)

END = b"\xff" * 8
"""Sent instead of a number at the end of a replay."""


class BlockStored(NamedTuple):
    """Pages that became readable in a medium, each the parent of the next. The fields are the wire's."""

    tag: Literal["BlockStored"]
    block_hashes: list[int]
    parent_block_hash: int | None
    """The hash of the page before the first one; None: the first page begins a text."""
    token_ids: list[int]
    """Tokens of all pages; empty: they are not known."""
    block_size: int
    lora_id: None
    medium: str
    lora_name: None


class BlockRemoved(NamedTuple):
    """Pages that are no longer in a medium."""

    tag: Literal["BlockRemoved"]
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(NamedTuple):
    """Nothing is cached any more, in any medium."""

    tag: Literal["AllBlocksCleared"]


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


def hash_of(key: bytes) -> int:
    """A page's name on the wire: the first 8 bytes of its key, as a signed number.

    Signed, because SGLang's router reads nothing else. `tiercel store ls` shows the same first bytes.
    """
    return int.from_bytes(key[:8], "big", signed=True)


class Ledger:
    """What subscribers were told, by tier, and what they must be told next. It sends nothing."""

    def __init__(self, page_tokens: int) -> None:
        assert page_tokens >= 1
        self._page_tokens = page_tokens
        self._tokens = struct.Struct(f"<{page_tokens}I")
        self.held: dict[Tier, dict[int, None]] = {tier: {} for tier in Tier}
        """Hashes in order of arrival: parents before children."""

    def tell(self, events: Sequence[Event | Cleared]) -> list[WireEvent]:
        """Events for the wire, in the same order. But a page is added to the event of its parent, if no other
        event of the tier came between. Tails are left out: a router counts whole pages."""
        wire: list[WireEvent] = []
        chains: dict[Tier, BlockStored] = {}
        for event in events:
            if isinstance(event, Cleared):
                chains.pop(event.tier, None)
                self._clear(event.tier, wire)
            elif event.kind is not Kind.PAGE:
                continue
            elif event.stored:
                chains[event.tier] = self._store(event, wire, chains.get(event.tier))
            else:
                chains.pop(event.tier, None)
                self._remove(event, wire)
        return wire

    def _store(self, event: Event, wire: list[WireEvent], chain: BlockStored | None) -> BlockStored:
        page = hash_of(event.key)
        parent = hash_of(event.parent) if event.parent else None
        tokens = self._tokens.unpack(event.tokens) if event.tokens else ()
        self.held[event.tier][page] = None
        follows = chain is not None and chain.block_hashes[-1] == parent
        if (
            chain
            and follows
            and len(chain.block_hashes) < HASHES_MOST
            and bool(chain.token_ids) == bool(tokens)
        ):
            chain.block_hashes.append(page)
            chain.token_ids.extend(tokens)
            return chain
        medium, size = MEDIA[event.tier], self._page_tokens
        chain = BlockStored("BlockStored", [page], parent, list(tokens), size, None, medium, None)
        wire.append(chain)
        return chain

    def _remove(self, event: Event, wire: list[WireEvent]) -> None:
        """Remove only pages that subscribers know: some routers stop at an unknown page."""
        page = hash_of(event.key)
        if page not in self.held[event.tier]:
            return
        del self.held[event.tier][page]
        medium = MEDIA[event.tier]
        last = wire[-1] if wire else None
        if isinstance(last, BlockRemoved) and last.medium == medium and len(last.block_hashes) < HASHES_MOST:
            last.block_hashes.append(page)
        else:
            wire.append(BlockRemoved("BlockRemoved", [page], medium))

    def _clear(self, tier: Tier, wire: list[WireEvent]) -> None:
        """A clear has no medium on the wire, and some routers do not read it. So every page is removed by
        name, too, children before parents."""
        pages = list(reversed(self.held[tier]))
        self.held[tier] = {}
        for at in range(0, len(pages), HASHES_MOST):
            wire.append(BlockRemoved("BlockRemoved", pages[at : at + HASHES_MOST], MEDIA[tier]))
        if not any(self.held.values()) and not (wire and isinstance(wire[-1], AllBlocksCleared)):
            wire.append(AllBlocksCleared("AllBlocksCleared"))


@dataclass(frozen=True)
class EventStats:
    """Batches of a publisher, and the number of its subscribers."""

    subscribers: int
    """Subscriptions that are open now."""
    batches: int
    """Batches sent to at least one subscriber."""
    unheard: int
    """Batches sent without a subscriber. A later one can ask for them (`replay_endpoint`)."""
    dropped: int
    """Batches that found the queue full, or the publisher closed."""
    errors: int


class EventPublisher:
    """Publishes the events of a tree. Only the engine's thread calls it; the call never blocks or raises.

    It listens at `endpoint`, an address of this machine. With `connect:` before it, the other side listens
    there, and the publisher connects to it.

    A batch is `dropped` if the queue is full, and counted in `errors` if it can not be encoded. Its number is
    used up either way, so that a subscriber sees the gap. Events after `close` are dropped.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        page_tokens: int,
        topic: str = "",
        replay_endpoint: str | None = None,
        replay_batches: int = 10_000,
    ) -> None:
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise ConfigError("kv_events", endpoint, "needs pip install pyzmq msgspec") from error
        self._zmq = zmq
        self._encode = msgspec.msgpack.Encoder().encode
        self._ledger = Ledger(page_tokens)
        self._topic = topic.encode()
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=replay_batches if replay_endpoint else 0)
        self._lock = threading.Lock()
        self.queued = self.sent = self.unheard = self.dropped = self.errors = 0
        self._subscriptions: Counter[bytes] = Counter()
        """For each beginning of topics, how many subscribers want it."""

        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._pub = self._socket(zmq.XPUB, QUEUE_BATCHES)
            self._pub.setsockopt(zmq.XPUB_VERBOSER, 1)  # reports every subscription, not only the first
            self.connects = endpoint.startswith(CONNECT)
            self.endpoint = (_connect if self.connects else _bind)(self._pub, "kv_events", endpoint)
            """The real address: with the port that the system chose, if it chose one."""
            self._replay: zmq.Socket[bytes] | None = None
            self.replay_endpoint: str | None = None
            if replay_endpoint:
                # A ROUTER drops messages if its queue is full. It learns late what the peer has read: up to
                # half of the queue may be read and still counted. With room for two replays nothing is lost.
                self._replay = self._socket(zmq.ROUTER, 2 * (replay_batches + 1))
                self.replay_endpoint = _bind(self._replay, "kv_events_replay", replay_endpoint)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._outbox = self._socket(zmq.PULL, 1)
        self._outbox.bind("inproc://batches")
        self._queue = self._socket(zmq.PUSH, QUEUE_BATCHES)
        self._queue.connect("inproc://batches")
        self._thread = threading.Thread(target=self._run, name="tiercel-events", daemon=True)
        self._thread.start()

    def _socket(self, kind: int, high_water: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(high_water)
        return socket

    # The engine's thread

    def __call__(self, events: Sequence[Event | Cleared]) -> None:
        """Publishes one batch of what one step changed; none if nothing changed."""
        try:
            wire = self._ledger.tell(events)
            if wire and self._queue.closed:
                self.dropped += 1
            elif wire:
                number, self._number = self._number, self._number + 1
                payload = self._encode((time.time(), wire, RANK))
                self._queue.send_multipart((number.to_bytes(8, "big"), payload), self._zmq.NOBLOCK)
                self.queued += 1
        except self._zmq.Again:
            self.dropped += 1
        except Exception:  # noqa: BLE001 - an observer does not end what it observes (I13)
            self._number += 1
            self._failed()

    def stats(self) -> EventStats:
        there = self._subscriptions.total()
        return EventStats(there, self.sent, self.unheard, self.dropped, self.errors)

    def close(self) -> None:
        """Sends the last batches, for `LINGER_MS` at most, and closes the sockets."""
        if self._queue.closed:
            return
        self._queue.send(b"")
        self._thread.join()
        self._context.destroy(linger=LINGER_MS)

    # The publisher's thread

    def _run(self) -> None:
        poller = self._zmq.Poller()
        for socket in (self._outbox, self._pub, self._replay):
            if socket is not None:
                poller.register(socket, self._zmq.POLLIN)
        going = True
        while going:
            try:
                ready = dict(poller.poll())
                if self._pub in ready:
                    self._subscribed()
                if self._replay is not None and self._replay in ready:
                    self._answer(self._replay)
                if self._outbox in ready:
                    going = self._send()
            except Exception:  # noqa: BLE001 - a worker does not end (I13)
                self._failed()

    def _send(self) -> bool:
        """Sends one batch. False: the publisher is closed."""
        number, *payload = self._outbox.recv_multipart()
        if not payload:
            return False
        self._kept.append((int.from_bytes(number, "big"), payload[0]))
        self._subscribed()
        self._pub.send_multipart((self._topic, number, payload[0]), self._zmq.NOBLOCK)
        if any(self._topic.startswith(prefix) for prefix in self._subscriptions):
            self.sent += 1
        else:
            self.unheard += 1
        return True

    def _subscribed(self) -> None:
        """Take in new subscriptions, and those that ended."""
        with suppress(self._zmq.Again):
            while True:
                message = self._pub.recv(self._zmq.NOBLOCK)
                if message[:1] not in (b"\x00", b"\x01"):
                    continue  # other messages of a subscriber are ignored
                self._subscriptions[message[1:]] += 1 if message[0] else -1
                self._subscriptions = +self._subscriptions

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Sends all kept batches from a number on, then the end. A REQ socket's envelope is sent back."""
        asker, *envelope, first = replay.recv_multipart()
        if envelope not in ([], [b""]) or len(first) != 8:
            raise ValueError("a replay is asked for with a number of 8 bytes")
        for number, payload in self._kept:
            if number >= int.from_bytes(first, "big"):
                replay.send_multipart(
                    (asker, *envelope, number.to_bytes(8, "big"), payload), self._zmq.NOBLOCK
                )
        replay.send_multipart((asker, *envelope, END, b""), self._zmq.NOBLOCK)

    def _failed(self) -> None:
        with self._lock:
            self.errors += 1
            first = self.errors == 1
        if first:
            log.exception("KV events: a batch was not sent; later errors are only counted")


def _bind(socket: zmq.Socket[bytes], field: str, endpoint: str) -> str:
    """Listens at an address of this machine; returns the address, with its real port."""
    import zmq

    bound = endpoint
    if endpoint.startswith("tcp://"):
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        bound = f"tcp://{_address_here(field, endpoint, host)}:{port}"
    socket.setsockopt(zmq.IPV6, int("[" in bound))
    try:
        socket.bind(bound)
    except zmq.ZMQError as error:
        raise ConfigError(field, endpoint, str(error)) from error
    return str(socket.get_string(zmq.LAST_ENDPOINT))


def _connect(socket: zmq.Socket[bytes], field: str, endpoint: str) -> str:
    """Connects to a collector that listens, now or later."""
    import zmq

    to = endpoint.removeprefix(CONNECT)
    socket.setsockopt(zmq.IPV6, int("[" in to))
    try:
        socket.connect(to)
    except zmq.ZMQError as error:
        raise ConfigError(field, endpoint, str(error)) from error
    return to


def _address_here(field: str, endpoint: str, host: str) -> str:
    """A host as an address of this machine that can be bound. Raises if it is none: connecting instead would
    send events nowhere, without an error."""
    name = host.strip("[]")
    if not name or name in EVERYWHERE or name in (each for _, each in sockets.if_nameindex()):
        return host
    try:
        found = sockets.getaddrinfo(name, 0, type=sockets.SOCK_DGRAM, flags=sockets.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(field, endpoint, f"{name}: {error.strerror or error}") from error
    for family, kind, _, _, address in sorted(found, key=lambda each: each[0] == sockets.AF_INET6):
        with suppress(OSError), sockets.socket(family, kind) as probe:
            probe.bind(address)  # only addresses of this machine can be bound
            return f"[{address[0]}]" if family == sockets.AF_INET6 else str(address[0])
    why = f"{name} is no address of this machine; if a collector listens there, write {CONNECT}{endpoint}"
    raise ConfigError(field, endpoint, why)
