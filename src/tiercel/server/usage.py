"""Usage of a request in tokens, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiercel.engine.ask import Answer, Usage
from tiercel.server.protocol import CachedByTier, CachedDetails, OpenAIRequest, SglExt, UsageOut


def usage_of(answers: Sequence[Answer], n: int) -> UsageOut:
    """Each prompt counts once, however many answers it has. Its first answer says what was cached."""
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


def sglext(body: OpenAIRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    """What the first answer reused, by tier, if requested."""
    if not body.return_cached_tokens_details:
        return {}
    return {"sglext": SglExt(cached_tokens_details=cached_by_tier(answers[0].usage))}


def usage_so_far(body: OpenAIRequest, answer: Answer) -> dict[str, UsageOut | None]:
    """For an event of a stream: the usage up to now, null if usage comes at the end, or no field."""
    if body.stream_options and body.stream_options.continuous_usage_stats:
        return {"usage": usage_of([answer], 1)}
    return {"usage": None} if wants_usage(body) else {}


def wants_usage(body: OpenAIRequest) -> bool:
    """Whether a stream ends with its usage."""
    return bool(body.stream_options and body.stream_options.include_usage)
