"""What one step computes, decided before anything is touched; and what it came to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiercel.engine.ask import Finish, TokenOut
from tiercel.engine.task import Task
from tiercel.models.base import Span


class Part(NamedTuple):
    """Positions start … end of one task."""

    task: Task
    start: int
    end: int
    draws: bool
    """The end of the text so far is reached: a token is drawn after it."""


Plan = list[Part]


class Work(NamedTuple):
    """One call of the model."""

    spans: list[Span]
    every_token: bool


class Outcome(NamedTuple):
    """What a step meant for one task; text is made of it later."""

    task: Task
    token: TokenOut | None = None
    text: str | None = None
    """Made already where a stop string may end the task."""
    prompt: tuple[TokenOut, ...] = ()
    finish: Finish | None = None
    stopped_by: str | int | None = None
    error: str = ""


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
