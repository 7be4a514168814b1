"""Goal: grouped-query attention on pages is what dense attention is, and a token's bits follow from its own
text alone, in every kernel set. Method: random texts are cut, mixed, padded and placed at random, with NaN
wherever nothing was written."""

import random
from functools import cache
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from tests.kernels.texts import rand
from tiercel.kernels import native
from tiercel.kernels.cuda import grouped as cuda_grouped
from tiercel.kernels.entries import ITEM, Entries, Flat
from tiercel.kernels.native import grouped as native_grouped
from tiercel.kernels.reference import grouped, norm_rotate


class Set(NamedTuple):
    """A kernel set, where it runs, and the type of its numbers."""

    kernels: ModuleType
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def fit(self, shape):
        """Triton's interpreter takes seconds for a hundred tokens."""
        return shape._replace(length=50) if self.interpreted else shape

    @property
    def interpreted(self):
        return self.kernels is cuda_grouped and self.device == "cpu"


needs_c = pytest.mark.skipif(not native.AVAILABLE, reason="the C library was not built")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
PLAIN = pytest.param(Set(grouped), id="plain")
EXACT = [
    pytest.param(Set(native_grouped), id="c", marks=needs_c),
    pytest.param(Set(cuda_grouped), id="triton", marks=no_gpu),
    pytest.param(Set(cuda_grouped, "cuda"), id="cuda-fp32", marks=gpu),
    pytest.param(Set(cuda_grouped, "cuda", torch.bfloat16), id="cuda-bf16", marks=gpu),
]
every_set = pytest.mark.parametrize("kernels", [PLAIN, *EXACT])
every_encoding = pytest.mark.parametrize("encoding", ["fp32", "bf16"])

EPS = 1e-6
THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """In the interpreter texts are short: they have several chunks, and calls of either way, nevertheless."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(cuda_grouped, "CHUNK", 32)
        monkeypatch.setattr(cuda_grouped, "SPLIT_MOST", 24)


class Shape(NamedTuple):
    heads: int = 4
    kv_heads: int = 2
    dim: int = 48
    pairs: int = 16
    page_tokens: int = 16
    length: int = 300
    window: int = 0
    sinks: bool = False
    normed: bool = True


class Span(NamedTuple):
    text: int
    start: int
    end: int


@cache
def text_of(shape, text):
    """Queries, raw keys and values, (cos, sin) of every position."""
    n, seed = shape.length, 100 * text
    q = rand(n, shape.heads, shape.dim, seed=seed)
    raw = rand(n, 2 * shape.kv_heads * shape.dim, seed=seed + 1)
    angles = rand(n, shape.pairs, seed=7)
    return q, raw, (angles.cos(), angles.sin())


def weights_of(shape, device):
    """The weight of the keys' norm, and the sinks, if there are any."""
    weight, sinks = 1 + rand(shape.dim, seed=3) / 4, rand(shape.heads, seed=4)
    return weight.to(device) if shape.normed else None, sinks.to(device) if shape.sinks else None


class World:
    """Pages of some texts, in rows that lie apart in larger memory. Only calls write to them."""

    def __init__(self, shape, kernels, encoding, *, seed=0, texts=3):
        self.kernels, device, self.dtype = kernels
        self.shape, self.device = shape, device
        size = 2 * shape.dim * ITEM[encoding].itemsize
        per_row, pages = shape.kv_heads * shape.page_tokens, -(-shape.length // shape.page_tokens)
        memory = torch.full((texts * pages + 1, per_row * size + 64), 0xFF, dtype=torch.uint8, device=device)
        rows = memory[:, 16 : 16 + per_row * size]
        self.entries = Entries(rows, per_row, (size,), encoding, 2 * shape.dim, 0, 0)
        random = torch.Generator().manual_seed(seed)
        self.table = 1 + torch.randperm(texts * pages, generator=random).view(texts, pages).int()
        self.rings = torch.randperm(texts, generator=random).tolist()

    def call(self, spans, *, write_from=0):
        """{(text, position): result}. A span of text -1 is padding."""
        flat, tokens = self.flat(spans), [(s.text, at) for s in spans for at in range(s.start, s.end)]
        real = [(i, text, at) for i, (text, at) in enumerate(tokens) if text >= 0]
        shape, width = self.shape, self.shape.kv_heads * self.shape.dim
        q = torch.full((len(tokens), shape.heads, shape.dim), float("nan"))
        raw = torch.full((len(tokens), 2 * width + 16), float("nan"))
        turn = torch.full((2, len(tokens), shape.pairs), float("nan"))
        for i, text, at in real:
            every, numbers, rotation = text_of(shape, text)
            q[i], raw[i, : 2 * width] = every[at], numbers[at]
            turn[0, i], turn[1, i] = rotation[0][at], rotation[1][at]
        raw, turn = raw.to(self.device, self.dtype), turn.to(self.device)
        key, value = raw[:, : 2 * width].unflatten(1, (2, shape.kv_heads, shape.dim)).unbind(1)
        weight, sinks = weights_of(shape, self.device)
        since = torch.full_like(flat.position, write_from)
        self.kernels.store_heads(
            key, value, (turn[0], turn[1]), self.entries, flat, since, eps=EPS, weight=weight
        )
        out = self.kernels.grouped_attention(
            q.to(self.device, self.dtype), self.entries, shape.kv_heads, flat, shape.dim**-0.5, shape.length,
            sinks=sinks, window=shape.window,
        ).cpu()  # fmt: skip
        assert out.dtype == self.dtype and out.shape == q.shape
        assert not any(out[i].any() for i in set(range(len(tokens))) - {i for i, _, _ in real}), "padding"
        return {(text, at): out[i] for i, text, at in real}

    def stored(self, text, length):
        """[2, positions, kv heads, dim]: what is in the pages."""
        shape, pages = self.shape, self.table[self.rings[text], : -(-length // self.shape.page_tokens)]
        rows = self.entries.rows.cpu()[pages.long()].view(ITEM[self.entries.encoding]).float()
        rows = rows.view(len(pages), shape.kv_heads, shape.page_tokens, 2, shape.dim)
        return rows.permute(3, 0, 2, 1, 4).flatten(1, 2)[:, :length]

    def flat(self, spans):
        position, start, first, ring = [], [], [], []
        known = torch.full_like(self.table, 2**30)  # what a kernel must not read
        for span in spans:
            count, real = span.end - span.start, span.text >= 0
            first += [len(position)] * count
            position += range(span.start, span.end) if real else [-1] * count
            start += [span.start if real else -1] * count
            ring += [self.rings[span.text] if real else 0] * count
            if real:
                own, used = self.rings[span.text], -(-span.end // self.shape.page_tokens)
                known[own, :used] = self.table[own, :used]
        numbers = (torch.tensor(each, dtype=torch.int32) for each in (position, start, first, ring))
        return Flat(*(each.to(self.device) for each in (*numbers, known)))


def made_of(shape, text, dtype):
    """Keys and values [2, positions, kv heads, dim] of a text, before they are encoded."""
    _, raw, rotation = text_of(shape, text)
    key, value = raw.to(dtype).float().unflatten(1, (2, shape.kv_heads, shape.dim)).unbind(1)
    weight, _ = weights_of(shape, "cpu")
    return torch.stack([norm_rotate(key, rotation, eps=EPS if shape.normed else None, weight=weight), value])


def expected(shape, text, stored, dtype):
    """Every position of a text by dense attention to what is stored, as the type of the products keeps it."""
    q, sinks = text_of(shape, text)[0].to(dtype).double(), weights_of(shape, "cpu")[1]
    key, value = stored.to(dtype).double().repeat_interleave(shape.heads // shape.kv_heads, 2)
    scores = torch.einsum("qhd,khd->hqk", q[: len(key)], key) * shape.dim**-0.5
    at = torch.arange(len(key))
    hidden = (at[None] > at[:, None]) | (at[None] <= at[:, None] - (shape.window or shape.length))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, len(key), 1)], 2)
    weights = torch.softmax(scores, 2)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, value).float()


def whole(shape, texts=3):
    """All texts at once."""
    return [[Span(text, 0, shape.length - 20 * text) for text in range(texts)]]


def drawn(shape, seed, texts=3):
    """Calls of random spans: decodes among pieces of prompts, and padding, until every text ends."""
    draw = random.Random(seed)
    at, calls = [0] * texts, []
    if (
        shape.length == 50
    ):  # in the interpreter: one token, a few and many, of one text and of two, and padding
        one, two = Span(0, 0, 33), Span(1, 0, 5)
        return [
            [one, two],
            [Span(-1, 0, 2), Span(0, 33, 34)],
            [Span(1, 5, 30), Span(-1, 0, 1), Span(0, 34, 50)],
        ]
    while any(done < shape.length - 20 * text for text, done in enumerate(at)):
        spans = []
        for text in draw.sample(range(texts), draw.randint(1, texts)):
            left = shape.length - 20 * text - at[text]
            take = min(left, draw.choice([1, 1, 2, 7, 31, 120]))
            spans += [Span(text, at[text], at[text] + take)] * (take > 0)
            at[text] += take
            spans += [Span(-1, 0, draw.randint(1, 3))] * (draw.random() < 0.3)
        calls += [spans] * any(span.text >= 0 for span in spans)
    return calls


def run(shape, calls, kernels, encoding, **how):
    world, found = World(shape, kernels, encoding, **how), {}
    for spans in calls:
        found |= world.call(spans)
    return found


def check(shape, calls, kernels, encoding, every=1):
    """Entries are those of the plain norm and rotation, rounded once; results are those of dense attention to
    them, at every so many positions."""
    world, found = World(shape, kernels, encoding), {}
    for spans in calls:
        found |= world.call(spans)
    rounding = 2**-7 if encoding == "bf16" else 2e-5
    tolerance = 2e-5 if kernels.dtype == torch.float32 else 2e-2
    for text in {text for text, _ in found}:
        length = 1 + max(at for own, at in found if own == text)
        stored, made = world.stored(text, length), made_of(shape, text, kernels.dtype)[:, :length]
        torch.testing.assert_close(stored, made, atol=1e-5, rtol=rounding)
        want = expected(shape, text, stored, kernels.dtype)
        for at in range(0, length, every):
            torch.testing.assert_close(found[text, at].float(), want[at], atol=tolerance, rtol=tolerance)
    return found


SHAPES = {
    "plain": Shape(),
    "one kv head": Shape(heads=3, kv_heads=1, dim=16, pairs=8, length=140),
    "no groups": Shape(heads=5, kv_heads=5, dim=24, pairs=10, length=150),
    "large groups": Shape(heads=64, kv_heads=1, dim=16, pairs=4, length=60),
    "odd pages": Shape(page_tokens=7),
    "odd channels": Shape(heads=6, dim=18, pairs=8, length=140),
    "long pages": Shape(page_tokens=512),
    "window": Shape(window=37),
    "long window": Shape(window=40, sinks=True, heads=3, kv_heads=1),
    "sinks": Shape(sinks=True),
    "no norm": Shape(normed=False, pairs=24),
}
INTERPRETED = {("plain", "bf16"), ("odd pages", "fp32"), ("long window", "fp32")}


def cases(sets):
    """Shapes, encodings and kernel sets; some of them are enough in the interpreter."""
    every = [(name, encoding, own) for name in SHAPES for encoding in ("fp32", "bf16") for own in sets]
    return pytest.mark.parametrize(
        ("shape", "encoding", "kernels"),
        [
            pytest.param(
                SHAPES[name], encoding, *own.values, marks=own.marks, id=f"{name}-{encoding}-{own.id}"
            )
            for name, encoding, own in every
            if (name, encoding) in INTERPRETED or not own.values[0].interpreted
            if name != "odd channels" or own.values[0].device == "cpu"  # a GPU reads 16 bytes at a time
        ],
    )


@cases([PLAIN, *EXACT])
def test_it_is_dense_attention(shape, encoding, kernels):
    shape = kernels.fit(shape)
    check(shape, whole(shape, 1 if kernels.interpreted else 2), kernels, encoding)


@cases(EXACT)
def test_a_token_has_the_same_bits_in_every_schedule(shape, encoding, kernels):
    shape, texts = kernels.fit(shape), 2 if kernels.interpreted else 3
    known = run(shape, whole(shape, texts), kernels, encoding)
    assert all(each.isfinite().all() for each in known.values())
    for seed in (1,) if kernels.interpreted else (1, 2):
        found = run(shape, drawn(shape, seed, texts), kernels, encoding, seed=seed)
        assert found.keys() == known.keys()
        for where, own in found.items():
            assert torch.equal(bits(own), bits(known[where])), (seed, where)


def bits(x):
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@needs_c
@every_encoding
@pytest.mark.parametrize("threads", [1, 2])
def test_keys_of_one_token_may_be_shared_among_threads(threads, encoding):
    """A long text alone: its chunks of keys are parts of their own. In a prompt whole tiles are."""
    shape = Shape(heads=8, length=4500, page_tokens=64)
    torch.set_num_threads(threads)
    try:
        two = [[Span(0, 0, 4000), Span(1, 0, 300)], [Span(0, 4000, 4500)]]
        known = run(shape, two, Set(native_grouped), encoding)
        calls = [
            [Span(0, 0, 4480)],
            *([Span(0, at, at + 1)] for at in range(4480, 4490)),
            [Span(0, 4490, 4500)],
        ]
        found = run(shape, calls, Set(native_grouped), encoding, seed=1)
    finally:
        torch.set_num_threads(THREADS)
    for where, own in found.items():
        assert torch.equal(own, known[where]), where


@every_set
def test_a_call_without_tokens_is_one(kernels):
    assert World(Shape(), kernels, "fp32").call([]) == {}


@every_set
def test_what_is_in_the_pages_already_is_not_written_again(kernels):
    shape = Shape(length=40)
    world = World(shape, kernels, "fp32")
    before = world.entries.rows.fill_(7).clone()
    world.call([Span(0, 20, 40)], write_from=30)
    changed = (world.entries.rows.cpu() != before.cpu()).view(len(before), 2, 16, -1).any(-1).any(1)
    want = torch.zeros_like(changed)
    for at in range(30, 40):
        want[world.table[world.rings[0], at // 16], at % 16] = True
    assert torch.equal(changed, want)


@every_set
def test_entries_that_do_not_hold_heads_are_refused(kernels):
    world = World(Shape(), kernels, "fp32")
    for wrong in (
        {"encoding": "fp8_groups"},
        {"sizes": (4 * 48,)},
        {"per_row": 33},
    ):
        world.entries = World(Shape(), kernels, "fp32").entries._replace(**wrong)
        with pytest.raises(ValueError, match="do not hold keys and values of 2 heads of 48 channels"):
            world.call([Span(0, 0, 3)])


@pytest.mark.parametrize("kernels", EXACT)
@pytest.mark.parametrize("broken", [float("inf"), float("nan")])
def test_a_token_is_not_touched_by_what_follows_it(kernels, broken):
    """Its weight for them is zero, but zero times infinity is not. Who sees a broken token is told so, even
    if only one number of a value is broken: the last of token 30."""
    shape = Shape(length=40)
    _, raw, _ = text_of(shape, 0)
    known = run(shape, [[Span(0, 0, 40)]], kernels, "fp32")
    raw[30, -1], raw[31:, shape.kv_heads * shape.dim :], raw[32:, 0] = broken, broken, float("nan")
    try:
        for calls in ([[Span(0, 0, 40)]], [[Span(0, 0, 25)], [Span(0, 25, 40)]]):
            for (text, at), own in run(shape, calls, kernels, "fp32").items():
                if at < 30:
                    assert torch.equal(bits(own), bits(known[text, at])), at
                else:
                    assert not own[-1].isfinite().all(), "the last head reads the last kv head"
    finally:
        text_of.cache_clear()


# Experts without a shared one, and the middle of an MLP


@every_set
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(5, 2), (128, 8), (3, 3)])
def test_the_best_experts_by_softmax(experts, k, normed, kernels):
    logits = rand(7, experts + 3, seed=1)[:, :experts]
    logits[3] = 0.25  # all equal: the lower numbers
    logits[4, 1] = logits[4].max() + 1
    logits[4, 2] = logits[4, 1]
    position = torch.tensor([0, 1, 2, 3, 4, 5, -1], dtype=torch.int32)
    given = logits.to(kernels.device), k
    chosen, weights = kernels.kernels.route_softmax(
        *given, normed=normed, position=position.to(kernels.device)
    )
    chosen, weights = chosen.cpu(), weights.cpu()
    assert weights.dtype == torch.float32 and chosen[6].eq(-1).all() and not weights[6].any()
    assert chosen[3].tolist() == [*range(k)] and chosen[4, :2].tolist() == [1, 2]
    for t in range(6):
        scores = torch.softmax(logits[t].double(), 0)
        best = sorted(range(experts), key=lambda e: (-scores[e], e))[:k]
        assert chosen[t].tolist() == best
        want = scores[best] / (scores[best].sum() if normed else 1)
        torch.testing.assert_close(weights[t].double(), want, atol=1e-6, rtol=1e-5)


@every_set
def test_the_middle_of_an_mlp(kernels):
    x = rand(5, 2 * 24 + 8, seed=1)[:, : 2 * 24]
    want = torch.nn.functional.silu(x[:, :24]) * x[:, 24:]
    made = kernels.kernels.gated(x.to(kernels.device)).cpu()
    torch.testing.assert_close(made, want, atol=1e-6, rtol=1e-5)


# The shapes of Qwen3-8B


@pytest.mark.parametrize("kernels", EXACT[3:])
@every_encoding
@pytest.mark.parametrize("window", [0, 1000])
def test_qwen3_has_the_same_bits_in_a_prefill_and_in_a_decode(window, encoding, kernels):
    shape = Shape(heads=32, kv_heads=8, dim=128, pairs=64, page_tokens=128, length=1700, window=window)
    known = check(shape, whole(shape), kernels, encoding, every=37)
    for seed in (1, 2, 3):
        found = run(shape, drawn(shape, seed), kernels, encoding, seed=seed)
        for where, own in found.items():
            assert torch.equal(bits(own), bits(known[where])), (seed, where)
