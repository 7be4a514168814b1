"""A few threads, so that several reads wait for the disk at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

THREADS = 4
"""Reads of 256 KiB on a virtual disk, 2 cores, 2026-10: 1 thread 2.6 GB/s, 4: 3.9, 8: 4.6."""

Item = TypeVar("Item")


class Workers:
    """Threads that help the calling thread. Their tasks do not wait for each other."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS - 1, thread_name_prefix="tiercel-file-store")

    def each(self, do: Callable[[Item], None], items: Sequence[Item]) -> None:
        """Do all items, in parallel. Returns or raises when all of them have ended."""
        helped = [self._pool.submit(do, item) for item in items[1:]]
        try:
            do(items[0])
        finally:
            wait(helped)
        for each in helped:
            each.result()

    def close(self) -> None:
        self._pool.shutdown()
