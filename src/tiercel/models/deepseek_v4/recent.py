"""What a running request keeps to itself: the rows that the next tokens still need. A tail is a snapshot of
it.

    window     per layer, the last w - 1 entries, encoded as in a tail
    c4 rows    per sparse layer, (kv, gate) of the last 8 tokens, for the compressor and for the indexer
    c128 rows  per heavy layer, (kv, gate) of the last 128 tokens

Rows are kept in the order of their positions, the newest last; what lies before the start of the text is
never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.models.deepseek_v4.entries import Codec, Parts
from tiercel.spec.stream import Stream


class RecentEntries:
    """The last entries of one window layer, for every ring."""

    def __init__(self, rings: int, rows: int, stream: Stream, codec: Codec) -> None:
        self.rows = rows
        self.codec = codec
        self._parts = tuple(torch.zeros(rings, rows, part.bytes, dtype=torch.uint8) for part in stream.parts)

    def extend(self, ring: int, x: Tensor, *, keep: bool) -> Parts:
        """Old rows and new ones together, encoded; the newest are remembered if they are to be kept."""
        new = self.codec.encode(x)
        both = tuple(torch.cat([old[ring], data]) for old, data in zip(self._parts, new, strict=True))
        for own, data in zip(self._parts, both, strict=True) if keep else ():
            own[ring] = data[len(data) - self.rows :]
        return both

    def restore(self, ring: int, parts: Parts) -> None:
        """From the row of a tail: its last entries."""
        for own, data in zip(self._parts, parts, strict=True):
            rows = min(self.rows, data.shape[0])
            own[ring, self.rows - rows :] = data[data.shape[0] - rows :]


class RecentRows:
    """The last (kv, gate) rows of one compressor, for every ring."""

    def __init__(self, rings: int, rows: int, dim: int) -> None:
        self.rows = rows
        self._data = torch.zeros(rings, rows, 2, dim)

    def extend(self, ring: int, kv: Tensor, gate: Tensor) -> Tensor:
        """Append rows; answers the old ones and the new ones together, [rows + n, 2, dim]."""
        both = torch.cat([self._data[ring], torch.stack([kv, gate], dim=1)])
        self._data[ring] = both[-self.rows :]
        return both

    def restore(self, ring: int, rows: Tensor) -> None:
        """[n, 2, d]: the first channels of the last rows; the others are not needed any more."""
        self._data[ring, -rows.shape[0] :, :, : rows.shape[2]] = rows
