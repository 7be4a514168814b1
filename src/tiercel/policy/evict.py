"""What is evicted first from a full tier.

The default is `Value`: what saves least is evicted first (`policy.worth`, `tree.valued`). The other policies
look at the use alone: they turn the use of a page or tail into a rank, and the lowest rank is evicted first.
Two rules make this cheap:

- **A use never lowers a rank.** So an old heap entry is only ever too low, and is corrected at the top: one
  heap entry per page or tail, and no scan of the leaves.
- **A parent inherits its children's use when they are evicted.** So a match touches only its deepest page,
  and still every leaf has the rank it would have if the whole path had been touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import log2
from typing import Protocol

from tiercel.config import EVICT_POLICIES, make_policy

Rank = int | tuple[int, ...]
"""Anything that sorts. One policy always returns the same shape."""


class Used(Protocol):
    """The use of a page or tail: what a policy may look at."""

    used: int
    """Counter value at the last use: later is larger, no two uses are equal."""
    hits: int
    """How often a request found it. The hits of evicted children are included."""
    priority: int
    """Highest priority of the requests that used it."""


class EvictPolicy(ABC):
    """Contract: `rank` is a pure function, and never falls when `used`, `hits` or `priority` rise."""

    @abstractmethod
    def rank(self, use: Used) -> Rank: ...


class Lru(EvictPolicy):
    """Least recently used first."""

    def rank(self, use: Used) -> Rank:
        return use.used


class Value(Lru):
    """Least worth first (`policy.worth`). In a tree without tails, least recently used first: there every
    page saves one page."""


AGE = 20_000
"""A number of uses of a tree, about those of a few hundred requests. An item that was found often and then
not for this many uses counts half, or is no longer protected."""


class Lfu(EvictPolicy):
    """Least often found first, where hits count half after every `AGE` uses of others."""

    def rank(self, use: Used) -> Rank:
        return use.used + round(AGE * log2(1 + use.hits))


class Slru(EvictPolicy):
    """Least recently used first. What was found at least twice is protected for `AGE` uses of others."""

    def rank(self, use: Used) -> Rank:
        return use.used + AGE * (use.hits >= 2)


class ByPriority(EvictPolicy):
    """Lowest request priority first, then least recently used."""

    def rank(self, use: Used) -> Rank:
        return (use.priority, use.used)


_POLICIES: dict[str, type[EvictPolicy]] = {
    "value": Value,
    "lru": Lru,
    "lfu": Lfu,
    "slru": Slru,
    "priority": ByPriority,
}
assert tuple(_POLICIES) == EVICT_POLICIES


def make_evict_policy(name: str) -> EvictPolicy:
    """A policy by name, or a user's own class as `module:Class`."""
    return make_policy("evict", name, _POLICIES, EvictPolicy)
