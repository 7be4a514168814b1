"""The process that owns a folder for all that share it. It ends by itself when nobody uses it any more.

    python -m tiercel.storage.shared.owner FOLDER OPTIONS FILE      started by the first client (`starting`)

It has the file store of the folder, and so the index, the lock and all decisions. A thread for each
connection answers calls: where records are, which to keep, which to delete. A client that ends while it
writes costs what it was writing: others write behind it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from tiercel.errors import ConfigError, StoreError, TiercelError
from tiercel.storage.file import FileStore
from tiercel.storage.file.folder import SOCKET
from tiercel.storage.file.index import REMOVED_MOST
from tiercel.storage.record import RecordKey
from tiercel.storage.shared.wire import VERSION, Line, LineLost, Said, connect, listen

log = logging.getLogger(__name__)

POLL_S = 0.5
"""How often an owner looks whether it is still needed."""

LOCKED_S = 3.0
"""How long a new owner waits for the lock of one that is ending."""

WRITE_S = 10.0
"""How long a client may take to write up to 16 MiB. Others that write wait for it; then it is given up."""


class Owner:
    """Answers the clients of one store."""

    def __init__(self, store: FileStore, options: dict[str, Any], linger_s: float) -> None:
        self._store, self._options, self._linger_s = store, options, linger_s
        self._boot = secrets.token_hex(8)
        """Names this start."""
        self._lock = threading.Lock()
        self._clients: dict[Line, int] = {}
        self._used_s = time.monotonic()
        self._gone = deque[RecordKey](maxlen=REMOVED_MOST)
        self._gone_count = 0
        """Of all keys that were evicted since the start. The last ones are in `_gone`."""
        self._ends = False

    def serve(self, listener: socket.socket) -> None:
        """Returns when nobody has used the store for `linger_s`, or after `end`."""
        listener.settimeout(POLL_S)
        while not self._ends:
            with self._lock:
                unused_s = 0.0 if self._clients else time.monotonic() - self._used_s
            if unused_s > self._linger_s:
                return
            try:
                connection, _ = listener.accept()
            except OSError:
                continue
            connection.settimeout(None)
            name = "tiercel-store-client"
            threading.Thread(
                target=self._answer_all, args=(Line(connection),), name=name, daemon=True
            ).start()

    def end(self) -> None:
        self._ends = True

    def _answer_all(self, line: Line) -> None:
        try:
            if self._greeted(line):
                self._serve_client(line)
        except LineLost:
            pass
        except Exception:
            log.exception("a client could not be answered")
        finally:
            with self._lock:
                if self._clients.pop(line, None) is not None:
                    self._used_s = time.monotonic()
            line.close()

    def _greeted(self, line: Line) -> bool:
        """The first call tells who comes. A client with other options is refused."""
        words = line.receive().words
        if words.get("version") != VERSION:
            line.send({"refused": f"it speaks version {VERSION} of the protocol"})
            return False
        for name, value in self._options.items():
            if words["options"].get(name) != value:
                line.send({"differs": [name, value], "pid": os.getpid()})
                return False
        with self._lock:
            self._clients[line] = int(words["pid"])
        line.send({"pid": os.getpid()})
        return True

    def _serve_client(self, line: Line) -> None:
        while True:
            said = line.receive()
            keys: Sequence[RecordKey] = ()
            try:
                answer, keys = self._answer(said, line)
                words = {"answer": answer}
            except TiercelError as error:
                words = {"error": str(error)}
            line.send(words, keys)

    def _answer(self, said: Said, line: Line) -> tuple[Any, Sequence[RecordKey]]:
        words, keys, store = said.words, said.keys, self._store
        match words["call"]:
            case "contains":
                return store.contains(keys), ()
            case "places":
                return store.places(keys, words["sizes"]), ()
            case "put":
                return store.put_by(_Client(line), keys, words["sizes"]), ()
            case "delete":
                return store.delete(keys), ()
            case "clear":
                store.clear()
                return None, ()
            case "compact":
                return store.compact(), ()
            case "stats":
                with self._lock:
                    clients = len(set(self._clients.values()))
                return store.stats() | {"owner": os.getpid(), "processes": clients}, ()
            case "keys":
                found = list(store.keys())
                return [size for _, size in found], [key for key, _ in found]
            case "removed":
                return self._removed(words["seen"])
        raise StoreError(f"a call that is not known: {words['call']}")

    def _removed(self, seen: list[Any] | None) -> tuple[list[Any], Sequence[RecordKey]]:
        """What was evicted since this was last answered with `seen`. Nothing, if that was another owner."""
        with self._lock:
            new = self._store.removed()
            self._gone.extend(new)
            self._gone_count += len(new)
            boot, count = seen or (None, 0)
            more = min(self._gone_count - count, len(self._gone)) if boot == self._boot else 0
            return [self._boot, self._gone_count], list(islice(reversed(self._gone), more))


class _Client:
    """A client that has asked to put records, and writes them when it is told where (`commit.Writer`)."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def begin(self, file: int, offset: int, keys: Sequence[RecordKey]) -> None:
        try:
            self._line.send({"write": offset}, keys, file, WRITE_S)
        except LineLost as error:
            raise OSError(errno.ECONNABORTED, str(error)) from error

    def end(self) -> None:
        try:
            failed = self._line.receive(WRITE_S).words.get("failed", errno.EPROTO)
        except LineLost as error:
            self._line.close()
            raise OSError(errno.ECONNABORTED, str(error)) from error
        if failed:
            raise OSError(failed, os.strerror(failed))


def main(folder: str, options: str, told: int) -> None:
    """Own a folder. `told`: where to write one line, when the owner can be asked or why it can not."""
    if os.fork():
        os._exit(0)  # so that no client has to wait for the owner's end
    os.chdir("/")

    def tell(line: str) -> None:
        with suppress(OSError):  # the client has ended
            os.write(told, line.encode() + b"\n")
        os.close(told)

    given = json.loads(options)
    linger_s = given.pop("linger_s")
    try:
        store = _open(folder, given)
    except ConfigError as error:
        return tell(json.dumps({"field": error.field, "value": error.value, "why": error.why}))
    except (TiercelError, OSError) as error:
        return tell(json.dumps({"error": str(error)}))
    if store is None:
        return tell("{}")  # another owner can be asked
    owner = Owner(store, given, linger_s)
    signal.signal(signal.SIGTERM, lambda *_: owner.end())
    try:
        with listen(folder) as listener:
            tell("{}")
            log.info("process %d owns %s", os.getpid(), folder)
            owner.serve(listener)
            with suppress(OSError):
                Path(folder, SOCKET).unlink()
    finally:
        store.close()


def _open(folder: str, options: dict[str, Any]) -> FileStore | None:
    """The store. None: another owner has it, and answers. The lock of one that is ending is waited for."""
    until_s = time.monotonic() + LOCKED_S
    while True:
        try:
            return FileStore(folder, **options)
        except ConfigError as error:
            if "is open in process" not in error.why or time.monotonic() > until_s:
                raise
        with suppress(OSError):
            connect(folder).close()
            return None
        time.sleep(0.05)


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
