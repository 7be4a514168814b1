"""What the bytes of a page or tail must be: a function of the text it ends, so that any copy can be checked
bit by bit.

The text is named here without the help of `tree.keys`, so two texts that share a key by mistake are found
too.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from tiercel.memory.buffers import HostMemory, Memory
from tiercel.spec.cache_spec import CacheSpec
from tiercel.types import TAG_SHIFT, PageKey, place

POISON = 0xEE
WIDE = 2
"""The tag of places in the second pool."""

Ids = int | tuple[int, ...]

Text = bytes
"""A namespace and the tokens up to a boundary."""


def text_of(namespace: tuple[str, ...], tokens: list[int]) -> Text:
    return repr((namespace, tokens)).encode()


class Bytes:
    """Writes, checks and poisons places of device memory through plain views, not through copiers.

    `device` may hold fewer streams than the spec has: rows of the others are passed over.
    """

    def __init__(self, spec: CacheSpec, device: Memory) -> None:
        self.spec = spec
        self.columns = {
            (stream.name, layer): device.view(stream.name, layer).numpy()
            for stream in device.spec.streams
            for layer in stream.layers
        }
        """What kernels see: a tail in one piece."""
        self.rows = {row: (flat.numpy(), pieces) for row, (flat, pieces) in device.rows.items()}
        self._prepare()

    def _prepare(self) -> None:
        self.expected = lru_cache(maxsize=4096)(self._expected)
        self.texts: dict[PageKey, Text] = {}

    def _expected(self, text: Text, tail: bool) -> list[tuple[tuple[str, int], np.ndarray]]:
        """A row for each stream and layer; every byte depends on its position, so on stream, layer and
        entry."""
        streams = self.spec.tail_streams if tail else self.spec.page_streams
        record = hashlib.shake_128(text + bytes([tail])).digest(sum(map(self.spec.bytes_of, streams)))
        data, rows, start = np.frombuffer(record, np.uint8), [], 0
        for layer in self.spec.layers:  # as in a record: [layer][stream][row]
            for stream in streams:
                if layer in stream.layers:
                    end = start + self.spec.row_bytes(stream)
                    rows.append(((stream.name, layer), data[start:end]))
                    start = end
        return rows

    def pieces(self, row: tuple[str, int], ids: Ids):
        """The bytes of one row of a page or tail, piece by piece."""
        flat, pieces = self.rows[row]
        ids = ids if isinstance(ids, tuple) else (ids,)
        for part, piece in pieces:
            if part < len(ids):  # a sparse page has no place in the second pool
                offset, size = piece.at(place(ids[part]))
                yield flat[offset : offset + size]

    def write(self, ids: Ids, key: PageKey, text: Text, *, tail: bool) -> None:
        assert self.texts.setdefault(key, text) == text, "I8: two texts share a key"
        for row, data in self.expected(text, tail):
            if row in self.rows:
                at = 0
                for piece in self.pieces(row, ids):
                    piece[:], at = data[at : at + len(piece)], at + len(piece)

    def check(self, ids: Ids, text: Text, *, tail: bool, who: str) -> None:
        for row, data in self.expected(text, tail):
            if row not in self.rows:
                continue
            at, kind = 0, "tail" if tail else "page"
            for piece in self.pieces(row, ids):
                wanted, at = data[at : at + len(piece)], at + len(piece)
                assert (piece == wanted).all(), f"I2: wrong bytes in {row} of {kind} of {text!r} ({who})"

    def poison(self, ids: Ids, *, tail: bool) -> None:
        for row, _ in self.expected(b"", tail):
            if row in self.rows:
                for piece in self.pieces(row, ids):
                    self.fill(piece)

    def poison_place(self, page_id: int) -> None:
        """A place that a pool got back, whatever was there."""
        if not self.spec.second:
            self.poison(page_id, tail=False)
            return
        (flat, _), at, unit = next(iter(self.rows.values())), place(page_id), self.spec.unit_bytes
        if page_id >> TAG_SHIFT == WIDE:
            self.fill(self.body(page_id))
        else:
            self.fill(flat[at * unit : (at + 1) * unit])

    def body(self, page_id: int):
        """All bytes of a place in the second pool."""
        (flat, _), at, unit = next(iter(self.rows.values())), place(page_id), self.spec.unit_bytes
        frame = self.spec.frame_units * unit
        return flat[at * frame + unit : (at + 1) * frame]

    def fill(self, piece, value: int = POISON) -> None:
        piece[:] = value

    def check_filled(self, piece, value: int, who: str) -> None:
        assert (piece == value).all(), f"I3: somebody else wrote here ({who})"


class HostRows:
    """Rows of host pages, read and written through the pieces a memory names, not through copiers."""

    def __init__(self, host: HostMemory) -> None:
        self.host = host

    def _ranges(self, row: tuple[str, int], hosts, *, tail: bool):
        name, layer = row
        _, pieces = self.host.rows[name, layer]
        assert tail or len(hosts) == 1
        return [piece.at(place(hosts[index])) for index, piece in pieces]

    def write(self, row: tuple[str, int], hosts, data: bytes, *, tail: bool) -> None:
        flat, at = self.host.flat.numpy(), 0
        for offset, size in self._ranges(row, hosts, tail=tail):
            flat[offset : offset + size] = list(data[at : at + size])
            at += size

    def read(self, row: tuple[str, int], hosts, *, tail: bool) -> bytes:
        flat = self.host.flat.numpy()
        return b"".join(flat[a : a + n].tobytes() for a, n in self._ranges(row, hosts, tail=tail))

    def check(self, expected, hosts, *, tail: bool, who: str) -> None:
        for row, data in expected:
            got = self.read(row, hosts, tail=tail)
            assert got == data.tobytes(), f"I2: wrong bytes on the host in {row} ({who})"
