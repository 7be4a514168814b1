"""The results of a replay: hits by tier, losses and their reasons, bytes moved, times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Any


@dataclass(frozen=True)
class Times:
    """How long something took each time, in seconds; in a replay, simulated ones."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Times:
        ordered = sorted(seconds) or [0.0]
        mean = sum(ordered) / len(ordered)
        at = (ordered[min(len(ordered) - 1, len(ordered) * part // 100)] for part in (50, 90, 99))
        return Times(mean, *at)


@dataclass(frozen=True)
class Report:
    """The prompts' tokens are either reused (`hit_tokens`), or replayed, or lost, or new, or behind the last
    full page, where no cache can keep them."""

    policy: str
    requests: int
    refused: int
    """Requests longer than what fits on the device."""
    tokens_asked: int
    """Tokens of all prompts."""
    hit_tokens: Mapping[str, int]
    """Tokens that each tier supplied: device, host, store. They were not computed."""
    replayed_tokens: int
    """Tokens in pages that were found, but computed again because there was no tail after them."""
    new_tokens: int
    """Tokens in pages that no request had before: a cache of unlimited size would miss them too."""
    lost_tokens: Mapping[str, int]
    """Tokens in pages that an earlier request had, by the reason why they were not reused."""
    loaded_bytes: int
    """Bytes from host to device."""
    saved_bytes: int
    """Bytes from device to host."""
    store_written_bytes: int
    store_read_bytes: int
    store_used_bytes: int
    """Written bytes that were read at least once."""
    preemptions: int
    first_token: Times
    """Times from a request's arrival to its first token."""
    busy_s: float
    """What one device that is never idle takes for all that was computed: prompts at the rate of prefill, and
    answers with as many drawn at the same time as may run and fit."""
    arrivals_s: float
    """From the first arrival to the last one."""
    simulated_s: float
    """How long the traffic took."""
    wall_s: float
    """How long the replay took."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Counters of the cache."""

    @property
    def hits(self) -> int:
        return sum(self.hit_tokens.values())

    @property
    def hit_ratio(self) -> float:
        """Reused tokens over tokens asked."""
        return self.hits / self.tokens_asked if self.tokens_asked else 0.0

    @property
    def hit_ratio_most(self) -> float:
        """The hit ratio of a cache of unlimited size."""
        most = self.hits + self.replayed_tokens + sum(self.lost_tokens.values())
        return most / self.tokens_asked if self.tokens_asked else 0.0

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were computed, the replayed ones among them."""
        return self.tokens_asked - self.hits

    @property
    def rest_tokens(self) -> int:
        """Prompt tokens behind the last full page before the last token: no cache keeps them."""
        return self.computed_tokens - self.replayed_tokens - sum(self.lost_tokens.values()) - self.new_tokens

    @property
    def requests_s_most(self) -> float:
        """Requests per second that one device bears: however fast those of the trace came."""
        return self.requests / self.busy_s if self.busy_s else 0.0

    @property
    def devices(self) -> int:
        """How many devices bear the traffic, if all of them find as much; 1 if all requests come at once."""
        return max(1, ceil(self.busy_s / self.arrivals_s)) if self.arrivals_s else 1

    @property
    def requests_s(self) -> float:
        return self.requests / self.wall_s if self.wall_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        ratios = {tier: tokens / max(1, self.tokens_asked) for tier, tokens in self.hit_tokens.items()}
        own = asdict(self)
        return own | {
            "hit_ratio": self.hit_ratio,
            "hit_ratio_by_tier": ratios,
            "hit_ratio_most": self.hit_ratio_most,
            "computed_tokens": self.computed_tokens,
            "requests_s_most": self.requests_s_most,
            "devices": self.devices,
            "requests_s": self.requests_s,
        }
