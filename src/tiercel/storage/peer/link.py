"""One connection between a reader and a server that offers its pages: messages and bytes, each within a time.

The time covers all that is done until it is set again, however often a byte arrives meanwhile. Bytes are
received by the caller's own thread: when a call has returned, or raised, nothing writes into its memory.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic

from tiercel.errors import StoreError
from tiercel.storage.peer.wire import BODY_MOST, HEAD, Message

PIECES_MOST = 1024
"""The most pieces of memory in one call of the kernel (IOV_MAX)."""


class LinkLost(StoreError):
    """The connection can not be used any more: it was closed, or the other side took too long."""


class Link:
    """A connected socket. One thread uses it at a time; any thread may `close` it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)  # the kernel watches the time: then one call receives many bytes
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._until_s = monotonic()

    def within(self, seconds: float) -> None:
        """All that follows must be done in `seconds`."""
        self._until_s = monotonic() + seconds

    def send(self, kind: Message, body: bytes = b"") -> None:
        self.send_all([memoryview(HEAD.pack(len(body), kind) + body)])

    def send_all(self, views: Sequence[memoryview]) -> None:
        """Send bytes from where they lie, without a copy."""
        left = [view for view in views if len(view)]
        while left:
            self._limit(socket.SO_SNDTIMEO)
            try:
                sent = self._socket.sendmsg(left[:PIECES_MOST])
            except OSError as error:
                raise LinkLost(_why(error)) from error
            left = _after(left, sent)

    def receive(self, *, most: int = BODY_MOST) -> tuple[Message, bytes]:
        """The next message."""
        head = bytearray(HEAD.size)
        self.receive_into([memoryview(head)])
        size, kind = HEAD.unpack(head)
        if size > most or kind not in _KINDS:
            raise LinkLost(f"a message of {size:,} B and kind {kind}")
        body = bytearray(size)
        self.receive_into([memoryview(body)])
        return Message(kind), bytes(body)

    def receive_into(self, views: Sequence[memoryview]) -> None:
        """Fill all views."""
        left = [view for view in views if len(view)]
        while left:
            self._limit(socket.SO_RCVTIMEO)
            try:
                size = self._socket.recvmsg_into(left[:PIECES_MOST], 0, socket.MSG_WAITALL)[0]
            except OSError as error:
                raise LinkLost(_why(error)) from error
            if not size:
                raise LinkLost("the connection was closed")
            left = _after(left, size)

    def wait(self, seconds: float, other: int) -> tuple[bool, bool]:
        """Wait until another file can be read, or something has arrived here. Returns which."""
        poll, own = select.poll(), self._socket.fileno()
        if own < 0:
            raise LinkLost("the connection was closed")
        poll.register(own, select.POLLIN)
        poll.register(other, select.POLLIN)
        ready = {file for file, _ in poll.poll(seconds * 1000)}
        return other in ready, own in ready

    def arrived(self, seconds: float) -> bool:
        """Whether something arrives within `seconds`: a message, or the end of the connection."""
        self._until_s = monotonic() + max(seconds, 0.001)
        self._limit(socket.SO_RCVTIMEO)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError as error:
            raise LinkLost(_why(error)) from error
        return True

    def _limit(self, option: int) -> None:
        left_s = self._until_s - monotonic()
        if left_s <= 0:
            raise LinkLost("it took too long")
        seconds, rest = divmod(max(1, int(left_s * 1e6)), 1_000_000)  # none at all would mean: for ever
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, rest))
        except OSError as error:
            raise LinkLost(_why(error)) from error

    def close(self) -> None:
        """May be called again. A thread that sends or receives meanwhile gets a `LinkLost`."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _after(views: list[memoryview], size: int) -> list[memoryview]:
    """What is left of these views behind their first `size` bytes."""
    for number, view in enumerate(views):
        if size < len(view):
            return [view[size:], *views[number + 1 :]]
        size -= len(view)
    return []


def _why(error: OSError) -> str:
    return "it took too long" if isinstance(error, BlockingIOError) else str(error)


_KINDS = frozenset(Message)
