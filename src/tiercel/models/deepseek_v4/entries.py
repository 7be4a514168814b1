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

_PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Codec:
    """[n, dim] numbers ↔ one [n, bytes] tensor per part."""

    encode: Callable[[Tensor], Parts]
    decode: Callable[[Parts], Tensor]


def codec_of(stream: Stream, rope: int) -> Codec:
    """The parts of a declaration say how their entries are written."""
    first = stream.parts[0]
    if first.name in _PLAIN:
        dtype = _PLAIN[first.name]
        return Codec(partial(encode_plain, dtype=dtype), partial(decode_plain, dtype=dtype))
    if stream.name.endswith("_index"):
        return Codec(encode_fp8_index, decode_fp8_index)
    nope = first.bytes - 2 * rope
    group = min(64, nope & -nope)
    scale = stream.parts[1].bytes
    return Codec(
        partial(encode_fp8, rope=rope, group=group, scale_bytes=scale),
        partial(decode_fp8, rope=rope, group=group),
    )


class EntryRows:
    """The entries of one layer of one stream."""

    def __init__(self, parts: Parts, codec: Codec) -> None:
        self.parts = parts
        self.codec = codec

    @staticmethod
    def over(rows: Tensor, stream: Stream, page_tokens: int, codec: Codec) -> EntryRows:
        """Views into device memory [places, row_bytes]."""
        entries, base, parts = stream.entries_per_row(page_tokens), 0, []
        for part in stream.parts:
            parts.append(rows[:, base : base + entries * part.bytes].unflatten(1, (entries, part.bytes)))
            base += entries * part.bytes
        return EntryRows(tuple(parts), codec)

    def read(self, places: Tensor, entries: Tensor) -> Tensor:
        return self.codec.decode(tuple(part[places, entries] for part in self.parts))

    def write(self, places: Tensor, entries: Tensor, x: Tensor) -> None:
        for part, data in zip(self.parts, self.codec.encode(x), strict=True):
            part[places, entries] = data

    def write_row(self, place: int, parts: Parts) -> None:
        """A whole row, encoded already."""
        for own, data in zip(self.parts, parts, strict=True):
            own[place] = data

    def read_row(self, place: int) -> Parts:
        return tuple(part[place] for part in self.parts)
