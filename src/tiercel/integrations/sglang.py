"""Our stores as the storage of SGLang's HiCache.

    python -m sglang.launch_server … --enable-hierarchical-cache --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "tiercel", "class_name": "HiCache",
            "module_path": "tiercel.integrations.sglang", "store": "shared:///var/cache/kv?size=200GiB"}'

SGLang names a page by a hash of its whole prefix. What else decides the bytes of a page is part of its
record: model, ranks, layout, type and shape of the pool. With `"interface_v1": 1` and a layout that keeps a
page in one piece, or one for K and one for V, pages are read into SGLang's host memory and written from it
without a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from tiercel.errors import ConfigError
from tiercel.integrations.hooks import check_hooks
from tiercel.integrations.named_pages import NamedPages, Page, Pool

TESTED = ("0.5.23",)
ONE_PIECE = ("page_first", "page_first_direct", "page_head")
"""Layouts in which a page of K, and of V, lies together."""
SHAPE = (
    *("layer_num", "head_num", "head_dim", "v_head_dim", "head_group_num", "kv_cache_dim"),
    *("size_per_token", "page_size", "start_layer", "end_layer", "storage_format_tag"),
)
"""What a host pool tells of the bytes of its pages, as far as it has it."""


class HiCache(HiCacheStorage):  # type: ignore[misc]
    """A store of ours behind SGLang's interface. SGLang calls it from several threads."""

    def __init__(self, config: HiCacheStorageConfig, _kwargs: Mapping[str, Any]) -> None:
        check_hooks("sglang", HiCacheStorage, CALLS, tested=TESTED)
        extra = config.extra_config or {}
        if not isinstance(extra.get("store"), str):
            why = 'name one in the extra config, such as "store": "shared:///var/cache/kv?size=200GiB"'
            raise ConfigError("store", extra.get("store"), why)
        self._config = config
        self._pages = NamedPages(extra["store"], _about(config))
        self._hosts: dict[str, _Host] = {}

    # Host pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._hosts[PoolName.KV.value] = self._host(PoolName.KV.value, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._hosts[str(host_pool_name)] = self._host(str(host_pool_name), host_pool)

    def _host(self, name: str, pool: Any) -> _Host:
        # The states of recurrent layers are cut for ranks even where all of them have the same KV.
        same = self._config.is_mla_model and name != PoolName.MAMBA.value
        ranks = {} if same else {"tp": [self._config.tp_rank, self._config.tp_size]}
        in_tensors = name == PoolName.KV.value and not (self._config.extra_config or {}).get("interface_v1")
        return _Host(self._pages, name, pool, ranks, in_place=not in_tensors)

    # What is there

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ARG002
        """How many pages are there, from the first one on."""
        return _leading(self._hosts[PoolName.KV.value].holds(keys))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: Any = None,
    ) -> PoolTransferResult:
        """Which prefixes of these pages can be resumed: those for which every pool has what it needs."""
        kv = self.batch_exists(keys, extra_info)
        hits = {PoolName.KV: kv} if kv else {}
        lengths = list(range(1, kv + 1))
        for transfer in pool_transfers or []:
            host = self._hosts[str(transfer.name)]
            if transfer.hit_policy is PoolHitPolicy.BLOCK_GROUPS:
                hits[transfer.name] = _groups(host.holds(transfer.keys or []), transfer)
                continue
            here = host.holds(keys[:kv])
            if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
                enough = set(range(1, _leading(here) + 1))
            elif transfer.hit_policy is PoolHitPolicy.TRAILING_PAGES:
                last = max(1, len(transfer.keys or []))
                enough = {end for end in range(1, kv + 1) if all(here[max(0, end - last) : end])}
            else:
                raise ConfigError("hit_policy", transfer.hit_policy, "is not known")
            if enough:
                hits[transfer.name] = max(enough)
            lengths = [length for length in lengths if length in enough]
        return PoolTransferResult(max(lengths, default=0), hits, lengths)

    # Pages in tensors of their own

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any = None,
        target_sizes: Any = None,  # noqa: ARG002
    ) -> list[torch.Tensor | None]:
        found = self._hosts[PoolName.KV.value].flat.get(keys, [_bytes_of(each) for each in target_locations])
        return [each if hit else None for each, hit in zip(target_locations, found, strict=True)]

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        return all(self._hosts[PoolName.KV.value].flat.put(keys, [_bytes_of(each) for each in values]))

    # Pages in host pools

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        return self._hosts[PoolName.KV.value].get(keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        return self._hosts[PoolName.KV.value].put(keys, host_indices)

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ARG002
        return {
            each.name: self._hosts[str(each.name)].get(each.keys or [], each.host_indices)
            for each in transfers
        }

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ARG002
        return {
            each.name: self._hosts[str(each.name)].put(each.keys or [], each.host_indices)
            for each in transfers
        }

    # The rest

    def clear(self) -> None:
        self._pages.call(self._pages.store.clear, None)

    def get_stats(self) -> None:
        """SGLang has numbers of its own: ours are in `stats`."""

    def stats(self) -> dict[str, Any]:
        return self._pages.stats()

    def on_host_pools_registered(self) -> None:
        pass

    def close(self) -> None:
        self._pages.close()


CALLS = [name for name, value in vars(HiCache).items() if callable(value) and not name.startswith("_")]
CALLS = [name for name in CALLS if name not in ("stats", "close")]


class _Host:
    """One of SGLang's host pools, and the pages of it in the store."""

    def __init__(
        self, pages: NamedPages, name: str, pool: Any, ranks: Mapping[str, Any], *, in_place: bool
    ) -> None:
        """`in_place`: pages are read and written where they are, if their layout allows it."""
        self._pool = pool
        self._logical = getattr(pool, "kv_buffer", self) is None
        if self._logical:  # an anchor for other pools, without bytes
            return
        layout = getattr(pool, "layout", "")
        size = len(_bytes_of(pool.get_dummy_flat_data_page()))
        shape = {each: value for each in SHAPE if isinstance(value := getattr(pool, each, None), int | str)}
        about = {**ranks, "layout": layout, "dtype": str(getattr(pool, "dtype", "")), "shape": shape}
        self.flat: Pool = pages.pool(f"{name} flat", size, {**about, "order": "flat"})
        self._in_place: Pool | None = None
        if in_place and layout in ONE_PIECE:
            self._in_place = pages.pool(f"{name} in place", size, {**about, "order": "in place"})
        self._size = size

    def holds(self, keys: Sequence[str]) -> list[bool]:
        if self._logical:
            return [True] * len(keys)
        return (self._in_place or self.flat).holds(keys)

    def get(self, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        if self._logical or not keys:
            return [True] * len(keys)
        if self._in_place is not None:
            return self._in_place.get(keys, self._places(indices, len(keys)))
        firsts = self._firsts(indices, len(keys))
        tensors = [self._pool.get_dummy_flat_data_page() for _ in keys]
        found = self.flat.get(keys, [_bytes_of(each) for each in tensors])
        for first, tensor, hit in zip(firsts, tensors, found, strict=True):
            if hit:
                self._pool.set_from_flat_data_page(first, tensor)
        return found

    def put(self, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        if self._logical or not keys:
            return [True] * len(keys)
        if self._in_place is not None:
            return self._in_place.put(keys, self._places(indices, len(keys)))
        firsts = self._firsts(indices, len(keys))
        return self.flat.put(
            keys, [_bytes_of(self._pool.get_data_page(first, flat=True)) for first in firsts]
        )

    def _firsts(self, indices: torch.Tensor, count: int) -> list[int]:
        """The first index of each page."""
        step, rest = divmod(len(indices), count)
        if rest or not step:
            raise ConfigError("host_indices", len(indices), f"are not those of {count} pages")
        return [int(each) for each in indices[::step].tolist()]

    def _places(self, indices: torch.Tensor, count: int) -> list[Page]:
        """The memory of each page, in pieces."""
        starts, sizes = self._pool.get_page_buffer_meta(indices)
        each, rest = divmod(len(starts), count)
        if rest or sum(sizes) != count * self._size:
            raise ConfigError("host_indices", len(indices), f"have no {count} pages of {self._size:,} bytes")
        views = [
            memoryview((ctypes.c_char * size).from_address(start)).cast("B")
            for start, size in zip(starts, sizes, strict=True)
        ]
        return [views[first : first + each] for first in range(0, len(views), each)]


def _about(config: HiCacheStorageConfig) -> dict[str, Any]:
    """What decides the bytes of all pools. The rest is told by each pool."""
    ranks = {
        "pp": [config.pp_rank, config.pp_size],
        "cp": [config.attn_cp_rank, config.attn_cp_size],
        "dcp": [config.dcp_rank, config.dcp_size, config.logical_page_size],
    }
    return {"engine": "sglang", "model": config.model_name or "", "ranks": ranks}


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    data: Any = tensor.contiguous().view(torch.uint8).reshape(-1).numpy()
    return memoryview(data)


def _leading(here: Sequence[bool]) -> int:
    return next((number for number, each in enumerate(here) if not each), len(here))


def _groups(here: Sequence[bool], transfer: PoolTransfer) -> int:
    """Pages that the leading whole groups of keys cover."""
    size = max(1, transfer.group_pages)
    whole: Callable[[int], bool] = lambda first: all(here[first : first + size])  # noqa: E731
    groups = [whole(first) for first in range(0, len(here) - size + 1, size)]
    return _leading(groups) * int(transfer.block_pages)
