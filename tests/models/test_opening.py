"""Goal: a model is opened, loaded and built without an engine, and only what was wished for is part of it.
Method: the embedded model, and small ones of `transformers`."""

from dataclasses import replace

import pytest
import torch

from tests.models.qwen3 import make_reference, random_tokens, reference_logits, write_qwen3
from tests.models.spans import one_pool
from tiercel.errors import ConfigError
from tiercel.kernels.choice import describe
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.draft_model import WithDraft
from tiercel.models.opening import open_model
from tiercel.models.wish import Wish
from tiercel.spec.identity import BITS, NUMBERS


def test_a_model_computes_without_an_engine(tmp_path):
    opened = open_model(Wish(str(write_qwen3(tmp_path)), page_tokens=32))
    told = []
    loaded = opened.load(told.append)
    model = loaded.build(DeviceMemory(opened.spec, pages=4, tails=0), running_max=1, guesses_max=0)
    tokens = random_tokens(90)
    logits = model.forward([one_pool(tokens, 0, torch.tensor([2, 0, 3]), 0)], range(90))
    expected = reference_logits(make_reference(vocab_size=4096), tokens)
    assert (logits - expected).abs().max() < 1e-4
    assert len(told) == 1 and sum(told[0].values()) == sum(each.nbytes for each in loaded.weights.values())


def test_what_was_not_wished_for_is_chosen_and_told():
    opened = open_model(Wish())
    assert (opened.page_tokens, opened.format, opened.spec.page_tokens) == (128, "fp32", 128)
    lines = {each.what: each.value for each in opened.choices()}
    assert lines == {
        "model": "tiny-v4",
        "entries": "fp32",
        "kernels": describe(opened.kernels)[0],
        "exact": "on",
    }
    assert open_model(Wish(page_tokens=256, format="bf16")).spec.page_tokens == 256


def test_a_draft_is_part_of_the_declaration_only_if_it_guesses(tmp_path):
    opened = open_model(Wish())
    own = replace(opened, own_draft=True)
    given = open_model(Wish(draft=str(write_qwen3(tmp_path))))
    drafts = [
        {stream.layers for stream in each.spec.streams if stream.draft} for each in (opened, own, given)
    ]
    assert [bool(each) for each in drafts] == [False, True, True]
    assert [bool(each.unread()) for each in (opened, own, given)] == [True, False, True]
    memory = DeviceMemory(given.spec, pages=2, tails=2)
    assert isinstance(given.load(lambda _: None).build(memory, 1, 1), WithDraft)


def test_whose_numbers_they_are_depends_on_the_format_and_on_who_shares():
    each = [
        open_model(Wish(format=format)).identity(share)
        for format in ("fp32", "bf16")
        for share in (BITS, NUMBERS)
    ]
    assert len({identity.digest for identity in each}) == 4
    assert len({identity.weights for identity in each}) == 1
    assert [identity.share for identity in each] == [BITS, NUMBERS] * 2


@pytest.mark.parametrize("field", ["page_tokens", "device", "kernels", "format"])
def test_a_wish_is_checked_when_it_is_made(field):
    with pytest.raises(ConfigError) as refused:
        Wish(**{field: 0 if field == "page_tokens" else ""})
    assert refused.value.field == field
