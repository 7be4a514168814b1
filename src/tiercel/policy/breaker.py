"""A fuse for something that may fail: off after a few failures in a row, tried again now and then.

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
"""What is off longer than this is looked at twice a minute."""


class State(Enum):
    WORKING = "working"
    OFF = "off"
    TRYING = "trying"


class Breaker:
    """Decides by the clock it is given. Trying lets one operation through; its end decides."""

    def __init__(self) -> None:
        self.state = State.WORKING
        self._failures = 0
        self._wait_s = WAIT_FIRST_S
        self._again_s = 0.0

    def allows(self, now_s: float) -> bool:
        """Whether an operation may begin now. When it was off, this one is the trial."""
        if self.state is State.OFF and now_s >= self._again_s:
            self.state = State.TRYING
            return True
        return self.state is State.WORKING

    def not_used(self) -> None:
        """The trial that was allowed did not take place: the next one may."""
        if self.state is State.TRYING:
            self.state = State.OFF

    def worked(self) -> None:
        self.state = State.WORKING
        self._failures, self._wait_s = 0, WAIT_FIRST_S

    def failed(self, now_s: float) -> None:
        self._failures += 1
        if self.state is State.TRYING:
            self._wait_s = min(2 * self._wait_s, WAIT_MOST_S)
        if self.state is State.TRYING or self._failures >= FAILURES:
            self.state = State.OFF
            self._again_s = now_s + self._wait_s
