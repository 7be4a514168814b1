"""Runs steps on a device that queues them: tokens are drawn there, and the next step reads them there, before
they are known here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tiercel.asks.ask import TokenOut
from tiercel.cache import TieredCache
from tiercel.engine.config import EngineConfig
from tiercel.engine.drafting import make_drafter
from tiercel.engine.runner import LocalRunner, Work, by_row
from tiercel.engine.step import Drawn, Step, failing
from tiercel.errors import LogitsError, TiercelError
from tiercel.kernels.draw import Draw
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import Model
from tiercel.text.grammar import Masks
from tiercel.text.text import Text
from tiercel.transfer.staging import Staging


class QueueRunner(LocalRunner):
    """Queues steps on the model's device, which draws their tokens. A step is waited for here if it has
    guesses, if a sampler adjusts logits, or if logprobs are wanted."""

    _before: Callable[[], object] = staticmethod(lambda: None)
    """Takes the tokens of the last step that was queued."""

    def run(self, step: Step) -> Drawn:
        return self.start(step)()

    def start(self, step: Step) -> Callable[[], Drawn]:
        """Queue a step. The returned function waits for its tokens; call them in the order of the steps."""
        if any(part.guesses for part in step.parts):
            self._before()  # the drafter must know the tokens
        work = self._take(step)
        if not work.spans:
            return lambda: work.drawn
        clock = _Clock(self.model.last.device)
        try:
            logits = self._forward(step, work)
        except Exception as error:  # noqa: BLE001 - the result raises it
            return failing(error)
        rings, results, drawing = work.rings, work.drawn.results, work.drawing()
        if any(rings[i].sampler.matcher for i, _, _ in drawing):
            self._before()  # their grammars go on from its tokens
        masks = work.masks(drawing, self.model.vocab_size)
        tokens = self._queue_draws(work, drawing, logits, masks)
        stopped = clock.mark()
        if any(work.guesses.values()) or not work.queued:
            self._before()  # its tokens come first
            drawn = work.drawn._replace(seconds=clock.stop(stopped))
            each = zip(drawing, tokens.tolist(), strict=True)
            known = {row: token for (i, row, _), token in each if rings[i].sampler.raw}
            self._draw(work, logits, drawn, known, by_row(drawing, masks))
            return lambda: drawn
        for i, _, position in drawing:
            rings[i].expect(position)

        @cache
        def result() -> Drawn:
            seconds = clock.stop(stopped)
            for (i, _, _), token in zip(drawing, tokens.tolist(), strict=True):
                ring = rings[i]
                try:
                    if token < 0:
                        raise LogitsError("the best of the logits is no number")
                    if ring.sampler.matcher is not None:
                        ring.sampler.matcher.take(token)
                except TiercelError as error:
                    results[i] = ring.error = error
                    continue
                ring.append(token)
                results[i] = (TokenOut(token),)
            return work.drawn._replace(seconds=seconds)

        self._before = result
        return result

    def _queue_draws(
        self, work: Work, drawing: Sequence[tuple[int, int, int]], logits: Tensor, masks: Masks | None
    ) -> Tensor:
        """Draw a token from each of these rows, on the device, and queue their copy to the host."""
        draws: list[Draw] | None = None
        if not all(work.rings[i].sampler.greedy for i, _, _ in drawing):
            each = ((work.rings[i], position) for i, _, position in drawing)
            draws = [ring.sampler.how(position - ring.prompt_tokens) for ring, position in each]
        logits = work.chosen(logits, [row for _, row, _ in drawing])
        drawn = self.model.draw(logits, [work.parts[i].ring for i, _, _ in drawing], draws, masks)
        host = torch.empty(len(drawing), dtype=torch.int64, pin_memory=drawn.is_cuda)
        return host.copy_(drawn, non_blocking=True)


def make_runner(model: Model, cache: TieredCache, text: Text, config: EngineConfig) -> LocalRunner:
    """The runner of a model that is in this process, on the device memory of a cache."""
    ready = cache.controller.ready if cache.controller else None
    drafter = make_drafter(config.speculate, model, cache.spec.page_tokens)
    memory = cache.device
    staging = Staging(memory) if isinstance(memory, DeviceMemory) and memory.tails else None
    kind = QueueRunner if model.last.is_cuda else LocalRunner
    return kind(model, ready, drafter, text.grammars, staging)


class _Clock:
    """The time of a step, on the device or on this CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._start = self.mark()

    def mark(self) -> Any:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self, mark: Any) -> float:
        """Wait for a mark. Returns the seconds until then."""
        if not self._cuda:
            return float(mark - self._start)
        mark.synchronize()
        return float(self._start.elapsed_time(mark)) / 1e3
