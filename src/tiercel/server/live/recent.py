"""The last requests, for the page: what each reused, and why not more."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tiercel.asks.ask import Answer, Explanation
from tiercel.server.http.border import Visit

REQUESTS = 50


class Recent:
    """Fed by every finished request for answers; read by the feed. Both run on the event loop."""

    def __init__(
        self, explain: Callable[[str], Explanation | None], clock: Callable[[], float] = time.time
    ) -> None:
        self._explain = explain
        self._clock = clock
        self._requests: deque[tuple[int, dict[str, Any]]] = deque(maxlen=REQUESTS)
        self._count = 0

    def add(self, visit: Visit, call: str) -> None:
        """A request for answers has ended."""
        self._count += 1
        fields = {
            "at_s": round(self._clock(), 3),
            "call": call,
            "id": visit.request_id,
            "status": visit.status or 499,
            "seconds": round(visit.age_s, 4),
            "first_token_s": visit.first_token_s,
            "tokens": _tokens(visit.answers),
            "answer_tokens": sum(answer.usage.completion_tokens for answer in visit.answers),
            "why": self._why(visit.answers),
        }
        self._requests.append((self._count, fields))

    def json(self) -> dict[str, Any]:
        """Requests by their number, so that two results differ in few entries."""
        return {str(number): fields for number, fields in self._requests}

    def _why(self, answers: Sequence[Answer]) -> str:
        """Why not more was reused, as `/v1/cache/explain` says it, for the first prompt of a call."""
        known = self._explain(answers[0].request_id)
        if known is None:
            return "the request ended before it was let in"
        return f"{known.reuse}" if len(answers) == 1 else f"first of {len(answers)} answers: {known.reuse}"


def _tokens(answers: Sequence[Answer]) -> dict[str, int]:
    """Prompt tokens of all answers of a call: supplied by a tier; found and computed again; or computed for
    the first time."""
    usages = [answer.usage for answer in answers]
    return {
        "device": sum(usage.device_tokens for usage in usages),
        "host": sum(usage.host_tokens for usage in usages),
        "store": sum(usage.store_tokens for usage in usages),
        "replayed": sum(usage.replayed_tokens for usage in usages),
        "computed": sum(each.prompt_tokens - each.cached_tokens - each.replayed_tokens for each in usages),
    }
