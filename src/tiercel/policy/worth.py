"""What a cached page or tail is worth: expected reuse × pages that need not be computed ÷ pages of memory.

    expected reuse   (1 + hits) ÷ age × the chance of its class
    pages saved      for a tail: the distance to the tail before it, where texts resume if this one is evicted
    pages freed      the memory of the tail, and of the pages that only this tail makes reachable

    ■ ■ ■ ■ ■ ■ ■ ■ ■ ■                classes of tails:
        ▲       ▲   │     ▲            1 passed: one text goes on after it. 2 fork: several texts do.
        1       2   ■ ■   3            3 end: no text goes on after it
                      ▲
                      3

A text is mostly continued at its end, and new texts leave others at forks: their chance is 1. A tail that one
text has passed is less likely: how much depends on the traffic and on why the tail was kept there
(`Boundary`). So this chance is learned: hits of such tails per e-fold of age, divided by the same for tails
at ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from tiercel.policy.placement import Boundary

HIT = 0.7
"""What a hit adds to the worth of an item that was never found."""

HITS_MOST = 3
"""More hits do not count: an item that was popular long ago must leave some day."""

FIRST_CHANCE, FIRST_HITS = 0.1, 5.0
"""The chance of a passed tail before anything is known, and how many expected hits this counts for."""

FORGET_AT = 20_000.0
"""When this exposure has been counted, all counts are halved: traffic changes."""

REFRESH = 16
"""After how many observations chances are computed again."""


@dataclass(eq=False, slots=True)
class Chance:
    """How likely tails of one class are found, compared with tails at ends of texts."""

    factor: float = 1.0
    hits: float = 0.0
    exposure: float = 0.0
    """Sum over tails of the growth of log(age): a hit rate that falls with 1 ÷ age is constant per unit."""


class Chances:
    """The chance of each class, learned from all tails of one tree."""

    def __init__(self) -> None:
        self.end, self.fork = Chance(), Chance()
        self.passed = {boundary: Chance(FIRST_CHANCE) for boundary in Boundary}
        self._observed = 0
        self.computed = 0
        """How often the chances were computed."""

    def of(self, boundary: Boundary, texts: int) -> Chance:
        """The chance for a tail with `texts` texts after it."""
        return self.passed[boundary] if texts == 1 else self.fork if texts else self.end

    def observe(self, chance: Chance, *, used: int, since: int, now: int, hit: bool) -> None:
        """A tail that was last used at `used` was of this class from `since` to `now`, when it was found
        (`hit`), was used otherwise, changed its class, or left."""
        chance.exposure += log((2 + now - used) / (2 + max(since, used) - used))
        chance.hits += hit
        self._observed += 1
        if self._observed % REFRESH == 0:
            self._refresh()

    def _refresh(self) -> None:
        self.computed += 1
        every = (self.end, self.fork, *self.passed.values())
        if sum(chance.exposure for chance in every) > FORGET_AT:
            for chance in every:
                chance.hits, chance.exposure = chance.hits / 2, chance.exposure / 2
        rate = (self.end.hits + 1.0) / (self.end.exposure + 20.0)
        for chance in self.passed.values():
            expected = chance.exposure * rate
            chance.factor = (chance.hits + FIRST_HITS * FIRST_CHANCE) / (expected + FIRST_HITS)


def weight(*, hits: int, saved: float, freed: float) -> float:
    """Worth of something of age 1 whose class has the chance 1."""
    return (1.0 + HIT * min(hits, HITS_MOST)) * saved / freed
