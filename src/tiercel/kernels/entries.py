"""The one quantizer: from entries to the bytes that a cache stores, and back.

fp32, bf16    the values themselves
fp8           nope channels as e4m3 in groups with a power-of-two scale (one exponent byte each), rope
              channels as bf16: value = nope bytes then rope bytes, scale = exponent bytes, padded
fp8 index     all channels as e4m3 with one fp32 scale
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8_MAX = 448.0
AMAX_LEAST = 1e-4


class Entries(NamedTuple):
    """Encoded entries in memory, numbered row · per_row + number in the row."""

    rows: Tensor
    """uint8 [rows, row_bytes]. A row is its parts one after the other: all values, then all scales."""
    per_row: int
    sizes: tuple[int, ...]
    """Bytes of one entry in each part."""
    encoding: str
    dim: int
    rope: int
    """In `fp8_groups`, the number of channels at the end that stay bf16. In other encodings 0."""
    group: int
    """In `fp8_groups`, the number of other channels that share a scale. In other encodings 0."""


ITEM = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The encodings whose bytes are the numbers."""


def encode(x: Tensor, how: Entries) -> tuple[Tensor, ...]:
    """[n, dim] numbers → one [n, bytes] tensor for each part."""
    match how.encoding:
        case "fp8_row":
            return encode_fp8_index(x)
        case "fp8_groups":
            return encode_fp8(x, how.rope, how.group, how.sizes[1])
    return encode_plain(x, ITEM[how.encoding])


def decode(parts: tuple[Tensor, ...], how: Entries) -> Tensor:
    """One [n, bytes] tensor for each part → [n, dim] fp32."""
    match how.encoding:
        case "fp8_row":
            return decode_fp8_index(parts)
        case "fp8_groups":
            return decode_fp8(parts, how.rope, how.group)
    return decode_plain(parts, ITEM[how.encoding])


def parts_of(entries: Entries) -> tuple[Tensor, ...]:
    """Views [rows, per_row, bytes], one for each part."""
    wide = [entries.per_row * size for size in entries.sizes]
    split = entries.rows[:, : sum(wide)].split(wide, 1)
    each = zip(split, entries.sizes, strict=True)
    return tuple(part.unflatten(1, (entries.per_row, size)) for part, size in each)


def read_entries(entries: Entries, numbers: Tensor) -> Tensor:
    """[n, dim] fp32: the entries of these numbers."""
    where = numbers // entries.per_row, numbers % entries.per_row
    return decode(tuple(part[where] for part in parts_of(entries)), entries)


def read_rows(entries: Entries, rows: Tensor) -> Tensor:
    """[n · per_row, dim] fp32: all entries of these rows."""
    return decode(tuple(part[rows].flatten(0, 1) for part in parts_of(entries)), entries)


def write_entries(entries: Entries, numbers: Tensor, x: Tensor) -> None:
    where = numbers // entries.per_row, numbers % entries.per_row
    for part, data in zip(parts_of(entries), encode(x, entries), strict=True):
        part[where] = data


def move_entries_plain(to: Entries, to_numbers: Tensor, source: Entries, source_numbers: Tensor) -> None:
    """Entry source_numbers[i] becomes entry to_numbers[i]. -1 on either side: nothing moves."""
    both = (to_numbers >= 0) & (source_numbers >= 0)
    here, there = to_numbers[both], source_numbers[both]
    for new, old in zip(parts_of(to), parts_of(source), strict=True):
        new[here // to.per_row, here % to.per_row] = old[there // source.per_row, there % source.per_row]


class Flat(NamedTuple):
    """Where each flat token of a call stands: int32 [tokens] on the device. Padding has position -1."""

    position: Tensor
    start: Tensor
    """The first position of the token's span in this call."""
    first: Tensor
    """The flat number of that span's first token."""
    ring: Tensor
    pages: Tensor
    """int32 [rings, most pages]: the device place of each page of the text in a ring."""


class Numbering(NamedTuple):
    """How entries are numbered in a memory that holds the rows of all layers and pools. The rows of `Entries`
    begin there at multiples of a stride that divides a row. Entry e of a text, in the page with place p in
    `pages`, has the number

        (p · step + first) · per_row + e % per_row      p >= 0: the page is on the device
        (staged - 2 - p) · per_row + e % per_row        p <= -2: the row of this layer is staged
        -2 - e                                          p == -1: the page is on the host, to be resolved
    """

    pages: Tensor
    """int32 [rings, most pages]: the place of each page of the text in a ring."""
    step: int = 1
    """Strides from a place to the next."""
    first: int = 0
    """The stride at which place 0 has the row."""
    staged: int = 0
    """The stride at which staged rows begin."""


def encode_plain(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """[n, dim] → one part [n, bytes]."""
    return (x.to(dtype).contiguous().view(torch.uint8),)


def decode_plain(parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    return _as(parts[0], dtype).float()


def encode_fp8(x: Tensor, rope: int, group: int, scale_bytes: int) -> tuple[Tensor, ...]:
    """[n, dim] → value [n, nope + 2·rope], scale [n, scale_bytes]."""
    nope = x.shape[-1] - rope
    groups = x[:, :nope].float().view(x.shape[0], nope // group, group)
    amax = groups.abs().amax(dim=-1).clamp(min=AMAX_LEAST)
    mantissa, exponent = torch.frexp(_over_max(amax))
    exponent = (exponent - (mantissa == 0.5).int()).float()  # exactly the least e with amax / FP8_MAX <= 2^e
    scaled = groups * torch.exp2(-exponent)[..., None]
    value = scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    rotary = x[:, nope:].to(torch.bfloat16).contiguous().view(torch.uint8)
    scale = torch.zeros(x.shape[0], scale_bytes, dtype=torch.uint8, device=x.device)
    scale[:, : nope // group] = (exponent + 127).to(torch.uint8)
    return torch.cat([value, rotary], dim=1), scale


def decode_fp8(parts: tuple[Tensor, ...], rope: int, group: int) -> Tensor:
    value, scale = parts
    nope = value.shape[-1] - 2 * rope
    groups = value[:, :nope].contiguous().view(torch.float8_e4m3fn).float().view(-1, nope // group, group)
    exponent = scale[:, : nope // group].float() - 127
    plain = (groups * torch.exp2(exponent)[..., None]).flatten(1)
    return torch.cat([plain, _as(value[:, nope:], torch.bfloat16).float()], dim=1)


def encode_fp8_index(x: Tensor) -> tuple[Tensor, ...]:
    """[n, dim] → value [n, dim], scale [n, 4]."""
    scale = _over_max(x.float().abs().amax(dim=-1, keepdim=True).clamp(min=AMAX_LEAST))
    value = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return value, scale.contiguous().view(torch.uint8)


def _over_max(amax: Tensor) -> Tensor:
    """amax / FP8_MAX, rounded once. torch on CUDA would multiply by the inverse of a plain number."""
    return amax / torch.full_like(amax, FP8_MAX)


def decode_fp8_index(parts: tuple[Tensor, ...]) -> Tensor:
    value, scale = parts
    return value.contiguous().view(torch.float8_e4m3fn).float() * _as(scale, torch.float32)


def _as(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers. They are copied only if a row does not begin at a multiple of the number's size."""
    data = data.contiguous()
    if any(step % dtype.itemsize for step in (data.storage_offset(), *data.stride()[:-1])):
        data = data.clone(memory_format=torch.contiguous_format)
    return data.view(dtype)
