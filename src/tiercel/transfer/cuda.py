"""Plans carried out by a CUDA device: copies are queued, and events tell when they have ended.

    submit(plan)                 ─► the direction's stream   │ all layers │ event │
    submit(plan, layered=True)   ─► │ layers 0 … 4 │ event │, and when they are waited for: │ 5 … 14 │ event │
    poll() ─► [Done] when the last event has passed

The copy engines move extents straight between host pages and device pages, many in one call: our own device
memory keeps a page in the order of a host page, so a page is one extent, or, where a step waits layer by
layer, one for each group of layers. No multiprocessor is used. Where rows lie apart (`BorrowedMemory`, or
host memory layer first), a Triton kernel moves them: from pinned memory itself, or through a staging buffer
that the copy engines fill.

    dma      extents are large                                        97 % of the link on an H200
    staged   rows are small on the device, host pages lie together    89 to 93 %, and a scatter kernel
    kernel   rows are small on both sides, or few                     84 to 89 %, slows a forward down
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tiercel.errors import ConfigError, TransferError
from tiercel.memory.buffers import HostMemory, Memory
from tiercel.transfer.controller import Done, Seconds, Ticket, Tickets
from tiercel.transfer.copier import check_copier
from tiercel.transfer.extents import Extents, Ints, LegPlaces, extents_of, held, moved, ranges
from tiercel.transfer.plan import Direction, Plan
from tiercel.types import Kind

if TYPE_CHECKING:
    from tiercel.kernels.move import Mover

DMA_BYTES_LEAST = 40 * 1024
"""Extents are left to the copy engines if the extent of an average byte has this size and more. H200: 998 KB
53 GB/s, 250 KB 51, 37 KB 32, each extent costs the CPU 0.65 µs; a kernel reads rows of any size at 49
(2026-11-15).

The average is over bytes, not over extents: what counts is how large the extents are that most bytes lie in.
A page in two pools has an extent of each pool in a group of layers: those of V4-Flash's first group have
19 KB and 75 KB. Their mean size is 47 KB, but an average byte lies in one of 64 KB. Rows of c4 that lie
alone, as in borrowed memory, have 37 KB each: they are below this."""

GROUPED_BYTES_LEAST = 16 * 1024**2
"""Smaller loads, of 0.3 ms, are queued as one group."""

FIRST_RANGES, MORE_RANGES = 32, 4
"""The first call of the copy engines has few ranges, each next one four times as many: copies begin at once,
and the link does not wait while 512 ranges are queued, which takes 300 µs."""

STAGING_BYTES = 64 * 1024**2
"""The size of a staging buffer, one for each direction."""

STAGED_BYTES_LEAST = 4 * 1024**2
"""Fewer bytes are moved by one kernel: it needs one launch instead of two calls."""

PROGRAMS = 16
"""Programs of a kernel that reads pinned memory. More do not read faster and take multiprocessors from the
model."""

SCATTER_PROGRAMS = 264

LAST_LAYER = sys.maxsize


class Attributes(ctypes.Structure):
    """cudaMemcpyAttributes: the order of reads, location hints of both sides, flags."""

    _fields_ = [
        (name, ctypes.c_int) for name in ("order", "from_kind", "from_id", "to_kind", "to_id", "flags")
    ]


class CopyEngines:
    """`cudaMemcpyBatchAsync`, or a plain asynchronous copy for each range if that fails its test."""

    ANY_ORDER = 3
    """Sources may be read in any order. (The order of the stream was refused by driver 580.)"""

    def __init__(self) -> None:
        torch.cuda.current_stream()  # makes torch load its runtime
        lines = Path("/proc/self/maps").read_text().splitlines()
        names = {line.split()[-1] for line in lines if "libcudart" in line}
        if not names:
            raise ConfigError("device", "cuda", "torch has not loaded a CUDA runtime")
        self._runtime = ctypes.CDLL(min(names))
        self._runtime.cudaGetErrorName.restype = ctypes.c_char_p
        version = ctypes.c_int()
        self._runtime.cudaRuntimeGetVersion(ctypes.byref(version))
        self._failed_index = [] if version.value >= 13000 else [ctypes.byref(ctypes.c_size_t())]
        self._attributes, self._zero = Attributes(self.ANY_ORDER), ctypes.c_size_t(0)
        self.batched = version.value >= 12080 and self._works()

    def _works(self) -> bool:
        """Whether three ranges of different sizes arrive, and nothing else."""
        source, target = (
            torch.arange(64, dtype=torch.uint8, device="cuda"),
            torch.zeros(64, dtype=torch.uint8),
        )
        target = target.pin_memory()
        starts, sizes = np.array([3, 17, 40], np.int64), np.array([5, 1, 24], np.int64)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            self._batch(target.data_ptr() + starts, source.data_ptr() + starts, sizes, stream)
            stream.synchronize()
        except (TransferError, RuntimeError):
            return False
        wanted = torch.zeros(64, dtype=torch.uint8)
        for start, size in zip(starts, sizes, strict=True):
            wanted[start : start + size] = torch.arange(start, start + size)
        return torch.equal(target, wanted)

    def copy(self, to: Ints, source: Ints, sizes: Ints, stream: torch.cuda.Stream) -> int:
        """Queue copies between addresses. Returns how many calls that took."""
        if self.batched:
            self._batch(to, source, sizes, stream)
            return 1
        handle = ctypes.c_void_p(stream.cuda_stream)
        for each in zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True):
            target, origin, size = map(ctypes.c_size_t, each)
            self._check("cudaMemcpyAsync", self._runtime.cudaMemcpyAsync(target, origin, size, 4, handle))
        return len(to)

    def _batch(self, to: Ints, source: Ints, sizes: Ints, stream: torch.cuda.Stream) -> None:
        arrays = [np.ascontiguousarray(each, np.int64) for each in (to, source, sizes)]
        code = self._runtime.cudaMemcpyBatchAsync(
            *(ctypes.c_void_p(each.ctypes.data) for each in arrays),
            ctypes.c_size_t(len(to)),
            ctypes.byref(self._attributes),
            ctypes.byref(self._zero),
            ctypes.c_size_t(1),
            *self._failed_index,
            ctypes.c_void_p(stream.cuda_stream),
        )
        self._check("cudaMemcpyBatchAsync", code)

    def _check(self, what: str, code: int) -> None:
        if code:
            raise TransferError(f"{what}: {self._runtime.cudaGetErrorName(code).decode()}")


class Events:
    """The layers of a plan in groups, and the event behind each group: (last layer, event).

    `groups` queues a group when the group is taken from it. A reader that waits layer by layer computes the
    first layers while the next are being queued; `queue_all` is for all others.
    """

    def __init__(self, groups: Iterable[tuple[int, torch.cuda.Event]] = ()) -> None:
        self.events: list[tuple[int, torch.cuda.Event]] = []
        self.error: Exception | None = None
        """Why a group was not queued. No group is queued behind it."""
        self._groups, self._lock = iter(groups), Lock()
        self._queue_next()

    def _queue_next(self) -> bool:
        with self._lock:  # a runner's thread waits for layers while another one polls
            try:
                self.events.append(next(self._groups))
            except StopIteration:
                return False
            except Exception as error:  # noqa: BLE001 - whatever it is, the plan has failed (I13)
                self.error, self._groups = error, iter(())
                return False
            return True

    def queue_all(self) -> None:
        while self._queue_next():
            pass

    def wait(self, layer: int) -> None:
        """What is queued on the current stream from now on runs after this layer's bytes are there."""
        while self.events and layer > self.events[-1][0] and self._queue_next():
            pass
        for last_layer, event in self.events:
            if layer <= last_layer:
                event.wait()
                return

    def done(self) -> bool:
        self.queue_all()
        return all(event.query() for _, event in self.events[-1:])


class _Flight(NamedTuple):
    """A queued plan: the event before its first copy, and the bytes of pages and of tails."""

    begun: torch.cuda.Event
    ready: Events
    sizes: dict[str, int]


def are_large(table: Extents) -> bool:
    """Whether these extents are left to the copy engines. No extents are: they take no launch."""
    sizes = table[:, 6].astype(np.float64)
    return bool((sizes**2).sum() >= DMA_BYTES_LEAST * sizes.sum())


class _Moves:
    """The extents of a page or tail, of all layers or of a group, and the three ways to move them."""

    def __init__(self, device: Memory, host: HostMemory, table: Extents) -> None:
        self.host, self._memory, self._device = host, device, device.device
        self.table = table
        self.large = are_large(table)
        self._parts: dict[tuple[int, ...], _Moves] = {}
        """What moves of items that have only these of their places on the device."""

    def of(self, places: LegPlaces) -> _Moves:
        """The same for items with these places: not all parts of a page may move."""
        here = held(places.near)
        if here not in self._parts:
            table = moved(self.table, places.near)
            whole = table is self.table
            self._parts[here] = self if whole else _Moves(self._memory, self.host, table)
        return self._parts[here]

    @cached_property
    def item_bytes(self) -> int:
        return -(-int(self.table[:, 6].sum()) // 16) * 16

    @cached_property
    def staged(self) -> tuple[Extents, Extents]:
        """Two tables: between host and staging buffer, and between staging buffer and device."""
        to_host, to_device, at = list[list[int]](), self.table.copy(), 0
        for row, (_, _, _, far, stride, part, size) in zip(to_device, self.table.tolist(), strict=True):
            last = to_host[-1] if to_host else [0, 0, 0, 0, 0, -1, 0]
            if (part, far, stride) == (last[5], last[3] + last[6], last[4]):
                last[6] += size
            else:
                to_host.append([at, self.item_bytes, 0, far, stride, part, size])
            row[3:6] = at, self.item_bytes, 0
            at += size
        return np.array(to_host, np.int64).reshape(-1, 7), to_device

    @cached_property
    def kernel(self) -> Mover:
        return self._mover(self.table, self.host.flat.data_ptr())

    @cached_property
    def may_stage(self) -> bool:
        return 0 < self.item_bytes <= STAGING_BYTES and are_large(self.staged[0])

    def scatter(self, staging: Tensor) -> Mover:
        return self._mover(self.staged[1], staging.data_ptr())

    def _mover(self, table: Extents, address: int) -> Mover:
        from tiercel.kernels.move import Mover  # here: Triton takes a second to import

        return Mover(table, self._device, address)


class _Group(NamedTuple):
    """Layers that are queued together. The first group has all layers of the tails: they are small, and a
    model takes them over before it computes."""

    last_layer: int
    moves: Mapping[Kind, _Moves]


class _Queue:
    """What one direction queues on its stream."""

    def __init__(self, direction: Direction, engines: CopyEngines, device: torch.device) -> None:
        self.load = direction is Direction.LOAD
        self.stream = torch.cuda.Stream(device)
        self.launches = 0
        self._engines, self._device = engines, device
        self._scatters: dict[int, Mover] = {}

    def mark(self) -> torch.cuda.Event:
        """An event behind all that is queued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    @cached_property
    def _staging(self) -> Tensor:
        return torch.empty(STAGING_BYTES, dtype=torch.uint8, device=self._device)

    def dma(self, near: Ints, far: Ints, sizes: Ints) -> None:
        """Queue copies between addresses."""
        to, source = (near, far) if self.load else (far, near)
        first, count = 0, FIRST_RANGES
        while first < len(sizes):
            part = slice(first, first + count)
            self.launches += self._engines.copy(to[part], source[part], sizes[part], self.stream)
            first, count = first + count, count * MORE_RANGES

    def kernel(self, mover: Mover, near: Ints, far: Ints, programs: int) -> None:
        with torch.cuda.stream(self.stream):
            places = (torch.from_numpy(np.ascontiguousarray(each)).pin_memory() for each in (near, far))
            here, there = (each.to(self._device, non_blocking=True) for each in places)
            mover(here, there, programs, load=self.load)
        self.launches += 1

    def staged(self, moves: _Moves, places: LegPlaces) -> None:
        """Part by part through the staging buffer. All on one stream: a part waits for the one before."""
        staging, base = self._staging, moves.host.flat.data_ptr()
        if id(moves) not in self._scatters:
            self._scatters[id(moves)] = moves.scatter(staging)
        scatter, count = self._scatters[id(moves)], STAGING_BYTES // moves.item_bytes
        for first in range(0, len(places.near), count):
            near, far = (each[first : first + count] for each in places)
            numbers = np.arange(len(near))[:, None]
            here, there, sizes = ranges(moves.staged[0], LegPlaces(numbers, far))
            if self.load:
                self.dma(here + staging.data_ptr(), there + base, sizes)
            self.kernel(scatter, near, numbers, SCATTER_PROGRAMS)
            if not self.load:
                self.dma(here + staging.data_ptr(), there + base, sizes)


class CudaController:
    """Copies between a CUDA device and pinned host memory.

    A copy begins after all that its submitter has queued on its current stream by then: the kernels that
    wrote the rows of a save, and the last readers of the targets of a load. That stream waits for a copy only
    where `Events.wait` is called. With `after`, copies wait for that earlier event instead.
    """

    in_order = True

    def __init__(
        self,
        device: Memory,
        host: HostMemory,
        way: str = "auto",
        *,
        shares: Sequence[float] | None = None,
        grouped_bytes: int = GROUPED_BYTES_LEAST,
    ) -> None:
        check_copier(way, str(device.device))
        self.tickets = Tickets()
        self.device, self.host, self.way = device, host, way
        self.after: torch.cuda.Event | None = None
        engines = CopyEngines()
        self._queued = {direction: _Queue(direction, engines, device.device) for direction in Direction}
        self._flying: dict[int, _Flight] = {}
        whole = {kind: _Moves(device, host, extents_of(device, host, kind)) for kind in Kind}
        self._whole = [_Group(LAST_LAYER, whole)]
        self._groups = list[_Group]()
        for layers in host.spec.layer_groups(shares):
            moves = {} if self._groups else dict(whole)
            moves[Kind.PAGE] = _Moves(device, host, extents_of(device, host, Kind.PAGE, layers))
            self._groups.append(_Group(layers[-1], moves))
        if way == "kernel" or not all(group.moves[Kind.PAGE].large for group in self._groups):
            self._groups = self._whole
        self._grouped_bytes = grouped_bytes
        pages = whole[Kind.PAGE]
        staged = "staged" if pages.may_stage and way != "kernel" else "kernel"
        self.how = "copy engines" if way != "kernel" and pages.large else staged

    @property
    def launches(self) -> int:
        """Calls that queued work on the device so far."""
        return sum(queue.launches for queue in self._queued.values())

    def submit(self, plan: Plan, *, layered: bool = False) -> Ticket:
        """Queue a whole plan; for a layered one the first group now, the others when they are waited for."""
        ticket = self.tickets.give(plan, layered=layered)
        for flight in self._flying.values():  # plans are carried out in order
            flight.ready.queue_all()
        queue = self._queued[plan.direction]
        try:
            legs = [(leg.kind, LegPlaces.of(leg, self.device, self.host)) for leg in plan.legs]
            if (before := self._before()) is not None:
                queue.stream.wait_event(before)
            begun = queue.mark()
        except Exception as error:  # noqa: BLE001 - whatever it is, the plan has failed (I13)
            self.tickets.end(ticket, error)
            return ticket
        sizes = dict.fromkeys((kind.plural for kind in Kind), 0)
        for kind, places in legs:
            sizes[kind.plural] += len(places.near) * self._whole[0].moves[kind].of(places).item_bytes
        grouped = layered and sum(sizes.values()) >= self._grouped_bytes
        ready = Events(self._queue_groups(queue, legs, self._groups if grouped else self._whole))
        self._flying[ticket.number] = _Flight(begun, ready, sizes)
        return ticket

    def _before(self) -> torch.cuda.Event | None:
        """The event that copies wait for. An idle stream has nothing to wait for."""
        current = torch.cuda.current_stream(self.device.device)
        return self.after or (None if current.query() else current.record_event())

    def _queue_groups(
        self, queue: _Queue, legs: Sequence[tuple[Kind, LegPlaces]], groups: Sequence[_Group]
    ) -> Iterator[tuple[int, torch.cuda.Event]]:
        for group in groups:
            large = list[tuple[Ints, Ints, Ints]]()
            for kind, places in legs:
                if (moves := group.moves.get(kind)) is not None:
                    self._queue_leg(queue, moves.of(places), places, large)
            if large:
                near, far, lengths = (np.concatenate(each) for each in zip(*large, strict=True))
                queue.dma(near, far + self.host.flat.data_ptr(), lengths)
            yield group.last_layer, queue.mark()

    def _queue_leg(
        self, queue: _Queue, moves: _Moves, places: LegPlaces, large: list[tuple[Ints, Ints, Ints]]
    ) -> None:
        """Ranges for the copy engines are added to `large`: all legs are sent in one call."""
        bytes_total = len(places.near) * moves.item_bytes
        if self.way != "kernel" and moves.large:
            large.append(ranges(moves.table, places))
        elif moves.may_stage and (
            self.way == "direct" or (self.way == "auto" and bytes_total >= STAGED_BYTES_LEAST)
        ):
            queue.staged(moves, places)
        else:
            queue.kernel(moves.kernel, *places, PROGRAMS)

    def ready(self, number: int) -> Events:
        """When layers may be read. A load that has ended, in whatever way, need not be waited for."""
        flight = self._flying.get(number)
        return flight.ready if flight else Events()

    def _settle(self) -> None:
        """End plans that have passed their last event."""
        for queue in self.tickets.under_way():
            for ticket in queue:
                flight = self._flying.get(ticket.number)
                if flight is not None:
                    if not flight.ready.done():
                        break
                    del self._flying[ticket.number]
                    error = flight.ready.error
                    self.tickets.end(ticket, error, _seconds(flight) if error is None else {})

    def poll(self) -> list[Done]:
        self._settle()
        return self.tickets.take()

    @property
    def has_landed(self) -> bool:
        self._settle()
        return self.tickets.has_landed

    def close(self) -> None:
        for flight in self._flying.values():
            flight.ready.queue_all()
        for queue in self._queued.values():
            queue.stream.synchronize()
        self._settle()


def _seconds(flight: _Flight) -> Seconds:
    """The device's time, divided by bytes."""
    took_s = flight.begun.elapsed_time(flight.ready.events[-1][1]) / 1e3
    return {name: took_s * size / max(1, sum(flight.sizes.values())) for name, size in flight.sizes.items()}
