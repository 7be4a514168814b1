"""Host memory: mapped, touched and registered once at the start, given back at the end.

    asked ≤ available? ─yes─► mmap ─► huge pages? ─► touch, in threads ─► pin: register with CUDA
          │ no
          └──► BudgetError                                    close: unregister ─► unmap

Memory that is only mapped is not there yet. If the machine has no more, the kernel kills the process at the
first write, in the middle of a copy. So the budget is compared with what the machine has before anything is
mapped, and every page is written once before the first copy.

Memory belongs to this process alone unless it is asked for as shared: then it is a file without a folder,
which another process opens by `path`. (Huge pages of shared memory are a setting of the machine.)
"""

from __future__ import annotations

import mmap
import os
import resource
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from tiercel.errors import BudgetError, ConfigError

RESERVE_BYTES = 256 * 1024**2
"""Left for the rest of the machine: a budget that takes the last page ends some other process."""

TOUCH_THREADS_MAX = 16
"""As far as measured, 16 cores of an H200 machine: 1 thread 1.6 GB/s, 4: 6.7, 16: 22 (huge pages 50)."""


class HostMap:
    """Zeroed bytes of the host, or those that another process shares under `path`.

    `pin` makes them reachable for a CUDA device. `shared` maps bytes that other processes may map too.
    """

    def __init__(
        self, size: int, *, huge_pages: bool = False, pin: bool = False, shared: bool = False, path: str = ""
    ) -> None:
        assert size > 0, size
        available = bytes_available()
        if size > available and not path:
            raise BudgetError(bytes_asked=size, bytes_available=available)
        self.size = size
        self.path = path
        """Under which another process of this user maps the same bytes; empty where they are not shared."""
        self._unregister: weakref.finalize[..., HostMap] | None = None
        self._file = -1
        try:
            self._map = self._open(shared)
        except OSError as error:
            self._close_file()
            if path:
                raise ConfigError("path", path, f"is not {size:,} B of shared memory: {error}") from error
            raise BudgetError(bytes_asked=size, bytes_available=available) from error
        try:
            self._prepare(huge_pages, pin, touch=not path)
        except BaseException:
            self.close()
            raise

    def _open(self, shared: bool) -> mmap.mmap:
        if self.path:
            self._file = os.open(self.path, os.O_RDWR)
            if os.fstat(self._file).st_size != self.size:
                raise OSError(f"it has {os.fstat(self._file).st_size:,} B")
        elif shared:
            self._file = os.memfd_create("tiercel")
            os.ftruncate(self._file, self.size)
            self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            return mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return mmap.mmap(self._file, self.size, flags=mmap.MAP_SHARED)

    def _prepare(self, huge_pages: bool, pin: bool, *, touch: bool) -> None:
        if huge_pages:
            with suppress(OSError):  # a kernel without them: small pages are only slower
                self._map.madvise(mmap.MADV_HUGEPAGE)
        if touch:
            _touch(self._map)
        if pin:
            import torch  # here: a process that only asks for sizes does not load it

            address, runtime = np.frombuffer(self._map, np.uint8).ctypes.data, torch.cuda.cudart()
            code = runtime.cudaHostRegister(address, self.size, 0)
            if code != runtime.cudaError.success:
                locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
                limit = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked:,} B"
                look = f"see `ulimit -l` ({limit}) and the memory limit of the control group"
                raise ConfigError("host_bytes", self.size, f"CUDA can not pin it, error {int(code)}: {look}")
            # Also when nobody calls close: CUDA refuses memory mapped later at an address it still knows.
            self._unregister = weakref.finalize(self, runtime.cudaHostUnregister, address)

    @property
    def view(self) -> memoryview:
        """The bytes. A view keeps them mapped, also past `close`."""
        return memoryview(self._map)

    def close(self) -> None:
        """Unregister and unmap. May be called again."""
        if self._unregister is not None:
            self._unregister()
        self._close_file()
        with suppress(BufferError):  # a view is still held: the bytes stay mapped as long as the view lives
            self._map.close()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _touch(memory: mmap.mmap) -> None:
    """Write one byte of every page. numpy releases the GIL meanwhile, so the threads run in parallel."""
    size = len(memory)
    threads = min(len(os.sched_getaffinity(0)), TOUCH_THREADS_MAX)
    share = -(-size // (threads * mmap.PAGESIZE)) * mmap.PAGESIZE

    def touch(start: int) -> None:
        np.frombuffer(memory, np.uint8)[start : start + share : mmap.PAGESIZE] = 0

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(touch, range(0, size, share)))


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
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
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
            mount, *names = _GROUP_FILES[controllers]
            top = root / "sys/fs/cgroup" / mount
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):
                yield from _headroom(folder, *names)
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
