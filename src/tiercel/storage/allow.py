"""Which stores may be attached over HTTP: those in places that were named when the server was started.

    file:///var/cache       that folder and every folder in it; links are followed before they are compared
    redis://host            that host, at any port; redis://host:6380 at this one. So valkey, rediss, mooncake
    redis+unix:///run       that socket, or every socket in that folder
    memory:                 memory of the server itself

A class of one's own (`module:Class`) is never among them, neither as a store nor as an eviction policy: its
import runs code.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

from tiercel.errors import ConfigError

_HOSTS = {"redis": 6379, "rediss": 6379, "valkey": 6379, "mooncake": None}
"""Schemes of stores behind a network, and the port they mean when they name none."""
_PATHS = ("file", "redis+unix")


@dataclass(frozen=True)
class _Place:
    scheme: str
    path: str = ""
    host: str = ""
    port: int | None = None

    def holds(self, other: _Place) -> bool:
        if self.scheme != other.scheme:
            return False
        if self.scheme in _PATHS:
            return os.path.commonpath([self.path, other.path]) == self.path
        port = _HOSTS.get(other.scheme) if other.port is None else other.port
        return self.host == other.host and self.port in (None, port)


def _place(url: str) -> _Place:
    """Raises `ValueError`, which says why not."""
    split = urlsplit(url.partition("?")[0], allow_fragments=False)
    scheme = url.partition(":")[0]
    if scheme == "memory":
        return _Place(scheme)
    if scheme in _PATHS:
        if split.netloc.rpartition("@")[2] or not split.path.startswith("/"):
            raise ValueError(f"a path goes as {scheme}:///path, with three slashes")
        return _Place(scheme, path=os.path.realpath(unquote(split.path)))
    if scheme in _HOSTS:
        try:
            host, port = split.hostname, split.port
        except ValueError:  # its words would quote what may be half a password
            host = port = None
        if not host:
            raise ValueError(f"where it is goes as {scheme}://host:port")
        return _Place(scheme, host=host, port=port)
    known = ", ".join(f"{each}:" for each in (*_PATHS, *_HOSTS, "memory"))
    raise ValueError(f"is none of {known}; a class of your own can be given at the start only (--store)")


def check_allow(url: str) -> None:
    """Raises `ConfigError` for what names no place."""
    try:
        _place(url)
    except ValueError as error:
        raise ConfigError("store_allow", url, str(error)) from error


def why_not(url: str, allowed: Sequence[str]) -> str:
    """Why this URL may not be opened; nothing if it may."""
    try:
        place = _place(url)
        evict = parse_qs(url.partition("?")[2]).get("evict", [""])
    except ValueError as error:
        return str(error)
    if any(":" in each for each in evict):
        return "evict: a class of your own can be given at the start only (--store)"
    if not any(_place(each).holds(place) for each in allowed):
        return "is in no place that was named with --store-allow when the server was started"
    return ""
