"""Goal: attention on encoded rows in rings and pages is attention on decoded ones, and a token's bits do not
depend on its company. Method: random texts in rings and pages with NaN around; then the same tokens cut,
ordered and placed otherwise."""

from functools import cache
from typing import NamedTuple

import pytest
import torch

from tests.kernels.devices import CUDA, every_exact_set, every_set, on_gpu, skip_unless_computed
from tests.kernels.texts import PADDING, Call, Span, as_stored, rand
from tiercel.kernels.entries import Flat
from tiercel.kernels.reference.rows import attend

ENCODINGS = ["fp32", "bf16", "fp8_groups"]
every_encoding = pytest.mark.parametrize("encoding", ENCODINGS)
types = pytest.mark.parametrize(
    ("encoding", "dtype"),
    [
        ("fp32", torch.float32),
        ("bf16", torch.float32),
        ("fp8_groups", torch.float32),
        ("fp8_groups", torch.bfloat16),
    ],
)


class Shape(NamedTuple):
    heads: int
    dim: int
    rope: int
    window: int
    ratio: int
    per_row: int
    k: int
    length: int
    group: int = 0
    """How many channels share a scale; 0: as DeepSeek V4 declares it."""


SMALL = Shape(heads=5, dim=64, rope=16, window=21, ratio=4, per_row=6, k=19, length=150)
FLASH = Shape(heads=64, dim=512, rope=64, window=128, ratio=4, per_row=64, k=512, length=2600)
FLASH_HEAVY = FLASH._replace(ratio=128, per_row=2, k=0)


def draw(shape, text, what, *size):
    return rand(*size, seed=1000 * text + what)


@cache
def text_of(shape, text):
    """(q, rows, entries, lists of entry numbers with none among them) of every position."""
    n, entries = shape.length, shape.length // shape.ratio
    q = draw(shape, text, 0, n, shape.heads, shape.dim)
    lists = torch.rand(n, max(shape.k, 1), generator=torch.Generator().manual_seed(text))
    visible = (torch.arange(n)[:, None] + 1) // shape.ratio
    # a list may name an entry twice: it then counts twice
    lists = torch.where(lists < 0.2, -1, ((lists - 0.2) / 0.8 * visible).long().clamp(max=visible - 1))
    return q, draw(shape, text, 1, n, shape.dim), draw(shape, text, 2, entries, shape.dim), lists


def run(shape, spans, kind, encoding, dtype, kernels, device, spare=0, **where):
    """(the call, the result [tokens, heads, dim] on the CPU). `spare`: rows of a ring for refused guesses."""
    most = -(-shape.length // shape.ratio)
    call = Call(spans, per_row=shape.per_row, ratio=shape.ratio, entries_most=most, device=device, **where)
    q = torch.full((len(call.texts), shape.heads, shape.dim), float("nan"))
    chosen = torch.full((len(call.texts), shape.k), -1, dtype=torch.int32)
    for i, text, position in call.tokens():
        q[i] = text_of(shape, text)[0][position]
        if kind == "chosen":
            e = text_of(shape, text)[3][position]
            chosen[i] = torch.where(e < 0, -1, call.numbers(call.ring[i], e.clamp(min=0))).int()
    ring_rows = max(shape.window - 1, 1) + spare
    recent = call.recent(lambda text: text_of(shape, text)[1], ring_rows, encoding, shape.rope, shape.group)
    entries = call.pages(lambda text: text_of(shape, text)[2], encoding, shape.rope, shape.group)
    sinks = draw(shape, 7, 3, shape.heads).to(device)
    out = kernels.attention(
        q.to(device, dtype),
        recent,
        shape.window,
        None if kind == "window" else entries,
        chosen.to(device) if kind == "chosen" else None,
        shape.ratio,
        call.flat,
        sinks,
        shape.dim**-0.5,
        spare,
    )
    assert out.dtype == dtype and out.shape == q.shape
    return call, out.cpu()


def expected(shape, text, position, kind, encoding, dtype):
    """One token by the plain twin, in fp32 on what the encoding and the type of the products keep."""
    q, rows, entries, lists = text_of(shape, text)
    near = torch.arange(max(0, position - shape.window + 1), position + 1)
    visible = (position + 1) // shape.ratio
    far = {"window": lists[0, :0], "all": torch.arange(visible), "chosen": lists[position]}[kind]
    rows, entries = (
        as_stored(each, encoding, shape.rope, shape.group).to(dtype).float() for each in (rows[near], entries)
    )
    seen = torch.cat([rows, entries[far[far >= 0]]])[None]
    none = torch.zeros(seen.shape[:2], dtype=torch.bool)
    own = q[position : position + 1].to(dtype).float()
    return attend(own, seen, none, draw(shape, 7, 3, shape.heads), shape.dim**-0.5)[0]


def check(shape, spans, kind, encoding, dtype, kernels, device, spare=0):
    skip_unless_computed(kernels, dtype)
    call, out = run(shape, spans, kind, encoding, dtype, kernels, device, spare)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for i, text, position in call.tokens():
        want = expected(shape, text, position, kind, encoding, dtype)
        torch.testing.assert_close(out[i].float(), want, atol=tolerance, rtol=tolerance)


MIXED = [Span(0, 40, 43, 2), Span(PADDING, 0, 1), Span(1, 0, 1, 0), Span(2, 149, 150, 3), Span(3, 18, 20, 1)]
"""In the middle and at the start of texts, one token alone, padding between them."""


@every_set
@types
@pytest.mark.parametrize("kind", ["window", "chosen", "all"])
def test_it_is_its_plain_twin_on_rows_in_rings_and_pages(kind, encoding, dtype, kernels, device):
    check(SMALL, MIXED, kind, encoding, dtype, kernels, device)


@every_set
@pytest.mark.parametrize("window", [1, 2, 16, 17])
def test_a_window_may_be_short_or_end_with_a_tile(window, kernels, device):
    check(SMALL._replace(window=window), MIXED, "all", "bf16", torch.float32, kernels, device)


@every_set
@pytest.mark.parametrize("window", [1, 17])
def test_a_ring_may_have_rows_to_spare(window, kernels, device):
    check(SMALL._replace(window=window), MIXED, "window", "bf16", torch.float32, kernels, device, spare=4)


@every_set
@pytest.mark.parametrize("heads", [1, 17])
def test_heads_may_fill_a_group_or_not(heads, kernels, device):
    check(SMALL._replace(heads=heads), MIXED[:2], "chosen", "fp8_groups", torch.float32, kernels, device)


@every_set
def test_a_group_may_be_wider_than_a_piece(kernels, device):
    """64 channels share an exponent; 16 rope channels leave pieces of 16."""
    check(SMALL._replace(dim=80), MIXED[:3], "all", "fp8_groups", torch.float32, kernels, device)


@every_set
def test_a_group_may_be_smaller_than_the_channels_allow(kernels, device):
    """16 channels share an exponent, where 64 could: pieces are no wider than a group."""
    check(
        SMALL._replace(dim=128, rope=64, group=16),
        MIXED[:3],
        "all",
        "fp8_groups",
        torch.float32,
        kernels,
        device,
    )


def same_bits(shape, whole, others, kind, encoding, dtype, kernels, device):
    """The tokens of `others`, calls of few spans, have the bits that they have in the call `whole`."""
    skip_unless_computed(kernels, dtype)
    call, out = run(shape, whole, kind, encoding, dtype, kernels, device)
    known = {(text, position): out[i] for i, text, position in call.tokens()}
    assert all(each.isfinite().all() for each in known.values())
    for seed, spans in enumerate(others, 1):
        call, out = run(shape, spans, kind, encoding, dtype, kernels, device, seed=seed)
        for i, text, position in call.tokens():
            assert torch.equal(out[i], known[text, position]), (seed, text, position)


@every_exact_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["chosen", "all"])
def test_a_token_has_the_same_bits_whatever_is_computed_with_it(kind, dtype, kernels, device):
    whole = [Span(0, 66, 72, 0), Span(1, 20, 22, 1)]
    others = [[Span(0, 68, 69, 3)], [Span(PADDING, 0, 1), Span(1, 21, 22, 0), Span(0, 70, 72, 2)]]
    same_bits(SMALL, whole, others, kind, "fp8_groups", dtype, kernels, device)


@every_set
def test_a_call_without_tokens_is_one(kernels, device):
    call = Call([Span(0, 3, 4)], per_row=2, ratio=4, entries_most=4, device=device)
    recent = call.recent(lambda _: rand(8, 32, seed=0), 3, "bf16", 16)
    q, none = torch.empty(0, 2, 32, device=device), call.flat.position[:0]
    flat = Flat(none, none, none, none, call.flat.pages)
    assert kernels.attention(q, recent, 4, None, None, 4, flat, torch.zeros(2), 1.0).shape == q.shape


# The shapes of V4-Flash


@pytest.mark.parametrize("device", [on_gpu])
@every_encoding
@pytest.mark.parametrize("kind", ["window", "chosen", "all"])
def test_flash_is_its_plain_twin(kind, encoding, device):
    spans = [Span(0, 2500, 2510, 2), Span(1, 0, 3, 0), Span(2, 130, 135, 3)]
    shape = FLASH_HEAVY if kind == "all" else FLASH
    check(shape, spans, kind, encoding, torch.bfloat16, CUDA, device)


@pytest.mark.parametrize("device", [on_gpu])
@every_encoding
@pytest.mark.parametrize("kind", ["chosen", "all"])
def test_flash_has_the_same_bits_whatever_is_computed_with_it(kind, encoding, device):
    whole = [Span(0, 2100, 2500, 0), Span(1, 100, 300, 1)]
    others = [
        [Span(0, 2300, 2301, 3)],
        [Span(1, at, at + 1, at % 4) for at in range(100, 104)],
        [Span(PADDING, 0, 3), Span(1, 150, 160, 0), Span(0, 2450, 2500, 2)],
    ]
    shape = FLASH_HEAVY if kind == "all" else FLASH
    same_bits(shape, whole, others, kind, encoding, torch.bfloat16, CUDA, device)
