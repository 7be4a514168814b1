"""Who moves bytes between device and host memory.

    reference    follows every range the layouts name. Slow, and the truth the others are compared with.
    direct       one plain copy per row, one for rows that touch. Needs rows in one block.
    kernel       a kernel on the device that reads and writes host memory itself. Needs CUDA.

Every (layout, copier, stream) either moves bytes exactly or is refused when the copier is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tiercel.errors import ConfigError, RefusedError
from tiercel.memory.buffers import DeviceMemory, HostMemory
from tiercel.memory.layout import Range
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.stream import Stream
from tiercel.transfer.plan import Direction, EntryPair, Leg, PageLeg, TailLeg
from tiercel.types import place


class Copier(ABC):
    """Moves the bytes of one layer at a time.

    Guaranteed: when a call returns, every byte is there, and no byte outside the named rows or entries was
    written (I2). Calls for different places may run in several threads at once. A call that raises may have
    written part of its targets, never anything else. What can not be moved is refused at construction.

    Required of the caller: sources are written and complete before the call, on a device also by the kernels
    queued there; nobody reads or writes the targets until it returns; both memories outlive the copier.

    Forbidden to a copier: to keep views of memory between calls (they would keep closed memory mapped), to
    ask which layout it is, to reserve, free or judge an id.

    May block: `copy` and `copy_entries`, for the time of the copy. Nothing else.
    """

    name: ClassVar[str]

    def __init__(self, spec: CacheSpec, device: DeviceMemory, host: HostMemory) -> None:
        self.spec = spec
        self.device = device
        self.host = host
        for stream, why in self._refused():
            raise RefusedError(layout=host.layout.name, copier=self.name, stream=stream.name, why=why)
        self._page_streams = _by_layer(spec.page_streams)
        self._tail_streams = _by_layer(spec.tail_streams)

    @abstractmethod
    def _refused(self) -> Iterable[tuple[Stream, str]]:
        """The streams that can not be moved, each with the reason and what to use instead."""

    @abstractmethod
    def copy(self, direction: Direction, leg: Leg, layer: int) -> None:
        """Move one layer's rows of every stream the leg carries. A layer without such rows is no work."""

    @abstractmethod
    def copy_entries(
        self, direction: Direction, stream: Stream, layer: int, pairs: Sequence[EntryPair]
    ) -> None:
        """Move single entries of one layer of a page stream; the neighbours in the row stay as they are."""

    def _streams_of(self, leg: Leg, layer: int) -> tuple[Stream, ...]:
        streams = self._page_streams if isinstance(leg, PageLeg) else self._tail_streams
        return streams.get(layer, ())

    def _entry_ranges(
        self, stream: Stream, layer: int, pair: EntryPair
    ) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """The parts of one entry on the device and on the host."""
        assert stream in self.spec.page_streams, f"{stream.name} lives in tails, which move whole"
        device, host = pair
        return (
            self.device.page_layout.entry_ranges(stream, layer, place(device.page), device.entry),
            self.host.layout.entry_ranges(stream, layer, place(host.page), host.entry),
        )


def _by_layer(streams: Iterable[Stream]) -> dict[int, tuple[Stream, ...]]:
    layers: dict[int, tuple[Stream, ...]] = {}
    for stream in streams:
        for layer in stream.layers:
            layers[layer] = (*layers.get(layer, ()), stream)
    return layers


class ReferenceCopier(Copier):
    """Gathers the source ranges into bytes and deals them out to the target ranges."""

    name = "reference"

    def _refused(self) -> Iterable[tuple[Stream, str]]:
        if self.device.device.type != "cpu":
            why = f"it needs memory the CPU can address, and the device is {self.device.device}; use direct"
            yield self.spec.streams[0], why

    def copy(self, direction: Direction, leg: Leg, layer: int) -> None:
        for stream in self._streams_of(leg, layer):
            for device, host in self._rows(leg, stream, layer):
                self._move(direction, stream, device, host)

    def copy_entries(
        self, direction: Direction, stream: Stream, layer: int, pairs: Sequence[EntryPair]
    ) -> None:
        for pair in pairs:
            self._move(direction, stream, *self._entry_ranges(stream, layer, pair))

    def _rows(
        self, leg: Leg, stream: Stream, layer: int
    ) -> Iterator[tuple[tuple[Range, ...], tuple[Range, ...]]]:
        """The ranges of each row, on the device and on the host."""
        match leg:
            case PageLeg():
                for device, host in leg.places:
                    yield (
                        self.device.page_layout.region(stream, layer, device).ranges(),
                        self.host.layout.region(stream, layer, host).ranges(),
                    )
            case TailLeg():
                for device, hosts in leg.places:
                    yield (
                        self.device.tail_layout.region(stream, layer, device).ranges(),
                        self.host.tails.ranges(stream, layer, hosts),
                    )

    def _move(
        self, direction: Direction, stream: Stream, device: tuple[Range, ...], host: tuple[Range, ...]
    ) -> None:
        on_device, on_host = self.device.memory_of(stream)[0].numpy().data, self.host.flat.numpy().data
        if direction is Direction.LOAD:
            _scatter(_gather(on_host, host), on_device, device)
        else:
            _scatter(_gather(on_device, device), on_host, host)


def _gather(memory: memoryview, ranges: tuple[Range, ...]) -> bytes:
    return b"".join(memory[offset : offset + size] for offset, size in ranges)


def _scatter(data: bytes, memory: memoryview, ranges: tuple[Range, ...]) -> None:
    assert len(data) == sum(size for _, size in ranges), "the two sides of a copy differ in size"
    at = 0
    for offset, size in ranges:
        memory[offset : offset + size] = data[at : at + size]
        at += size


Span = tuple[int, int, int]
"""(device offset, host offset, bytes) of bytes that lie together on both sides."""


class _Rows(NamedTuple):
    """One layer's rows of all pages, on both sides."""

    device: int
    host: int
    row_bytes: int
    host_stride: int


class DirectCopier(Copier):
    """One plain copy per span.

    On the CPU a span is copied through memoryviews, which hold the interpreter for the microseconds a row
    takes. A call that lets go of it must win it back after every row: beside a thread that computes in
    Python, 64 Flash pages took 13 ms this way, 12.8 s row by row in numpy and 45 s in torch (2 cores
    Neoverse-N1, torch 2.13; undisturbed 8, 9 and 40 ms).

    On CUDA a call per row costs more than the row (H200: scattered Flash pages 1 to 2 GB/s, neighbours in
    layer_first 19): there this is the plain path, not the fast one.
    """

    name = "direct"

    def __init__(self, spec: CacheSpec, device: DeviceMemory, host: HostMemory) -> None:
        super().__init__(spec, device, host)
        self._rows = {
            (s.name, layer): self._rows_of(s, layer) for s in spec.page_streams for layer in s.layers
        }
        self._queues: dict[Direction, torch.cuda.Stream] = {}
        if device.device.type == "cuda":
            self._queues = {direction: torch.cuda.Stream(device.device) for direction in Direction}

    def _refused(self) -> Iterable[tuple[Stream, str]]:
        """Tails are never a reason: in every layout they are poured over whole host pages."""
        if self.device.device.type not in ("cpu", "cuda"):
            yield self.spec.streams[0], f"it copies to cpu and cuda, and the device is {self.device.device}"
        for stream in self.spec.page_streams:
            blocks = self.host.layout.region(stream, stream.layers[0], 0).count
            if blocks > 1:
                yield stream, f"a row is {blocks} blocks there; use page_first_direct, or copier reference"

    def _rows_of(self, stream: Stream, layer: int) -> _Rows:
        device, host = (
            memory.column(stream, layer) for memory in (self.device.page_layout, self.host.layout)
        )
        assert device.stride_bytes == device.block_bytes == host.block_bytes, stream.name
        return _Rows(device.offset, host.offset, host.block_bytes, host.stride_bytes)

    def copy(self, direction: Direction, leg: Leg, layer: int) -> None:
        streams, spans = self._streams_of(leg, layer), []
        if isinstance(leg, PageLeg):
            self._check_places(leg, self.device.page_layout.places)
            for stream in streams:
                spans += self._page_spans(leg, self._rows[stream.name, layer])
            self._move(direction, self.device.flat_pages, spans)
        else:
            self._check_places(leg, self.device.tail_layout.places)
            for stream in streams:
                spans += self._tail_spans(leg, stream, layer)
            self._move(direction, self.device.flat_tails, spans)

    def copy_entries(
        self, direction: Direction, stream: Stream, layer: int, pairs: Sequence[EntryPair]
    ) -> None:
        spans: list[Span] = []
        for pair in pairs:
            device, host = self._entry_ranges(stream, layer, pair)
            spans += [(d.offset, h.offset, d.bytes) for d, h in zip(device, host, strict=True)]
        self._move(direction, self.device.flat_pages, spans)

    def _check_places(self, leg: Leg, device_places: int) -> None:
        """Once for the leg instead of once for every row: past the end of a layer lies the next one."""
        device, host = leg.places_max
        assert device < device_places and host < self.host.pages, f"I7: places {leg.places_max} do not exist"

    @staticmethod
    def _page_spans(leg: PageLeg, rows: _Rows) -> list[Span]:
        device, host, size, stride = rows
        if stride == size:
            return [(device + d * size, host + h * size, length * size) for d, h, length in leg.runs]
        return [(device + d * size, host + h * stride, size) for d, h in leg.places]

    def _tail_spans(self, leg: TailLeg, stream: Stream, layer: int) -> list[Span]:
        rows, pieces = self.device.tail_layout.column(stream, layer), self.host.tails.pieces(stream, layer)
        spans = []
        for device_place, host_places in leg.places:
            at = rows.offset + device_place * rows.stride_bytes
            for page, (offset, stride, size) in pieces:
                spans.append((at, offset + host_places[page] * stride, size))
                at += size
        return spans

    def _move(self, direction: Direction, device: Tensor, spans: list[Span]) -> None:
        if device.is_cpu:
            _move_addressable(direction, device, self.host.flat, spans)
            return
        queue = self._queues[direction]
        with torch.cuda.stream(queue):
            _move_queued(direction, device, self.host.flat, spans)
        queue.synchronize()


def _move_addressable(direction: Direction, device: Tensor, host: Tensor, spans: list[Span]) -> None:
    on_device, on_host = device.numpy().data, host.numpy().data
    if direction is Direction.LOAD:
        for here, there, size in spans:
            on_device[here : here + size] = on_host[there : there + size]
    else:
        for here, there, size in spans:
            on_host[there : there + size] = on_device[here : here + size]


def _move_queued(direction: Direction, device: Tensor, host: Tensor, spans: list[Span]) -> None:
    for here, there, size in spans:
        on_device, on_host = device[here : here + size], host[there : there + size]
        if direction is Direction.LOAD:
            on_device.copy_(on_host, non_blocking=True)
        else:
            on_host.copy_(on_device, non_blocking=True)


class KernelCopier(Copier):
    """The seam for kernels that gather and scatter host rows from the device (`kernels.copy`)."""

    name = "kernel"

    def _refused(self) -> Iterable[tuple[Stream, str]]:
        yield self.spec.streams[0], "it needs CUDA and the Triton twins of kernels.copy; use direct"

    def copy(self, direction: Direction, leg: Leg, layer: int) -> None:
        raise NotImplementedError

    def copy_entries(
        self, direction: Direction, stream: Stream, layer: int, pairs: Sequence[EntryPair]
    ) -> None:
        raise NotImplementedError


COPIERS: dict[str, type[Copier]] = {kind.name: kind for kind in (ReferenceCopier, DirectCopier, KernelCopier)}


def make_copier(name: str, spec: CacheSpec, device: DeviceMemory, host: HostMemory) -> Copier:
    if name not in COPIERS:
        raise ConfigError("copier", name, f"must be one of {', '.join(COPIERS)}")
    return COPIERS[name](spec, device, host)
