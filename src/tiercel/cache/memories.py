"""The memories of one cache, and the controller that copies between them: made here, given to a cache.

own device       DeviceMemory ◄── a controller of this process ──► HostMemory
another engine   BorrowedMemory ◄── the same ──► HostMemory
ranks            memory of other processes ◄── RemoteController ──► HostMemory, shared with them
a replay         nothing ◄── a clock ──► nothing: places only
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from tiercel.config import CacheConfig
from tiercel.errors import ConfigError
from tiercel.memory.buffers import STAGED_AREAS, DeviceMemory, HostMemory, Memory, pci_address
from tiercel.memory.host import node_of
from tiercel.policy.evict import make_evict_policy
from tiercel.policy.fetch import make_fetch_policy
from tiercel.spec.cache_spec import CacheSpec
from tiercel.transfer.controller import Controller, make_controller
from tiercel.transfer.copier import check_copier
from tiercel.transfer.plan import Direction

Executors = Mapping[Direction, Executor]


@dataclass(frozen=True)
class Memories:
    """Memories and their controller. Without `host_pages` there is no host tier and no controller."""

    device: Memory | None = None
    """None: other processes have it, or there is none."""
    host: HostMemory | None = None
    """None: there is no host tier, or its places have no bytes."""
    host_pages: int = 0
    controller: Controller | None = None

    def close(self) -> None:
        """Release them. Only for memories that were given to no cache."""
        if self.controller is not None:
            self.controller.close()
        if self.host is not None:
            self.host.close()


def make_memories(
    spec: CacheSpec,
    config: CacheConfig,
    device: Memory | str | None = "cpu",
    *,
    controller: Controller | None = None,
    executors: Executors | None = None,
) -> Memories:
    """Make device memory, host memory of the size in the settings, and the controller that copies.

    `device`: memory; or the device to make it on; or None, if other processes have it. `controller`: it
    copies instead of this process. `executors`: threads for the copies of a CPU.
    """
    make_evict_policy(config.evict)  # a wrong name is found before memory is made
    make_fetch_policy(config.fetch)
    check_host(spec, config, str(getattr(device, "device", device or "")))
    assert device is not None or controller is not None, "memory of other processes needs a controller"
    if isinstance(device, str):
        staged = STAGED_AREAS * config.staged_pages if spec.selective else 0
        device = DeviceMemory(spec, config.device_pages, config.staging_tails, device, staged)
    if not config.host_bytes:
        return Memories(device)
    host = _host_memory(spec, config, device)
    if isinstance(device, DeviceMemory):
        device.host = host
    if controller is None:
        assert device is not None
        try:
            controller = make_controller(config.copier, device, host, executors)
        except BaseException:
            host.close()
            raise
    return Memories(device, host, host.pages, controller)


def check_host(spec: CacheSpec, config: CacheConfig, device: str = "") -> None:
    """Raises a ConfigError if a host tier of these settings can not be made. `device`: where the other end of
    its copies is; empty: in other processes."""
    if not config.host_bytes:
        return
    if config.host_bytes < max(1, spec.places_per_tail) * spec.place_bytes:
        why = f"one host page takes {spec.place_bytes:,} B, and a tail takes {spec.places_per_tail} of them"
        raise ConfigError("host_bytes", config.host_bytes, why)
    if device:
        check_copier(config.copier, device)


def _host_memory(spec: CacheSpec, config: CacheConfig, device: Memory | None) -> HostMemory:
    cuda = device.device if device is not None and device.device.type == "cuda" else None
    return HostMemory(
        spec,
        config.layout,
        config.host_bytes,
        huge_pages=config.huge_pages,
        pin=cuda is not None,
        node=None if cuda is None else node_of(pci_address(cuda)),
        shared=config.host_shared,
    )
