"""A connection that goes wrong on request: between a reader and an offering server, byte by byte."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress


class Proxy:
    """Passes all bytes on. `hurt` says what happens to the bytes that the server sends from then on, counted
    from the first of them in each connection: at byte `at` it flips one, cuts the connection, stalls, or
    calls `do` and goes on; in each connection, or `once`."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._how, self._at, self._once = "", 0, False
        self._do: Callable[[], object] | None = None
        self._open: list[socket.socket] = []
        self.stalled = threading.Event()
        self.bytes_passed = self.hurts = 0
        self.record: bytearray | None = None
        """What the server sends on a connection that is opened next."""
        threading.Thread(target=self._accept, daemon=True).start()

    def hurt(self, how: str, at: int, *, once: bool = False, do: Callable[[], object] | None = None) -> None:
        assert how in ("flip", "cut", "stall", "call")
        self.stalled.clear()
        self.hurts = 0
        self._how, self._at, self._once, self._do = how, at, once, do

    def heal(self) -> None:
        """New connections are right again."""
        self._how = ""

    def cut_all(self) -> None:
        opened, self._open = self._open, []
        for connection in opened:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_all()

    def _accept(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                if self._listener.fileno() < 0:
                    return
                reader.close()  # nobody is behind us: the reader sees the end of its connection
                continue
            self._open += [reader, server]
            threading.Thread(target=self._pass, args=(reader, server), daemon=True).start()
            threading.Thread(target=self._pass_back, args=(server, reader), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        _end(source, target)

    def _pass_back(self, source: socket.socket, target: socket.socket) -> None:
        passed, (record, self.record) = 0, (self.record, None)
        with suppress(OSError):
            while data := source.recv(1 << 16):
                how, at = self._how, self._at - passed
                passed += len(data)
                self.bytes_passed += len(data)
                if record is not None:
                    record += data
                if how and 0 <= at < len(data):
                    self.hurts += 1
                    if self._once:
                        self._how = ""
                    if how == "call" and self._do is not None:
                        target.sendall(data[:at])
                        self._do()
                        data = data[at:]
                    elif how == "flip":
                        data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                    else:
                        target.sendall(data[:at])
                        self.stalled.set()
                        if how == "cut":
                            break
                        return  # nothing more is read or sent: the connection stays open
                target.sendall(data)
        _end(source, target)


def _end(*connections: socket.socket) -> None:
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
