"""Records in Redis or Valkey: one string each, over TCP or a unix socket.

The names of records begin with `tiercel:2:`, so the database may be shared: other names are never read,
listed or deleted. When the server's memory is full, its `maxmemory-policy` decides: with `noeviction` a `put`
answers False, with `allkeys-lru` the server evicts something (and does not say what).

Another client may write anything under our names. It is a miss: no more bytes of it are read than were asked
for, `put` replaces it and `delete` removes it. `keys` lists what is not a string with 0 bytes, so `check`
finds it.

Nothing is retried here: the caller decides. After the server was away, the next call connects again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
from redis.retry import Retry

from tiercel.errors import StoreError
from tiercel.storage.base import Get, Put, Store, trips
from tiercel.storage.record import RecordKey

_PREFIX = b"tiercel:2:"
_TRIP_BYTES = 8 << 20
"""The most bytes of one round trip. Larger batches were no faster (loopback, Neoverse-N1, 2026-11) and block
the server, which has one thread, for longer."""
_TRIP_KEYS = 1000
_READ_BYTES = 256 << 10
"""Bytes of one socket read. The client's default of 32 KiB makes values of 64 KiB up to twice as slow."""


class RedisStore(Store):
    """Values in a Redis or Valkey server. Several processes may use one database."""

    def __init__(self, url: str, *, db: int = 0, timeout_s: float = 5.0) -> None:
        """
        `url`: `redis://user:password@host:port/db`, `rediss://…` or `unix:///path/to.sock`, for the client
        library.
        `db`: if the URL has none.
        `timeout_s`: for a connection, and for every wait for more bytes of an answer.
        """
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
        with self._asking() as client:
            client.ping()

    def contains(self, keys: Sequence[RecordKey]) -> list[bool]:
        found: list[bool] = []
        with self._asking() as client:
            for some in _trips_of_keys(keys):
                pipe = client.pipeline(transaction=False)
                for key in some:
                    pipe.exists(_name(key))
                found += [bool(answer) for answer in pipe.execute()]
        return found

    def get(self, wanted: Sequence[Get]) -> list[bool]:
        filled: list[bool] = []
        with self._asking() as client:
            for some in trips(wanted, _TRIP_BYTES):
                pipe = client.pipeline(transaction=False)
                for each in some:
                    pipe.getrange(
                        _name(each.key), 0, each.bytes
                    )  # one byte more than asked for: a longer value is a miss
                values = pipe.execute(raise_on_error=False)
                filled += [_fill(each, value) for each, value in zip(some, values, strict=True)]
        return filled

    def put(self, values: Sequence[Put]) -> list[bool]:
        kept: list[bool] = []
        with self._asking() as client:
            for some in trips(values, _TRIP_BYTES):
                pipe = client.pipeline(transaction=False)
                for each in some:
                    pipe.set(_name(each.key), b"".join(each.parts))
                kept += [_was_kept(answer) for answer in pipe.execute(raise_on_error=False)]
        return kept

    def delete(self, keys: Sequence[RecordKey]) -> int:
        gone = 0
        with self._asking() as client:
            for some in _trips_of_keys(keys):
                gone += client.unlink(*[_name(key) for key in some])
        return gone

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
        told: set[bytes] = set()
        with self._asking() as client:
            for names in _scan(client):
                new = [name for name in names if name not in told]
                told.update(new)
                pipe = client.pipeline(transaction=False)
                for name in new:
                    pipe.strlen(name)
                for name, answer in zip(new, pipe.execute(raise_on_error=False), strict=True):
                    size = _unless_of_another_type(answer)
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


def _name(key: RecordKey) -> bytes:
    return _PREFIX + key


def _trips_of_keys(keys: Sequence[RecordKey]) -> Iterator[Sequence[RecordKey]]:
    return (keys[at : at + _TRIP_KEYS] for at in range(0, len(keys), _TRIP_KEYS))


def _scan(client: redis.Redis) -> Iterator[list[bytes]]:
    """Names of our records, in batches. A name may come twice. No name that stays is missed."""
    cursor = 0
    while True:
        cursor, names = cast(
            "tuple[int, list[bytes]]", client.scan(cursor, match=_PREFIX + b"*", count=_TRIP_KEYS)
        )
        if names:
            yield names
        if cursor == 0:
            return


def _unless_of_another_type(answer: Any) -> Any:
    """None instead of the error that the value is not a string."""
    if isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE"):
        return None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _fill(wanted: Get, answer: object) -> bool:
    value = _unless_of_another_type(answer)
    return value is not None and wanted.fill(value)


def _was_kept(answer: object) -> bool:
    if isinstance(answer, OutOfMemoryError):
        return False
    if isinstance(answer, Exception):
        raise answer
    return True
