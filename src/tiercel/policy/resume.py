"""Where a request resumes, and the answer to "what was reused, from which tier, and why not more"."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Why(Enum):
    """Why a request did not reuse more than it did."""

    COMPLETE = "every full page before the last token was reused"
    NOT_CACHED = "the next page is in no tier"
    NOT_ON_DEVICE = "the next page is not on the device, and loads were turned off for this request"
    NO_TAIL = "more pages were found, but there is no tail to resume after them"
    NOT_WANTED = "the request asks for logprobs of the prompt from here on, so it is computed"
    STORE_LATE = "the store did not bring more in time"
    STORE_SLOW = "computing the rest was expected to be faster than the store"
    STORE_OFF = "the store does not answer, and the next page is in no other tier"
    STORE_DAMAGED = "what the store held of the rest was damaged"
    STORE_NO_ROOM = "there was no host memory to fetch the rest into"
    FORCED_MISS = "the cache is told to find nothing"


@dataclass(frozen=True)
class Resume:
    """Reuse `pages` pages, with the tails at their end, or by computing the last `replay_tokens` again."""

    pages: int
    by_replay: bool = False
    replay_tokens: int = 0


def choose_resume(*, found: int, boundary: int, page_tokens: int, replay_cost: int | None) -> Resume:
    """Resume at the last tail; or by exact replay after all found pages, if that computes fewer tokens.

    0            boundary                     found
    ├───────────────┼───────────────────────────┤
                    └──── compute these ────────┘      resume at the tail
                              └─ replay_cost ───┘      resume by replay (None: impossible or not allowed)
    """
    if replay_cost is not None and replay_cost < (found - boundary) * page_tokens:
        return Resume(found, by_replay=True, replay_tokens=replay_cost)
    return Resume(boundary)


@dataclass(frozen=True)
class Reuse:
    """What one request took from the cache, in tokens. The three tiers add up to `tokens`."""

    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    store_tokens: int
    found_tokens: int
    """Tokens of pages found in any tier, reused or not."""
    replay_tokens: int
    """How many of the reused tokens are computed again because there is no tail after them."""
    replay_cost_tokens: int | None
    """Tokens that an exact replay up to `found_tokens` computes; None: no replay can rebuild the state."""
    why: Why

    @property
    def tokens(self) -> int:
        return self.device_tokens + self.host_tokens + self.store_tokens

    def __str__(self) -> str:
        tiers = f"{self.device_tokens} device, {self.host_tokens} host, {self.store_tokens} store"
        text = f"reused {self.tokens} of {self.prompt_tokens} tokens ({tiers}); {self.why.value}"
        if self.why is Why.NO_TAIL and self.replay_cost_tokens is not None:
            text += f" ({self.found_tokens} tokens found; an exact replay costs {self.replay_cost_tokens})"
        return text
