"""What a request cost, in tokens, as OpenAI counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiercel.engine.ask import Usage
from tiercel.server.answers import Answer
from tiercel.server.protocol import CachedByTier, CachedDetails, SglExt, UsageOut, Wish


def usage_of(answers: Sequence[Answer], n: int) -> UsageOut:
    """A prompt counts once however many answers it has; what its first answer reused is what was cached."""
    firsts = answers[::n]
    prompt = sum(answer.usage.prompt_tokens for answer in firsts)
    completion = sum(answer.usage.completion_tokens for answer in answers)
    return UsageOut(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=CachedDetails(cached_tokens=sum(a.usage.cached_tokens for a in firsts)),
    )


def cached_by_tier(usage: Usage) -> CachedByTier:
    return CachedByTier(device=usage.device_tokens, host=usage.host_tokens, storage=usage.store_tokens)


def sglext(body: Wish, answers: Sequence[Answer]) -> dict[str, Any]:
    """What the first answer reused, by tier, if it was asked for."""
    if not body.return_cached_tokens_details:
        return {}
    return {"sglext": SglExt(cached_tokens_details=cached_by_tier(answers[0].usage))}


def usage_so_far(body: Wish, answer: Answer) -> dict[str, UsageOut | None]:
    """For a piece of a stream: the answer's usage up to now, null if it comes at the end, or nothing."""
    if body.stream_options and body.stream_options.continuous_usage_stats:
        return {"usage": usage_of([answer], 1)}
    return {"usage": None} if wants_usage(body) else {}


def wants_usage(body: Wish) -> bool:
    """At the end of a stream."""
    return bool(body.stream_options and body.stream_options.include_usage)
