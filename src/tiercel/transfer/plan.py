"""What is to be moved, as values: no bytes, no threads, nothing that can fail. A plan can be pickled, and
carried out by any process that has the memories.

    Plan(LOAD)
    ├── PageLeg   device page 3 ◄─ host page 8,  device page 4 ◄─ host page 9
    └── TailLeg   device tail 1 ◄─ host pages 5, 2, 7

A leg pairs the ids of two pools; the direction is the plan's. Ids become places here and in the copiers only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from tiercel.types import DevicePageId, DeviceTailId, HostPageId, place


class Direction(Enum):
    """Towards the device, or away from it."""

    LOAD = "load"
    SAVE = "save"


class Run(NamedTuple):
    """`length` places next to each other on both sides."""

    device: int
    host: int
    length: int


@dataclass(frozen=True)
class PageLeg:
    """Whole pages: `device_pages[i]` is paired with `host_pages[i]`."""

    device_pages: tuple[DevicePageId, ...]
    host_pages: tuple[HostPageId, ...]

    def __post_init__(self) -> None:
        assert len(self.device_pages) == len(self.host_pages), "I7: a page of one side has no partner"

    @cached_property
    def places(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(device place, the one host place) of each page."""
        pairs = zip(self.device_pages, self.host_pages, strict=True)
        return tuple((place(device), (place(host),)) for device, host in pairs)

    @cached_property
    def places_max(self) -> tuple[int, int]:
        """The highest place on the device and on the host."""
        return max(map(place, self.device_pages), default=-1), max(map(place, self.host_pages), default=-1)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The same places, neighbours on both sides taken together."""
        runs: list[Run] = []
        for device, (host,) in self.places:
            last = runs[-1] if runs else Run(-1, -1, 0)
            if (device, host) == (last.device + last.length, last.host + last.length):
                runs[-1] = Run(last.device, last.host, last.length + 1)
            else:
                runs.append(Run(device, host, 1))
        return tuple(runs)


@dataclass(frozen=True)
class TailLeg:
    """Whole tails: `device_tails[i]` is paired with the host pages `host_pages[i]` it is poured over."""

    device_tails: tuple[DeviceTailId, ...]
    host_pages: tuple[tuple[HostPageId, ...], ...]

    def __post_init__(self) -> None:
        assert len(self.device_tails) == len(self.host_pages), "I7: a tail of one side has no partner"

    @cached_property
    def places(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(device place, host places) of each tail."""
        hosts = [tuple(map(place, pages)) for pages in self.host_pages]
        return tuple(zip(map(place, self.device_tails), hosts, strict=True))

    @cached_property
    def places_max(self) -> tuple[int, int]:
        """The highest place on the device and on the host."""
        hosts = (place(page) for pages in self.host_pages for page in pages)
        return max(map(place, self.device_tails), default=-1), max(hosts, default=-1)


Leg = PageLeg | TailLeg


@dataclass(frozen=True)
class Plan:
    """Legs that move together and succeed or fail together. Writes no place twice, so their order is free."""

    direction: Direction
    legs: tuple[Leg, ...]

    def __post_init__(self) -> None:
        targets = [target for leg in self.legs for target in _targets(self.direction, leg)]
        assert len(targets) == len(set(targets)), "I1: a plan writes a place twice"

    @staticmethod
    def of(
        direction: Direction,
        pages: Iterable[tuple[DevicePageId, HostPageId]] = (),
        tails: Iterable[tuple[DeviceTailId, tuple[HostPageId, ...]]] = (),
    ) -> Plan:
        """From pairs: at most one leg of each kind."""
        legs: list[Leg] = []
        if pages := tuple(pages):
            legs.append(PageLeg(tuple(device for device, _ in pages), tuple(host for _, host in pages)))
        if tails := tuple(tails):
            legs.append(TailLeg(tuple(device for device, _ in tails), tuple(host for _, host in tails)))
        return Plan(direction, tuple(legs))


def _targets(direction: Direction, leg: Leg) -> Iterable[tuple[type, int]]:
    """What a leg writes. A caller may number places for pages and for tails alike; our ids never meet."""
    match leg:
        case PageLeg(device, host):
            return ((PageLeg, page) for page in device) if direction is Direction.LOAD else _hosts(host)
        case TailLeg(tails, pages):
            if direction is Direction.LOAD:
                return ((TailLeg, tail) for tail in tails)
            return _hosts(page for each in pages for page in each)


def _hosts(pages: Iterable[HostPageId]) -> Iterable[tuple[type, int]]:
    return ((Plan, page) for page in pages)
