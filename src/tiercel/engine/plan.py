"""What one step computes, decided before anything is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiercel.engine.task import Task


class Part(NamedTuple):
    """Positions start … end of one task."""

    task: Task
    start: int
    end: int
    draws: bool
    """The end of the text so far is reached: a token is drawn after it."""


Plan = list[Part]


def share(tokens: int, wanted: Sequence[int], piece: int) -> list[int]:
    """How many tokens each text may compute of what it wants, first come first.

    Everyone gets a piece, in order, and what is left goes to the first: a short prompt does not wait for a
    long one before it, and nobody waits for ever.
    """
    given = []
    for want in wanted:
        given.append(min(want, piece, tokens))
        tokens -= given[-1]
    for i, want in enumerate(wanted):
        more = min(want - given[i], tokens)
        given[i] += more
        tokens -= more
    return given
