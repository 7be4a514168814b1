"""tiercel: a tiered KV cache for hybrid-attention language models.

The names below are the public interface. They are imported when they are first used, so that `tiercel.spec`
and the command line never load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercel.cache import (
        Ended,
        Extended,
        HostCache,
        Loaded,
        Request,
        TieredCache,
        Transfer,
        Wait,
        WaitFor,
    )
    from tiercel.cache.memories import make_memories
    from tiercel.config import CacheConfig
    from tiercel.engine.offline import Offline
    from tiercel.integrations.named_pages import NamedPages
    from tiercel.memory.buffers import BorrowedMemory, DeviceMemory
    from tiercel.spec import CacheSpec, Identity
    from tiercel.transfer.staging import Staging
    from tiercel.types import place

__all__ = [
    "BorrowedMemory",
    "CacheConfig",
    "CacheSpec",
    "DeviceMemory",
    "Ended",
    "Extended",
    "HostCache",
    "Identity",
    "Loaded",
    "NamedPages",
    "Offline",
    "Request",
    "Staging",
    "TieredCache",
    "Transfer",
    "Wait",
    "WaitFor",
    "make_memories",
    "place",
]

_HOME = {
    "BorrowedMemory": "tiercel.memory.buffers",
    "CacheConfig": "tiercel.config",
    "CacheSpec": "tiercel.spec",
    "DeviceMemory": "tiercel.memory.buffers",
    "Identity": "tiercel.spec",
    "NamedPages": "tiercel.integrations.named_pages",
    "Offline": "tiercel.engine.offline",
    "Staging": "tiercel.transfer.staging",
    "make_memories": "tiercel.cache.memories",
    "place": "tiercel.types",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tiercel' has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "tiercel.cache")), name)
