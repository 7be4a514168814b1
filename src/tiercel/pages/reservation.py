"""Acquire everything an operation needs, from any set of pools and tiers, or nothing.

    room = reserve((device_pages, 3), (device_tails, 1))    Short: nothing was taken
    with room:
        ...                                                 may raise
        room.keep()                                         ownership passes to the caller
                                                            left without keep: all is back in its pools

There is no other rollback of places in this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tiercel.pages.pool import PagePool


@dataclass(frozen=True)
class Short:
    """The outcome of a reservation that does not fit: which pool lacks how many places."""

    pool: str
    missing: int


class Reservation:
    """Places held by one operation. Spent after `keep` or the end of its block; then any use is an
    assertion."""

    def __init__(self, parts: list[tuple[PagePool[Any], list[Any]]]) -> None:
        self._parts = parts
        self._held = True

    def ids(self, pool: PagePool[Any]) -> list[Any]:
        """What was taken from a pool, in the order it was asked for."""
        assert self._held, "the reservation is spent"
        return [page_id for owner, ids in self._parts if owner is pool for page_id in ids]

    def keep(self) -> None:
        """The operation succeeded: its places belong to the caller now."""
        assert self._held, "the reservation is spent"
        self._held = False

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held:
            self._held = False
            for pool, ids in self._parts:
                pool.release(ids)


def reserve(*needs: tuple[PagePool[Any], int]) -> Reservation | Short:
    """All of the needs, or `Short` for the first pool that lacks places; then nothing was taken."""
    wanted: dict[int, int] = {}
    for pool, count in needs:
        wanted[id(pool)] = wanted.get(id(pool), 0) + count
        if wanted[id(pool)] > pool.free:
            return Short(pool.name, wanted[id(pool)] - pool.free)
    return Reservation([(pool, pool.take(count)) for pool, count in needs])
