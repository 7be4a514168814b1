"""What is to be moved, as values: no bytes, no threads, nothing that can fail. A plan can be pickled, and any
process that has the memories can carry it out.

    Plan(LOAD)
    ├── Leg of pages    device page 3 ◄─ host page 8,  device page 4 ◄─ host page 9
    └── Leg of tails    device pages 6, 1, 2 ◄─ host pages 5, 2, 7

A leg pairs the places of two pools; the direction is the plan's. A tail takes several places on either side.
Where a device has two pools, a page may move in part:

    (3, 7)     the whole page
    (3,)       only what lies in the first pool
    (-1, 7)    only what lies in the second pool

Ids become places in `transfer.extents` only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from tiercel.types import HostPageId, Kind

NO_PLACE = -1
"""In the place of a device place: this part of the page does not move."""

Pair = tuple[tuple[int, ...], tuple[HostPageId, ...]]
"""The device places of a page or tail, and its host pages: one for a page, mostly several for a tail."""


class Direction(Enum):
    """Towards the device, or away from it."""

    LOAD = "load"
    SAVE = "save"


@dataclass(frozen=True)
class Leg:
    """Pages, or tails: the places `device[i]` are paired with the host pages `host[i]`. All have equally many
    places on the device, and the same ones of them are `NO_PLACE`. A page that has fewer places than the
    device has pools moves in part."""

    kind: Kind
    device: tuple[tuple[int, ...], ...]
    host: tuple[tuple[HostPageId, ...], ...]

    def __post_init__(self) -> None:
        assert len(self.device) == len(self.host), "I7: an id of one side has no partner"


@dataclass(frozen=True)
class Plan:
    """Legs that move together and succeed or fail together. Writes no place twice, so their order is free."""

    direction: Direction
    legs: tuple[Leg, ...]

    def __post_init__(self) -> None:
        loads = self.direction is Direction.LOAD
        for kind in Kind:  # a caller may use the same numbers for its pages and its tails
            written = [
                leg.device if loads else leg.host for leg in self.legs if leg.kind is kind or not loads
            ]
            every = chain.from_iterable(chain.from_iterable(written))
            places = [each for each in every if each != NO_PLACE]
            assert len(places) == len(set(places)), "I1: a plan writes a place twice"

    @staticmethod
    def of(direction: Direction, pages: Iterable[Pair] = (), tails: Iterable[Pair] = ()) -> Plan:
        """A plan from pairs: a leg of each kind, more if other parts of some pages move than of others."""
        legs: list[Leg] = []
        for kind, pairs in ((Kind.PAGE, pages), (Kind.TAIL, tails)):
            alike: dict[tuple[int, ...], list[Pair]] = {}
            for pair in pairs:
                missing = [place == NO_PLACE for place in pair[0]] if NO_PLACE in pair[0] else ()
                alike.setdefault((len(pair[0]), *missing), []).append(pair)
            for parts in sorted(alike):
                device, host = zip(*alike[parts], strict=True)
                legs.append(Leg(kind, device, host))
        return Plan(direction, tuple(legs))
