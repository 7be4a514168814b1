"""When a page or tail is copied from the device to the host.

    policy       as soon as                 at eviction, if there is no copy yet
    through      it is inserted             always
    selective    it is found a first time   only if it was ever found
    back         never                      always

A copy made early only ever takes free host memory, or that of a copy which device and store have too. When
the host is full the copy waits for the eviction: a copy of something the device still holds must not displace
the only copy of something else.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.config import SAVE_POLICIES


@dataclass(frozen=True)
class SavePolicy:
    """Hits after which something is saved while the device keeps it (None: never), and when it is evicted."""

    early_hits: int | None
    evict_hits: int


_POLICIES = {
    "through": SavePolicy(early_hits=0, evict_hits=0),
    "selective": SavePolicy(early_hits=1, evict_hits=1),
    "back": SavePolicy(early_hits=None, evict_hits=0),
}
assert tuple(_POLICIES) == SAVE_POLICIES


def make_save_policy(name: str) -> SavePolicy:
    return _POLICIES[name]
