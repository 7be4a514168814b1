"""Pages of a device with two pools, and what it must hold when some parts of them have moved."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import torch

from tests.memory.specs import FLASH, V4, in_records
from tests.simulation.specs import SPECS
from tests.transfer.rig import host_page
from tiercel.memory.buffers import DeviceMemory, HostMemory
from tiercel.spec import CacheSpec
from tiercel.transfer.plan import NO_PLACE, Direction, Plan
from tiercel.types import TAG_SHIFT, HostPageId

APART: dict[str, CacheSpec] = {
    "v4, c4 apart": replace(V4, second=("c4",)),
    "v4, c4 apart, in records": in_records(replace(V4, second=("c4",))),
    "v4, two streams apart": replace(V4, second=("c4_index", "c4")),
    "flash, some layers": replace(FLASH, second=("c4",)).stage(2, 6),
    "sparse": SPECS["two pools"],
}
FRAMES, HOST_PAGES = 8, 9
FIRST, SECOND, WHOLE = "first", "second", "whole"

Near = tuple[int, ...]
"""The places of a page: a unit, and a body."""
Move = tuple[Near, Near, HostPageId]
"""Where a page comes from, which of its places at the target move, and where it is on the host."""


def ids(near: Near) -> Near:
    """As the pools of a device name them: the number of a unit is never that of a body."""
    return tuple(each if each == NO_PLACE else 1 + part << TAG_SHIFT | each for part, each in enumerate(near))


class Parts:
    """Frames of which some are used for bodies, and the heads of all others for units. Pages go from some
    places to the host, and in part back to others."""

    def __init__(self, spec: CacheSpec, layout: str, device: str = "cpu") -> None:
        self.spec, chance = spec, random.Random(layout)
        self.device = DeviceMemory(spec, FRAMES, 1, device)
        self.host = HostMemory(spec, layout, HOST_PAGES * spec.place_bytes, pin=device != "cpu")
        for flat in (self.device.flat_pages, self.host.flat):
            flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8))
        units = [place * spec.frame_units for place in range(FRAMES)]
        bodies, hosts = list(range(FRAMES)), chance.sample(range(HOST_PAGES), 4)
        chance.shuffle(units)
        chance.shuffle(bodies)
        self.source = list(zip(units[:4], bodies[:4], strict=True))
        self.target = list(zip(units[4:], bodies[4:], strict=True))
        self.far = [host_page(place) for place in hosts]

    def save(self) -> Plan:
        """All pages go to the host, in full."""
        pairs = zip(self.source, self.far, strict=True)
        return Plan.of(Direction.SAVE, [(ids(near), (far,)) for near, far in pairs])

    def load(self, which: tuple[str, ...]) -> tuple[Plan, list[Move]]:
        """These parts of each page come back, at other places."""
        moves = list[Move]()
        for source, (unit, body), far, part in zip(self.source, self.target, self.far, which, strict=True):
            near = {FIRST: (unit,), SECOND: (NO_PLACE, body), WHOLE: (unit, body)}[part]
            moves.append((source, near, far))
        return Plan.of(Direction.LOAD, [(ids(near), (far,)) for _, near, far in moves]), moves

    def row(self, flat: torch.Tensor, name: str, layer: int, near: Near) -> torch.Tensor:
        """The row at these places, in bytes that are laid out as the device's are."""
        ((part, piece),) = self.device.rows[name, layer][1]
        offset, size = piece.at(near[part])
        return flat[offset : offset + size]

    def after(self, saved: torch.Tensor, now: torch.Tensor, moves: list[Move]) -> torch.Tensor:
        """What the device must hold after a load, if it held `saved` when the pages were saved."""
        wanted = now.clone()
        for source, near, _ in moves:
            for name, layer in self.rows():
                part = self.spec.pool_of(self.spec.stream(name))
                if part < len(near) and near[part] != NO_PLACE:
                    self.row(wanted, name, layer, near).copy_(self.row(saved, name, layer, source))
        return wanted

    def rows(self) -> Iterator[tuple[str, int]]:
        for stream in self.spec.page_streams:
            for layer in stream.layers:
                yield stream.name, layer


LOADS = {
    "first parts": (FIRST,) * 4,
    "second parts": (SECOND,) * 4,
    "whole pages": (WHOLE,) * 4,
    "some of each": (WHOLE, SECOND, FIRST, SECOND),
}
