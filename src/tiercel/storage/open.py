"""URLs of stores: how one is opened, which may be attached over HTTP, and how its password is hidden.

    file:///var/cache/tiercel?size=200GiB&free=10GiB&evict=lru      one process at a time
    shared:///var/cache/tiercel?size=200GiB            the same for several processes of one machine
    redis://user:password@host:6379/0?timeout_s=2      valkey:// and rediss:// (TLS) too
    redis+unix:///run/redis.sock?db=0
    mooncake://master:50051?local_segment=4GiB&replicas=2
    peer://host:9000?transport=tcp                     the host pages of another server; can only be read
    memory:?size=1GiB
    package.module:Class?option=value                  a class of your own

The options of a store are the arguments of its class. A number may have a unit of bytes (`1GiB`). A class of
your own gets its options as text. A back end and its client library are imported only when they are used.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast, get_type_hints
from urllib.parse import SplitResult, parse_qs, parse_qsl, quote, unquote, urlsplit

from tiercel.config import load_class, parse_address, parse_bytes
from tiercel.errors import ConfigError, StoreAway, TiercelError
from tiercel.storage.base import Store
from tiercel.storage.late import LateStore
from tiercel.storage.peer import PeerStore
from tiercel.storage.several import SeveralStores


def open_store(url: str, *, read_only: bool = False) -> Store:
    """Open the store of a URL. `read_only`: change nothing, so that another process can go on writing. Stores
    without this mode are opened as usual: any number of processes may write to them."""
    with _told_of(url):
        return _maker(url, read_only)()


def open_now_or_later(url: str) -> Store:
    """The store of a URL. If it can not be reached, it is opened later, by the first call that finds it."""

    def make() -> Store:
        with _told_of(url):
            return maker()

    with _told_of(url):
        maker = _maker(url, read_only=False)
    try:
        return make()
    except StoreAway as away:
        return LateStore(make, cast("type[Store]", maker.func), away)


def open_stores(
    url: str | None, peers: Sequence[str], *, key: str = "", required: bool = True
) -> Store | None:
    """A store and peers as one store; None: there is neither. `key`: for peers whose URL has none.
    `required`: a store that can not be reached is an error; if not, it is opened later."""
    opened = [opened for peer in peers if isinstance(opened := open_store(_with_key(peer, key)), PeerStore)]
    store = None
    if url is not None:
        store = open_store(url) if required else open_now_or_later(url)
    if store is None and len(opened) == 1:
        return opened[0]
    return SeveralStores(opened, store) if opened else store


def open_peers(urls: Sequence[str], *, key: str = "") -> dict[tuple[str, int], PeerStore]:
    """Peers by host and port. The peers need not run yet."""
    check_peers(urls)
    found = dict[tuple[str, int], PeerStore]()
    for url in urls:
        peer = open_store(_with_key(url, key))
        assert isinstance(peer, PeerStore)
        found[parse_address("peer", peer.address)] = peer
    return found


def check_peers(urls: Sequence[str]) -> None:
    """Raises ConfigError if one of them is not the URL of a peer."""
    for url in urls:
        if not re.fullmatch(r"peer://([\w.-]+|\[[\da-fA-F:.]+\]):\d+/?(\?.*)?", url):
            raise ConfigError("peer", shown(url), "write it as peer://host:port")


def _with_key(peer: str, key: str) -> str:
    place, _, query = peer.partition("?")
    if not key or "key" in parse_qs(query):
        return peer
    return f"{place}?{query}{'&' if query else ''}key={quote(key, safe='')}"


def _maker(url: str, read_only: bool) -> partial[Store]:
    """What opens the store of a URL: its class, and what the URL says. Raises ValueError."""
    place, _, query = url.partition("?")
    name, _, rest = place.partition(":")
    options = _parse_options(query)
    if name in _SCHEMES:
        return _known(_SCHEMES[name], place, options, read_only)
    if rest.isidentifier():
        return _own(place, options, read_only)
    raise ValueError(f"is none of {', '.join(f'{known}:' for known in _SCHEMES)} or package.module:Class")


@contextmanager
def _told_of(url: str) -> Iterator[None]:
    """What is wrong with a URL is told without its passwords."""
    scheme = _SCHEMES.get(url.partition(":")[0])
    try:
        yield
    except ConfigError as error:
        raise ConfigError("store", hide(url, url), f"{error.field}: {error.why}") from error
    except ImportError as error:
        if scheme is None or not scheme.needs:
            raise
        why = f"{error}; to install its client: {scheme.needs}"
        raise ConfigError("store", hide(url, url), why) from error
    except ValueError as error:
        raise ConfigError("store", hide(url, url), str(error)) from error
    except TiercelError:
        raise
    except Exception as error:  # whatever a class of the user's own raises
        if scheme is not None:
            raise
        raise ConfigError("store", hide(url, url), f"can not be opened: {hide(repr(error), url)}") from error


def _known(scheme: _Scheme, place: str, options: dict[str, str], read_only: bool) -> partial[Store]:
    arguments = scheme.where(urlsplit(place, allow_fragments=False))
    store_class: Any = load_class(scheme.store, Store)
    hints = get_type_hints(store_class.__init__)
    names = list(inspect.signature(store_class).parameters)[len(arguments) :]
    types = {name: hints[name] for name in names if name != "read_only"}
    for name in options:
        if name not in types:
            raise ValueError(f"has no option {name}; options are {', '.join(types)}")
    values = {name: _convert(name, text, types[name]) for name, text in options.items()}
    return partial(store_class, *arguments, **values, **_mode(store_class, read_only))


def _own(place: str, options: dict[str, str], read_only: bool) -> partial[Store]:
    try:
        store_class: Any = load_class(place, Store)
        keywords = options | _mode(store_class, read_only)
        inspect.signature(store_class).bind(**keywords)
    except (ImportError, TypeError) as error:
        raise ValueError(str(error)) from error
    return partial(store_class, **keywords)


def _mode(store_class: Any, read_only: bool) -> dict[str, Any]:
    knows = "read_only" in inspect.signature(store_class).parameters
    return {"read_only": True} if read_only and knows else {}


def _parse_options(query: str) -> dict[str, str]:
    if query and not all("=" in each for each in query.split("&")):
        raise ValueError("write options as name=value&name=value")
    options: dict[str, str] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name in options:
            raise ValueError(f"option {name} is there twice")
        options[name] = text
    return options


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
    if not re.fullmatch(r"[\w.-]+:\d+", split.netloc) or split.path.strip("/") or not split.port:
        raise ValueError("write the address as host:port")
    return (split.netloc,)


def _redis_host(split: SplitResult) -> tuple[str]:
    host = split.netloc.rpartition("@")[2]
    address = r"([\w.-]+|\[[\da-fA-F:.]+\])(:\d+)?"
    if not re.fullmatch(address, host) or not re.fullmatch(r"(/\d*)?", split.path) or split.port == 0:
        raise ValueError("write the address as host:port/db")
    scheme = "rediss" if split.scheme == "rediss" else "redis"
    return (f"{scheme}://{split.netloc}{split.path}",)


def _redis_socket(split: SplitResult) -> tuple[str]:
    if split.hostname or not split.path.startswith("/"):
        raise ValueError("write the address as redis+unix:///path/to.sock, with three slashes")
    return (f"unix://{split.netloc}{split.path}",)


class _Scheme(NamedTuple):
    """One kind of URL."""

    store: str  # `module:Class`
    where: Callable[[SplitResult], tuple[str, ...]] = lambda _: ()
    """The positional arguments of the class. Raises ValueError."""
    needs: str = ""  # how to install its client


_REDIS, _PIP_REDIS = "tiercel.storage.redis:RedisStore", 'pip install "redis[hiredis]"'
_PIP_MOONCAKE = "pip install mooncake-transfer-engine-non-cuda, and the library libibverbs1 of the system"
_SCHEMES = {
    "file": _Scheme("tiercel.storage.file:FileStore", _path),
    "shared": _Scheme("tiercel.storage.shared:SharedStore", _path),
    "redis": _Scheme(_REDIS, _redis_host, _PIP_REDIS),
    "rediss": _Scheme(_REDIS, _redis_host, _PIP_REDIS),
    "valkey": _Scheme(_REDIS, _redis_host, _PIP_REDIS),
    "redis+unix": _Scheme(_REDIS, _redis_socket, _PIP_REDIS),
    "mooncake": _Scheme("tiercel.storage.mooncake:MooncakeStore", _host_and_port, _PIP_MOONCAKE),
    "peer": _Scheme("tiercel.storage.peer:PeerStore", _host_and_port),
    "memory": _Scheme("tiercel.storage.memory:MemoryStore"),
}

# Which stores may be attached over HTTP: only those that `--store-allow` named when the server was started.
#
#    file:///var/cache       that folder and every folder in it; links are resolved before the comparison
#    redis://host            that host, any port; redis://host:6380: that port. Or valkey, mooncake, peer
#    redis+unix:///run       that socket, or every socket in that folder
#    memory:                 memory of the server process
#
# A class of your own (`module:Class`) is never allowed, neither as a store nor as an eviction policy: to
# import it is to run its code.

_PORTS = {"redis": 6379, "rediss": 6379, "valkey": 6379, "mooncake": None, "peer": None}
"""Schemes of stores on a network, with their default ports."""
_PATHS = ("file", "shared", "redis+unix")


def check_allow(url: str) -> None:
    """Raises ConfigError if the URL names no place."""
    try:
        _place(url)
    except ValueError as error:
        raise ConfigError("store_allow", url, str(error)) from error


def why_not(url: str, allowed: Sequence[str]) -> str:
    """Why this URL may not be opened. Empty if it may."""
    try:
        place = _place(url)
        evict = parse_qs(url.partition("?")[2]).get("evict", [""])
    except ValueError as error:
        return str(error)
    if any(":" in each for each in evict):
        return "evict: a class of your own can only be given when the server starts (--store)"
    if not any(_holds(_place(each), place) for each in allowed):
        return "is in no place that --store-allow named when the server was started"
    return ""


def _place(url: str) -> tuple[str, str, int | None]:
    """The scheme, the path or host, and the port if there is one. Raises ValueError."""
    split = urlsplit(url.partition("?")[0], allow_fragments=False)
    scheme = url.partition(":")[0]
    if scheme in _PATHS:
        if split.netloc.rpartition("@")[2] or not split.path.startswith("/"):
            raise ValueError(f"write a path as {scheme}:///path, with three slashes")
        return scheme, os.path.realpath(unquote(split.path)), None
    if scheme in _PORTS:
        try:
            host, port = split.hostname, split.port
        except ValueError:  # its message may contain a part of a password
            host = port = None
        if not host:
            raise ValueError(f"write the address as {scheme}://host:port")
        return scheme, host, port
    if scheme == "memory":
        return scheme, "", None
    known = ", ".join(f"{each}:" for each in (*_PATHS, *_PORTS, "memory"))
    raise ValueError(
        f"is none of {known}; a class of your own can only be given when the server starts (--store)"
    )


def _holds(allowed: tuple[str, str, int | None], asked: tuple[str, str, int | None]) -> bool:
    (scheme, where, port), (asked_scheme, asked_where, asked_port) = allowed, asked
    if scheme != asked_scheme:
        return False
    if scheme in _PATHS:
        return os.path.commonpath([where, asked_where]) == where
    asked_port = _PORTS.get(scheme) if asked_port is None else asked_port
    return where == asked_where and port in (None, asked_port)


def shown(url: str) -> str:
    """A URL without its passwords."""
    return hide(url, url)


HIDDEN = "***"  # replaces a password
_SECRET_FIELD = re.compile(r"(?<=[?&])([^=&#]*(?:pass|secret|token|key)[^=&#]*=)([^&#]+)", re.IGNORECASE)


def hide(text: str, url: str) -> str:
    """Remove the passwords of a URL (user:…@host, ?password=…) from a text, in their escaped and their plain
    form. A password with a slash, or another character that should have been escaped, is found as well."""
    secrets = {value for _, value in _SECRET_FIELD.findall(url)}
    front, at, _ = url.partition("://")[2].rpartition("@")
    name, _, password = front.partition(":")
    if at and password and not re.search(r"[/?#]", name) and not re.match(r"\d+[/?#]", password):
        secrets.add(password)
    for secret in sorted(secrets, key=len, reverse=True):
        for spelled in (secret, unquote(secret)):
            text = text.replace(spelled, HIDDEN)
    return text
