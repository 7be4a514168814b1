"""Goal: records in a real redis-server, also when it goes away, is full or belongs to others too."""

import signal
from threading import Semaphore, Thread

import pytest
import redis

from tests.servers import free_port, redis_server
from tiercel.errors import StoreError
from tiercel.storage.conformance.samples import Read, Sample, expect_absent, expect_there, keep
from tiercel.storage.record import Flaw
from tiercel.storage.redis import RedisStore

SAMPLES = [Sample(number, 20_000) for number in range(20)]
TIMEOUT_S = 5


@pytest.fixture
def server():
    with redis_server() as own:
        yield own


@pytest.fixture
def store(server):
    with RedisStore(server.client_url, timeout_s=TIMEOUT_S) as own:
        yield own


def expect_error(act):
    """A StoreError with its cause."""
    with pytest.raises(StoreError) as caught:
        act()
    assert isinstance(caught.value.__cause__, redis.RedisError)


def test_a_killed_server_is_an_error_and_a_new_one_is_used_again(server, store):
    keep(store, SAMPLES)
    for _ in range(2):
        server.kill()
        expect_error(lambda: store.contains([SAMPLES[0].key]))
        expect_error(lambda: store.get([Read(SAMPLES[0]).get]))
        expect_error(lambda: store.put([SAMPLES[0].put()]))
        expect_error(lambda: store.delete([SAMPLES[0].key]))
        expect_error(store.clear)
        expect_error(store.stats)
        expect_error(lambda: list(store.keys()))
        server.start()
        expect_absent(store, SAMPLES, "redis was started again without what it held")
        keep(store, SAMPLES)
        expect_there(store, SAMPLES, "after the restart")


def test_connections_that_died_unnoticed_are_made_anew(server, store):
    keep(store, SAMPLES)
    together = [
        Thread(target=expect_there, args=(store, SAMPLES, "by a thread"), daemon=True) for _ in range(4)
    ]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join(4 * TIMEOUT_S)
    assert not any(thread.is_alive() for thread in together), "a thread hangs"
    server.kill()
    server.start()
    keep(store, SAMPLES)
    expect_there(store, SAMPLES, "the first call after a restart nobody noticed")


def test_a_server_killed_in_the_middle_of_a_transfer_is_an_error(server, store):
    large = [Sample(number, 3 << 20) for number in range(12)]
    puts = [sample.put() for sample in large]
    keep(store, large)
    begun, ended = Semaphore(0), []

    def move():
        try:
            while True:
                store.get([Read(sample).get for sample in large])
                begun.release()
                store.put(puts)
        except StoreError as error:
            ended.append(error)

    threads = [Thread(target=move, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        assert begun.acquire(timeout=TIMEOUT_S), "no transfer ended"
    server.kill()
    for thread in threads:
        thread.join(4 * TIMEOUT_S)
    assert len(ended) == 3, "a transfer goes on without its server"


def test_a_server_that_says_nothing_is_an_error_after_the_time_out(server):
    with RedisStore(server.client_url, timeout_s=0.2) as store:
        server.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(StoreError, match="Timeout"):
                store.contains([SAMPLES[0].key])
        finally:
            server.process.send_signal(signal.SIGCONT)
        assert store.contains([SAMPLES[0].key]) == [False]


def test_a_full_server_that_evicts_nothing_answers_false():
    with redis_server(maxmemory="8mb") as server, RedisStore(server.client_url) as store:
        answers = store.put([Sample(number, 1_000_000).put() for number in range(12)])
        assert True in answers
        assert answers[-1] is False
        hits = store.contains([Sample(number, 1_000_000).key for number in range(12)])
        assert hits == answers
        assert store.stats()["server_bytes_most"] == 8 << 20


def test_other_keys_of_the_database_are_left_alone(server, store):
    others = redis.Redis(port=server.port)
    others.mset({"mine": "1", "tiercel": "2", "tiercel:1:mine": "3", "xtiercel:2:mine": "4"})
    keep(store, SAMPLES)
    assert dict(store.keys()).keys() == {sample.key for sample in SAMPLES}
    store.clear()
    assert sorted(others.keys()) == [b"mine", b"tiercel", b"tiercel:1:mine", b"xtiercel:2:mine"]
    others.close()


def test_databases_are_apart(server, store):
    with RedisStore(f"redis://127.0.0.1:{server.port}/1") as other:
        keep(store, SAMPLES)
        expect_absent(other, SAMPLES, "another database")
        other.clear()
        expect_there(store, SAMPLES, "another database was cleared")


def test_two_clients_see_each_others_records(server, store):
    with RedisStore(server.client_url) as other:
        keep(store, SAMPLES)
        expect_there(other, SAMPLES, "put by another client")
        assert other.delete([SAMPLES[0].key]) == 1
        expect_absent(store, SAMPLES[:1], "deleted by another client")


def test_a_name_is_the_prefix_and_the_key_and_a_value_is_the_record(server, store):
    keep(store, SAMPLES[:1])
    plain = redis.Redis(port=server.port)
    assert plain.get(b"tiercel:2:" + SAMPLES[0].key) == SAMPLES[0].header + SAMPLES[0].payload
    plain.close()


def test_something_else_under_our_name_is_a_miss_and_never_a_value(server, store):
    keep(store, SAMPLES[:3])
    plain = redis.Redis(port=server.port)
    name = b"tiercel:2:" + SAMPLES[1].key
    plain.delete(name)
    plain.lpush(name, "not a string")
    plain.close()
    assert store.get([Read(sample).get for sample in SAMPLES[:3]]) == [True, False, True]
    assert dict(store.keys())[SAMPLES[1].key] == 0, "listed, so that a check finds it"
    assert store.check() == (3, [(SAMPLES[1].key, Flaw.UNREADABLE)])
    keep(store, SAMPLES[1:2])
    expect_there(store, SAMPLES[:3], "put over something else")


@pytest.mark.parametrize("others_bytes", [0, 1, 64 << 20])
def test_no_more_is_read_than_was_asked_for(server, store, others_bytes):
    """Whoever may write to the server can leave something huge under our name."""
    keep(store, SAMPLES[:3])
    plain = redis.Redis(port=server.port)
    plain.set(b"tiercel:2:" + SAMPLES[1].key, bytes(others_bytes))
    before = plain.info("stats")["total_net_output_bytes"]
    assert store.get([Read(sample).get for sample in SAMPLES[:3]]) == [True, False, True]
    sent = plain.info("stats")["total_net_output_bytes"] - before
    plain.close()
    asked = sum(sample.form.record_bytes for sample in SAMPLES[:3])
    assert sent < asked + 20_000, f"{sent:,} B were sent for {asked:,} B"


def test_more_records_than_one_scan_answers_are_listed_and_cleared(store):
    many = [Sample(number, 10) for number in range(2500)]
    keep(store, many)
    assert dict(store.keys()) == {sample.key: sample.form.record_bytes for sample in many}
    store.clear()
    assert list(store.keys()) == []


def test_a_server_that_is_not_there_is_an_error_at_once():
    with pytest.raises(StoreError, match="refused"):
        RedisStore(f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(StoreError, match="No such file"):
        RedisStore("unix:///no/such.sock")


def test_a_wrong_password_is_an_error_that_does_not_tell_it(server):
    with pytest.raises(StoreError, match="AUTH") as caught:
        RedisStore(f"redis://:hidden@127.0.0.1:{server.port}/0")
    assert "hidden" not in str(caught.value)
