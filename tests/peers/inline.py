"""The pages of a cache that no thread drives at the moment, offered from this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from tiercel.peers.offering import Offering, open_listener, where


class Inline:
    """The asking thread does what it asks, one thread after the other."""

    def __init__(self) -> None:
        self._turn = threading.Lock()

    def __call__(self, what: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._turn:
            try:
                future.set_result(what())
            except Exception as error:  # noqa: BLE001 - the asker gets it
                future.set_exception(error)
        return future


@contextmanager
def offered(cache: Any, **options: Any) -> Iterator[str]:
    """The URL under which other caches read it."""
    listener = open_listener("127.0.0.1:0")
    offering = Offering(cache, Inline(), listener, **options)
    try:
        yield f"peer://{where(listener)}"
    finally:
        offering.close()
        cache.check()
        assert not len(cache.leases)
