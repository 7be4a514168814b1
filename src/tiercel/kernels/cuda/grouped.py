# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"
"""Grouped-query attention on pages (Triton). `kernels/grouped.py` has each function in plain torch.

Queries are taken in tiles: neighbouring tokens of a span, and of each the heads that read one kv head. They
are the rows of a product and share each key. Keys are taken in chunks, from multiples of CHUNK:

    keys     0 ────────── 512 ────────── 1024 ──── p
    chunk    m0, s0, a0     m1, s1, a1     m2, s2, a2       the most, the sum of weights, weighted values
    total    ((none + chunk 0) + chunk 1) + chunk 2         `_add_chunk`, always in this order

Inside a chunk a running softmax takes tile after tile of keys; tiles begin at multiples of their size. A tile
that a query does not see changes nothing, bit by bit. So a token's bits follow from its own keys, and two
ways to launch this give the same bits:

    whole    a program computes all chunks of a tile of queries, and adds each to the total; for many tokens
    split    a program computes some chunks of a tile of queries; `_merge` adds them; for few tokens

Tiles begin at every T-th token of a span. Programs do not know where spans begin: each looks at a few tokens,
and computes the tiles that begin there. Scores are logarithms to base 2. Products and sums are not fused by
the compiler, so that both ways round alike.

Values in pages are finite, because a tile multiplies each of them by the weight 0 of those tokens that do not
see it, and 0 · NaN is NaN. If a token has another value, zeros are stored and its key is NaN: who sees the
token gets NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercel.kernels.cuda.rows import UNFUSED, _normed, _rotated, check_rows
from tiercel.kernels.entries import Entries, Flat
from tiercel.kernels.reference import CosSin
from tiercel.kernels.reference.grouped import head_entries

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LEAST: tl.constexpr = tl.constexpr(-3e38)
"""Below every score; the difference of two of them is a number."""

CHUNK = 512
"""Keys of a chunk. It is the order of sums: another value gives other bits. Longer ones fill the pipeline of
loads less often, shorter ones give a single token more programs."""

SPLIT_MOST = 64
"""Up to this many tokens, programs share the keys of a tile of queries."""
SPLIT_PROGRAMS = 528
"""How many programs share the keys, if there are chunks enough: four for each multiprocessor of an H200."""

STORE_NUMBERS = 2048
NUMBERS = ["position", "first", "ring", "pages", "write_from"]


class Tile(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int


MANY = Tile(queries=128, keys=64, warps=8, stages=5)
"""bf16, whole. Two groups of four warps, 64 queries each; total and chunk take 128 registers of a thread.
With 128 channels, queries and three tiles of K and V take 128 KiB (of five stages, two are for places of
pages). With 64 queries twice the bytes would come from the L2 cache."""
FEW = Tile(queries=64, keys=64, warps=4, stages=5)
"""bf16, split: the same instructions for each group of four warps. Two programs fit a multiprocessor."""
EXACT = Tile(queries=16, keys=32, warps=8, stages=1)
"""fp32: without tensor cores the operands are in registers."""

LOOKS = 4
"""In a prefill, of so many programs one begins a tile, and the others end at once."""


@triton.jit
def _keys(  # noqa: PLR0913
    rows, pages, head, tile, end,
    PAGE: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Where the keys of a tile are, [KEYS, WIDE]. Those from `end` on are not looked for."""
    number = tile * KEYS + tl.arange(0, KEYS)
    if PAGE % KEYS == 0:  # a tile is in one page
        place = tl.load(pages + tile * KEYS // PAGE).to(tl.int64)
        row = rows + place * ROW + (head * PAGE + tile * KEYS % PAGE) * (2 * DIM)
        where = row + (tl.arange(0, KEYS) * (2 * DIM))[:, None]
    else:
        place = tl.load(pages + number // PAGE, mask=number < end, other=0).to(tl.int64)
        where = rows + (place * ROW + (head * PAGE + number % PAGE) * (2 * DIM))[:, None]
    return where + tl.arange(0, WIDE)[None, :]


@triton.jit
def _chunk(  # noqa: PLR0913
    query, at, chunk, begin, end, scale, rows, pages, head, WHOLE: tl.constexpr, WINDOW: tl.constexpr,
    PAGE: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """(most, sum, weighted values) of a tile of queries at the positions `at`, over the keys of a chunk from
    `begin` to `end`. WHOLE: all queries see all of the chunk."""
    QUERIES: tl.constexpr = query.shape[0]
    WIDE: tl.constexpr = query.shape[1]
    EVEN: tl.constexpr = WHOLE and DIM == WIDE
    most = tl.full([QUERIES], LEAST, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, WIDE], tl.float32)
    first = tl.maximum(chunk * CHUNK, begin) // KEYS
    last = tl.cdiv(tl.minimum(chunk * CHUNK + CHUNK, end), KEYS)
    for tile in tl.range(first, last):
        where = _keys(rows, pages, head, tile, end, PAGE, ROW, DIM, WIDE, KEYS)
        number = tile * KEYS + tl.arange(0, KEYS)
        mask = (number < end)[:, None] & (tl.arange(0, WIDE) < DIM)[None, :]
        key = tl.load(where) if EVEN else tl.load(where, mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
        if not WHOLE:
            seen = number[None, :] <= at[:, None]
            if WINDOW > 0:
                seen = seen & (number[None, :] > at[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(most, tl.max(scores, 1) * scale)
        weights, fade = tl.exp2(tl.fma(scores, scale, -top[:, None])), tl.exp2(most - top)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        value = tl.load(where + DIM) if EVEN else tl.load(where + DIM, mask=mask, other=0.0)
        acc = tl.dot(weights.to(query.dtype), value.to(query.dtype), acc, input_precision="ieee")
        most = top
    return most, total, acc


@triton.jit
def _add_chunk(most, total, acc, more, more_total, more_acc):
    top = tl.maximum(most, more)
    fade, share = tl.exp2(most - top), tl.exp2(more - top)
    return top, total * fade + more_total * share, acc * fade[:, None] + more_acc * share[:, None]


@triton.jit
def _begin(sinks, head, there, QUERIES: tl.constexpr):
    """(most, sum) before the first key. A sink is a score without a value."""
    if sinks is not None:
        most = tl.load(sinks + head, mask=there, other=0.0) * LOG2_E
        total = tl.full([QUERIES], 1.0, tl.float32)
    else:
        most = tl.full([QUERIES], LEAST, tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
    return most, total


@triton.jit(do_not_specialize=["tokens", "most_pages"], do_not_specialize_on_alignment=NUMBERS)
def _grouped(  # noqa: PLR0913
    q, out, parts, marks, sinks, scale, position, first, ring, pages, most_pages, rows, tokens,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr,
    LOOKS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The tiles of queries that begin at one of LOOKS tokens, for one kv head. GROUP: the heads of a kv head,
    filled up to a power of two. SPLIT: into parts [chunks, tokens, heads, DIM] and marks [chunks, tokens,
    heads, 2], the most and the sum; otherwise into `out`."""
    TILE: tl.constexpr = QUERIES // GROUP
    OWN: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(1)
    begins = (tl.num_programs(0) - 1 - tl.program_id(0)) * LOOKS  # the last ones see most keys
    lane = tl.arange(0, QUERIES)
    channel = tl.arange(0, WIDE)[None, :]
    own, real, step = head * OWN + lane % GROUP, lane % GROUP < OWN, tokens.to(tl.int64) * HEADS
    for leader in tl.range(begins, tl.minimum(begins + LOOKS, tokens), num_stages=1):
        span, token = tl.load(first + leader), leader + lane // GROUP
        known = (token < tokens) & ((leader - span) % TILE == 0)
        known = known & (tl.load(first + token, mask=known, other=-1) == span)
        at = tl.load(position + token, mask=known, other=-1)
        known = known & (at >= 0)
        end = tl.max(at, 0) + 1
        cell = token.to(tl.int64) * HEADS + own
        there = known & real
        mask = there[:, None] & (channel < DIM)
        if end > 0:
            text = tl.max(tl.load(ring + token, mask=known, other=0), 0)
            table = pages + text.to(tl.int64) * most_pages
            least = tl.min(tl.where(known, at, end), 0)
            begin = tl.maximum(least - WINDOW + 1, 0) if WINDOW > 0 else 0
            query = tl.load(q + cell[:, None] * DIM + channel, mask=mask, other=0.0)
            if SPLIT:
                for chunk in tl.range(
                    begin // CHUNK + tl.program_id(2), tl.cdiv(end, CHUNK), tl.num_programs(2), num_stages=1
                ):
                    most, total, acc = _chunk(
                        query, at, chunk, begin, end, scale, rows, table, head, False, WINDOW,
                        PAGE, ROW, DIM, CHUNK, KEYS,
                    )  # fmt: skip
                    to = cell + chunk * step
                    tl.store(parts + to[:, None] * DIM + channel, acc, mask=mask)
                    tl.store(marks + to * 2, most, mask=there)
                    tl.store(marks + to * 2 + 1, total, mask=there)
            else:
                most, total = _begin(sinks, own, there, QUERIES)
                acc = tl.zeros([QUERIES, WIDE], tl.float32)
                # chunks that all of the tile sees come first, if there is no window: they need no mask
                whole = begin // CHUNK if WINDOW > 0 else (least + 1) // CHUNK
                for chunk in tl.range(0, whole if WINDOW == 0 else 0, num_stages=1):
                    more, more_total, more_acc = _chunk(
                        query, at, chunk, begin, end, scale, rows, table, head, True, WINDOW,
                        PAGE, ROW, DIM, CHUNK, KEYS,
                    )  # fmt: skip
                    most, total, acc = _add_chunk(most, total, acc, more, more_total, more_acc)
                for chunk in tl.range(whole, tl.cdiv(end, CHUNK), num_stages=1):
                    more, more_total, more_acc = _chunk(
                        query, at, chunk, begin, end, scale, rows, table, head, False, WINDOW,
                        PAGE, ROW, DIM, CHUNK, KEYS,
                    )  # fmt: skip
                    most, total, acc = _add_chunk(most, total, acc, more, more_total, more_acc)
                acc = acc / tl.where(there, total, 1.0)[:, None]
                tl.store(out + cell[:, None] * DIM + channel, acc.to(out.dtype.element_ty), mask=mask)
        if not SPLIT and tl.load(position + leader) < 0:  # padding
            nothing = tl.zeros([QUERIES, WIDE], out.dtype.element_ty)
            mask = (real & (lane < GROUP))[:, None] & (channel < DIM)
            tl.store(out + cell[:, None] * DIM + channel, nothing, mask=mask)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["position"])
def _merge(  # noqa: PLR0913
    parts, marks, sinks, out, position, tokens,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One token and head: its chunks, added in order."""
    token, head, one = tl.program_id(0), tl.program_id(1) + tl.arange(0, 1), tl.arange(0, 1) == 0
    channel = tl.arange(0, WIDE)[None, :]
    at = tl.load(position + token)
    cell, step = token.to(tl.int64) * HEADS + head, tokens.to(tl.int64) * HEADS
    most, total = _begin(sinks, head, one, 1)
    acc = tl.zeros([1, WIDE], tl.float32)
    begin = tl.maximum(at - WINDOW + 1, 0) // CHUNK if WINDOW > 0 else 0
    for chunk in tl.range(begin, tl.cdiv(at + 1, CHUNK)):
        where = cell + chunk * step
        more, more_total = tl.load(marks + where * 2), tl.load(marks + where * 2 + 1)
        more_acc = tl.load(parts + where[:, None] * DIM + channel, mask=channel < DIM, other=0.0)
        most, total, acc = _add_chunk(most, total, acc, more, more_total, more_acc)
    acc = acc / tl.where(at < 0, 1.0, total)[:, None]
    tl.store(out + cell[:, None] * DIM + channel, acc.to(out.dtype.element_ty), mask=channel < DIM)


def grouped_attention(  # noqa: PLR0913
    q: Tensor,
    entries: Entries,
    kv_heads: int,
    flat: Flat,
    scale: float,
    longest: int,
    *,
    sinks: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    tokens, heads, dim = q.shape
    memory, page_tokens = _memory(entries, kv_heads, dim)
    check_rows(q)
    assert q.is_contiguous() and not heads % kv_heads and flat.pages.stride(1) == 1
    out, split = torch.empty_like(q), tokens <= SPLIT_MOST
    if not tokens:
        return out
    tile = EXACT if q.dtype == torch.float32 else FEW if split else MANY
    group = triton.next_power_of_2(heads // kv_heads)
    queries, wide = max(tile.queries, group), max(triton.next_power_of_2(dim), 16)
    assert not CHUNK % tile.keys and page_tokens > 0
    chunks, looks = max(triton.cdiv(longest, CHUNK), 1), 1 if split else max(queries // group // LOOKS, 1)
    parts = torch.empty(chunks if split else 0, tokens, heads, dim, dtype=torch.float32, device=q.device)
    marks = torch.empty(chunks if split else 0, tokens, heads, 2, dtype=torch.float32, device=q.device)
    shares = min(chunks, triton.cdiv(SPLIT_PROGRAMS, tokens * kv_heads)) if split else 1
    _grouped[triton.cdiv(tokens, looks), kv_heads, shares](
        q, out, parts, marks, sinks, scale * LOG2_E.value, flat.position, flat.first, flat.ring, flat.pages,
        flat.pages.stride(0), memory, tokens, HEADS=heads, KV_HEADS=kv_heads, GROUP=group, DIM=dim, WIDE=wide,
        WINDOW=window, PAGE=page_tokens, ROW=memory.stride(0), CHUNK=CHUNK, SPLIT=split, LOOKS=looks,
        QUERIES=queries, KEYS=tile.keys, num_warps=tile.warps, num_stages=tile.stages, **UNFUSED,
    )  # fmt: skip
    if split:
        _merge[tokens, heads](
            parts, marks, sinks, out, flat.position, tokens,
            HEADS=heads, DIM=dim, WIDE=wide, WINDOW=window, CHUNK=CHUNK, num_warps=1, **UNFUSED,
        )  # fmt: skip
    return out


def _memory(entries: Entries, kv_heads: int, dim: int) -> tuple[Tensor, int]:
    """(the rows of memory as numbers, tokens of a page)"""
    how = head_entries(entries, kv_heads, dim)
    memory = entries.rows[:, : entries.per_row * entries.sizes[0]].view(how.dtype)
    check_rows(memory)
    return memory, how.page_tokens


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=NUMBERS)
def _store(  # noqa: PLR0913
    key, value, weight, cos, sin, rows, position, ring, pages, write_from, count, eps,
    KV_HEADS: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, PAGES_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, PAGE: tl.constexpr,
    ROW: tl.constexpr,
):  # fmt: skip
    """`count` rows, one for each kv head of each token."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head, there = row // KV_HEADS, row % KV_HEADS, row < count
    at = tl.load(position + token, mask=there, other=-1)
    there = there & (at >= 0) & (at >= tl.load(write_from + token, mask=there, other=0))
    own = pages + tl.load(ring + token, mask=there, other=0).to(tl.int64) * PAGES_STRIDE
    place = tl.load(own + at // PAGE, mask=there, other=0).to(tl.int64)
    channel = tl.arange(0, WIDE)[None, :]
    mask = there[:, None] & (channel < DIM)
    to = (place * ROW + (head * PAGE + at % PAGE) * (2 * DIM))[:, None] + channel
    v = tl.load(value + (token * VALUE_STRIDE + head * DIM)[:, None] + channel, mask=mask, other=0.0)
    k = tl.load(key + (token * KEY_STRIDE + head * DIM)[:, None] + channel, mask=mask, other=0.0)
    k = k.to(tl.float32)
    if weight is not None:
        k = _normed(k, weight, eps, WIDE, DIM, True, True)
    if PAIRS:
        k = _rotated(k, cos, sin, token, there, ROWS, WIDE, DIM, PAIRS, False)
    v = v.to(rows.dtype.element_ty)
    finite = (tl.max(tl.where(tl.abs(v.to(tl.float32)) < float("inf"), 0, 1), 1) == 0)[:, None]
    tl.store(rows + to, tl.where(finite, k, float("nan")).to(rows.dtype.element_ty), mask=mask)
    tl.store(rows + to + DIM, tl.where(finite, v, 0.0).to(rows.dtype.element_ty), mask=mask)


def store_heads(  # noqa: PLR0913
    key: Tensor,
    value: Tensor,
    rotation: CosSin,
    entries: Entries,
    flat: Flat,
    write_from: Tensor,
    *,
    eps: float,
    weight: Tensor | None,
) -> None:
    (tokens, kv_heads, dim), (cos, sin) = key.shape, rotation
    memory, page_tokens = _memory(entries, kv_heads, dim)
    check_rows(key, value)
    assert key.stride(1) == value.stride(1) == dim or kv_heads == 1, "the heads of a token lie together"
    assert cos.is_contiguous() and sin.is_contiguous() and flat.pages.stride(1) == 1
    wide = max(triton.next_power_of_2(dim), 2)
    rows = max(STORE_NUMBERS // wide, 1)
    if tokens:
        _store[(triton.cdiv(tokens * kv_heads, rows),)](
            key, value, weight, cos, sin, memory, flat.position, flat.ring, flat.pages, write_from,
            tokens * kv_heads, eps, KV_HEADS=kv_heads, KEY_STRIDE=key.stride(0), VALUE_STRIDE=value.stride(0),
            PAGES_STRIDE=flat.pages.stride(0), ROWS=rows, WIDE=wide, DIM=dim, PAIRS=cos.shape[1],
            PAGE=page_tokens, ROW=memory.stride(0), num_warps=4, **UNFUSED,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["position"])
def _route(  # noqa: PLR0913
    logits, step, position, chosen, weights,
    EXPERTS: tl.constexpr, K: tl.constexpr, NORMED: tl.constexpr, WIDTH: tl.constexpr, K_WIDTH: tl.constexpr,
):  # fmt: skip
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    number, place = tl.arange(0, WIDTH), tl.arange(0, K_WIDTH)
    logit = tl.load(logits + token * step + number, mask=number < EXPERTS, other=float("-inf"))
    logit = logit.to(tl.float32)
    score = tl.exp(logit - tl.max(logit, 0))
    score = tl.div_rn(score, tl.sum(score, 0) + tl.zeros_like(score))
    key = tl.where(logit > LEAST, logit, LEAST)  # whatever the logits are, an expert is chosen once
    key = tl.where(number < EXPERTS, key, float("-inf"))
    picked = tl.full([K_WIDTH], -1, dtype=tl.int32)
    weight = tl.zeros([K_WIDTH], tl.float32)
    for i in tl.static_range(K):
        best = tl.min(tl.where(key == tl.max(key, 0), number, WIDTH), 0)
        picked = tl.where(place == i, best, picked)
        weight = tl.where(place == i, tl.sum(tl.where(number == best, score, 0.0), 0), weight)
        key = tl.where(number == best, float("-inf"), key)
    if NORMED:
        weight = tl.div_rn(weight, tl.sum(weight, 0) + tl.zeros_like(weight))
    if position is not None:
        padding = tl.load(position + token) < 0
        picked, weight = tl.where(padding, -1, picked), tl.where(padding, 0.0, weight)
    tl.store(chosen + token * K + place, picked.to(tl.int64), mask=place < K)
    tl.store(weights + token * K + place, weight, mask=place < K)


def route_softmax(
    logits: Tensor, k: int, *, normed: bool, position: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    tokens, experts = logits.shape
    assert logits.stride(1) == 1 and k <= experts
    chosen = torch.empty(tokens, k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    if tokens:
        _route[(tokens,)](
            logits, logits.stride(0), position, chosen, weights, EXPERTS=experts, K=k, NORMED=normed,
            WIDTH=triton.next_power_of_2(experts), K_WIDTH=triton.next_power_of_2(k), num_warps=1, **UNFUSED,
        )  # fmt: skip
    return chosen, weights


@triton.jit
def _gate(x, step, y, INNER: tl.constexpr, TILE: tl.constexpr):
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate = tl.load(x + token * step + at, mask=at < INNER, other=0.0).to(tl.float32)
    up = tl.load(x + token * step + INNER + at, mask=at < INNER, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))
    made = gate * tl.where(gate > 0, 1.0, small) / (1.0 + small) * up
    tl.store(y + token * INNER + at, made.to(y.dtype.element_ty), mask=at < INNER)


def gated(x: Tensor) -> Tensor:
    tokens, inner = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1
    y = torch.empty(tokens, inner, dtype=x.dtype, device=x.device)
    if tokens:
        tile = min(1024, triton.next_power_of_2(inner))
        _gate[tokens, triton.cdiv(inner, tile)](x, x.stride(0), y, INNER=inner, TILE=tile, **UNFUSED)
    return y
