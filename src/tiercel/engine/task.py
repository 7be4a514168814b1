"""One ask on its way through the engine."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from tiercel.cache import Request
from tiercel.engine.ask import Ask, TokenOut, Usage
from tiercel.engine.sampling import Sampler
from tiercel.engine.text import TextStream
from tiercel.tree.keys import KeyChain


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


class Task:
    """The text so far, how much of it is computed, and what it holds of the cache."""

    def __init__(self, ask: Ask, number: int, chain: KeyChain, sampler: Sampler, stream: TextStream) -> None:
        self.ask = ask
        self.order = (-ask.priority, number)
        """Who comes first: the higher priority, then the earlier."""
        self.chain = chain
        self.sampler = sampler
        self.stream = stream
        self.stage = Stage.WAITING
        self.tokens = list(ask.prompt)
        """Prompt and answer. The last one drawn is not computed yet."""
        self.computed = 0
        """Positions whose rows are written."""
        self.planned = 0
        """Positions that are computed once the step under way is done."""
        self.load = True
        """Turned off after a load failed: then what is not on the device is computed."""
        self.aborted = False
        self.request: Request | None = None
        self.ring = -1
        self.write_from = 0
        self.tails: dict[int, int] = {}
        self.places: Tensor = torch.empty(0, dtype=torch.int64)
        self.committed = -1
        """Pages that were full at the last commit; -1: none yet."""
        self.scores: list[TokenOut] = []
        """Of the prompt's tokens, if they are asked for."""
        self.usage = Usage(len(ask.prompt))

    @property
    def drawn(self) -> int:
        return len(self.tokens) - len(self.ask.prompt)

    @property
    def scores_from(self) -> int | None:
        """The first position whose logits are needed for the prompt's logprobs, as long as they are."""
        asked = self.ask.prompt_logprobs_from
        if asked is None or self.drawn or asked >= len(self.ask.prompt):
            return None
        return max(0, asked - 1)
