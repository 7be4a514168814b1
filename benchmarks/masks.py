"""What grammars cost: `python -m benchmarks.masks [--json] [--quick] [--device cuda]
[--model v4-flash-8e]`.

    step_ratio.*      time of a decode step of 16 texts with grammars, over the same without
    step_ms           of the texts without grammars
    vocabulary.*      llguidance alone, at 129,280 tokens: to compile a schema, one mask, 16 masks, to take a
                      token

Two engines run in turns of a few steps, one with grammars and one without, because other work on the machine
slows both; the slowest tenth of the steps does not count. `json`: objects with strings and numbers.
`choices`: objects with one of a few values. The model v4-flash-8e has random weights and a vocabulary of
129,280, for which words of Python's library are taken.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_engines import RunningEngine
from benchmarks.machine import describe, parser_of, tell
from tiercel.asks.ask import Ask, Sampling
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.models.families import EMBEDDED
from tiercel.text.grammar import Asked, Grammar, Grammars, fill_masks, json_schema

BATCH, TURN, NEW, ROUNDS, PROMPT = 16, 4, 120, 3, 64
VOCABULARY = 129_280
"""As many tokens as DeepSeek V4 has."""


def endless(**properties: Any) -> Grammar:
    """Objects with these properties, more of them than an answer has room for."""
    item = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return Grammar(json_schema({"type": "array", "items": item, "minItems": 10_000}))


GRAMMARS = {
    "json": endless(
        name={"type": "string"}, age={"type": "integer"}, notes={"type": "array", "items": {"type": "string"}}
    ),
    "choices": endless(city={"enum": ["Paris", "Rome", "Oslo", "Lima"]}, warm={"type": "boolean"}),
}


class Vocabulary:
    """So many tokens: bytes, and the words of Python's library and pieces of them."""

    def __init__(self, size: int) -> None:
        self.token_ids, end = size, size - 1
        self.eos = self.control = frozenset({end})
        ids: dict[bytes, int] = {bytes([byte]): byte for byte in range(256)}
        for piece in self._pieces():
            if len(ids) == end:
                break
            ids.setdefault(piece.encode(), len(ids))
        assert len(ids) == end, len(ids)
        self._ids, self._tokens = ids, [*ids, b""]

    @staticmethod
    def _pieces() -> Iterator[str]:
        for file in sorted(Path(inspect.__file__).parent.rglob("*.py")):
            for word in re.findall(r" ?[^\W_]+| ?[^\w\s]+|\s+", file.read_text(errors="ignore")):
                yield from itertools.accumulate(word[:16])

    def piece_bytes(self, token: int) -> bytes:
        return self._tokens[token]

    def tokens_within(self, text: str) -> list[int]:
        """The longest token first."""
        raw, tokens = text.encode(), []
        while raw:
            length = next(length for length in range(min(16, len(raw)), 0, -1) if raw[:length] in self._ids)
            tokens.append(self._ids[raw[:length]])
            raw = raw[length:]
        return tokens


def masks(vocabulary: Vocabulary, answers: int) -> dict[str, float]:
    """llguidance alone. A mask is of any token of a typical answer."""
    grammar = GRAMMARS["json"]
    answer = [
        {"name": "Ada Lovelace", "age": 36, "notes": ["the first", "wrote on analytical engines"]}
    ] * answers
    tokens = vocabulary.tokens_within(json.dumps(answer, indent=1)[:-2])
    first = time.perf_counter()
    grammars = Grammars(vocabulary)  # type: ignore[arg-type]
    grammars.check(Grammar(json_schema({"type": "object"})))
    ready = time.perf_counter()
    grammars.check(grammar)
    compiled = time.perf_counter()
    own = [grammars.matcher(grammar, vocabulary.eos) for _ in range(BATCH)]
    found = np.empty((BATCH, own[0].words), np.int32)
    one, many, taken = list[float](), list[float](), list[float]()
    for token in tokens:
        starts = [time.perf_counter()]
        fill_masks(found, [Asked(own[0], 0)])
        starts.append(time.perf_counter())
        fill_masks(found, [Asked(matcher, row) for row, matcher in enumerate(own)])
        starts.append(time.perf_counter())
        for matcher in own:
            matcher.take(token)
        starts.append(time.perf_counter())
        for kept, (begin, end) in zip((one, many, taken), itertools.pairwise(starts), strict=True):
            kept.append(1e6 * (end - begin))
    return {
        "vocabulary.tokenizer_ms": 1e3 * (ready - first),
        "vocabulary.compile_ms": 1e3 * (compiled - ready),
        "vocabulary.mask_us_mean": statistics.mean(one),
        "vocabulary.mask_us_median": statistics.median(one),
        "vocabulary.masks_of_16_us_mean": statistics.mean(many),
        "vocabulary.masks_of_16_us_median": statistics.median(many),
        "vocabulary.take_us": statistics.mean(taken) / BATCH,
    }


class Answering:
    """Sixteen texts at once, and the milliseconds of each of their steps."""

    def __init__(self, running: RunningEngine, grammar: Grammar | None, new: int) -> None:
        running.end_all()
        self._running, self.steps_ms, self.ended = running, list[float](), False
        missing = set[str]()
        for i in range(BATCH):
            sampling = Sampling(new, temperature=1.0, seed=i, ignore_eos=True, grammar=grammar)
            prompt = tuple((i * 977 + at * 31) % 3000 + 300 for at in range(PROMPT))
            running.engine.add(Ask(f"mask-{i}", prompt, sampling))
            missing.add(f"mask-{i}")
        while missing:
            missing.difference_update(delta.request_id for delta in running.step() if delta.tokens)

    def go_on(self, steps: int) -> None:
        self._running.step()  # the other engine ran
        for _ in range(steps):
            start = time.perf_counter()
            deltas = self._running.step()
            self.steps_ms.append(1e3 * (time.perf_counter() - start))
            self.ended = self.ended or any(delta.finish for delta in deltas)


def step_times(pair: Sequence[RunningEngine], grammar: Grammar, new: int) -> tuple[float, float]:
    """Milliseconds of a step with grammars, and of one without."""
    both = [Answering(pair[0], grammar, new), Answering(pair[1], None, new)]
    while not any(each.ended for each in both):
        for each in both:
            each.go_on(TURN)
    held, free = (statistics.mean(sorted(each.steps_ms)[: -len(each.steps_ms) // 10]) for each in both)
    return held, free


def measure(model: str, device: str, *, quick: bool = False) -> dict[str, Any]:
    vocabulary = Vocabulary(4096 if quick and model == EMBEDDED else VOCABULARY)
    figures: dict[str, Any] = masks(vocabulary, 1 if quick else 4)
    config = EngineConfig(CacheConfig(), running_max=BATCH, speculate="off")
    pair = [RunningEngine(open_engine(Build(model=model, device=device), config)[0]) for _ in range(2)]
    if model != EMBEDDED:
        for running in pair:
            engine = running.engine
            grammars = Grammars(vocabulary)  # type: ignore[arg-type]
            engine.text.grammars = engine.runner._grammars = grammars  # type: ignore[attr-defined]
    for name, grammar in GRAMMARS.items():
        new = 2 * TURN if quick else NEW
        rounds = [step_times(pair, grammar, new) for _ in range(1 if quick else ROUNDS + 1)][-ROUNDS:]
        figures[f"step_ratio.{name}"] = statistics.median(held / free for held, free in rounds)
        figures["step_ms"] = statistics.median(free for _, free in rounds)
    for running in pair:
        running.close()
    return {"model": model, "device": device, **figures, "machine": describe()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default=EMBEDDED)
    options = parser.parse_args()
    figures = measure(options.model, options.device, quick=options.quick)
    tell(figures, as_json=options.json)


if __name__ == "__main__":
    main()
