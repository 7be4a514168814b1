"""Where every byte of a page is: pure arithmetic over places, no memory.

A place holds one page or a part of a tail; a staging place holds one tail. Its record is its rows, layer by
layer, in each the streams in the order of the declaration: [layer][stream][row]. So consecutive layers of a
record lie together.

Where a device has two pools (`CacheSpec.second`), a place keeps the streams of each pool together:
[pool][layer][stream][row]. So a page's part of a pool is one range on both sides of a copy. The record keeps
its own order: stored bytes do not depend on pools.

A layout says where the bytes of a record lie among those of the other places. With two streams, `k` of layers
0 and 1 and `v` of layer 1, and places p0 and p1:

    layer_first          k0:p0 k0:p1 │ k1:p0 k1:p1 │ v1:p0 v1:p1
    page_first_direct    p0: k0 k1 v1                │ p1: k0 k1 v1
      with k apart       p0: v1 k0 k1                │ p1: v1 k0 k1

Every layout is linear in the place: the row of place p begins at `offset + p · stride`. Copiers, memories and
stores ask for pieces and ranges; no other file asks which layout it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import ClassVar, NamedTuple

from tiercel.config import LAYOUT_NAMES
from tiercel.errors import ConfigError
from tiercel.spec.stream import Stream
from tiercel.types import Kind


class Range(NamedTuple):
    """Bytes that lie together."""

    offset: int
    bytes: int


class Piece(NamedTuple):
    """The same bytes of every place: in place p they begin at `offset + p · stride`."""

    offset: int
    stride: int
    bytes: int

    def at(self, place: int) -> Range:
        return Range(self.offset + place * self.stride, self.bytes)


RowName = tuple[str, int]
"""A stream's name and a layer."""

Pieces = tuple[tuple[int, Piece], ...]
"""What a row is made of, in the order of its bytes: (which place of the page or tail, which bytes of it)."""


def record_rows(streams: Sequence[Stream], page_tokens: int) -> Iterator[tuple[Stream, int, Range]]:
    """(stream, layer, where the row lies in the record) of every row, in record order."""
    offset = 0
    for layer in sorted({layer for stream in streams for layer in stream.layers}):
        for stream in streams:
            if layer in stream.layers:
                size = stream.row_bytes(page_tokens)
                yield stream, layer, Range(offset, size)
                offset += size


class Layout(ABC):
    """The places of one pool in one flat buffer. A layout holds no memory and knows no ids, only places."""

    name: ClassVar[str]

    def __init__(
        self, streams: Sequence[Stream], page_tokens: int, places: int, second: Collection[str] = ()
    ) -> None:
        """`second`: the names of the streams that a device keeps in a second pool."""
        assert places >= 0, places
        self.streams, self.second = tuple(streams), tuple(second)
        self.page_tokens = page_tokens
        self.places = places
        self.place_bytes = sum(row.bytes for _, _, row in record_rows(streams, page_tokens))
        self.bytes_total = places * self.place_bytes
        lying = dict(_place_rows(streams, page_tokens, second))
        self.rows: dict[RowName, Pieces] = {
            (stream.name, layer): ((0, Piece(*self._lay(lying[stream.name, layer]), row.bytes)),)
            for stream, layer, row in record_rows(streams, page_tokens)
        }
        """The rows, in record order."""

    @abstractmethod
    def _lay(self, row: Range) -> tuple[int, int]:
        """(offset in place 0, bytes to the same row of the next place) of the row at `row` of a place."""

    @abstractmethod
    def cut(self, offset: int, size: int) -> tuple[Piece, ...]:
        """Bytes offset … offset + size - 1 of any place, as tails are poured over them: in an order of the
        layout's own. Where there is no second pool, it is the order of a page's record."""

    def place_ranges(self, place: int, kind: Kind = Kind.PAGE) -> tuple[Range, ...]:
        """All bytes of one place: in the order of a page's record, or in the order in which tails are poured
        over them. Ranges that touch are joined."""
        assert 0 <= place < self.places, f"place {place} of {self.places}"
        return joined(piece.at(place) for piece in self._whole[kind])

    @cached_property
    def _whole(self) -> dict[Kind, tuple[Piece, ...]]:
        rows = (piece for pieces in self.rows.values() for _, piece in pieces)
        return {Kind.PAGE: tuple(self._joined(rows)), Kind.TAIL: self.cut(0, self.place_bytes)}

    def _joined(self, pieces: Iterable[Piece]) -> Iterable[Piece]:
        """The same bytes in the same order. Pieces that touch in every place may be joined."""
        return pieces


def _place_rows(
    streams: Sequence[Stream], page_tokens: int, second: Collection[str]
) -> Iterator[tuple[RowName, Range]]:
    """Where each row lies in a place, if a place is kept together: the pools one after the other, each in the
    order of a record."""
    base = 0
    for apart in (False, True):
        own = [stream for stream in streams if (stream.name in second) is apart]
        size = 0
        for stream, layer, row in record_rows(own, page_tokens):
            yield (stream.name, layer), Range(base + row.offset, row.bytes)
            size += row.bytes
        base += size


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same bytes in the same order, with neighbours joined."""
    done: list[Range] = []
    for offset, size in ranges:
        if done and done[-1].offset + done[-1].bytes == offset:
            done[-1] = Range(done[-1].offset, done[-1].bytes + size)
        else:
            done.append(Range(offset, size))
    return tuple(done)


class LayerFirst(Layout):
    """[layer][stream][page][row]: how attention reads the device. Neighbouring pages of one layer touch;
    a page is as many ranges as it has rows."""

    name = "layer_first"

    def _lay(self, row: Range) -> tuple[int, int]:
        return self.places * row.offset, row.bytes

    def cut(self, offset: int, size: int) -> tuple[Piece, ...]:
        assert 0 <= offset <= offset + size <= self.place_bytes, (offset, size)
        pieces, row_end = [], 0
        for ((_, (first, stride, row_bytes)),) in self.rows.values():
            row_start, row_end = row_end, row_end + row_bytes
            start, end = max(offset, row_start), min(offset + size, row_end)
            if start < end:
                pieces.append(Piece(first + start - row_start, stride, end - start))
        return tuple(pieces)


class PageFirstDirect(Layout):
    """[page][pool][layer][stream][row]: with one pool, a page is one record, and a layer of it is one range.
    With two, each part of a page is one range, and a record takes bytes of both in turn."""

    name = "page_first_direct"

    def _lay(self, row: Range) -> tuple[int, int]:
        return row.offset, self.place_bytes

    def _joined(self, pieces: Iterable[Piece]) -> Iterable[Piece]:
        ranges = joined(Range(piece.offset, piece.bytes) for piece in pieces)
        return [Piece(offset, self.place_bytes, size) for offset, size in ranges]

    def cut(self, offset: int, size: int) -> tuple[Piece, ...]:
        assert 0 <= offset <= offset + size <= self.place_bytes, (offset, size)
        return (Piece(offset, self.place_bytes, size),)


LAYOUTS: dict[str, type[Layout]] = {kind.name: kind for kind in (LayerFirst, PageFirstDirect)}


def make_layout(
    name: str, streams: Sequence[Stream], page_tokens: int, places: int, second: Collection[str] = ()
) -> Layout:
    if name not in LAYOUT_NAMES:
        raise ConfigError("layout", name, f"must be one of {', '.join(LAYOUT_NAMES)}")
    return LAYOUTS[LAYOUT_NAMES[name]](streams, page_tokens, places, second)


def pour_tails(pages: Layout, streams: Sequence[Stream], page_tokens: int) -> dict[RowName, Pieces]:
    """The row of every (stream, layer) of a tail: its record is poured over the bytes of whole places.

    record       │ window 0 │ window 1 │ window 2 │ state 0 │ state 1 │
    places       │ place 7          │ place 2          │ place 9 ┄┄┄┄┄┄┄│      any ids; the end stays unused

    So pages and tails share one pool in every layout. A row may end in one place and go on in
    the next, and a page may itself be several ranges.
    """
    rows = record_rows(streams, page_tokens)
    return {(stream.name, layer): tuple(_pour(pages, *row)) for stream, layer, row in rows}


def _pour(pages: Layout, offset: int, size: int) -> Iterator[tuple[int, Piece]]:
    """The pieces of the row that lies at `offset` in the record."""
    while size:
        part, skip = divmod(offset, pages.place_bytes)
        take = min(size, pages.place_bytes - skip)
        for piece in pages.cut(skip, take):
            yield part, piece
        offset, size = offset + take, size - take
