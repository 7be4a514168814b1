"""Texts whose rows lie encoded in rings and pages, and calls on them, as kernels for CUDA take them.

What a token has is drawn from its text and position alone. Where it lies is drawn for each call: which ring,
which places, where spans are cut. Bytes that were not written are 0xFF, which is NaN in every encoding.
"""

from typing import NamedTuple

import torch

from tiercel.kernels import entries as codec
from tiercel.kernels.entries import Entries, Flat

PADDING = -1
"""The text of a token that is none."""


class Span(NamedTuple):
    text: int
    start: int
    end: int
    ring: int = 0


def rand(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def group_of(dim, rope):
    """How many channels share a scale, as DeepSeek V4 declares it."""
    return min(64, (dim - rope) & -(dim - rope))


def sizes_of(encoding, dim, rope, group=0):
    nope = dim - rope
    groups = nope // (group or group_of(dim, rope))
    return {
        "fp32": (4 * dim,),
        "bf16": (2 * dim,),
        "fp8_row": (dim, 4),
        "fp8_groups": (nope + 2 * rope, -(-groups // 4) * 4),
    }[encoding]


def encode(x, encoding, rope, group=0):
    dim = x.shape[1]
    match encoding:
        case "fp32":
            return codec.encode_plain(x, torch.float32)
        case "bf16":
            return codec.encode_plain(x, torch.bfloat16)
        case "fp8_row":
            return codec.encode_fp8_index(x)
    return codec.encode_fp8(x, rope, group or group_of(dim, rope), sizes_of(encoding, dim, rope, group)[1])


def decode(parts, encoding, rope, group=0):
    match encoding:
        case "fp32":
            return codec.decode_plain(parts, torch.float32)
        case "bf16":
            return codec.decode_plain(parts, torch.bfloat16)
        case "fp8_row":
            return codec.decode_fp8_index(parts)
    return codec.decode_fp8(parts, rope, group or group_of(parts[0].shape[1] - rope, rope))


def as_stored(x, encoding, rope=0, group=0):
    """Numbers after encoding and decoding."""
    return decode(encode(x, encoding, rope, group), encoding, rope, group)


def store(x, numbers, rows, per_row, encoding, rope=0, group=0, device="cpu"):
    """Entries of `rows` rows with x at `numbers`, in rows that lie apart in larger memory and begin at
    multiples of 16 bytes."""
    dim = x.shape[1]
    sizes = sizes_of(encoding, dim, rope, group)
    width = per_row * sum(sizes)
    memory = torch.full((rows, -(-width // 16) * 16 + 32), 0xFF, dtype=torch.uint8)
    view = memory[:, 16 : 16 + width]
    parts = view.split([per_row * size for size in sizes], 1)
    for own, size, data in zip(parts, sizes, encode(x, encoding, rope, group), strict=True):
        own.unflatten(1, (per_row, size))[numbers // per_row, numbers % per_row] = data
    if encoding == "fp8_groups":
        group = group or group_of(dim, rope)
    return Entries(memory.to(device)[:, 16 : 16 + width], per_row, sizes, encoding, dim, rope, group)


class Call:
    """The flat tokens of some spans; a span of `PADDING` has no text."""

    def __init__(self, spans, *, per_row, ratio, entries_most, seed=0, rings=4, device="cpu"):
        self.spans, self.rings, self.device = spans, rings, device
        self.per_row, self.ratio = per_row, ratio
        texts, positions, starts, firsts, own = [], [], [], [], []
        for span in spans:
            for position in range(span.start, span.end):
                real = span.text != PADDING
                texts.append(span.text)
                positions.append(position if real else -1)
                starts.append(span.start if real else -1)
                firsts.append(len(texts) - 1 - (position - span.start))
                own.append(span.ring)
        pages_each = -(-entries_most // per_row)
        random = torch.Generator().manual_seed(seed)
        self.places = rings * pages_each
        table = torch.randperm(self.places, generator=random).view(rings, pages_each).int()
        numbers = [torch.tensor(each, dtype=torch.int32) for each in (positions, starts, firsts, own)]
        self.texts, self.table, self.ring = texts, table, numbers[3]
        self.positions = positions
        self.visible = (numbers[0] + 1) // ratio
        known = torch.full_like(table, 2**30)  # what a kernel must not read
        for span in spans:
            if span.text != PADDING:
                used = -(-(span.end // ratio) // per_row)
                known[span.ring, :used] = table[span.ring, :used]
        self.flat = Flat(*(each.to(device) for each in (*numbers, known)))

    def numbers(self, ring, e):
        """Numbers in the pages of entries e [n] of the text in a ring."""
        return self.table[ring, e // self.per_row] * self.per_row + e % self.per_row

    def tokens(self):
        """(flat number, text, position), padding left out."""
        every = enumerate(zip(self.texts, self.positions, strict=True))
        return [(i, text, position) for i, (text, position) in every if text != PADDING]

    def recent(self, rows_of, ring_rows, encoding, rope, group=0):
        """(kept, new): `rows_of(text)` [positions, dim]."""
        dim = rows_of(0).shape[1]
        where, kept = [], []
        for span in self.spans:
            if span.text != PADDING:
                before = torch.arange(max(0, span.start - ring_rows), span.start)
                where.append(span.ring * ring_rows + before % ring_rows)
                kept.append(rows_of(span.text)[before])
        new = torch.full((len(self.texts), dim), float("nan"))
        for i, text, position in self.tokens():
            new[i] = rows_of(text)[position]
        make = {"encoding": encoding, "rope": rope, "group": group, "device": self.device, "per_row": 1}
        old = store(torch.cat(kept), torch.cat(where), self.rings * ring_rows, **make)
        return old, store(new, torch.arange(len(new)), len(new), **make)

    def pages(self, entries_of, encoding, rope, group=0):
        """`entries_of(text)` [entries, dim]; those that a span does not see yet are not written."""
        where, x = [], []
        for span in self.spans:
            if span.text != PADDING:
                e = torch.arange(span.end // self.ratio)
                where.append(self.numbers(span.ring, e))
                x.append(entries_of(span.text)[e])
        where, x = torch.cat(where), torch.cat(x)
        return store(x, where, self.places, self.per_row, encoding, rope, group, device=self.device)
