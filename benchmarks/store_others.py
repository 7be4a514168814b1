"""The other stores with the pages, threads and batches of `benchmarks.store`: real servers on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.servers import mooncake_holder, mooncake_master, redis_server

from benchmarks import store as s
from tiercel.storage.base import Store
from tiercel.storage.open import open_store


def measure_others(memory: memoryview, figures: s.Figures) -> None:
    memory = memory[: figures.sizes.others_bytes]
    with _stores() as urls:
        for _ in range(figures.sizes.others_rounds):
            for name, url in urls.items():
                for size_name, size in s.PAGE_SIZES.items():
                    with open_store(url) as store:
                        _measure(store, f"{name}.{size_name}", memory, size, figures)


def _measure(store: Store, name: str, memory: memoryview, size: int, figures: s.Figures) -> None:
    store.register(memory)
    s.measure_store(store, name, s.Pages.of(memory, size, store.align), figures)
    store.clear()


@contextmanager
def _stores() -> Iterator[dict[str, str]]:
    with redis_server(unix=True) as redis, mooncake_master() as master, mooncake_holder(master, 512 * s.MIB):
        yield {"memory": "memory:", "redis_unix": redis.url, "mooncake": master.url}
