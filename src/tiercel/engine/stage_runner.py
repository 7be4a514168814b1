"""Runs steps on the layers of one stage, in turn with the processes of the other stages.

Every stage runs every step: it has the tokens and page tables of all rings, and computes its own layers. The
last stage makes the guesses and draws the tokens, and sends them to the other stages. A step may come before
the one before it has ended: then it begins as soon as the tokens that it needs are there.

A step is computed in pieces (`engine.pieces`), so that no stage waits for all of the stage before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tiercel.asks.ask import Sampling
from tiercel.engine.pieces import PIECE_TOKENS, Piece, pieces_of
from tiercel.engine.runner import LocalRunner, Ring, Work
from tiercel.engine.sampling import Sampler
from tiercel.engine.stage_messages import Reply, StepOrder, told
from tiercel.engine.step import Begin, Drawn, ReadOnHost, Step, StepPart
from tiercel.models.base import NO_GUESS, Model

PLAIN = Sampling(1, temperature=0.0)


class Links:
    """The other stages. Everything is sent and received in the order of the calls."""

    def __init__(self, number: int, of: int, wire: str, meeting: str) -> None:
        self.number, self.of = number, of
        dist.init_process_group(wire, init_method=f"file://{meeting}", rank=number, world_size=of)
        self._tokens = dist.new_group(backend="gloo")
        self._through_host = wire == "gloo"
        self._sent = deque[tuple[Any, Tensor]]()
        """Tensors on their way: they must stay until they have been received."""

    def take(self, x: Tensor) -> Tensor:
        """What the stage before sends. `x`: room for it."""
        here = x.cpu() if self._through_host else x
        self._receive(here, self.number - 1)
        return here.to(x.device)

    def give(self, x: Tensor) -> None:
        """Send to the next stage. Does not wait for it."""
        x = (x.cpu() if self._through_host else x).contiguous()
        self._keep(dist.isend(x, self.number + 1), x)

    def share(self, tokens: Tensor) -> Tensor:
        """Tokens of the last stage, for every stage. They are in host memory."""
        last = self.of - 1
        if self.number != last:
            self._receive(tokens, last, self._tokens)
        else:
            for stage in range(last):
                self._keep(dist.isend(tokens, stage, self._tokens), tokens)
        return tokens

    def _receive(self, x: Tensor, stage: int, group: Any = None) -> None:
        try:
            dist.recv(x, stage, group)
        except RuntimeError as error:  # no step can be run any more: the scheduler's process starts all again
            raise SystemExit(f"stage {self.number} ends: stage {stage} sends nothing any more") from error

    def _keep(self, sent: Any, x: Tensor) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        self._sent.append((sent, x))


class Drawing(NamedTuple):
    """Texts for which the last stage draws tokens in one piece of a step."""

    rings: list[Ring]
    most: int
    """How many tokens a text may draw."""


class StageRunner(LocalRunner):
    """Runs this stage's layers. No text is left out of a step because of an error: all stages compute the
    same spans. What is wrong with it is told in the reply. If no token could be drawn for a text, it goes on
    with token 0, because its next step may be on its way; what it draws is dropped."""

    leaves_out = False

    def __init__(self, model: Model, links: Links, *rest: Any) -> None:
        super().__init__(model, *rest)
        self._links, self._last = links, model.stage.ends
        self._errors: dict[int, Exception] = {}
        self._untold = deque[Drawing]()
        """Draws of earlier pieces, whose tokens have not been received yet."""
        self._busy_s = 0.0

    def reply(self, order: StepOrder, came_s: float) -> Reply:
        """Run a step. Whatever is raised here ends this process; an error of the forward is told."""
        began_s, self._busy_s, drawn, failed = monotonic(), 0.0, None, None
        try:
            drawn = self.run(order.step)
        except ForwardError as error:
            failed = told(error.cause)
        if drawn is not None and self._last:
            results = [told(each) if isinstance(each, Exception) else each for each in drawn.results]
            drawn = drawn._replace(results=results, guessed=dict(drawn.guessed))
        errors = {i: told(error) for i, error in self._errors.items()}
        read = ReadOnHost() if self.model.last.is_cuda else self.read_on_host()
        own, times = drawn if self._last else None, (came_s, began_s, monotonic(), self._busy_s)
        return Reply(order.number, self._links.number, own, errors, failed, read, *times)

    def run(self, step: Step) -> Drawn:
        work = self._take(step)
        if not work.spans:
            return work.drawn
        began_s = monotonic()
        self._forward(step, work)  # tokens are drawn on the way
        return work.drawn._replace(seconds=monotonic() - began_s)

    def _begin(self, begin: Begin) -> None:
        if not self._last:  # it draws nothing, and needs no grammar
            begin = begin._replace(sampling=Sampling(begin.sampling.max_tokens, temperature=0.0))
        super()._begin(begin)
        ring = self._rings[begin.ring]
        if ring.error is not None:  # it is computed and drawn from all the same
            ring.sampler = Sampler(PLAIN, (), self.model.vocab_size)

    def _take(self, step: Step) -> Work:
        work = super()._take(step)
        self._errors = {i: each for i, each in enumerate(work.drawn.results) if isinstance(each, Exception)}
        return work

    def _guess(self, parts: Sequence[StepPart], rings: Sequence[Any]) -> dict[int, list[int]] | None:
        most = max((part.guesses for part in parts), default=0)
        if not most:
            return None
        self._learn(len(self._untold))
        rows = torch.full((len(parts), most), NO_GUESS)
        for i, own in ((super()._guess(parts, rings) or {}) if self._last else {}).items():
            rows[i, : len(own)] = torch.tensor(own, dtype=torch.int64)
        rows = self._links.share(rows)
        return {i: [g for g in row if g != NO_GUESS] for i, row in enumerate(rows.tolist()) if row[0] >= 0}

    def _compute(self, work: Work) -> Tensor:
        """Compute the pieces of a step, and draw from each."""
        error: Exception | None = None
        earlier, ends = len(self._untold), deque(work.ends().items())
        logits, rows = list[Tensor](), 0
        for piece in self._pieces(work):
            earlier -= self._learn_of(work.rings[piece.first : piece.first + len(piece.spans)])
            room = self.model.room_for(sum(len(span.tokens) for span in piece.spans))
            x = None if self.model.stage.begins else self._links.take(room)
            began_s = monotonic()
            if error is None:
                try:
                    y = self.model.forward(piece.spans, piece.rows, work.before, x)
                except Exception as raised:  # noqa: BLE001 - whatever a model raises: its texts end
                    error = raised
            if not self._last:  # the next stage waits for it: its texts end there too
                self._links.give(y if error is None else room.zero_())
            elif error is None:
                logits.append(y)
            rows += len(piece.rows)
            ended = list[int]()
            while ends and ends[0][1] <= rows:
                ended.append(ends.popleft()[0])
            if ended:
                if self._last and error is None:
                    count = sum(map(work.count, ended))
                    every = torch.cat(logits)
                    logits = [every[count:]]
                    own = work._replace(asked=ended, rows=[*range(count)])
                    self._drawn(own, every[:count], work.drawn)
                self._tell(work, ended)
            self._busy_s += monotonic() - began_s
        self._learn(earlier)
        if error is not None:
            raise ForwardError(error)
        return torch.empty(0)

    def _pieces(self, work: Work) -> list[Piece]:
        """One for each stage. A step with guesses ends before the next one comes: its pieces must be worth
        that the last stage begins late, and the first one ends early."""
        count = self._links.of
        if any(part.guesses for part in work.parts):
            count = min(count, sum(len(span.tokens) for span in work.spans) // PIECE_TOKENS)
        return pieces_of(work.spans, work.rows, count)

    # Drawn tokens, from the last stage to the others

    def _tell(self, work: Work, ended: Sequence[int]) -> None:
        """These parts have been computed to their ends: tell what was drawn for them, or wait to be told."""
        drawing = [i for i in ended if work.parts[i].draws]
        most = 1 + max((work.parts[i].guesses for i in drawing), default=0)
        if not drawing:
            return
        if not self._last:
            self._untold.append(Drawing([work.rings[i] for i in drawing], most))
            return
        tokens = torch.full((len(drawing), most), NO_GUESS)
        for row, i in zip(tokens, drawing, strict=True):
            outs = work.drawn.results[i]
            own = [out.token for out in outs] if isinstance(outs, tuple) else [0]
            if not isinstance(outs, tuple):
                work.rings[i].append(0)
            row[: len(own)] = torch.tensor(own)
        self._links.share(tokens)

    def _learn_of(self, rings: Sequence[Ring]) -> int:
        """Learn the last tokens of these texts. Returns how many draws have been learned."""
        known = 0
        for count, drawing in enumerate(self._untold, 1):
            if not set(rings).isdisjoint(drawing.rings):
                known = count
        self._learn(known)
        return known

    def _learn(self, count: int) -> None:
        """Receive the tokens of so many draws."""
        for _ in range(count):
            rings, most = self._untold.popleft()
            rows = self._links.share(torch.empty(len(rings), most, dtype=torch.int64))
            for ring, tokens in zip(rings, rows.tolist(), strict=True):
                for token in tokens:
                    if token != NO_GUESS:
                        ring.append(token)


class ForwardError(Exception):
    """A forward could not be computed, and the stages still agree on what is next."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(repr(cause))
        self.cause = cause
