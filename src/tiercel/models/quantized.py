"""Numbers that are stored with scales: fp8 (e4m3) and fp4 (e2m1).

    stored   numbers under one scale   for kernels that multiply fp8            for all others
    fp8      128 x 128                 as stored                                number · scale
    fp4      1 x 32                    as fp8 with scales of 128 x 128, or,     number · scale
                                       where that is not exact, number · scale

An fp4 number is 0 or ±0.5 … ±6 with one bit of mantissa, and its scale is a power of two. e4m3 has three bits
and 2⁻⁹ … 448. So fp4 is exact as fp8 where scales inside 128 x 128 numbers are at most 2¹⁴ times each
other.
"""

from __future__ import annotations

from functools import cache
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from tiercel.models.checkpoint import StoredTensor, check_finite

Shape = tuple[int, ...]

FP8 = torch.float8_e4m3fn
FP8_BLOCK = (128, 128)
"""Rows and columns of an fp8 weight under one scale: `quantization_config.weight_block_size`."""

SCALES = ("F8_E8M0", "F32", "BF16", "U8")
"""U8 is e8m0 too, from before safetensors had a name for it."""

EXPONENTS = ("F8_E8M0", "U8")

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""e2m1 by its three low bits; the fourth is the sign. Two values per byte, the first in the low half."""

FP4_BLOCK = (1, 32)

BLOCKS = {"F8_E4M3": FP8_BLOCK, "F4": FP4_BLOCK, "I8": FP4_BLOCK, "U8": FP4_BLOCK}
"""Rows and columns under one scale, by the dtype a quantized weight is stored in."""

PACKED = ("I8", "U8")
"""Dtypes whose shape in the header counts two fp4 values as one. (F4 counts values.)"""

HEADROOM = 64.0
"""The scale of 128 x 128 numbers is the largest of their fp4 scales divided by this. So its largest number
becomes 384, close to the end of fp8's range, and smaller scales have the most room."""

LEAST_SCALE = 2.0**-126
"""The least fp32 that every device multiplies exactly."""


def scales_of(shape: Shape, block: tuple[int, int]) -> Shape:
    """The shape of the scales of a matrix, or of several."""
    *before, rows, columns = shape
    return *before, ceil(rows / block[0]), ceil(columns / block[1])


def may_stay(dtype: str, scale_dtype: str) -> bool:
    """Whether numbers of this dtype may become fp8 with scales of 128 x 128, judged by the headers."""
    return BLOCKS.get(dtype) == FP8_BLOCK or (dtype in BLOCKS and scale_dtype in EXPONENTS)


def as_fp32(scale: Tensor) -> Tensor:
    """Scales as they are stored → fp32."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).to(torch.float32)


def put(target: Tensor, target_scale: Tensor, values: Tensor, scale: Tensor, block: tuple[int, int]) -> bool:
    """Writes fp8 or fp4 numbers as fp8 with scales of 128 x 128. False: some would have to be rounded."""
    if block == FP8_BLOCK:
        target.copy_(values)
        target_scale.copy_(scale)
        return True
    if target.dim() > 2:
        matrices = zip(target, target_scale, values, scale, strict=True)
        return all(put(*own, block) for own in matrices)
    high, wide = (size // small for size, small in zip(FP8_BLOCK, block, strict=True))
    padded = F.pad(scale, (0, -scale.shape[1] % wide))
    most = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).amax((1, 3))
    target_scale.copy_((most / HEADROOM).clamp_min(LEAST_SCALE))
    columns = target.shape[1]
    new = _spread(_spread(target_scale, 0, high), 1, FP8_BLOCK[1])[:, :columns]
    old = _spread(scale, 1, block[1])[:, :columns]
    numbers = _fp4_numbers(values, target)
    target.copy_(numbers * (old / new))
    return torch.equal(target.float() * new, numbers * old)


def check_fp8(numbers: Tensor, scale: Tensor, stored: StoredTensor) -> None:
    """Refuses NaN, and scales that make Inf of the largest number. (The largest code without sign is NaN.)"""
    largest = (numbers.view(torch.uint8) & 0x7F).max().view(FP8)
    check_finite(largest.float() * scale, stored)


def dequantize(target: Tensor, values: Tensor, scale: Tensor, block: tuple[int, int]) -> None:
    """Writes values x scale in place, one matrix after the other, so that nothing big is in memory twice."""
    if target.dim() > 2:
        for own in zip(target, values, scale, strict=True):
            dequantize(*own, block)
        return
    # Stored bytes are sent to the device and converted there: they are the fewest.
    target.copy_(_fp4_numbers(values, target) if block == FP4_BLOCK else values.to(target.device))
    rows, columns = block
    across = _spread(scale, 1, columns)[:, : target.shape[1]]
    if rows == 1:
        target.mul_(across)
        return
    for i, row in enumerate(across):
        target[i * rows : (i + 1) * rows].mul_(row)


def _spread(scale: Tensor, dim: int, count: int) -> Tensor:
    return scale.repeat_interleave(count, dim)


def _fp4_numbers(values: Tensor, like: Tensor) -> Tensor:
    """The two fp4 numbers of each byte as fp32, in the shape and on the device of `like`."""
    index = values.view(torch.uint8).flatten().to(like.device).to(torch.int32)
    return _fp4_pairs(like.device).index_select(0, index).view(like.shape)


@cache
def _fp4_pairs(device: torch.device) -> Tensor:
    """[256, 2]: the two values of every byte."""
    signed = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([signed[byte & 15], signed[byte >> 4]], dim=1)
