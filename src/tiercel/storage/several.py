"""Several places to read from as one store: peers first, in order, then the store that is written to.

    contains    each place is asked once, for keys that those before it do not have
    get         from the first that has it
    put, delete, clear, keys …    the last one, the store

A peer that fails is left out, and tried again later (`policy.breaker`); the others answer without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any, TypeVar

from tiercel.errors import StoreError
from tiercel.policy.breaker import Breaker
from tiercel.storage.base import Get, Put, Store
from tiercel.storage.peer import PeerStore
from tiercel.storage.record import RecordKey

Question = TypeVar("Question")

BROUGHT_MOST = 1 << 16


class SeveralStores(Store):
    """`store`: the one that is written to, if there is one."""

    def __init__(
        self, peers: Sequence[PeerStore], store: Store | None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._read, self._store = [(each, Breaker()) for each in peers], store
        self.writes = store is not None
        if store is not None:
            self.align, self.trouble, self.away = store.align, store.trouble, store.away
        for peer in peers:
            peer.align = self.align  # a batch has headers of one length, whoever answers
        self._clock = clock
        self._brought: dict[RecordKey, None] = {}
        """Keys that a peer supplied. If a value is damaged, the store's own record is not to blame."""

    def contains(self, keys: Sequence[RecordKey]) -> list[bool]:
        return self._ask(keys, lambda store, some: store.contains(some), lambda _: None)

    def kept(self, keys: Sequence[RecordKey]) -> list[bool]:
        return self._store.kept(keys) if self._store else [False] * len(keys)

    def get(self, wanted: Sequence[Get]) -> list[bool]:
        def bring(each: Get) -> None:
            self._brought[each.key] = None
            if len(self._brought) > BROUGHT_MOST:
                self._brought.pop(next(iter(self._brought)), None)

        return self._ask(wanted, lambda store, some: store.get(some), bring)

    def _ask(
        self,
        questions: Sequence[Question],
        ask: Callable[[Store, Sequence[Question]], list[bool]],
        peer_has: Callable[[Question], None],
    ) -> list[bool]:
        """Raises StoreError if no place could be asked, or the store has failed."""
        answers, left, failure = [False] * len(questions), list(range(len(questions))), None
        asked = self._store is not None
        for peer, breaker in self._read if left else ():
            if not breaker.allows(self._clock()):
                continue
            try:
                found = ask(peer, [questions[i] for i in left])
            except StoreError as error:
                breaker.failed(self._clock())
                failure = error
                continue
            breaker.worked()
            asked = True
            for i, here in zip(left, found, strict=True):
                answers[i] = here
                if here:
                    peer_has(questions[i])
            left = [i for i in left if not answers[i]]
            if not left:
                return answers
        if not asked and left:
            raise failure or StoreError("no peer works")
        if self._store is not None and left:
            for i, here in zip(left, ask(self._store, [questions[i] for i in left]), strict=True):
                answers[i] = here
        return answers

    def put(self, values: Sequence[Put]) -> list[bool]:
        return self._store.put(values) if self._store else [False] * len(values)

    def delete(self, keys: Sequence[RecordKey]) -> int:
        own = [key for key in keys if key not in self._brought]
        for key in keys:
            self._brought.pop(key, None)
        return self._writable.delete(own)

    def clear(self) -> None:
        self._writable.clear()

    def keys(self) -> Iterator[tuple[RecordKey, int]]:
        return self._writable.keys()

    def removed(self) -> list[RecordKey]:
        return self._store.removed() if self._store else []

    def compact(self) -> int:
        return self._writable.compact()

    def stats(self) -> dict[str, Any]:
        own = self._store.stats() if self._store else {"records": None, "bytes": None}
        peers = {str(n): each.stats()["peers"]["1"] for n, (each, _) in enumerate(self._read, 1)}
        return {**own, "peers": peers}

    def register(self, memory: memoryview) -> None:
        for each in self._all():
            each.register(memory)

    def close(self) -> None:
        for each in self._all():
            each.close()

    def _all(self) -> Iterator[Store]:
        yield from (each for each, _ in self._read)
        if self._store is not None:
            yield self._store

    @property
    def _writable(self) -> Store:
        if self._store is None:
            raise StoreError("peers can only be read, and there is no store besides")
        return self._store
