"""A circuit breaker: an operation is switched off after a few failures in a row, and tried again later.

working ── three failures in a row ──► off ── after a while ──► trying ── success ──► working
   ▲                                    ▲                         │
   └── success                          └──── failure, waits twice as long ────┘
"""

from __future__ import annotations

from enum import Enum

FAILURES = 3
"""One failure may be chance; three in a row are not."""

WAIT_FIRST_S = 0.5
WAIT_MOST_S = 30.0
"""The wait doubles up to this: even a store that is down for hours is tried twice a minute."""


class BreakerState(Enum):
    WORKING = "working"
    OFF = "off"
    TRYING = "trying"


class Breaker:
    """The time is an argument. While the breaker is trying, one operation runs, and its result decides."""

    def __init__(self, *, works: bool = True) -> None:
        """`works`: False: it failed already. The first operation is a trial."""
        self.state = BreakerState.WORKING if works else BreakerState.OFF
        self._failures = 0
        self._wait_s = WAIT_FIRST_S
        self._again_s = 0.0

    def allows(self, now_s: float) -> bool:
        """Whether an operation may begin now. If the breaker was off, this operation is the trial."""
        if self.state is BreakerState.OFF and now_s >= self._again_s:
            self.state = BreakerState.TRYING
            return True
        return self.state is BreakerState.WORKING

    def not_used(self) -> None:
        """The allowed trial did not run, so the next operation may be the trial."""
        if self.state is BreakerState.TRYING:
            self.state = BreakerState.OFF

    def worked(self) -> None:
        self.state = BreakerState.WORKING
        self._failures, self._wait_s = 0, WAIT_FIRST_S

    def failed(self, now_s: float) -> None:
        self._failures += 1
        if self.state is BreakerState.TRYING:
            self._wait_s = min(2 * self._wait_s, WAIT_MOST_S)
        if self.state is BreakerState.TRYING or self._failures >= FAILURES:
            self.state = BreakerState.OFF
            self._again_s = now_s + self._wait_s
