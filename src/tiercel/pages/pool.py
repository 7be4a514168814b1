"""A pool: numbered places in one tier, and reservations of them. It knows who owns a place, not
what is in it.

The free list holds ids that are ready to be given out. Releasing an id puts its successor there, the same
place in the next generation, so an id kept after its release equals no live id of any pool.

    take 2         free: [.. 9g0 7g2]  →  owned: {7g2, 9g0}
    release 9g0    owned: {7g2}        →  free: [.. 9g1]

The list is a stack. Ids are given out again in the order of their release, so that neighbours stay
neighbours.

A reservation acquires everything that an operation needs, or nothing. There is no other rollback of places in
this package:

    room = reserve(device_pages, 3)        Short: nothing was taken
    with room:
        ...                                may raise
        room.keep()                        ownership passes to the caller
                                           left without keep: all is back in the pool
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from tiercel.collector import hidden_list
from tiercel.types import GENERATION_ONE, PLACE_MASK, TAG_SHIFT

Id = TypeVar("Id", bound=int)

_LOW_MASK = (1 << TAG_SHIFT) - 1


class PagePool(Generic[Id]):
    """`capacity` places. Misuse (double release, an id of another pool, use after release) is an assertion.

    `order` is the order in which places are first given out; tests permute it, so that code which mixes the
    numbers of two pools can not pass by luck.
    """

    def __init__(self, name: str, capacity: int, *, tag: int, order: Sequence[int] | None = None) -> None:
        places = range(capacity) if order is None else order
        assert sorted(places) == list(range(capacity)), "the order names every place once"
        self.name = name
        self.capacity = capacity
        self._tag = tag << TAG_SHIFT
        self._free: list[Id] = hidden_list()
        self._free += [cast(Id, self._tag | place) for place in reversed(places)]
        self._owned: list[int] = hidden_list()
        self._owned += [0] * capacity
        """The id of each place that is taken; 0: it is free. (A set of a million ids is copied now and then,
        when it is full.)"""
        self._leaving: set[Id] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def leaving(self) -> int:
        """Places that are released as soon as what is in them has been saved."""
        return len(self._leaving)

    def lack(self, count: int, *, later: bool = False) -> int:
        """How many places are missing for so many. `later`: when all that leaves has left."""
        return count - len(self._free) - (len(self._leaving) if later else 0)

    def take(self, count: int) -> list[Id]:
        """Take `count` places. Required: that many are free (or go through `reserve`)."""
        assert 0 <= count <= len(self._free), f"{count} of {len(self._free)} free places of {self.name}"
        if count == 0:
            return []
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        owned = self._owned
        for page_id in taken:
            owned[page_id & PLACE_MASK] = page_id
        return taken

    def leave(self, ids: Sequence[Id]) -> None:
        """These places will be released as soon as they have been saved."""
        once = self._leaving.isdisjoint(ids) and self.own(ids)
        assert once, f"I3: what leaves {self.name} is owned, and leaves once"
        self._leaving.update(ids)

    def release(self, ids: Sequence[Id]) -> None:
        """Give places back. Required: every id is owned now and named once."""
        if not ids:
            return
        if self._leaving:
            self._leaving.difference_update(ids)
        once = len(set(ids)) == len(ids) and self.own(ids)
        assert once, f"I3: {self.name} does not own each of {[hex(i) for i in ids]} once"
        owned = self._owned
        for page_id in ids:
            owned[page_id & PLACE_MASK] = 0
        # The sum may run over into the tag: the generation wraps inside its own bits.
        following = [(i + GENERATION_ONE) & _LOW_MASK | self._tag for i in reversed(ids)]
        self._free += cast(list[Id], following)

    def own(self, ids: Iterable[int]) -> bool:
        """Whether all of these places are taken."""
        owned, capacity = self._owned, self.capacity
        return all((at := i & PLACE_MASK) < capacity and owned[at] == i for i in ids)

    def owned_ids(self) -> frozenset[Id]:
        return frozenset(cast(Id, page_id) for page_id in self._owned if page_id)

    def check(self) -> None:
        """I4: free + owned = capacity, and each place is in one of the two."""
        owned = self.owned_ids()
        places = sorted(i & PLACE_MASK for i in (*self._free, *owned))
        assert places == list(range(self.capacity)), f"I4: places of {self.name} are lost or doubled"
        own = all(i & ~_LOW_MASK == self._tag for i in (*self._free, *owned))
        assert own, f"I7: foreign id in {self.name}"


def following(page_id: Id) -> Id:
    """The id of the same place in the next generation."""
    return cast(Id, (page_id + GENERATION_ONE) & _LOW_MASK | page_id & ~_LOW_MASK)


class Pool(Protocol):
    """Places of one tier: a `PagePool`, or `Frames`, which counts two kinds of them."""

    name: str

    @property
    def lack(self) -> Callable[..., int]: ...

    @property
    def take(self) -> Callable[..., list[Any]]: ...

    def release(self, ids: Sequence[Any]) -> None: ...


@dataclass(frozen=True)
class Short:
    """The outcome of a reservation that does not fit: which pool lacks how many places."""

    pool: str
    missing: int


class Reservation:
    """Places held by one operation. Spent after `keep` or the end of its `with`: any later use is a bug."""

    def __init__(self, pool: Pool, ids: list[Any]) -> None:
        self._pool, self._ids, self._held = pool, ids, True

    @property
    def ids(self) -> list[Any]:
        """What was taken, in the order it was asked for."""
        assert self._held, "the reservation is spent"
        return self._ids

    def keep(self) -> None:
        """The operation succeeded: its places belong to the caller now."""
        assert self._held, "the reservation is spent"
        self._held = False

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        if self._held:
            self._held = False
            self._pool.release(self._ids)


def reserve(pool: Pool, *counts: int) -> Reservation | Short:
    """All these places, or `Short`: then nothing was taken."""
    missing = pool.lack(*counts)
    return Short(pool.name, missing) if missing > 0 else Reservation(pool, pool.take(*counts))
