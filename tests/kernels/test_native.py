"""Goal: the native kernels are their plain twins, and a token's bits do not depend on its company. Method:
random inputs of awkward sizes; then tokens again alone, and in other groups."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tiercel.kernels import native, reference
from tiercel.kernels.choice import make_kernels
from tiercel.kernels.entries import Entries, Flat
from tiercel.kernels.native.library import SIGNATURES
from tiercel.kernels.reference.hyper import Site
from tiercel.models.deepseek_v4.hyper import hyper_of

TOKENS = 131


def test_the_native_kernels_were_built():
    """Where these tests run there is a compiler: a silent fall back to torch would hide them all."""
    assert native.AVAILABLE
    assert make_kernels().NAME == "native"


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def linear(k, take, *, n=45, depth=33):
    return k.linear(rand(TOKENS, depth + 5)[take][:, 2 : 2 + depth], k.pack(rand(n, depth)))


def linear_wide(k, take):
    return linear(k, take, n=256, depth=128)


def linear_to_one(k, take):
    return linear(k, take, n=1)


def linear_groups_to_one(k, take):
    return k.linear_groups(rand(TOKENS, 3 * 21)[take], k.pack_all(rand(3, 1, 21)))


def linear_groups(k, take):
    return k.linear_groups(rand(TOKENS, 3 * 21)[take], k.pack_all(rand(3, 10, 21)))


def norm(k, take):
    return k.norm(rand(TOKENS, 50)[take][:, 3:40], rand(37), 1e-6)


def norm_rotate(k, take):
    turn = rand(TOKENS, 3)[take], rand(TOKENS, 3, seed=1)[take]
    x = rand(TOKENS, 60)[take].view(-1, 3, 20)
    plain, weighted = k.norm_rotate(x, turn), k.norm_rotate(x, turn, eps=1e-6, weight=rand(20))
    return torch.cat([plain, weighted, k.norm_rotate(x, turn, eps=1e-6, back=True)], dim=2)


def make_site(k, streams, d, outs, scale):
    fn = k.pack(rand(outs, streams * d) * 0.1)
    return Site(fn, rand(scale) * 0.3, rand(outs), rand(d), streams, 20, 1e-6, 1e-6)


def hyper(k, take, streams=4):
    d = 24
    x, y = rand(TOKENS, streams, d)[take], rand(TOKENS, d)[take]
    outs = 2 * streams + streams * streams
    own = hyper_of(k)
    seen, place, mix = own.read(x, make_site(k, streams, d, outs, outs))
    out = own.write(x, y, place, mix)
    head = own.head(x, make_site(k, streams, d, streams, 1))
    return torch.cat([seen, place, mix.flatten(1), out.flatten(1), head], dim=1)


def hyper_of_three(k, take):
    return hyper(k, take, streams=3)


def hyper_of_nine(k, take):
    return hyper(k, take, streams=9)


def hyper_of_seventy(k, take):
    return hyper(k, take, streams=70)


def experts(k, take):
    x, logits, bias = rand(TOKENS, 40)[take], rand(TOKENS, 6)[take], rand(6)
    chosen, weights = k.route(logits, None, bias, 2, 1.5)
    order = chosen.argsort(1)
    chosen, weights = chosen.gather(1, order).contiguous(), weights.gather(1, order).contiguous()
    matrices = k.pack_all(rand(7, 2 * 20, 40)), k.pack_all(rand(7, 40, 20))
    hashed = torch.arange(TOKENS)[take][:, None] * torch.tensor([1, 3]) % 6
    _, given = k.route(logits, hashed.contiguous(), None, 2, 1.5)
    return torch.cat([k.experts(x, chosen, weights, matrices, 7.0), chosen.float(), given], dim=1)


CASES = [
    linear,
    linear_wide,
    linear_to_one,
    linear_groups,
    linear_groups_to_one,
    norm,
    norm_rotate,
    hyper,
    hyper_of_three,
    hyper_of_nine,
    hyper_of_seventy,
    experts,
]


@pytest.mark.parametrize("case", CASES)
def test_a_native_kernel_is_its_plain_twin(case):
    everything = torch.arange(TOKENS)
    torch.testing.assert_close(case(native, everything), case(reference, everything), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_token_does_not_depend_on_its_company(case):
    whole = case(native, torch.arange(TOKENS))
    for first, count in ((0, 1), (7, 1), (130, 1), (3, 2), (50, 3), (5, 5), (64, 7), (20, 49), (1, 130)):
        take = torch.arange(first, first + count)
        assert torch.equal(case(native, take), whole[take]), (first, count)
    shuffled = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(5))
    assert torch.equal(case(native, shuffled), whole[shuffled])


def wide_experts(k):
    x, matrices = rand(3, 60_000) * 0.01, (k.pack_all(rand(3, 2, 60_000)), k.pack_all(rand(3, 60_000, 1)))
    return k.experts(x, torch.tensor([[0], [1], [0]]), torch.ones(3, 1), matrices, 7.0)


def many_experts(k):
    chosen, weights = k.route(rand(2, 200_000), None, torch.arange(200_000.0), 2, 1.5)
    return torch.cat([chosen.sort(1).values, weights], dim=1)


def flat_of(tokens, start, pages=1):
    """One text in ring 0, from position `start` on, in pages 0, 1 and so on."""
    numbers = torch.arange(start, start + tokens), *(torch.full((tokens,), each) for each in (start, 0, 0))
    return Flat(*(each.int() for each in numbers), torch.arange(pages, dtype=torch.int32)[None])  # type: ignore[call-arg]


def fp32_entries(x, per_row=1):
    rows = x.clone().view(torch.uint8).view(-1, per_row * 4 * x.shape[1])
    return Entries(rows, per_row, (4 * x.shape[1],), "fp32", x.shape[1], 0, 0)


def wide_entries(k):
    dim, pages = 200_000, fp32_entries(torch.zeros(1, 200_000))
    table, write_from = (torch.ones(3, 2), torch.zeros(3, 2)), torch.zeros(3, dtype=torch.int32)
    recent = torch.zeros(3, 2 * dim), rand(3, 2 * dim)
    k.compress_store(recent, rand(3, dim), torch.ones(dim), 1e-6, table, pages, flat_of(3, 0), write_from, 3)
    return pages.rows.view(torch.float32)


def wide_index(k):
    keys = fp32_entries(rand(6, 1000), per_row=6)
    return k.best_rows(rand(1, 200, 1000), rand(1, 200), keys, 1, flat_of(1, 5), 2, 6)


@pytest.mark.parametrize("case", [wide_experts, many_experts, wide_entries, wide_index])
def test_what_a_kernel_needs_meanwhile_is_not_on_the_stack(case):
    """An engine's thread may have a small one, and a model may be wide."""
    usual = threading.stack_size(512 * 1024)
    try:
        with ThreadPoolExecutor(1) as executor:
            mine = executor.submit(case, native).result()
    finally:
        threading.stack_size(usual)
    torch.testing.assert_close(mine, case(reference), atol=1e-3, rtol=1e-3)


def test_ties_of_experts_go_to_the_lower():
    chosen, _ = native.route(torch.zeros(1, 6), None, torch.tensor([0.0, 1, 0, 1, 1, 0]), 2, 1.0)
    assert chosen.tolist() == [[1, 3]]


# What the wrappers check: whatever C would read otherwise than it lies there


def arguments():
    """Of each kernel, arguments that fit, by name."""
    turn, ints = (rand(3, 2), rand(3, 2, seed=1)), torch.zeros(3, dtype=torch.int32)
    window = fp32_entries(rand(4, 12)), fp32_entries(rand(3, 12))
    flat, tails = flat_of(3, 3, pages=2), fp32_entries(rand(12, 12), per_row=6)
    hyper = {"x": rand(3, 4, 6), "y": rand(3, 6), "place": rand(3, 4), "mix": rand(3, 4, 4)}
    two = {"chosen": torch.zeros(3, 2, dtype=torch.int64), "weights": rand(3, 2)}
    return {
        "linear": {"x": rand(3, 7), "weight": native.pack(rand(5, 7))},
        "linear_groups": {"x": rand(3, 14), "weights": native.pack_all(rand(2, 5, 7))},
        "norm": {"x": rand(3, 7), "weight": rand(7), "eps": 1e-6},
        "norm_rotate": {"x": rand(3, 2, 8), "rotation": turn, "eps": 1e-6, "weight": rand(8)},
        "hyper_read": {"x": rand(3, 4, 6), "site": make_site(native, 4, 6, 24, 24)},
        "hyper_write": hyper,
        "hyper_head": {"x": rand(3, 4, 6), "site": make_site(native, 4, 6, 4, 1)},
        "route": {"logits": rand(3, 5), "chosen": None, "bias": rand(5), "k": 2, "factor": 1.5},
        "experts": {
            "x": rand(3, 6),
            **two,
            "matrices": (native.pack_all(rand(4, 8, 6)), native.pack_all(rand(4, 6, 4))),
            "limit": 7.0,
        },
        "gated": {"x": rand(3, 8)},
        "route_softmax": {"logits": rand(3, 5), "k": 2, "normed": True, "position": ints},
        "store_heads": {
            "key": rand(3, 2, 6),
            "value": rand(3, 2, 6, seed=1),
            "rotation": (rand(3, 3), rand(3, 3, seed=1)),
            "entries": tails,
            "flat": flat,
            "write_from": ints,
            "eps": 1e-6,
            "weight": rand(6),
        },
        "grouped_attention": {
            "q": rand(3, 4, 6),
            "entries": tails,
            "kv_heads": 2,
            "flat": flat,
            "scale": 0.5,
            "longest": 6,
            "sinks": rand(4),
        },
        "keep": {"kept": rand(4, 6), "new": rand(3, 6), "flat": flat, "end": ints + 6, "ring_rows": 4},
        "compress_store": {
            "recent": (rand(8, 12), rand(3, 12)),
            "bias": rand(4, 6),
            "weight": rand(6),
            "eps": 1e-6,
            "table": (rand(6, 2), rand(6, 2)),
            "pages": fp32_entries(rand(2, 6)),
            "flat": flat,
            "write_from": ints,
            "ring_rows": 8,
        },
        "best_rows": {
            "q": rand(3, 2, 12),
            "weights": rand(3, 2),
            "keys": tails,
            "ratio": 1,
            "flat": flat,
            "k": 2,
            "most": 6,
        },
        "attention": {
            "q": rand(3, 2, 12),
            "recent": window,
            "window": 4,
            "entries": tails,
            "chosen": torch.zeros(3, 4, dtype=torch.int32),
            "ratio": 1,
            "flat": flat,
            "sinks": rand(2),
            "scale": 0.5,
            "spare": 1,
        },
    }


def spoiled(value):  # noqa: C901
    """(how, value) for every way a tensor, or one inside of a tuple or a site, can be unfit."""
    if isinstance(value, torch.Tensor):
        wide = torch.stack([value, value], dim=-1)
        yield "dtype", value.to(torch.int16)
        yield "strides", wide[..., 0]
        yield "too wide", torch.cat([value, value], dim=-1)
        yield "too narrow", value[..., :-1].contiguous()
        yield "flat", value.flatten()[None, None, None]
    elif isinstance(value, Site):
        for name in ("fn", "base", "weight"):
            for how, each in spoiled(getattr(value, name)):
                yield f"{name} {how}", replace(value, **{name: each})
    elif isinstance(value, native.PackedMatrix):
        yield "n", value._replace(n=value.n + 1)
        yield "k", value._replace(k=value.k + 1)
    elif isinstance(value, Entries):
        yield "dtype", value._replace(rows=value.rows.short())
        yield "strides", value._replace(rows=torch.stack([value.rows, value.rows], dim=-1)[..., 0])
        yield "too narrow", value._replace(rows=value.rows[:, :-1])
        yield "dim", value._replace(dim=value.dim + 1)
    elif isinstance(value, Flat):
        for name, each in value._asdict().items():
            for how, other in spoiled(each):
                if (name, how) not in {("pages", "too wide"), ("pages", "too narrow")}:
                    yield f"{name} {how}", value._replace(**{name: other})
    elif isinstance(value, tuple):
        for i, each in enumerate(value):
            for how, other in spoiled(each):
                yield f"{i} {how}", (*value[:i], other, *value[i + 1 :])


FREE = {"n", "too wide", "too narrow"}
"""What may have any width: outputs of a matrix, lists of row numbers."""
FREE_OF = {
    "linear": ("weight",),
    "linear_groups": ("weights",),
    "attention": ("chosen",),
    "gated": ("x",),
    "route_softmax": ("logits",),
}
REFUSED = "a native kernel was given|unpack|do not hold"
CALLED = {"compress": "compress_store", "put_entries": "compress_store"}
"""C functions that have no wrapper of their own name."""


def function_of(name):
    own = name.removeprefix("hyper_")
    return getattr(native if own == name else hyper_of(native), own)


@pytest.mark.parametrize("name", sorted({*(CALLED.get(each, each) for each in SIGNATURES), "norm"}))
def test_a_kernel_refuses_what_it_would_read_wrongly(name):
    given, function = arguments()[name], function_of(name)
    function(**given)
    for key, value in given.items():
        if key == "table":  # torch reads it
            continue
        free = FREE if key in FREE_OF.get(name, ()) else ()
        for how, other in ((how, other) for how, other in spoiled(value) if how not in free):
            if how == "dim" and name in ("store_heads", "grouped_attention"):  # the queries say how wide
                continue
            with pytest.raises((ValueError, IndexError), match=REFUSED):
                function(**given | {key: other})
                pytest.fail(f"{name} took {key}: {how}")


def test_experts_of_another_number_are_refused():
    given = arguments()["experts"]
    fewer = native.pack_all(rand(3, 8, 6)), given["matrices"][1]
    with pytest.raises(ValueError, match="a native kernel was given 3 panels"):
        native.experts(**given | {"matrices": fewer})


def test_rows_may_be_apart_where_a_kernel_is_told_how_far():
    wide = rand(3, 20)
    assert torch.equal(
        native.norm(wide[:, 4:11], rand(7), 1e-6), native.norm(wide[:, 4:11].clone(), rand(7), 1e-6)
    )
