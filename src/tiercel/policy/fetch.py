"""Load from the store or compute: what to fetch of a text, and how long a request waits for it.

pages      1    2    3    4    5    6    7    8      found 2 in nearer tiers, stored 5 more in the store
           ■    ■    □    □    □    □    □    ·
tails                     ▲         ▲                one in the store at 4, one at 6
fetch                ├──────────────┤                3 … 6 with the tail at 6, the longest legal boundary

A boundary is legal if every page before it, and every tail that a resume there reads, is in some tier.
`choose_fetch` takes the legal boundary that saves most time: the time to compute up to it, minus the read
time that goes beyond what the request waits anyway. A `FetchPolicy` decides how long a request waits.
`next_of` is the whole decision: what to do now with one fetch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from tiercel.config import FETCH_POLICIES, make_policy


class Rate:
    """Amount per second, from recent observations. Amounts and seconds are summed with decaying weights, so a
    few small reads that end together do not look like one fast read."""

    FADES = 0.6
    """Decay per observation: a store that slows down is noticed within a few reads."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        """`seconds` = 0: this amount arrived together with the previous one."""
        if amount > 0 and seconds >= 0:
            fades = self.FADES if seconds else 1.0
            self._amount = fades * self._amount + amount
            self._seconds = fades * self._seconds + seconds

    def forget(self) -> None:
        """Forget all observations."""
        self._amount = self._seconds = 0.0

    @property
    def per_s(self) -> float | None:
        """Amount per second; None: nothing was observed yet."""
        return self._amount / self._seconds if self._seconds else None

    def seconds(self, amount: float) -> float | None:
        """How long this amount takes; None: not known."""
        return None if self.per_s is None else amount / self.per_s


@dataclass(frozen=True)
class Held:
    """Where a text's pages and the boundaries with tails are, once the store has told what it has. Counts are
    in pages. Nearer tiers are device and host."""

    boundary: int
    """The last boundary that the nearer tiers can resume from."""
    found: int
    """Pages in the nearer tiers, from the start of the text."""
    stored: int
    """Pages in the store that follow those without a gap."""
    tails: frozenset[int]
    tails_stored: frozenset[int]


class Refusal(Enum):
    """Why nothing is fetched, or not more."""

    NOTHING = "the store has nothing"
    NO_TAIL = "what the store has can not be resumed from"
    SLOW = "computing is sooner"
    NO_ROOM = "there is no host memory for it now"
    OFF = "the store does not work"
    LATE = "the request has waited long enough"


@dataclass(frozen=True)
class Wanted:
    """What to fetch: pages `found` + 1 … `upto`, and `tails`. It saves computing `spared` tokens."""

    upto: int
    tails: tuple[int, ...]
    spared: int
    rest: Refusal | None = None
    """Why it is not all that the store has; None: it is all."""


@dataclass(frozen=True)
class Costs:
    """Sizes of pages and tails, and the measured speed of reading (bytes) and computing (prompt tokens)."""

    page_tokens: int
    page_bytes: int
    tail_bytes: int
    pages_per_window: int
    replay_tokens: int | None
    """Tokens that a resume without a tail computes again; None: a resume needs a tail."""
    read: Rate = field(default_factory=Rate)
    compute: Rate = field(default_factory=Rate)

    def bytes_of(self, held: Held, wanted: Wanted) -> int:
        return (wanted.upto - held.found) * self.page_bytes + len(wanted.tails) * self.tail_bytes

    def gain_s(self, tokens: int, bytes_read: int, wait_s: float) -> float:
        """Seconds saved by reading. While a rate is not known, more tokens count as better: only a fetch can
        measure it."""
        compute_s, read_s = self.compute.seconds(tokens), self.read.seconds(bytes_read)
        if compute_s is None or read_s is None:
            return float(tokens)
        return compute_s - max(0.0, read_s - wait_s)


# What to fetch


def window(boundary: int, pages_per_window: int) -> range:
    """The boundaries whose tails a resume at `boundary` reads."""
    return range(max(1, boundary - pages_per_window + 1), boundary + 1) if pages_per_window else range(0)


def choose_fetch(
    held: Held, costs: Costs, *, bytes_ahead: int = 0, wait_s: float = 0.0, bytes_most: int | None = None
) -> Wanted | Refusal:
    """What to read, or why nothing is read.

    `bytes_ahead` are queued before this fetch; the request waits `wait_s` in any case; at most `bytes_most`
    fit in host memory.
    """
    best, best_gain, refused = None, 0.0, list[tuple[int, Refusal]]()
    known, last = held.tails | held.tails_stored, held.found + held.stored
    every = range(held.boundary + 1, last + 1)
    boundaries = [each for each in every if known.issuperset(window(each, costs.pages_per_window))]
    for wanted in _candidates(held, costs, boundaries):
        size = costs.bytes_of(held, wanted)
        gain = costs.gain_s(wanted.spared, bytes_ahead + size, wait_s)
        if gain > 0 and bytes_most is not None and size > bytes_most:
            refused.append((wanted.upto, Refusal.NO_ROOM))
        elif gain <= best_gain:
            refused.append((wanted.upto, Refusal.SLOW))
        else:
            if best is not None:
                refused.append((best.upto, Refusal.SLOW))
            best, best_gain = wanted, gain
    reached = 0 if best is None else best.upto
    rest = {why for upto, why in refused if upto > reached}
    why = next((each for each in (Refusal.NO_ROOM, Refusal.SLOW) if each in rest), Refusal.NO_TAIL)
    if best is None:
        return why if held.stored or rest else Refusal.NOTHING
    best = replace(best, rest=None if reached >= last else why)
    more = replace(best, tails=_tails_on_the_way(best, boundaries, held, costs.pages_per_window))
    fits = bytes_most is None or costs.bytes_of(held, more) <= bytes_most
    return more if fits else best


def _candidates(held: Held, costs: Costs, boundaries: list[int]) -> Iterator[Wanted]:
    """Every possible fetch, the longest first; at last the one that is resumed by replay."""
    for boundary in reversed(boundaries):
        tails = _tails(boundary, costs.pages_per_window, held)
        spared = (boundary - held.boundary) * costs.page_tokens
        yield Wanted(max(boundary, held.found), tuple(sorted(tails)), spared)
    if costs.replay_tokens is not None and held.stored:
        last = held.found + held.stored
        spared = (last - held.boundary) * costs.page_tokens - costs.replay_tokens
        if spared > 0:
            yield Wanted(last, (), spared)


def _tails(boundary: int, pages_per_window: int, held: Held) -> set[int]:
    """Tails that a resume at this boundary reads and that only the store has."""
    return set(window(boundary, pages_per_window)) & held.tails_stored - held.tails


def _tails_on_the_way(
    wanted: Wanted, boundaries: list[int], held: Held, pages_per_window: int
) -> tuple[int, ...]:
    """The wanted tails, and those at up to three earlier boundaries: so a fetch that is cut short still
    helps."""
    if not wanted.tails:
        return ()
    apart, last, reads = max(1, (wanted.upto - held.boundary) // 4), wanted.tails[-1], set(wanted.tails)
    count = 1
    for each in reversed(boundaries):
        if each <= last - apart and count < 4:
            reads |= _tails(each, pages_per_window, held)
            last, count = each, count + 1
    return tuple(sorted(reads))


# How long to wait


PATIENCE = 4
"""A fetch is given up if it makes no progress for 1/PATIENCE of the time it can save."""


@dataclass(frozen=True)
class Fetching:
    """A fetch whose request could begin now without it: what a policy may look at."""

    costs: Costs
    tokens: int
    """Tokens that need not be computed if the fetch succeeds."""
    bytes_left: int
    """Bytes to be read until the fetch is complete. Reads queued before it are included."""
    waited_s: float
    """How long the request has waited since it could begin."""
    left_s: float
    """Time until the deadline (`fetch_deadline_s`)."""
    still_s: float
    """Time since the last progress."""

    @property
    def worth_waiting(self) -> bool:
        """Whether the rest of the fetch is expected sooner than computing."""
        compute_s = self.costs.compute.seconds(self.tokens)
        read_s = self.costs.read.seconds(self.bytes_left) or 0.0
        return compute_s is None or max(read_s, PATIENCE * self.still_s) < compute_s


class FetchPolicy(ABC):
    """How long a request waits for a fetch under way. Then it begins with the pages that have arrived.

    Contract: `waits` is a pure function. False ends the fetch. Whatever a policy says, nothing is fetched
    that is computed sooner, and a store that hangs ends the fetch.
    """

    @abstractmethod
    def waits(self, fetch: Fetching) -> bool: ...


class BestEffort(FetchPolicy):
    """Does not wait: only what was prefetched early enough is there."""

    def waits(self, fetch: Fetching) -> bool:  # noqa: ARG002
        return False


class WaitForAll(FetchPolicy):
    def waits(self, fetch: Fetching) -> bool:  # noqa: ARG002
        return True


class Deadline(FetchPolicy):
    """Waits until the deadline, and only as long as that is worth it."""

    def waits(self, fetch: Fetching) -> bool:
        return fetch.left_s > 0 and fetch.worth_waiting


_POLICIES = {"best_effort": BestEffort, "wait": WaitForAll, "deadline": Deadline}
assert tuple(_POLICIES) == FETCH_POLICIES


def make_fetch_policy(name: str) -> FetchPolicy:
    """A policy by name, or a user's own class as `module:Class`."""
    return make_policy("fetch", name, _POLICIES, FetchPolicy)


# What to do now


@dataclass(frozen=True)
class Moment:
    """One fetch as it stands: all that the next decision looks at."""

    costs: Costs
    store_works: bool = True
    held: Held | None = None
    """Where pages and tails are; None: the store has not answered, or reads are under way."""
    other_brings: bool = False
    """Whether another fetch is bringing the page after those that were found."""
    turn: bool = False
    """Whether the request could begin now without the fetch."""
    wait_s: float = 0.0
    """How long the request will wait in any case."""
    bytes_ahead: int = 0
    """Bytes that are read before this fetch."""
    bytes_most: int = 0
    """Host memory that a fetch may take now."""
    fetching: Fetching | None = None
    """Given if the request asks whether it should go on waiting."""


@dataclass(frozen=True)
class Keep:
    """Nothing is to be done now."""


@dataclass(frozen=True)
class GiveUp:
    """The request begins with what it has."""

    why: Refusal


def next_of(moment: Moment, policy: FetchPolicy) -> Keep | Wanted | GiveUp:
    """What to do now with a fetch: leave it as it is, read what is wanted, or end it."""
    if moment.fetching is not None and not policy.waits(moment.fetching):
        return GiveUp(Refusal.LATE)
    if moment.held is None:
        return Keep()
    if not moment.store_works:
        return GiveUp(Refusal.OFF)
    if moment.other_brings:
        return Keep()  # when the page has come, this fetch is planned again
    wanted = choose_fetch(
        moment.held,
        moment.costs,
        bytes_ahead=moment.bytes_ahead,
        wait_s=moment.wait_s,
        bytes_most=moment.bytes_most,
    )
    if not isinstance(wanted, Refusal):
        return wanted
    if wanted is Refusal.NO_ROOM and not moment.turn:
        return Keep()  # other requests may have begun when its turn comes
    return GiveUp(wanted)
