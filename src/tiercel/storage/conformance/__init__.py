"""The contract of `storage.base` as checks that any store can be put through, ours or yours.

from tiercel.storage.conformance import Subject, run_checks

for result in run_checks(Subject(open=lambda: MyStore("somewhere/empty"))):
    print(result)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from enum import Enum
from inspect import signature
from typing import NamedTuple

from tiercel.storage.base import Store
from tiercel.storage.conformance.checks import CHECKS
from tiercel.storage.conformance.samples import Inapplicable, Subject

__all__ = ["Verdict", "Result", "Subject", "run_checks"]


class Verdict(Enum):
    PASSED = "passed"
    FAILED = "FAILED"
    INAPPLICABLE = "inapplicable"


class Result(NamedTuple):
    check: str
    outcome: Verdict
    why: str = ""

    def __str__(self) -> str:
        return f"{self.outcome.value:12} {self.check.replace('_', ' ')}{': ' if self.why else ''}{self.why}"


def run_checks(subject: Subject, checks: Sequence[Callable[..., None]] = CHECKS) -> list[Result]:
    """Run each check, and close the stores that it opened."""
    return [_run(check, subject) for check in checks]


def apply(check: Callable[..., None], subject: Subject) -> None:
    """Run one check: most take an empty store, some the subject."""
    check(subject.open() if "store" in signature(check).parameters else subject)


def _run(check: Callable[..., None], subject: Subject) -> Result:
    try:
        with ExitStack() as opened:

            def closed_later(factory: Callable[[], Store]) -> Callable[[], Store]:
                return lambda: opened.enter_context(closing(factory()))

            small = subject.open_small and closed_later(subject.open_small)
            again = subject.open_again and closed_later(subject.open_again)
            apply(check, Subject(closed_later(subject.open), small, again, subject.spoil))
    except Inapplicable as why:
        return Result(check.__name__, Verdict.INAPPLICABLE, str(why))
    except Exception as error:  # noqa: BLE001 - whatever a store raises, the other checks go on
        return Result(check.__name__, Verdict.FAILED, f"{type(error).__name__}: {error}")
    return Result(check.__name__, Verdict.PASSED)
