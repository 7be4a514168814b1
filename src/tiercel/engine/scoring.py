"""Logprobs of a prompt's own tokens, taken from the logits of every position."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tiercel.engine.ask import TokenOut
from tiercel.engine.plan import Part, Plan
from tiercel.engine.sampling import token_logprobs
from tiercel.engine.task import Task


def take_scores(plan: Plan, logits: Tensor, fail: Callable[[Task, Exception], None]) -> Tensor:
    """Score the prompts that want it; answers the logits of each part's last position."""
    last, at = [], 0
    for part in plan:
        count = part.end - part.start
        first = part.task.scores_from
        if first is not None:
            try:
                _score(part, first, logits[at : at + count])
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one text is its own
                fail(part.task, error)
        at += count
        last.append(at - 1)
    return logits[last]


def _score(part: Part, first: int, logits: Tensor) -> None:
    """Row i of the logits says how likely the token after position part.start + i was."""
    task = part.task
    top = task.ask.sampling.logprobs or 0
    prompt = task.ask.prompt
    if part.start <= first and task.ask.prompt_logprobs_from == 0 and not task.scores:
        task.scores.append(TokenOut(prompt[0]))
    start = max(part.start, first)
    following = prompt[start + 1 : part.end + 1]
    rows = logits[start - part.start : start - part.start + len(following)]
    task.scores += token_logprobs(rows, following, top)
