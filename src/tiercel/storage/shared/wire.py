"""What the processes that share a folder and its owner say to each other, over a socket in the folder.

    length of the words │ number of keys │ words: a JSON object │ keys, 49 bytes each

A client sends a call and waits for its answer. The bytes of records never go this way: a client reads them
from the files and writes them there. Between the call to put and its answer the owner says where:

    put KEYS ──►    ◄── write KEYS, offset, open file ──► written …    ◄── answer

The file goes with the message, and not its name: a name may be that of another file a moment later.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tiercel.errors import StoreError
from tiercel.storage.file.folder import SOCKET
from tiercel.storage.record import KEY_BYTES, RecordKey

VERSION = 1
"""Of this protocol. An owner answers no other."""

KEYS_MOST = 1 << 16
"""The most keys of one call."""

_HEAD = struct.Struct("<II")
_WORDS_MOST = 64 << 20


class LineLost(StoreError):
    """The other process has ended, or closed its side."""


class Said(NamedTuple):
    """A call, or its answer."""

    words: dict[str, Any]
    keys: Sequence[RecordKey] = ()
    file: int = -1
    """Whoever gets it closes it."""


class Line:
    """One connection. One thread uses it at a time; any thread may `close` it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(
        self,
        words: dict[str, Any],
        keys: Sequence[RecordKey] = (),
        file: int = -1,
        wait_s: float | None = None,
    ) -> None:
        """`wait_s`: how long the other side may take to make room for the message. None: for ever."""
        body = json.dumps(words, separators=(",", ":")).encode()
        data = _HEAD.pack(len(body), len(keys)) + body + b"".join(keys)
        try:
            self._socket.settimeout(wait_s)
            sent = socket.send_fds(self._socket, [data], [file]) if file >= 0 else 0
            self._socket.sendall(data[sent:])
        except OSError as error:
            raise LineLost(f"the connection was lost: {error}") from error

    def receive(self, wait_s: float | None = None) -> Said:
        """`wait_s`: how long to wait for a message. None: for ever."""
        file = -1
        try:
            self._socket.settimeout(wait_s)
            head, files, _, _ = socket.recv_fds(self._socket, _HEAD.size, 1, socket.MSG_CMSG_CLOEXEC)
            file = files[0] if files else -1
            words, keys = _HEAD.unpack(head + self._exactly(_HEAD.size - len(head), begun=bool(head)))
            if words > _WORDS_MOST:
                raise LineLost(f"a message of {words:,} B")
            said = json.loads(self._exactly(words))
            names = self._exactly(keys * KEY_BYTES)
            self._socket.settimeout(None)
        except BaseException as error:
            if file >= 0:
                os.close(file)
            if isinstance(error, OSError | ValueError):
                raise LineLost(f"the connection was lost: {error}") from error
            raise
        at = range(0, len(names), KEY_BYTES)
        return Said(said, [RecordKey(names[i : i + KEY_BYTES]) for i in at], file)

    def _exactly(self, size: int, *, begun: bool = True) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            got = self._socket.recv_into(view) if begun else 0
            if not got:
                raise LineLost("the connection was closed")
            view = view[got:]
        return bytes(data)

    def close(self) -> None:
        """May be called again. A thread that waits for an answer gets a `LineLost`."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def forget(self) -> None:
        """Close the connection here only: another process has it, too."""
        self._socket.close()


def listen(folder: str) -> socket.socket:
    """Only for whoever holds the lock of the folder. The socket that a killed owner left is replaced."""
    path = Path(folder, SOCKET)
    with suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    try:
        _with_short_path(folder, listener.bind)
        path.chmod(0o600)
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(folder: str) -> socket.socket:
    """A connection to the owner of a folder. Raises FileNotFoundError or ConnectionRefusedError if there is
    none."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        _with_short_path(folder, connection.connect)
    except BaseException:
        connection.close()
        raise
    return connection


def _with_short_path(folder: str, call: Callable[[str], object]) -> None:
    """The path of a socket may have 107 bytes, and folders have longer ones."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        call(f"/proc/self/fd/{file}/{SOCKET}")
    finally:
        os.close(file)
