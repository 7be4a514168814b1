"""What a running request keeps to itself: the rows that the next tokens still need. A tail is a snapshot of
it.

    window     per layer, the last w - 1 entries, encoded as in a tail
    c4 rows    per sparse layer, (kv, gate) of the last 8 tokens, for the compressor and for the indexer
    c128 rows  per heavy layer, (kv, gate) of the last 128 tokens

Each request has a ring: position p lies in row p % rows, so that a call writes what is new and moves nothing.
What lies before the start of the text is never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.kernels.choice import Kernels
from tiercel.models.batch import Batch
from tiercel.models.entries import Codec, Parts


class Rings:
    """The last rows of one layer, for every ring."""

    def __init__(self, kernels: Kernels, rings: int, rows: int, codec: Codec) -> None:
        self._k = kernels
        self.rows = rows
        self.codec = codec
        self._parts = tuple(torch.zeros(rings * rows, size, dtype=torch.uint8) for size in codec.sizes)

    def read(self) -> Tensor:
        """[rings · rows, dim], without a copy where they are plain numbers."""
        return self.codec.decode(self._parts)

    def keep(self, batch: Batch, new: Parts) -> None:
        """Remember the newest of a call's rows."""
        tokens, rows = batch.kept(self.rows)
        for own, data in zip(self._parts, new, strict=True):
            self._k.put_rows(own, rows, data, tokens)

    def gather(self, new: Parts, rows: Tensor) -> Parts:
        """Kept and new rows by their numbers, encoded; the kept ones come first."""
        kept = len(self._parts[0])
        olds, news = rows[rows < kept], rows[rows >= kept] - kept
        return tuple(torch.cat([own[olds], data[news]]) for own, data in zip(self._parts, new, strict=True))

    def restore(self, ring: int, end: int, parts: Parts) -> None:
        """From the row of a tail: the entries up to position `end`."""
        count = min(self.rows, len(parts[0]))
        rows = ring * self.rows + torch.arange(end - count, end) % self.rows
        for own, data in zip(self._parts, parts, strict=True):
            own[rows] = data[len(data) - count :]
