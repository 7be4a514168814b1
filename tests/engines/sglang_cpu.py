"""SGLang's caches on a CPU: its device pools, allocators, host pools, controller and tree, made by its own
code.

Two things stand in for a device, because SGLang has them for accelerators only: memory is not pinned, and
torch copies rows between device and host where a kernel would. Delays, failures and threads are SGLang's own.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (
    build_hicache_draft_sidecars,
    build_kv_host_pool,
)
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context, get_parallel

LAYERS, HEADS, DIM, PAGES = 3, 2, 32, 40
WINDOW = 32
TYPE = torch.bfloat16


# What stands in for a device


def copy(src_layers, dst_layers, src_indices, dst_indices, page_size):  # noqa: ARG001
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def copy_to_pages(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """Rows of all layers into pages that have the layers inside."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // layers][:, number % layers]
        pages = source.view(-1, page_size, *source.shape[1:])[src_indices[::page_size] // page_size]
        target[dst_indices[::page_size] // page_size] = pages.view(-1, *target.shape[1:])


def copy_from_pages(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        pages = target.view(-1, page_size, *target.shape[1:])
        found = source[:, layer_id][src_indices[::page_size] // page_size]
        pages[dst_indices[::page_size] // page_size] = found.view(-1, *pages.shape[1:])


HostKVCache.pin_memory = property(lambda self: False, lambda self, value: None)
for room in ("pool_host.mha", "pool_host.mla", "pool_host.mamba", "pool_host.dsa", "memory_pool_host"):
    module: Any = import_module(f"sglang.srt.mem_cache.{room}")
    module.transfer_kv_direct = copy
    module.transfer_kv_all_layer_direct_lf_pf = copy_to_pages
    module.transfer_kv_per_layer_direct_pf_lf = copy_from_pages


# Models


@dataclass
class Model:
    """What a kind of attention keeps on the device."""

    pool: Any
    allocator: Any
    page: int = 16
    requests: Any = None
    components: tuple[Any, ...] = (ComponentType.FULL,)
    more: dict[str, Any] = field(default_factory=dict)
    draft: Any = None

    def alloc(self, count: int) -> torch.Tensor:
        """Whole pages. What SGLang calls for parts of pages is a kernel."""
        if ComponentType.SWA not in self.components:
            return self.allocator.alloc(count)
        full = self.allocator.full_attn_allocator.alloc(count)
        self.allocator.set_full_to_swa_mapping(full, self.allocator.swa_attn_allocator.alloc(count))
        return full

    def params(self) -> CacheInitParams:
        requests = self.requests or ReqToTokenPool(8, 4096, "cpu", False)
        return CacheInitParams(
            disable=False, req_to_token_pool=requests, token_to_kv_pool_allocator=self.allocator,
            page_size=self.page, tree_components=self.components, **self.more,
        )  # fmt: skip


def paged(pool, page=16, **more):
    return Model(
        pool, PagedTokenToKVPoolAllocator(PAGES * page, page, TYPE, "cpu", pool, False), page, **more
    )


def mha(value_dim=DIM):
    return paged(
        MHATokenToKVPool(PAGES * 16, 16, TYPE, HEADS, DIM, LAYERS, "cpu", False, v_head_dim=value_dim)
    )


def mla():
    return paged(MLATokenToKVPool(PAGES * 16, 16, TYPE, 64, 16, LAYERS, "cpu", False))


def sparse():
    """MLA with an indexer, as in DeepSeek V3.2 and GLM-5."""
    return paged(DSATokenToKVPool(PAGES * 64, 64, 64, TYPE, 16, LAYERS, "cpu", 128, False, 80), page=64)


def windows():
    """Two layers of a window, one of full attention."""
    size = PAGES * 16
    pool = SWAKVPool(size, size, 16, TYPE, HEADS, DIM, [0, 1], [2], "cpu")
    return Model(
        pool, SWATokenToKVPoolAllocator(size, size, 16, TYPE, "cpu", pool, False),
        components=(ComponentType.FULL, ComponentType.SWA), more={"sliding_window_size": WINDOW},
    )  # fmt: skip


def recurrent(**attention):
    """Two layers with a state, one of full attention."""
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=64,
        n_groups=1,
        num_heads=2,
        head_dim=32,
        state_size=16,
        conv_kernel=4,
    )
    requests = HybridReqToTokenPool(
        size=8, mamba_size=16, mamba_spec_state_size=8, max_context_len=4096, device="cpu",
        enable_memory_saver=False, cache_params=Mamba2CacheParams(shape=shape, layers=[0, 1]),
        mamba_layer_ids=[0, 1], enable_mamba_extra_buffer=True,
    )  # fmt: skip
    pool = HybridLinearKVPool(PAGES * 16, TYPE, 16, HEADS, DIM, [2], "cpu", requests.mamba_pool, **attention)
    more = {"enable_mamba_extra_buffer": True, "chunked_prefill_size": 64}
    return paged(pool, requests=requests, components=(ComponentType.FULL, ComponentType.MAMBA), more=more)


def recurrent_mla():
    """States, and KV that all ranks have, as in Kimi Linear."""
    return recurrent(use_mla=True, kv_lora_rank=64, qk_rope_head_dim=16)


def deepseek_v4():
    """Layers compressed by 1, 2, 4 and 128, with windows, indexers and states."""
    page, kind, ratios = 256, torch.float8_e4m3fn, [0, 1, 2, 4, 128]
    pool = DeepSeekV4TokenToKVPool(
        max_num_reqs=4, swa_size=page * 12, c4_size=page * 3, c128_size=96, c4_state_pool_size=page,
        c128_state_pool_size=page, page_size=page, swa_page_size=page, dtype=kind,
        c4_state_dtype=torch.float32, c128_state_dtype=torch.float32, qk_nope_head_dim=448,
        qk_rope_head_dim=64, indexer_head_dim=128, layer_num=5, device="cpu", enable_memory_saver=False,
        compression_ratios=ratios, start_layer=0, end_layer=5, kv_source_layers=(1, 2), full_size=page * 12,
    )  # fmt: skip
    return Model(
        pool, SWATokenToKVPoolAllocator(page * 12, page * 12, page, kind, "cpu", pool, False), page,
        components=(ComponentType.FULL, ComponentType.SWA), more={"sliding_window_size": 128},
    )  # fmt: skip


def drafted(model, draft):
    """A draft model's KV beside that of the model."""
    model.draft = draft
    return model


def mha_with_draft():
    return drafted(mha(), MHATokenToKVPool(PAGES * 16, 16, TYPE, 1, DIM, 1, "cpu", False))


def mla_with_heads():
    """A draft with heads beside a model without any."""
    return drafted(mla(), MHATokenToKVPool(PAGES * 16, 16, TYPE, 1, DIM, 1, "cpu", False))


def sparse_with_draft():
    draft = DSATokenToKVPool(PAGES * 64, 64, 64, TYPE, 16, 1, "cpu", 128, False, 80)
    return drafted(sparse(), draft)


def windows_with_draft():
    size = PAGES * 16
    return drafted(windows(), SWAKVPool(size, size, 16, TYPE, HEADS, DIM, [0], [], "cpu"))


MODELS = {
    each.__name__: each
    for each in (
        *(mha, mla, sparse, windows, recurrent, recurrent_mla, deepseek_v4),
        *(mha_with_draft, mla_with_heads, sparse_with_draft, windows_with_draft),
    )
}


# A server's cache


@contextmanager
def published(store: str, layout: str, **more: Any) -> Iterator[Any]:
    """SGLang's configuration, as the command line would set it."""
    extra = {
        "backend_name": "tiercel", "module_path": "tiercel.integrations.sglang", "class_name": "HiCache",
        "interface_v1": 1, "prefetch_threshold": 16, "store": store,
    }  # fmt: skip
    settings = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra | more.pop("extra", {})),
        "hicache_mem_layout": layout, "hicache_io_backend": "kernel" if layout == "page_first" else "direct",
        "hicache_write_policy": "write_through", "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_ratio": 2.0, "hicache_size": 0, "served_model_name": "a/model", "device": "cpu",
        "_mamba_cache_chunk_size": 16,
    }  # fmt: skip
    with get_context().override_server_args(**(settings | more)) as arguments:
        yield arguments


@contextmanager
def rank_of(rank: int = 0, size: int = 1) -> Iterator[None]:
    sizes = {"tp_size": size, "attn_tp_size": size, "moe_tp_size": size, "pp_size": 1, "attn_dcp_size": 1}
    ranks = {"tp_rank": rank, "attn_tp_rank": rank, "pp_rank": 0, "attn_dcp_rank": 0}
    with get_parallel().override(**sizes, **ranks):
        yield


def host_pool_of(device: Any, layout: str) -> Any:
    """The host pool that SGLang makes for a pool of the device."""
    with published("", layout):
        return build_kv_host_pool(kv_pool=device, page_size=device.page_size)


class Server:
    """SGLang's tree over its controller, its host pools and our store."""

    def __init__(self, model: Model, arguments: Any, *, group: Any = None) -> None:
        self.model = model
        params = model.params()
        params.tp_cache_group = group
        self.tree = UnifiedRadixCache(params)
        self.tree.init_hicache(arguments, params)
        self.controller = self.tree.cache_controller
        if model.draft is not None:
            made = build_hicache_draft_sidecars(draft_device_pools=(model.draft,), tree_cache=self.tree)
            for spec, entry in zip(*made, strict=True):
                self.tree.register_sidecar_pool(spec, entry)
        self.entries = {entry.name: entry for entry in self.tree.host_pool_group.entries}
        self.states = params.req_to_token_pool
        self.scratch()

    @property
    def storage(self) -> Any:
        return self.controller.storage_backend

    def scratch(self) -> None:
        """Other bytes in all memory of device and host: what is right now was copied there later."""
        for name, entry in self.entries.items():
            for attribute in ("kv_buffer", "index_k_with_scale_buffer"):
                buffers = getattr(entry.host_pool, attribute, None)
                for tensor in [buffers] if isinstance(buffers, torch.Tensor) else buffers or []:
                    fill(tensor)
            for tensor, _ in self.rows(name):
                fill(tensor)

    def rows(self, name: PoolName) -> list[tuple[torch.Tensor, int]]:
        """The device memory of a pool, and how many rows of it are a page."""
        entry, page = self.entries[name], self.model.page
        host, device = entry.host_pool, entry.device_pool
        kind = type(host).__name__
        if kind == "LogicalHostPool":
            return []
        if kind == "MambaPoolHost":
            states = [host.buffer_info.temporal, *host.buffer_info.conv]
            return [(layer, 1) for each in states for layer in each.unbind(0)]
        if kind == "DSAIndexerPoolHost":
            return [(each, 1) for each in device.index_k_with_scale_buffer]
        if kind == "DeepSeekV4PagedHostPool":
            return [(each, 1) for each in host.device_buffers]
        if kind == "DeepSeekV4StateHostPool":
            return [(each, 1) for each in host.device_page_views]
        if kind == "MLATokenToKVPoolHost":
            return [(each, page) for each in device.kv_buffer]
        return [(each, page) for each in (*device.k_buffer, *device.v_buffer)]

    def places(self, name: PoolName, full: torch.Tensor, states: torch.Tensor | None) -> list[int]:
        """Where the pages of a prefix are on the device."""
        if name == PoolName.MAMBA:
            return states.tolist()
        if self.is_window(name):
            full = self.model.allocator.translate_loc_from_full_to_swa(full)
        return [index // self.model.page for index in full[:: self.model.page].tolist()]

    def is_window(self, name: PoolName) -> bool:
        source = next((each for each in self.tree.sidecar_pool_specs if each.pool_name == name), None)
        return PoolName.SWA in (name, source and source.indices_from_pool)

    def ends(self, tokens: array, places: list[int]) -> Iterator[tuple[array, int]]:
        """The prefix that each page ends, and where that page is. A state has one for the whole."""
        first = len(tokens) - (len(places) - 1) * self.model.page
        for number, place in enumerate(places):
            yield tokens[: first + number * self.model.page], place

    def right(self, name: PoolName, prefix: array) -> Iterator[tuple[torch.Tensor, int, torch.Tensor]]:
        """What the page that ends this prefix holds: as with real KV, it depends on the whole prefix. For
        each memory of the pool on the device: the memory, its rows in a page, their bytes."""
        config = self.controller.storage_config
        same = config.is_mla_model and name != PoolName.MAMBA  # what all ranks compute
        rank = 0 if same else config.tp_rank
        chance = torch.Generator().manual_seed(crc32(name.value.encode() + prefix.tobytes(), rank))
        for memory, rows in self.rows(name):
            size = memory[:rows].numel() * memory.element_size()
            yield memory, rows, torch.randint(256, (size,), generator=chance, dtype=torch.uint8)

    def compute(self, tokens: array, full: torch.Tensor, states: torch.Tensor | None) -> None:
        """As a model would: write the pages of these tokens on the device."""
        for name in self.entries:
            for prefix, place in self.ends(tokens, self.places(name, full, states)):
                for memory, rows, right in self.right(name, prefix):
                    into = memory[place * rows : (place + 1) * rows]
                    into.copy_(right.view(into.dtype).view(into.shape))

    def wrong(self, tokens: array, node: Any) -> list[str]:
        """Pages of this prefix on the device that are not what computing them would give. Of a window the
        last ones count: no later token looks at others."""
        full, states, found = self.tree.path_device_indices(node), None, []
        if PoolName.MAMBA in self.entries:
            states = self.tree.tree_core.get_component_device_value(node, ComponentType.MAMBA)
        for name in self.entries:
            places = self.places(name, full, states)
            if self.is_window(name):
                places = places[-max(1, self.model.more["sliding_window_size"] // self.model.page) :]
            for prefix, place in self.ends(tokens, places):
                for memory, rows, right in self.right(name, prefix):
                    there = memory[place * rows : (place + 1) * rows].contiguous().view(torch.uint8)
                    if not torch.equal(there.flatten(), right):
                        found.append(f"{name} of {len(prefix)} tokens")
        return found

    def until(self, done: Any) -> None:
        """Run the scheduler's part of the work until it is done."""
        end = monotonic() + 60
        while not done():
            assert monotonic() < end, "SGLang did not come to an end"
            self.tree.check_hicache_events()
            sleep(0.002)

    def save(self, tokens: array) -> None:
        """A request ends: its pages go to the tree, the host and the store."""
        full, states = self.model.alloc(len(tokens)), None
        if PoolName.MAMBA in self.entries:
            states = self.states.mamba_allocator.alloc(1)
        self.compute(tokens, full, states)
        result = self.tree.insert(InsertParams(key=RadixKey(tokens), value=full, mamba_value=states))
        if result.mamba_exist:
            self.states.mamba_allocator.free(states)
        self.until(lambda: not (self.tree.ongoing_write_through or self.tree.ongoing_backup))

    def forget(self) -> None:
        """Device and host have nothing any more."""
        self.tree.reset()
        self.model.allocator.clear()
        if PoolName.MAMBA in self.entries:
            self.states.mamba_allocator.clear()
        self.scratch()

    def load(self, tokens: array) -> int:
        """A request comes: its prefix is fetched from the store to the host, then to the device. Returns how
        many of its tokens are there then; they are right."""
        key, request = RadixKey(tokens), CacheRequestHandle("a request", 0)
        found = self.tree.match_prefix(MatchPrefixParams(key=key))
        seen = found.device_prefix_len + found.host_hit_length
        self.tree.prefetch_from_storage(
            request, found.last_host_node, tokens[seen:],
            self.tree.get_last_hash_value(found.last_host_node), matched_prefix_tokens=tokens[:seen],
        )  # fmt: skip
        self.until(lambda: self.tree.check_prefetch_progress(request))
        found = self.tree.match_prefix(MatchPrefixParams(key=key))
        asked = SimpleNamespace(
            rid=request.rid, last_node=found.last_device_node, extra_key=None,
            swa_host_hit_length=found.swa_host_hit_length, mamba_host_hit_length=found.mamba_host_hit_length,
            kv=SimpleNamespace(holds_mamba=False, mamba_pool_idx=None),
        )  # fmt: skip
        count, node = self.tree.init_load_back(
            InitLoadBackParams(found.best_match_node, found.host_hit_length, req=asked)
        )
        self.tree.ready_to_load_host_cache()
        self.until(lambda: not self.tree.ongoing_load_back)
        count += found.device_prefix_len
        assert not count or self.wrong(tokens[:count], node) == []
        return count

    def stop(self) -> None:
        self.controller.detach_storage_backend()


@contextmanager
def server(
    store: str,
    make: Callable[[], Model],
    layout: str = "page_first_direct",
    *,
    rank: int = 0,
    ranks: int = 1,
    group=None,
    **more,
) -> Iterator[Server]:
    with published(store, layout, **more) as arguments, rank_of(rank, ranks):
        made = Server(make(), arguments, group=group)
        try:
            yield made
        finally:
            made.stop()


def fill(tensor: torch.Tensor) -> None:
    """Bytes by chance."""
    count = tensor.numel() * tensor.element_size()
    some = torch.randint(256, (count,), dtype=torch.uint8)
    tensor.copy_(some.view(tensor.dtype).view(tensor.shape))


def store_of(folder: Path, scheme: str = "file") -> str:
    return f"{scheme}://{folder}/store?size=64MiB"
