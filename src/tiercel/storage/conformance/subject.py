"""What the checks are given, and how a check ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tiercel.storage.base import Store
from tiercel.storage.record import RecordKey

SMALL_BYTES = 16 << 20
"""The size of a small store, about."""


@dataclass(frozen=True)
class Subject:
    """How to open the store to check. Most checks leave stores open: `run_checks` closes them."""

    open: Callable[[], Store]
    """An empty store. It may be the same store as before, cleared, if that is still open."""

    open_small: Callable[[], Store] | None = None
    """An empty store of about `SMALL_BYTES`. None: not possible."""

    open_again: Callable[[], Store] | None = None
    """Called after a close: the last store of `open`, with its values. None: the store is not durable."""

    spoil: Callable[[Store, RecordKey], None] | None = None
    """Damage the value of a key without using the store. None: not possible."""


Check = Callable[[Subject], None]
"""Raises AssertionError, which says what is wrong, or Inapplicable."""


class Inapplicable(Exception):
    """The check does not concern this store."""


class Outcome(Enum):
    PASSED = "passed"
    FAILED = "FAILED"
    INAPPLICABLE = "inapplicable"


class Result(NamedTuple):
    check: str
    outcome: Outcome
    why: str = ""

    def __str__(self) -> str:
        return f"{self.outcome.value:12} {self.check.replace('_', ' ')}{': ' if self.why else ''}{self.why}"
