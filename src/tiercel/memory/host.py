"""Host memory: mapped, touched and registered once at the start, given back at the end.

    asked ≤ available? ─yes─► mmap ─► huge pages, NUMA node ─► touch, in threads ─► pin: register with CUDA
          │ no
          └──► BudgetError                                              close: unregister ─► unmap

Memory that is only mapped is not there yet. If the machine has no more, the kernel kills the process at the
first write, in the middle of a copy. So the budget is compared with what the machine has before anything is
mapped, and every page is written once before the first copy.

Memory belongs to this process alone unless it is asked for as shared: then it is a file without a folder,
which another process opens by `path`. (Huge pages of shared memory are a setting of the machine.)
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import resource
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from tiercel.errors import BudgetError, ConfigError
from tiercel.progress import progress

log = logging.getLogger(__name__)

RESERVE_BYTES = 256 * 1024**2
"""Left for the rest of the machine: a budget that takes the last page ends some other process."""

TOUCH_THREADS_MAX = 16
"""Measured on 16 cores of an H200 machine: 1 thread 1.6 GB/s, 4: 6.7, 16: 22 (huge pages 50)."""

TOUCH_PIECE_BYTES = 64 * 1024**2
"""Bytes that one thread touches at once. Progress is counted in such pieces."""

MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of this system call, which glibc does not have."""
PREFERRED = 1


class HostMap:
    """Zeroed bytes of the host, or those that another process shares under `path`.

    `pin` makes them reachable for a CUDA device. `node` is the NUMA node that they should be on, while it has
    room. `shared` maps bytes that other processes may map too.
    """

    def __init__(  # noqa: PLR0913
        self,
        size: int,
        *,
        huge_pages: bool = False,
        pin: bool = False,
        node: int | None = None,
        shared: bool = False,
        path: str = "",
    ) -> None:
        assert size > 0, size
        available = bytes_available()
        if size > available and not path:
            raise BudgetError(bytes_asked=size, bytes_available=available)
        self.size = size
        self.path = path
        """Where another process of this user can map the same bytes; empty: they are not shared."""
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
            if huge_pages:
                with suppress(OSError):  # without huge pages it is only slower
                    self._map.madvise(mmap.MADV_HUGEPAGE)
            if node is not None:
                _prefer_node(self._address, size, node)
            if not path:
                _touch(self._map)
            if pin:
                self._pin()
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

    @property
    def _address(self) -> int:
        return int(np.frombuffer(self._map, np.uint8).ctypes.data)

    def _pin(self) -> None:
        import torch  # here: a process that only asks for sizes does not load it

        address, runtime = self._address, torch.cuda.cudart()
        with progress("pinning host memory", self.size):
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
    size, threads = len(memory), min(len(os.sched_getaffinity(0)), TOUCH_THREADS_MAX)
    with progress("host memory", size) as done, ThreadPoolExecutor(threads) as pool:

        def touch(start: int) -> None:
            piece = np.frombuffer(memory, np.uint8)[start : start + TOUCH_PIECE_BYTES]
            piece[:: mmap.PAGESIZE] = 0
            done(len(piece))

        list(pool.map(touch, range(0, size, TOUCH_PIECE_BYTES)))


# NUMA nodes


def node_of(pci: str, root: Path = Path("/")) -> int | None:
    """The NUMA node next to the PCI device of this address; None: it is not known."""
    try:
        node = int((root / f"sys/bus/pci/devices/{pci}/numa_node").read_text())
    except (OSError, ValueError):  # a container may not see it
        return None
    return node if node >= 0 else None


def _prefer_node(address: int, size: int, node: int) -> None:
    """Pages that are touched from now on come from this node while it has room. A hint: it may be refused."""
    number = MBIND.get(platform.machine())
    if number is None:
        return
    words = node // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // 64] = 1 << node % 64
    arguments = address, size, PREFERRED, ctypes.addressof(mask), 64 * words + 1, 0
    if ctypes.CDLL(None, use_errno=True).syscall(number, *map(ctypes.c_ulong, arguments)):
        log.info("host memory: NUMA node %d was refused: %s", node, os.strerror(ctypes.get_errno()))


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
