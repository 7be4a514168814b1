"""What is to be moved, as values: no bytes, no threads, nothing that can fail.

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
    def places(self) -> tuple[tuple[int, int], ...]:
        """(device place, host place) of each page."""
        return tuple(zip(map(place, self.device_pages), map(place, self.host_pages), strict=True))

    @cached_property
    def places_max(self) -> tuple[int, int]:
        """The highest place on the device and on the host."""
        return max(map(place, self.device_pages), default=-1), max(map(place, self.host_pages), default=-1)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The same places, neighbours on both sides taken together."""
        runs: list[Run] = []
        for device, host in self.places:
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


def _targets(direction: Direction, leg: Leg) -> Iterable[int]:
    match leg:
        case PageLeg(device, host):
            return device if direction is Direction.LOAD else host
        case TailLeg(tails, pages):
            return tails if direction is Direction.LOAD else (page for each in pages for page in each)


# Entries


class DeviceEntry(NamedTuple):
    page: DevicePageId
    entry: int


class HostEntry(NamedTuple):
    page: HostPageId
    entry: int


class EntryPair(NamedTuple):
    """One entry on each side."""

    device: DeviceEntry
    host: HostEntry


def split_entries(
    pairs: Iterable[EntryPair], entries_per_row: int
) -> tuple[list[tuple[DevicePageId, HostPageId]], list[EntryPair]]:
    """Pairs that make a whole row on both sides become page pairs; all others stay entries, in order.

    I11: decided by the ids themselves, never by how many there are. Two pages are copied whole only when
    every entry of the one goes to the same entry of the other; 64 entries of 64 pages are 64 entries.
    """
    pairs = list(pairs)
    aligned: dict[tuple[DevicePageId, HostPageId], set[int]] = {}
    for device, host in pairs:
        if device.entry == host.entry:
            aligned.setdefault((device.page, host.page), set()).add(device.entry)
    whole = {pages for pages, entries in aligned.items() if len(entries) == entries_per_row}
    rest = [p for p in pairs if p.device.entry != p.host.entry or (p.device.page, p.host.page) not in whole]
    return [pages for pages in aligned if pages in whole], rest
