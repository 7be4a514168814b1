"""How the checks are run, and what they found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from tiercel.storage.base import Store
from tiercel.storage.conformance.checks import CHECKS
from tiercel.storage.conformance.samples import Inapplicable, Subject


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


def run_checks(subject: Subject, checks: Sequence[Callable[[Subject], None]] = CHECKS) -> list[Result]:
    """Run each check, and close the stores that it opened."""
    return [_run(check, subject) for check in checks]


def _run(check: Callable[[Subject], None], subject: Subject) -> Result:
    try:
        with ExitStack() as opened:

            def closed_later(factory: Callable[[], Store]) -> Callable[[], Store]:
                return lambda: opened.enter_context(closing(factory()))

            check(
                replace(
                    subject,
                    open=closed_later(subject.open),
                    open_small=subject.open_small and closed_later(subject.open_small),
                    open_again=subject.open_again and closed_later(subject.open_again),
                )
            )
    except Inapplicable as why:
        return Result(check.__name__, Outcome.INAPPLICABLE, str(why))
    except Exception as error:  # noqa: BLE001 - whatever a store raises, the other checks go on
        return Result(check.__name__, Outcome.FAILED, f"{type(error).__name__}: {error}")
    return Result(check.__name__, Outcome.PASSED)
