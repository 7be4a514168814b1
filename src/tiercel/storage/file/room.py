"""What has to go when a store is full: decisions only, the log carries them out.

A whole segment goes, and what stays of it is appended again, durably, before the file is removed.

- **Dead bytes go first**: if some segment is dead for an eighth or more, the deadest goes, and all that lives
  in it stays. So nothing is lost in a store that could hold it.
- **Otherwise the coldest segment goes**: the one whose middle record, as the eviction policy ranks it, is the
  coldest. Its records stay if they are warmer than the coldest three tenths of the store, at most half of its
  bytes: for each byte put, at most one more is written. (Beside exact LRU: `benchmarks.store_evict`.)
- A note that a record is gone outlives that record: it is written again, unless its segment is the oldest.
- One segment's room is always left, so that what stays has a place to go before anything is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tiercel.errors import ConfigError
from tiercel.storage.file.direct import ALIGN

SAMPLE = 32
"""Records that stand for a segment. For 400 segments that takes 30 ms (Xeon, 2.5 GHz) for each new one."""

COLD = 0.3
"""The share of the store that does not stay when its segment goes."""

GAIN_LEAST = 8
"""A segment is cleaned, and nothing of it is lost, if that gains this part of a segment: one eighth."""

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


class Standing(NamedTuple):
    """A segment that may go."""

    bytes_on_disk: int
    carried: int
    """What has to be written again if all that lives stays: its records, and its notes."""
    ranks: Sequence[Any]
    """Of some of its records, whatever sorts (`policy.evict.Rank`)."""
    dead: int
    """How many more were looked at, and are dead."""

    @property
    def middle(self) -> tuple[Any, ...]:
        """The rank in its middle, as something that sorts. The dead are colder than anything."""
        at = (len(self.ranks) + self.dead) // 2 - self.dead
        return (1, sorted(self.ranks)[at]) if 0 <= at < len(self.ranks) else (0,)


class Going(NamedTuple):
    """The decision."""

    number: int
    """Which of the segments."""
    cold: Any | None
    """What is not warmer than this goes with it. None: all that lives stays."""


def going(standings: Sequence[Standing], *, left: int, segment_bytes: int) -> Going:
    """Which segment goes, and what of it, when what stays finds `left` bytes."""
    gains = [standing.bytes_on_disk - standing.carried for standing in standings]
    deadest = max(range(len(standings)), key=gains.__getitem__)
    if gains[deadest] >= segment_bytes // GAIN_LEAST and standings[deadest].carried <= left:
        return Going(deadest, None)
    ranks = sorted(rank for standing in standings for rank in standing.ranks)
    coldest = min(range(len(standings)), key=lambda number: standings[number].middle)
    return Going(coldest, ranks[int(len(ranks) * COLD)] if ranks else None)


class Candidate(NamedTuple):
    """A live record of a segment that goes."""

    rank: Any
    row: int
    bytes: int


def staying(candidates: Sequence[Candidate], *, cold: Any | None, bytes_most: int) -> list[int]:
    """Rows that stay, in their order: those that are not cold, the hottest while there is room."""
    rows = []
    for candidate in sorted(candidates, reverse=True):
        if cold is not None and candidate.rank <= cold:
            break
        if candidate.bytes <= bytes_most:
            bytes_most -= candidate.bytes
            rows.append(candidate.row)
    return sorted(rows)
