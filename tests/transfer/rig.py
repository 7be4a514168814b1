"""A device and a host with different bytes everywhere, and ids that never coincide with one another."""

from __future__ import annotations

import random

import torch

from tiercel.memory.buffers import DeviceMemory, HostMemory
from tiercel.spec import CacheSpec
from tiercel.transfer.plan import Direction, Plan
from tiercel.types import PLACE_BITS, TAG_SHIFT, DevicePageId, DeviceTailId, HostPageId

DEVICE_PAGES, DEVICE_TAILS, HOST_TAILS = 9, 5, 2


def device_page(place: int) -> DevicePageId:
    return DevicePageId(1 << TAG_SHIFT | 7 << PLACE_BITS | place)


def device_tail(place: int) -> DeviceTailId:
    return DeviceTailId(2 << TAG_SHIFT | 8 << PLACE_BITS | place)


def host_page(place: int) -> HostPageId:
    return HostPageId(3 << TAG_SHIFT | 9 << PLACE_BITS | place)


class Rig:
    """Memory for a few pages and tails, and the places of a round trip: from, on the host, back elsewhere.

    Device pages 5 and 6 and host pages 3 and 4 are neighbours, so that copies of neighbours happen as well.
    """

    def __init__(self, spec: CacheSpec, layout: str, seed: int = 0, device: str = "cpu") -> None:
        self.spec = spec
        chance = random.Random(seed)
        with_tails = bool(spec.tail_streams)
        tail_pages = HOST_TAILS * spec.host_pages_per_tail if with_tails else 0
        self.device = DeviceMemory(spec, DEVICE_PAGES, DEVICE_TAILS, device)
        self.host = HostMemory(spec, layout, (tail_pages + 8) * spec.host_page_bytes, pin=device != "cpu")
        self.poison(seed)
        places = [place for place in range(self.host.pages) if place not in (3, 4)]
        chance.shuffle(places)
        hosts = [places.pop(), 3, 4, places.pop()] if spec.page_streams else []
        self.pages = list(zip([8, 5, 6, 2], hosts, strict=False))
        self.pages_back = list(zip([4, 0, 1, 7], hosts, strict=False))
        pours = [tuple(places.pop() for _ in range(spec.host_pages_per_tail)) for _ in range(HOST_TAILS)]
        self.tails = list(zip([3, 0], pours, strict=True)) if with_tails else []
        self.tails_back = list(zip([1, 4], pours, strict=True)) if with_tails else []

    def poison(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for flat in (self.device.flat_pages, self.device.flat_tails, self.host.flat):
            flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))

    def plan(self, direction: Direction, pages: list, tails: list) -> Plan:
        return Plan.of(
            direction,
            [(device_page(device), (host_page(host),)) for device, host in pages],
            [(device_tail(device), tuple(map(host_page, hosts))) for device, hosts in tails],
        )

    def save_plan(self) -> Plan:
        return self.plan(Direction.SAVE, self.pages, self.tails)

    def load_plan(self) -> Plan:
        return self.plan(Direction.LOAD, self.pages_back, self.tails_back)

    def device_after_round_trip(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What device memory must hold: the rows at their new places, every other byte as it is now."""
        after = DeviceMemory(self.spec, DEVICE_PAGES, DEVICE_TAILS, str(self.device.device))
        after.flat_pages.copy_(self.device.flat_pages)
        after.flat_tails.copy_(self.device.flat_tails)
        moves = [
            (self.spec.page_streams, self.pages, self.pages_back),
            (self.spec.tail_streams, self.tails, self.tails_back),
        ]
        for streams, there, back in moves:
            for stream in streams:
                for layer in stream.layers:
                    for (source, _), (target, _) in zip(there, back, strict=True):
                        row = self.device.view(stream.name, layer)[source]
                        after.view(stream.name, layer)[target] = row
        return after.flat_pages, after.flat_tails

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
                flat, offset, _, _ = self.device.column(stream, each)
                wanted = expected[0] if flat is self.device.flat_pages else expected[1]
                rows = slice(offset, offset + self.device.view(stream.name, each).numel())
                if not torch.equal(flat[rows], wanted[rows]):
                    return False
        return True
