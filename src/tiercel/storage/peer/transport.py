"""How the bytes of records come from a peer's host memory into ours.

    tcp         the peer sends them on the connection of the question, straight from its host memory
    mooncake    we read them with Mooncake's Transfer Engine, one-sided, from memory that the peer registered;
                TCP, or RDMA where there is such a network

A transport moves bytes and nothing else. The caller verifies what was read (I9).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from tiercel.errors import StoreError
from tiercel.storage.peer.link import Link
from tiercel.storage.peer.wire import End, Entry, Message, Read, parse_bytes

TRANSPORTS = ("tcp", "mooncake")


class Wanted(NamedTuple):
    """One record of a lease, and the memory for its payload."""

    entry: Entry
    parts: Sequence[memoryview]


class Transport(ABC):
    """Reads records that a lease holds. One for each store; any number of threads may read."""

    places: bool
    """Whether the transport must know where the bytes are."""

    def register(self, memory: memoryview) -> None:  # noqa: B027 - tcp needs nothing
        """Most bytes will be read into this memory."""

    @abstractmethod
    def read(self, link: Link, offer: Any, lease: int, wanted: Sequence[Wanted]) -> End:
        """Fill all parts; then the lease has ended. `offer`: what the peer said of this transport."""

    def close(self) -> None:  # noqa: B027
        """Called when no read is under way any more."""


class TcpTransport(Transport):
    places = False

    def read(self, link: Link, offer: Any, lease: int, wanted: Sequence[Wanted]) -> End:  # noqa: ARG002
        link.send(Message.READ, Read(lease, [each.entry.number for each in wanted]).pack())
        kind, body = link.receive()
        if kind is Message.BYTES:
            size = sum(each.entry.payload_bytes for each in wanted)
            if parse_bytes(body) != size:
                raise StoreError(f"it sends {parse_bytes(body):,} B of records that have {size:,}")
            link.receive_into([part for each in wanted for part in each.parts])
            kind, body = link.receive()
        if kind is not Message.END:
            raise StoreError(f"it answered a read with {kind.name}")
        return End.parse(body)
