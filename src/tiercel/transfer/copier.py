"""Who moves bytes between a memory near attention and host memory, whoever allocated the former.

    reference    follows every piece that the memories name. Slow; `direct` is compared with it.
    direct       one plain copy per row, and one for rows that touch. A row must lie together.

A copier moves what both memories hold: a device without some streams, or with the layers of one rank, gets
its own. Every (layout, copier, stream) either moves bytes exactly or is refused when the copier is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from tiercel.errors import ConfigError, RefusedError
from tiercel.memory.buffers import HostMemory, Memory
from tiercel.memory.layout import Pieces
from tiercel.spec.stream import Stream
from tiercel.transfer.plan import Direction, Leg


class Copier(ABC):
    """Moves the bytes of one layer at a time.

    Guaranteed: when a call returns, every byte is there, and no byte outside the named rows was written (I2).
    Calls for different places may run in several threads at once. A call that raises may have written part of
    its targets, never anything else. What can not be moved is refused at construction.

    Required of the caller: sources are written and complete before the call, on a device also by the kernels
    queued there; nobody reads or writes the targets until it returns; both memories outlive the copier.

    Forbidden to a copier: to keep views of host memory between calls (they would keep closed memory mapped),
    to ask which layout it is, to reserve, free or judge an id.

    May block: `copy`, for the time of the copy. Nothing else.
    """

    name: ClassVar[str]

    def __init__(self, device: Memory, host: HostMemory) -> None:
        self.device = device
        self.host = host
        self._streams = (
            _by_layer(device.spec.page_streams, host.spec.page_streams),
            _by_layer(device.spec.tail_streams, host.spec.tail_streams),
        )
        self.layers = tuple(sorted({*self._streams[0], *self._streams[1]}))
        """Those with bytes to move."""
        for stream, why in self._refused():
            raise RefusedError(layout=host.layout.name, copier=self.name, stream=stream.name, why=why)

    @abstractmethod
    def _refused(self) -> Iterable[tuple[Stream, str]]:
        """The streams that can not be moved, each with the reason and what to use instead."""

    @abstractmethod
    def copy(self, direction: Direction, leg: Leg, layer: int) -> None:
        """Move one layer's rows of every stream the leg carries. A layer without such rows is no work."""

    def _check_places(self, leg: Leg) -> None:
        """Once for the leg instead of once for every row: past the end of a layer lies the next one."""
        device, host = leg.places_max
        most = self.device.tails if leg.tails else self.device.pages
        assert device < most and host < self.host.pages, f"I7: places {leg.places_max} do not exist"


def _by_layer(near: Iterable[Stream], far: Iterable[Stream]) -> dict[int, list[Stream]]:
    """The streams that both memories hold, by layer, as the host knows them."""
    layers: dict[int, list[Stream]] = {}
    held = {stream.name: stream.layers for stream in near}
    for stream in far:
        for layer in stream.layers:
            if layer in held.get(stream.name, ()):
                layers.setdefault(layer, []).append(stream)
    return layers


class ReferenceCopier(Copier):
    """Gathers the source ranges into bytes and deals them out to the target ranges."""

    name = "reference"

    def _refused(self) -> Iterable[tuple[Stream, str]]:
        if self.device.device.type != "cpu":
            why = f"it needs memory the CPU can address, and the device is {self.device.device}; use direct"
            yield self.host.spec.streams[0], why

    def copy(self, direction: Direction, leg: Leg, layer: int) -> None:
        streams = self._streams[leg.tails].get(layer, ())
        if streams:
            self._check_places(leg)
        for stream in streams:
            for device_place, host_places in leg.places:
                near = _ranges(self.device, stream, layer, (device_place,))
                far = _ranges(self.host, stream, layer, host_places)
                sources, targets = (far, near) if direction is Direction.LOAD else (near, far)
                data = b"".join(sources)
                assert len(data) == sum(map(len, targets)), "the two sides of a copy differ in size"
                for target in targets:
                    target[:], data = data[: len(target)], data[len(target) :]


def _ranges(memory: Memory, stream: Stream, layer: int, places: tuple[int, ...]) -> list[memoryview]:
    """The bytes of one row, range by range."""
    buffer, pieces = memory.rows[stream.name, layer]
    flat, ranges = buffer.numpy().data, (piece.at(places[index]) for index, piece in pieces)
    return [flat[offset : offset + size] for offset, size in ranges]


Extent = tuple[int, int, int]
"""(device offset, host offset, bytes) of bytes that lie together on both sides."""


Rows = tuple[int, int, int, Pieces]
"""One layer's rows of all pages or tails: offset, stride and bytes near attention, pieces on the host."""

Groups = dict[int, list[tuple[Tensor, list[Rows]]]]
"""The rows of each layer, grouped by the buffer near attention that they lie in."""


class DirectCopier(Copier):
    """One plain copy per extent.

    On the CPU an extent is copied through memoryviews, which hold the GIL for the microseconds that a row
    takes. A call that releases the GIL must win it back after every row: beside a thread that computes in
    Python, 64 Flash pages took 13 ms this way, 12.8 s row by row in numpy and 45 s in torch (2 cores
    Neoverse-N1, torch 2.13; undisturbed 8, 9 and 40 ms).

    On CUDA a call per row costs more than the row (H200: scattered Flash pages 1 to 2 GB/s, neighbours in
    layer_first 19): there this is the plain path, not the fast one.
    """

    name = "direct"

    def __init__(self, device: Memory, host: HostMemory) -> None:
        super().__init__(device, host)
        self._groups = tuple(map(self._grouped, self._streams))
        self._queues: dict[Direction, torch.cuda.Stream] = {}
        if device.device.type == "cuda":
            self._queues = {direction: torch.cuda.Stream(device.device) for direction in Direction}

    def _refused(self) -> Iterable[tuple[Stream, str]]:
        """Tails are never a reason: in every layout they are poured over whole host pages."""
        if self.device.device.type not in ("cpu", "cuda"):
            why = f"it copies to cpu and cuda, and the device is {self.device.device}"
            yield self.host.spec.streams[0], why
        for layer, streams in self._streams[0].items():
            for stream in streams:
                pieces = len(self.host.rows[stream.name, layer][1])
                if pieces > 1:
                    why = f"a row is {pieces} pieces there; use page_first_direct, or copier reference"
                    yield stream, why

    def _grouped(self, by_layer: dict[int, list[Stream]]) -> Groups:
        groups: Groups = {layer: [] for layer in by_layer}
        for layer, streams in by_layer.items():
            for stream in streams:
                buffer, near, stride, size = self.device.column(stream, layer)
                pieces = self.host.rows[stream.name, layer][1]
                assert size == sum(piece.bytes for _, piece in pieces), stream.name
                if not groups[layer] or groups[layer][-1][0] is not buffer:
                    groups[layer].append((buffer, []))
                groups[layer][-1][1].append((near, stride, size, pieces))
        return groups

    def copy(self, direction: Direction, leg: Leg, layer: int) -> None:
        groups = self._groups[leg.tails].get(layer, ())
        if groups:
            self._check_places(leg)
        extents = _tail_extents if leg.tails else _page_extents
        for buffer, rows in groups:
            self._move(direction, buffer, chain.from_iterable(extents(leg, each) for each in rows))

    def _move(self, direction: Direction, device: Tensor, extents: Iterable[Extent]) -> None:
        host, loads = self.host.flat, direction is Direction.LOAD
        if not device.is_cpu:
            queue = self._queues[direction]
            with torch.cuda.stream(queue):
                for here, there, size in extents:
                    near, far = device[here : here + size], host[there : there + size]
                    target, source = (near, far) if loads else (far, near)
                    target.copy_(source, non_blocking=True)
            queue.synchronize()
            return
        on_device, on_host = device.numpy().data, host.numpy().data
        if loads:
            for here, there, size in extents:
                on_device[here : here + size] = on_host[there : there + size]
        else:
            for here, there, size in extents:
                on_host[there : there + size] = on_device[here : here + size]


def _page_extents(leg: Leg, rows: Rows) -> list[Extent]:
    near, near_stride, size, ((_, (host, stride, _)),) = rows
    if stride == size == near_stride:
        return [(near + d * size, host + h * size, length * size) for d, h, length in leg.runs]
    return [(near + d * near_stride, host + h * stride, size) for d, (h,) in leg.places]


def _tail_extents(leg: Leg, rows: Rows) -> list[Extent]:
    extents = []
    near, near_stride, _, pieces = rows
    for device_place, host_places in leg.places:
        at = near + device_place * near_stride
        for page, (offset, stride, size) in pieces:
            extents.append((at, offset + host_places[page] * stride, size))
            at += size
    return extents


COPIERS: dict[str, type[Copier]] = {kind.name: kind for kind in (ReferenceCopier, DirectCopier)}


def make_copier(name: str, device: Memory, host: HostMemory) -> Copier:
    if name not in COPIERS:
        raise ConfigError("copier", name, f"must be one of {', '.join(COPIERS)}")
    return COPIERS[name](device, host)
