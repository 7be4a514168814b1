"""One frozen configuration, checked once. Every default carries its reason.

Names of policies, layouts and copiers are checked here against the names their rooms define, so a
typing error is found at start and not at the first copy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from tiercel.errors import ConfigError

LAYOUTS = ("layer_first", "page_first", "page_first_direct")
COPIERS = ("reference", "direct", "kernel")
SAVE_POLICIES = ("through", "selective", "back")
EVICT_POLICIES = ("lru", "lfu", "slru", "priority")
FETCH_POLICIES = ("best_effort", "wait", "deadline")

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}


def parse_bytes(text: str | int, field: str = "bytes") -> int:
    """`40GiB`, `1.5 MiB`, `200GB`, `4096` → bytes."""
    if isinstance(text, int):
        return text
    found = isinstance(text, str) and re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not found or found[2] not in _UNITS:
        raise ConfigError(field, text, "is not a size such as 40GiB, 512MiB or 4096")
    return int(float(found[1]) * _UNITS[found[2]])


def load_class(name: str, base: type) -> Any:
    """The user's own class `module:Class`, derived from `base`. Raises ImportError, which says why not."""
    try:
        found = resolve_name(name)
    except Exception as error:
        raise ImportError(f"can not be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ImportError(
            f"can not be loaded: it is not a class derived from {base.__module__}.{base.__name__}"
        )
    return found


@dataclass(frozen=True)
class CacheConfig:
    """How one cache is run. What a model stores is not here: that is `CacheSpec`."""

    device_pages: int = 0
    """Places for pages on the device. No other default: it is what is left beside the weights. 0 where the
    device memory is another engine's (`HostCache`)."""

    device_tails: int = 0
    """Places for tails on the device. 0 is right only for a spec without tails."""

    host_bytes: int = 0
    """The one host budget, shared by pages and tails. 0 turns the host tier off."""

    layout: str = "page_first_direct"
    """Host layout. The default keeps a page one record and each layer of it one plain copy."""

    copier: str = "direct"
    """Who moves bytes. `reference` is the slow truth the others are compared with."""

    save: str = "through"
    """When a page is copied to the host. `through` makes evictions free of copies."""

    evict: str = "lru"
    """Who goes first: a name, or `module:Class` of a policy of your own."""

    tail_every_pages: int = 16
    """A tail each so many pages of a long text (DeepSeek V4 Flash: each 4 K tokens, 23 % more bytes)."""

    tails_per_path: int = 64
    """At most so many tails between the root and a page; the coldest gives way."""

    fetch: str = "deadline"
    """How long a request waits for the store: not at all, until all is there, or until a deadline. None of
    them fetches what is computed sooner."""

    fetch_deadline_s: float = 0.25
    """For each 1,024 tokens a request hopes for, and at least once. A store that takes longer is slower than
    most machines compute."""

    store_writing_bytes: int = 64 * 1024**2
    """Host memory that writes to the store may hold at a time; never more than half of it."""

    store_timeout_s: float = 10.0
    """An operation of the store that takes longer has failed, whatever becomes of it."""

    huge_pages: bool = False
    """Ask the kernel for huge pages for host memory. Off: not every machine has them enabled."""

    host_shared: bool = False
    """Map host memory so that other processes can map it too: for ranks that copy for themselves."""

    force_miss: bool = False
    """Every match finds nothing: for comparing cached with uncached runs."""

    def __post_init__(self) -> None:
        for name in ("device_pages", "device_tails", "host_bytes"):
            _check_at_least(name, getattr(self, name), 0)
        for name in ("tail_every_pages", "tails_per_path"):
            _check_at_least(name, getattr(self, name), 1)
        _check_one_of("layout", self.layout, LAYOUTS)
        _check_one_of("copier", self.copier, COPIERS)
        _check_one_of("save", self.save, SAVE_POLICIES)
        _check_one_of("fetch", self.fetch, FETCH_POLICIES)
        _check_at_least("store_writing_bytes", self.store_writing_bytes, 1)
        for name in ("fetch_deadline_s", "store_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
                raise ConfigError(name, value, "must be seconds, more than none")
        if ":" not in str(self.evict):
            _check_one_of("evict", self.evict, (*EVICT_POLICIES, "module:Class"))


def _check_at_least(field: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(field, value, f"must be a whole number of at least {least}")


def _check_one_of(field: str, value: object, names: tuple[str, ...]) -> None:
    if value not in names:
        raise ConfigError(field, value, f"must be one of {', '.join(names)}")
