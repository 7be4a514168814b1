"""What readers ask of a cache, answered by the thread that drives the cache.

find     now: which records are on the host; what is there may be held
watch    until all is decided: each `step` of the cache may have brought some, or ended the request that
         computed them

    COMING ── saved to the host ──► HERE
       │
       └── its request ended, no room on the host ──► ABSENT        also when the reader waits no longer
    ABSENT ── a request begins to compute it ──► COMING             not decided before the wait is over
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tiercel.cache.leases import Lease, Leases
from tiercel.storage.peer.wire import Readiness
from tiercel.storage.record import RecordKey, page_key_of
from tiercel.types import PageKey


class Finding(NamedTuple):
    """What is decided: keys by their numbers in the question. The lease holds those HERE, in order."""

    states: dict[int, Readiness]
    lease: Lease | None

    @property
    def here(self) -> list[int]:
        return [number for number, state in self.states.items() if state is Readiness.HERE]


@dataclass(eq=False)
class Watch:
    """A question that waits. `Questions` appends to `news` and then wakes the thread that waits for
    `wake`."""

    keys: Sequence[RecordKey]
    hold: bool
    undecided: dict[int, bool] = field(default_factory=dict)
    """Number of each key, and whether it was seen COMING."""
    news: deque[Finding] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.undecided = dict.fromkeys(range(len(self.keys)), False)
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def close(self) -> None:
        os.close(self.wake)


class Questions:
    """The thread that drives the cache calls every method."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._watches: dict[Watch, None] = {}
        self.abandoned: Callable[[set[PageKey]], None] = lambda _: None
        """Told of pages whose reader is gone, if no other reader waits for them."""

    @property
    def watched(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._watches)

    def find(self, keys: Sequence[RecordKey], *, hold: bool) -> Finding:
        return self._finding(keys, dict(enumerate(self._leases.look(keys))), hold)

    def watch(self, watch: Watch) -> None:
        self._watches[watch] = None
        self._look(watch)

    def step(self) -> None:
        """The cache has made a step: tell those who wait what is decided now."""
        for watch in self._watches:
            self._look(watch)

    def unwatch(self, watch: Watch) -> Finding:
        """The reader waits no longer. Returns what is there now; all else is ABSENT for it."""
        self._watches.pop(watch, None)
        self._look(watch)
        states = dict.fromkeys(watch.undecided, Readiness.ABSENT)
        watch.undecided = {}
        return Finding(states, None)

    def leave(self, watch: Watch) -> None:
        """The reader is gone."""
        self._watches.pop(watch, None)
        others = {each.keys[number] for each in self._watches for number in each.undecided}
        waited = {watch.keys[number] for number in watch.undecided} - others
        watch.undecided = {}
        if waited:
            self.abandoned({PageKey(page_key_of(key)) for key in waited})

    def end(self, lease: Lease) -> None:
        self._leases.end(lease)

    def _look(self, watch: Watch) -> None:
        decided: dict[int, Readiness] = {}
        states = self._leases.look([watch.keys[number] for number in watch.undecided])
        for (number, seen), state in zip(list(watch.undecided.items()), states, strict=True):
            if state is Readiness.HERE or (seen and state is Readiness.ABSENT):
                decided[number] = state
            elif state is Readiness.COMING:
                watch.undecided[number] = True
        if decided:
            for number in decided:
                del watch.undecided[number]
            watch.news.append(self._finding(watch.keys, decided, watch.hold))
            os.eventfd_write(watch.wake, 1)

    def _finding(self, keys: Sequence[RecordKey], states: dict[int, Readiness], hold: bool) -> Finding:
        found = Finding(states, None)
        held = [keys[number] for number in found.here] if hold else []
        return found._replace(lease=self._leases.take(held)) if held else found
