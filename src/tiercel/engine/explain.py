"""What requests reused, remembered for a while."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from tiercel.policy.resume import Reuse

EXPLAINED_MOST = 4096
"""How many requests are remembered; the oldest is forgotten first."""


@dataclass(frozen=True)
class Explanation:
    """What a request reused, and which machines share the stored pages (`spec.identity`)."""

    reuse: Reuse
    share: str


class Explained:
    """What was reused, by request id."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, Reuse] = OrderedDict()

    def add(self, request_id: str, reuse: Reuse) -> None:
        self._of[request_id] = reuse
        while len(self._of) > EXPLAINED_MOST:
            self._of.popitem(last=False)

    def get(self, request_id: str) -> Reuse | None:
        return self._of.get(request_id)
