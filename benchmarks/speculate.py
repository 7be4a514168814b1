"""What guesses bring: `python -m benchmarks.speculate [--json] [--quick] [--only accept,speed,tiers]
[--device cuda]`.

    accept_length     tokens per step of the target, by draft, kind of text and number of guesses
    speedup           tokens per second of engines with guesses over those without, by batch
    accept_after      accept length after a resume from a tier, over the same text computed

Accept lengths: the embedded model, CPU, no engine. A text is continued greedily, token by token; at
every token the draft guesses the next four. A guess counts while it and all before it are what the model
says. So one run has the accept lengths for 1, 2, 3 and 4 guesses: tokens per step of the target, its own
token included.

    text      the documentation of Python
    recall    facts between pieces of text and a question; the answer, key, value and end, is all that counts:
              behind it the model repeats the form of a turn, which any draft guesses
    code      the standard library of Python
"""

from __future__ import annotations

import argparse
import inspect
import json
import typing
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.machine import describe, parser_of
from benchmarks.speculate_engine import QUICK, Sizes, accept_after, speedups
from tiercel.engine.drafting import DraftText, make_drafter
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import Span
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.model import build
from tiercel.models.deepseek_v4.weights import WEIGHTS
from tiercel.models.families import EMBEDDED, folder_of
from tiercel.spec import deepseek_v4, deepseek_v4_mtp

DRAFTS, KINDS = ("mtp", "ngram"), ("text", "recall", "code")
GUESSES, PAGE = 4, 128
TEXTS, PROMPT, NEW = 16, 3 * PAGE, 32
FACTS, QUESTIONS, ANSWER = 6, 3, 4
"""An answer is three tokens long."""
END = "<|end|>"


class Drafting:
    """The model in a folder and who guesses for it, for a number of texts."""

    def __init__(self, draft: str, folder: Path | None = None, *, texts: int = TEXTS) -> None:
        folder = folder or folder_of(EMBEDDED)
        checkpoint = Checkpoint(folder)
        config = V4Config.from_hf(checkpoint.config)
        weights = WEIGHTS.plan(checkpoint, config).read()
        spec = deepseek_v4(checkpoint.config, PAGE, "fp32")
        if draft == "mtp":
            spec = spec.with_draft(deepseek_v4_mtp(checkpoint.config, PAGE, "fp32", hidden=True))
        pages = -(-(PROMPT + NEW + 2 * GUESSES) // PAGE)
        self._pages = torch.arange(texts * pages).view(texts, pages)
        memory = DeviceMemory(spec, pages=texts * pages, tails=1)
        self._model = build(config, weights, memory, texts, guesses_max=GUESSES)
        drafter = make_drafter(draft, self._model, PAGE)
        assert drafter is not None
        self._drafter, self.folder, self.texts = drafter, folder, texts

    def run(self, prompts: Sequence[list[int]], count: int) -> tuple[Tensor, Tensor]:
        """(what the model says [texts, count + 1], the guesses at each of these tokens [texts, count, 4])"""
        texts = [list(prompt) for prompt in prompts]
        for ring in range(len(texts)):
            self._drafter.begin(ring)  # what was said of the text before it does not count
        guesses, said = (
            [],
            [self._step([Span(torch.tensor(t), 0, self._pages[i, None], i) for i, t in enumerate(texts)])],
        )
        for _ in range(count):
            for text, token in zip(texts, said[-1].tolist(), strict=True):
                text.append(token)
            spans = [
                Span(torch.tensor(text[-1:]), len(text) - 1, self._pages[i, None], i)
                for i, text in enumerate(texts)
            ]
            guesses.append(self._guess(spans, texts))
            said.append(self._step(spans))
        return torch.stack(said, 1), torch.stack(guesses, 1)

    def _step(self, spans: Sequence[Span]) -> Tensor:
        return self._model.kernels.greedy(self._model.forward(spans))

    def _guess(self, spans: Sequence[Span], texts: Sequence[list[int]]) -> Tensor:
        asked = [
            DraftText(span.ring, np.array(text), span.pages, 4096)
            for span, text in zip(spans, texts, strict=True)
        ]
        made = self._drafter.guess(asked, [GUESSES] * len(asked))
        return torch.tensor([own + [-1] * (GUESSES - len(own)) for own in made])


def prompts_of(kind: str, folder: Path, texts: int = TEXTS) -> list[list[list[int]]]:
    """Rounds of so many prompts: from different places of a source, or several questions about each text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = tokenizer.token_to_id("<|bos|>")
    if kind == "recall":
        exams = _exams(folder, texts)
        return [[[bos, *tokenizer.encode(exam[i]).ids] for exam in exams] for i in range(QUESTIONS)]
    source = "\n".join(topics.values())
    if kind == "code":
        source = "\n".join(inspect.getsource(module) for module in (argparse, inspect, typing))
    tokens = tokenizer.encode(source).ids
    apart = (len(tokens) - PROMPT) // texts
    return [[[bos, *tokens[at * apart :][: PROMPT - 1]] for at in range(texts)]]


def _exams(folder: Path, texts: int) -> list[list[str]]:
    """Of each text, prompts with one question each."""
    words, random = json.loads((folder / "recall.json").read_text()), Random(0)
    prose, exams = "\n".join(topics.values()), []
    for _ in range(texts):
        keys, text = random.sample(words["keys"], FACTS), "<|user|>"
        for key in keys:
            at = random.randrange(len(prose) - 120)
            value = random.choice(words["values"])
            text += prose[at : at + 120] + words["fact"].format(key=f" {key}", value=f" {value}")
        asked = [words["question"].format(key=f" {key}") for key in random.sample(keys, QUESTIONS)]
        exams.append([f"{text}{question}<|assistant|>" for question in asked])
    return exams


def accept_length(drafting: Drafting, kind: str, most: int = NEW) -> list[float]:
    """Tokens per step of the target with 1, 2, 3, 4 guesses."""
    end = Tokenizer.from_file(str(drafting.folder / "tokenizer.json")).token_to_id(END)
    tokens, steps, new = [0] * GUESSES, [0] * GUESSES, ANSWER if kind == "recall" else most
    for prompts in prompts_of(kind, drafting.folder, drafting.texts):
        said, guesses = drafting.run(prompts, new + GUESSES)
        later = said.unfold(1, GUESSES, 1)[:, 1:]  # [texts, tokens, 4]: what the model says after each token
        right = (guesses[:, : later.shape[1]] == later).int().cumprod(-1)
        for text, own in zip(said[:, 1 : new + 1].tolist(), right, strict=True):
            length = text.index(end) + 1 if end in text else new
            for k in range(GUESSES):
                tokens[k] += length
                steps[k] += _steps(own[:, : k + 1].sum(-1).tolist(), length)
    return [made / taken for made, taken in zip(tokens, steps, strict=True)]


def _steps(right: Sequence[int], length: int) -> int:
    """Steps that make so many tokens, if so many guesses are accepted at each of them."""
    at = steps = 0
    while at < length:
        at, steps = at + 1 + right[at], steps + 1
    return steps


def measure(
    drafts: Sequence[str] = DRAFTS,
    only: str = "accept,speed,tiers",
    device: str = "cpu",
    sizes: Sizes | None = None,
) -> dict[str, Any]:
    sizes = sizes or Sizes()
    kinds = ("recall",) if sizes is QUICK else KINDS
    figures: dict[str, Any] = {}
    for name in drafts if "accept" in only else ():
        drafting, most = Drafting(name, texts=sizes.texts), min(NEW, sizes.new[1])
        figures |= {f"accept_length.{name}.{kind}": accept_length(drafting, kind, most) for kind in kinds}
    folder = folder_of(EMBEDDED)
    prompts = {kind: prompts_of(kind, folder, sizes.texts)[0] for kind in KINDS}
    if "speed" in only:
        vocabulary = V4Config.from_hf(Checkpoint(folder).config).vocab_size
        figures |= speedups(prompts, vocabulary, device, ("auto", *drafts), sizes)
    for name in drafts if "tiers" in only else ():
        if name != "ngram":
            figures |= accept_after(prompts["code"] + prompts["text"] * (sizes is not QUICK), name, device)
    return {**figures, "machine": describe()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--drafts", default=",".join(DRAFTS))
    parser.add_argument("--only", default="accept,speed,tiers")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    figures = measure(options.drafts.split(","), options.only, options.device, sizes)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, figure in figures.items():
        shown = "  ".join(f"{each:.2f}" for each in figure) if isinstance(figure, list) else figure
        print(f"{name:32} {shown}")


if __name__ == "__main__":
    main()
