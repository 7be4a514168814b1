"""Which bytes a copy moves: bytes that lie together on both sides, for all places at once.

    near   `near + device place · near_stride`     an address in device memory, ours or borrowed
    far    `far + host place · far_stride`         an offset in host memory

A page has one place on each side. A tail has several, and `near_part` and `far_part` say which. If both
sides keep a page in the same order, the whole page is one extent. If the device keeps each layer apart, each
row is an extent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercel.memory.buffers import HostMemory, Memory, Row
from tiercel.spec.stream import Stream
from tiercel.transfer.plan import NO_PLACE, Leg
from tiercel.types import PLACE_MASK, Kind

Ints = NDArray[np.int64]
Extents = Ints
"""[extents, 7]: the fields of `Extent`."""


class Extent(NamedTuple):
    near: int
    near_stride: int
    near_part: int
    far: int
    far_stride: int
    far_part: int
    size: int

    def follows(self, other: Extent) -> bool:
        """Whether this extent begins where `other` ends, on both sides and in every place."""
        same = self[1:3] == other[1:3] and self[4:6] == other[4:6]
        return same and (self.near, self.far) == (other.near + other.size, other.far + other.size)


def shared_rows(device: Memory, host: HostMemory, kind: Kind) -> list[tuple[Stream, int]]:
    """(stream, layer) of every row that both memories hold, as the host knows the streams."""
    near, far = (memory.spec.streams_of(kind) for memory in (device, host))
    held = {(stream.name, layer) for stream in near for layer in stream.layers}
    return [(stream, layer) for stream in far for layer in stream.layers if (stream.name, layer) in held]


def extents_of(
    device: Memory, host: HostMemory, kind: Kind, layers: Collection[int] | None = None
) -> Extents:
    """The extents of a page or tail, of some layers only if they are given. Neighbours are joined."""
    found: list[Extent] = []
    for stream, layer in shared_rows(device, host, kind):
        if layers is None or layer in layers:
            row = stream.name, layer
            found += cut_row(device.rows[row], host.rows[row])
    return join(found)


def join(found: Iterable[Extent]) -> Extents:
    """Extents as a table. Neighbours are joined."""
    joined: list[Extent] = []
    for each in sorted(found, key=lambda extent: (extent.far_part, extent.far)):
        if joined and each.follows(joined[-1]):
            joined[-1] = joined[-1]._replace(size=joined[-1].size + each.size)
        else:
            joined.append(each)
    return np.array(joined, np.int64).reshape(-1, len(Extent._fields))


def cut_row(here: Row, there: Row) -> Iterator[Extent]:
    """One row, cut wherever a piece of either side ends."""
    (buffer, nears), (_, fars) = here, there
    base = buffer.data_ptr()
    sizes = [sum(piece.bytes for _, piece in pieces) for pieces in (nears, fars)]
    assert sizes[0] == sizes[1], f"a row has {sizes[0]} bytes here and {sizes[1]} there"
    left, right = list(nears[::-1]), list(fars[::-1])
    while left:
        (near_part, near), (far_part, far) = left.pop(), right.pop()
        size = min(near.bytes, far.bytes)
        yield Extent(base + near.offset, near.stride, near_part, far.offset, far.stride, far_part, size)
        for rest, index, piece in ((left, near_part, near), (right, far_part, far)):
            if piece.bytes > size:
                rest.append((index, piece._replace(offset=piece.offset + size, bytes=piece.bytes - size)))


class LegPlaces(NamedTuple):
    """The places of a leg: [items, places of an item] on the device and on the host. On the device,
    `NO_PLACE` stays what it is."""

    near: Ints
    far: Ints

    @classmethod
    def of(cls, leg: Leg, device: Memory, host: HostMemory) -> LegPlaces:
        near, far = (np.fromiter(chain.from_iterable(each), np.int64) for each in (leg.device, leg.host))
        absent = near == NO_PLACE
        near, far = near & PLACE_MASK, far & PLACE_MASK
        near[absent] = NO_PLACE
        most = device.places_of(leg.kind)
        assert near.max(initial=0) < most and far.max(initial=0) < host.pages, f"I7: no such place: {leg}"
        near, far = (each.reshape(len(leg.device), -1) for each in (near, far))
        if absent.any():
            assert ((near < 0) == (near[0] < 0)).all(), f"I7: items that move in different parts: {leg}"
        return cls(near, far)


def held(near: Ints) -> tuple[int, ...]:
    """Which of its places on the device each item of a leg has: all items have the same ones."""
    return tuple(np.flatnonzero(near[0] != NO_PLACE).tolist())


def moved(table: Extents, near: Ints) -> Extents:
    """The extents of a leg whose items have these places on the device: a page may be without its first, or
    without its second. It is `table` itself where nothing is missing."""
    here = np.isin(table[:, 2], held(near))
    return table if here.all() else table[here]


def ranges(table: Extents, places: LegPlaces) -> tuple[Ints, Ints, Ints]:
    """(near addresses, far offsets, sizes) of every extent of every item, item by item."""
    near = table[:, 0] + places.near[:, table[:, 2]] * table[:, 1]
    far = table[:, 3] + places.far[:, table[:, 5]] * table[:, 4]
    return near.ravel(), far.ravel(), np.broadcast_to(table[:, 6], near.shape).ravel()
