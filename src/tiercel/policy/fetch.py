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

from collections.abc import Callable
from dataclasses import dataclass, field


class Rate:
    """So much of something per second, as last seen."""

    NEW = 0.4
    """Weight of the latest: a store that slows down is noticed within a few reads."""

    def __init__(self) -> None:
        self.per_s: float | None = None

    def observe(self, amount: float, seconds: float) -> None:
        now = amount / max(seconds, 1e-6)
        self.per_s = now if self.per_s is None else self.NEW * now + (1 - self.NEW) * self.per_s

    def seconds(self, amount: float) -> float | None:
        """How long so much takes; None: nobody knows."""
        return None if self.per_s is None else amount / max(self.per_s, 1e-9)


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
    """Pages found + 1 … upto, and tails, from the store."""

    upto: int
    tails: tuple[int, ...]


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
) -> Wanted | None:
    """What to read; None when nothing the store has is worth it.

    `bytes_ahead` are read first; for `wait_s` the request waits whatever happens; more than `bytes_most` have
    no room.
    """
    best, best_gain = None, 0.0
    for wanted, tokens in _candidates(held, costs):
        size = costs.bytes_of(held, wanted)
        if bytes_most is not None and size > bytes_most:
            continue
        gain = _gain(costs, tokens, bytes_ahead + size, wait_s)
        if gain > best_gain:
            best, best_gain = wanted, gain
    return best


def _gain(costs: Costs, tokens: int, bytes_read: int, wait_s: float) -> float:
    """Seconds saved; where a rate is not known, more tokens are better: somebody has to find out."""
    compute_s, read_s = costs.compute.seconds(tokens), costs.read.seconds(bytes_read)
    if compute_s is None or read_s is None:
        return float(tokens)
    return compute_s - max(0.0, read_s - wait_s)


def _candidates(held: Held, costs: Costs) -> list[tuple[Wanted, int]]:
    """Everything that could be read, with the tokens it spares, the longest first."""
    both, last = held.tails | held.tails_stored, held.found + held.stored
    window = costs.pages_per_window
    found = []
    boundaries = [b for b in range(held.boundary + 1, last + 1) if legal(b, window, both.__contains__)]
    for boundary in reversed(boundaries):
        tails = _stations(boundary, boundaries, held, window)
        wanted = Wanted(max(boundary, held.found), tails)
        found.append((wanted, (boundary - held.boundary) * costs.page_tokens))
    if costs.replay_tokens is not None and last > held.found:
        spared = (last - held.boundary) * costs.page_tokens - costs.replay_tokens
        if spared > 0:
            found.append((Wanted(last, ()), spared))
    return found


def _stations(boundary: int, boundaries: list[int], held: Held, window: int) -> tuple[int, ...]:
    """The tails to read for a resume at `boundary`, and at up to three places on the way there, so that a
    fetch that ends early is worth something too."""
    apart = max(1, (boundary - held.boundary) // 4)
    stations = [boundary]
    for each in reversed(boundaries):
        if each <= stations[-1] - apart and len(stations) < 4:
            stations.append(each)
    reads = {tail for b in stations for tail in range(max(1, b - window + 1), b + 1)} if window else set()
    return tuple(sorted(reads & held.tails_stored - held.tails))


PATIENCE = 4
"""A fetch that has not moved for this fraction of what it can save is given up."""


def worth_waiting(costs: Costs, tokens: int, bytes_left: int, still_s: float) -> bool:
    """Whether the rest of a fetch is still sooner than computing. `still_s`: since it last moved."""
    compute_s = costs.compute.seconds(tokens)
    if compute_s is None:
        return True
    read_s = costs.read.seconds(bytes_left) or 0.0
    return max(read_s, PATIENCE * still_s) < compute_s
