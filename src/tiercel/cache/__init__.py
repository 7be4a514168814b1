"""The front door: `TieredCache`, its requests and their outcomes."""

from tiercel.cache.request import Extended, Loaded, Request, RequestState, Wait, WaitFor
from tiercel.cache.tiered_cache import TieredCache

__all__ = ["Extended", "Loaded", "Request", "RequestState", "TieredCache", "Wait", "WaitFor"]
