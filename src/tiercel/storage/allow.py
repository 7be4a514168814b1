"""Which stores may be attached over HTTP: only those that `--store-allow` named when the server was started.

    file:///var/cache       that folder and every folder in it; links are resolved before the comparison
    redis://host            that host, any port; redis://host:6380: that port. Also valkey, rediss, mooncake
    redis+unix:///run       that socket, or every socket in that folder
    memory:                 memory of the server process

A class of your own (`module:Class`) is never allowed, neither as a store nor as an eviction policy: to import
it is to run its code.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

from tiercel.errors import ConfigError

_HOSTS = {"redis": 6379, "rediss": 6379, "valkey": 6379, "mooncake": None}
"""Schemes of stores on a network, with their default ports."""
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
    """The place of a URL. Raises ValueError, which says what is wrong."""
    split = urlsplit(url.partition("?")[0], allow_fragments=False)
    scheme = url.partition(":")[0]
    if scheme == "memory":
        return _Place(scheme)
    if scheme in _PATHS:
        if split.netloc.rpartition("@")[2] or not split.path.startswith("/"):
            raise ValueError(f"write a path as {scheme}:///path, with three slashes")
        return _Place(scheme, path=os.path.realpath(unquote(split.path)))
    if scheme in _HOSTS:
        try:
            host, port = split.hostname, split.port
        except ValueError:  # its message may contain a part of a password
            host = port = None
        if not host:
            raise ValueError(f"write the address as {scheme}://host:port")
        return _Place(scheme, host=host, port=port)
    known = ", ".join(f"{each}:" for each in (*_PATHS, *_HOSTS, "memory"))
    raise ValueError(
        f"is none of {known}; a class of your own can only be given when the server starts (--store)"
    )


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
    if not any(_place(each).holds(place) for each in allowed):
        return "is in no place that --store-allow named when the server was started"
    return ""
