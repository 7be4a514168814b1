"""A step as a value: what a runner is told, and what it returns. It can be printed, compared and sent.

    scheduler ── Step ──► runner ── Drawn ──► scheduler

A runner keeps, for each running text, its tokens, its page table and its sampler in a ring. A step tells only
what changed: the cost of a step does not grow with the length of the texts in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from tiercel.asks.ask import Sampling, TokenOut

TailPlaces = tuple[int, tuple[int, ...]]
"""The boundary of a tail, and the device places it is kept in."""


class Begin(NamedTuple):
    """A text takes a ring, for the first time or after it was preempted."""

    ring: int
    tokens: tuple[int, ...]
    """The prompt, and what was drawn before."""
    prompt_tokens: int
    sampling: Sampling
    """The sampling, with a seed."""
    tails: tuple[TailPlaces, ...]
    """The tails that the text goes on from, the earliest first."""
    write_from: int
    """Positions below this are in the pages already: a replay does not write them again."""


class PageTable(NamedTuple):
    """The page table of a ring, from page `first` on."""

    ring: int
    first: int
    rows: tuple[tuple[int, ...], ...]
    """The places of the pages, a row for each pool of the device. Where pages may be sparse, a row more: the
    host places of those that are."""


class HotPlaces(NamedTuple):
    """The text in a ring has these places of the second pool for single entries of its sparse pages. What
    they held is not read."""

    ring: int
    places: tuple[int, ...]


Change = Begin | PageTable | HotPlaces


class StepPart(NamedTuple):
    """Positions start … end - 1 of the text in a ring are computed."""

    ring: int
    start: int
    end: int
    draws: bool
    """Whether the end of the text so far is reached: then a token is drawn."""
    score_from: int | None = None
    """Tokens of the prompt behind this position are scored."""
    tails: tuple[TailPlaces, ...] = ()
    """The tails to write."""
    guesses: int = 0
    """How many guesses may be computed behind the end: there is room for them."""


@dataclass(frozen=True)
class Step:
    """Changes first, then one forward over all parts."""

    changes: tuple[Change, ...] = ()
    parts: tuple[StepPart, ...] = ()
    loads: tuple[int, ...] = ()
    """Transfers that bring what the step reads. A layer is computed after its own bytes have arrived."""


class Drawn(NamedTuple):
    """The result of a step."""

    results: list[tuple[TokenOut, ...] | Exception | None]
    """For each part: the tokens drawn, the error that ends its text, or None if nothing is drawn. If guesses
    were right, several tokens are drawn: all but the last have been computed."""
    scores: dict[int, list[TokenOut]]
    """For each ring: the prompt's tokens that follow the scored positions."""
    seconds: float
    """How long the forward took."""
    guessed: Mapping[int, int] = MappingProxyType({})
    """For each ring: how many guesses were computed."""
    draft_s: float = 0.0
    """How long it took to make the guesses."""
    steps: int = 1
    """How often the step was run in a row (`Scheduler.quiet_steps`): each part drew one token in each run."""


class ReadOnHost(NamedTuple):
    """What a model has read of sparse pages since the start, over all layers."""

    looked_up: int = 0
    """Chosen entries of pages on the host."""
    missed: int = 0
    """How many of them had to be brought."""
    rows_staged: int = 0


class Runner(Protocol):
    """Runs steps, one after the other. Whatever `run` raises ends the texts of that step. `RunnerLost`: the
    device has lost all that it held."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def busy_s(self) -> Sequence[float]:
        """How long each stage has computed since the start. Without stages: nothing."""

    def run(self, step: Step) -> Drawn: ...

    def read_on_host(self) -> ReadOnHost:
        """On a GPU this waits for what is queued."""

    def end(self) -> None:
        """It was lost: nothing copies any more when this returns, and plans under way have failed."""

    def restart(self) -> None:
        """Begin again, with a device that holds nothing."""


@runtime_checkable
class Queues(Runner, Protocol):
    """A runner to which the next step can be given before this one has ended."""

    def start(self, step: Step) -> Callable[[], Drawn]:
        """The returned function waits for the step's tokens. It is called in the order of the steps."""


def failing(error: Exception) -> Callable[[], Drawn]:
    """The result of a step that could not be started: it raises the error."""

    def result() -> Drawn:
        raise error

    return result


def share(tokens: int, wanted: Sequence[int], piece: int) -> list[int]:
    """How many tokens each text may compute.

    Each text gets a piece, in order, and what is left goes to the first: a short prompt does not wait for a
    long one before it, and no text waits for ever.
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
