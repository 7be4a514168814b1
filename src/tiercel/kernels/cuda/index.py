# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""The lightning indexer: each query's best keys, from encoded keys in pages (Triton).

    score     programs of (some tokens, tile of keys): scores, as integers of the same order, to scratch
    select    one program for each token:
              1. the best score of each of many groups; the k-th best of these bounds the k-th best of all
              2. the candidates: scores from that bound on, in order, at the front of the scratch
              3. the k-th best of the candidates, exactly; of those that tie with it the first ones

Step 2 leaves little more than k candidates, wherever the good keys are, unless many of them fall into one
group; then step 3 only takes longer. So the scores are read from far twice, not once for each bit.

A score is summed over heads in one order, and does not depend on the tile or on the tokens beside it. The
plain twin is `reference.best_rows`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercel.kernels.entries import Entries, Flat

SCRATCH_BYTES = 64 << 20
"""Scores of a part of the tokens, about what the L2 cache of an H200 holds (60 MB): they are read twice."""
GROUPS_LEAST = 4096
"""Groups of step 1, and scores that a program of 8 warps reads at once: 64 bytes for each thread. With 8
groups for each of 512 chosen, about 550 candidates are left."""
CANDIDATES = 1024
"""Candidates read at once in step 3."""
TYPES = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp8_row": tl.uint8}
LEAST = tl.constexpr(-(2**31))
"""Less than any score."""


class Tile(NamedTuple):
    keys: int
    warps: int


WIDE = Tile(keys=256, warps=8)
"""bf16. A tile is multiplied by the 64 heads of one token after the other: the more keys, the less often the
queries are read. The compiler keeps the keys in registers (227 for each thread), so a multiprocessor has one
program at a time, and a token's queries are read while those of the token before are multiplied."""
EXACT = Tile(keys=64, warps=8)
"""fp32: without tensor cores the operands are in registers; tiles are small and threads many."""
TOGETHER = 16
"""Tokens that use a tile of keys one after the other, if they are of one text..."""
ALONE_MOST = 128
"""...and the call has more tokens than this. With fewer, as in a decode, more programs are worth more."""


@triton.jit
def _read_keys(  # noqa: PLR0913
    e, bound, pages, keys,
    ROW_BYTES: tl.constexpr, PER_ROW: tl.constexpr, VALUE: tl.constexpr, DIM: tl.constexpr,
    TYPE: tl.constexpr, SCALED: tl.constexpr, OPERAND: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """(keys e below `bound` [e, channels], a factor for each). TYPE: that of the stored numbers. SCALED: they
    are e4m3 with an fp32 scale."""
    place = tl.load(pages + e // PER_ROW, mask=e < bound, other=0)
    row, inner = keys + place.to(tl.int64) * ROW_BYTES, e % PER_ROW
    channel = tl.arange(0, CHANNELS)
    value = (row + inner * VALUE).to(tl.pointer_type(TYPE), bitcast=True)
    mask = (e < bound)[:, None] & (channel < DIM)[None, :]
    number = tl.load(value[:, None] + channel[None, :], mask=mask, other=0)
    if SCALED:
        scale = (row + PER_ROW * VALUE + inner * 4).to(tl.pointer_type(tl.float32), bitcast=True)
        factor = tl.load(scale, mask=e < bound, other=0)
        return number.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(OPERAND), factor
    return number.to(OPERAND), tl.full(e.shape, 1.0, tl.float32)


@triton.jit
def _read_query(
    q, token, end,
    HEADS: tl.constexpr, DIM: tl.constexpr, HEADS_TILE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    head, channel = tl.arange(0, HEADS_TILE), tl.arange(0, CHANNELS)
    mask = (head < HEADS)[:, None] & (channel < DIM)[None, :] & (token < end)
    row = (token.to(tl.int64) * HEADS + head)[:, None]
    return tl.load(q + row * DIM + channel[None, :], mask=mask, other=0)


@triton.jit(do_not_specialize=["weights_width", "tokens", "most_pages"])
def _score(  # noqa: PLR0913
    q, weights, weights_width, scores, position, ring, pages, most_pages, keys, tokens, width,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROW_BYTES: tl.constexpr, PER_ROW: tl.constexpr,
    VALUE: tl.constexpr, TYPE: tl.constexpr, SCALED: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr,
    OPERAND: tl.constexpr, HEADS_TILE: tl.constexpr, CHANNELS: tl.constexpr, KEYS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """scores [tokens, width]. Those of tokens that see k keys at most are not needed, and not written."""
    token = tl.program_id(0) * TOGETHER
    lane = token + tl.arange(0, TOGETHER)
    rings = tl.load(ring + lane, mask=lane < tokens, other=-1)
    visible = (tl.load(position + lane, mask=lane < tokens, other=-1) + 1) // RATIO
    visible = tl.where(visible > K, visible, 0)
    begin = tl.program_id(1) * KEYS
    e = begin + tl.arange(0, KEYS)
    head = tl.arange(0, HEADS_TILE)
    end = tl.where(tl.max(visible, 0) > begin, tl.minimum(token + TOGETHER, tokens), token)
    while token < end:
        own = tl.load(ring + token)
        bound = tl.max(tl.where(rings == own, visible, 0), 0)
        table = pages + own.to(tl.int64) * most_pages
        key, factor = _read_keys(
            e, bound, table, keys, ROW_BYTES, PER_ROW, VALUE, DIM, TYPE, SCALED, OPERAND, CHANNELS
        )  # fmt: skip
        query = _read_query(q, token, end, HEADS, DIM, HEADS_TILE, CHANNELS)
        same = token < end
        while same:
            following = _read_query(q, token + 1, end, HEADS, DIM, HEADS_TILE, CHANNELS)
            seen = (tl.load(position + token) + 1) // RATIO
            if (seen > K) & (seen > begin):
                weight = weights + token.to(tl.int64) * weights_width + head
                weight = tl.load(weight, mask=head < HEADS, other=0)
                products = tl.dot(key, tl.trans(query.to(OPERAND)), input_precision="ieee")
                score = tl.sum(tl.maximum(products, 0.0) * weight.to(tl.float32)[None, :], 1) * factor
                bits = score.to(tl.int32, bitcast=True)
                ordered = tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
                tl.store(scores + token.to(tl.int64) * width + e, ordered, mask=e < seen)
            query = following
            token += 1
            same = (token < end) & (tl.load(ring + token, mask=token < end, other=-1) == own)


@triton.jit
def _read_scores(scores, at, n, TILE: tl.constexpr):
    """(numbers, scores) from `at` on; `LEAST` from n on. Memory is read by 16 or not: such loads are wide."""
    lane = tl.multiple_of(at, 16) + tl.arange(0, TILE)
    score = tl.load(scores + lane, mask=lane < (n + 15) // 16 * 16, other=LEAST)
    return lane, tl.where(lane < n, score, LEAST)


@triton.jit
def _kth(numbers, n, k, TILE: tl.constexpr):
    """(the k-th largest of n numbers in memory, how many are larger), one bit after the other."""
    kth = tl.full([], LEAST, tl.int64)
    larger = tl.full([], 0, tl.int32)
    for bit in range(32):
        least = kth + (tl.full([], 1, tl.int64) << (31 - bit))
        counts = tl.zeros([TILE], tl.int32)
        at = tl.full([], 0, tl.int32)
        while at < n:
            _, number = _read_scores(numbers, at, n, TILE)
            counts += (number >= least.to(tl.int32)).to(tl.int32)
            at += TILE
        count = tl.sum(counts, 0)
        kth = tl.where(count >= k, least, kth)
        larger = tl.where(count >= k, larger, count)  # the last time, `least` is the k-th plus one
    return kth.to(tl.int32), larger


@triton.jit
def _candidates(scores, spare, visible, K: tl.constexpr, GROUPS: tl.constexpr):
    """Steps 1 and 2: candidates to the front of `scores`, their numbers to `spare`. Returns how many."""
    best = tl.full([GROUPS], LEAST, tl.int32)
    at = tl.full([], 0, tl.int32)
    while at < visible:
        _, score = _read_scores(scores, at, visible, GROUPS)
        best = tl.maximum(best, score)
        at += GROUPS
    tl.store(spare + tl.arange(0, GROUPS), best)
    tl.debug_barrier()
    bound, _ = _kth(spare, GROUPS, K, GROUPS)
    found = tl.full([], 0, tl.int32)
    at = tl.full([], 0, tl.int32)
    while at < visible:
        lane, score = _read_scores(scores, at, visible, GROUPS)
        keep = score >= bound
        to = found + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.debug_barrier()  # all threads have read before one writes at the same places
        tl.store(scores + to, score, mask=keep)
        tl.store(spare + to, lane, mask=keep)
        found += tl.sum(keep.to(tl.int32), 0)
        at += GROUPS
    tl.debug_barrier()
    return found


@triton.jit
def _put(out, to, e, mask, pages, PER_ROW: tl.constexpr):
    """The numbers in the pages of entries e."""
    place = tl.load(pages + e // PER_ROW, mask=mask, other=0)
    tl.store(out + to, place * PER_ROW + e % PER_ROW, mask=mask)


@triton.jit(do_not_specialize=["most_pages"])
def _select(  # noqa: PLR0913
    scores, spare, out, position, ring, pages, most_pages, width, spare_width,
    PER_ROW: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    visible = (tl.load(position + token) + 1) // RATIO
    pages += tl.load(ring + token).to(tl.int64) * most_pages
    scores += token * width
    spare += token * spare_width
    out += token * K
    if visible <= K:
        at = tl.full([], 0, tl.int32)
        while at < K:
            lane = at + tl.arange(0, TILE)
            _put(out, lane, lane, lane < visible, pages, PER_ROW)
            tl.store(out + lane, -1, mask=(lane >= visible) & (lane < K))
            at += TILE
    else:
        found = _candidates(scores, spare, visible, K, GROUPS)
        kth, larger = _kth(scores, found, K, TILE)
        tied = tl.full([], 0, tl.int32)
        taken = tl.full([], 0, tl.int32)
        at = tl.full([], 0, tl.int32)
        while at < found:
            lane, score = _read_scores(scores, at, found, TILE)
            tie = (score == kth).to(tl.int32)
            first = tied + tl.cumsum(tie, 0) <= K - larger
            take = (score > kth) | ((score == kth) & first)
            to = taken + tl.cumsum(take.to(tl.int32), 0) - 1
            _put(out, to, tl.load(spare + lane, mask=take, other=0), take, pages, PER_ROW)
            tied += tl.sum(tie, 0)
            taken += tl.sum(take.to(tl.int32), 0)
            at += TILE


def best_rows(  # noqa: PLR0913
    q: Tensor, weights: Tensor, keys: Entries, ratio: int, flat: Flat, k: int, most: int
) -> Tensor:
    """int32 [tokens, k]: the numbers in `keys` of each query's k best keys, ascending in its text; -1: fewer.

    score = sum over heads of weight · ReLU(q · key). q [tokens, heads, dim], weights [tokens, heads]. A query
    sees the keys that ended with its token or before; `most`: no query sees more. Ties go to the earlier key.
    """
    tokens, heads, dim = q.shape
    assert q.is_contiguous() and weights.stride(1) == 1
    out = torch.empty(tokens, k, dtype=torch.int32, device=q.device)
    groups = max(GROUPS_LEAST, triton.next_power_of_2(k))
    width = triton.cdiv(most, 16) * 16 if most > k else 0
    spare_width = max(width, groups) if width else 0
    part = max(1, SCRATCH_BYTES // 4 // (width + spare_width)) if width else max(tokens, 1)
    part = triton.cdiv(part, 16) * 16  # addresses of rows and parts stay multiples of 16: wide accesses
    scores, spare = (
        torch.empty(min(part, tokens), each, dtype=torch.int32, device=q.device)
        for each in (width, spare_width)
    )
    for at in range(0, tokens, part):
        own = slice(at, at + part)
        table = (flat.position[own], flat.ring[own], flat.pages, flat.pages.stride(0))
        if width:
            _start_scores(q[own], weights[own], scores, keys, table, ratio=ratio, k=k)
        _select[(len(q[own]),)](
            scores, spare, out[own], *table, width, spare_width,
            PER_ROW=keys.per_row, RATIO=ratio, K=k, GROUPS=groups, TILE=CANDIDATES, num_warps=8,
        )  # fmt: skip
    return out


def _start_scores(  # noqa: PLR0913
    q: Tensor, weights: Tensor, scores: Tensor, keys: Entries, table: tuple[Any, ...], *, ratio: int, k: int
) -> None:
    tokens, heads, dim = q.shape
    tile = EXACT if q.dtype == torch.float32 else WIDE
    operand = tl.float32 if tile is EXACT else tl.bfloat16
    together = 1 if tokens <= ALONE_MOST else TOGETHER
    _score[triton.cdiv(tokens, together), triton.cdiv(scores.shape[1], tile.keys)](
        q, weights, weights.stride(0), scores, *table, keys.rows, tokens, scores.shape[1],
        HEADS=heads, DIM=dim, ROW_BYTES=keys.rows.stride(0), PER_ROW=keys.per_row, VALUE=keys.sizes[0],
        TYPE=TYPES[keys.encoding], SCALED=keys.encoding == "fp8_row", RATIO=ratio, K=k, OPERAND=operand,
        HEADS_TILE=max(16, triton.next_power_of_2(heads)), CHANNELS=max(16, triton.next_power_of_2(dim)),
        KEYS=tile.keys, TOGETHER=together, num_warps=tile.warps,
    )  # fmt: skip
