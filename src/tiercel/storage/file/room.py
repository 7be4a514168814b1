"""What has to go when a store is full: decisions only, the log carries them out.

**The oldest segment goes.** Of its records those stay that the eviction policy ranks in the hotter half of
the store, at most half of the segment's bytes; they are appended again, durably, before the file is removed.

- Files leave in the order they came. So a note always outlives what it speaks of, and nothing comes back.
- At least half of a segment is gained for every segment that goes: for each byte put, at most one more is
  written. Choosing the coldest records of the whole store would read and write all of it to gain as much.
- A record that is used stays as long as it is used, like on the hand of a clock: each time round it is
  looked at again.
- One segment's room is always left, so that what stays has a place to go before anything is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tiercel.errors import ConfigError
from tiercel.storage.file.direct import ALIGN

SAMPLE = 256
"""Records that stand for all when the middle rank is asked for: right to about 3 % of the store."""

SEGMENT_BYTES = 256 * 1024**2
"""Shorter ones end too often, and each end is a pause of some milliseconds. Longer ones are felt after a
crash, when the last is scanned: 0.1 s for one of these."""

SEGMENTS_MOST = 512
"""Every segment costs an open file, of which a process may by default have 1024."""

SEGMENTS_LEAST = 8
"""A small store is cut finer: what goes at once, and the room that is left, are then an eighth of it."""

SIZE_LEAST = SEGMENTS_LEAST * 16 * ALIGN


@dataclass(frozen=True)
class Limits:
    """What a store may use."""

    size: int
    """Bytes of all segments."""
    free: int
    """Bytes of the file system that stay free."""
    segment_bytes: int

    def __post_init__(self) -> None:
        if self.size < SIZE_LEAST:
            raise ConfigError("size", self.size, f"must be at least {SIZE_LEAST:,} bytes")
        if self.free < 0:
            raise ConfigError("free", self.free, "must not be negative")
        if self.segment_bytes % ALIGN or not 4 * ALIGN <= self.segment_bytes <= self.size // 4:
            why = f"must be a multiple of {ALIGN}, at least four times that and at most a quarter of the size"
            raise ConfigError("segment_bytes", self.segment_bytes, why)

    def missing(self, *, bytes_on_disk: int, bytes_free: int) -> int:
        """How many bytes have to go before another segment can be begun."""
        return max(
            bytes_on_disk + self.segment_bytes - self.size, self.segment_bytes + self.free - bytes_free
        )


def segment_bytes_for(size: int) -> int:
    chosen = min(max(SEGMENT_BYTES, size // SEGMENTS_MOST), size // SEGMENTS_LEAST)
    return chosen - chosen % ALIGN


def free_for(file_system_bytes: int) -> int:
    """Left to others by default."""
    return min(file_system_bytes // 20, 1024**3)


class Candidate(NamedTuple):
    """A live record of a segment that goes."""

    rank: Any
    """Whatever sorts (`policy.evict.Rank`)."""
    row: int
    bytes: int


def staying(candidates: Sequence[Candidate], *, ranks: Sequence[Any], bytes_most: int) -> list[int]:
    """Rows that stay, in their order: those above the middle of `ranks`, the hottest while there is room."""
    middle = sorted(ranks)[len(ranks) // 2] if ranks else None
    rows = []
    for candidate in sorted(candidates, reverse=True):
        if middle is not None and candidate.rank <= middle:
            break
        if candidate.bytes <= bytes_most:
            bytes_most -= candidate.bytes
            rows.append(candidate.row)
    return sorted(rows)
