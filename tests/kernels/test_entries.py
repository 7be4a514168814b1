"""Goal: what is written is what is read, and reading and writing again changes nothing. Method: both
formats, hard values."""

from functools import partial

import pytest
import torch

from tiercel.kernels.entries import (
    decode_fp8,
    decode_fp8_index,
    decode_plain,
    encode_fp8,
    encode_fp8_index,
    encode_plain,
)


def values(n=40, dim=64):
    x = torch.randn(n, dim, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, n)[:, None]
    x[0] = 0
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_entries_are_the_values_themselves(dtype):
    assert torch.equal(decode_plain(encode_plain(values(), dtype), dtype), values().to(dtype).float())


def test_fp8_entries_have_the_bytes_of_the_production_layout():
    x = torch.randn(3, 512)
    value, scale = encode_fp8(x, rope=64, group=64, scale_bytes=8)
    assert value.shape == (3, 576) and scale.shape == (3, 8) and (scale[:, 7] == 0).all()
    assert torch.equal(value[:, 448:].contiguous().view(torch.bfloat16), x[:, 448:].to(torch.bfloat16))


def test_fp8_scales_are_powers_of_two_that_use_the_range():
    x = torch.zeros(3, 64)
    x[:, 0] = torch.tensor([448.0, 449.0, 1e-9])
    _, scale = encode_fp8(x, rope=0, group=64, scale_bytes=4)
    assert scale[:, 0].tolist() == [127, 128, 127 - 22], "1, 2, and the least amax of 1e-4"


@pytest.mark.parametrize("exponent", [-20, -10, -1, 0, 1, 9, 20, 60])
def test_fp8_scales_are_exact_at_the_edge_between_two_powers(exponent):
    full = torch.tensor(448.0 * 2.0**exponent)
    x = torch.zeros(2, 64)
    x[:, 0] = torch.stack([full, torch.nextafter(full, torch.tensor(torch.inf))])
    _, scale = encode_fp8(x, rope=0, group=64, scale_bytes=4)
    assert scale[:, 0].tolist() == [127 + max(exponent, -22), 127 + max(exponent + 1, -22)]


def test_fp8_is_within_its_precision_and_writing_again_changes_no_value():
    x = values()
    once = decode_fp8(encode_fp8(x, rope=16, group=16, scale_bytes=4), rope=16, group=16)
    big = x.abs() > x[:, :48].abs().amax(1, keepdim=True) / 100
    assert ((once - x).abs()[big] <= x.abs()[big] / 16 + 1e-6).all()
    twice = decode_fp8(encode_fp8(once, rope=16, group=16, scale_bytes=4), rope=16, group=16)
    assert torch.equal(once, twice)


def test_index_entries_are_within_their_precision():
    x = values(dim=32)
    value, scale = encode_fp8_index(x)
    assert value.shape == (40, 32) and scale.shape == (40, 4)
    back = decode_fp8_index((value, scale))
    assert ((back - x).abs() <= x.abs().amax(1, keepdim=True) / 16 + 1e-5).all()


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_entries_may_lie_at_any_byte(shift):
    """A row in memory begins where the one before it ends."""
    x = values(1, 33)
    for encode, decode in (
        (partial(encode_plain, dtype=torch.float32), partial(decode_plain, dtype=torch.float32)),
        (partial(encode_plain, dtype=torch.bfloat16), partial(decode_plain, dtype=torch.bfloat16)),
        (partial(encode_fp8, rope=8, group=1, scale_bytes=28), partial(decode_fp8, rope=8, group=1)),
        (encode_fp8_index, decode_fp8_index),
    ):
        parts = encode(x + 1)
        moved = tuple(torch.cat([torch.zeros(shift, dtype=torch.uint8), p[0]])[shift:][None] for p in parts)
        assert torch.equal(decode(moved), decode(parts))
