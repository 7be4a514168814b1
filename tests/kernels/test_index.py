"""Goal: the indexer chooses what its plain twin chooses, ties included, whatever is computed with a token.
Method: whole numbers, whose sums are exact, so that both see the same ties; few groups and a small scratch
memory, so that small texts go every way."""

from functools import cache
from typing import NamedTuple

import pytest
import torch

from tests.kernels.devices import CUDA, every_exact_set, every_set, on_gpu, skip_unless_computed
from tests.kernels.texts import PADDING, Call, Span, as_stored
from tiercel.kernels.cuda import index
from tiercel.kernels.reference.rows import top_numbers


class Shape(NamedTuple):
    heads: int
    dim: int
    ratio: int
    per_row: int
    k: int
    length: int


SMALL = Shape(heads=5, dim=24, ratio=4, per_row=6, k=9, length=420)
FLASH = Shape(heads=64, dim=128, ratio=4, per_row=64, k=512, length=40_000)
every_encoding = pytest.mark.parametrize("encoding", ["fp32", "bf16", "fp8_row"])


@pytest.fixture(autouse=True)
def few_groups(request, monkeypatch):
    """As many groups as are chosen at least; on a device what is used there."""
    if "cpu" in request.node.callspec.params.values():
        monkeypatch.setattr(index, "GROUPS_LEAST", 16)
        monkeypatch.setattr(index, "CANDIDATES", 64)
        monkeypatch.setattr(index, "ALONE_MOST", 2)


def whole(least, most, *size, seed):
    return torch.randint(least, most + 1, size, generator=torch.Generator().manual_seed(seed)).float()


@cache
def text_of(shape, text):
    """(q, weights, keys). Every key has a channel of 448: its fp8 scale is 1, and the rest stays whole. The
    queries of a long text repeat."""
    queries = min(shape.length, 499)
    q = whole(-2, 2, queries, shape.heads, shape.dim, seed=text)
    q[..., 0] = 0
    keys = whole(-2, 2, shape.length // shape.ratio, shape.dim, seed=text + 100)
    keys[:, 0] = 448
    return q, whole(-1, 2, queries, shape.heads, seed=text + 200), keys


def run(shape, spans, encoding, dtype, kernels, device, seed=0, text=text_of):
    """(the call, the chosen numbers in pages on the CPU)."""
    most = -(-shape.length // shape.ratio)
    call = Call(spans, per_row=shape.per_row, ratio=shape.ratio, entries_most=most, device=device, seed=seed)
    q = torch.full((len(call.texts), shape.heads, shape.dim), float("nan"))
    weights = torch.full((len(call.texts), shape.heads), float("nan"))
    for i, own, position in call.tokens():
        q[i], weights[i] = (each[position % len(each)] for each in text(shape, own)[:2])
    keys = call.pages(lambda own: text(shape, own)[2], encoding, 0)
    out = kernels.best_rows(
        q.to(device, dtype),
        torch.cat([weights, q[:, 0]], dim=1).to(device, dtype)[:, : shape.heads],
        keys,
        shape.ratio,
        call.flat,
        shape.k,
        int(call.visible.max()),
    )
    assert out.shape == (len(q), shape.k) and out.dtype == torch.int32
    return call, out.cpu()


def expected(shape, call, encoding, text=text_of):
    """Numbers in pages by the plain twin, one token at a time."""
    for i, own, position in call.tokens():
        q, weights, keys = text(shape, own)
        position %= len(q)
        number = call.numbers(call.ring[i], torch.arange(len(keys)))
        products = torch.relu(q[position] @ as_stored(keys, encoding).T)
        best = top_numbers((weights[position] @ products)[None], call.visible[i : i + 1].long(), shape.k)[0]
        yield i, torch.where(best < 0, -1, number[best.clamp(min=0)]).int()


def check(shape, spans, encoding, dtype, kernels, device, text=text_of):
    skip_unless_computed(kernels, dtype)
    call, out = run(shape, spans, encoding, dtype, kernels, device, text=text)
    for i, want in expected(shape, call, encoding, text):
        assert torch.equal(out[i], want), (call.texts[i], call.positions[i])


MIXED = [
    Span(0, 300, 303, 2),
    Span(PADDING, 0, 1),
    Span(1, 35, 40, 0),
    Span(2, 419, 420, 3),
    Span(3, 0, 2, 1),
]
"""Tokens that see more keys than they may choose, as many, fewer, none; padding between them."""


@every_set
@pytest.mark.parametrize(
    ("encoding", "dtype"),
    [
        ("fp32", torch.float32),
        ("bf16", torch.float32),
        ("fp8_row", torch.float32),
        ("fp8_row", torch.bfloat16),
    ],
)
def test_it_chooses_what_its_twin_chooses_ties_included(encoding, dtype, kernels, device):
    check(SMALL, MIXED, encoding, dtype, kernels, device)


@every_set
def test_scores_need_not_all_fit_into_the_scratch_memory(kernels, device, monkeypatch):
    monkeypatch.setattr(index, "SCRATCH_BYTES", 2000)
    check(SMALL, [Span(0, 20, 38, 1), Span(1, 300, 302, 2)], "bf16", torch.float32, kernels, device)


def in_one_group(shape, text):
    """The good keys are 16 apart: they all fall into one group, and nearly all keys become candidates."""
    q, weights, keys = text_of(shape, text)
    keys = keys.clone()
    keys[:, 1:] = -1.0
    keys[3::16, 1:] = 2.0
    return q.abs(), weights.abs(), keys


def all_equal(shape, text):
    q, weights, keys = text_of(shape, text)
    return q, weights, keys[:1].expand(len(keys), -1)


def all_negative(shape, text):
    q, weights, keys = text_of(shape, text)
    return q, -1 - weights.abs(), keys


@every_set
@pytest.mark.parametrize("text", [in_one_group, all_equal, all_negative])
def test_it_is_exact_where_candidates_are_many(text, kernels, device):
    """The second span sees no more keys than there are groups: they all are candidates."""
    spans = [Span(0, 300, 302, 2), Span(1, 39, 66, 1), Span(2, 419, 420, 3)]
    check(SMALL, spans, "bf16", torch.float32, kernels, device, text=text)


@every_set
def test_short_texts_need_no_scores(kernels, device):
    """Then `most` is no more than k."""
    check(SMALL, [Span(0, 30, 34, 1), Span(1, 0, 3, 2)], "fp8_row", torch.float32, kernels, device)


def rough(shape, text):
    """Any numbers: scores have all bits."""
    random = torch.Generator().manual_seed(text)
    return tuple(torch.randn(each.shape, generator=random) for each in text_of(shape, text))


def same_choice(shape, calls, encoding, dtype, kernels, device, text=rough):
    """Each token, which sees more than k keys, has the choice that it has in the first call."""
    skip_unless_computed(kernels, dtype)
    known = {}
    for seed, spans in enumerate(calls):
        call, out = run(shape, spans, encoding, dtype, kernels, device, seed=seed, text=text)
        for i, own, position in call.tokens():
            entry = torch.full((call.places * call.per_row + 1,), -1)
            seen = torch.arange(int(call.visible[i]))
            entry[call.numbers(call.ring[i], seen).long()] = seen
            chosen = entry[out[i].long()].tolist()  # -1 is the last
            assert known.setdefault((own, position), chosen) == chosen
            assert sorted(chosen) == chosen and chosen[0] >= 0


@every_exact_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_choice_does_not_depend_on_the_call(dtype, kernels, device):
    calls = [
        [Span(0, 300, 303, 0), Span(1, 200, 202, 1)],
        [Span(0, 301, 302, 3)],
        [Span(1, 201, 202, 0), Span(PADDING, 0, 1), Span(0, 302, 303, 2)],
    ]
    same_choice(SMALL, calls, "fp8_row", dtype, kernels, device)


# The shapes of V4-Flash


@pytest.mark.parametrize("device", [on_gpu])
@every_encoding
def test_flash_chooses_what_its_twin_chooses(encoding, device):
    spans = [Span(0, 39_990, 40_000, 2), Span(1, 2040, 2056, 0), Span(2, 9_000, 9_003, 3)]
    check(FLASH, spans, encoding, torch.bfloat16, CUDA, device)


@pytest.mark.parametrize("device", [on_gpu])
@every_encoding
def test_a_flash_choice_does_not_depend_on_the_call(encoding, device):
    calls = [
        [Span(0, 39_500, 39_900, 0), Span(1, 2060, 2300, 1)],
        [Span(0, 39_600, 39_601, 3)],
        [Span(1, at, at + 1, at % 4) for at in range(2100, 2104)],
        [Span(PADDING, 0, 3), Span(1, 2060, 2200, 0), Span(0, 39_550, 39_650, 2)],
    ]
    same_choice(FLASH, calls, encoding, torch.bfloat16, CUDA, device)
