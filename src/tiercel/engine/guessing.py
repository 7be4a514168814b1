"""Guesses from the scheduler's side: how many a text may get in a step, and how many were right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from tiercel.asks.times import RequestTimes
from tiercel.engine.step import Drawn, Step, StepPart
from tiercel.engine.task import Seat
from tiercel.policy.resume import Reuse
from tiercel.policy.speculate import LEVELS_MOST, GuessRecord, Speculation

REST = 8
"""If no text got a guess, the policy is not asked for this many steps: asking takes time too."""

FIRST_TOKENS = 8
"""Accept lengths by tier count this many tokens after a text began: a draft that lost its part of the cache
is wrong there, and then recovers."""


class GuessPolicy(Protocol):
    """The part of `Speculation` that the scheduler uses."""

    def accepted(self, record: GuessRecord, *, asked: int, made: int, accepted: int) -> None: ...

    def stepped(
        self, *, rows: int, seconds: float, texts: int = 0, asked: int = 0, draft_s: float = 0.0
    ) -> None: ...

    def choose(self, records: Sequence[GuessRecord], most: Sequence[int], others: int = 0) -> list[int]: ...


class Explained(NamedTuple):
    """What `explain` tells of a request."""

    reuse: Reuse
    guesses: GuessRecord
    times: RequestTimes
    sparse_pages: int = 0


def source_of(reuse: Reuse) -> str:
    """The slowest tier that a text's beginning came from."""
    if reuse.store_tokens:
        return "store"
    if reuse.host_tokens:
        return "host"
    return "device" if reuse.device_tokens else "computed"


class Guessing:
    """Asks a policy, and counts."""

    def __init__(self, most: int, counters: Counter[str], clock: Callable[[], float]) -> None:
        """`most`: the most guesses for one text in one step; 0: none."""
        self.most = min(most, LEVELS_MOST)
        self.policy: GuessPolicy = Speculation()
        self.first_tokens: Counter[str] = Counter()
        """Tokens that were drawn in the steps of `first_steps`, by source."""
        self.first_steps: Counter[str] = Counter()
        """Steps with guesses among the first tokens after texts began."""
        self._counters, self._clock = counters, clock
        self._last_s: float | None = None
        """When the last step ended, if the next one followed at once."""
        self._resting = 0

    def awake(self) -> bool:
        """Whether texts may get guesses in the next step."""
        self._resting -= self._resting > 0
        return self.most > 0 and not self._resting

    def choose(self, seats: Sequence[Seat], room: Sequence[int], tokens: int, others: int) -> list[int]:
        """How many guesses each text gets: at most `room[i]`, and `tokens` altogether."""
        if tokens <= 0:
            return [0] * len(seats)
        records = [seat.task.guesses for seat in seats]
        chosen = self.policy.choose(records, [min(self.most, each) for each in room], others)
        if not any(chosen) and any(room):
            self._resting = REST + 1
        for i, count in enumerate(chosen):
            chosen[i] = min(count, tokens)
            tokens -= chosen[i]
        return chosen

    def drew(self, seat: Seat, part: StepPart, made: int, tokens: int) -> None:
        """A part that had guesses has drawn tokens."""
        self.policy.accepted(seat.task.guesses, asked=part.guesses, made=made, accepted=tokens - 1)
        self._counters["guesses"] += made
        self._counters["guesses_accepted"] += tokens - 1
        self._counters["guessing_steps"] += 1
        self._counters["guessing_tokens"] += tokens
        if seat.first_tokens < FIRST_TOKENS:
            seat.first_tokens += tokens
            source = source_of(seat.request.reuse)
            self.first_steps[source] += 1
            self.first_tokens[source] += tokens

    def stepped(self, step: Step, drawn: Drawn) -> None:
        """A step was run. It is timed only if it followed at once and computed no prompt."""
        last_s, now_s = self._last_s, self._clock()
        self._last_s = now_s if step.parts else None
        if not self.most or last_s is None or any(part.end - part.start > 1 for part in step.parts):
            return
        asked = [part.guesses for part in step.parts if part.guesses]
        rows = len(step.parts) + sum(drawn.guessed.values())
        self.policy.stepped(
            rows=rows,
            seconds=now_s - last_s,
            texts=len(asked),
            asked=max(asked, default=0),
            draft_s=drawn.draft_s,
        )

    def paused(self) -> None:
        """The next step does not follow at once."""
        self._last_s = None

    def accept_length(self) -> dict[str, float]:
        """For each source: tokens per step with guesses, over the first tokens after texts began."""
        return {source: self.first_tokens[source] / steps for source, steps in self.first_steps.items()}
