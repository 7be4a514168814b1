"""Host memory: mapped, touched and registered once at the start, given back at the end.

    asked ≤ available? ─yes─► mmap ─► huge pages? ─► touch, in threads ─► register with CUDA, if there is one
          │ no
          └──► BudgetError                                    close: unregister ─► unmap

Memory that is only mapped is not there yet: the kernel finds out at the first write, in the middle of a
copy, and answers with a kill. So the budget is compared with what the machine has before anything is
mapped, and every page is written once before the first copy.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np

from tiercel.errors import BudgetError, ConfigError

RESERVE_BYTES = 256 * 1024**2
"""Left for the rest of the machine: a budget that takes the last page ends some other process."""

TOUCH_THREADS_MAX = 16
"""As far as measured, 16 cores of an H200 machine: 1 thread 1.6 GB/s, 4: 6.7, 16: 22 (huge pages 50)."""


class HostMap:
    """Zeroed bytes of the host that a device can copy from and to. Not shared with other processes."""

    def __init__(self, size: int, huge_pages: bool = False) -> None:
        assert size > 0, size
        available = bytes_available()
        if size > available:
            raise BudgetError(bytes_asked=size, bytes_available=available)
        self.size = size
        self._unregister: weakref.finalize[..., HostMap] | None = None
        try:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise BudgetError(bytes_asked=size, bytes_available=available) from error
        try:
            self._prepare(huge_pages)
        except BaseException:
            self.close()
            raise

    @property
    def view(self) -> memoryview:
        """The bytes. Whoever holds a view keeps them mapped, also past `close`: none is left dangling."""
        return memoryview(self._map)

    @property
    def closed(self) -> bool:
        return self._map.closed

    def close(self) -> None:
        """Unregister and unmap. May be called again."""
        if self._unregister is not None:
            self._unregister()
        with suppress(BufferError):  # a view is still held: the map goes with it
            self._map.close()

    def __enter__(self) -> HostMap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, huge_pages: bool) -> None:
        if huge_pages:
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:
                raise ConfigError("huge_pages", True, f"the kernel refuses: {error}") from error
        _touch(self._map)
        if address := _cuda_register(self._map):
            # Also when nobody calls close: CUDA refuses memory mapped later at an address it still knows.
            self._unregister = weakref.finalize(self, _cuda_unregister, address)


def _touch(memory: mmap.mmap) -> None:
    """Write one byte of every page. numpy lets go of the interpreter meanwhile: the threads are parallel."""
    size = len(memory)
    threads = min(len(os.sched_getaffinity(0)), TOUCH_THREADS_MAX)
    share = -(-size // (threads * mmap.PAGESIZE)) * mmap.PAGESIZE

    def touch(start: int) -> None:
        np.frombuffer(memory, np.uint8)[start : start + share : mmap.PAGESIZE] = 0

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(touch, range(0, size, share)))


def _cuda_register(memory: mmap.mmap) -> int:
    """Make the memory reachable by the copy engines; answers its address, 0 where there is no CUDA."""
    import torch  # here: who only asks for sizes does not load it

    if not torch.cuda.is_available():
        return 0
    address = np.frombuffer(memory, np.uint8).ctypes.data
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(address, len(memory), 0)
    if code != runtime.cudaError.success:
        raise ConfigError("host_bytes", len(memory), f"CUDA can not register it: error {int(code)}")
    return address


def _cuda_unregister(address: int) -> None:
    import torch

    torch.cuda.cudart().cudaHostUnregister(address)


# What the machine has


def bytes_available(root: Path = Path("/")) -> int:
    """What may be mapped now: the kernel's estimate or the least room of a control group, less a reserve."""
    return max(0, min(_machine_available(root), *_group_headrooms(root)) - RESERVE_BYTES)


def _machine_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("host_bytes", None, "/proc/meminfo does not tell the available memory")


_GROUP_FILES = {
    # controllers field of /proc/self/cgroup: mount, limit, usage, reclaimable cache in memory.stat
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


def _group_headrooms(root: Path) -> Iterator[int]:
    """Limit less usage of every control group above this process, in both versions of the interface."""
    yield 1 << 63  # no limit
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # a kernel without control groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in _GROUP_FILES:
            mount, limit, usage, cache = _GROUP_FILES[controllers]
            top = root / mount
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):
                yield from _headroom(folder, limit, usage, cache)
                if folder == top:
                    break


def _headroom(folder: Path, limit: str, usage: str, cache: str) -> Iterator[int]:
    """File cache counts as usage but gives way, as it does in the kernel's own estimate."""
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:  # the root group has no such files, and a container may not see its own
        return
    if most != "max":
        yield int(most) - used + int(stat.get(cache, 0))
