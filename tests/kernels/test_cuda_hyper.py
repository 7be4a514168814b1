"""Goal: hyper-connections on CUDA are their plain twins, and a token's bits do not depend on its company.
Method: random streams of awkward sizes; then tokens again alone, in another order, beside NaN."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.devices import every_device, rand
from tiercel.kernels.cuda import hyper
from tiercel.kernels.cuda.matrix import pack
from tiercel.kernels.reference import hyper as plain_hyper
from tiercel.kernels.reference.hyper import Site

TYPES = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
"""The type of the streams, and how far an answer of this type may be off."""
every_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


def shapes(device):
    """(streams, channels)"""
    return [(4, 4096)] if device == "cuda" else [(4, 64), (3, 40)]


def make_site(n, d, device, *, head=False, seed=0):
    outs = n if head else n * (n + 2)
    fn, scale, base = rand(outs, n * d, seed=seed), rand(1 if head else outs), rand(outs, seed=seed)
    fn *= (n * d) ** -0.5
    fn, scale, base, weight = (each.to(device) for each in (fn, scale * 0.3, base, rand(d, seed=seed)))
    return Site(pack(fn), scale, base, weight, n, 20, 1e-6, 1e-6)


def plain(site):
    """As the plain twins take it."""
    return replace(site, fn=site.fn.data)


def streams(tokens, n, d, dtype, device):
    """(x, y)"""
    return rand(tokens, n, d).to(device, dtype), rand(tokens, d).to(device, dtype)


def close(mine, theirs, dtype):
    assert mine.isfinite().all()
    torch.testing.assert_close(mine.float(), theirs, atol=TYPES[dtype], rtol=TYPES[dtype])


@every_device
@every_type
def test_a_site_reads_and_writes_as_its_plain_twin(device, dtype):
    for n, d in shapes(device):
        x, y = streams(6, n, d, dtype, device)
        site = make_site(n, d, device)
        seen, place, mix = hyper.read(x, site)
        assert seen.dtype == dtype and place.dtype == mix.dtype == torch.float32
        theirs = plain_hyper.read(x.float(), plain(site))
        close(seen, theirs[0], dtype)
        close(place, theirs[1], torch.float32)
        close(mix, theirs[2], torch.float32)
        out = hyper.write(x, y, place, mix)
        assert out.dtype == dtype
        close(out, plain_hyper.write(x.float(), y.float(), place, mix), dtype)
        head = make_site(n, d, device, head=True)
        close(hyper.head(x, head), plain_hyper.head(x.float(), plain(head)), dtype)


@every_device
@every_type
def test_writing_and_reading_at_once_are_both_bit_by_bit(device, dtype):
    for n, d in shapes(device):
        x, y = streams(5, n, d, dtype, device)
        site = make_site(n, d, device)
        _, place, mix = hyper.read(x, site)
        out = hyper.write(x, y, place, mix)
        both = hyper.write_read(x, y, place, mix, replace(site, base=site.base + 0.1))
        apart = (out, *hyper.read(out, replace(site, base=site.base + 0.1)))
        for mine, other in zip(both, apart, strict=True):
            assert torch.equal(mine, other)


def everything(x, y, site):
    seen, place, mix = hyper.read(x, site)
    answers = [seen, place, mix, *hyper.write_read(x, y, place, mix, site)]
    return torch.cat([each.flatten(1).float() for each in answers], dim=1)


@every_device
@every_type
def test_a_token_does_not_depend_on_its_company(device, dtype):
    """67 tokens are two tiles of tokens."""
    n, d = (4, 4096) if device == "cuda" else (4, 32)
    x, y = streams(67, n, d, dtype, device)
    site, head = make_site(n, d, device), make_site(n, d, device, head=True)
    whole, last = everything(x, y, site), hyper.head(x[60:], head)
    for take in ([0], [66], [5, 2, 66, 63]):
        assert torch.equal(everything(x[take], y[take], site), whole[take]), take
    assert torch.equal(hyper.head(x[[66]], head), last[[6]])
    if device == "cuda":
        order = torch.randperm(67, generator=torch.Generator().manual_seed(0))
        assert torch.equal(everything(x[order], y[order], site), whole[order])


@every_device
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # numpy, in the interpreter
def test_a_token_of_nan_reaches_no_other(device):
    x, y = streams(6, 4, 64, torch.bfloat16, device)
    site, others = make_site(4, 64, device), [0, 1, 3, 4, 5]
    clean = everything(x, y, site)
    x[2], y[2] = torch.nan, torch.nan
    assert torch.equal(everything(x, y, site)[others], clean[others])


@every_device
def test_no_tokens_are_no_work(device):
    x, y = streams(0, 4, 64, torch.bfloat16, device)
    seen, place, mix = hyper.read(x, make_site(4, 64, device))
    assert seen.shape == (0, 64) and hyper.write(x, y, place, mix).shape == x.shape
