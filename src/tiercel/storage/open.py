"""From a URL to a store: which back end, where, and with which options.

    file:///var/cache/tiercel?size=200GiB&free=10GiB&evict=lru
    redis://user:password@host:6379/0?timeout_s=2      valkey:// and rediss:// (TLS) too
    redis+unix:///run/redis.sock?db=0
    mooncake://master:50051?local_segment=4GiB&replicas=2
    memory:?size=1GiB
    package.module:Class?option=value                  a class of your own

The options of a store are the arguments of its class. A number may have a unit of bytes (`1GiB`). A class of
your own gets its options as text. A back end and its client library are imported only when they are used.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from tiercel.config import load_class, parse_bytes
from tiercel.errors import ConfigError
from tiercel.storage.base import Store
from tiercel.storage.secrets import hide


@dataclass(frozen=True)
class _Scheme:
    """One kind of URL."""

    store: str
    """`module:Class`."""
    where: Callable[[SplitResult], tuple[str, ...]] = lambda _: ()
    """The positional arguments of the class. Raises ValueError."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """For options that the class requires."""
    needs: str = ""
    """How to install its client."""


def open_store(url: str, *, read_only: bool = False) -> Store:
    """Open the store of a URL. `read_only`: change nothing, so that another process can go on writing. Stores
    without this mode are opened as usual: any number of processes may write to them."""
    place, _, query = url.partition("?")
    name, _, rest = place.partition(":")
    try:
        options = dict(_parse_options(query))
        if name in _SCHEMES:
            return _open_known(_SCHEMES[name], place, options, read_only)
        if rest.isidentifier():
            return _open_own(place, options, read_only)
        raise ValueError(f"is none of {', '.join(f'{known}:' for known in _SCHEMES)} or package.module:Class")
    except ConfigError as error:
        raise ConfigError("store", hide(url, url), f"{error.field}: {error.why}") from error
    except ValueError as error:
        raise ConfigError("store", hide(url, url), str(error)) from error


def _open_known(scheme: _Scheme, place: str, options: dict[str, str], read_only: bool) -> Store:
    arguments = scheme.where(urlsplit(place, allow_fragments=False))
    try:
        store_class = load_class(scheme.store, Store)
        types = _options_of(store_class, len(arguments))
        for name in options:
            if name not in types:
                raise ValueError(f"has no option {name}; options are {', '.join(types)}")
        texts = {**scheme.defaults, **options}
        values = {name: _convert(name, text, types[name]) for name, text in texts.items()}
        store: Store = store_class(*arguments, **values, **_mode(store_class, read_only))
    except ImportError as error:
        if not scheme.needs:
            raise
        raise ValueError(f"{error}; to install its client: {scheme.needs}") from error
    return store


def _open_own(place: str, options: dict[str, str], read_only: bool) -> Store:
    try:
        store_class = load_class(place, Store)
        keywords = options | _mode(store_class, read_only)
        inspect.signature(store_class).bind(**keywords)
    except (ImportError, TypeError) as error:
        raise ValueError(str(error)) from error
    store: Store = store_class(**keywords)
    return store


def _mode(store_class: Any, read_only: bool) -> dict[str, Any]:
    knows = "read_only" in inspect.signature(store_class).parameters
    return {"read_only": True} if read_only and knows else {}


def _options_of(store_class: Any, arguments: int) -> dict[str, Any]:
    """The options with their types: the parameters of the class without `arguments` and `read_only`."""
    hints = get_type_hints(store_class.__init__)
    names = list(inspect.signature(store_class).parameters)[arguments:]
    return {name: hints[name] for name in names if name != "read_only"}


def _parse_options(query: str) -> list[tuple[str, str]]:
    if query and not all("=" in each for each in query.split("&")):
        raise ValueError("write options as name=value&name=value")
    pairs = parse_qsl(query, keep_blank_values=True)
    for name, _ in pairs:
        if sum(name == other for other, _ in pairs) > 1:
            raise ValueError(f"option {name} is there twice")
    return pairs


def _convert(name: str, text: str, kind: Any) -> str | int | float:
    if kind in (int, int | None):
        return parse_bytes(text, name)
    if kind is float:
        if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) == 0:
            raise ValueError(f"option {name}: {text!r} is not a number above 0")
        return float(text)
    assert kind is str, f"option {name} of type {kind} can not be given by a URL"
    return text


def _path(split: SplitResult) -> tuple[str]:
    if split.netloc or not split.path.startswith("/"):
        raise ValueError(f"write a path as {split.scheme}:///var/cache, with three slashes")
    return (unquote(split.path),)


def _host_and_port(split: SplitResult) -> tuple[str]:
    if not re.fullmatch(r"[\w.-]+:\d+", split.netloc) or split.path.strip("/"):
        raise ValueError("write the address as host:port")
    return (split.netloc,)


def _redis_host(scheme: str) -> Callable[[SplitResult], tuple[str]]:
    def where(split: SplitResult) -> tuple[str]:
        host = split.netloc.rpartition("@")[2]
        if not re.fullmatch(r"([\w.-]+|\[[\da-fA-F:.]+\])(:\d+)?", host) or not re.fullmatch(
            r"(/\d*)?", split.path
        ):
            raise ValueError("write the address as host:port/db")
        return (f"{scheme}://{split.netloc}{split.path}",)

    return where


def _redis_socket(split: SplitResult) -> tuple[str]:
    if split.hostname or not split.path.startswith("/"):
        raise ValueError("write the address as redis+unix:///path/to.sock, with three slashes")
    return (f"unix://{split.netloc}{split.path}",)


def _redis(where: Callable[[SplitResult], tuple[str]]) -> _Scheme:
    return _Scheme("tiercel.storage.redis:RedisStore", where, needs='pip install "tiercel[redis]"')


_SCHEMES = {
    "file": _Scheme(
        "tiercel.storage.file:FileStore",
        _path,
        # Enough to try it on a laptop without filling its disk. For a server, set the size.
        defaults={"size": "10GiB"},
    ),
    "redis": _redis(_redis_host("redis")),
    "rediss": _redis(_redis_host("rediss")),
    "valkey": _redis(_redis_host("redis")),
    "redis+unix": _redis(_redis_socket),
    "mooncake": _Scheme(
        "tiercel.storage.mooncake:MooncakeStore",
        _host_and_port,
        needs='pip install "tiercel[mooncake]", and the library libibverbs1 of the system',
    ),
    "memory": _Scheme("tiercel.storage.memory:MemoryStore"),
}
