"""Runs steps on a model in this process: rings with texts, page tables and samplers; the forward; drawing.

`LocalRunner` has a step's tokens when `run` returns.

    guesses     … t₇ │ g₈ g₉ g₁₀          computed together, behind the token that was drawn last
    rows of logits r₇  r₈ r₉ r₁₀          r₇ draws g₈, r₈ draws g₉, r₉ draws another token: three tokens

A row is drawn as if there were no guesses, so they change no answer. What was computed for wrong guesses is
overwritten: everything lies by position.

A grammar's masks depend only on tokens that the forward was given. So the device computes the forward while
the masks of its rows are made here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from time import perf_counter
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.asks.ask import Sampling, TokenOut
from tiercel.engine.drafting import Drafter, DraftText
from tiercel.engine.sampling import Sampler, token_logprobs
from tiercel.engine.step import Begin, Drawn, HotPlaces, PageTable, ReadOnHost, Step, StepPart
from tiercel.kernels.draw import Mask, greedy
from tiercel.models.base import DRAWN_LAST, BeforeLayer, Model, Span, at_once
from tiercel.text.grammar import Asked, Grammars, Masks, Matcher, fill_masks
from tiercel.transfer.controller import Ready
from tiercel.transfer.staging import Staged, Staging

log = logging.getLogger(__name__)

Ints = NDArray[np.int64]

NO_TAILS: Mapping[int, int] = MappingProxyType({})
"""The tails of most spans."""


class Ring:
    """The state of one running text."""

    sampler: Sampler

    def __init__(self, begin: Begin) -> None:
        self.count = len(begin.tokens)
        self.prompt_tokens = begin.prompt_tokens
        self.longest = begin.prompt_tokens + begin.sampling.max_tokens
        self.tokens: Ints = np.empty(self.longest + 1, np.int64)
        self.tokens[: self.count] = np.fromiter(begin.tokens, np.int64, self.count)
        self.pages = torch.empty(1, 0, dtype=torch.int64)  # a row for each pool comes with the first pages
        self.sparse = 0
        """How many of its pages are without a place in the second pool."""
        self.write_from = begin.write_from
        self.error: Exception | None = None
        """Why this text can not be computed."""

    def place(self, change: PageTable) -> None:
        """Apply a change of the page table. A changed table is another tensor, `Span.pages`."""
        rows = torch.tensor(change.rows, dtype=torch.int64)
        known, end = self.pages.expand(len(rows), -1), change.first + rows.shape[1]
        self.pages = torch.cat([known[:, : change.first], rows, known[:, end:]], dim=1)
        self.sparse = int((self.pages[2:] >= 0).sum())

    def span(self, part: StepPart, guesses: Sequence[int], staged: list[Staged]) -> Span:
        """What is computed. The tails that it writes are added to `staged`."""
        end = part.end + len(guesses)
        if guesses:
            self.tokens[part.end : end] = guesses
        tokens = self.tokens[part.start : end]
        tails = NO_TAILS
        if part.tails:  # there may be fewer guesses than there is room for
            due = [(boundary, kept) for boundary, kept in part.tails if boundary <= end]
            tails = {boundary: len(staged) + i for i, (boundary, _) in enumerate(due)}
            staged += [(len(staged) + i, kept) for i, (_, kept) in enumerate(due)]
        return Span(tokens, part.start, self.pages, part.ring, tails, self.write_from, self.sparse)

    def draft_text(self, part: StepPart) -> DraftText:
        return DraftText(part.ring, self.tokens[: part.end], self.pages, self.longest)

    def allowed(self, guesses: list[int]) -> list[int]:
        """The guesses up to the first one that the text's grammar forbids."""
        matcher = self.sampler.matcher
        return guesses if matcher is None else guesses[: matcher.valid(guesses)]

    def append(self, token: int) -> None:
        self.tokens[self.count] = token
        self.count += 1

    def expect(self, position: int) -> None:
        """The token there is drawn on the device. Until `append` brings it, the model reads it there."""
        self.tokens[position] = DRAWN_LAST


class Work(NamedTuple):
    """One forward, and what is drawn from its logits. Lists take less time than an object for each text."""

    drawn: Drawn
    parts: Sequence[StepPart]
    rings: list[Ring]
    """The ring of each part: another text may have its number by the time this one's token is known."""
    before: BeforeLayer
    spans: list[Span]
    rows: list[int]
    """Flat tokens of the spans whose logits are wanted."""
    asked: list[int]
    """The numbers of the parts that these rows are for."""
    guesses: Mapping[int, Sequence[int]]
    """The guesses of each part, by its number."""
    staged: list[Staged]
    """The tails that the forward writes, and where they are kept."""

    def count(self, i: int) -> int:
        """How many of the last tokens of a part need logits."""
        return _rows(self.parts[i]) + len(self.guesses.get(i, ()))

    def draws(self, i: int, end: int) -> range:
        """The rows of logits that tokens of a part are drawn from. `end`: the end of all its rows."""
        return range(end - 1 - len(self.guesses.get(i, ())), end)

    def ends(self) -> dict[int, int]:
        """For each part: the row of logits behind its last one."""
        return dict(zip(self.asked, accumulate(map(self.count, self.asked)), strict=True))

    def drawing(self) -> list[tuple[int, int, int]]:
        """(part, row of logits, position of the token that is drawn from it)."""
        return [
            (i, row, position)
            for i, end in self.ends().items()
            if self.parts[i].draws
            for position, row in enumerate(self.draws(i, end), self.parts[i].end)
        ]

    def masks(self, drawing: Sequence[tuple[int, int, int]], vocab_size: int) -> Masks | None:
        """For each row that is drawn from: which tokens may be drawn. None: all, in all rows."""
        asked: list[Asked] = []
        for place, (i, _, position) in enumerate(drawing):
            matcher = self.rings[i].sampler.matcher
            if matcher is not None and position == self.parts[i].end:  # the first row of the part
                asked.append(Asked(matcher, place, self.guesses.get(i, ())))
        if not asked:
            return None
        masks = np.full((len(drawing), -(-vocab_size // 32)), -1, np.int32)
        fill_masks(masks, asked)
        return masks

    @property
    def queued(self) -> bool:
        """Whether logits are needed only to draw tokens: then they stay on the device."""
        each = ((self.parts[i], self.rings[i]) for i in self.asked)
        return all(ring.sampler.queued and part.score_from is None for part, ring in each)

    def chosen(self, logits: Tensor, rows: list[int]) -> Tensor:
        """Rows of the logits; often all of them."""
        return logits if len(rows) == len(self.rows) else logits[rows]


class LocalRunner:
    """A model, and the rings of its running texts."""

    leaves_out = True
    """Whether a text with an error is left out of a step."""
    busy_s: Sequence[float] = ()

    def __init__(
        self,
        model: Model,
        ready: Callable[[int], Ready] | None = None,
        drafter: Drafter | None = None,
        grammars: Grammars | None = None,
        staging: Staging | None = None,
    ) -> None:
        """`ready` tells when the layers of a load may be read, by the load's number. `grammars`: those of the
        model's tokenizer, if answers may have grammars. `staging`: of the model's memory, if it has tails."""
        self.model, self.vocab_size = model, model.vocab_size
        self._ready, self._drafter, self._grammars, self._staging = ready, drafter, grammars, staging
        self._rings: dict[int, Ring] = {}

    def end(self) -> None:
        raise NotImplementedError("a runner in this process is not lost")

    restart = end

    def read_on_host(self) -> ReadOnHost:
        return ReadOnHost(*self.model.hot_numbers(), self.model.rows_staged)

    def run(self, step: Step) -> Drawn:
        work = self._take(step)
        if not work.spans:
            return work.drawn
        began_s = perf_counter()
        logits = self._forward(step, work)
        return self._drawn(work, logits, work.drawn._replace(seconds=perf_counter() - began_s))

    def _drawn(self, work: Work, logits: Tensor, drawn: Drawn) -> Drawn:
        drawing = work.drawing()
        plain = [row for i, row, _ in drawing if work.rings[i].sampler.plain]
        best = greedy(work.chosen(logits, plain)).tolist() if plain else []
        masks = work.masks(drawing, self.model.vocab_size)
        self._draw(work, logits, drawn, dict(zip(plain, best, strict=True)), by_row(drawing, masks))
        return drawn

    def _take(self, step: Step) -> Work:
        """Apply the changes of a step. Returns what is to be computed and drawn."""
        before = self._waits(step.loads)
        before(0)  # a text goes on from tails, which come with the first layer
        for change in step.changes:
            if isinstance(change, Begin):
                self._begin(change)
            elif isinstance(change, HotPlaces):
                self.model.take_hot(*change)
            else:
                self._rings[change.ring].place(change)
        rings = [self._rings[part.ring] for part in step.parts]
        began_s = perf_counter()
        guesses = self._guess(step.parts, rings)
        drawn = Drawn([None] * len(rings), {}, 0.0)
        if guesses is not None:
            guessed = {step.parts[i].ring: len(own) for i, own in guesses.items()}
            drawn = drawn._replace(guessed=guessed, draft_s=perf_counter() - began_s)
        work = Work(drawn, step.parts, rings, before, [], [], [], guesses or {}, [])
        end = 0
        for i, (part, ring) in enumerate(zip(step.parts, rings, strict=True)):
            if ring.error is not None:
                work.drawn.results[i] = ring.error
                if self.leaves_out:
                    continue
            own = work.guesses.get(i, ())
            work.spans.append(ring.span(part, own, work.staged))
            end += part.end - part.start + len(own)
            if wanted := work.count(i):
                work.asked.append(i)
                work.rows.extend(range(end - wanted, end))
        return work

    def _guess(self, parts: Sequence[StepPart], rings: Sequence[Ring]) -> dict[int, list[int]] | None:
        """Guesses for each part; None: none are wanted."""
        wanted = [i for i, part in enumerate(parts) if part.guesses and rings[i].error is None]
        if not wanted or self._drafter is None:
            return None
        try:
            made = self._drafter.guess(
                [rings[i].draft_text(parts[i]) for i in wanted], [parts[i].guesses for i in wanted]
            )
            made = [rings[i].allowed(own) for i, own in zip(wanted, made, strict=True)]
        except Exception:
            log.exception("nothing could be guessed: the step is computed without guesses")
            return {}
        return dict(zip(wanted, made, strict=True))

    def _waits(self, loads: Sequence[int]) -> BeforeLayer:
        if not loads:
            return at_once
        assert self._ready is not None, "a step has loads only where they can be waited for"
        each = [self._ready(number) for number in loads]

        def wait(layer: int) -> None:
            for load in each:
                load.wait(layer)

        return wait

    def _forward(self, step: Step, work: Work) -> Tensor:
        try:
            logits = self._compute(work)
            if self._staging is not None:
                self._staging.pour(work.staged)
            return logits
        except Exception as error:
            log.exception("a step could not be computed")
            for part in step.parts:  # the next step may be queued already: these texts are not computed there
                self._rings[part.ring].error = error
            # The frames of the forward hold its tensors. Their memory is needed, and the error is kept.
            raise error.with_traceback(None) from None

    def _compute(self, work: Work) -> Tensor:
        return self.model.forward(work.spans, work.rows, work.before)

    def _begin(self, begin: Begin) -> None:
        self._rings[begin.ring] = ring = Ring(begin)
        if self._drafter is not None:
            self._drafter.begin(begin.ring)
        prompt, output = begin.tokens[: begin.prompt_tokens], begin.tokens[begin.prompt_tokens :]
        try:
            ring.sampler = Sampler(
                begin.sampling, prompt, self.model.vocab_size, output, self._matcher(begin.sampling)
            )
            staged = list(enumerate(kept for _, kept in begin.tails))
            if self._staging is not None:
                self._staging.collect(staged)
            self.model.resume(begin.ring, [(boundary, i) for i, (boundary, _) in enumerate(begin.tails)])
        except Exception as error:  # noqa: BLE001 - whatever a model raises: this text ends
            log.exception("a text could not be resumed")
            ring.error = error

    def _matcher(self, sampling: Sampling) -> Matcher | None:
        if sampling.grammar is None:
            return None
        assert self._grammars is not None, "the engine has checked the grammar with them"
        return self._grammars.matcher(sampling.grammar, sampling.stop_tokens)

    def _draw(
        self,
        work: Work,
        logits: Tensor,
        drawn: Drawn,
        known: Mapping[int, int],
        masks: Mapping[int, Mask],
    ) -> None:
        """`known`: tokens that were drawn already, by row of logits; -1: the best logit is no number. An
        error in one row ends only its own text."""
        if not work.queued:
            logits = logits.cpu()  # all rows in one copy
        for i, end in work.ends().items():
            part, ring, guesses = work.parts[i], work.rings[i], work.guesses.get(i, ())
            outs: list[TokenOut] = []
            try:
                if part.score_from is not None:
                    drawn.scores[part.ring] = _scores(part, ring, logits[end - _rows(part) : end])
                if not part.draws:
                    continue
                for row, guess in zip(work.draws(i, end), (*guesses, None), strict=True):
                    token = known.get(row, -1)
                    if token < 0:
                        out = ring.sampler.draw(logits[row], masks.get(row))
                    elif ring.sampler.plain:  # most of the time
                        out = TokenOut(token)
                    else:
                        out = ring.sampler.take(token, None if work.queued else logits[row].numpy())
                    outs.append(out)
                    ring.append(out.token)
                    if out.token != guess:
                        break
                drawn.results[i] = tuple(outs)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one row is that text's
                ring.error = error  # told by the next step, if there are tokens before it
                drawn.results[i] = tuple(outs) or error


def by_row(drawing: Sequence[tuple[int, int, int]], masks: Masks | None) -> dict[int, Mask]:
    return {} if masks is None else {row: mask for (_, row, _), mask in zip(drawing, masks, strict=True)}


def _rows(part: StepPart) -> int:
    """How many of the part's last tokens need logits: those that are scored, and the last one if it draws."""
    if part.score_from is None:
        return int(part.draws)
    return max(int(part.draws), part.end - max(part.start, part.score_from))


def _scores(part: StepPart, ring: Ring, logits: Tensor) -> list[TokenOut]:
    """Logprobs of the prompt: row i tells how likely the token after it was."""
    start = part.end - len(logits)
    following: list[int] = ring.tokens[start + 1 : min(part.end + 1, ring.prompt_tokens)].tolist()
    return token_logprobs(logits[: len(following)], following, ring.sampler.sampling.logprobs or 0)
