"""Goal: SGLang's HiCache with our store has the pages that it had, and no wrong one. Method: SGLang's own
host pools, backend factory and file back end on a CPU, in an environment of their own (`make engines`)."""

import random
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

if find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)


import torch  # noqa: E402
from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheFile,
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402

from tests.engines.sglang_cpu import host_pool_of  # noqa: E402
from tiercel.errors import ConfigError  # noqa: E402
from tiercel.integrations import sglang as ours  # noqa: E402

PAGE, LAYERS, HEADS, DIM, PAGES = 16, 3, 2, 32, 40
LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
INJECTED = "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"
POOLS = {PoolName.KV: HEADS, PoolName.SWA: 1, PoolName.MAMBA: 4}
"""Heads of each: pools of three lengths. All are MHA pools: what they hold is bytes here."""


@pytest.fixture(autouse=True)
def published():
    """SGLang's configuration, as its processes have it."""
    with get_context().override_server_args(device="cpu"):
        yield


def config_of(folder, *, v1=False, **more):
    extra: dict[str, object] = {
        "backend_name": "tiercel",
        "module_path": "tiercel.integrations.sglang",
        "class_name": "HiCache",
    }
    extra |= {"store": f"file://{folder}/store?size=16MiB", "interface_v1": int(v1)}
    own: dict[str, object] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": False,
        "model_name": "a/model", "extra_config": extra,
    }  # fmt: skip
    return HiCacheStorageConfig(**(own | more))


def host_pool(heads=HEADS, layout="page_first", dtype=torch.bfloat16, value_dim=DIM):
    """As SGLang makes it for the pool of a device."""
    size = PAGES // 2 * PAGE
    device = MHATokenToKVPool(size, PAGE, dtype, heads, DIM, LAYERS, "cpu", False, v_head_dim=value_dim)
    return host_pool_of(device, layout)


def filled(pool, seed):
    chance, buffer = torch.Generator().manual_seed(seed), pool.kv_buffer
    count = buffer.numel() * buffer.element_size()
    some = torch.randint(256, (count,), generator=chance, dtype=torch.uint8)
    buffer.copy_(some.view(buffer.dtype).view(buffer.shape))
    return pool


def page_of(pool, number):
    return pool.get_data_page(number * PAGE, flat=True).view(torch.uint8)


def indices(*numbers):
    return torch.cat([torch.arange(number * PAGE, (number + 1) * PAGE) for number in numbers])


def registered(storage, pools):
    storage.register_mem_pool_host(pools[PoolName.KV])
    for name, pool in pools.items():
        storage.register_mem_host_pool_v2(pool, name)
    return storage


def opened(folder, pools, **how):
    """As SGLang's controller makes it."""
    config = config_of(folder, **how)
    return registered(StorageBackendFactory.create_backend("dynamic", config, pools[PoolName.KV]), pools)


def keys_of(count, prefix="k"):
    return [f"{prefix}{n:064x}" for n in range(count)]


def close(storage):
    getattr(storage, "_backend", storage).close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_a_host_pool_come_back_after_a_restart(tmp_path, layout):
    keys = keys_of(20)
    first = {PoolName.KV: filled(host_pool(layout=layout), 1)}
    storage = opened(tmp_path, first, v1=True)
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys, indices(*range(20))) == [True] * 20
    close(storage)
    second = {PoolName.KV: filled(host_pool(layout=layout), 2)}
    storage = opened(tmp_path, second, v1=True)
    assert (
        storage.batch_exists([*keys, "none"]) == 20 and storage.exists(keys[3]) and not storage.exists("none")
    )
    places = list(range(39, 19, -1))
    assert storage.batch_get_v1(["none", *keys], indices(0, *places)) == [False, *[True] * 20]
    for number, place in enumerate(places):
        assert torch.equal(page_of(second[PoolName.KV], place), page_of(first[PoolName.KV], number))
    close(storage)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_in_tensors_come_back(tmp_path, layout):
    """What SGLang calls by default."""
    pool = filled(host_pool(layout=layout), 1)
    storage, keys = opened(tmp_path, {PoolName.KV: pool}), keys_of(5)
    assert storage.batch_set(keys, [pool.get_data_page(n * PAGE) for n in range(5)]) is True
    assert storage.batch_exists([*keys, "none"]) == 5
    into = [pool.get_dummy_flat_data_page() for _ in range(6)]
    found = storage.batch_get([*keys, "none"], into)
    assert found[5] is None
    for number in range(5):
        assert torch.equal(found[number].view(torch.uint8), page_of(pool, number))
    assert storage.get(keys[0], pool.get_dummy_flat_data_page()) is not None and storage.set(keys[0], into[0])
    close(storage)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_nothing_is_copied_where_a_page_lies_together(tmp_path, monkeypatch, layout):
    pool = filled(host_pool(layout=layout), 1)
    storage, keys = opened(tmp_path, {PoolName.KV: pool}, v1=True), keys_of(4)

    def refuse(*_, **__):
        raise AssertionError("a copy")

    for name in ("get_data_page", "set_from_flat_data_page", "get_dummy_flat_data_page"):
        monkeypatch.setattr(pool, name, refuse)
    assert all(storage.batch_set_v1(keys, indices(*range(4))))
    assert all(storage.batch_get_v1(keys, indices(*range(4, 8))))
    monkeypatch.undo()
    assert all(torch.equal(page_of(pool, n), page_of(pool, n + 4)) for n in range(4))
    close(storage)


@pytest.mark.parametrize("seed", range(20))
def test_hybrid_pools_have_the_answers_of_sglangs_file_back_end(tmp_path, seed, monkeypatch):
    chance, keys = random.Random(seed), keys_of(12)
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "theirs"))
    (tmp_path / "theirs").mkdir()
    pools = {name: filled(host_pool(heads), seed) for name, heads in POOLS.items()}
    mine = opened(tmp_path, pools)
    theirs = registered(HiCacheFile(config_of(tmp_path), str(tmp_path / "theirs")), pools)
    for name in POOLS:
        some = [n for n in range(12) if chance.random() < 0.8 or (name is PoolName.KV and n < 6)]
        transfer = PoolTransfer(name, host_indices=indices(*some), keys=[keys[n] for n in some])
        assert mine.batch_set_v2([transfer]) == theirs.batch_set_v2([transfer]) == {name: [True] * len(some)}
    for policies in product((PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES), repeat=2):
        asked = [
            PoolTransfer(name, keys=keys[: chance.randrange(1, 4)], hit_policy=policy)
            for name, policy in zip((PoolName.SWA, PoolName.MAMBA), policies, strict=True)
        ]
        some = keys[: chance.randrange(1, 13)]
        a, b = mine.batch_exists_v2(some, asked), theirs.batch_exists_v2(some, asked)
        assert a.kv_hit_pages == max(a.restorable_prefix_pages, default=0)
        if (
            b.restorable_prefix_pages is None
        ):  # 0.5.22 tells the least of the pools, which another may not have
            assert a.kv_hit_pages <= b.kv_hit_pages
            continue
        assert (a.kv_hit_pages, a.restorable_prefix_pages) == (b.kv_hit_pages, b.restorable_prefix_pages)
        assert not a.kv_hit_pages or a.extra_pool_hit_pages == b.extra_pool_hit_pages
    for name, pool in pools.items():
        before = [page_of(pool, n).clone() for n in range(12)]
        transfer = PoolTransfer(name, host_indices=indices(*range(20, 32)), keys=keys)
        found = mine.batch_get_v2([transfer])
        assert found == theirs.batch_get_v2([transfer])
        mine.batch_get_v2([transfer])
        assert all(torch.equal(page_of(pool, 20 + n), before[n]) for n in range(12) if found[name][n])
    close(mine)


def test_the_leading_groups_of_blocks_are_told_and_shorten_nothing(tmp_path):
    pools = {PoolName.KV: filled(host_pool(), 1), PoolName.DEEPSEEK_V4_C4: filled(host_pool(1), 2)}
    storage, keys = opened(tmp_path, pools), keys_of(8)
    kv = PoolTransfer(PoolName.KV, host_indices=indices(*range(8)), keys=keys)
    blocks = keys_of(6, "block")
    some = PoolTransfer(
        PoolName.DEEPSEEK_V4_C4, host_indices=indices(0, 1, 2, 3, 5), keys=[*blocks[:4], blocks[5]]
    )
    storage.batch_set_v2([kv, some])
    asked = PoolTransfer(
        PoolName.DEEPSEEK_V4_C4,
        keys=blocks,
        hit_policy=PoolHitPolicy.BLOCK_GROUPS,
        block_pages=2,
        group_pages=2,
    )
    found = storage.batch_exists_v2(keys, [asked])
    assert found.kv_hit_pages == 8 and found.restorable_prefix_pages == list(range(1, 9))
    assert found.extra_pool_hit_pages == {PoolName.KV: 8, PoolName.DEEPSEEK_V4_C4: 4}
    close(storage)


def flip(file: Path, page: bytes, chance: random.Random) -> bool:
    """Change one bit of this page in a file, if the page is there."""
    found = bytearray(file.read_bytes())
    at = found.find(page[:64])
    if at >= 0:
        found[at + chance.randrange(len(page) // 2)] ^= 1
        file.write_bytes(found)
    return at >= 0


def test_a_flipped_byte_is_a_miss_here_and_a_wrong_page_in_sglangs_file_back_end(tmp_path, monkeypatch):
    chance, keys = random.Random(1), keys_of(20)
    (tmp_path / "theirs").mkdir()
    pool = filled(host_pool(), 1)
    pools = {PoolName.KV: pool}
    right = [page_of(pool, n).clone() for n in range(20)]
    mine = opened(tmp_path, pools)
    theirs = registered(HiCacheFile(config_of(tmp_path), str(tmp_path / "theirs")), pools)
    transfer = PoolTransfer(PoolName.KV, host_indices=indices(*range(20)), keys=keys)
    for each in (mine, theirs):
        each.batch_set_v2([transfer])
    for page, folder in product(right, ("store", "theirs")):
        files = [file for file in (tmp_path / folder).iterdir() if file.suffix in (".bin", ".tcs")]
        assert any(flip(file, page.numpy().tobytes(), chance) for file in files)
    wrong = {}
    for storage, name in ((mine, "ours"), (theirs, "theirs")):
        found = storage.batch_get_v2([transfer])[PoolName.KV]
        wrong[name] = sum(hit and not torch.equal(page_of(pool, n), right[n]) for n, hit in enumerate(found))
        filled(pool, 1)
    assert wrong == {"ours": 0, "theirs": 20} and mine.stats()["damaged"] == 20
    close(mine)


@pytest.mark.skipif(not hasattr(envs, INJECTED), reason="comes with SGLang 0.5.23")
def test_failures_and_delays_that_sglang_injects_cost_hits_only(tmp_path):
    """Three of ten calls answer that they failed, each after up to 2 ms; four threads call."""
    pool = filled(host_pool(), 1)
    keys, right = keys_of(20), [page_of(pool, n).clone() for n in range(20)]
    with (
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.3),
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(0.002),
    ):
        storage = opened(tmp_path, {PoolName.KV: pool}, v1=True)
    assert type(storage).__name__ == "HiCacheStorageFailureInjector"

    def act(thread):
        chance, hits, failures = random.Random(thread), 0, 0
        for _ in range(60):
            n = chance.randrange(thread * 5, thread * 5 + 5)
            if storage.batch_exists([keys[n]]) == 1:
                if storage.batch_get_v1([keys[n]], indices(20 + n)) == [True]:
                    assert torch.equal(page_of(pool, 20 + n), right[n])
                    hits += 1
                else:
                    failures += 1
            else:
                storage.batch_set_v1([keys[n]], indices(n))
        return hits, failures

    with ThreadPoolExecutor(4) as crew:
        hits, failures = map(sum, zip(*crew.map(act, range(4)), strict=True))
    assert hits > 50 and failures > 5
    close(storage)


def test_pages_of_another_model_rank_layout_or_type_are_not_found(tmp_path):
    keys, pool = keys_of(3), filled(host_pool(), 1)
    storage = opened(tmp_path, {PoolName.KV: pool}, v1=True)
    storage.batch_set_v1(keys, indices(0, 1, 2))
    close(storage)
    others = [
        ({PoolName.KV: host_pool()}, {"model_name": "b/model"}),
        ({PoolName.KV: host_pool()}, {"tp_rank": 1, "tp_size": 2}),
        ({PoolName.KV: host_pool()}, {"pp_rank": 1, "pp_size": 2}),
        ({PoolName.KV: host_pool(layout="page_first_direct")}, {}),
        ({PoolName.KV: host_pool(dtype=torch.float16)}, {}),
    ]
    for pools, more in others:
        storage = opened(tmp_path, pools, v1=True, **more)
        assert storage.batch_exists(keys) == 0, more
        close(storage)
    storage = opened(tmp_path, {PoolName.KV: host_pool()}, v1=True)
    assert storage.batch_exists(keys) == 3
    storage.clear()
    assert storage.batch_exists(keys) == 0
    close(storage)


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "fp8_e5m2"},
        {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "a/draft"},
    ],
)
def test_pages_of_another_type_of_8_bits_or_beside_another_draft_are_not_found(tmp_path, settings):
    """Nothing of it is in the host pool: both types are `uint8` there."""
    keys, pools = keys_of(3), {PoolName.KV: filled(host_pool(dtype=torch.uint8), 1)}
    with get_context().override_server_args(device="cpu", kv_cache_dtype="fp8_e4m3"):
        storage = opened(tmp_path, pools, v1=True)
        storage.batch_set_v1(keys, indices(0, 1, 2))
        assert storage.batch_exists(keys) == 3
        close(storage)
    with get_context().override_server_args(device="cpu", **({"kv_cache_dtype": "fp8_e4m3"} | settings)):
        storage = opened(tmp_path, pools, v1=True)
        assert storage.batch_exists(keys) == 0
        close(storage)


def test_pages_of_another_version_of_sglang_are_not_found(tmp_path, monkeypatch):
    keys, pools = keys_of(3), {PoolName.KV: filled(host_pool(), 1)}
    for version, found in (("0.5.99", 0), (ours.VERSION, 0), ("0.5.99", 3)):
        monkeypatch.setattr(ours, "VERSION", version)
        storage = opened(tmp_path, pools, v1=True)
        assert storage.batch_exists(keys) == found
        storage.batch_set_v1(keys, indices(0, 1, 2))
        close(storage)


def test_pages_in_tensors_and_pages_in_place_are_the_same(tmp_path):
    keys, pool = keys_of(3), filled(host_pool(), 1)
    for written in (False, True):
        storage = opened(tmp_path / str(written), {PoolName.KV: pool}, v1=written)
        storage.batch_set_v2([PoolTransfer(PoolName.KV, host_indices=indices(0, 1, 2), keys=keys)])
        close(storage)
        storage = opened(tmp_path / str(written), {PoolName.KV: pool}, v1=not written)
        transfer = PoolTransfer(PoolName.KV, host_indices=indices(7, 8, 9), keys=keys)
        assert storage.batch_get_v2([transfer]) == {PoolName.KV: [True] * 3}
        close(storage)
        assert all(torch.equal(page_of(pool, n + 7), page_of(pool, n)) for n in range(3))
        filled(pool, 2)


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_indices_that_are_not_those_of_the_pages_move_nothing(tmp_path, layout, caplog):
    """As in SGLang's file back end. A step that is guessed would put pages into wrong places."""
    keys, pool = keys_of(2), filled(host_pool(layout=layout), 1)
    storage = opened(tmp_path, {PoolName.KV: pool}, v1=True)
    storage.batch_set_v1(keys, indices(0, 1))
    before = pool.kv_buffer.view(torch.uint8).clone()
    for wrong in (indices(4, 5, 6, 7), indices(4), indices(4, 5)[:-1], None):
        transfer = PoolTransfer(PoolName.KV, host_indices=wrong, keys=keys)
        for call in (storage.batch_get_v2, storage.batch_set_v2):
            caplog.clear()
            assert call([transfer]) == {PoolName.KV: [False, False]}
            assert "of kv are not those of 2 pages" in caplog.text
    assert torch.equal(pool.kv_buffer.view(torch.uint8), before)
    assert storage.batch_get_v1(keys, indices(4, 5)) == [True, True]
    assert torch.equal(page_of(pool, 4), page_of(pool, 0)) and torch.equal(page_of(pool, 5), page_of(pool, 1))
    close(storage)


def test_pages_that_sglang_can_not_copy_are_refused_at_the_start(tmp_path):
    """K and V of two lengths can be read in place only."""
    pools = {PoolName.KV: host_pool(value_dim=DIM // 2)}
    storage = StorageBackendFactory.create_backend("dynamic", config_of(tmp_path), None)
    with pytest.raises(ConfigError, match='can not copy pages of kv.*"interface_v1": 1 may help'):
        registered(storage, pools)
    close(storage)
    close(opened(tmp_path, pools, v1=True))


def test_what_is_wrong_with_the_configuration_is_told(tmp_path):
    config = config_of(tmp_path)
    config.extra_config.pop("store")
    with pytest.raises(ConfigError, match="store = None: name one in the extra config"):
        StorageBackendFactory.create_backend("dynamic", config, None)


def test_a_method_that_is_gone_is_an_error_and_a_new_one_is_told(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(HiCacheStorage, "batch_get_v3", lambda self: None, raising=False)
    close(opened(tmp_path, {PoolName.KV: host_pool()}))
    assert "calls that are not answered: batch_get_v3" in caplog.text
    monkeypatch.delattr(HiCacheStorage, "batch_exists_v2")
    with pytest.raises(ConfigError, match="has no batch_exists_v2 any more"):
        opened(tmp_path, {PoolName.KV: host_pool()})


def test_versions_that_were_tested_are_this_one():
    from importlib.metadata import version

    assert version("sglang") in ours.TESTED


@contextmanager
def controller(folder, pool, *, v1):
    """SGLang's controller over a host pool, with its threads. What it asks of a device is standing in."""
    device = SimpleNamespace(
        device="cpu", layer_num=LAYERS, register_layer_transfer_counter=lambda counter: None
    )
    sizes = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
    with get_parallel().override(**sizes):
        made = HiCacheController(
            SimpleNamespace(get_kvcache=lambda: device), pool, PAGE, None, threading.Event(),
            storage_backend="dynamic", model_name="a/model", prefetch_threshold=PAGE,
            storage_backend_extra_config=config_of(folder, v1=v1).extra_config,
        )  # fmt: skip
        try:
            yield made
        finally:
            made.detach_storage_backend()


@pytest.mark.parametrize("v1", [False, True], ids=["tensors", "in place"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sglangs_controller_finds_what_it_saved_before_a_restart(tmp_path, layout, v1):
    tokens = array("q", [random.Random(n).randrange(1000) for n in range(30 * PAGE)])
    keys = get_storage_hash_str(RadixKey(tokens), None, page_size=PAGE)
    first, second = filled(host_pool(layout=layout), 1), filled(host_pool(layout=layout), 2)
    with controller(tmp_path, first, v1=v1) as saving:
        saving.write_storage(indices(*range(25)), tokens[: 25 * PAGE], hash_value=keys[:25])
        assert saving.ack_backup_queue.get(timeout=60).completed_tokens == 25 * PAGE
    with controller(tmp_path, second, v1=v1) as loading:
        loading.prefetch("request", RadixKey(tokens))
        found = loading.prefetch_hit_queue.get(timeout=60)
        assert found.storage_hit_count == 25 * PAGE and found.hash_value == keys[:25]
        found.host_indices = indices(*range(39, 14, -1))
        loading.prefetch_buffer.put(found)
        assert loading.ack_prefetch_queue.get(timeout=60).completed_tokens == 25 * PAGE
    for number in range(25):
        assert torch.equal(page_of(second, 39 - number), page_of(first, number))
