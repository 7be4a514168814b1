"""What the contract is checked on: every back end, with real servers. Each worker has its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.servers import mooncake_holder, mooncake_master, redis_server
from tiercel.errors import StoreError
from tiercel.storage.base import Put, Store
from tiercel.storage.conformance.samples import SMALL_BYTES, Subject
from tiercel.storage.file import FileStore
from tiercel.storage.memory import MemoryStore
from tiercel.storage.mooncake import MooncakeStore
from tiercel.storage.record import RecordKey
from tiercel.storage.redis import RedisStore
from tiercel.storage.shared import SharedStore

LARGE_BYTES = 128 << 20
"""Room for the values of any check."""


class Emptied:
    """A factory that returns one store, emptied, until it is closed: some stores take a second to close."""

    def __init__(self, factory: Callable[[], Store]) -> None:
        self._factory = factory
        self._store: Store | None = None

    def __call__(self) -> Store:
        if self._store is not None:
            try:
                self._store.clear()
                return self._store
            except StoreError:
                pass
        self._store = self._factory()
        self._store.clear()
        return self._store

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def memory_subject(stack: ExitStack, folder) -> Subject:
    def overwrite(store: MemoryStore, key: RecordKey) -> None:
        store._values[key] = bytes(len(store._values[key]))

    return Subject(MemoryStore, lambda: MemoryStore(SMALL_BYTES), spoil=overwrite)


def file_subject(stack: ExitStack, folder) -> Subject:
    numbers = iter(range(10_000))
    paths = [folder]

    def open_new(size: int) -> Store:
        paths.append(folder / str(next(numbers)))
        return stack.enter_context(FileStore(paths[-1], size, free=0))

    def overwrite(store: FileStore, key: RecordKey) -> None:
        segment, row = store._index.find(key)
        with segment.path.open("r+b") as file:
            file.seek(segment.table.offsets[row])
            file.write(bytes(64))
            os.fsync(file.fileno())

    return Subject(
        lambda: open_new(LARGE_BYTES),
        lambda: open_new(SMALL_BYTES),
        lambda: stack.enter_context(FileStore(paths[-1], LARGE_BYTES, free=0)),
        overwrite,
    )


def redis_subject(stack: ExitStack, folder, *, unix: bool = False) -> Subject:
    server = stack.enter_context(redis_server(unix=unix))
    # What an empty server takes for itself is counted too.
    small = stack.enter_context(redis_server(unix=unix, maxmemory=str(SMALL_BYTES + (2 << 20))))
    factory, small_factory = (
        Emptied(lambda url=each.client_url: RedisStore(url)) for each in (server, small)
    )
    stack.callback(factory.close)
    stack.callback(small_factory.close)

    def make_a_list(store: RedisStore, key: RecordKey) -> None:
        name = b"tiercel:2:" + key
        store._client.delete(name)
        store._client.lpush(name, "not a string")

    again = lambda: stack.enter_context(RedisStore(server.client_url))  # noqa: E731
    return Subject(factory, small_factory, again, make_a_list)


def redis_unix_subject(stack: ExitStack, folder) -> Subject:
    return redis_subject(stack, folder, unix=True)


def mooncake_subject(stack: ExitStack, folder, *, local_segment: int = 0) -> Subject:
    """Records in another process, or (with a segment of the store's own) in this one."""

    def shorten(store: MooncakeStore, key: RecordKey) -> None:
        store.delete([key])
        assert store.put([Put(key, [b"somebody else's"])]) == [True]

    def factory_of(size: int):
        master = stack.enter_context(mooncake_master())
        if not local_segment:
            stack.enter_context(mooncake_holder(master, size))

        def open_one() -> Store:
            own = size if local_segment else 0
            return MooncakeStore(master.address, metrics_port=master.metrics_port, local_segment=own)

        factory = Emptied(open_one)
        stack.callback(factory.close)
        return factory, open_one

    factory, open_one = factory_of(local_segment or LARGE_BYTES)
    small_factory, _ = factory_of(SMALL_BYTES)
    again = None if local_segment else (lambda: stack.enter_context(open_one()))
    return Subject(factory, small_factory, again, shorten)


def mooncake_own_subject(stack: ExitStack, folder) -> Subject:
    return mooncake_subject(stack, folder, local_segment=LARGE_BYTES)


def shared_subject(stack: ExitStack, folder) -> Subject:
    """Its owner takes half a second to start, so a store is emptied and used again."""

    def opened(size: int) -> SharedStore:
        return SharedStore(folder / str(size), size, free=0, linger_s=0.2)

    def overwrite(store: SharedStore, key: RecordKey) -> None:
        ((segment, offset),) = store._ask("places", [key], sizes=[dict(store.keys())[key]]).words["answer"]
        with store._folder.segment(segment).open("r+b") as file:
            file.seek(offset)
            file.write(bytes(64))
            os.fsync(file.fileno())

    large, small = (Emptied(lambda size=size: opened(size)) for size in (LARGE_BYTES, SMALL_BYTES))
    for each in (large, small):
        stack.callback(each.close)
    return Subject(large, small, lambda: stack.enter_context(opened(LARGE_BYTES)), overwrite)


BACK_ENDS = {
    "memory": memory_subject,
    "file": file_subject,
    "shared": shared_subject,
    "redis": redis_subject,
    "redis_unix": redis_unix_subject,
    "mooncake": mooncake_subject,
    "mooncake_own": mooncake_own_subject,
}


@pytest.fixture(scope="session", params=BACK_ENDS)
def back_end(request, tmp_path_factory):
    """The name of a back end, and how it is opened."""
    with ExitStack() as stack:
        yield request.param, BACK_ENDS[request.param](stack, tmp_path_factory.mktemp(request.param))
