"""Our stores as the storage of SGLang's HiCache.

    python -m sglang.launch_server … --enable-hierarchical-cache --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "tiercel", "class_name": "HiCache",
            "module_path": "tiercel.integrations.sglang", "store": "shared:///var/cache/kv?size=200GiB"}'

SGLang names a page by a hash of its whole prefix. What else decides the bytes of a page is part of its
record: version, model, ranks, draft, layout, type and shape of the pool. Pages are read into SGLang's host
memory and written from it without a copy, where the layout keeps a page together. For the pool of the KV this
needs `"interface_v1": 1`: without it SGLang makes copies itself.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
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
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_model, get_spec

from tiercel.errors import ConfigError
from tiercel.integrations.hooks import check_hooks
from tiercel.integrations.named_pages import NamedPages, Pool

log = logging.getLogger(__name__)

VERSION = version("sglang")
TESTED = ("0.5.23", "0.5.22")
LEFT = ("on_host_pools_registered",)
"""Calls that need no answer: pools are used as they come."""
TOGETHER = ("page_first", "page_first_direct", "page_first_kv_split", "page_head")
"""Layouts in which a page lies together, or K and V each do."""
NOT_OF_THE_BYTES = ("tp_rank", "tp_size", "dp_rank", "extra_config", "enable_storage_metrics")
"""What a configuration says that does not decide the bytes of all pools. Ranks of tensor parallelism do for
some (`_about_ranks`)."""
SHAPE = (
    *("dtype", "layer_num", "head_num", "head_dim", "v_head_dim", "kv_cache_dim", "page_size"),
    *("start_layer", "end_layer", "size_per_token", "storage_format_tag", "indexer_dtype"),
    *("num_mamba_layers", "temporal_dtype", "temporal_state_shape", "conv_state_shapes"),
    *("item_bytes", "ring_size", "state_page_bytes"),
)
"""What a host pool tells of the bytes of its pages, as far as it has it."""


class HiCache(HiCacheStorage):  # type: ignore[misc]
    """A store of ours behind SGLang's interface. SGLang calls it from several threads."""

    def __init__(self, config: HiCacheStorageConfig, _kwargs: Mapping[str, Any]) -> None:
        check_hooks("sglang", HiCacheStorage, CALLS, tested=TESTED, left=LEFT)
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
        # Without the first interface SGLang asks for the pages of this pool in tensors of their own.
        in_tensors = name == PoolName.KV.value and not (self._config.extra_config or {}).get("interface_v1")
        return _Host(self._pages, name, pool, self._about_ranks(name, pool), in_place=not in_tensors)

    def _about_ranks(self, name: str, pool: Any) -> dict[str, Any]:
        """Of which rank the pages of this pool are. Nothing, if they are the same for all."""
        ranks = [self._config.tp_rank, self._config.tp_size]
        if not self._config.is_mla_model:
            return {"tp": ranks}
        # Ranks have the same KV. States and heads are cut for them nevertheless.
        if name == PoolName.MAMBA.value:
            return {"tp": ranks}
        if isinstance(pool, MHATokenToKVPoolHost) and self._config.tp_size > 1:
            why = f"each of {ranks[1]} ranks has other heads of it, and SGLang saves those of rank 0 only"
            raise ConfigError("pool", name, why)
        return {}

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
        found = self._hosts[PoolName.KV.value].pages.get(keys, [_bytes_of(each) for each in target_locations])
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
        return all(self._hosts[PoolName.KV.value].pages.put(keys, [_bytes_of(each) for each in values]))

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
        self._pool, self._name = pool, name
        self._logical = isinstance(pool, LogicalHostPool)  # an anchor for other pools, without bytes
        if self._logical:
            return
        self._in_place = in_place and pool.layout in TOGETHER and _can(pool.get_page_buffer_meta, _page(pool))
        try:
            size = sum(map(len, self._places(_page(pool), 1)[0] if self._in_place else [self._copy(0)]))
        except (NotImplementedError, ValueError) as error:
            why = (
                f'SGLang can not copy pages of {name}: another layout or "interface_v1": 1 may help ({error})'
            )
            raise ConfigError("hicache_mem_layout", pool.layout, why) from error
        shape = {each: str(value) for each in SHAPE if (value := getattr(pool, each, None)) is not None}
        self.pages: Pool = pages.pool(name, size, {**ranks, "layout": pool.layout, "shape": shape})

    def holds(self, keys: Sequence[str]) -> list[bool]:
        return [True] * len(keys) if self._logical else self.pages.holds(keys)

    def get(self, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        if self._logical or not self._fits(keys, indices):
            return [self._logical] * len(keys)
        if self._in_place:
            return self.pages.get(keys, self._places(indices, len(keys)))
        tensors = [self._pool.get_dummy_flat_data_page() for _ in keys]
        found = self.pages.get(keys, [_bytes_of(each) for each in tensors])
        for first, tensor, hit in zip(self._firsts(indices), tensors, found, strict=True):
            if hit:
                self._pool.set_from_flat_data_page(first, tensor)
        return found

    def put(self, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        if self._logical or not self._fits(keys, indices):
            return [self._logical] * len(keys)
        if self._in_place:
            return self.pages.put(keys, self._places(indices, len(keys)))
        return self.pages.put(keys, [self._copy(first) for first in self._firsts(indices)])

    def _fits(self, keys: Sequence[str], indices: torch.Tensor | None) -> bool:
        """Whether these are the indices of so many pages. If not, none is moved."""
        count, needed = 0 if indices is None else len(indices), len(keys) * int(self._pool.page_size)
        if count != needed:
            log.error("%d indices of %s are not those of %d pages", count, self._name, len(keys))
        return count == needed

    def _firsts(self, indices: Any) -> list[int]:
        """The first index of each page."""
        return [int(each) for each in indices[:: self._pool.page_size].tolist()]

    def _copy(self, first: int) -> memoryview:
        return _bytes_of(self._pool.get_data_page(first, flat=True))

    def _places(self, indices: Any, count: int) -> list[list[memoryview]]:
        """The memory of each page, in pieces."""
        starts, sizes = self._pool.get_page_buffer_meta(indices)
        views = [
            memoryview((ctypes.c_char * size).from_address(start)).cast("B")
            for start, size in zip(starts, sizes, strict=True)
        ]
        each = len(views) // count
        return [views[first : first + each] for first in range(0, len(views), each)]


def _about(config: HiCacheStorageConfig) -> dict[str, Any]:
    """What decides the bytes of all pools. The rest is told by each pool."""
    told = {name: value for name, value in vars(config).items() if name not in NOT_OF_THE_BYTES}
    spec = get_spec()
    draft = (
        spec.speculative_algorithm,
        spec.speculative_draft_model_path,
        spec.speculative_draft_kv_cache_dtype,
    )
    # Two types of 8 bits have the same name in a pool.
    return {"engine": f"sglang {VERSION}", **told, "kv": get_model().kv_cache_dtype, "draft": draft}


def _page(pool: Any) -> torch.Tensor:
    """The indices of the first page."""
    return torch.arange(pool.page_size)


def _can(call: Callable[..., Any], *arguments: Any) -> bool:
    try:
        call(*arguments)
    except NotImplementedError:
        return False
    return True


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
