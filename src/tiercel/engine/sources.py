"""What is checked and opened before a model is: stores, peers, and how much host memory there is.

A wrong URL, a folder that can not be written and memory that is not there are found in moments here; after
weights were read they would cost minutes. Torch is not loaded.
"""

from __future__ import annotations

from tiercel.config import CacheConfig
from tiercel.engine.config import Build
from tiercel.errors import BudgetError, ConfigError
from tiercel.memory.host import bytes_available
from tiercel.storage.base import Store
from tiercel.storage.open import check_peers, open_stores, shown


def open_sources(build: Build, cache: CacheConfig) -> Store | None:
    """The store and the peers of `build` as one store; None: there are none. The caller closes it."""
    check_peers(build.peer)
    if not cache.host_bytes:
        for name, given in (("store", build.sources), ("share_pages", (build.share_pages,))):
            if given and given[0]:
                raise ConfigError(name, shown(given[0]), "needs a host tier: give it host memory")
    elif cache.host_bytes > (available := bytes_available()):
        raise BudgetError(bytes_asked=cache.host_bytes, bytes_available=available)
    return open_stores(build.store, build.peer, key=build.share_key or "", required=build.store_required)
