"""A process that offers host pages: real caches with real bytes, without a model. Lines tell it what to do.

python -m tests.peers.offering '[{"layout": "layer_first"}, {}]'
→ [41001, 41002]            two caches, each on a port of its own
← 0 check                   a question to the first
→ {"leases": 0}
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from tests.memory.specs import SPECS
from tests.transfer.borrowed import make_borrowed
from tiercel.cache import HostCache
from tiercel.cache.memories import make_memories
from tiercel.config import CacheConfig
from tiercel.peers.offering import Offering, open_listener
from tiercel.storage.record import ALIGN_LEAST, Form, RecordKey
from tiercel.transfer.mover import forms_of
from tiercel.types import Kind

SPEC = "v4"
TEXT = list(range(1000, 1000 + 128 * 40))


def payload_of(key: RecordKey, size: int) -> bytes:
    """The bytes of a record follow from its key."""
    return random.Random(bytes(key)).randbytes(size)


class Offered:
    """A host cache, a thread that drives it, and pages of `TEXT` in it."""

    def __init__(
        self,
        *,
        spec: str = SPEC,
        layout: str = "page_first_direct",
        host_pages: int = 64,
        pages: int = 8,
        tails: tuple[int, ...] = (4, 8),
        shuffle: int | None = None,
        address: str = "127.0.0.1:0",
        key: str = "",
        mooncake: str | None = None,
    ) -> None:
        self.spec = SPECS[spec]
        config = CacheConfig(host_bytes=host_pages * self.spec.place_bytes, layout=layout)
        memory = make_borrowed(self.spec, 2, 2)
        order = None if shuffle is None else lambda n: random.Random(shuffle).sample(range(n), n)
        self.cache = HostCache(self.spec, config, make_memories(self.spec, config, memory), pool_order=order)
        self.forms = forms_of(self.spec, ALIGN_LEAST)
        self.chain = self.cache.chain(TEXT)
        self._inbox: deque[Any] = deque()
        self._wake = threading.Condition()
        self.land(pages, tails)
        self.offering = Offering(self.cache, self.ask, open_listener(address), key=key, mooncake=mooncake)
        self.thread = threading.Thread(target=self._drive, daemon=True)
        self.thread.start()

    def ask(self, what):
        future: Future[Any] = Future()

        def do():
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(what())
                except Exception as error:  # noqa: BLE001
                    future.set_exception(error)

        with self._wake:
            self._inbox.append(do)
            self._wake.notify_all()
        return future

    def _drive(self):
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._inbox)
                todo = list(self._inbox)
                self._inbox.clear()
            for do in todo:
                do()
            self.cache.step()
            self.offering.questions.step()

    def land(self, pages, tails=(), first=0):
        """Pages of the text come to the host, and tails at these boundaries."""
        transfer = self.cache.land(self.chain, first, pages, tails=tails)
        for move in transfer.moves:
            page = move.item.page if move.item.kind is Kind.TAIL else move.item
            forms = self.forms[move.item.kind]
            parts = self.cache.host.views(move.host, [form.payload_bytes for form in forms])
            for form, views in zip(forms, parts, strict=True):
                data, at = payload_of(form.key(page.key), form.payload_bytes), 0
                for view in views:
                    view[:] = data[at : at + len(view)]
                    at += len(view)
        self.cache.landed(transfer)

    def fill(self):
        """Another text takes every host page that it can get. Returns how many it got."""
        other = self.cache.chain([token + 5000 for token in TEXT] * 2)
        transfer = self.cache.land(other, 0, len(other.keys))
        self.cache.landed(transfer)
        return len(transfer.moves)


def main() -> None:
    offered = [Offered(**options) for options in json.loads(sys.argv[1])]
    _tell([each.offering._listener.getsockname()[1] for each in offered])
    for line in sys.stdin:
        which, word, *numbers = line.split()
        _tell(_answer(offered[int(which)], word, *map(int, numbers)))


def _answer(offered: Offered, word: str, *numbers: int) -> Any:
    cache = offered.cache
    if word == "check":
        return offered.ask(lambda: cache.check() or {"leases": len(cache.leases)}).result()
    if word == "flush":
        offered.ask(cache.flush).result()
        return {"free": cache.host_pages.free, "capacity": cache.host_pages.capacity}
    if word == "fill":
        return offered.ask(offered.fill).result()
    if word == "land":
        first, pages = numbers
        return offered.ask(lambda: offered.land(pages, (), first)).result()
    assert word == "stats"
    return offered.offering.stats()


def _tell(what: Any) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201


class Offer:
    """One of the caches of a process."""

    def __init__(self, process: Process, number: int, port: int) -> None:
        self.process, self._number = process, number
        self.address = f"127.0.0.1:{port}"

    def ask(self, what: str) -> Any:
        return self.process.ask(f"{self._number} {what}")


class Process:
    """A process that offers one cache for each of these options."""

    def __init__(self, *many: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "tests.peers.offering", json.dumps(many)]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.offers = [Offer(self, number, port) for number, port in enumerate(self._told())]

    def _told(self) -> Any:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, "it ended"
        return json.loads(line)

    def ask(self, what: str) -> Any:
        assert self.popen.stdin is not None
        print(what, file=self.popen.stdin, flush=True)  # noqa: T201
        return self._told()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.communicate()


@contextmanager
def offering(*many: dict[str, Any]) -> Iterator[list[Offer]]:
    process = Process(*many)
    try:
        yield process.offers
    finally:
        process.kill()


def form_of(kind: Kind, spec: str = SPEC, align: int = ALIGN_LEAST, grain: int = 0) -> Form:
    return forms_of(SPECS[spec], align)[kind][grain]


if __name__ == "__main__":
    main()
