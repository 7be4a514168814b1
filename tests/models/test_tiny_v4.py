"""Goal: the embedded model answers from its context, and broken pages show. Method: its own recall task."""

import argparse
import inspect
import json
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

import tiercel.models
from tests.models.spans import one_pool
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.model import build
from tiercel.models.deepseek_v4.weights import WEIGHTS
from tiercel.spec import deepseek_v4, deepseek_v4_mtp

FOLDER = Path(tiercel.models.__file__).parent / "tiny_v4"
PAGE, FACTS = 128, 8


@pytest.fixture(scope="module")
def tiny():
    checkpoint = Checkpoint(FOLDER)
    config = V4Config.from_hf(checkpoint.config)
    memory = DeviceMemory(deepseek_v4(checkpoint.config, PAGE, "fp32"), pages=16, tails=2)
    model = build(config, WEIGHTS.plan(checkpoint, config).read(), memory, rings=2)
    return model, memory, Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def exam(tokenizer):
    """(context tokens, [(question tokens, key token, value token)])"""
    words, random = json.loads((FOLDER / "recall.json").read_text()), Random(0)
    prose = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    keys = random.sample(words["keys"], FACTS)
    values = [random.choice(words["values"]) for _ in keys]
    text = "<|bos|><|user|>"
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        text += prose[150 * i : 150 * i + 150] + words["fact"].format(key=f" {key}", value=f" {value}")
    asked = []
    for key, value in zip(keys, values, strict=True):
        question = words["question"].format(key=f" {key}") + "<|assistant|>"
        answer = tokenizer.encode(words["answer"].format(key=f" {key}", value=f" {value}")).ids
        asked.append((tokenizer.encode(question).ids, answer))
    return tokenizer.encode(text).ids, asked


def score(model, context, asked, *, break_pages=None):
    """How many questions are answered right, each after the same context."""
    right = 0
    for question, answer in asked:
        pages = torch.arange(16)
        model.forward([one_pool(torch.tensor(context), 0, pages, 0)])
        if break_pages is not None:
            break_pages()
        tokens, at, said = question, len(context), []
        for _ in answer:
            logits = model.forward([one_pool(torch.tensor(tokens), at, pages, 0)])
            at += len(tokens)
            tokens = [int(logits[0].argmax())]
            said += tokens
        right += said == answer
    return right


class Drafting:
    """The embedded model with its MTP head, resumed in the middle of a text."""

    def __init__(self):
        checkpoint = Checkpoint(FOLDER)
        config = V4Config.from_hf(checkpoint.config)
        spec = deepseek_v4(checkpoint.config, PAGE, "fp32")
        spec = spec.with_draft(deepseek_v4_mtp(checkpoint.config, PAGE, "fp32", hidden=True))
        self.memory = DeviceMemory(spec, pages=4, tails=1)
        self.model = build(
            config, WEIGHTS.plan(checkpoint, config).read(), self.memory, rings=2, guesses_max=1
        )
        self.tail = self.memory.view("draft_window", config.layers)[0]

    def agreed(self, text, *, lose, tokens=8):
        """Of the tokens after a tail at the first boundary, how many the draft says as the model will."""
        self.model.forward([one_pool(text[:PAGE], 0, torch.arange(4), 0, tails={PAGE: 0})])
        if lose:
            self.tail.zero_()
        self.model.resume(1, [(PAGE, 0)])
        agreed = 0
        for at in range(PAGE, PAGE + tokens):
            span = one_pool(text[at : at + 1], at, torch.arange(4), 1)
            guess = self.model.draft.propose([span], 1)
            agreed += int(guess == self.model.forward([span]).argmax())
        return agreed


def test_how_much_of_a_draft_is_accepted_depends_on_its_cache(tiny):
    """On text like that it was trained on: the standard library."""
    drafting, tokens = Drafting(), tiny[2].encode(inspect.getsource(argparse)).ids
    texts = [torch.tensor([1, *tokens[at : at + PAGE + 7]]) for at in range(0, 30 * 200, 200)]
    whole = sum(drafting.agreed(text, lose=False) for text in texts)
    lost = sum(drafting.agreed(text, lose=True) for text in texts)
    assert whole > 0.55 * 8 * len(texts) and lost < 0.8 * whole, (whole, lost)


def test_the_embedded_model_recalls_what_it_was_told_and_not_from_broken_pages(tiny):
    model, memory, tokenizer = tiny
    context, asked = exam(tokenizer)
    assert len(context) > 2 * PAGE
    right = score(model, context, asked)
    broken = score(model, context, asked, break_pages=memory.flat_pages.zero_)
    assert right >= FACTS - 1 and broken <= right - 3, (right, broken)
