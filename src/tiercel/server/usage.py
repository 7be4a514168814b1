"""What a request cost, in tokens, as OpenAI counts."""

from __future__ import annotations

from collections.abc import Sequence

from tiercel.server.answers import Answer
from tiercel.server.protocol import CachedDetails, UsageOut, Wish


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


def wants_usage(body: Wish) -> bool:
    """At the end of a stream."""
    return bool(body.stream_options and body.stream_options.include_usage)
