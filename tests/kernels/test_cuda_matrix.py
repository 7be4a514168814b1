"""Goal: products on CUDA are right, and a row's bits do not depend on its company. Method: every dtype,
shapes with partial tiles, each way to launch; on a GPU also the shapes of V4-Flash. In the interpreter sums
are numpy's, so bits are compared there on whole numbers, whose sums are exact in every order."""

import pytest
import torch

from tests.kernels.devices import every_device
from tiercel.kernels import reference
from tiercel.kernels.cuda import matrix
from tiercel.kernels.cuda.matrix import (
    SMALL_ROWS,
    Weight,
    linear,
    linear_groups,
    pack,
    pack_all,
    segments_of,
)

FP32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
every_dtype = pytest.mark.parametrize(
    ("dtype", "stored"),
    [(FP32, FP32), (FP32, BF16), (FP32, FP8), (BF16, FP32), (BF16, BF16), (BF16, FP8)],
    ids=lambda each: str(each).removeprefix("torch."),
)

SMALL = [(1, 40, 96), (1, 150, 64), (1, 70, 1100), (3, 40, 130)]
"""m matrices [n, k]: partial tiles in n and k, one and several segments."""
FLASH = [
    (1, 1536, 4096), (1, 3712, 4096), (1, 256, 4096), (1, 40960, 1024), (8, 1024, 4096), (1, 4096, 8192),
    (1, 129280, 4096),
]  # fmt: skip
"""Those of V4-Flash."""


def shapes(device, dtype):
    return SMALL + FLASH if device == "cuda" and dtype == BF16 else SMALL


def seeded(device, seed):
    return torch.Generator(device).manual_seed(seed)


def rand(*shape, device, seed=0):
    return torch.randn(shape, generator=seeded(device, seed + sum(shape)), device=device)


def whole(*shape, device, seed=0):
    """Whole numbers from -2 to 2."""
    return torch.randint(-2, 3, shape, generator=seeded(device, seed + sum(shape)), device=device).float()


def scales_for(weight):
    """Powers of two, one for 128 x 128."""
    *m, n, k = weight.shape
    return torch.exp2(whole(*m, -(-n // 128), -(-k // 128), device=weight.device))


def spread(scale, shape):
    return scale.repeat_interleave(128, -2)[..., : shape[-2], :].repeat_interleave(128, -1)[..., : shape[-1]]


def packed(weight, stored):
    """(the packed weights, the numbers they stand for)"""
    if stored != FP8:
        return pack_all(weight.to(stored)), weight.to(stored).float()
    data, scale = weight.to(FP8), scales_for(weight)
    return pack_all(data, scale), data.float() * spread(scale, weight.shape)


def multiply(x, weights, dtype=None):
    """By `linear` if there is one matrix."""
    if len(weights.data) > 1:
        return linear_groups(x, weights)
    return linear(x, Weight(*(None if each is None else each[0] for each in weights)), dtype)


@every_device
@every_dtype
def test_a_product_is_close_to_the_exact_one(device, dtype, stored):
    for m, n, k in shapes(device, dtype):
        weights, numbers = packed(rand(m, n, k, device=device) * k**-0.5, stored)
        numbers = numbers.to(dtype).double()
        for rows in (1, 17, SMALL_ROWS + 20) if device == "cuda" or dtype == BF16 else (1, 65):
            x = rand(rows, m * k, device=device).to(dtype)
            exact = reference.linear_groups(x.double(), numbers)
            most = reference.linear_groups(x.double().abs(), numbers.abs())
            y = multiply(x, weights, FP32) if m == 1 else multiply(x, weights)
            rounding = 2**-8 * exact.abs() if y.dtype == BF16 else 0
            assert bool(((y.double() - exact).abs() <= rounding + 2**-17 * most).all()), (m, n, k, rows)


@every_device
@pytest.mark.parametrize(("dtype", "stored"), [(FP32, FP32), (BF16, BF16), (BF16, FP8)])
def test_a_row_does_not_depend_on_its_company(device, dtype, stored):
    """Alone it is computed by other programs, in other tiles."""
    numbers = rand if device == "cuda" else whole
    for m, n, k in shapes(device, dtype):
        weights, _ = packed(numbers(m, n, k, device=device), stored)
        x = numbers(SMALL_ROWS + 20, m * k, device=device).to(dtype)
        many = multiply(x, weights)
        takes = [[7], list(range(24, 4, -1)), [0], [SMALL_ROWS + 19], list(range(16)), list(range(200))]
        for take in takes if device == "cuda" else takes[:2]:
            assert torch.equal(multiply(x[take], weights), many[take]), (m, n, k, take)


@every_device
@pytest.mark.parametrize("rows", [1, SMALL_ROWS + 20])
def test_no_scale_behind_the_last_one_is_read(device, rows):
    weights, _ = packed(whole(1, 70, 1100, device=device), FP8)
    memory = torch.full([64], torch.nan, device=device)
    scale = memory[: weights.scale.numel()].view_as(weights.scale).copy_(weights.scale)
    x = whole(rows, 1100, device=device).to(BF16)
    assert torch.equal(multiply(x, weights._replace(scale=scale)), multiply(x, weights))


@every_device
@pytest.mark.parametrize("small_rows", [0, SMALL_ROWS])
def test_the_order_of_sums_is_the_one_of_the_picture(device, small_rows, monkeypatch):
    """One product in each 128 of k is not 0, and it is exact: so only its place in the order counts."""
    monkeypatch.setattr(matrix, "SMALL_ROWS", small_rows)
    (n, k), columns = (40, 2500), torch.arange(5, 2500, 128, device=device)
    (count, length), weight = segments_of(1, n, k), rand(n, k, device=device)
    x = torch.zeros(20, k, device=device)
    x[:, columns] = torch.exp2(whole(20, len(columns), device=device))
    total = torch.zeros(20, n, device=device)
    for segment in range(count):
        own = columns[columns // length == segment]
        sums = torch.zeros(20, n, device=device)
        for column in own.tolist():
            sums = sums + x[:, column, None] * weight[None, :, column]
        total = total + sums
    assert count > 1 and torch.equal(linear(x, pack(weight)), total)
    one_by_one = torch.zeros(20, n, device=device)
    for column in columns.tolist():
        one_by_one = one_by_one + x[:, column, None] * weight[None, :, column]
    assert not torch.equal(total, one_by_one), "the numbers tell orders apart"
    if device == "cpu":  # tensor cores round otherwise
        weight = weight.to(BF16)
        wide = linear(x, pack(weight.float()))
        assert torch.equal(linear(x.to(BF16), pack(weight), FP32), wide)


@every_device
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_fp8_weights_are_the_numbers_they_stand_for(device, dtype):
    """Every fp8 number, under scales of both kinds."""
    data = torch.arange(256, dtype=torch.uint8).view(FP8).repeat(3).view(3, 256)
    data = torch.where(data.float().isnan(), 0, data.float()).repeat(50, 1).to(device).to(FP8)
    x = whole(5, 256, device=device).to(dtype)
    powers = scales_for(data).to(torch.float8_e8m0fnu)
    for scale in (powers, rand(2, 2, device=device).abs() + 0.1):
        numbers = (data.float() * spread(scale.float(), data.shape)).to(dtype)
        assert torch.equal(linear(x, pack(data, scale)), linear(x, pack(numbers))), scale.dtype


@every_device
def test_rows_of_x_may_be_part_of_longer_rows(device):
    for dtype in (FP32, BF16):
        long, weight = whole(20, 300, device=device).to(dtype), pack(whole(33, 128, device=device))
        for first in (0, 3, 64):
            x = long[:, first : first + 128]
            assert torch.equal(linear(x, weight), linear(x.contiguous(), weight)), first


@every_device
def test_an_answer_has_the_dtype_that_is_asked_for(device):
    x, weight = whole(2, 64, device=device).to(BF16), pack(whole(8, 64, device=device))
    assert linear(x, weight).dtype == BF16 and linear(x, weight, FP32).dtype == FP32
    assert linear(x[:0], weight).shape == (0, 8)
    assert torch.equal(linear(x, weight, FP32).to(BF16), linear(x, weight))


def test_segments_cover_k_and_are_wholes_of_scales():
    for m, n, k in [*SMALL, *FLASH, (1, 24, 7168), (16, 1024, 4096), (1, 8, 100)]:
        count, length = segments_of(m, n, k)
        assert length % 128 == 0 and (count - 1) * length < k <= count * length
    assert segments_of(1, 4096, 8192) == (4, 2048) and segments_of(1, 40960, 1024) == (1, 1024)


def test_scales_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"weight \[200, 300\] has scales \[2, 2\]"):
        pack(torch.zeros(200, 300).to(FP8), torch.ones(2, 2))
