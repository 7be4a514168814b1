"""Runs steps on a model in this process: rings with texts, page tables and samplers; the forward; drawing."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.engine.ask import TokenOut
from tiercel.engine.sampling import Sampler, best_tokens, token_logprobs
from tiercel.engine.step import Begin, Drawn, PageTable, Step, StepPart
from tiercel.models.base import Model, Span

log = logging.getLogger(__name__)

Ints = NDArray[np.int64]


class _Ring:
    """One running text."""

    sampler: Sampler

    def __init__(self, begin: Begin) -> None:
        self.count = len(begin.tokens)
        self.prompt_tokens = begin.prompt_tokens
        longest = begin.prompt_tokens + begin.sampling.max_tokens
        self.tokens: Ints = np.empty(longest + 1, np.int64)
        self.tokens[: self.count] = begin.tokens
        self.pages: Ints = np.empty(0, np.int64)
        self.write_from = begin.write_from
        self.error: Exception | None = None
        """Why this text can not be computed."""

    def place(self, change: PageTable) -> None:
        end = change.first + len(change.places)
        if end > len(self.pages):
            self.pages = np.concatenate([self.pages[: change.first], change.places])
        else:
            self.pages[change.first : end] = change.places

    def span(self, part: StepPart) -> Span:
        tokens, pages = torch.from_numpy(self.tokens[part.start : part.end]), torch.from_numpy(self.pages)
        return Span(tokens, part.start, pages, part.ring, dict(part.tails), self.write_from)

    def append(self, token: int) -> None:
        self.tokens[self.count] = token
        self.count += 1


class _Asked(NamedTuple):
    """The rows of logits of one part: `scored` ones, the last of them for drawing too, if it draws."""

    number: int
    part: StepPart
    ring: _Ring
    first_row: int
    rows: int


class LocalRunner:
    """A model, and the rings of its running texts."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._rings: dict[int, _Ring] = {}

    def run(self, step: Step) -> Drawn:
        for change in step.changes:
            if isinstance(change, Begin):
                self._begin(change)
            else:
                self._rings[change.ring].place(change)
        drawn = Drawn([None] * len(step.parts), {}, 0.0)
        spans, rows, asked, first = list[Span](), list[int](), list[_Asked](), 0
        for i, part in enumerate(step.parts):
            ring = self._rings[part.ring]
            if ring.error is not None:
                drawn.results[i] = ring.error
                continue
            needed = part.end - part.draws
            if part.score_from is not None:
                needed = min(needed, max(part.start, part.score_from))
            if needed < part.end:
                asked.append(_Asked(i, part, ring, len(rows), part.end - needed))
                rows.extend(range(first + needed - part.start, first + part.end - part.start))
            spans.append(ring.span(part))
            first += part.end - part.start
        if not spans:
            return drawn
        began_s = perf_counter()
        try:
            logits = self.model.forward(spans, rows)
        except Exception as error:
            for part in step.parts:  # the next step may be queued already: these texts are not computed there
                self._rings[part.ring].error = error
            raise
        drawn = drawn._replace(seconds=perf_counter() - began_s)
        self._draw(asked, logits, drawn)
        return drawn

    def _begin(self, begin: Begin) -> None:
        self._rings[begin.ring] = ring = _Ring(begin)
        prompt, output = begin.tokens[: begin.prompt_tokens], begin.tokens[begin.prompt_tokens :]
        try:
            ring.sampler = Sampler(begin.sampling, prompt, self.model.vocab_size, output)
            self.model.resume(begin.ring, begin.tails)
        except Exception as error:  # noqa: BLE001 - whatever a model raises: this text ends
            log.exception("a text could not be resumed")
            ring.error = error

    def _draw(self, asked: list[_Asked], logits: Tensor, drawn: Drawn) -> None:
        """What can not be drawn or scored is the error of its own text."""
        drawing = [each for each in asked if each.part.draws]
        last = logits if len(logits) == len(drawing) else logits[[a.first_row + a.rows - 1 for a in drawing]]
        best = dict(zip((each.number for each in drawing), best_tokens(last), strict=True)) if drawing else {}
        for each in asked:
            ring, token = each.ring, best.get(each.number)
            try:
                if each.part.score_from is not None:
                    own = logits[each.first_row : each.first_row + each.rows]
                    drawn.scores[each.part.ring] = _scores(each.part, ring, own)
                if token is None:
                    continue
                if ring.sampler.plain and token >= 0:  # most of the time
                    out = TokenOut(token)
                else:
                    out = ring.sampler.draw(logits[each.first_row + each.rows - 1])
                ring.append(out.token)
                drawn.results[each.number] = out
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one row is that text's
                drawn.results[each.number] = ring.error = error


def _scores(part: StepPart, ring: _Ring, logits: Tensor) -> list[TokenOut]:
    """Row i tells how likely the token after it was, as far as that is one of the prompt's."""
    start = part.end - len(logits)
    following: list[int] = ring.tokens[start + 1 : min(part.end + 1, ring.prompt_tokens)].tolist()
    return token_logprobs(logits[: len(following)], following, ring.sampler.sampling.logprobs or 0)
