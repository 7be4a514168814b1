"""Entries as the model sees them: numbers by (place, entry), stored as the bytes of the cache declaration.

    device rows   [places, row_bytes]  ──►  one view per part  [places, entries, part_bytes]
    recent rows   a request's own       ──►  the same shape, one place per ring

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
from tiercel.kernels.choice import Kernels
from tiercel.kernels.entries import (
    decode_fp8,
    decode_fp8_index,
    decode_plain,
    encode_fp8,
    encode_fp8_index,
    encode_plain,
)
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


def plain_codec(dim: int) -> Codec:
    """fp32 as it is."""
    return Codec(
        partial(encode_plain, dtype=torch.float32),
        partial(decode_plain, dtype=torch.float32),
        (4 * dim,),
        True,
    )


def codec_of(stream: Stream, rope: int) -> Codec:
    """How the entries of a stream are written. `rope`: channels that stay bf16 where the others are fp8."""
    first, sizes = stream.parts[0], tuple(part.bytes for part in stream.parts)
    match stream.encoding:
        case "fp32":
            return plain_codec(first.bytes // 4)
        case "bf16":
            dtype = torch.bfloat16
            return Codec(partial(encode_plain, dtype=dtype), partial(decode_plain, dtype=dtype), sizes)
        case "fp8_row":
            return Codec(encode_fp8_index, decode_fp8_index, sizes)
        case "fp8_groups":
            nope = first.bytes - 2 * rope
            group = min(64, nope & -nope)
            return Codec(
                partial(encode_fp8, rope=rope, group=group, scale_bytes=sizes[1]),
                partial(decode_fp8, rope=rope, group=group),
                sizes,
            )
    raise SpecError(f"{stream.name}.encoding", stream.encoding, "is not one that a model here writes")


class EntryRows:
    """The entries of one layer of one stream, numbered place · entries of a row + number in the row."""

    def __init__(self, kernels: Kernels, rows: Tensor, stream: Stream, page_tokens: int, rope: int) -> None:
        """Views into device memory [places, row_bytes]."""
        self._k = kernels
        self.codec = codec = codec_of(stream, rope)
        self.per_row = stream.entries_per_row(page_tokens)
        if len(rows) * self.per_row > ENTRIES_MOST:
            why = (
                f"gives {len(rows) * self.per_row:,} entries of {stream.name}, {ENTRIES_MOST:,} have numbers"
            )
            raise ConfigError("device_bytes", rows.numel(), why)
        self.in_place = codec.plain and rows.shape[1] == self.per_row * codec.sizes[0]
        """Whether attention can read the memory itself."""
        base, parts = 0, []
        for size in codec.sizes:
            parts.append(rows[:, base : base + self.per_row * size].unflatten(1, (self.per_row, size)))
            base += self.per_row * size
        self._parts = tuple(parts)
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
        """A whole row, encoded already."""
        for own, data in zip(self._parts, parts, strict=True):
            own[place] = data

    def read_row(self, place: int) -> Parts:
        return tuple(part[place] for part in self._parts)
