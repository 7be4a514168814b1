"""Tenants: who has which API key, and how much each may have.

A file has one table for each tenant. `tiercel key NAME` makes a key and prints the table:

    [team-a]
    sha256 = ["9f86d0818…"]           # of its keys: the file does not tell them
    requests-in-flight = 8            # every limit may be left out
    requests-per-minute = 600
    tokens-per-minute = 100000        # of prompts and answers
    cache-memory = "2GiB"             # on device and host together

A tenant's pages are in a namespace of its own, whatever its requests say. `cache_salt` divides it further.

Minutes are buckets: a tenant that was idle may use a whole minute's share at once, and gets it back evenly.
An answer's tokens are known when it ends, so they are taken then, and the next request waits for them.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tiercel.config import check_settings, parse_bytes, setting
from tiercel.errors import ConfigError
from tiercel.server.http.pace import Bucket

log = logging.getLogger("tiercel.server")

NAME = r"[A-Za-z0-9_.-]{1,64}"
FIELD = "keys_file"


@dataclass(frozen=True)
class TenantLimits:
    """None: there is no limit."""

    requests_in_flight: int | None = setting(None, least=1)
    requests_per_minute: int | None = setting(None, least=1)
    tokens_per_minute: int | None = setting(None, least=1)
    cache_memory: int | None = setting(None, least=0)

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class OverLimit:
    """Why a tenant gets no answer now."""

    limit: str
    most: int
    retry_s: int

    def __str__(self) -> str:
        return f"the limit {self.limit} = {self.most} is reached; try again in {self.retry_s} s or more"


class Tenant:
    """One tenant and what it uses now. One event loop uses it."""

    def __init__(self, name: str, limits: TenantLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._clock = clock
        self.running = 0
        self.limits = limits
        self._buckets: dict[str, Bucket] = {}
        self.limit_to(limits)

    def limit_to(self, limits: TenantLimits) -> None:
        """Set new limits. A minute with an unchanged limit goes on."""
        for name in ("requests_per_minute", "tokens_per_minute"):
            most = getattr(limits, name)
            if most is None:
                self._buckets.pop(name, None)
            elif name not in self._buckets or most != getattr(self.limits, name):
                self._buckets[name] = Bucket(most / 60, most, self._clock())
        self.limits = limits

    def begin(self) -> OverLimit | None:
        """A request begins, if no limit is reached; then `end` must be called."""
        most = self.limits.requests_in_flight
        if most is not None and self.running >= most:
            return OverLimit("requests-in-flight", most, 1)
        for name, bucket in self._buckets.items():
            if wait_s := bucket.wait_s(self._clock()):
                return OverLimit(name.replace("_", "-"), getattr(self.limits, name), int(wait_s) + 1)
        self.running += 1
        if requests := self._buckets.get("requests_per_minute"):
            requests.take(1)
        return None

    def end(self, tokens: int) -> None:
        """A request that began has ended. `tokens`: those of prompt and answer."""
        self.running -= 1
        if bucket := self._buckets.get("tokens_per_minute"):
            bucket.take(tokens)


def digest_of(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


class Tenants:
    """The tenants of a file. They are found by the digest of a key: so the time of a search tells nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.by_name: dict[str, Tenant] = {}
        self._by_digest: dict[str, Tenant] = {}
        self.read()

    def read(self) -> None:
        """Read the file, at the start and again later. Raises `ConfigError`, and then nothing has changed."""
        tables = {name: _checked(self._path, name, table) for name, table in self._tables().items()}
        by_digest: dict[str, str] = {}
        for name, (digests, _) in tables.items():
            for digest in digests:
                if by_digest.setdefault(digest, name) != name:
                    raise ConfigError(FIELD, str(self._path), f"{name} and {by_digest[digest]} have one key")
        for name, (_, limits) in tables.items():
            if name in self.by_name:
                self.by_name[name].limit_to(limits)
            else:
                self.by_name[name] = Tenant(name, limits)
        self.by_name = {name: self.by_name[name] for name in tables}
        self._by_digest = {digest: self.by_name[name] for digest, name in by_digest.items()}

    def read_again(self) -> bool:
        """`read` for a running server: a file that can not be used is logged. Returns whether it was read."""
        try:
            self.read()
        except ConfigError as error:
            log.error("the tenants stay as they were: %s", error)
            return False
        log.info("%s tenants were read from %s", len(self.by_name), self._path)
        return True

    def find(self, key: bytes) -> Tenant | None:
        return self._by_digest.get(digest_of(key))

    @property
    def cache_limits(self) -> dict[str, int | None]:
        return {name: tenant.limits.cache_memory for name, tenant in self.by_name.items()}

    def _tables(self) -> Mapping[str, Any]:
        try:
            return tomllib.loads(self._path.read_text())
        except OSError as error:
            raise ConfigError(FIELD, str(self._path), f"can not be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(FIELD, str(self._path), f"is not TOML: {error}") from error


def _checked(path: Path, name: str, table: Any) -> tuple[Iterable[str], TenantLimits]:
    """The digests and limits of one table."""

    def wrong(why: str) -> ConfigError:
        return ConfigError(FIELD, str(path), f"{name}: {why}")

    if not isinstance(table, dict):
        raise wrong("is no table: every tenant is one, as [name]")
    if not re.fullmatch(NAME, name):
        raise wrong("a name has 1 to 64 letters, digits, dots, dashes and underscores")
    given = {field.replace("-", "_"): value for field, value in table.items()}
    digests = given.pop("sha256", None)
    digests = [digests] if isinstance(digests, str) else digests
    if not isinstance(digests, list) or not digests:
        raise wrong('has no key; give sha256 = ["…"] (tiercel key makes one)')
    for digest in digests:
        if not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)):
            raise wrong("sha256 must be 64 small hexadecimal digits, the SHA-256 of a key")
        if digest == digest_of(b""):
            raise wrong("sha256 is that of an empty key")
    known = {each.name for each in fields(TenantLimits)}
    if unknown := given.keys() - known:
        names = ", ".join(sorted(each.replace("_", "-") for each in known))
        raise wrong(f"{min(unknown)} is not known here; there are sha256, {names}")
    if "cache_memory" in given:
        given["cache_memory"] = parse_bytes(given["cache_memory"], f"{name}: cache-memory")
    try:
        return digests, TenantLimits(**given)
    except ConfigError as error:
        raise wrong(f"{error.field.replace('_', '-')} = {error.value!r} {error.why}") from error
