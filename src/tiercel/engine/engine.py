"""The engine: asks in, text out. A scheduler decides, a runner computes, and tokens become text here.

    ask ──► scheduler ── Step ──► runner ── Drawn ──► scheduler ── Outcome ──► text ──► Delta

`loop.py` drives it, one step after the other, or with the next step decided while this one is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from tiercel.asks.ask import (
    Ask,
    Delta,
    EngineStats,
    Explanation,
    Finish,
    QueueStats,
    check_sampling,
)
from tiercel.cache import TieredCache
from tiercel.engine.config import EngineConfig
from tiercel.engine.scheduler import Scheduler
from tiercel.engine.step import Runner
from tiercel.engine.task import Outcome
from tiercel.errors import AskError, GrammarError, RunnerLost
from tiercel.text.stream import TextStream
from tiercel.text.text import Text

log = logging.getLogger(__name__)


class Engine:
    """Answers asks with one model and its cache. One thread drives it. `runner`: has the model."""

    def __init__(
        self,
        runner: Runner,
        cache: TieredCache,
        text: Text,
        config: EngineConfig,
        clock: Callable[[], float] = monotonic,
        *,
        device_use: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`device_use`: bytes of the device's memory by what they are used for now, if that is known."""
        self.scheduler = Scheduler(cache, config, clock)
        self.runner, self.cache, self.text, self.config = runner, cache, text, config
        self.vocab_size, self._device_use = runner.vocab_size, device_use
        self.page_tokens, self.context_tokens = cache.spec.page_tokens, self.scheduler.context_tokens
        self.tasks, self.counters = self.scheduler.tasks, self.scheduler.counters

    def check(self, ask: Ask) -> None:
        """Raises an error that names what is wrong if an ask can never be served."""
        check_sampling(ask.sampling, self.vocab_size)
        if ask.sampling.grammar is not None:
            try:
                self.text.grammars.check(ask.sampling.grammar)
            except GrammarError as error:
                raise AskError("grammar", ask.sampling.grammar.source, str(error)) from error
        if not ask.prompt:
            raise AskError("prompt", ask.prompt, "has no tokens")
        worst = int(ask.prompt_array.max()), int(ask.prompt_array.min())
        if worst[0] >= self.vocab_size or worst[1] < 0:
            bad = worst[0] if worst[1] >= 0 else worst[1]
            raise AskError("prompt", bad, f"is no token: the vocabulary has {self.vocab_size}")
        if len(ask.prompt) + ask.sampling.max_tokens > self.context_tokens:
            asked = f"{len(ask.prompt)} tokens of prompt and {ask.sampling.max_tokens} of answer"
            raise AskError("max_tokens", ask.sampling.max_tokens, f"{asked}; {self.context_tokens} fit")
        if ask.request_id in self.tasks:
            raise AskError("request_id", ask.request_id, "is in use")

    def add(self, ask: Ask) -> None:
        """Queue an ask. Raises `AskError` or `QueueFull`, and then nothing has happened."""
        self.check(ask)
        sampling = ask.sampling
        stream = TextStream(self.text, sampling.stop, sampling.keep_stop, sampling.skip_special_tokens)
        endless = sampling.ignore_eos and sampling.grammar is None
        self.scheduler.add(ask, stream, sampling.stop_tokens | (frozenset() if endless else self.text.eos))

    def abort(self, request_id: str) -> None:
        """End a request, at any moment. If it is not known any more, nothing happens."""
        self.scheduler.abort(request_id)

    def lost(self, error: RunnerLost) -> list[Outcome]:
        """The runner is gone, with all that its device held: start it again. Texts of the steps under way
        end with the error, other running ones begin again, and what the host has stays."""
        log.error("%s; it is started again", error)
        self.runner.end()
        outcomes = self.scheduler.lost(error)
        self.runner.restart()
        return outcomes

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def flush(self) -> int:
        """Forget what is cached. Returns how many pages stay because they are in use."""
        return self.cache.flush()

    def explain(self, request_id: str) -> Explanation | None:
        """What a request reused. None: the request is not known, or forgotten."""
        known = self.scheduler.explained.get(request_id)
        if known is None:
            return None
        share, guesses = self.cache.identity.share, known.guesses
        return Explanation(known.reuse, share, guesses.accept_length, known.times, known.sparse_pages)

    def stats(self) -> EngineStats:
        own = self.scheduler
        tokens = sum(len(task.tokens) for task in self.tasks.values())
        queue = QueueStats(len(own.waiting), len(own.loading), len(own.running), tokens)
        lengths, cache = own.guessing.accept_length(), {**vars(self.cache.stats())}
        if cache["sparse"] is not None:
            cache["sparse"] |= self._read_on_host()
        return EngineStats(
            **cache,
            queue=queue,
            engine=dict(self.counters),
            accept_length=lengths,
            stages={str(stage): {"busy_s": busy_s} for stage, busy_s in enumerate(self.runner.busy_s)},
            times=own.times.stats(),
            device_use=self._device_use(),
        )

    def _read_on_host(self) -> dict[str, int]:
        """What the model has read of sparse pages: entries that hot rows had, or had not, and bytes."""
        spec, read = self.cache.spec, self.runner.read_on_host()
        (stream,) = spec.pools[1]
        return {
            "entries_hit": read.looked_up - read.missed,
            "entries_missed": read.missed,
            "bytes_gathered": read.missed * stream.bytes_per_entry,
            "bytes_staged": read.rows_staged * spec.row_bytes(stream),
        }

    def emit(self, outcomes: Sequence[Outcome]) -> list[Delta]:
        """Turn outcomes into Deltas. A text that fails here ends with an error; nothing follows it."""
        deltas: list[Delta] = []
        for outcome in outcomes:
            task = outcome.task
            if task.untold:
                continue
            try:
                delta = _delta(outcome)
                if deltas and deltas[-1].request_id == delta.request_id:  # tokens of one step
                    delta = _joined(deltas.pop(), delta)
                deltas.append(delta)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one text is its own
                log.error("an answer can not be told", exc_info=error, extra=task.named)
                task.untold = True
                self.abort(task.ask.request_id)  # at the next plan: a step may be computing it
                deltas.append(Delta(task.ask.request_id, task.usage, finish=Finish.ERROR, error=str(error)))
        return deltas


def _delta(outcome: Outcome) -> Delta:
    task, token, text, prompt, finish, stopped_by, error = outcome
    if text is None:
        text = "" if token is None or stopped_by is not None else task.stream.decode(token.token)
        if finish is not None:
            text += task.stream.finish()
    tokens = () if token is None else (token,)
    return Delta(task.ask.request_id, task.usage, tokens, text, prompt, finish, stopped_by, error)


def _joined(first: Delta, then: Delta) -> Delta:
    tokens, prompt = first.tokens + then.tokens, first.prompt + then.prompt
    return then._replace(tokens=tokens, text=first.text + then.text, prompt=prompt)
