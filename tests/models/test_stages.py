"""Goal: stages of a model, one after the other, compute what the whole model computes, bit for bit, and each
reads and keeps its own part only. Method: the embedded model and small ones of `transformers`, cut in many
ways, in one process."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.models.qwen3 import random_tokens, write_qwen3
from tests.models.spans import one_pool
from tiercel.errors import SpecError
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import Stage
from tiercel.models.loading import EMBEDDING, HEAD
from tiercel.models.opening import open_model
from tiercel.models.wish import Wish
from tiercel.types import Kind

TAIL = 3
CUTS = {
    "one stage": [0],
    "two stages": [0, 3],
    "the first has no pages": [0, 1, 4],
    "a stage of one layer": [0, 3, 4],
    "every layer": [0, 1, 2, 3, 4, 5],
}


def opened_of(kind, folder):
    if kind.startswith("v4"):
        opened = open_model(Wish(page_tokens=128))
        return replace(opened, own_draft="draft" in kind, apart="apart" in kind)
    changes = {"num_hidden_layers": 6, "tie_word_embeddings": "tied" in kind}
    written = write_qwen3(folder, moe="experts" in kind, **changes)
    if "random" in kind:
        config = json.loads((written / "config.json").read_text())
        (written / "config.json").write_text(json.dumps(config | {"random_weights": 5}))
        for each in written.glob("*.safetensors"):
            each.unlink()
    return open_model(Wish(str(written), page_tokens=32))


def built(opened):
    memory = DeviceMemory(opened.held, pages=12, tails=TAIL)
    return opened.load(lambda _: None).build(memory, running_max=2, guesses_max=2), memory


KINDS = ["v4", "v4, draft", "v4, apart", "qwen3", "qwen3, tied", "qwen3, experts", "qwen3, random"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_stages_compute_what_the_whole_model_computes(kind, cut, tmp_path):
    opened = opened_of(kind, tmp_path)
    stages = [Stage(first, end, 6) for first, end in zip(cut, [*cut[1:], 6], strict=True)]
    (whole, memory), parts = built(opened), [built(replace(opened, stage=stage)) for stage in stages]
    page_tokens, tokens = opened.page_tokens, random_tokens(2 * opened.page_tokens + 9)
    if "experts" in kind or kind.startswith("qwen3"):
        tokens = tokens % whole.vocab_size
    pages, tails = torch.tensor([[2, 0, 3]]), {}
    if opened.spec.second:
        units = opened.spec.frame_units
        pages = torch.tensor([[2 * units, 0, 3 * units], [2, 0, 3]])
    if opened.spec.tail_streams:
        tails = {page_tokens: 1, 2 * page_tokens: 2}
    ends = [0, page_tokens + 5, len(tokens) - 1, len(tokens)]
    for start, end in pairwise(ends):
        due = {boundary: place for boundary, place in tails.items() if start < boundary <= end}
        span = one_pool(tokens[start:end], start, pages, 1, due)
        rows = range(end - start)
        expected, x = whole.forward([span], rows), None
        for model, _ in parts:
            room = model.room_for(end - start)
            assert x is None or (x.shape, x.dtype) == (room.shape, room.dtype)
            x = model.forward([span], rows, x=x)
        assert torch.equal(x, expected)
    for _, own in parts:
        for stream in own.spec.streams:
            for layer in stream.layers:
                places = [1, 2] if stream.kind is Kind.TAIL else pages[opened.spec.pool_of(stream)]
                both = [each.view(stream.name, layer)[places] for each in (own, memory)]
                assert torch.equal(*both), (stream.name, layer)
    if "draft" in kind:
        last = one_pool(tokens[-1:], len(tokens) - 1, pages, 1)
        guesses = [model.draft.propose([last], 2) for model in (whole, parts[-1][0])]
        assert torch.equal(*guesses)
        assert all(model.draft is None for model, _ in parts[:-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_reads_its_own_weights_only(kind, tmp_path):
    opened = opened_of(kind, tmp_path)
    told, every, numbers = [], [], opened.load(lambda _: None).weights
    for stage in (Stage(0, 2, 6), Stage(2, 5, 6), Stage(5, 6, 6)):
        loaded = replace(opened, stage=stage).load(told.append)
        every += loaded.weights
        assert all(torch.equal(each, numbers[name]) for name, each in loaded.weights.items())
        own = {each.data_ptr(): each.nbytes for each in loaded.weights.values()}
        assert sum(told[-1].values()) == sum(own.values())
    assert {*every} == {*numbers}
    twice = {name for name in every if every.count(name) > 1}
    assert twice == ({EMBEDDING} if "draft" in kind else {EMBEDDING, HEAD} if "tied" in kind else set())


def test_a_stage_without_layers_that_keep_anything_is_refused():
    with pytest.raises(SpecError, match="no stream has layers there"):
        _ = replace(open_model(Wish()), stage=Stage(6, 6, 7)).held
