"""SGLang's controller saves pages of its host memory in one of our stores, and finds them after a restart.

Run it where SGLang is installed; it needs no GPU: python examples/sglang/restart.py
"""

import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import torch

LIBRARY = torch.library.Library("torchvision", "DEF")  # SGLang imports these, and calls them on a GPU only
for name in ("nms", "qnms"):
    LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_pool  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.base import HostKVCache  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402

HostKVCache.pin_memory = property(lambda *_: False, lambda *_: None)  # there is no GPU to pin it for

PAGE, PAGES = 16, 10
TOKENS = array("q", range(PAGE * PAGES))
PLACES = torch.arange(PAGE * PAGES)
SETTINGS = {"device": "cpu", "hicache_mem_layout": "page_first", "hicache_ratio": 2.0, "hicache_size": 0}
RANKS = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_rank": 0, "attn_dcp_size": 1}


@contextmanager
def controller(store: str) -> Iterator[HiCacheController]:
    """As `--hicache-storage-backend dynamic --hicache-storage-backend-extra-config …` makes it."""
    extra = {
        "backend_name": "tiercel",
        "module_path": "tiercel.integrations.sglang",
        "class_name": "HiCache",
        "interface_v1": 1,
        "store": store,
    }
    with get_context().override_server_args(**SETTINGS), get_parallel().override(**RANKS):
        kind, size = torch.bfloat16, PAGE * PAGES
        device = MHATokenToKVPool(size, PAGE, kind, 2, 64, 4, "cpu", False)  # 2 heads of 64, 4 layers
        made = HiCacheController(
            PagedTokenToKVPoolAllocator(size, PAGE, kind, "cpu", device, False),
            build_kv_host_pool(kv_pool=device, page_size=PAGE),
            PAGE,
            None,
            threading.Event(),
            storage_backend="dynamic",
            model_name="a/model",
            prefetch_threshold=PAGE,
            storage_backend_extra_config=extra,
        )
        try:
            yield made
        finally:
            made.detach_storage_backend()


def pages(server: HiCacheController) -> list[torch.Tensor]:
    host = server.mem_pool_host
    return [host.get_data_page(number * PAGE, flat=True).clone() for number in range(PAGES)]


def main() -> None:
    with TemporaryDirectory() as folder:
        store = f"file://{folder}/store?size=64MiB"
        with controller(store) as server:
            server.mem_pool_host.kv_buffer.normal_()
            computed = pages(server)
            server.write_storage(PLACES, TOKENS, get_storage_hash_str(RadixKey(TOKENS), None, page_size=PAGE))
            print("saved", server.ack_backup_queue.get(timeout=60).completed_tokens, "tokens")
        with controller(store) as server:
            server.prefetch("a request", RadixKey(TOKENS))
            found = server.prefetch_hit_queue.get(timeout=60)
            found.host_indices = PLACES
            server.prefetch_buffer.put(found)
            done = server.ack_prefetch_queue.get(timeout=60).completed_tokens
            wrong = sum(not torch.equal(*each) for each in zip(pages(server), computed, strict=True))
            print(f"found {done} of {len(TOKENS)} tokens after a restart; {wrong} of {PAGES} pages differ")


if __name__ == "__main__":
    main()
