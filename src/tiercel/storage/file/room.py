"""What a full store evicts: decisions only, the log carries them out.

A whole segment is evicted. Records of it that stay are appended to another segment, durably, before the file
is removed.

- **Dead bytes first**: if an eighth of a segment or more is dead, the segment with the most dead bytes is
  evicted and all its live records stay. So no record is lost while dead bytes can be freed instead.
- **Otherwise the coldest segment**: the one whose median record has the lowest rank of the eviction policy.
  Its records stay if they are warmer than the coldest 30 % of the store, up to half of its bytes: each byte
  that is put costs at most one more byte written. (Compared with exact LRU: `benchmarks.store_evict`.)
- A REMOVED note must outlive its record: it is written again, unless its segment is the oldest.
- Room for one segment always stays free, so that the records that stay can be copied before the file is
  removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tiercel.errors import ConfigError
from tiercel.storage.file.direct import ALIGN

SAMPLE = 32
"""Random records that represent a segment. 400 segments take 30 ms for each new segment (Xeon, 2.5 GHz)."""

COLD = 0.3  # the coldest share of the store: its records do not stay when their segment is evicted
GAIN_LEAST = 8  # one eighth: a segment is cleaned, and loses no record, if that frees this part of a segment
SEGMENT_BYTES = 256 * 1024**2
"""Shorter segments end more often, and each end is a pause of some milliseconds. Longer segments take longer
to scan after a crash: 0.1 s for this size."""

SEGMENTS_MOST = 512  # each segment is an open file, and a process may by default have 1024
SEGMENTS_LEAST = 8
"""A small store has shorter segments: an eighth of it is evicted at once, and an eighth stays free."""

SIZE_LEAST = SEGMENTS_LEAST * 16 * ALIGN


@dataclass(frozen=True)
class Limits:
    """The disk space that a store may use."""

    size: int  # bytes of all segments
    free: int  # bytes of the file system that stay free
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
        """How many bytes must be freed before another segment can be begun."""
        return self.segment_bytes + max(bytes_on_disk - self.size, self.free - bytes_free)


def segment_bytes_for(size: int) -> int:
    chosen = min(max(SEGMENT_BYTES, size // SEGMENTS_MOST), size // SEGMENTS_LEAST)
    return chosen - chosen % ALIGN


def free_for(file_system_bytes: int) -> int:
    """What stays free by default."""
    return min(file_system_bytes // 20, 1024**3)


class Standing(NamedTuple):
    """A segment that may be evicted."""

    bytes_on_disk: int
    carried: int  # bytes to write again if all its live records and notes stay
    ranks: Sequence[Any]  # ranks of a sample of its records (`policy.evict.Rank`)
    dead: int  # how many records of the sample are dead

    @property
    def middle(self) -> tuple[Any, ...]:
        """The median rank, as something that sorts. Dead records are colder than any rank."""
        at = (len(self.ranks) + self.dead) // 2 - self.dead
        return (1, sorted(self.ranks)[at]) if 0 <= at < len(self.ranks) else (0,)


class Going(NamedTuple):
    """Which segment is evicted, and which records of it stay."""

    number: int  # its position among the segments given
    cold: Any | None  # Records that are not warmer than this rank do not stay. None: all live records stay.


def going(standings: Sequence[Standing], *, left: int, segment_bytes: int) -> Going:
    """Decide which segment is evicted, when records that stay have `left` bytes of room."""
    gains = [standing.bytes_on_disk - standing.carried for standing in standings]
    deadest = max(range(len(standings)), key=gains.__getitem__)
    if gains[deadest] >= segment_bytes // GAIN_LEAST and standings[deadest].carried <= left:
        return Going(deadest, None)
    ranks = sorted(rank for standing in standings for rank in standing.ranks)
    coldest = min(range(len(standings)), key=lambda number: standings[number].middle)
    return Going(coldest, ranks[int(len(ranks) * COLD)] if ranks else None)


class Candidate(NamedTuple):
    """A live record of a segment that is evicted."""

    rank: Any
    row: int
    bytes: int


def staying(candidates: Sequence[Candidate], *, cold: Any | None, bytes_most: int) -> list[int]:
    """Rows that stay, in their order: the warmest that fit into `bytes_most` and are not cold."""
    rows = []
    for candidate in sorted(candidates, reverse=True):
        if cold is not None and candidate.rank <= cold:
            break
        if candidate.bytes <= bytes_most:
            bytes_most -= candidate.bytes
            rows.append(candidate.row)
    return sorted(rows)
