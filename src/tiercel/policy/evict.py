"""Who leaves a full tier first.

A policy turns the use of a page or tail into a rank; the lowest goes first. Two promises make this cheap:

- **A rank never falls when the thing is used.** So an entry of the heap may be stale only downwards, and is
  put right when it reaches the top: one entry per thing, no scan of the leaves.
- **A parent inherits its children's use when they go.** So a match touches one page, its deepest, and yet
  every page that can be evicted (a leaf) has the rank it would have if the whole path had been touched.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Protocol

from tiercel.config import EVICT_POLICIES
from tiercel.errors import ConfigError

Rank = int | tuple[int, ...]
"""Whatever sorts; one policy always answers with the same shape."""


class Used(Protocol):
    """What a policy may look at."""

    used: int
    """Clock of the last use; later is larger, no two uses are equal."""

    hits: int
    """How often a request found it, its departed children's hits included."""

    priority: int
    """Highest priority of the requests that used it."""


class EvictPolicy(ABC):
    """Contract: `rank` is a pure function of the use and never falls when `used`, `hits` or `priority`
    rise."""

    @abstractmethod
    def rank(self, use: Used) -> Rank: ...


class Lru(EvictPolicy):
    """Least recently used first."""

    def rank(self, use: Used) -> Rank:
        return use.used


class Lfu(EvictPolicy):
    """Least often found first, then least recently used."""

    def rank(self, use: Used) -> Rank:
        return (use.hits, use.used)


class Slru(EvictPolicy):
    """Two segments: what was found at least twice is protected; least recently used inside each."""

    def rank(self, use: Used) -> Rank:
        return (int(use.hits >= 2), use.used)


class Priority(EvictPolicy):
    """Lowest request priority first, then least recently used."""

    def rank(self, use: Used) -> Rank:
        return (use.priority, use.used)


_POLICIES: dict[str, type[EvictPolicy]] = {"lru": Lru, "lfu": Lfu, "slru": Slru, "priority": Priority}
assert tuple(_POLICIES) == EVICT_POLICIES


def make_evict_policy(name: str) -> EvictPolicy:
    """A policy by name, or `module:Class` of a user's own."""
    if name in _POLICIES:
        return _POLICIES[name]()
    module_name, _, class_name = name.partition(":")
    try:
        policy = getattr(importlib.import_module(module_name), class_name)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError("evict", name, f"can not be loaded: {error}") from error
    if not isinstance(policy, EvictPolicy):
        raise ConfigError("evict", name, "is not a class derived from tiercel.policy.evict.EvictPolicy")
    return policy
