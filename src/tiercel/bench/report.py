"""What came of a run: times, rates, hits by tier, errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from tiercel.bench.client import SOURCES, Measured
from tiercel.bench.run import Run
from tiercel.replay.report import Times


@dataclass(frozen=True)
class Source:
    """What came from one place."""

    requests: int
    """Those whose prompts have tokens from here, and none from a slower place."""
    tokens: int
    tokens_s: float
    """Tokens of prompts that came from here in a second of the run."""
    ttft: Times | None


@dataclass(frozen=True)
class Report:
    """Times are those of answers that ended well; None: there is no such time."""

    requests: int
    answered: int
    unasked: int
    """Later turns of conversations that an error ended."""
    errors: dict[str, int]
    short: int
    """Answers with fewer tokens than were asked for."""
    seconds: float
    requests_s: float
    prompt_tokens: int
    prompt_tokens_s: float
    answer_tokens: int
    answer_tokens_s: float
    hit_ratio: float
    """Tokens of prompts that were not computed, over all tokens of prompts."""
    ttft: Times | None
    itl: Times | None
    """Inter-token latency: between two events of a stream. An event may have several tokens."""
    tpot: Times | None
    """Time per output token: the mean of each answer, behind its first token."""
    e2e: Times | None
    late: Times | None
    """How long after their times in the trace requests began."""
    sources: dict[str, Source]
    client_late: Times | None
    """How late the client itself was. The other times have such an error."""
    interrupted: bool
    sent_sha256: str
    counters: dict[str, float]

    @staticmethod
    def of(run: Run, asked: Sequence[Sequence[int]]) -> Report:
        """`asked`: for each conversation the lengths of its answers."""
        good = [each for each in run.measured if not each.error]
        seconds = run.seconds
        prompt, answer = sum(each.prompt_tokens for each in good), sum(each.answer_tokens for each in good)
        sources = _sources(good, seconds)
        reused = sum(source.tokens for name, source in sources.items() if name != "computed")
        return Report(
            requests=len(run.measured),
            answered=len(good),
            unasked=sum(map(len, asked)) - len(run.measured),
            errors=dict(Counter(each.error for each in run.measured if each.error).most_common()),
            short=sum(each.answer_tokens < asked[each.conversation][each.turn] for each in good),
            seconds=seconds,
            requests_s=len(good) / seconds,
            prompt_tokens=prompt,
            prompt_tokens_s=prompt / seconds,
            answer_tokens=answer,
            answer_tokens_s=answer / seconds,
            hit_ratio=reused / max(1, prompt),
            ttft=_times([each.ttft_s for each in good if each.ttft_s is not None]),
            itl=_times(list(chain.from_iterable(each.gaps_s for each in good))),
            tpot=_times([tpot for each in good if (tpot := each.tpot_s) is not None]),
            e2e=_times([each.e2e_s for each in good]),
            late=_times([each.late_s for each in run.measured if each.late_s is not None]),
            sources=sources,
            client_late=_times(run.client_late_s),
            interrupted=run.interrupted,
            sent_sha256=run.sent_sha256,
            counters=run.counters,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _times(seconds: Sequence[float]) -> Times | None:
    return Times.of(seconds) if seconds else None


def _sources(good: Sequence[Measured], seconds: float) -> dict[str, Source]:
    """By the place where tokens came from, the fastest first; `computed` has what no tier supplied."""
    tokens = Counter[str]()
    for each in good:
        tokens.update(each.tokens_by_source)
    tokens["computed"] = sum(each.prompt_tokens for each in good) - tokens.total()
    found = dict[str, Source]()
    for name in (*reversed(SOURCES), "computed"):
        own = [each for each in good if each.source == name]
        if own or tokens[name]:
            ttft = _times([each.ttft_s for each in own if each.ttft_s is not None])
            found[name] = Source(len(own), tokens[name], tokens[name] / seconds, ttft)
    return found


def rows_of(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Each request by itself, in the order in which they began."""
    return [
        {
            "conversation": each.conversation,
            "turn": each.turn,
            "request_id": each.request_id,
            "began_s": each.began_s,
            "late_s": each.late_s,
            "ttft_s": each.ttft_s,
            "tpot_s": each.tpot_s,
            "e2e_s": each.e2e_s,
            "prompt_tokens": each.prompt_tokens,
            "answer_tokens": each.answer_tokens,
            "reused_tokens": each.tokens_by_source,
            "source": each.source,
            "error": each.error or None,
        }
        for each in sorted(measured, key=lambda each: each.began_s)
    ]
