"""Goal: each kind of host pool that SGLang has gets back the pages that it gave, without a copy where its
layout allows it. Method: the host pools that SGLang's own code makes for the models of `sglang_cpu.py`, in
all of their layouts."""

from importlib.util import find_spec
from itertools import product

import pytest

if find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)

import torch  # noqa: E402
from sglang.srt.mem_cache import device_pool_info  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402

from tests.engines.sglang_cpu import MODELS, TYPE, fill, host_pool_of, server, store_of  # noqa: E402
from tiercel.integrations.named_pages import NamedPages  # noqa: E402
from tiercel.integrations.sglang import _Host  # noqa: E402

LAYOUTS = ["layer_first", "page_first", "page_first_direct"]
CASES = [
    (name, layout)
    for name, layout in product(MODELS, LAYOUTS)
    if not (name.startswith("recurrent") and layout == "layer_first")
]
"""SGLang's host pool of states has no layout with layers first."""


def keys_of(count):
    return [f"k{n:064x}" for n in range(count)]


def indices(pool, *pages):
    return torch.cat([torch.arange(page * pool.page_size, (page + 1) * pool.page_size) for page in pages])


def page_of(pool, number):
    """The bytes of a page, as SGLang itself copies it."""
    return pool.get_data_page(number * pool.page_size, flat=True).contiguous().view(torch.uint8).flatten()


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_each_pool_gets_its_pages_back(tmp_path, name, layout, monkeypatch):
    with server(store_of(tmp_path), MODELS[name], layout) as made:
        for pool_name, entry in made.entries.items():
            pool, keys = entry.host_pool, keys_of(4)
            if type(pool).__name__ == "LogicalHostPool":
                continue
            right = [page_of(pool, n).clone() for n in range(4)]
            beside = page_of(pool, 4).clone()
            assert len(right[0]) > 0 and not torch.equal(right[0], right[1])
            if layout != "layer_first":

                def refuse(*_, **__):
                    raise AssertionError("a copy")

                for call in ("get_data_page", "set_from_flat_data_page", "get_dummy_flat_data_page"):
                    monkeypatch.setattr(pool, call, refuse)
            put = PoolTransfer(pool_name, host_indices=indices(pool, 0, 1, 2, 3), keys=keys)
            assert made.storage.batch_set_v2([put]) == {pool_name: [True] * 4}
            get = PoolTransfer(pool_name, host_indices=indices(pool, 5, 7, 6, 3), keys=["none", *keys[1:]])
            assert made.storage.batch_get_v2([get]) == {pool_name: [False, True, True, True]}
            monkeypatch.undo()
            for place, number in ((7, 1), (6, 2), (3, 3), (0, 0)):
                assert torch.equal(page_of(pool, place), right[number]), (pool_name, place)
            assert torch.equal(page_of(pool, 4), beside)


def host_of(pages, name, pool):
    return _Host(pages, name, pool, {}, in_place=True)


@pytest.fixture
def pages(tmp_path):
    made = NamedPages(store_of(tmp_path), {})
    yield made
    made.close()


def test_keys_and_values_of_two_lengths_come_back(pages):
    """SGLang can not copy pages of this pool: they are read and written in place only."""
    pool = host_pool_of(
        MHATokenToKVPool(640, 16, TYPE, 2, 48, 3, "cpu", False, v_head_dim=32), "page_first_direct"
    )
    for buffer in pool.kv_buffer:
        fill(buffer)
    right = [buffer.view(torch.uint8)[2].clone() for buffer in pool.kv_buffer]
    host = host_of(pages, "kv", pool)
    assert host.put(["k"], indices(pool, 2)) == [True] == host.get(["k"], indices(pool, 30))
    for buffer, page in zip(pool.kv_buffer, right, strict=True):
        assert torch.equal(buffer.view(torch.uint8)[30], page)


def test_states_with_rows_beside_them_come_back(pages):
    """SGLang tells no places for these, so they are copied."""
    states = MambaStateBufferInfo(
        temporal=torch.zeros(2, 12, 3, 8), conv=(torch.zeros(2, 12, 5, dtype=TYPE),),
        extra_checkpoint_buffers=(torch.zeros(12, 5, dtype=torch.int32),),
    )  # fmt: skip
    pool = MambaPoolHost(states, 2.0, 0, device_capacity=12, layout="page_first_direct")
    for buffer in pool.kv_buffer:
        fill(buffer)
    right = page_of(pool, 2).clone()
    host = host_of(pages, "mamba", pool)
    assert host.pages.page_bytes == 2 * (3 * 8 * 4 + 5 * 2) + 5 * 4
    assert host.put(["k"], indices(pool, 2)) == [True] == host.get(["k"], indices(pool, 9))
    assert torch.equal(page_of(pool, 9), right)


@pytest.mark.skipif(not hasattr(device_pool_info, "MLASplitBuffers"), reason="comes with SGLang 0.5.23")
def test_keys_values_and_indexers_that_lie_apart_come_back(pages):
    """The layout of Ascend devices."""
    buffers = device_pool_info.MLASplitBuffers(
        k=torch.zeros(3, 8, 16, 1, 64, dtype=TYPE), v=torch.zeros(3, 8, 16, 1, 16, dtype=TYPE),
        index_k=torch.zeros(2, 8, 16, 1, 32, dtype=TYPE), index_scales=None, index_layer_indices=(0, 2),
        k_width=64, v_width=16, index_width=32,
    )  # fmt: skip
    about = device_pool_info.MLABufferInfo(
        buffers=buffers, data_ptrs=None, layer_indices=(0, 1, 2), device_layer_num=3, page_size=16,
        kv_lora_rank=64, qk_rope_head_dim=16, kv_cache_dim=80, dtype=TYPE, device=torch.device("cpu"),
    )  # fmt: skip
    pool = MLATokenToKVPoolHost(
        about, 2.0, 0, 16, "page_first_kv_split", device_capacity_tokens=128, start_layer=0, end_layer=3,
        target_layer_num=3,
    )  # fmt: skip
    memory = [pool.k_buffer, pool.v_buffer, pool.index_k_buffer]
    for buffer in memory:
        fill(buffer)
    right = [buffer[2].view(torch.uint8).clone() for buffer in memory]
    host = host_of(pages, "kv", pool)
    assert host.put(["k"], indices(pool, 2)) == [True] == host.get(["k"], indices(pool, 9))
    for buffer, page in zip(memory, right, strict=True):
        assert torch.equal(buffer[9].view(torch.uint8), page)


MADE = {
    *("kv", "swa", "mamba", "indexer", "draft", "draft_indexer", "draft_swa"),
    *(f"deepseek_v4_c{n}" for n in (1, 2, 4, 128)),
    *("deepseek_v4_c1_indexer", "deepseek_v4_c2_indexer", "deepseek_v4_c4_indexer"),
    *("deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state"),
}
NOT_MADE = {
    "deepseek_v4_c1_indexer_scale": "for ROCm and Ascend",
    "deepseek_v4_c2_indexer_scale": "for ROCm and Ascend",
    "deepseek_v4_c4_indexer_scale": "for ROCm and Ascend",
    "deepseek_v4_c4_rope": "for ROCm",
    "deepseek_v4_c128_rope": "for ROCm",
    "deepseek_v4_c128_state": "SGLang keeps it out of the host",
    "auxiliary_swa": "no strategy of SGLang's makes it",
}


def test_these_pools_are_all_that_sglang_has(tmp_path):
    seen = set()
    for name in MODELS:
        with server(store_of(tmp_path / name), MODELS[name]) as made:
            seen |= {each.value for each in made.entries}
    assert seen == MADE
    assert {each.value for each in PoolName} - MADE <= NOT_MADE.keys()
