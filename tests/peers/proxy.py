"""A connection that goes wrong on request: between a reader and an offering server, byte by byte."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Proxy:
    """Passes all bytes on. `hurt` says what happens to the bytes that the server sends from then on, counted
    from the first of them in each connection: at byte `at` it flips one, cuts the connection, or stalls."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._how, self._at = "", 0
        self._open: list[socket.socket] = []
        self.stalled = threading.Event()
        self.bytes_passed = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def hurt(self, how: str, at: int) -> None:
        assert how in ("flip", "cut", "stall")
        self.stalled.clear()
        self._how, self._at = how, at

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
        passed = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                how, at = self._how, self._at - passed
                passed += len(data)
                self.bytes_passed += len(data)
                if how and 0 <= at < len(data):
                    if how == "flip":
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
