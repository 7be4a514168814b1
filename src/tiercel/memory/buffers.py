"""Memory of pages and tails: where their rows are, whoever allocated them.

    DeviceMemory      our own: layer first on the CPU, where kernels want the rows of a layer together;
                      on CUDA in the order of the host: copy engines move whole pages (docs/log.md)
    BorrowedMemory    somebody else's tensors, one for each stream and layer, each with a stride of its own
    HostMemory        one buffer of host pages

A page has one place in a memory; on a device with two pools it has one in each (`CacheSpec.units`). A tail
has `spec.places_per_tail` places of pages (there: `spec.units_per_tail` units), in any order, and its bytes
are poured over them. A row is made of pieces of those places: one where a row lies together, several
where it does not.

Kernels read and write rows that lie together: all rows of a layer are a column. Pages lie like that on the
device. Tails do in a few staging places beside the pages: a step writes them there (`transfer.staging`).

All hold bytes only. Which place is whose is decided elsewhere.

A memory loads torch when it is made, not before: rooms that decide import this one for its types.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from tiercel.errors import ConfigError, SpecError
from tiercel.memory.host import HostMap
from tiercel.memory.layout import (
    Layout,
    Piece,
    Pieces,
    Range,
    RowName,
    joined,
    make_layout,
    pour_tails,
    record_rows,
)
from tiercel.spec.cache_spec import CacheSpec, row_step
from tiercel.spec.stream import Part, State, Stream
from tiercel.types import HostPageId, Kind, place

STAGED_AREAS = 2
"""Staged rows lie in so many areas: while the rows of a layer are read, those of the next one are staged."""
if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Column(NamedTuple):
    """All rows of one layer: the row of place p is `row_bytes` at `offset + p · stride` of `buffer`."""

    buffer: Tensor
    offset: int
    stride: int
    row_bytes: int


Row = tuple["Tensor", Pieces]
"""The flat bytes that a row lies in, and the pieces it is made of."""


class Memory:
    """The rows of the streams of `spec`: a copier between two memories moves what both hold."""

    spec: CacheSpec
    device: torch.device
    pages: int
    tails: int
    """Places for tails that lie together."""
    rows: dict[RowName, Row]
    """The row of each (stream, layer), as copiers see it."""
    columns: dict[RowName, Row]
    """The same for kernels, each row in one piece."""

    def places_of(self, kind: Kind) -> int:  # noqa: ARG002 - borrowed memory has some for each kind
        """The places that pages, or tails, are kept in."""
        return self.pages

    def places_in(self, pool: int) -> int:  # noqa: ARG002 - only our own device memory has several
        """The places that one part of a page may lie in."""
        return self.pages

    def column(self, stream: Stream, layer: int) -> Column:
        """The rows of one layer, each of which lies together."""
        buffer, pieces = self.columns[stream.name, layer]
        assert len(pieces) == 1, f"a row of {stream.name} is {len(pieces)} pieces here"
        return Column(buffer, *pieces[0][1])

    def stream(self, role: str, layer: int) -> Stream:
        """The stream that has this role in this layer. Raises `SpecError` for the memory of another model."""
        found = self.spec.find(role, layer)
        if found is None:
            raise SpecError("streams", self.spec.model, f"layer {layer} has no stream of the role {role}")
        return found

    def view(self, stream_name: str, layer: int) -> Tensor:
        """[places, row_bytes] of one layer, without a copy."""
        stream = self.spec.stream(stream_name)
        buffer, offset, stride, row_bytes = self.column(stream, layer)
        places = self.tails
        if stream.kind is Kind.PAGE:
            places = self.places_in(self.spec.pool_of(stream))
        return buffer[offset:].as_strided((places, row_bytes), (stride, 1))


class DeviceMemory(Memory):
    """Room for `pages` whole pages where attention reads them; tails are poured over their places. Besides,
    `tails` staging places.

    With two pools, a place of a page is a unit, and a page takes a unit and a body (`pages.frames`). Then the
    memory is page first on a CPU too. `staged` more rows of the only stream of the second pool lie behind the
    frames. They belong to no page and no tail, and a kernel finds them as it finds the rows of bodies:

        flat_pages   │ frame │ frame │ … │ row │ row │ …      every row begins at a multiple of `row_step`
                                          staged_first
    """

    staged_first: int
    """The number of the first staged row in `sparse_rows`. Each next one is `row_bytes // row_step` on."""
    row_step: int
    """Rows of the second pool begin at multiples of so many bytes. 0: there is one pool."""

    def __init__(self, spec: CacheSpec, pages: int, tails: int, device: str = "cpu", staged: int = 0) -> None:
        import torch

        assert not staged or [len(pool) for pool in spec.pools[1:]] == [1], "staged rows are of one stream"
        self.spec = spec
        self.device = torch.device(device)
        self.frames, self.pages, self.tails = pages, pages * spec.frame_units, tails
        self.staged = staged
        self.host: HostMemory | None = None
        """Where the second part of a page is read if the device does not have it."""
        if spec.second:
            kept = make_layout("page_first_direct", _bare(spec.unit_bytes), spec.page_tokens, self.pages)
            rows = frame_rows(spec)
        else:
            kept = self._layout(_place_streams(spec, spec.unit_bytes), self.pages)
            rows = kept.rows
        apart = spec.pools[1][0] if spec.second else None
        self.row_step = row_step(spec, apart) if apart is not None else 0
        self.staged_first = kept.bytes_total // self.row_step if self.row_step else 0
        more = staged * spec.row_bytes(apart) if apart is not None else 0
        self.flat_pages = self._allocate(kept.bytes_total + more)
        staging = self._layout(spec.tail_streams, tails)
        self.flat_tails = self._allocate(staging.bytes_total)
        rows = rows | pour_tails(kept, spec.tail_streams, spec.page_tokens)
        self.rows = {name: (self.flat_pages, pieces) for name, pieces in rows.items()}
        self.columns = self.rows | {name: (self.flat_tails, row) for name, row in staging.rows.items()}

    def part(self, spec: CacheSpec, *, draft: bool = False) -> DeviceMemory:
        """The memory of the target alone, or of its draft alone, under the names and layers of its own
        `spec`: the one that was given to `CacheSpec.with_draft`."""
        own = copy(self)
        own.spec, own.rows, own.columns = spec, {}, {}
        streams = (stream for stream in self.spec.streams if stream.draft is draft)
        for stream, here in zip(spec.streams, streams, strict=True):
            for layer, layer_here in zip(stream.layers, here.layers, strict=True):
                own.rows[stream.name, layer] = self.rows[here.name, layer_here]
                own.columns[stream.name, layer] = self.columns[here.name, layer_here]
        return own

    @property
    def bytes(self) -> int:
        """All of it: pages and tails, staging places, staged rows."""
        return self.flat_pages.nbytes + self.flat_tails.nbytes

    def places_in(self, pool: int) -> int:
        return self.frames if pool else self.pages

    def sparse_rows(self, stream: Stream) -> Tensor:
        """[n, row_bytes]: every place where a row of this stream of the second pool may begin, in frames and
        behind them. Neighbours overlap where a row is longer than a step."""
        assert self.spec.pool_of(stream) == 1, f"{stream.name} is not in the second pool"
        row_bytes = self.spec.row_bytes(stream)
        count = 1 + (self.flat_pages.numel() - row_bytes) // self.row_step
        return self.flat_pages.as_strided((max(0, count), row_bytes), (self.row_step, 1))

    def sparse_place(self, stream: Stream, layer: int) -> tuple[int, int]:
        """(numbers from a place of the second pool to the next, number that place 0 has) of this layer's rows
        in `sparse_rows`."""
        assert self.spec.pool_of(stream) == 1, f"{stream.name} is not in the second pool"
        _, first, stride, _ = self.column(stream, layer)
        assert first % self.row_step == stride % self.row_step == 0, "rows begin at multiples of a step"
        return stride // self.row_step, first // self.row_step

    def _layout(self, streams: Sequence[Stream], places: int) -> Layout:
        name = "layer_first" if self.device.type == "cpu" else "page_first_direct"
        return make_layout(name, streams, self.spec.page_tokens, places)

    def _allocate(self, size: int) -> Tensor:
        import torch

        return torch.zeros(size, dtype=torch.uint8, device=self.device)


class BorrowedMemory(Memory):
    """Tensors that another owner has allocated. The owner decides which place is whose.

    `rows` names a tensor for each stream and layer: [places, …], of any type, with any stride between places,
    the bytes of a place together. Several may be views of one buffer. A row may take several places: as many
    as its bytes are times those of a place.

    `parts` says for a stream which places of a page, or tail, its rows lie in, one after the other. A stream
    that is not named lies in the first ones. So streams may have places of their own.
    """

    def __init__(
        self,
        spec: CacheSpec,
        rows: Mapping[RowName, Tensor],
        parts: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        self.spec = spec
        self.rows = self.columns = {}
        places: dict[Kind, set[int]] = {kind: set() for kind in Kind}
        for stream in spec.streams:
            for layer in stream.layers:
                tensor = rows.get((stream.name, layer))
                if tensor is None:
                    raise ConfigError("rows", (stream.name, layer), "no tensor was given for this layer")
                where = parts.get(stream.name)
                self.rows[stream.name, layer] = _borrow(stream, layer, tensor, spec.row_bytes(stream), where)
                places[stream.kind].add(len(tensor))
        for each in places.values():
            if len(each) > 1:
                raise ConfigError("rows", sorted(each), "tensors of one pool have as many places each")
        self.pages, self.tails = (max(places[kind], default=0) for kind in (Kind.PAGE, Kind.TAIL))
        self.device = next(iter(self.rows.values()))[0].device

    def places_of(self, kind: Kind) -> int:
        return {Kind.PAGE: self.pages, Kind.TAIL: self.tails}[kind]


def _borrow(stream: Stream, layer: int, tensor: Tensor, row_bytes: int, parts: Sequence[int] | None) -> Row:
    """The rows of a tensor as bytes of the storage below it."""
    import torch

    size = tensor.element_size()
    own = tensor[0].numel() * size if len(tensor) else 0
    if not own or row_bytes % own or not tensor[0].is_contiguous():
        what = f"{tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}"
        raise ConfigError(
            f"rows of {stream.name}, layer {layer}", what, f"a row is {row_bytes} B, in whole places"
        )
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    piece = Piece(int(tensor.storage_offset()) * size, tensor.stride(0) * size, own)
    pieces = row_bytes // own
    parts = range(pieces) if parts is None else parts
    if len(parts) != pieces:
        raise ConfigError("parts", tuple(parts), f"a row of {stream.name} lies in {pieces} places")
    return flat, tuple((part, piece) for part in parts)


def pci_address(device: torch.device) -> str:
    """The PCI address of a CUDA device, as the system writes it."""
    import torch

    own: Any = torch.cuda.get_device_properties(device)
    return f"{own.pci_domain_id:04x}:{own.pci_bus_id:02x}:{own.pci_device_id:02x}.0"


class HostMemory(Memory):
    """One budget of host pages, shared by pages and tails. The options are those of `HostMap`."""

    def __init__(self, spec: CacheSpec, layout_name: str, bytes_budget: int, **options: Any) -> None:
        import torch

        self.spec = spec
        self.device = torch.device("cpu")
        self.pages, self.tails = bytes_budget // spec.place_bytes, 0
        if self.pages < 1:
            raise ConfigError("host_bytes", bytes_budget, f"one host page takes {spec.place_bytes:,} B")
        streams = _place_streams(spec, spec.place_bytes)
        self.layout = make_layout(layout_name, streams, spec.page_tokens, self.pages, spec.second)
        self._map = HostMap(self.layout.bytes_total, **options)
        # Over a view, not over the map: the view keeps the bytes mapped as long as a tensor lives.
        self.flat: Tensor = torch.frombuffer(self._map.view, dtype=torch.uint8)
        rows = self.layout.rows | pour_tails(self.layout, spec.tail_streams, spec.page_tokens)
        self.rows = self.columns = {name: (self.flat, pieces) for name, pieces in rows.items()}

    @property
    def path(self) -> str:
        """Another process of this user can map the same bytes here, while this process has them."""
        return self._map.path

    @property
    def mapped(self) -> memoryview:
        """All the bytes."""
        return self._map.view

    def where(self, stream: Stream, layer: int) -> tuple[int, int]:
        """(address of the row in host place 0, bytes to the same row of the next place), for a stream of
        pages."""
        _, offset, stride, _ = self.column(stream, layer)
        return self.flat.data_ptr() + offset, stride

    def views(
        self, page_ids: Iterable[HostPageId], sizes: Sequence[int], kind: Kind = Kind.PAGE
    ) -> list[list[memoryview]]:
        """The first bytes of a page or tail that has these host pages, in the order of its record, as parts
        of these sizes, without a copy. Bytes that lie together are one view."""
        memory, parts = self._map.view, self.ranges(page_ids, sizes, kind)
        return [[memory[offset : offset + length] for offset, length in part] for part in parts]

    def ranges(
        self, page_ids: Iterable[HostPageId], sizes: Sequence[int], kind: Kind = Kind.PAGE
    ) -> list[tuple[Range, ...]]:
        """Where the bytes of each part are in `mapped`. With two pools, `kind` makes a difference."""
        whole = (each for page_id in page_ids for each in self.layout.place_ranges(place(page_id), kind))
        parts, left = list[tuple[Range, ...]](), Range(0, 0)
        for size in sizes:
            ranges = list[Range]()
            while size:
                offset, length = left if left.bytes else next(whole, left)
                assert length, f"{size} bytes more than these host pages have"
                taken = min(length, size)
                ranges.append(Range(offset, taken))
                size, left = size - taken, Range(offset + taken, length - taken)
            parts.append(joined(ranges) if len(ranges) > 1 else tuple(ranges))
        return parts

    def close(self) -> None:
        """Give the memory back. May be called again. Nothing may be copying."""
        import torch

        self.flat, self.rows, self.columns = torch.empty(0, dtype=torch.uint8), {}, {}
        self._map.close()

    def __enter__(self) -> HostMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def frame_rows(spec: CacheSpec) -> dict[RowName, Pieces]:
    """The rows of a page in two pools. Its first place is a unit, its second is a body: all units of a frame
    but the first."""
    unit, rows = spec.unit_bytes, dict[RowName, Pieces]()
    for part, (first, stride) in enumerate(((0, unit), (unit, unit * spec.frame_units))):
        for stream, layer, (offset, size) in record_rows(spec.pools[part], spec.page_tokens):
            rows[stream.name, layer] = ((part, Piece(first + offset, stride, size)),)
    return rows


def _place_streams(spec: CacheSpec, size: int) -> Sequence[Stream]:
    """The streams of a place of this size: those of a page, and plain bytes behind them. Tails are poured
    over all of it."""
    unused = size - spec.page_bytes
    return (*spec.page_streams, *(_bare(unused, spec.layers[-1] + 1) if unused else ()))


def _bare(size: int, layer: int = 0) -> Sequence[Stream]:
    return (Stream("bytes", layers=(layer,), parts=(Part("bytes", size),), keep=State()),)
