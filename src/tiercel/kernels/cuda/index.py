# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""The lightning indexer: each query's best keys, from encoded keys in pages (Triton).

    score     programs of (some tokens, tile of keys): scores, as integers of the same order, to scratch
    select    one program for each token:
              1. the best score of each of many groups; a bound that a few more than k of these reach
              2. the candidates: numbers of the scores above the bound, and of the first k that tie with it
              3. the k-th best of the candidates, exactly; of those that tie with it the first ones

Step 2 leaves little more than k candidates, wherever the good keys are, unless many of them fall into one
group; then step 3 only takes longer. So the scores are read twice from far. If they are few, all are
candidates, and they are read once. A bound is found by bisection between the least and the largest score, in
registers: it ends when exactly k scores are on one side.

A score is summed over heads in one order, and does not depend on the tile or on the tokens beside it. The
plain twin is in `kernels/reference/rows.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercel.kernels.entries import Entries, Flat, Numbering

SCRATCH_BYTES = 64 << 20
"""Scores of a part of the tokens, about what the L2 cache of an H200 holds (60 MB): they are read twice."""
GROUPS_LEAST = 4096
"""Groups of step 1, and scores that a program of 8 warps reads at once: 64 bytes for each thread. With 8
groups for each of 512 chosen, about 700 candidates are left. Up to this many scores need no groups."""
CANDIDATES = 1024
"""Candidates read at once in step 3."""
TYPES = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp8_row": tl.uint8}
LEAST, MOST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
"""Less than any score; no less than any."""


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
"""...and the call has more tokens than this. With fewer, as in a decode, a token has programs of its own."""
ALONE = Tile(keys=64, warps=4)
ALONE_PROGRAMS = 2112
"""Programs of all tokens of such a call. Each reads the queries of a token once, 16 KB, as much as 128 keys.
H200, 64 texts of 128 K tokens: 152 µs; 275 when each tile of 256 keys was a program (2026-11-19)."""


@triton.jit
def _read_keys(  # noqa: PLR0913
    e, bound, pages, keys,
    ROW_BYTES: tl.constexpr, PER_ROW: tl.constexpr, VALUE: tl.constexpr, DIM: tl.constexpr,
    TYPE: tl.constexpr, SCALED: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """(keys e below `bound` [e, channels] as they are stored, a factor for each). TYPE: that of the stored
    numbers. SCALED: they are e4m3 with an fp32 scale."""
    place = tl.load(pages + e // PER_ROW, mask=e < bound, other=0)
    row, inner = keys + place.to(tl.int64) * ROW_BYTES, e % PER_ROW
    channel = tl.arange(0, CHANNELS)
    value = (row + inner * VALUE).to(tl.pointer_type(TYPE), bitcast=True)
    mask = (e < bound)[:, None] & (channel < DIM)[None, :]
    number = tl.load(value[:, None] + channel[None, :], mask=mask, other=0)
    if SCALED:
        scale = (row + PER_ROW * VALUE + inner * 4).to(tl.pointer_type(tl.float32), bitcast=True)
        return number, tl.load(scale, mask=e < bound, other=0)
    return number, tl.full(e.shape, 1.0, tl.float32)


@triton.jit
def _numbers(stored, SCALED: tl.constexpr, OPERAND: tl.constexpr):
    if SCALED:
        return stored.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(OPERAND)
    return stored.to(OPERAND)


@triton.jit
def _products(key, query, weight, factor):
    """Scores of keys [e, channels] for a query [heads, channels], as integers of the same order."""
    products = tl.dot(key, tl.trans(query), input_precision="ieee")
    score = tl.sum(tl.maximum(products, 0.0) * weight.to(tl.float32)[None, :], 1) * factor
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


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
    """scores [tokens, width]. Tokens that see k keys or fewer need no scores, and none are written."""
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
        stored, factor = _read_keys(
            e, bound, table, keys, ROW_BYTES, PER_ROW, VALUE, DIM, TYPE, SCALED, CHANNELS
        )  # fmt: skip
        key = _numbers(stored, SCALED, OPERAND)
        query = _read_query(q, token, end, HEADS, DIM, HEADS_TILE, CHANNELS)
        same = token < end
        while same:
            following = _read_query(q, token + 1, end, HEADS, DIM, HEADS_TILE, CHANNELS)
            seen = (tl.load(position + token) + 1) // RATIO
            if (seen > K) & (seen > begin):
                weight = weights + token.to(tl.int64) * weights_width + head
                weight = tl.load(weight, mask=head < HEADS, other=0)
                score = _products(key, query.to(OPERAND), weight, factor)
                tl.store(scores + token.to(tl.int64) * width + e, score, mask=e < seen)
            query = following
            token += 1
            same = (token < end) & (tl.load(ring + token, mask=token < end, other=-1) == own)


@triton.jit(do_not_specialize=["weights_width", "most_pages"])
def _score_alone(  # noqa: PLR0913
    q, weights, weights_width, scores, position, ring, pages, most_pages, keys, width,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROW_BYTES: tl.constexpr, PER_ROW: tl.constexpr,
    VALUE: tl.constexpr, TYPE: tl.constexpr, SCALED: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr,
    OPERAND: tl.constexpr, HEADS_TILE: tl.constexpr, CHANNELS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The same where each token has keys of its own. A program has some tiles of them, one after the other,
    and the next one is read while one is multiplied."""
    token = tl.program_id(0)
    seen = (tl.load(position + token) + 1) // RATIO
    seen = tl.where(seen > K, seen, 0)
    begin, step = tl.program_id(1) * KEYS, tl.num_programs(1) * KEYS
    if begin < seen:
        table = pages + tl.load(ring + token).to(tl.int64) * most_pages
        lane, head = tl.arange(0, KEYS), tl.arange(0, HEADS_TILE)
        query = _read_query(q, token, token + 1, HEADS, DIM, HEADS_TILE, CHANNELS).to(OPERAND)
        weight = weights + token.to(tl.int64) * weights_width + head
        weight = tl.load(weight, mask=head < HEADS, other=0)
        scores += token.to(tl.int64) * width
        stored, factor = _read_keys(
            begin + lane, seen, table, keys, ROW_BYTES, PER_ROW, VALUE, DIM, TYPE, SCALED, CHANNELS
        )  # fmt: skip
        while begin < seen:
            e = begin + lane
            following, following_factor = _read_keys(
                e + step, seen, table, keys, ROW_BYTES, PER_ROW, VALUE, DIM, TYPE, SCALED, CHANNELS
            )  # fmt: skip
            score = _products(_numbers(stored, SCALED, OPERAND), query, weight, factor)
            tl.store(scores + e, score, mask=e < seen)
            stored, factor = following, following_factor
            begin += step


@triton.jit
def _read_scores(scores, at, n, TILE: tl.constexpr):
    """(numbers, scores) from `at` on; `LEAST` from n on. Loads take whole groups of 16: they are wide."""
    lane = tl.multiple_of(at, 16) + tl.arange(0, TILE)
    score = tl.load(scores + lane, mask=lane < (n + 15) // 16 * 16, other=LEAST)
    return lane, tl.where(lane < n, score, LEAST)


@triton.jit
def _read_listed(scores, numbers, at, n, TILE: tl.constexpr):
    """(numbers of scores from `at` on in a list of n, the scores; `LEAST` from n on)."""
    lane = at + tl.arange(0, TILE)
    number = tl.load(numbers + lane, mask=lane < n, other=0)
    return number, tl.load(scores + number, mask=lane < n, other=LEAST)


@triton.jit
def _bisect(  # noqa: PLR0913
    scores, numbers, n, k, low, high, most, TILE: tl.constexpr, HELD: tl.constexpr
):  # fmt: skip
    """(a bound, how many scores are larger).

    From the bound on there are k of the n scores, or up to `most`, or the bound is the k-th largest. The
    number of larger scores is of use only in the last case; it is 0 if there are exactly k. All scores are
    `low` or more, and less than `high`. HELD: `scores` is a tile of them, the rest of which is less;
    otherwise memory, where `numbers` lists them.
    """
    low, high, enough, larger = low.to(tl.int64), high.to(tl.int64), n, tl.full([], 0, tl.int32)
    while (enough > most) & (high - low > 1):
        middle = (low + high) >> 1
        counts = tl.zeros([TILE], tl.int32)
        if HELD:
            counts = (scores >= middle.to(tl.int32)).to(tl.int32)
        else:
            for at in tl.range(0, n, TILE):
                _, score = _read_listed(scores, numbers, at, n, TILE)
                counts += (score >= middle.to(tl.int32)).to(tl.int32)
        count = tl.sum(counts, 0)
        low, enough = tl.where(count >= k, middle, low), tl.where(count >= k, count, enough)
        high, larger = tl.where(count >= k, high, middle), tl.where(count >= k, larger, count)
    return low.to(tl.int32), tl.where(enough > k, larger, 0)


@triton.jit
def _places(score, bound, above, tied, ties_most):
    """(where each score goes in a list, whether it does, how many were above the bound, how many tied with
    it). The list has all scores above the bound, and the first ones that tie with it."""
    both = (score > bound).to(tl.int32) + ((score == bound).to(tl.int32) << 16)
    sums = tl.cumsum(both, 0)
    ties = tied + (sums >> 16)
    take = (score > bound) | ((score == bound) & (ties <= ties_most))
    to = above + (sums & 0xFFFF) + tl.minimum(ties, ties_most) - 1
    total = tl.sum(both, 0)
    return to, take, above + (total & 0xFFFF), tied + (total >> 16)


@triton.jit
def _candidates(scores, spare, visible, K: tl.constexpr, GROUPS: tl.constexpr):
    """Steps 1 and 2: the numbers of candidates to `spare`. Returns (how many there are, the bound, a number
    that is larger than all scores). A tile of scores is read before the one before it is used."""
    none = tl.full([], 0, tl.int32)
    _, score = _read_scores(scores, none, visible, GROUPS)
    best = score
    for at in tl.range(0, visible, GROUPS, num_stages=1):
        _, following = _read_scores(scores, at + GROUPS, visible, GROUPS)
        best = tl.maximum(best, score)
        score = following
    high = tl.max(best, 0).to(tl.int64) + 1
    n = tl.minimum(visible, GROUPS)
    BOUND: tl.constexpr = K + K // 4
    bound, _ = _bisect(best, spare, n, K, tl.min(best, 0), high, BOUND, GROUPS, True)
    above, tied = none, none
    _, score = _read_scores(scores, none, visible, GROUPS)
    for at in tl.range(0, visible, GROUPS, num_stages=1):
        _, following = _read_scores(scores, at + GROUPS, visible, GROUPS)
        to, keep, above, tied = _places(score, bound, above, tied, K)
        tl.store(spare + to, at + tl.arange(0, GROUPS), mask=keep)
        score = following
    tl.debug_barrier()
    return above + tl.minimum(tied, K), bound, high


@triton.jit
def _put(out, to, e, mask, pages, step, first, staged, PER_ROW: tl.constexpr):  # noqa: PLR0913
    """Write the numbers of entries e (`Numbering`)."""
    place = tl.load(pages + e // PER_ROW, mask=mask, other=0)
    row = tl.where(place >= 0, place * step + first, staged - 2 - place)
    number = tl.where(place == -1, -2 - e, row * PER_ROW + e % PER_ROW)
    tl.store(out + to, number, mask=mask)


@triton.jit
def _search(scores, spare, visible, K: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """(how many scores are left, the k-th best of them or a bound of the k best, how many are better)."""
    if visible <= GROUPS:
        lane, score = _read_scores(scores, tl.full([], 0, tl.int32), visible, GROUPS)
        low = tl.min(tl.where(lane < visible, score, MOST), 0)
        high = tl.max(score, 0).to(tl.int64) + 1
        n = visible
        kth, larger = _bisect(score, spare, n, K, low, high, K, GROUPS, True)
    else:
        n, low, high = _candidates(scores, spare, visible, K, GROUPS)
        if n <= TILE:
            _, some = _read_listed(scores, spare, 0, n, TILE)
            kth, larger = _bisect(some, spare, n, K, low, high, K, TILE, True)
        else:
            kth, larger = _bisect(scores, spare, n, K, low, high, K, TILE, False)
    return n, kth, larger


@triton.jit(do_not_specialize=["most_pages", "step", "first", "staged"])
def _select(  # noqa: PLR0913
    scores, spare, out, position, ring, pages, most_pages, step, first, staged, width,
    PER_ROW: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    visible = (tl.load(position + token) + 1) // RATIO
    pages += tl.load(ring + token).to(tl.int64) * most_pages
    scores += token * width
    spare += token * width
    out += token * K
    if visible <= K:
        for at in tl.range(0, K, TILE):
            lane = at + tl.arange(0, TILE)
            _put(out, lane, lane, lane < visible, pages, step, first, staged, PER_ROW)
            tl.store(out + lane, -1, mask=(lane >= visible) & (lane < K))
    else:
        n, kth, larger = _search(scores, spare, visible, K, GROUPS, TILE)
        above = tl.full([], 0, tl.int32)
        tied = tl.full([], 0, tl.int32)
        for at in tl.range(0, n, TILE, num_stages=1):
            if visible > GROUPS:
                e, score = _read_listed(scores, spare, at, n, TILE)
            else:
                e, score = _read_scores(scores, at, n, TILE)
            to, take, above, tied = _places(score, kth, above, tied, K - larger)
            _put(out, to, e, take, pages, step, first, staged, PER_ROW)


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
    tokens, heads, dim = q.shape
    to = to or Numbering(flat.pages)
    assert q.is_contiguous() and weights.stride(1) == 1
    out = torch.empty(tokens, k, dtype=torch.int32, device=q.device)
    groups = max(GROUPS_LEAST, triton.next_power_of_2(k))
    width = triton.cdiv(most, 16) * 16 if most > k else 0
    part = max(1, SCRATCH_BYTES // 8 // width) if width else max(tokens, 1)
    part = triton.cdiv(part, 16) * 16  # addresses of rows and parts stay multiples of 16: wide accesses
    scores, spare = torch.empty(2, min(part, tokens), width, dtype=torch.int32, device=q.device)
    for at in range(0, tokens, part):
        own = slice(at, at + part)
        table = (flat.position[own], flat.ring[own], flat.pages, flat.pages.stride(0))
        if width:
            _start_scores(q[own], weights[own], scores, keys, table, ratio=ratio, k=k)
        _select[(len(q[own]),)](
            scores, spare, out[own], *table[:2], to.pages, to.pages.stride(0), *to[1:], width,
            PER_ROW=keys.per_row, RATIO=ratio, K=k, GROUPS=groups, TILE=CANDIDATES, num_warps=8,
        )  # fmt: skip
    return out


def _start_scores(  # noqa: PLR0913
    q: Tensor, weights: Tensor, scores: Tensor, keys: Entries, table: tuple[Any, ...], *, ratio: int, k: int
) -> None:
    (tokens, heads, dim), width = q.shape, scores.shape[1]
    alone, exact = tokens <= ALONE_MOST, q.dtype == torch.float32
    tile = EXACT if exact else ALONE if alone else WIDE
    tiles = triton.cdiv(width, tile.keys)
    how: dict[str, Any] = {
        "HEADS": heads, "DIM": dim, "ROW_BYTES": keys.rows.stride(0), "PER_ROW": keys.per_row,
        "VALUE": keys.sizes[0], "TYPE": TYPES[keys.encoding], "SCALED": keys.encoding == "fp8_row",
        "RATIO": ratio, "K": k, "OPERAND": tl.float32 if exact else tl.bfloat16,
        "HEADS_TILE": max(16, triton.next_power_of_2(heads)),
        "CHANNELS": max(16, triton.next_power_of_2(dim)), "KEYS": tile.keys, "num_warps": tile.warps,
    }  # fmt: skip
    if alone:
        programs = min(tiles, triton.cdiv(ALONE_PROGRAMS, tokens))
        _score_alone[tokens, programs](
            q, weights, weights.stride(0), scores, *table, keys.rows, width, **how
        )  # fmt: skip
    else:
        _score[triton.cdiv(tokens, TOGETHER), tiles](
            q, weights, weights.stride(0), scores, *table, keys.rows, tokens, width, TOGETHER=TOGETHER, **how
        )  # fmt: skip
