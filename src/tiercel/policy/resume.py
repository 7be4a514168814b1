"""Where a request resumes, and what it reused, from which tier, and why not more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Why(Enum):
    """Why a request did not reuse more than it did."""

    COMPLETE = "every full page before the last token was reused"
    NOT_CACHED = "the next page is in no tier"
    NOT_ON_DEVICE = "the next page is not on the device, and loads were turned off for this request"
    NO_TAIL = "more pages were found, but there is no tail to resume after them"
    REPLAYED = "there is no tail after the last pages, so their tokens were computed again"
    NOT_WANTED = "the request asks for logprobs of the prompt from here on, so it is computed"
    STORE_LATE = "the store did not bring more in time"
    STORE_SLOW = "computing the rest was expected to be faster than the store"
    STORE_NO_TAIL = "the store has more pages, but no tail to resume after them"
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


def tokens_by_tier(
    near: int, fetched: Sequence[bool], *, page_tokens: int, replay_tokens: int
) -> tuple[int, int, int]:
    """Tokens that device, host and store supply. The first `near` reused pages are on the device. `fetched`
    has, for each page after them, whether the store brought it to the host. The last `replay_tokens` tokens
    are computed again, so no tier supplies them."""
    left = (near + len(fetched)) * page_tokens - replay_tokens
    device = min(left, near * page_tokens)
    whole, part = divmod(left - device, page_tokens)
    store = sum(fetched[:whole]) * page_tokens
    if part and fetched[whole]:
        store += part
    return device, left - device - store, store


@dataclass(frozen=True)
class Reuse:
    """What one request took from the cache, in tokens. A token of the prompt is supplied by one of the three
    tiers, or it is replayed, or it is computed for the first time."""

    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    store_tokens: int
    found_tokens: int
    """Tokens of pages found in any tier, reused or not."""
    replay_tokens: int
    """Tokens of reused pages that are computed again because there is no tail after them."""
    replay_cost_tokens: int | None
    """Tokens that an exact replay up to `found_tokens` computes; None: no replay can rebuild the state."""
    why: Why

    @property
    def cached_tokens(self) -> int:
        """Tokens that are not computed."""
        return self.device_tokens + self.host_tokens + self.store_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that are computed, including the replayed ones."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def tokens(self) -> int:
        """Tokens of all reused pages, the replayed ones included: nothing before is written again."""
        return self.cached_tokens + self.replay_tokens

    def __str__(self) -> str:
        tiers = f"{self.device_tokens} device, {self.host_tokens} host, {self.store_tokens} store"
        replayed = f", replayed {self.replay_tokens}" if self.replay_tokens else ""
        reused = f"reused {self.cached_tokens} of {self.prompt_tokens} tokens ({tiers}){replayed}"
        text = f"{reused}; {self.why.value}"
        if self.why is Why.NO_TAIL and self.replay_cost_tokens is not None:
            text += f" ({self.found_tokens} tokens found; an exact replay costs {self.replay_cost_tokens})"
        return text
