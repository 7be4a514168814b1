"""Rows of the cache in C: `reference/rows.py` says what each function does.

C reads and writes entries of fp32, in place. Entries of another encoding are decoded first: of a call's texts
all pages that it reads, into fp32 pages with a table of their own. Row numbers and page tables are not
checked: the caller must get them right.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from tiercel.kernels.entries import Entries, Flat, Numbering, read_rows, write_entries
from tiercel.kernels.native.layers import norm_rotate
from tiercel.kernels.native.library import call, dense, step_of, unfit
from tiercel.kernels.reference.layers import CosSin
from tiercel.kernels.reference.rows import Rows


class _FlatOfC(ctypes.Structure):
    """`flat` in vector.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in Flat._fields),
        ("tokens", ctypes.c_int64),
        ("pages_each", ctypes.c_int64),
    )


_latest: tuple[Flat | None, _FlatOfC] = None, _FlatOfC()
"""The flat tokens that were passed last. All layers of a call pass the same: they are checked once."""


def pass_flat(flat: Flat, tokens: int) -> object:
    """Flat tokens as C takes them."""
    global _latest  # noqa: PLW0603
    known, made = _latest
    if known is not flat:
        *numbers, pages = flat
        for each in numbers:
            dense(each, (flat.position.shape[0],), torch.int32)
        rings, pages_each = pages.shape
        dense(pages, (rings, pages_each), torch.int32)
        made = _FlatOfC(*(each.data_ptr() for each in flat), flat.position.shape[0], pages_each)
        _latest = flat, made
    if made.tokens != tokens:
        raise ValueError(f"a native kernel was given {made.tokens} flat tokens, it wants {tokens}")
    return ctypes.byref(made)


def _in_place(entries: Entries) -> bool:
    """Whether C can read these entries where they lie."""
    rows = entries.rows
    return entries.encoding == "fp32" and not (rows.data_ptr() % 4 or rows.stride(0) % 4)


def _passed(entries: Entries) -> tuple[Tensor, int, int]:
    """fp32 entries as C takes them: rows, the distance between two of them, entries of a row."""
    rows, (count, width) = entries.rows, entries.rows.shape
    size = 4 * entries.dim
    if entries.sizes != (size,) or rows.dtype is not torch.uint8 or rows.stride(1) != 1:
        raise unfit(rows, (count, entries.per_row * size), torch.uint8)
    if width < entries.per_row * size:
        raise unfit(rows, (count, entries.per_row * size), torch.uint8)
    return rows, rows.stride(0), entries.per_row


class _Decoded(NamedTuple):
    """The pages that some tokens read, as fp32, with a table of their own."""

    entries: Entries
    flat: Flat


def _decoded(entries: Entries, ratio: int, flat: Flat) -> _Decoded:
    """Decode the pages of the entries that tokens see."""
    seen = torch.zeros(flat.pages.shape[0], dtype=torch.int32)
    visible = (flat.position + 1) // ratio
    seen.scatter_reduce_(0, flat.ring.long(), visible, "amax")
    first = torch.arange(flat.pages.shape[1]) * entries.per_row
    used = first[None, :] < seen[:, None]
    places = flat.pages[used].long().unique()
    x = read_rows(entries, places).contiguous()
    table = torch.zeros_like(flat.pages)
    table[used] = torch.searchsorted(places, flat.pages[used].long()).int()
    return _Decoded(_fp32(x, entries.per_row), flat._replace(pages=table))


def _decoded_rows(entries: Entries, chosen: Tensor) -> tuple[Entries, Tensor]:
    """Decode the rows of listed entries. Returns the entries, and their numbers there; -1 stays."""
    per_row = entries.per_row
    rows, at = torch.where(chosen < 0, -1, chosen // per_row).unique(return_inverse=True)
    x = read_rows(entries, rows.clamp(min=0).long()).contiguous()
    numbers = torch.where(chosen < 0, -1, at * per_row + chosen % per_row)
    return _fp32(x, per_row), numbers.int()


def _fp32(x: Tensor, per_row: int) -> Entries:
    """Numbers [n · per_row, dim] as entries."""
    size = 4 * x.shape[1]
    rows = x.view(torch.uint8).view(-1, per_row * size)
    return Entries(rows, per_row, (size,), "fp32", x.shape[1], 0, 0)


def _recent(rows: Entries) -> Entries:
    """Recent rows as C can read them."""
    if _in_place(rows):
        return rows
    return _fp32(read_rows(rows, torch.arange(rows.rows.shape[0])).contiguous(), 1)


def store_window(kv: Tensor, rotation: CosSin, eps: float, weight: Tensor, new: Entries) -> None:
    kv, tokens = kv[:, None, :], kv.shape[0]
    if new.encoding == "fp32" and new.rows.is_contiguous() and new.rows.shape[1] == 4 * new.dim:
        out = new.rows[:tokens].view(torch.float32).view(kv.shape)
        norm_rotate(kv, rotation, eps=eps, weight=weight, out=out)
    else:
        x = norm_rotate(kv, rotation, eps=eps, weight=weight)[:, 0, :]
        write_entries(new, torch.arange(tokens), x)


def keep(kept: Rows, new: Rows, flat: Flat, end: Tensor, ring_rows: int) -> None:
    (target, to_step, size), (source, step, own) = _bytes_of(kept), _bytes_of(new)
    tokens = source.shape[0]
    dense(end, (tokens,), torch.int32)
    if size != own:
        raise ValueError(f"a native kernel was given rows of {own} bytes for rings of {size}")
    call("keep", tokens, target, to_step, source, step, pass_flat(flat, tokens), end, ring_rows, size)


def _bytes_of(rows: Rows) -> tuple[Tensor, int, int]:
    """Rows, the bytes between two of them, the bytes of one."""
    if isinstance(rows, Tensor):
        return rows, 4 * step_of(rows, tuple(rows.shape)), 4 * rows.shape[1]
    return rows.rows, step_of(rows.rows, tuple(rows.rows.shape), torch.uint8), sum(rows.sizes)


def compress_store(  # noqa: PLR0913
    recent: tuple[Tensor, Tensor],
    bias: Tensor,
    weight: Tensor,
    eps: float,
    table: CosSin,
    pages: Entries,
    flat: Flat,
    write_from: Tensor,
    ring_rows: int,
) -> None:
    (kept, new), (ratio, channels), (dim,) = recent, bias.shape, weight.shape
    tokens, width = new.shape[0], ratio * channels // dim
    if pages.dim != dim or width * dim != ratio * channels:
        raise ValueError(f"a native kernel was given {channels} channels for entries of {pages.dim}")
    dense(bias, (ratio, channels))
    dense(write_from, (tokens,), torch.int32)
    old_step = 4 * step_of(kept, (kept.shape[0], 2 * channels))
    rows = kept, old_step, new, 4 * step_of(new, (tokens, 2 * channels)), ring_rows
    x = torch.empty(tokens, dim)
    numbers, firsts = torch.empty(2, tokens, dtype=torch.int64)
    where = x, numbers, firsts, pages.per_row, width, ratio, dim, channels
    count = call("compress", tokens, *rows, pass_flat(flat, tokens), write_from, bias, *where)
    if not count:
        return
    rotation = table[0][firsts[:count]], table[1][firsts[:count]]
    x = norm_rotate(x[:count, None, :], rotation, eps=eps, weight=weight)[:, 0, :]
    if _in_place(pages):
        call("put_entries", count, *_passed(pages), numbers, x, count, 4 * dim)
    else:
        write_entries(pages, numbers[:count], x)


def best_rows(  # noqa: PLR0913
    q: Tensor,
    weights: Tensor,
    keys: Entries,
    ratio: int,
    flat: Flat,
    k: int,
    most: int,
    to: Numbering | None = None,
) -> Tensor:
    to = to or Numbering(flat.pages)
    if not _in_place(keys):
        found = _decoded(keys, ratio, flat)
        return best_rows(q, weights, found.entries, ratio, found.flat, k, most, to)
    queries, heads, dim = q.shape
    dense(q, (queries, heads, dim))
    best, step = torch.empty(queries, k, dtype=torch.int32), step_of(weights, (queries, heads))
    if keys.dim != dim:
        raise ValueError(f"a native kernel was given keys of {keys.dim} channels, it wants {dim}")
    dense(to.pages, tuple(to.pages.shape), torch.int32)
    where = *_passed(keys), ratio, pass_flat(flat, queries)
    numbers = to.pages, to.pages.shape[1], *to[1:]
    call("best_rows", queries, q, weights, step, *where, *numbers, best, heads, dim, k, most)
    return best


def attention(  # noqa: PLR0913
    q: Tensor,
    recent: tuple[Entries, Entries],
    window: int,
    entries: Entries | None,
    chosen: Tensor | None,
    ratio: int,
    flat: Flat,
    sinks: Tensor,
    scale: float,
    spare: int = 0,
) -> Tensor:
    if entries is not None and not _in_place(entries):
        if chosen is not None:
            entries, chosen = _decoded_rows(entries, chosen)
            return attention(q, recent, window, entries, chosen, ratio, flat, sinks, scale, spare)
        found = _decoded(entries, ratio, flat)
        return attention(q, recent, window, found.entries, None, ratio, found.flat, sinks, scale, spare)
    (queries, heads, dim), (kept, new) = q.shape, map(_recent, recent)
    dense(q, (queries, heads, dim))
    dense(sinks, (heads,))
    if {kept.dim, new.dim, dim if entries is None else entries.dim} != {dim}:
        raise ValueError(f"a native kernel was given queries of {dim} channels and other rows")
    (old, old_step, _), (fresh, step, _) = _passed(kept), _passed(new)
    k = 0
    if chosen is not None:
        k = chosen.shape[1]
        dense(chosen, (queries, k), torch.int32)
    far = (None, 0, 1, None, 0, 0) if entries is None else (*_passed(entries), chosen, k, ratio)
    out, ring_rows = torch.empty(queries, heads, dim), max(window - 1, 1) + spare
    rows = old, old_step, fresh, step, ring_rows, window
    call("attention", queries, q, *rows, *far, pass_flat(flat, queries), sinks, scale, out, heads, dim)
    return out
