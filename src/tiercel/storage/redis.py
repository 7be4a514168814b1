"""Records in Redis or Valkey: one string each, over TCP or a unix socket.

The names of records begin with `tiercel:2:`, so the database may be shared: other names are never read,
listed or deleted. When the server's memory is full, its `maxmemory-policy` decides: with `noeviction` a `put`
returns False, with `allkeys-lru` the server evicts something (and does not say what).

Another client may write anything under our names. Such a value is a miss: no more bytes of it are read than
were asked for, `put` replaces it and `delete` removes it. `keys` lists what is not a string with 0 bytes, so
`check` finds it.

Nothing is retried here: the caller decides. After the server was away, the next call connects again.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from tiercel.errors import StoreAway, StoreError
from tiercel.storage.base import Get, Put, Store, trips
from tiercel.storage.record import RecordKey

_PREFIX = b"tiercel:2:"
_TRIP_BYTES = 8 << 20
"""The most bytes of one round trip. Larger batches were no faster (loopback, Neoverse-N1, 2026-11) and block
the server, which has one thread, for longer."""
_TRIP_KEYS = 1000
_Item = TypeVar("_Item")
_READ_BYTES = 256 << 10
"""Bytes of one socket read. The client's default of 32 KiB makes values of 64 KiB up to twice as slow."""


class RedisStore(Store):
    """Values in a Redis or Valkey server. Several processes may use one database."""

    def __init__(self, url: str, *, db: int = 0, timeout_s: float = 5.0) -> None:
        """`url`: as the client library reads it. `db`: used if the URL has none. `timeout_s`: for a
        connection, and for every wait for more bytes."""
        self._closed = False
        try:
            self._client = redis.Redis.from_url(
                url,
                db=db,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                socket_read_size=_READ_BYTES,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        except (RedisError, ValueError) as error:
            raise StoreError(f"redis: {error}") from error
        try:
            self._client.ping()
        except RedisError as error:
            raise _refusal(error) from error

    def contains(self, keys: Sequence[RecordKey]) -> list[bool]:
        found = self._each(_trips_of_keys(keys), lambda pipe, key: pipe.exists(_name(key)))
        return [bool(answer) for _, answer in found]

    def get(self, wanted: Sequence[Get]) -> list[bool]:
        # One byte more than asked for: a longer value is a miss.
        values = self._each(
            trips(wanted, _TRIP_BYTES), lambda pipe, each: pipe.getrange(_name(each.key), 0, each.bytes)
        )
        return [value is not None and each.fill(value) for each, value in values]

    def put(self, values: Sequence[Put]) -> list[bool]:
        kept = self._each(
            trips(values, _TRIP_BYTES), lambda pipe, each: pipe.set(_name(each.key), b"".join(each.parts))
        )
        return [bool(answer) for _, answer in kept]

    def _each(
        self, batches: Iterable[Sequence[_Item]], ask: Callable[[redis.client.Pipeline, _Item], Any]
    ) -> Iterator[tuple[_Item, Any]]:
        """Yields each item with the server's reply. One round trip for each batch."""
        with self._asking() as client:
            for some in batches:
                pipe = client.pipeline(transaction=False)
                for each in some:
                    ask(pipe, each)
                answers = pipe.execute(raise_on_error=False)
                yield from [(each, _value(answer)) for each, answer in zip(some, answers, strict=True)]

    def delete(self, keys: Sequence[RecordKey]) -> int:
        with self._asking() as client:
            return sum(client.unlink(*map(_name, some)) for some in _trips_of_keys(keys))

    def clear(self) -> None:
        with self._asking() as client:
            for names in _scan(client):
                client.unlink(*names)

    def stats(self) -> dict[str, Any]:
        """The memory of the whole server. Only a walk over `keys` could tell how much of it is ours."""
        with self._asking() as client:
            memory = client.info("memory")
        return {
            "records": None,
            "bytes": None,
            "server_bytes": memory["used_memory"],
            "server_bytes_most": memory["maxmemory"] or None,
        }

    def keys(self) -> Iterator[tuple[RecordKey, int]]:
        self._refuse_if_closed()
        return self._keys()

    def _keys(self) -> Iterator[tuple[RecordKey, int]]:
        seen: set[bytes] = set()
        with self._asking() as client:
            for names in _scan(client):
                new = [name for name in dict.fromkeys(names) if name not in seen]
                seen.update(new)
                for name, size in self._each([new], lambda pipe, name: pipe.strlen(name)):
                    if size != 0:  # 0: it is gone since it was listed
                        yield RecordKey(name.removeprefix(_PREFIX)), size or 0

    def close(self) -> None:
        self._closed = True
        self._client.connection_pool.disconnect(inuse_connections=False)

    @contextmanager
    def _asking(self) -> Iterator[redis.Redis]:
        """The client, while the store is open. Its errors become StoreErrors."""
        self._refuse_if_closed()
        try:
            yield self._client
        except (RedisError, OSError) as error:
            raise StoreError(f"redis: {error}") from error
        finally:
            if self._closed:  # another thread closed the store: this connection is still open
                self._client.connection_pool.disconnect(inuse_connections=False)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")


def _refusal(error: RedisError) -> StoreError:
    """Why the server can not be used: it is away, or a user has something to set right."""
    reached = isinstance(error, AuthenticationError) or isinstance(
        error.__context__, ssl.SSLCertVerificationError
    )
    away = isinstance(error, ConnectionError | TimeoutError) and not reached
    return (StoreAway if away else StoreError)(f"redis: {error}")


def _name(key: RecordKey) -> bytes:
    return _PREFIX + key


def _trips_of_keys(keys: Sequence[RecordKey]) -> Iterator[Sequence[RecordKey]]:
    return (keys[at : at + _TRIP_KEYS] for at in range(0, len(keys), _TRIP_KEYS))


def _scan(client: redis.Redis) -> Iterator[list[bytes]]:
    """Names of our records, in batches. A name may come twice. No name that stays is missed."""
    cursor: Any = None
    while cursor != 0:
        cursor, names = client.scan(cursor or 0, match=_PREFIX + b"*", count=_TRIP_KEYS)
        if names:
            yield cast("list[bytes]", names)


def _value(answer: Any) -> Any:
    """A reply. None: the value is not a string. False: the server's memory is full. Raises other errors."""
    if isinstance(answer, OutOfMemoryError):
        return False
    if isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE"):
        return None
    if isinstance(answer, Exception):
        raise answer
    return answer
