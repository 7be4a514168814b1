"""Speculation in whole engines, for `benchmarks.speculate`: tokens per second over those without guesses, and
accept lengths of texts whose beginning comes from a tier."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

from tests.engine.drive import Always

from benchmarks.gpu_engines import RunningEngine
from tiercel.asks.ask import Ask, Sampling
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.models.draft_model import DraftModel

Prompts = Sequence[list[int]]

MIB, PAGE = 2**20, 128


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    texts: int = 16
    new: Mapping[int, int] = field(default_factory=lambda: {1: 192, 16: 96, 64: 64})
    """Tokens of each answer, by batch."""
    rounds: int = 5


QUICK = Sizes(texts=1, new={1: 12}, rounds=1)
TURNS = {"cpu": 8, "cuda": 32}
"""Steps. A device computes one step of an engine whose turn is over while the other one begins."""
FIRST = 8
"""Tokens after a resume that count: a draft that lost its part of the cache recovers soon."""


def make_engine(speculate: str, device: str, *, host_mib: int = 0, store: str | None = None) -> RunningEngine:
    build = Build(device=device, device_bytes=128 * MIB, store=store)
    config = EngineConfig(CacheConfig(host_bytes=host_mib * MIB), running_max=64, speculate=speculate)
    return RunningEngine(open_engine(build, config)[0])


class Answering:
    """So many texts at once on an engine: tokens and seconds from the moment all have a token until the
    first of them has all. What earlier rounds left in the cache is used."""

    def __init__(
        self, running: RunningEngine, prompts: Prompts, batch: int, new: int, *, sampled: bool
    ) -> None:
        running.end_all()
        self._running, self.tokens, self.seconds, self.ended = running, 0, 0.0, False
        names = set[str]()
        for i in range(batch):
            sampling = Sampling(new, temperature=1.0 if sampled else 0.0, seed=i, ignore_eos=True)
            names.add(str(i))
            running.engine.add(Ask(str(i), tuple(prompts[i % len(prompts)]), sampling))
        while names:
            names.difference_update(delta.request_id for delta in running.step() if delta.tokens)

    def go_on(self, steps: int) -> None:
        self._running.engine.scheduler.guessing.paused()  # the other engine ran
        start = time.perf_counter()
        while steps and not self.ended:
            deltas, steps = self._running.step(), steps - 1
            self.tokens += sum(len(delta.tokens) for delta in deltas)
            self.ended = any(delta.finish for delta in deltas)
        self.seconds += time.perf_counter() - start


def speedup(
    pair: Sequence[RunningEngine], prompts: Prompts, batch: int, new: int, *, sampled: bool, turn: int
) -> float:
    """Tokens per second of the first engine over the second's. They run in turns of a few steps: other work
    on the machine slows both."""
    both = [Answering(each, prompts, batch, new, sampled=sampled) for each in pair]
    while not any(each.ended for each in both):
        for each in both:
            each.go_on(turn)
    first, second = (each.tokens / each.seconds for each in both)
    return first / second


def speedups(
    prompts: dict[str, Prompts], vocabulary: int, device: str, kinds: Sequence[str], sizes: Sizes
) -> dict[str, float]:
    """Over the same without guesses; medians of some rounds, after one that counts not. `random`: sampled
    behind noise."""
    noise = Random(0)
    prompts = {**prompts, "random": [[noise.randrange(vocabulary) for _ in range(256)] for _ in range(64)]}
    plain, found = make_engine("off", device), dict[str, float]()
    for kind in kinds:
        guessing = make_engine(kind, device)
        for text, own in list(prompts.items())[-2 if sizes is QUICK else 0 :]:
            for batch, new in sizes.new.items():
                how = {"sampled": text == "random", "turn": TURNS[device]}
                rates = [
                    speedup((guessing, plain), own, batch, new, **how)
                    for _ in range(sizes.rounds + (sizes is not QUICK))
                ]
                found[f"speedup.{kind}.{text}.batch{batch}"] = statistics.median(rates[-sizes.rounds :])
        guessing.close()
    plain.close()
    return found


def accept_after(prompts: Prompts, kind: str, device: str) -> dict[str, float]:
    """Accept lengths over the first tokens after a resume from each tier, over those of the same texts
    computed; and from the host without what the draft keeps in tails. A text is two pages and two tokens."""
    prompts = [prompt[: 2 * PAGE + 2] for prompt in prompts]
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store?size=1GiB"
        lengths = dict[str, float]()
        running = make_engine(kind, device, host_mib=256, store=store)
        cold = _first(running, prompts)
        lengths["accept_after.{}.device"] = _first(running, prompts)
        running.empty_device()
        lengths["accept_after.{}.host"] = _first(running, prompts)
        if device == "cpu":  # elsewhere restoring is recorded
            running.empty_device()
            draft = running.engine.runner.model.draft  # type: ignore[attr-defined]
            lengths["accept_without_draft_restore.{}"] = _without_restore(draft, running, prompts)
        running.rest()
        running.close()
        again = make_engine(kind, device, host_mib=256, store=store)
        lengths["accept_after.{}.store"] = _first(again, prompts)
        again.close()
    return {name.format(kind): length / cold for name, length in lengths.items()}


def _without_restore(draft: Any, running: RunningEngine, prompts: Prompts) -> float:
    owner, name = (draft.model, "resume") if isinstance(draft, DraftModel) else (draft, "restore")
    with patch.object(owner, name, lambda *_: None):
        return _first(running, prompts)


def _first(running: RunningEngine, prompts: Prompts) -> float:
    """Tokens per step of the first tokens of each text."""
    guessing = running.engine.scheduler.guessing
    guessing.policy = Always(2)
    guessing.first_steps.clear()
    guessing.first_tokens.clear()
    for prompt in prompts:  # one after the other: every step has room for guesses
        running.add(prompt, FIRST + 4)
        while running.engine.tasks:
            running.step()
    running.rest()
    return sum(guessing.first_tokens.values()) / sum(guessing.first_steps.values())
