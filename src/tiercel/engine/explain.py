"""What requests reused, remembered for those who ask later."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from tiercel.policy.resume import Reuse

EXPLAINED_MOST = 4096
"""So many requests are remembered; the oldest are forgotten first."""


class Explained:
    """By request id: what was reused, from which tier, and why not more."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def add(self, request_id: str, reuse: Reuse) -> None:
        self._of[request_id] = {
            "prompt_tokens": reuse.prompt_tokens,
            "reused_tokens": {
                "device": reuse.device_tokens,
                "host": reuse.host_tokens,
                "store": reuse.store_tokens,
            },
            "computed_tokens": reuse.prompt_tokens - reuse.tokens + reuse.replay_tokens,
            "replayed_tokens": reuse.replay_tokens,
            "found_tokens": reuse.found_tokens,
            "why_not_more": reuse.why.value,
            "summary": str(reuse),
        }
        while len(self._of) > EXPLAINED_MOST:
            self._of.popitem(last=False)

    def get(self, request_id: str) -> dict[str, Any] | None:
        return self._of.get(request_id)
