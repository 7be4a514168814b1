"""When a page or tail is copied from the device to the host.

    policy       as soon as                 at eviction, if there is no copy yet
    through      it is inserted             always
    selective    it is found a first time   only if it was ever found
    back         never                      always

An early copy takes free host memory only, or the memory of something that device and store hold too. If the
host is full, the copy is made at eviction: a second copy must not displace the only copy of something else.
A prompt that is computed for another server is copied at once, whatever the policy, and displaces what is
older: the other server reads it on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.config import SAVE_POLICIES


@dataclass(frozen=True)
class SavePolicy:
    """Hits needed for a copy while the device keeps the page (None: never), and for a copy at eviction."""

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
