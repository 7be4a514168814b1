"""When a page or tail is copied from the device to the host.

    through      as soon as it is inserted
    selective    as soon as it is found a first time, at the latest at eviction
    back         at eviction

Whatever leaves the device without a copy is copied then, under every policy: most of what is found on the
host had no hit before.

An early copy takes free host memory only, or the memory of something that device and store hold too. If the
host is full, the copy is made at eviction: a second copy must not displace the only copy of something else. A
prompt that is computed for another server is copied at once, under every policy, and displaces older items:
the other server reads it on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.config import SAVE_POLICIES


@dataclass(frozen=True)
class SavePolicy:
    """Hits needed for a copy while the device keeps the page; None: never."""

    early_hits: int | None


_POLICIES = {
    "through": SavePolicy(early_hits=0),
    "selective": SavePolicy(early_hits=1),
    "back": SavePolicy(early_hits=None),
}
assert tuple(_POLICIES) == SAVE_POLICIES


def make_save_policy(name: str) -> SavePolicy:
    return _POLICIES[name]
