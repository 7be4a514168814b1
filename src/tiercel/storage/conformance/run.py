"""Every check, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

from tiercel.storage.base import Store
from tiercel.storage.conformance import threads, values, whole
from tiercel.storage.conformance.subject import Check, Inapplicable, Outcome, Result, Subject

CHECKS = values.CHECKS + threads.CHECKS + whole.CHECKS


def run_checks(subject: Subject, checks: Sequence[Check] = CHECKS) -> list[Result]:
    """Run each check, and close the stores that it opened."""
    return [_run(check, subject) for check in checks]


def _run(check: Check, subject: Subject) -> Result:
    try:
        with ExitStack() as opened:

            def closed_later(factory: Callable[[], Store]) -> Callable[[], Store]:
                return lambda: opened.enter_context(closing(factory()))

            check(
                Subject(
                    closed_later(subject.open),
                    subject.open_small and closed_later(subject.open_small),
                    subject.open_again and closed_later(subject.open_again),
                    subject.spoil,
                )
            )
    except Inapplicable as why:
        return Result(check.__name__, Outcome.INAPPLICABLE, str(why))
    except Exception as error:  # noqa: BLE001 - whatever a store raises, the other checks go on
        return Result(check.__name__, Outcome.FAILED, f"{type(error).__name__}: {error}")
    return Result(check.__name__, Outcome.PASSED)
