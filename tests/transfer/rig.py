"""A device and a host with different bytes everywhere, and ids that never coincide with one another."""

from __future__ import annotations

import random

import torch

from tiercel.memory.buffers import DeviceMemory, HostMemory, Memory
from tiercel.spec import CacheSpec
from tiercel.transfer.plan import Direction, Plan
from tiercel.types import PLACE_BITS, TAG_SHIFT, DevicePageId, HostPageId

DEVICE_PAGES, DEVICE_TAILS, HOST_TAILS = 9, 5, 2


def device_page(place: int) -> DevicePageId:
    return DevicePageId(1 << TAG_SHIFT | 7 << PLACE_BITS | place)


def host_page(place: int) -> HostPageId:
    return HostPageId(3 << TAG_SHIFT | 9 << PLACE_BITS | place)


def pieces_of(memory: Memory, name: str, layer: int, places: tuple[int, ...]) -> list[torch.Tensor]:
    """The bytes of one row, piece by piece."""
    flat, pieces = memory.rows[name, layer]
    ranges = (piece.at(places[part]) for part, piece in pieces)
    return [flat[offset : offset + size] for offset, size in ranges]


class Rig:
    """Memory for a few pages and tails, and the places of a round trip: from, on the host, back elsewhere.

    Device pages 5 and 6 and host pages 3 and 4 are neighbours, so that copies of neighbours happen as well.
    """

    def __init__(self, spec: CacheSpec, layout: str, seed: int = 0, device: str = "cpu") -> None:
        self.spec = spec
        chance = random.Random(seed)
        with_tails = bool(spec.tail_streams)
        tail_pages = HOST_TAILS * spec.places_per_tail if with_tails else 0
        units = 2 * tail_pages  # for tails that move from some places to others
        self.device = DeviceMemory(spec, DEVICE_PAGES + units, DEVICE_TAILS, device)
        self.host = HostMemory(spec, layout, (tail_pages + 8) * spec.place_bytes, pin=device != "cpu")
        self.poison(seed)
        places = [place for place in range(self.host.pages) if place not in (3, 4)]
        chance.shuffle(places)
        hosts = [places.pop(), 3, 4, places.pop()] if spec.page_streams else []
        self.pages = list(zip([8, 5, 6, 2], hosts, strict=False))
        self.pages_back = list(zip([4, 0, 1, 7], hosts, strict=False))
        pours = [
            tuple(places.pop() for _ in range(spec.places_per_tail))
            for _ in range(HOST_TAILS if with_tails else 0)
        ]
        near = list(range(DEVICE_PAGES, DEVICE_PAGES + units))
        chance.shuffle(near)
        here, there = (
            [tuple(near.pop() for _ in range(spec.places_per_tail)) for _ in pours] for _ in range(2)
        )
        self.tails = list(zip(here, pours, strict=True))
        self.tails_back = list(zip(there, pours, strict=True))
        self.their_tails = list(zip([(3,), (0,)], pours, strict=False))
        self.their_tails_back = list(zip([(1,), (4,)], pours, strict=False))

    def poison(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for flat in (self.device.flat_pages, self.device.flat_tails, self.host.flat):
            flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))

    def plan(self, direction: Direction, pages: list, tails: list) -> Plan:
        return Plan.of(
            direction,
            [((device_page(device),), (host_page(host),)) for device, host in pages],
            [(tuple(map(device_page, device)), tuple(map(host_page, hosts))) for device, hosts in tails],
        )

    def save_plan(self, *, theirs: bool = False) -> Plan:
        """`theirs`: for borrowed memory, which has places of its own for tails."""
        return self.plan(Direction.SAVE, self.pages, self.their_tails if theirs else self.tails)

    def load_plan(self, *, theirs: bool = False) -> Plan:
        return self.plan(
            Direction.LOAD, self.pages_back, self.their_tails_back if theirs else self.tails_back
        )

    def device_after_round_trip(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What device memory must hold: the rows at their new places, every other byte as it is now."""
        after = DeviceMemory(self.spec, self.device.pages, DEVICE_TAILS, str(self.device.device))
        after.flat_pages.copy_(self.device.flat_pages)
        after.flat_tails.copy_(self.device.flat_tails)
        pages = [
            (((source,), (target,))) for (source, _), (target, _) in self._pairs(self.pages, self.pages_back)
        ]
        tails = [(source, target) for (source, _), (target, _) in self._pairs(self.tails, self.tails_back)]
        for streams, moves in ((self.spec.page_streams, pages), (self.spec.tail_streams, tails)):
            for stream in streams:
                for layer in stream.layers:
                    for source, target in moves:
                        row = pieces_of(self.device, stream.name, layer, source)
                        for here, there in zip(
                            row, pieces_of(after, stream.name, layer, target), strict=True
                        ):
                            there.copy_(here)
        return after.flat_pages, after.flat_tails

    @staticmethod
    def _pairs(there: list, back: list) -> list:
        return list(zip(there, back, strict=True))

    def host_bytes_named(self) -> torch.Tensor:
        """True for every byte of the host pages the round trip uses."""
        named = torch.zeros(self.host.flat.numel(), dtype=torch.bool)
        for place in [host for _, host in self.pages] + [h for _, hosts in self.tails for h in hosts]:
            for offset, size in self.host.layout.place_ranges(place):
                named[offset : offset + size] = True
        return named

    def device_bytes(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.device.flat_pages.clone(), self.device.flat_tails.clone()

    def holds(self, expected: tuple[torch.Tensor, torch.Tensor], layer: int | None = None) -> bool:
        """Whether device memory (or one layer of it) is as expected, byte for byte."""
        for stream in self.spec.streams:
            for each in stream.layers if layer is None else {layer} & set(stream.layers):
                flat, pieces = self.device.rows[stream.name, each]
                for _, piece in pieces:
                    shape = (self.device.pages, piece.bytes), (piece.stride, 1)
                    here, wanted = (every[piece.offset :].as_strided(*shape) for every in (flat, expected[0]))
                    if not torch.equal(here, wanted):
                        return False
        return True
