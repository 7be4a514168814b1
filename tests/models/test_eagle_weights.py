"""Goal: the file of an EAGLE head is read as it is, or refused with what is wrong. Method: a right file, then
files with one fault each; then the embedded model's own head."""

import pytest
import torch
from benchmarks.speculate import Drafting, accept_length
from safetensors.torch import load_file

from tests.models.eagle import HEAD_DIM, KV_HEADS, make_head, write_head
from tests.models.folders import make_config
from tiercel.errors import WeightsError
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.eagle_weights import FILE, PREFIX, HeadFile
from tiercel.models.families import EMBEDDED, folder_of
from tiercel.spec import Heads

CONFIG = V4Config.from_hf(make_config())
EMBEDDED_HEAD = folder_of(EMBEDDED) / FILE
FLOORS = {"text": 1.3, "code": 1.3}
"""Tokens per step with three guesses, on four texts of a kind."""


def test_a_head_is_read_as_it_is_stored(tmp_path):
    head = make_head(CONFIG)
    stored = {name: each.bfloat16() if each.dim() > 1 else each for name, each in head.items()}
    file = HeadFile(write_head(tmp_path / FILE, stored), CONFIG)
    assert file.heads == Heads(KV_HEADS, HEAD_DIM)
    weights = file.load()
    assert weights.keys() == {PREFIX + name for name in head}
    for name, each in stored.items():
        assert weights[PREFIX + name].dtype == torch.float32
        assert torch.equal(weights[PREFIX + name], each.float())


def test_its_name_changes_with_any_bit(tmp_path):
    head = make_head(CONFIG)
    names = [HeadFile(write_head(tmp_path / FILE, head), CONFIG).digest()]
    names.append(HeadFile(write_head(tmp_path / "copy.safetensors", head), CONFIG).digest())
    head["fc.weight"][3, 5] += 1e-3
    names.append(HeadFile(write_head(tmp_path / FILE, head), CONFIG).digest())
    assert names[0] == names[1] != names[2]


def without(name):
    return lambda head: head.pop(name)


def narrowed(name, rows):
    return lambda head: head.update({name: head[name][:rows]})


FAULTS = {
    "a tensor is missing": (without("fc.weight"), r"missing: fc\.weight$"),
    "a tensor that tells dimensions is missing": (
        without("self_attn.q_norm.weight"),
        r"missing, or without rows: self_attn\.q_norm\.weight$",
    ),
    "a tensor is of something else": (
        lambda head: head.update({"lm_head.weight": torch.zeros(2)}),
        r"not of an EAGLE head: lm_head\.weight$",
    ),
    "of a wider model": (
        lambda head: head.update({"streams_proj.weight": torch.zeros(32, 256)}),
        r"unfit: streams_proj\.weight is \[32, 256\] of F32, must be \[32, 128\] of F32, BF16, F16, F64$",
    ),
    "integers": (
        lambda head: head.update({"norm.weight": torch.zeros(32, dtype=torch.int64)}),
        r"unfit: norm\.weight is \[32\] of I64, must be \[32\]",
    ),
    "half a head": (
        narrowed("self_attn.q_proj.weight", 28),
        r"heads of 8 channels do not fit 28 channels of queries and 16 of keys$",
    ),
    "a head that no key head serves": (
        narrowed("self_attn.q_proj.weight", 24),
        r"heads of 8 channels do not fit 24 channels of queries and 16 of keys$",
    ),
    "values of other width than keys": (
        narrowed("self_attn.v_proj.weight", 8),
        r"unfit: self_attn\.v_proj\.weight is \[8, 32\] of F32, must be \[16, 32\]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_does_not_fit_is_refused_by_name(tmp_path, fault):
    change, message = FAULTS[fault]
    head = make_head(CONFIG)
    change(head)
    with pytest.raises(WeightsError, match=message) as refused:
        HeadFile(write_head(tmp_path / FILE, head), CONFIG)
    assert str(tmp_path / FILE) in str(refused.value)


def test_what_is_no_number_is_refused(tmp_path):
    head = make_head(CONFIG)
    head["fc.weight"][0, 0] = float("nan")
    with pytest.raises(WeightsError, match=r"fc\.weight holds NaN or Inf"):
        HeadFile(write_head(tmp_path / FILE, head), CONFIG).load()


def test_a_file_that_is_not_there_or_is_cut_is_refused(tmp_path):
    with pytest.raises(WeightsError, match="is missing"):
        HeadFile(tmp_path / FILE, CONFIG)
    file = write_head(tmp_path / FILE, make_head(CONFIG))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WeightsError, match="is no whole safetensors file"):
        HeadFile(file, CONFIG)


# The embedded model's head


def test_the_embedded_head_is_small():
    assert EMBEDDED_HEAD.stat().st_size <= 2_000_000


def test_the_embedded_head_guesses_what_the_model_says_and_a_random_one_does_not(tmp_path):
    stored, random = load_file(EMBEDDED_HEAD), torch.Generator().manual_seed(0)
    for name, each in stored.items():
        if each.dim() > 1:
            stored[name] = torch.randn(each.shape, generator=random).to(each.dtype) * each.shape[1] ** -0.5
    trained = Drafting("eagle", texts=4)
    other = Drafting("eagle", head=write_head(tmp_path / FILE, stored), texts=4)
    for kind, floor in FLOORS.items():
        assert accept_length(trained, kind)[2] > floor, kind
        assert accept_length(other, kind)[2] < 1.1, kind
