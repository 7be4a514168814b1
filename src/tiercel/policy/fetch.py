"""Load from the store or compute: what to fetch of a text, and how long to wait for it.

pages      1    2    3    4    5    6    7    8      found 2 in nearer tiers, stored 5 more in the store
           ■    ■    □    □    □    □    □    ·
tails                     ▲         ▲                one in the store at 4, one at 6
fetch                ├──────────────┤                3 … 6 with the tail at 6, the longest legal boundary

A boundary is legal when every page up to it and every tail a resume there reads is in some tier: the
intersection, never the least of the parts. Of the legal boundaries the one is taken that saves most time:
what computing up to it would cost, less what reading it costs beyond the time the request waits anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum


class Rate:
    """So much of something per second, as lately seen. Amounts and times are added up, and older ones fade:
    so a few small ones that ended together do not look like a fast one."""

    FADES = 0.6
    """What an observation leaves of those before: a store that slows down is noticed within a few reads."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        """An amount that took no time more came together with the one before."""
        if amount > 0 and seconds >= 0:
            fades = self.FADES if seconds else 1.0
            self._amount = fades * self._amount + amount
            self._seconds = fades * self._seconds + seconds

    @property
    def per_s(self) -> float | None:
        """None: nobody knows."""
        return self._amount / self._seconds if self._seconds else None

    def seconds(self, amount: float) -> float | None:
        """How long so much takes."""
        return None if self.per_s is None else amount / self.per_s


@dataclass(frozen=True)
class Held:
    """What is known of a text when the store has answered. Counts are in pages from its start."""

    boundary: int
    """Resumable from the nearer tiers."""
    found: int
    """Pages in the nearer tiers."""
    stored: int
    """Pages after those, one after the other, that the store holds too."""
    tails: frozenset[int]
    """Boundaries with a tail in a nearer tier."""
    tails_stored: frozenset[int]
    """Boundaries with a tail in the store."""


@dataclass(frozen=True)
class Wanted:
    """Pages found + 1 … upto, and tails, from the store: `spared` tokens need not be computed then."""

    upto: int
    tails: tuple[int, ...]
    spared: int


class Refusal(Enum):
    """Why nothing is fetched."""

    NOTHING = "the store has nothing that helps"
    SLOW = "computing is sooner"
    NO_ROOM = "there is no host memory for it now"


@dataclass(frozen=True)
class Costs:
    """What a page takes, and how fast things are."""

    page_tokens: int
    page_bytes: int
    tail_bytes: int
    pages_per_window: int
    replay_tokens: int | None
    """Tokens to compute again where there is no tail; None: a tail is needed."""
    read: Rate = field(default_factory=Rate)
    """Bytes from the store."""
    compute: Rate = field(default_factory=Rate)
    """Tokens of prompts."""

    def bytes_of(self, held: Held, wanted: Wanted) -> int:
        return (wanted.upto - held.found) * self.page_bytes + len(wanted.tails) * self.tail_bytes


def legal(boundary: int, pages_per_window: int, has_tail: Callable[[int], bool]) -> bool:
    """Whether a text can be resumed here, its pages being there."""
    first = max(1, boundary - pages_per_window + 1)
    return all(has_tail(each) for each in range(first, boundary + 1)) if pages_per_window else True


def choose_fetch(
    held: Held, costs: Costs, *, bytes_ahead: int = 0, wait_s: float = 0.0, bytes_most: int | None = None
) -> Wanted | Refusal:
    """What to read, or why nothing.

    `bytes_ahead` are read first; for `wait_s` the request waits whatever happens; more than `bytes_most` have
    no room.
    """
    best, best_gain, why = None, 0.0, Refusal.NOTHING
    boundaries = _boundaries(held, costs)
    for wanted in _candidates(held, costs, boundaries):
        size = costs.bytes_of(held, wanted)
        gain = _gain(costs, wanted.spared, bytes_ahead + size, wait_s)
        if gain <= 0:
            why = Refusal.SLOW if why is Refusal.NOTHING else why
        elif bytes_most is not None and size > bytes_most:
            why = Refusal.NO_ROOM
        elif gain > best_gain:
            best, best_gain = wanted, gain
    if best is None:
        return why
    stations = replace(best, tails=_stations(best, boundaries, held, costs.pages_per_window))
    fits = bytes_most is None or costs.bytes_of(held, stations) <= bytes_most
    return stations if fits else best


def _gain(costs: Costs, tokens: int, bytes_read: int, wait_s: float) -> float:
    """Seconds saved; where a rate is not known, more tokens are better: somebody has to find out."""
    compute_s, read_s = costs.compute.seconds(tokens), costs.read.seconds(bytes_read)
    if compute_s is None or read_s is None:
        return float(tokens)
    return compute_s - max(0.0, read_s - wait_s)


def _boundaries(held: Held, costs: Costs) -> list[int]:
    """Where the text could be resumed if the store's part were here."""
    both, last = held.tails | held.tails_stored, held.found + held.stored
    every = range(held.boundary + 1, last + 1)
    return [b for b in every if legal(b, costs.pages_per_window, both.__contains__)]


def _candidates(held: Held, costs: Costs, boundaries: list[int]) -> Iterator[Wanted]:
    """Everything that could be read, the longest first."""
    for boundary in reversed(boundaries):
        tails = _tails(boundary, costs.pages_per_window, held)
        spared = (boundary - held.boundary) * costs.page_tokens
        yield Wanted(max(boundary, held.found), tuple(sorted(tails)), spared)
    last = held.found + held.stored
    if costs.replay_tokens is not None and held.stored:
        spared = (last - held.boundary) * costs.page_tokens - costs.replay_tokens
        if spared > 0:
            yield Wanted(last, (), spared)


def _tails(boundary: int, window: int, held: Held) -> set[int]:
    """What a resume reads there and only the store has."""
    first = max(1, boundary - window + 1)
    return set(range(first, boundary + 1)) & held.tails_stored - held.tails if window else set()


def _stations(wanted: Wanted, boundaries: list[int], held: Held, window: int) -> tuple[int, ...]:
    """Its tails, and those at up to three places on the way there, so that a fetch that ends early is worth
    something too."""
    if not wanted.tails:
        return ()
    apart, last, reads = max(1, (wanted.upto - held.boundary) // 4), wanted.tails[-1], set(wanted.tails)
    count = 1
    for each in reversed(boundaries):
        if each <= last - apart and count < 4:
            reads |= _tails(each, window, held)
            last, count = each, count + 1
    return tuple(sorted(reads))


PATIENCE = 4
"""A fetch that has not moved for this fraction of what it can save is given up."""


def worth_waiting(costs: Costs, tokens: int, bytes_left: int, still_s: float) -> bool:
    """Whether the rest of a fetch is still sooner than computing. `still_s`: since it last moved."""
    compute_s = costs.compute.seconds(tokens)
    if compute_s is None:
        return True
    read_s = costs.read.seconds(bytes_left) or 0.0
    return max(read_s, PATIENCE * still_s) < compute_s
