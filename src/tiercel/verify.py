"""Checks on a model that the tiers change nothing: the same conversations, cold and with every tier forced.

    cold      nothing is reused: every prompt is computed from its first token
    device    everything fits on the device
    host      the device holds hardly more than one conversation, so the others come back from the host
    store     another engine, started on the store that the host run has written
    replay    each answer again as part of a prompt: its tokens were decoded, now they are prefilled

`verify_sparse` has two runs: cold, and with texts whose selected entries are read on the host.

Conversations branch: a few beginnings, each continued in several ways, over several turns. All runs get the
texts of the cold run, so a difference shows where it arises and does not spread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

from tiercel.asks.ask import Answer, Ask, Sampling
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.engine.engine import Engine
from tiercel.engine.offline import answer_all
from tiercel.models.families import folder_of
from tiercel.progress import progress
from tiercel.spec.identity import BITS

GROUPS, BRANCHES, TURNS, ANSWER_TOKENS = 3, 3, 3, 12
EXAMS, FACTS = 6, 4
STORE_WAIT_S = 60.0

Done = Callable[[int], object]
"""Is told how many more texts were computed."""
Exam = tuple[list[int], list[int], list[int]]
"""Context, question, answer."""


@dataclass(frozen=True)
class Report:
    """How far the tiers changed anything. If something is not zero or not equal, something is broken."""

    kl: float
    """Mean of exp(d) - 1 - d over answers' tokens, d the difference of logprobs; the largest of all runs."""
    max_abs_dlogprob: float
    tokens_equal: bool
    recall: Mapping[str, float | None]
    cached_tokens: Mapping[str, int]
    """Tokens of prompts that each tier supplied. Of `verify_sparse`: tokens in pages that became sparse."""
    share: str = BITS
    """With `numbers` a store may hold other kernels' pages. This run had its own store: it does not test
    them."""

    def holds(self, *, kl: float, dlogprob: float) -> bool:
        """Whether all is within bounds and every tier was really used."""
        recalls = {score for score in self.recall.values() if score is not None}
        used = all(tokens > 0 for tokens in self.cached_tokens.values())
        within = self.kl <= kl and self.max_abs_dlogprob <= dlogprob
        return used and within and self.tokens_equal and len(recalls) <= 1


def verify(build: Build, config: EngineConfig, folder: Path) -> Report:
    """Run everything on one model. This takes a minute or two on the embedded one. `folder`: empty, for the
    store."""
    without = replace(config, cache=replace(config.cache, force_miss=True, host_bytes=0))
    cold = open_engine(build, without)[0]
    exams = list(exams_of(cold, build.model))
    with _step("cold (1 of 5)", exams) as done:
        prompts, truth = _converse(cold, done)
        runs, recall = {"cold": [*truth]}, {"cold": score_of(cold, exams, done)}
    with _step("replay (2 of 5)") as done:
        runs["replay"] = [_replayed(cold, *pair, done) for pair in zip(prompts, truth, strict=True)]
    cold.cache.close()
    used = {"device": 0, "host": 0, "store": 0}
    stored = replace(build, store=f"file://{quote(str(folder))}/store?size=4GiB")
    builds = {"device": build, "host": _squeezed(stored, cold, prompts, exams), "store": stored}
    patient = replace(config, cache=replace(config.cache, fetch="wait"))
    for number, (tier, each) in enumerate(builds.items(), 3):
        with _step(f"{tier} ({number} of 5)", exams) as done:
            engine = open_engine(each, patient)[0]
            runs[tier], recall[tier] = _run(engine, prompts, exams, done)
            used[tier] = int(engine.cache.counters[f"tokens_{tier}"])
            engine.cache.close(STORE_WAIT_S)
    return replace(_compare(truth, runs, recall, used), share=cold.cache.identity.share)


def verify_sparse(build: Build, config: EngineConfig) -> Report:
    """Run the same prompts with every page whole and nothing reused, and with every page sparse as soon as it
    may be. Required: a host tier, and a model that selects entries."""
    whole = replace(config.cache, sparse="off", force_miss=True, host_bytes=0)
    far = open_engine(build, replace(config, cache=replace(config.cache, sparse="always")))[0]
    cold = open_engine(build, replace(config, cache=whole))[0]
    exams = list(exams_of(cold, build.model))
    with _step("cold (1 of 2)", exams) as done:
        prompts, truth = _converse(cold, done)
        recall = {"cold": score_of(cold, exams, done)}
    with _step("sparse (2 of 2)", exams) as done:
        answers, recall["sparse"] = _run(far, prompts, exams, done)
    runs = {"sparse": answers}
    used = {"sparse": far.cache.counters["pages_sparse"] * far.page_tokens}
    for engine in (cold, far):
        engine.cache.close()
    return replace(_compare(truth, runs, recall, used), share=cold.cache.identity.share)


def _step(name: str, exams: Sequence[Exam] = ()) -> AbstractContextManager[Done]:
    """The progress of one run: all prompts, and the exams."""
    texts = GROUPS * BRANCHES * TURNS + len(exams[::FACTS]) + len(exams)
    return progress(name, texts, counted="texts")


def _run(
    engine: Engine, prompts: Sequence[Sequence[int]], exams: Sequence[Exam], done: Done
) -> tuple[list[Answer], float | None]:
    """All answers, and the score."""
    answers = []
    for prompt in prompts:
        answers.append(answer_one(engine, prompt, ANSWER_TOKENS))
        done(1)
    return answers, score_of(engine, exams, done)


def answer_one(engine: Engine, prompt: Sequence[int], count: int, **options: Any) -> Answer:
    """One ask from beginning to end, greedy, with logprobs."""
    ask = Ask("verify", tuple(prompt), Sampling(count, temperature=0, logprobs=0, ignore_eos=True), **options)
    return answer_all(engine, [ask])[0]


def k3(differences: Sequence[float]) -> float:
    """An estimate of KL from the logprobs of drawn tokens; never negative, zero if nothing differs."""
    return sum(math.expm1(d) - d for d in differences) / max(1, len(differences))


def _squeezed(build: Build, engine: Engine, prompts: Sequence[Sequence[int]], exams: Sequence[Any]) -> Build:
    """A build whose device has room for the longest text and a little more."""
    longest = max(len(text) for text in [*prompts, *(context for context, _, _ in exams)])
    spec = engine.cache.spec
    pages = -(-longest // spec.page_tokens) + 3
    return replace(build, device_bytes=pages * spec.page_bytes + 4 * spec.pages_per_window * spec.tail_bytes)


# Conversations


def _converse(cold: Engine, done: Done) -> tuple[list[tuple[int, ...]], list[Answer]]:
    """Prompts of all turns in the order they are asked, and the cold answers."""
    random = Random(0)
    vocabulary = [token for token in range(cold.vocab_size) if cold.text.piece(token).strip().isalpha()]
    page = cold.page_tokens

    def words(count: int) -> list[int]:
        return [random.choice(vocabulary) for _ in range(count)]

    begun = [words(2 * page + 17) for _ in range(GROUPS)]
    texts = [begun[i % GROUPS] + words(5) for i in range(GROUPS * BRANCHES)]
    prompts: list[tuple[int, ...]] = []
    answers: list[Answer] = []
    for _ in range(TURNS):
        for text in texts:
            prompts.append(tuple(text))
            answers.append(answer_one(cold, text, ANSWER_TOKENS))
            text += [out.token for out in answers[-1].tokens] + words(page // 2 + 9)
            done(1)
    return prompts, answers


def _replayed(cold: Engine, prompt: Sequence[int], answer: Answer, done: Done) -> Answer:
    """The answer's logprobs when it is a part of a prompt."""
    whole = [*prompt, *(out.token for out in answer.tokens)]
    scored = answer_one(cold, whole, 0, prompt_logprobs_from=len(prompt))
    done(1)
    return Answer(tokens=scored.prompt, usage=scored.usage)


def _compare(
    truth: Sequence[Answer],
    runs: Mapping[str, Sequence[Answer]],
    recall: Mapping[str, float | None],
    used: Mapping[str, int],
) -> Report:
    kl, most, equal = 0.0, 0.0, True
    for answers in runs.values():
        pairs = [
            (mine, own)
            for answer, cold in zip(answers, truth, strict=True)
            for mine, own in zip(answer.tokens, cold.tokens, strict=True)
        ]
        differences = [(mine.logprob or 0.0) - (own.logprob or 0.0) for mine, own in pairs]
        kl, most = max(kl, k3(differences)), max([most, *map(abs, differences)])
        equal = equal and all(mine.token == own.token for mine, own in pairs)
    return Report(kl, most, equal, dict(recall), dict(used))


# Recall


def exams_of(engine: Engine, model: str) -> Iterable[Exam]:
    """What the model was trained to look up, where its folder says so (`recall.json`)."""
    folder = folder_of(model)
    if not (folder / "recall.json").exists():
        return
    words, random = json.loads((folder / "recall.json").read_text()), Random(1)
    prose = (folder / "README.md").read_text() if (folder / "README.md").exists() else ""
    encode = engine.text.encode
    for _ in range(EXAMS):
        keys = random.sample(words["keys"], FACTS * 2)
        values = [random.choice(words["values"]) for _ in keys]
        context = "<|bos|><|user|>"
        for key, value in zip(keys, values, strict=True):
            at = random.randrange(max(1, len(prose) - 200))
            context += prose[at : at + 150] + words["fact"].format(key=f" {key}", value=f" {value}")
        for key, value in random.sample(list(zip(keys, values, strict=True)), FACTS):
            question = words["question"].format(key=f" {key}") + "<|assistant|>"
            answer = words["answer"].format(key=f" {key}", value=f" {value}")
            yield encode(context), encode(question), encode(answer)


def score_of(engine: Engine, exams: Sequence[Exam], done: Done = lambda _: None) -> float | None:
    """The share of right answers; all contexts are sent first, then the questions."""
    if not exams:
        return None
    for context, _, _ in exams[::FACTS]:
        answer_one(engine, context, 0)
        done(1)
    right = 0
    for context, question, answer in exams:
        answered = answer_one(engine, [*context, *question], len(answer))
        right += [out.token for out in answered.tokens] == answer
        done(1)
    return right / len(exams)
