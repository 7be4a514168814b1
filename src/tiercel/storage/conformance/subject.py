"""What the checks are given, and how a check ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tiercel.storage.base import Store
from tiercel.storage.record import RecordKey

SMALL_BYTES = 16 << 20
"""How much a small store holds, about."""


@dataclass(frozen=True)
class Subject:
    """What is checked. Checks leave stores open, except where closing is the question; whoever gave the
    factories closes what they opened (`run_checks` does)."""

    open: Callable[[], Store]
    """An empty store. It may be the one answered before, emptied, unless that was closed."""

    open_small: Callable[[], Store] | None = None
    """An empty store that holds about `SMALL_BYTES`. None: can not be had."""

    open_again: Callable[[], Store] | None = None
    """After a close: the store that `open` answered last, with what it kept. None: nothing outlives it."""

    spoil: Callable[[Store, RecordKey], None] | None = None
    """Damage the value of a key behind the store's back. None: can not be done."""


Check = Callable[[Subject], None]
"""It knows nothing but the contract, and raises AssertionError with what went wrong, or Inapplicable."""


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
