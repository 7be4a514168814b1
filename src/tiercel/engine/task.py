"""One ask on its way through the engine."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from tiercel.asks.ask import Ask, Finish, TokenOut, Usage
from tiercel.asks.times import RequestTimes
from tiercel.cache import Request, Wait
from tiercel.policy.speculate import GuessRecord
from tiercel.text.stream import TextStream
from tiercel.tree.keys import KeyChain

PRIORITY_S = 10.0
"""A level of priority counts as this many seconds of waiting. So an urgent task goes before those of the last
seconds, and no task waits for ever behind a stream of urgent ones."""


class Stage(Enum):
    """Where a task is.

    WAITING ──► LOADING ──► RUNNING ──► ENDED
       ▲            └─ failed ─┐ │ preempted
       └───────────────────────┴─┘
    """

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False)
class Seat:
    """What a task holds while it is loading or running."""

    task: Task
    request: Request
    ring: int
    computed: int
    """Positions whose rows are written."""
    planned: int
    """Positions that are computed once the step under way is done, if none of its guesses is right."""
    committed: int = -1
    """Pages that were full at the last commit; -1: none yet."""
    calm_upto: int = 0
    """A step that computes one position more, up to below this one, does nothing else for the text: no page
    is full, no room is asked for, and the text does not reach its length."""
    guesses: int = 0
    """Guesses that the step under way may compute for it: it may draw one token more for each."""
    first_tokens: int = 0
    """Tokens drawn in steps with guesses, as long as they are counted (`Guessing.drew`)."""

    @property
    def write_from(self) -> int:
        return self.request.reuse.tokens


class Task:
    """The text so far, how it is to end, and what it holds of the cache."""

    def __init__(
        self,
        ask: Ask,
        order: tuple[float, int],
        chain: KeyChain,
        stream: TextStream,
        ends: frozenset[int],
        added_s: float = 0.0,
    ) -> None:
        self.ask = ask
        self.times = RequestTimes(added_s)
        self.drew_s: float | None = None
        """When it last drew a token."""
        self.order = order
        """Tasks are served in this order: (arrival minus `PRIORITY_S` per level, number of the ask)."""
        self.chain = chain
        self.stream = stream
        self.ends = ends
        """Tokens that end the answer."""
        seed = secrets.randbits(63) if ask.sampling.seed is None else ask.sampling.seed
        self.sampling = replace(ask.sampling, seed=seed, stop_tokens=ends)
        """It has a seed: the same tokens are drawn after a preemption. `stop_tokens` are all that end it."""
        self.stage = Stage.WAITING
        self.seat: Seat | None = None
        self.tokens = list(ask.prompt)
        """Prompt and answer. The last drawn token is not computed yet."""
        self.prompt_tokens = len(ask.prompt)
        self.longest = self.prompt_tokens + ask.sampling.max_tokens
        self.simple = not ask.sampling.stop and ask.prompt_logprobs_from is None
        """Without stop strings and prompt logprobs, a drawn token needs no further work."""
        self.load = True
        """False after a load failed: what is not on the device is computed instead."""
        self.aborted = False
        self.untold = False
        """Whether its text could not be decoded. The client got an error, and gets no further delta."""
        self.passed = False
        """Whether it could not begin because of `LET_OTHERS_BY`: then tasks behind it may begin first."""
        self.refused: tuple[object, Wait] | None = None
        """If it found no device pages: the cache's `changes` at that time, and the refusal."""
        asked = ask.prompt_logprobs_from
        self.scoring = asked is not None and asked < self.prompt_tokens
        """Whether the prompt's logprobs are asked for and not known yet."""
        self.scores: list[TokenOut] = []
        self.guesses = GuessRecord()
        self.reused = 0, 0, 0, 0
        """Tokens of its prompt that device, host and store supplied, and tokens that were replayed."""

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.drawn, *self.reused)

    @property
    def named(self) -> dict[str, str]:
        """The ids that a log line about this task carries."""
        return {"request_id": self.ask.request_id, "tenant": self.ask.tenant}

    def name_pages(self) -> KeyChain:
        """The keys of the text so far. Tokens are added when a page may be full: one by one would be slow."""
        if self.chain.tokens < len(self.tokens):
            self.chain.extend(self.tokens[self.chain.tokens :])
        return self.chain

    def take(self, token: TokenOut) -> Outcome:
        """Add a token: the text goes on, or ends."""
        sampling, drawn = self.ask.sampling, self.drawn
        prompt: tuple[TokenOut, ...] = ()
        if not drawn and self.ask.prompt_logprobs_from is not None:
            head = [TokenOut(self.tokens[0])] if self.ask.prompt_logprobs_from == 0 else []
            prompt, self.scoring = (*head, *self.scores), False
        if sampling.max_tokens == 0:
            return Outcome(self, prompt=prompt, finish=Finish.LENGTH)
        self.tokens.append(token.token)
        finish = Finish.LENGTH if drawn + 1 >= sampling.max_tokens else None
        if token.token in self.ends:
            return Outcome(self, token, None, prompt, Finish.STOP, token.token)
        if not sampling.stop:
            return Outcome(self, token, None, prompt, finish)
        piece = self.stream.push(token.token)
        if piece.stopped_by is not None:
            return Outcome(self, token, piece.text, prompt, Finish.STOP, piece.stopped_by)
        rest = self.stream.finish() if finish else ""
        return Outcome(self, token, piece.text + rest, prompt, finish)

    @property
    def drawn(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def score_from(self) -> int | None:
        """The first position whose logits are needed for the prompt's logprobs, as long as they are."""
        asked = self.ask.prompt_logprobs_from
        return max(0, asked - 1) if self.scoring and asked is not None else None


class Outcome(NamedTuple):
    """What a step changed for one task. Text is made of it later."""

    task: Task
    token: TokenOut | None = None
    text: str | None = None
    """The text, if it was made already because a stop string may end the task."""
    prompt: tuple[TokenOut, ...] = ()
    finish: Finish | None = None
    stopped_by: str | int | None = None
    error: str = ""
