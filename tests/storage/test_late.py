"""Goal: a store that is away when it is opened is used as soon as it is there; what only a user can set right
is an error at once. Method: a real Redis and a real Mooncake master, which start after the store."""

import mmap
from contextlib import contextmanager

import pytest

from tests.servers import free_port, mooncake_master, redis_server
from tests.wait import until
from tiercel.errors import ConfigError, StoreAway, StoreError
from tiercel.storage.conformance.samples import Sample, expect_there, keep
from tiercel.storage.late import LateStore
from tiercel.storage.memory import MemoryStore
from tiercel.storage.open import open_now_or_later, open_store, open_stores

SAMPLE = Sample(1, 100_000)


@contextmanager
def servers(kind):
    with redis_server() if kind == "redis" else mooncake_master() as server:
        yield server, server.url if kind == "redis" else f"{server.url}&local_segment=32MiB"


@pytest.mark.parametrize("kind", ["redis", "mooncake"])
def test_what_is_away_is_opened_by_the_first_call_that_finds_it(kind):
    memory = memoryview(mmap.mmap(-1, 1 << 20))
    with servers(kind) as (server, url):
        server.kill()
        with open_now_or_later(url) as store:
            assert isinstance(store, LateStore) and store.away and "it is away" in store.trouble
            store.register(memory)
            for _ in range(2):
                with pytest.raises(StoreAway):
                    store.contains([SAMPLE.key])
            server.start()
            until(lambda: not fails(store), "it is open")
            keep(store, [SAMPLE])
            expect_there(store, [SAMPLE], "it was opened late")
            if kind == "mooncake":
                assert [len(each) for each in store._store._registered] == [len(memory)]
        with pytest.raises(StoreError, match="closed"):
            store.contains([SAMPLE.key])


def fails(store):
    try:
        store.contains([SAMPLE.key])
    except StoreError:
        return True
    return False


def test_what_a_user_has_to_set_right_is_an_error_also_if_nobody_answers():
    with redis_server() as redis:
        with pytest.raises(StoreError, match="AUTH") as refused:
            open_now_or_later(f"redis://:hidden@127.0.0.1:{redis.port}/0")
        assert not isinstance(refused.value, StoreAway)
    away = f"127.0.0.1:{free_port()}"
    for url in (
        f"redis://{away}?sise=3",
        f"mooncake://{away}?replicas=0",
        "redis://host:99999",
        "s3://bucket",
    ):
        with pytest.raises(ConfigError):
            open_now_or_later(url)


def test_it_is_an_error_where_the_store_is_required():
    away = f"redis://127.0.0.1:{free_port()}/0"
    for opening in (lambda: open_store(away), lambda: open_stores(away, ())):
        with pytest.raises(StoreAway, match="refused"):
            opening()
    peer = "peer://127.0.0.1:1"
    assert open_stores(away, (peer,), required=False).away, "beside peers too"
    assert not open_stores("memory:", (peer,), required=False).away


class Own(MemoryStore):
    """A class of the user's own, whose server answers the third time."""

    writes, tries = True, 0

    def __init__(self) -> None:
        super().__init__()
        Own.tries += 1
        if Own.tries < 3:
            raise StoreAway("nobody is there")


class Broken(MemoryStore):
    def __init__(self) -> None:
        raise ZeroDivisionError("oops")


def test_a_class_of_ones_own_may_be_away_too(caplog):
    store = open_now_or_later("tests.storage.test_late:Own")
    assert "it is away, and is tried again: nobody is there" in caplog.text
    for _ in range(3):
        with pytest.raises(StoreAway):
            store.stats()
    assert Own.tries == 2, "it is not tried again at once"
    until(lambda: not fails(store), "it is open")
    keep(store, [SAMPLE])
    assert store.stats()["records"] == 1 and Own.tries == 3
    with pytest.raises(ConfigError, match="can not be opened: ZeroDivisionError"):
        open_now_or_later("tests.storage.test_late:Broken")


def test_a_store_that_never_came_is_closed_without_being_opened():
    store = open_now_or_later(f"redis://127.0.0.1:{free_port()}/0")
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.stats()
