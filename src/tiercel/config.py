"""Settings: frozen, checked once, every default with its reason. A `setting` with a help text is an option of
the command line too, so a new option is written down in one place.

The names of policies, layouts and copiers are checked here: a typing error is found at start, not at
the first copy.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pkgutil import resolve_name
from typing import Any, TypeVar

from tiercel.errors import ConfigError

LAYOUTS = ("layer_first", "page_first_direct")
LAYOUT_NAMES = {name: name for name in LAYOUTS} | {"page_first": "page_first_direct"}
"""The names of layouts in the field. Here a row is never cut, so `page_first` is (page, layer, row) too: the
same bytes as `page_first_direct`."""
COPIERS = ("auto", "direct", "kernel", "reference")
SPARSE = ("auto", "off", "always")
SAVE_POLICIES = ("through", "selective", "back")
EVICT_POLICIES = ("value", "lru", "lfu", "slru", "priority")
FETCH_POLICIES = ("best_effort", "wait", "deadline")
OWN_CLASS = "module:Class"
"""Stands for the name of a user's own class."""

AnyPolicy = TypeVar("AnyPolicy")

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


def size_text(size: int) -> str:
    """`268435456` → `256 MiB`."""
    for unit, each in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= each:
            return f"{size / each:,.1f}".removesuffix(".0") + f" {unit}"
    return f"{size} B"


def parse_address(field: str, text: str) -> tuple[str, int]:
    """`host:port` → both. An IPv6 address has brackets."""
    written, _, port = text.rpartition(":")
    host = written.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(field, text, "write the address as host:port")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether an address or a name can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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


def make_policy(field: str, name: str, known: Mapping[str, type[AnyPolicy]], base: type) -> AnyPolicy:
    """The policy that a setting names: a `known` one, or the user's own class, made without arguments."""
    if name in known:
        return known[name]()
    try:
        made: AnyPolicy = load_class(name, base)()
    except (ImportError, TypeError) as error:
        raise ConfigError(field, name, str(error)) from error
    return made


def setting(default: Any, help: str = "", **rules: Any) -> Any:
    """A field with rules. If it has a `help`, it is an option of the command line: its name, or `option`.

    Rules: `one_of` these names; a whole number from `least` to `most`; `seconds`; `memory`: bytes that may be
    written as 40GiB; `flag`: the form of an option that is on or off; `otherwise`: what None means, for the
    help. A tuple of strings is an option that can be repeated.
    """
    return field(default=default, metadata=rules | ({"help": help} if help else {}))


def check_settings(settings: Any) -> None:
    """Raises a `ConfigError` that names the first field that breaks its rules."""
    for each in fields(settings):
        value, rules = getattr(settings, each.name), each.metadata
        if value is None and each.default is None:
            continue
        whole = isinstance(value, int) and not isinstance(value, bool)
        if "least" in rules and not (whole and value >= rules["least"]):
            raise ConfigError(each.name, value, f"must be a whole number of at least {rules['least']}")
        if "most" in rules and value > rules["most"]:
            raise ConfigError(each.name, value, f"must be at most {rules['most']}")
        if "seconds" in rules and not ((whole or isinstance(value, float)) and 0 < value < 1e6):
            raise ConfigError(each.name, value, "must be seconds, more than none")
        if isinstance(each.default, bool) and not isinstance(value, bool):
            raise ConfigError(each.name, value, "must be true or false")
        if isinstance(each.default, tuple) and not isinstance(value, tuple):
            raise ConfigError(
                each.name, "…", "must be a tuple"
            )  # a string would be one value for each letter
        if any(isinstance(one, str) and not one for one in (value if isinstance(value, tuple) else [value])):
            raise ConfigError(each.name, value, "must not be empty")
        names = rules.get("one_of", (value,))
        if value not in names and not (OWN_CLASS in names and ":" in str(value)):
            raise ConfigError(each.name, value, f"must be one of {', '.join(names)}")


@dataclass(frozen=True)
class CacheConfig:
    """How one cache is run. What a model stores is not here: that is `CacheSpec`."""

    device_pages: int = setting(0, least=0)
    """Whole pages that the device has room for. A tail takes `CacheSpec.units_per_tail` of their units. 0 if
    another engine owns the device memory (`HostCache`)."""
    staging_tails: int = setting(0, least=0)
    """Tails that a step can write (`transfer.staging`). 0 is right only for a spec without tails."""
    host_bytes: int = setting(
        0,
        "Host memory for pages and tails; 0 turns the host tier off.",
        least=0,
        memory=True,
        option="host_memory",
    )
    sparse: str = setting(
        "auto",
        "Whether entries that attention selects may stay on the host.",
        one_of=SPARSE,
    )
    """`auto`: where the device has no room for them (on CUDA). `always`: as soon as they are saved, for
    tests. Of DeepSeek V4 that is the c4 part of a page, 79 % of its bytes."""
    staged_pages: int = setting(0, least=0)
    """Sparse pages that one step can read whole: the longest text that is not whole on the device."""
    layout: str = setting(
        "page_first_direct",
        "Layout of host memory; page_first is another name of page_first_direct.",
        one_of=(*LAYOUT_NAMES,),
    )
    """The default keeps a page one record, and each layer of it one plain copy."""
    copier: str = setting("auto", "Which code copies between device and host.", one_of=COPIERS)
    """`reference` is slow; the others are compared with it."""
    save: str = setting("through", "When a page is copied to the host.", one_of=SAVE_POLICIES)
    """`through`: an eviction from the device needs no copy."""
    evict: str = setting(
        "value", "What is evicted first from a full tier.", one_of=(*EVICT_POLICIES, OWN_CLASS)
    )
    """`value`: what saves the least computing for its bytes."""
    tail_every_pages: int = setting(16, "A tail at least every so many pages of a prompt.", least=1)
    """DeepSeek V4 Flash: a tail each 4 K tokens, 23 % more bytes."""
    tails_per_path: int = setting(4, least=1)
    """Tails between the root and a page, at most. If there would be more, the coldest is removed; a tail
    where texts part goes last. A text goes on from its last one, and a tail of DeepSeek V4 takes four places:
    with 64 tails the default policy finds up to a point less of real traces (docs/log.md)."""
    fetch: str = setting(
        "deadline", "How long a request waits for the store.", one_of=(*FETCH_POLICIES, OWN_CLASS)
    )
    """A request does not wait, waits until all is read, or until a deadline. No policy fetches what is
    computed sooner."""
    fetch_deadline_s: float = setting(0.25, "Seconds a request waits for each 1,024 tokens.", seconds=True)
    """At least once this long. Most machines compute faster than a store that takes longer."""
    store_writing_bytes: int = setting(64 * 1024**2, least=1)
    """Host memory that writes to the store may hold. Never more than half of it."""
    store_timeout_s: float = setting(
        10.0, "Seconds after which an operation of the store has failed.", seconds=True
    )
    save_step_bytes: int = setting(64 * 1024**2, least=1)
    """Bytes of saves that a step starts, the oldest first. One millisecond of the link of an H200: decoding
    is hardly slower beside it."""
    huge_pages: bool = setting(True)
    """Ask the kernel for huge pages for host memory. They are touched and pinned four times as fast (H200
    machine). A kernel without them is no error."""
    host_shared: bool = False
    """Map host memory so that other processes can map it too: for ranks that copy for themselves."""
    force_miss: bool = setting(
        False, "Find nothing: for comparing cached with uncached runs.", flag="--force-miss"
    )

    def __post_init__(self) -> None:
        check_settings(self)
