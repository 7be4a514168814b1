"""Pages of another engine in one of our stores: bytes of named pools, under keys of the engine's own.

    pages = NamedPages("shared:///var/cache/kv?size=200GiB", {"engine": "mine", "model": "…"})
    pool = pages.pool("kv", page_bytes=65_536)
    pool.put(["key 1", "key 2"], [page_1, page_2])            [True, True]: both are kept
    pool.get(["key 1", "key 3"], [memory_1, memory_2])        [True, False]: memory_1 has the bytes of key 1

The record of a page says what its bytes mean: the pool, their number, and all that the engine says `about`
them. So pages of another model, layout or rank are other pages, and are never found. Every byte has a
checksum: a page whose bytes are not those that were put, or can not be read, is a miss, and is deleted.

A store that fails costs hits, and nothing else: after three failures in a row it is not asked for a while
(`policy.breaker`). Only what is wrong from the start is an error: the URL, or pages of another length.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from threading import Lock
from time import monotonic
from typing import Any, TypeVar

from tiercel.errors import ConfigError, StoreError
from tiercel.policy.breaker import Breaker
from tiercel.storage.base import Get, Put, Store
from tiercel.storage.open import open_store
from tiercel.storage.record import Form, RecordKey
from tiercel.types import Kind, PageKey

log = logging.getLogger(__name__)

VERSION = 1
"""Of what a record says. Pages of another version are other pages."""

COUNTED = ("hits", "misses", "kept", "refused", "damaged", "failures")
"""Pages that were read, were not there, were kept, found no room, were damaged; calls that failed."""

Key = str | bytes
Page = memoryview | bytearray | bytes | Sequence[memoryview]
"""The bytes of a page, in one piece or in several in a row."""

T = TypeVar("T")


class NamedPages:
    """The pools of one engine in one store. Any number of threads may use them; a call blocks on the disk or
    the network, and lets go of the GIL meanwhile."""

    def __init__(
        self, store: Store | str, about: Mapping[str, Any], *, clock: Callable[[], float] = monotonic
    ) -> None:
        """`store`: a store or its URL; `close` closes it. `about`: all that decides what the bytes of a page
        mean, as JSON can write it."""
        self.store = open_store(store) if isinstance(store, str) else store
        self._about = json.dumps({"version": VERSION, **about}, sort_keys=True)
        self._clock = clock
        self._lock = Lock()
        self._breaker = Breaker()
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))

    def pool(self, name: str, page_bytes: int, about: Mapping[str, Any] | None = None) -> Pool:
        """Pages of this name, length and meaning. `about`: what more decides the meaning of their bytes."""
        if page_bytes < 1:
            raise ConfigError("page_bytes", page_bytes, f"a page of {name} must have bytes")
        return Pool(self, name, page_bytes, [self._about, json.dumps(about or {}, sort_keys=True)])

    def stats(self) -> dict[str, Any]:
        with self._lock:
            return {"state": self._breaker.state.value, **self.counters}

    def close(self) -> None:
        self.store.close()

    def call(self, do: Callable[[], T], without: T) -> T:
        """What `do` returns; `without`, if the store fails or is switched off."""
        with self._lock:
            if not self._breaker.allows(self._clock()):
                return without
        try:
            answer = do()
        except StoreError as error:
            with self._lock:
                self.counters["failures"] += 1
                worked = self._breaker.state.value
                self._breaker.failed(self._clock())
                if self._breaker.state.value != worked:
                    log.warning("the store fails, and is not used for a while: %s", error)
            return without
        except BaseException:
            with self._lock:
                self._breaker.not_used()
            raise
        with self._lock:
            self._breaker.worked()
        return answer

    def count(self, **counts: int) -> None:
        with self._lock:
            self.counters.update(counts)


class Pool:
    """Pages of one length and one meaning."""

    def __init__(self, pages: NamedPages, name: str, page_bytes: int, about: Sequence[str]) -> None:
        self.name, self.page_bytes = name, page_bytes
        self._pages, self._store = pages, pages.store
        meaning = json.dumps([*about, name, page_bytes]).encode()
        digest = blake2b(meaning, digest_size=16, person=b"named pages").digest()
        streams = ((name, (0,), page_bytes),)
        self._form = Form(Kind.PAGE, digest, streams, page_bytes, self._store.align)

    def record(self, key: Key) -> RecordKey:
        """The key of this page's record in the store."""
        return self._form.key(page_key(key))

    def holds(self, keys: Sequence[Key]) -> list[bool]:
        """Which of these pages the store has."""
        names = [self.record(key) for key in keys]
        return self._pages.call(lambda: self._store.contains(names), [False] * len(keys))

    def get(self, keys: Sequence[Key], pages: Sequence[Page]) -> list[bool]:
        """Fill the memory of each page. False: a miss; its memory may then hold any bytes."""
        named = [page_key(key) for key in keys]
        heads = [memoryview(bytearray(self._form.header_bytes)) for _ in keys]
        parts = [self._parts(page) for page in pages]
        wanted = [
            Get(self._form.key(key), [head, *page])
            for key, head, page in zip(named, heads, parts, strict=True)
        ]
        found = self._pages.call(lambda: self._store.get(wanted), None)
        if found is None:
            return self._counted([False] * len(keys))
        for number, (key, head, page) in enumerate(zip(named, heads, parts, strict=True)):
            if found[number] and self._form.flaw(head, key, page) is not None:
                found[number] = False
        missed = [key for key, hit in zip(keys, found, strict=True) if not hit]
        if unreadable := [key for key, listed in zip(missed, self.holds(missed), strict=True) if listed]:
            log.warning("%d pages of %s are damaged, and are deleted", len(unreadable), self.name)
            self.delete(unreadable)
        return self._counted(found, damaged=len(unreadable))

    def _counted(self, found: list[bool], damaged: int = 0) -> list[bool]:
        hits = sum(found)
        self._pages.count(hits=hits, misses=len(found) - hits, damaged=damaged)
        return found

    def put(self, keys: Sequence[Key], pages: Sequence[Page]) -> list[bool]:
        """Keep these pages. True: this one is kept; in a durable store it is on the disk."""
        values = []
        for key, page in zip(map(page_key, keys), map(self._parts, pages), strict=True):
            values.append(Put(self._form.key(key), [self._form.header(key, page), *page]))
        kept = self._pages.call(lambda: self._store.put(values), [False] * len(keys))
        done = sum(kept)
        self._pages.count(kept=done, refused=len(kept) - done)
        return kept

    def delete(self, keys: Sequence[Key]) -> int:
        """Delete these pages. Returns how many were there."""
        names = [self.record(key) for key in keys]
        return self._pages.call(lambda: self._store.delete(names), 0)

    def _parts(self, page: Page) -> list[memoryview]:
        pieces = [page] if isinstance(page, memoryview | bytearray | bytes) else page
        parts = [memoryview(piece).cast("B") for piece in pieces]
        if sum(map(len, parts)) != self.page_bytes:
            why = f"a page of {self.name} has {self.page_bytes:,} bytes"
            raise ConfigError("page", f"{sum(map(len, parts)):,} bytes", why)
        return parts


def page_key(key: Key) -> PageKey:
    """The key of a page as our stores have it."""
    data = key.encode() if isinstance(key, str) else key
    return PageKey(blake2b(data, digest_size=32, person=b"named page").digest())
