"""What is asked of a store, as values: which records, into or out of which host pages, and how it ended.

queued ── a thread takes it ──► running ──► ended: answers, or an error
   └── cancelled, nobody waits ───────────► ended: nothing was done
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from tiercel.errors import StoreError
from tiercel.types import HostPageId, PageKey


class Work(Enum):
    ASK = "ask"
    READ = "read"
    WRITE = "write"
    CLEAR = "clear"
    STATS = "stats"
    PROBE = "probe"
    """A page of nothing, written, read and removed again: how fast is it?"""


class Presence(Enum):
    """How it went with one record."""

    HERE = "here"
    """Asked: it is there. Read: every byte is right. Written: the store has it."""
    MISSING = "missing"
    """Not there, or, of something written, not kept."""
    DAMAGED = "damaged"
    """Something is listed that is not what was asked for, or that can not be read. It is removed, and
    nobody is told of it again."""


class RecordPlace(NamedTuple):
    """One page or tail, and the host pages it is read into or written from."""

    tail: bool
    key: PageKey
    host: tuple[HostPageId, ...] = ()


@dataclass(eq=False)
class Operation:
    """Something asked of a store. It ends with answers, one for each piece, or with an error."""

    work: Work
    pieces: Sequence[RecordPlace]
    bytes: int
    """Of the pieces that move."""
    began_s: float
    started_s: float | None = None
    """When a thread took it."""
    ended_s: float = 0.0
    answers: list[Presence] = field(default_factory=list)
    error: StoreError | None = None
    cancelled: bool = False
    late: bool = False
    """It took longer than anybody waits; whoever submitted it counts it as failed already."""
    read_s: float | None = None
    """Of a probe: how long its page took to read."""
    future: Future[None] | None = None

    def cancel(self) -> None:
        """Nobody waits for it any more. If no thread has taken it, it ends at once."""
        self.cancelled = True
        if self.future is not None:
            self.future.cancel()
