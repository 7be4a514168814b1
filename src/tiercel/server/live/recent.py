"""What the last minutes brought, for the page: tokens and times to first token by source, the last requests.

A request's source is the slowest tier that its prompt came from, or `computed`. The memory is bounded: there
is a limit for intervals, for times in each of them, and for requests.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiercel.asks.ask import Answer, Explanation
from tiercel.asks.times import SOURCES
from tiercel.server.http.border import Visit

PARTS = (*SOURCES[:3], "replayed", "computed")
"""Parts of a prompt: supplied by a tier; found and computed again; or computed for the first time."""

INTERVAL_S = 10
INTERVALS = 30
"""Five minutes: long enough to see a change, short enough to see it soon."""

TIMES = 256
"""Times to first token of one source in one interval. Their median needs no more."""

REQUESTS = 50


@dataclass
class Interval:
    """Some seconds of requests."""

    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    first_token_s: dict[str, deque[float]] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        return {
            "tokens": dict(self.tokens),
            "first_token_s": {
                source: statistics.median(times) for source, times in self.first_token_s.items()
            },
        }


class Recent:
    """Fed by every finished request; read by the feed. Both run on the event loop."""

    def __init__(
        self, explain: Callable[[str], Explanation | None], clock: Callable[[], float] = time.time
    ) -> None:
        self._explain = explain
        self._clock = clock
        self._intervals: dict[int, Interval] = {}
        self._requests: deque[tuple[int, dict[str, Any]]] = deque(maxlen=REQUESTS)
        self._count = 0

    def add(self, visit: Visit, call: str) -> None:
        """A request for answers has ended."""
        tokens = _tokens(visit.answers)
        source = next((source for source in reversed(SOURCES[:3]) if tokens[source]), "computed")
        interval = self._intervals.setdefault(self._interval_now(), Interval())
        for name, count in tokens.items():
            interval.tokens[name] += count
        if visit.first_token_s is not None:
            times = interval.first_token_s.setdefault(source, deque(maxlen=TIMES))
            times.append(visit.first_token_s)
        self._count += 1
        fields = {
            "at_s": round(self._clock(), 3),
            "call": call,
            "id": visit.request_id,
            "status": visit.status or 499,
            "seconds": round(visit.age_s, 4),
            "first_token_s": visit.first_token_s,
            "tokens": tokens,
            "answer_tokens": sum(answer.usage.completion_tokens for answer in visit.answers),
            "why": self._why(visit.answers),
        }
        self._requests.append((self._count, fields))
        self._forget()

    def json(self) -> dict[str, Any]:
        """Intervals by their start, requests by their number, so that two results differ in few entries."""
        self._forget()
        return {
            "intervals": {str(at): each.json() for at, each in self._intervals.items()},
            "requests": {str(number): fields for number, fields in self._requests},
        }

    def _interval_now(self) -> int:
        return int(self._clock() // INTERVAL_S) * INTERVAL_S

    def _forget(self) -> None:
        oldest = self._interval_now() - INTERVAL_S * (INTERVALS - 1)
        for at in [at for at in self._intervals if at < oldest]:
            del self._intervals[at]

    def _why(self, answers: Sequence[Answer]) -> str:
        """Why not more was reused, as `/v1/cache/explain` says it, for the first prompt of a call."""
        known = self._explain(answers[0].request_id)
        if known is None:
            return "the request ended before it was let in"
        return f"{known.reuse}" if len(answers) == 1 else f"first of {len(answers)} answers: {known.reuse}"


def _tokens(answers: Sequence[Answer]) -> dict[str, int]:
    """Prompt tokens by `PARTS`, of all answers of a call."""
    usages = [answer.usage for answer in answers]
    return {
        "device": sum(usage.device_tokens for usage in usages),
        "host": sum(usage.host_tokens for usage in usages),
        "store": sum(usage.store_tokens for usage in usages),
        "replayed": sum(usage.replayed_tokens for usage in usages),
        "computed": sum(each.prompt_tokens - each.cached_tokens - each.replayed_tokens for each in usages),
    }
