"""Copiers move bytes between host memory and a memory near attention, whoever allocated that.

    reference    follows every piece that the memories name, in Python. `direct` is compared with it.
    direct       one call of C for all pages or tails of a leg.

A copier moves what both memories hold: a device that has only some streams, or the layers of one rank, gets
only those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from tiercel.errors import ConfigError
from tiercel.kernels.copy import copy_extents
from tiercel.memory.buffers import HostMemory, Memory
from tiercel.spec.stream import Stream
from tiercel.transfer.extents import LegPlaces, extents_of, moved, shared_rows
from tiercel.transfer.plan import NO_PLACE, Direction, Leg
from tiercel.types import Kind


class Copier(ABC):
    """Moves the bytes of whole pages or tails.

    Guaranteed: when a call returns, every byte is there, and no byte outside the named rows was written (I2).
    Calls for different places may run in several threads at once. A call that raises may have written part of
    its targets, never anything else.

    Required of the caller: sources are written and complete before the call; nothing else reads or writes the
    targets until it returns; both memories outlive the copier.

    Forbidden to a copier: to keep views of host memory between calls (they would keep closed memory mapped),
    to ask which layout it is, to reserve, free or judge an id.

    May block: `copy`, for the time of the copy. Nothing else.
    """

    name: ClassVar[str]

    def __init__(self, device: Memory, host: HostMemory) -> None:
        if device.device.type != "cpu":
            why = f"needs memory the CPU can address, and the device is {device.device}"
            raise ConfigError("copier", self.name, why)
        self.device = device
        self.host = host

    @abstractmethod
    def copy(self, direction: Direction, leg: Leg) -> None:
        """Move the rows of every stream that both memories hold."""


class ReferenceCopier(Copier):
    """Gathers the source ranges into bytes and deals them out to the target ranges."""

    name = "reference"

    def copy(self, direction: Direction, leg: Leg) -> None:
        for stream, layer in shared_rows(self.device, self.host, leg.kind):
            places = (each.tolist() for each in LegPlaces.of(leg, self.device, self.host))
            for here, there in zip(*places, strict=True):
                parts = [part for part, _ in self.device.rows[stream.name, layer][1]]
                if any(part >= len(here) or here[part] == NO_PLACE for part in parts):
                    continue  # a page that moves without one of its places
                near = _ranges(self.device, stream, layer, here)
                far = _ranges(self.host, stream, layer, there)
                sources, targets = (far, near) if direction is Direction.LOAD else (near, far)
                data = b"".join(sources)
                assert len(data) == sum(map(len, targets)), "the two sides of a copy differ in size"
                for target in targets:
                    target[:], data = data[: len(target)], data[len(target) :]


def _ranges(memory: Memory, stream: Stream, layer: int, places: list[int]) -> list[memoryview]:
    """The bytes of one row, range by range."""
    buffer, pieces = memory.rows[stream.name, layer]
    flat, ranges = buffer.numpy().data, (piece.at(places[index]) for index, piece in pieces)
    return [flat[offset : offset + size] for offset, size in ranges]


class DirectCopier(Copier):
    """One call of C for a leg. It does not hold the GIL: Python code goes on meanwhile."""

    name = "direct"

    def __init__(self, device: Memory, host: HostMemory) -> None:
        super().__init__(device, host)
        self._extents = {kind: extents_of(device, host, kind) for kind in Kind}

    def copy(self, direction: Direction, leg: Leg) -> None:
        extents = self._extents[leg.kind]
        if len(extents):
            places, address = LegPlaces.of(leg, self.device, self.host), self.host.flat.data_ptr()
            extents = moved(extents, places.near)
            copy_extents(extents, *places, address, load=direction is Direction.LOAD)


WAYS = ("auto", "direct", "kernel")
"""How a CUDA device copies (`transfer.cuda`)."""
COPIERS: dict[str, type[Copier]] = {kind.name: kind for kind in (ReferenceCopier, DirectCopier)}


def make_copier(name: str, device: Memory, host: HostMemory) -> Copier:
    """`auto` is `direct`. (On CUDA there are no copiers: `transfer.cuda`.)"""
    check_copier(name, "cpu")
    return COPIERS["direct" if name == "auto" else name](device, host)


def check_copier(name: str, device: str) -> None:
    """Raises a ConfigError if nothing of this name copies on the device."""
    names: Sequence[str] = ("auto", *COPIERS)
    where = "a CPU"
    if device.startswith("cuda"):
        names, where = WAYS, device
    if name not in names:
        raise ConfigError("copier", name, f"on {where} it must be one of {', '.join(names)}")
