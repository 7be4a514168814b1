"""Goal: LMCache with our store as its L2 has the objects that it had, and no wrong one.
Method: LMCache's own factory, memory objects and descriptors, and processes of its own server, in an
environment of their own (`make engines`). A client does what an engine does."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("lmcache") is None:
    pytest.skip("lmcache is not installed", allow_module_level=True)

import torch
from examples.lmcache.restart import CHUNK, LAYERS, WIDTH, Server
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from tests.engines.lmcache_adapter import ATTENTION, GROUPS, KEYS, data_of, driven, layout, make, memory, ours
from tests.storage.shared.make import kill_owner, owner_of
from tiercel.errors import ConfigError
from tiercel.integrations import lmcache as integration
from tiercel.storage.open import open_store

REPOSITORY = Path(__file__).parents[2]
FLOAT, ROW = layout(2, 2, 16, 64, dtype=torch.float16), layout(8192, dtype=torch.uint8)


@pytest.fixture
def store(tmp_path):
    return f"file://{tmp_path}/store?size=16MiB&free=0"


def shared(folder):
    return f"shared://{folder}/store?size=16MiB&free=0&linger_s=0.5"


# The adapter


def test_objects_of_two_sizes_are_there_after_a_restart(store):
    with driven(ours(store)) as first:
        assert first.found(KEYS[:3]) == [False] * 3
        done = first.store(KEYS[:10])
        assert done.is_successful() and done.bytes_transferred() == 5 * (8192 + 5120)
    with driven(ours(store)) as second:
        asked = [*KEYS[:4], KEYS[20], *KEYS[4:10], KEYS[21]]
        assert second.found(asked) == [key in KEYS[:10] for key in asked]
        assert second.loaded(asked) == ["right" if key in KEYS[:10] else "missed" for key in asked]
        counted = second.adapter.report_status()
        assert (counted["hits"], counted["misses"]) == (10, 2)


def test_a_result_is_told_once_and_each_kind_of_task_has_a_descriptor(store):
    with driven(ours(store)) as driver:
        adapter = driver.adapter
        descriptors = [
            adapter.get_store_event_fd(),
            adapter.get_lookup_and_lock_event_fd(),
            adapter.get_load_event_fd(),
        ]
        assert len(set(descriptors)) == 3 and not any(map(driver.signalled, descriptors))
        driver.store(KEYS[:2])
        number = adapter.submit_lookup_and_lock_task(KEYS[:2], GROUPS)
        assert driver.wait(descriptors[1], lambda: adapter.query_lookup_and_lock_result(number)).test(1)
        assert adapter.query_lookup_and_lock_result(number) is None
        assert adapter.pop_completed_store_tasks() == {}
        assert adapter.query_load_result(number) is None and not driver.signalled(descriptors[2])


@pytest.mark.parametrize(
    "other",
    [{"model_name": "b/model"}, {"kv_rank": 0x02000200}, {"cache_salt": ""}, {"chunk_hash": b"another"}],
    ids=lambda other: next(iter(other)),
)
def test_another_model_rank_or_salt_finds_nothing(store, other):
    with driven(ours(store)) as driver:
        driver.store(KEYS[:2])
        others = [replace(key, **other) for key in KEYS[:2]]
        assert driver.found([*others, *KEYS[:2]]) == [False, False, True, True]
        assert driver.loaded([*others, *KEYS[:2]]) == ["missed", "missed", "right", "right"]


def test_another_group_type_or_shape_finds_nothing(tmp_path, store):
    turned = layout(2, 2, 64, 16)
    own = {"type": "fs", "base_path": f"{tmp_path}/own"}
    with driven(ours(store)) as driver, driven(own) as control:
        driver.store(KEYS[:1])
        control.store(KEYS[:1])
        for other in (FLOAT, turned, layout(2, 2, 16, 32)):
            assert driver.found(KEYS[:1], {0: other}) == [False]
            assert driver.loaded(KEYS[:1], {0: other}) == ["missed"]
            assert control.loaded(KEYS[:1], {0: other}) == ["wrong"]  # LMCache's own has the key alone
        moved = replace(KEYS[0], object_group_id=7)
        assert driver.found([moved], {7: ATTENTION}) == [False]
        assert driver.found(KEYS[:1]) == [True]


def test_a_flipped_byte_is_a_miss_and_is_stored_again(tmp_path, store):
    theirs = {"type": "fs", "base_path": f"{tmp_path}/theirs"}
    for spec in (ours(store), theirs):
        with driven(spec) as driver:
            driver.store(KEYS[:16])
    flipped = KEYS[:16:2]
    flip(tmp_path, [data_of(key, GROUPS[key.object_group_id]) for key in flipped])
    with driven(theirs) as control:
        assert control.loaded(KEYS[:16]) == ["wrong", "right"] * 8  # so wrong bytes would be seen
    with driven(ours(store)) as driver:
        assert driver.loaded(KEYS[:16]) == ["missed", "right"] * 8
        assert driver.adapter.report_status()["damaged"] == 8
        assert driver.found(KEYS[:16]) == [False, True] * 8
        driver.store(flipped)
        assert driver.loaded(KEYS[:16]) == ["right"] * 16


def flip(folder, values):
    """One byte of each of these values, in whatever file of the folder has it."""
    for file in folder.rglob("*"):
        if file.is_file():
            data = bytearray(file.read_bytes())
            for value in values:
                if (at := data.find(value[:64])) >= 0:
                    data[at + len(value) // 2] ^= 4
            file.write_bytes(data)


def test_what_is_locked_is_not_deleted_until_each_lookup_unlocked_it(store):
    with driven(ours(store)) as driver:
        driver.store(KEYS[:3])
        driver.found(KEYS[:2])
        driver.found(KEYS[:1])
        driver.adapter.delete(KEYS[:3])
        assert driver.loaded(KEYS[:3]) == ["right", "right", "missed"]
        driver.adapter.submit_unlock(KEYS[:2])
        driver.adapter.delete(KEYS[:2])
        assert driver.loaded(KEYS[:2]) == ["right", "missed"]
        driver.adapter.submit_unlock(KEYS[:1])
        driver.adapter.submit_unlock(KEYS[:1])  # once more than it was locked
        driver.adapter.delete(KEYS[:1])
        assert driver.loaded(KEYS[:1]) == ["missed"]
        driver.store(KEYS[:1])
        driver.found(KEYS[:1])
        driver.adapter.delete(KEYS[:1])
        assert driver.loaded(KEYS[:1]) == ["right"]


def test_after_a_restart_an_object_is_deleted_by_its_key_alone(store):
    with driven(ours(store)) as driver:
        driver.store(KEYS[:4])
    with driven(ours(store)) as driver:
        heard = Heard()
        driver.adapter.register_listener(heard)
        driver.adapter.delete([*KEYS[:2], replace(KEYS[0], model_name="unknown")])
        assert driver.loaded(KEYS[:4]) == ["missed", "missed", "right", "right"]
        assert set(heard.deleted) == set(KEYS[:2])


def test_lmcache_hears_what_is_new_used_and_gone(store):
    with driven(ours(store)) as driver:
        heard = Heard()
        driver.adapter.register_listener(heard)
        driver.store(KEYS[:2])
        again = driver.store(KEYS[:3])
        assert again.is_successful() and again.bytes_transferred() == 8192
        assert heard.stored == [(KEYS[0], 8192), (KEYS[1], 5120), (KEYS[2], 8192)]
        driver.loaded([KEYS[1], KEYS[5]])
        assert heard.accessed == [KEYS[1]]
        used = driver.adapter.get_usage()
        assert used.bytes_by_cache_salt == {"salt": 8192 * 2 + 5120}
        assert used.total_capacity_bytes == 16 << 20 and used.total_bytes_used > 8192 * 2 + 5120
        assert not driver.adapter.supports_global_eviction
        driver.adapter.delete(KEYS[:3])
        assert driver.adapter.get_usage().bytes_by_cache_salt == {} and set(heard.deleted) == set(KEYS[:3])


class Heard(L2AdapterListener):
    def __init__(self):
        self.stored, self.accessed, self.deleted = [], [], []

    def on_l2_keys_stored(self, keys, sizes):
        self.stored += zip(keys, sizes, strict=True)

    def on_l2_keys_accessed(self, keys):
        self.accessed += keys

    def on_l2_keys_deleted(self, keys):
        self.deleted += keys


def test_a_task_fails_if_one_object_is_not_kept_and_the_others_are(tmp_path):
    store = f"file://{tmp_path}/store?size=4MiB&segment_bytes=64KiB&free=0"
    large = {0: layout(2, 8, 64, 64), 1: GROUPS[1]}  # larger than a segment
    with driven(ours(store)) as driver:
        done = driver.store(KEYS[:4], large)
        assert not done.is_successful() and done.bytes_transferred() == 0
        assert driver.loaded(KEYS[:4], large) == ["missed", "right"] * 2


def test_an_object_that_is_shorter_than_its_layout_is_not_kept(store):
    with driven(ours(store)) as driver:
        short, whole = (
            memory(ATTENTION, data_of(KEYS[0], ATTENTION)),
            memory(ATTENTION, data_of(KEYS[2], ATTENTION)),
        )
        short.set_used_size(1000)
        number = driver.adapter.submit_store_task([KEYS[0], KEYS[2]], [short, whole])
        assert not driver.stored(number).is_successful()
        assert driver.loaded([KEYS[0], KEYS[2]]) == ["missed", "right"]


def test_objects_that_lmcache_serialized_are_found_after_a_restart(store):
    # A lookup tells the layout of the tensors, not the one of the bytes that are stored.
    with driven(ours(store)) as driver:
        driver.store(KEYS[:1], {0: ROW})
        assert driver.found(KEYS[:1], {0: FLOAT}) == [True]
    with driven(ours(store)) as driver:
        assert driver.found([KEYS[0], KEYS[2]], {0: FLOAT}) == [True, False]
        assert driver.loaded(KEYS[:1], {0: ROW}) == ["right"]


def test_objects_that_another_process_serialized_are_found(tmp_path):
    with driven(ours(shared(tmp_path))) as one, driven(ours(shared(tmp_path))) as two:
        assert two.found(KEYS[:1], {0: FLOAT}) == [False]
        one.store(KEYS[:1], {0: ROW})
        assert two.found(KEYS[:1], {0: FLOAT}) == [True]
        assert two.loaded(KEYS[:1], {0: ROW}) == ["right"]


def test_a_lookup_without_a_layout_finds_objects_of_every_layout(store):
    with driven(ours(store)) as driver:
        driver.store(KEYS[:2])
        driver.store([KEYS[2]], {0: FLOAT})
        for hint in ({}, {0: MemoryLayoutDesc([], [])}):
            assert driver.found([*KEYS[:3], KEYS[4]], hint) == [True, True, True, False]


def test_a_task_that_can_not_be_done_fails_and_is_told(store, caplog):
    with driven(ours(store)) as driver:
        number = driver.adapter.submit_store_task(KEYS[:2], [memory(ATTENTION)])  # one object for two keys
        assert not driver.stored(number).is_successful()
        assert "a task of LMCache's failed" in caplog.text
        assert driver.found(KEYS[:2]) == [False, False]


def test_a_store_that_fails_costs_hits_only(tmp_path):
    with driven(ours(shared(tmp_path))) as driver:
        driver.store(KEYS[:8])
        kill_owner(driver.adapter._pages.store)
        driver.store(KEYS[8:12])  # the owner is started again
        assert driver.loaded(KEYS[:12]) == ["right"] * 12
        kill_owner(driver.adapter._pages.store)
        (tmp_path / "store").rename(tmp_path / "away")
        (tmp_path / "store").write_text("no folder")
        for _ in range(4):
            assert not driver.store(KEYS[12:14]).is_successful()
            assert set(driver.loaded(KEYS[:4])) == {"missed"}
            assert driver.found(KEYS[:4]) == [False] * 4
        told = driver.adapter.report_status()
        assert told["state"] == "off" and told["failures"] >= 3 and told["is_healthy"]
        driver.adapter.delete(KEYS[:1])
        assert driver.adapter.get_usage().total_bytes_used == 0


def test_nothing_waits_for_a_store_that_hangs(tmp_path):
    with driven(ours(shared(tmp_path))) as driver:
        driver.store(KEYS[:8])
        owner = owner_of(driver.adapter._pages.store)
        os.kill(owner, signal.SIGSTOP)
        try:
            stores = driver.begin_store(KEYS[8:12])
            lookups = [driver.adapter.submit_lookup_and_lock_task(KEYS[:8], GROUPS) for _ in range(4)]
            load = driver.adapter.submit_load_task(KEYS[:1], [memory(ATTENTION)])
            driver.adapter.submit_unlock(KEYS[:8])
            assert driver.adapter.pop_completed_store_tasks() == {}
            assert all(driver.adapter.query_lookup_and_lock_result(each) is None for each in lookups)
            assert driver.adapter.query_load_result(load) is None
        finally:
            os.kill(owner, signal.SIGCONT)
        assert driver.stored(stores).is_successful()
        descriptor = driver.adapter.get_lookup_and_lock_event_fd()
        for number in lookups:
            bits = driver.wait(descriptor, lambda: driver.adapter.query_lookup_and_lock_result(number))  # noqa: B023
            assert bits.count_leading_ones() == 8


def test_memory_that_lmcache_may_have_given_away_is_neither_stored_nor_filled(tmp_path, monkeypatch):
    with driven(ours(shared(tmp_path))) as driver:
        driver.store(KEYS[:1])
        owner = owner_of(driver.adapter._pages.store)
        monkeypatch.setattr(integration, "STALE_S", 0.0)
        os.kill(owner, signal.SIGSTOP)
        try:
            theirs = memory(ATTENTION, data_of(KEYS[2], ATTENTION))
            store = driver.adapter.submit_store_task([KEYS[2]], [theirs])
            load = driver.adapter.submit_load_task([KEYS[0]], [theirs])
            theirs.raw_data.zero_()  # it is another object's by now
        finally:
            os.kill(owner, signal.SIGCONT)
        assert not driver.stored(store).is_successful()
        bits = driver.wait(driver.adapter.get_load_event_fd(), lambda: driver.adapter.query_load_result(load))
        assert not bits.test(0) and not theirs.raw_data.any()
        monkeypatch.undo()
        assert driver.loaded([KEYS[0], KEYS[2]]) == ["right", "missed"]


def test_when_it_is_closed_no_thread_is_left_and_tasks_that_wait_are_not_begun(store):
    adapter = make(ours(store))
    objects = [memory(ATTENTION, data_of(KEYS[0], ATTENTION))]
    for number in range(500):
        adapter.submit_store_task(
            [replace(KEYS[0], chunk_hash=bytes([number // 256, number % 256]))], objects
        )
    adapter.close()
    adapter.close()
    assert not [each.name for each in threading.enumerate() if each.name.startswith("tiercel-lmcache")]
    assert adapter.report_status()["kept"] < 500


def test_two_processes_have_one_store(tmp_path):
    program = (
        "from tests.engines.lmcache_adapter import *; import sys\n"
        "with driven(ours(sys.argv[1])) as driver:\n"
        "    assert driver.store(KEYS[:20]).is_successful()\n"
        "    print('stored', flush=True); sys.stdin.readline()\n"
        "    assert driver.loaded(KEYS) == ['right'] * 40, driver.loaded(KEYS)\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, shared(tmp_path)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with driven(ours(shared(tmp_path))) as driver:
        assert driver.store(KEYS[20:]).is_successful()
        while (line := other.stdout.readline()) and line != "stored\n":
            pass  # LMCache logs to stdout
        assert driver.found(KEYS) == [True] * 40 and driver.loaded(KEYS) == ["right"] * 40
        other.communicate("go on\n", timeout=60)
    assert other.returncode == 0


def test_what_lmcaches_own_benchmark_stores_is_found_and_right(tmp_path):
    command = [sys.executable, "-m", "lmcache.cli.main", "bench", "l2", "--num-keys", "8", "--no-skip-verify"]
    spec = json.dumps(ours(shared(tmp_path)))
    whole = (*command, "--lookup-max-hit-rate", "1.0", "--l2-adapter", spec)
    told = subprocess.run(whole, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "All 8 keys data verified OK" in told
    assert [line.split()[-1] for line in told.splitlines() if line.startswith("Total success")] == ["8"] * 3


# LMCache's server


def chunks_of(text, count=5):
    made = torch.Generator().manual_seed(text)
    return [torch.randint(-8, 8, (2, LAYERS, CHUNK, WIDTH), generator=made).float() for _ in range(count)]


def tokens_of(text, count=5):
    return [text * 10_000 + number for number in range(count * CHUNK)]


@pytest.fixture
def servers():
    """Starts servers at the same time, and ends them."""
    started = []

    def start(*specs):
        new = [Server(spec) for spec in specs]
        started.extend(new)
        for server in new:
            server.ready().register("a/model")
        return new

    yield start
    for server in started:
        server.kill()


def fetched(server, text, model="a/model"):
    """How many chunks came, and how many of them were wrong."""
    found = server.fetch(model, tokens_of(text))
    right = sum(torch.equal(*pair) for pair in zip(found, chunks_of(text), strict=False))
    return len(found), len(found) - right


def test_a_server_finds_what_another_one_stored_before_it_was_killed(tmp_path, servers):
    one, two = servers(ours(shared(tmp_path)), ours(shared(tmp_path)))
    for text in range(20):
        one.store("a/model", tokens_of(text), chunks_of(text))
    one.wait_for(kept=100)
    one.process.kill()
    assert [fetched(two, text) for text in range(20)] == [(5, 0)] * 20
    assert fetched(two, 20) == (0, 0)
    assert two.l2()["hits"] == 100 and two.l2()["locked"] == 0
    two.client.clear().result(timeout=60)  # its host memory is empty now
    two.store("a/model", tokens_of(20), chunks_of(20))
    two.wait_for(kept=5)
    assert [fetched(two, text) for text in range(21)] == [(5, 0)] * 21
    assert two.l2()["hits"] == 200
    two.register("b/model")
    assert fetched(two, 0, "b/model") == (0, 0)


def test_a_server_gets_no_wrong_chunk_from_a_damaged_store(tmp_path, servers):
    own = {"type": "fs", "base_path": f"{tmp_path}/own"}
    server, control = servers(ours(shared(tmp_path)), own)
    for text in range(10):
        for each in (server, control):
            each.store("a/model", tokens_of(text), chunks_of(text))
    server.wait_for(kept=50)
    until_whole(tmp_path / "own", files=50)
    flip(tmp_path, [chunks_of(text)[2].numpy().tobytes() for text in range(0, 10, 2)])
    for each in (server, control):
        each.client.clear().result(timeout=60)
    assert [fetched(control, text) for text in range(10)] == [(5, 1), (5, 0)] * 5  # so they would be seen
    assert [fetched(server, text) for text in range(10)] == [(2, 0), (5, 0)] * 5
    for text in range(0, 10, 2):  # the engine computes them again
        server.store("a/model", tokens_of(text), chunks_of(text))
    server.wait_for(kept=55)
    server.client.clear().result(timeout=60)
    assert [fetched(server, text) for text in range(10)] == [(5, 0)] * 10


def until_whole(folder, files):
    while len(list(folder.glob("*.data"))) < files:  # it is renamed when it is whole
        pass


def test_what_a_server_serialized_is_found_after_a_restart(tmp_path, servers):
    spec = ours(shared(tmp_path)) | {"serde": {"type": "fp8"}}
    (first,) = servers(spec)
    first.store("a/model", tokens_of(1), chunks_of(1))
    first.wait_for(kept=5)
    first.process.kill()
    (second,) = servers(spec)
    assert fetched(second, 1) == (5, 0)


def test_a_server_works_without_its_store_and_uses_it_again(tmp_path, servers):
    (server,) = servers(ours(shared(tmp_path)))
    server.store("a/model", tokens_of(0), chunks_of(0))
    server.wait_for(kept=5)
    server.client.clear().result(timeout=60)
    folder, away = tmp_path / "store", tmp_path / "away"
    with open_store(shared(tmp_path)) as other:
        folder.rename(away)
        folder.write_text("no folder")
        kill_owner(other)
    for text in range(1, 5):
        assert fetched(server, 0) == (0, 0)
        server.store("a/model", tokens_of(text), chunks_of(text))
        assert fetched(server, text) == (5, 0)  # LMCache's host memory has them
    assert server.l2()["state"] == "off" and server.l2()["kept"] == 5
    folder.unlink()
    away.rename(folder)
    until_s = time.monotonic() + 60
    while fetched(server, 0) != (5, 0):
        assert time.monotonic() < until_s, server.l2()
    assert server.l2()["state"] == "working"


def test_the_example_finds_its_chunks_again():
    command = [sys.executable, str(REPOSITORY / "examples" / "lmcache" / "restart.py")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "at first 0 of 10 chunks are there" in told
    assert "after a restart 10 of 10 chunks are there, 10 with the same bytes" in told
    assert "tiercel counted 10 hits" in told


# What is wrong is told


def test_what_is_wrong_with_the_configuration_is_told(store):
    with pytest.raises(ConfigError, match="store = None: name one, such as .store.: .shared"):
        make(ours(store) | {"adapter_params": {}})
    with pytest.raises(ConfigError, match="threads.*are no options of this adapter"):
        make(ours(store) | {"adapter_params": {"store": store, "threads": 3}})


def test_a_method_that_is_gone_is_an_error_and_a_new_one_is_told(store, monkeypatch, caplog):
    monkeypatch.setattr(L2AdapterInterface, "submit_move_task", lambda self: None, raising=False)
    with driven(ours(store)):
        assert "calls that are not answered: submit_move_task" in caplog.text
    monkeypatch.delattr(L2AdapterInterface, "submit_unlock")
    with pytest.raises(ConfigError, match="has no submit_unlock any more"):
        make(ours(store))


def test_versions_that_were_tested_are_this_one(store, caplog):
    assert version("lmcache") in integration.TESTED
    with driven(ours(store)):
        assert "calls that are not answered" not in caplog.text
