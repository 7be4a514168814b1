"""A store that could not be reached when it was to be opened. Every call tries to open it first.

Until that succeeds a call fails, as the calls of a store do whose server has gone. So the cache leaves it
alone and tries it again (`policy.breaker`), and knows no other kind of absence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from time import monotonic
from typing import Any

from tiercel.errors import ConfigError, StoreAway, StoreError
from tiercel.storage.base import Checked, Get, Put, Store
from tiercel.storage.record import RecordKey

log = logging.getLogger(__name__)

AGAIN_S = 0.25
"""Calls within this time after a try have its outcome: those that waited for it do not wait again, each."""


class LateStore(Store):
    """`make` opens the store; `kind`: its class. `why`: what the first try raised."""

    def __init__(
        self,
        make: Callable[[], Store],
        kind: type[Store],
        why: StoreAway,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.align, self.writes, self.away = kind.align, kind.writes, True
        self.trouble = f"it is away, and is tried again: {why}"
        log.warning("the store: %s", self.trouble)
        self._make, self._why, self._clock = make, str(why), clock
        self._again_s = 0.0
        self._store: Store | None = None
        self._memory: list[memoryview] = []
        self._lock = Lock()
        self._closed = False

    def _opened(self) -> Store:
        """The store. One thread opens it; the others wait for the outcome."""
        with self._lock:
            if self._closed:
                raise StoreError("the store is closed")
            if self._store is None:
                self._store, self.away = self._open(), False
            return self._store

    def _open(self) -> Store:
        if self._clock() < self._again_s:
            raise StoreAway(self._why)
        try:
            store = self._make()
        except StoreAway as error:
            self._why, self._again_s = str(error), self._clock() + AGAIN_S
            raise
        except ConfigError as error:
            raise StoreError(error.why) from error
        try:
            for memory in self._memory:
                store.register(memory)
        except BaseException:
            store.close()
            raise
        return store

    def register(self, memory: memoryview) -> None:
        """If the store is still away, it is told when it is opened."""
        with self._lock:
            self._memory.append(memory)
            if self._store is not None:
                self._store.register(memory)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._store is not None:
                self._store.close()

    def contains(self, keys: Sequence[RecordKey]) -> list[bool]:
        return self._opened().contains(keys)

    def kept(self, keys: Sequence[RecordKey]) -> list[bool]:
        return self._opened().kept(keys)

    def get(self, wanted: Sequence[Get]) -> list[bool]:
        return self._opened().get(wanted)

    def put(self, values: Sequence[Put]) -> list[bool]:
        return self._opened().put(values)

    def delete(self, keys: Sequence[RecordKey]) -> int:
        return self._opened().delete(keys)

    def clear(self) -> None:
        self._opened().clear()

    def stats(self) -> dict[str, Any]:
        return self._opened().stats()

    def keys(self) -> Iterator[tuple[RecordKey, int]]:
        return self._opened().keys()

    def removed(self) -> list[RecordKey]:
        return self._opened().removed()

    def compact(self) -> int:
        return self._opened().compact()

    def check(self) -> Checked:
        return self._opened().check()
