"""tiercel: a tiered KV cache for hybrid-attention language models.

The names below are the front door. They are imported when asked for, so that `tiercel.spec` and the command
line never load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercel.cache import Extended, Loaded, Request, TieredCache, Wait, WaitFor
    from tiercel.config import CacheConfig
    from tiercel.engine.offline import Offline
    from tiercel.spec import CacheSpec, Identity

__all__ = [
    "CacheConfig",
    "CacheSpec",
    "Extended",
    "Identity",
    "Loaded",
    "Offline",
    "Request",
    "TieredCache",
    "Wait",
    "WaitFor",
]

_HOME = {
    "CacheConfig": "tiercel.config",
    "CacheSpec": "tiercel.spec",
    "Identity": "tiercel.spec",
    "Offline": "tiercel.engine.offline",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tiercel' has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "tiercel.cache")), name)
