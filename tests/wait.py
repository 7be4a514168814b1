"""Waiting for what another thread or process does. If it does not happen, the test fails and says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PAUSE_S = 0.001
"""Between two calls: the other threads need the processor."""


def until(condition: Callable[[], T], what: str, timeout_s: float = 30) -> T:
    """Call `condition` until it returns something true; return that. After `timeout_s` the test fails.

    `what` says what is waited for, such as "every page is in the store".
    """
    deadline_s = time.monotonic() + timeout_s
    while not (answer := condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {timeout_s} s, and still not: {what}")
        time.sleep(PAUSE_S)
    return answer
