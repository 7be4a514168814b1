"""The reference store: a dictionary. It shows the contract in the simplest way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

from tiercel.errors import StoreError
from tiercel.storage.base import Get, Put, Store
from tiercel.storage.record import RecordKey


class MemoryStore(Store):
    """Values in this process. If it has a size, the oldest values are evicted first."""

    def __init__(self, size: int | None = None) -> None:
        self._size = size
        self._values: dict[RecordKey, bytes] = {}
        self._bytes = 0
        self._removed: list[RecordKey] = []
        self._lock = Lock()
        self._closed = False

    def contains(self, keys: Sequence[RecordKey]) -> list[bool]:
        with self._open():
            return [key in self._values for key in keys]

    def get(self, wanted: Sequence[Get]) -> list[bool]:
        with self._open():
            values = [self._values.get(each.key) for each in wanted]
        return [value is not None and each.fill(value) for each, value in zip(wanted, values, strict=True)]

    def put(self, values: Sequence[Put]) -> list[bool]:
        whole = [b"".join(each.parts) for each in values]
        with self._open():
            return [self._put(each.key, value) for each, value in zip(values, whole, strict=True)]

    def _put(self, key: RecordKey, value: bytes) -> bool:
        if self._size is not None and len(value) > self._size:
            return False
        self._drop(key)
        while self._size is not None and self._bytes + len(value) > self._size:
            oldest = next(iter(self._values))
            self._drop(oldest)
            self._removed.append(oldest)
        self._values[key] = value
        self._bytes += len(value)
        return True

    def _drop(self, key: RecordKey) -> bool:
        value = self._values.pop(key, None)
        self._bytes -= len(value or b"")
        return value is not None

    def delete(self, keys: Sequence[RecordKey]) -> int:
        with self._open():
            return sum(self._drop(key) for key in keys)

    def clear(self) -> None:
        with self._open():
            self._values.clear()
            self._bytes = 0

    def stats(self) -> dict[str, Any]:
        with self._open():
            return {"records": len(self._values), "bytes": self._bytes, "bytes_most": self._size}

    def keys(self) -> Iterator[tuple[RecordKey, int]]:
        with self._open():
            return iter([(key, len(value)) for key, value in self._values.items()])

    def removed(self) -> list[RecordKey]:
        with self._open():
            removed, self._removed = self._removed, []
        return removed

    def close(self) -> None:
        self._closed = True
        self._values = {}

    def _open(self) -> Lock:
        if self._closed:
            raise StoreError("the store is closed")
        return self._lock
