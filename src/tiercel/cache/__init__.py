"""The caches: `TieredCache` with its requests, `HostCache` with its transfers."""

from tiercel.cache.host_cache import HostCache
from tiercel.cache.request import Ended, Extended, Loaded, Request, RequestState, Transfer, Wait, WaitFor
from tiercel.cache.tiered_cache import TieredCache

__all__ = [
    "Ended",
    "Extended",
    "HostCache",
    "Loaded",
    "Request",
    "RequestState",
    "TieredCache",
    "Transfer",
    "Wait",
    "WaitFor",
]
