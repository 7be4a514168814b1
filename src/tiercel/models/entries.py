"""Entries as the model sees them: numbers, stored as the bytes of the cache declaration.

    device rows   [places, row_bytes]  ──►  one view per part  [places, entries, part_bytes]
    rings         [rings · rows, part_bytes] per part, of the requests that run

Whatever is read back was encoded before, also within one call: a value never depends on whether it has been
through the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tiercel.errors import ConfigError, SpecError
from tiercel.kernels import entries
from tiercel.kernels.choice import ListKernels
from tiercel.models.batch import Batch
from tiercel.spec.stream import Stream

Parts = tuple[Tensor, ...]

ENTRIES_MOST = 2**31
"""Kernels read lists of entry numbers as int32."""


@dataclass(frozen=True)
class Codec:
    """[n, dim] numbers ↔ one [n, bytes] tensor per part."""

    encode: Callable[[Tensor], Parts]
    decode: Callable[[Parts], Tensor]
    sizes: tuple[int, ...]
    """Bytes of one entry in each part."""
    plain: bool = False
    """The bytes are the numbers: decoding is a view."""


def plain_codec(size: int, dtype: torch.dtype = torch.float32) -> Codec:
    """Entries of `size` bytes that are the numbers themselves, in one type."""
    encode, decode = partial(entries.encode_plain, dtype=dtype), partial(entries.decode_plain, dtype=dtype)
    return Codec(encode, decode, (size,), plain=dtype == torch.float32)


def codec_of(stream: Stream) -> Codec:
    """How the entries of a stream are written."""
    sizes = tuple(part.bytes for part in stream.parts)
    match stream.encoding:
        case "fp32":
            return plain_codec(sizes[0])
        case "bf16":
            return plain_codec(sizes[0], torch.bfloat16)
        case "fp8_row":
            return Codec(entries.encode_fp8_index, entries.decode_fp8_index, sizes)
        case "fp8_groups":
            encode = partial(entries.encode_fp8, rope=stream.rope, group=stream.group, scale_bytes=sizes[1])
            decode = partial(entries.decode_fp8, rope=stream.rope, group=stream.group)
            return Codec(encode, decode, sizes)
    raise SpecError(f"{stream.name}.encoding", stream.encoding, "is not one that a model here writes")


class EntryRows:
    """The entries of one layer of one stream, numbered place · entries of a row + number in the row."""

    def __init__(self, kernels: ListKernels, rows: Tensor, stream: Stream, page_tokens: int) -> None:
        """Views into device memory [places, row_bytes]."""
        self._k = kernels
        self.codec = codec = codec_of(stream)
        self.per_row = stream.entries_per_row(page_tokens)
        if (count := len(rows) * self.per_row) > ENTRIES_MOST:
            why = f"gives {count:,} entries of {stream.name}, {ENTRIES_MOST:,} have numbers"
            raise ConfigError("device_bytes", rows.numel(), why)
        self.in_place = codec.plain and rows.shape[1] == self.per_row * codec.sizes[0]
        """Whether attention can read the memory itself."""
        used = rows[:, : self.per_row * sum(codec.sizes)].split([self.per_row * s for s in codec.sizes], 1)
        pairs = zip(used, codec.sizes, strict=True)
        self._parts: Parts = tuple(part.unflatten(1, (self.per_row, size)) for part, size in pairs)
        self._flat = rows.view(-1, codec.sizes[0]) if self.in_place else None

    def all(self) -> Tensor:
        """Every entry there is, without a copy."""
        assert self._flat is not None
        return self.codec.decode((self._flat,))

    def read(self, numbers: Tensor) -> Tensor:
        where = numbers // self.per_row, numbers % self.per_row
        return self.codec.decode(tuple(part[where] for part in self._parts))

    def write(self, numbers: Tensor, x: Tensor) -> None:
        data = self.codec.encode(x)
        if self._flat is not None:
            self._k.put_rows(self._flat, numbers, data[0])
            return
        where = numbers // self.per_row, numbers % self.per_row
        for own, new in zip(self._parts, data, strict=True):
            own[where] = new

    def write_row(self, place: int, parts: Parts) -> None:
        """Write a whole row that is encoded already."""
        for own, data in zip(self._parts, parts, strict=True):
            own[place] = data

    def read_row(self, place: int) -> Parts:
        return tuple(part[place] for part in self._parts)


class Rings:
    """The last rows of one layer for every running request, which its next tokens still need.

    Position p lies in row p % rows of the request's ring, so a call writes what is new and moves nothing.
    Rows before the start of a text are never read. A tail is a snapshot of a ring.
    """

    def __init__(
        self, kernels: ListKernels, rings: int, rows: int, codec: Codec, device: torch.device
    ) -> None:
        self._k, self.rows, self.codec = kernels, rows, codec
        shapes = [(rings * rows, size) for size in codec.sizes]
        self._parts = tuple(torch.zeros(shape, dtype=torch.uint8, device=device) for shape in shapes)

    def read(self) -> Tensor:
        """[rings · rows, dim], without a copy where they are plain numbers."""
        return self.codec.decode(self._parts)

    def keep(self, batch: Batch, new: Parts) -> None:
        """Remember the newest of a call's rows."""
        tokens, rows = batch.kept(self.rows)
        for own, data in zip(self._parts, new, strict=True):
            self._k.put_rows(own, rows, data, tokens)

    def gather(self, new: Parts, rows: Tensor) -> Parts:
        """Kept and new rows by their numbers, encoded; the kept ones come first. Rows before the start of a
        text, which are never read, are zeros: no byte of another text gets into a tail."""
        kept, before = len(self._parts[0]), rows < 0
        olds, news = rows[rows < kept].clamp(min=0), rows[rows >= kept] - kept
        pairs = zip(self._parts, new, strict=True)
        gathered = tuple(torch.cat([own[olds], data[news]]) for own, data in pairs)
        for part in gathered:
            part[before] = 0
        return gathered

    def restore(self, ring: int, end: int, parts: Parts) -> None:
        """Fill a ring from a tail's row: the entries up to position `end`."""
        count = min(self.rows, len(parts[0]))
        rows = ring * self.rows + torch.arange(end - count, end, device=parts[0].device) % self.rows
        for own, data in zip(self._parts, parts, strict=True):
            own[rows] = data[len(data) - count :]
