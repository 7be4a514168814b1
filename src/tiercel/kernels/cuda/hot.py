# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Sparse attention to entries that stay on the host (Triton).

    resolve    one program for each flat token; that of a span's first token does all of its work:
               A. every chosen entry is marked in `seen` with the number of the first choice of it
               B. cells, the least recently used first, are parted: those with a chosen entry, which is then
                  marked with its cell, and others
               C. the first choice of each entry that is in no cell takes the next of the other cells
               D. codes become numbers
               E. the new order of cells is written, and the marks are taken away
    gather     some programs of one warp for each flat token; each has some entries in flight
    stage      a small number of programs, which take tile after tile of whole rows

What they leave is what the plain twin, `kernels/hot.py`, leaves. They can be part of a recorded CUDA graph:
grids depend on the shapes of tensors only.

A mark is not negative for a first choice, where a larger one is for an earlier choice, and -2 - cell for an
entry in a cell; -1 is no mark.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tiercel.kernels.entries import Entries, Flat, Numbering
from tiercel.kernels.hot import HostRows, HotRows
from tiercel.kernels.move import WORDS

MOST = tl.constexpr(2**31 - 1)
CELLS_TILE = 2048
"""Cells that a program of 8 warps reads at once: 8 for each thread. H200, k = 512: `resolve` takes 4.5 µs
with 512 cells, 5.1 with 1024, 5.3 for 64 texts, and 6.5 with 2048 (2026-11-18)."""
GATHER_PROGRAMS = 2048
"""Programs of one warp for all tokens of a call, if the tokens are few..."""
GATHER_LEAST = 4
"""...and for each token, if they are many: most then find nothing to do. H200, 8192 tokens, 250 misses of one
text: 41 µs with 4, 48 with 8, 58 with 2 (2026-11-18)."""
TOGETHER = 2
"""Entries that a program of the gather reads at once: the link to the host needs many in flight. H200, 3,264
of 64 texts, 584 bytes each: 50 µs anywhere in 1 GB of pinned memory, 87 in 8 GB, 130 in 34 GB; with 1 or 4 at
once about as long, with 8 twice as long (2026-11-19)."""
STAGE_PROGRAMS, STAGE_TILE = 8, 32 * 1024
"""Programs that stage rows, and the bytes that each of them reads at once. They take multiprocessors from the
model. H200, from pinned memory: 8 programs read 49 GB/s, 6 read 46, 4 read 35; with 16 KiB at once 43, 37 and
26 (2026-11-19)."""


@triton.jit
def _codes(chosen, choice, K: tl.constexpr, K_TILE: tl.constexpr):
    """A token's list; choice: the number of its first choice in the span."""
    lane = tl.arange(0, K_TILE)
    return tl.load(chosen + choice + lane, mask=lane < K, other=-1)


@triton.jit
def _mark(chosen, choices, seen, K: tl.constexpr, K_TILE: tl.constexpr):
    """A. Returns the least code of the span."""
    lane = tl.arange(0, K_TILE)
    least = tl.full([K_TILE], -1, tl.int32)
    choice = tl.full([], 0, tl.int32)
    while choice < choices:
        code = _codes(chosen, choice, K, K_TILE)
        tl.atomic_max(seen + (-2 - code), MOST - choice - lane, mask=code <= -2, sem="relaxed")
        least = tl.minimum(least, code)
        choice += K
    return tl.min(least, 0)


@triton.jit
def _part(held, spare, seen, count, CELLS: tl.constexpr, TILE: tl.constexpr):
    """B. In `spare` the other cells come first; those with chosen entries lie behind them, in the opposite
    order. Returns how many others there are."""
    hits = tl.full([], 0, tl.int32)
    for begin in tl.range(0, count, TILE, num_stages=1):
        i = begin + tl.arange(0, TILE)
        cell = tl.load(held + i, mask=i < count, other=0)
        e = tl.load(held + CELLS + i, mask=i < count, other=-1)
        hit = tl.load(seen + e, mask=e >= 0, other=-1) >= 0
        tl.store(seen + e, -2 - cell, mask=hit)
        before = hits + tl.cumsum(hit.to(tl.int32), 0)
        to = tl.where(hit, count - before, i - before)
        tl.store(spare + to, cell, mask=i < count)
        tl.store(spare + CELLS + to, e, mask=i < count)
        hits += tl.sum(hit.to(tl.int32), 0)
    return count - hits


@triton.jit
def _take(  # noqa: PLR0913
    chosen, choices, seen, spare, jobs, K: tl.constexpr, K_TILE: tl.constexpr, CELLS: tl.constexpr
):  # fmt: skip
    """C. Returns how many cells are taken."""
    lane = tl.arange(0, K_TILE)
    taken = tl.full([], 0, tl.int32)
    choice = tl.full([], 0, tl.int32)
    while choice < choices:
        code = _codes(chosen, choice, K, K_TILE)
        mark = tl.load(seen + (-2 - code), mask=code <= -2, other=-1)
        miss = mark == MOST - choice - lane
        to = taken + tl.cumsum(miss.to(tl.int32), 0) - 1
        cell = tl.load(spare + to, mask=miss, other=0)
        tl.store(seen + (-2 - code), -2 - cell, mask=miss)
        tl.store(spare + CELLS + to, -2 - code, mask=miss)
        tl.store(jobs + 2 * to, -2 - code, mask=miss)
        tl.store(jobs + 2 * to + 1, cell, mask=miss)
        taken += tl.sum(miss.to(tl.int32), 0)
        choice += K
    return taken


@triton.jit
def _number(  # noqa: PLR0913
    chosen, choices, seen, places, step, at, K: tl.constexpr, K_TILE: tl.constexpr, PER_ROW: tl.constexpr
):  # fmt: skip
    """D."""
    lane = tl.arange(0, K_TILE)
    choice = tl.full([], 0, tl.int32)
    while choice < choices:
        code = _codes(chosen, choice, K, K_TILE)
        cell = -2 - tl.load(seen + (-2 - code), mask=code <= -2, other=-2)
        place = tl.load(places + cell // PER_ROW, mask=code <= -2, other=0)
        number = (place * step + at) * PER_ROW + cell % PER_ROW
        tl.store(chosen + choice + lane, number, mask=code <= -2)
        choice += K


@triton.jit
def _order(held, spare, seen, count, others, taken, CELLS: tl.constexpr, TILE: tl.constexpr):  # noqa: PLR0913
    """E."""
    unused = others - taken
    for begin in tl.range(0, count, TILE, num_stages=1):
        i = begin + tl.arange(0, TILE)
        source = tl.where(i < others, i - unused, count - 1 - (i - others))
        source = tl.where(i < unused, i + taken, source)
        cell = tl.load(spare + source, mask=i < count, other=0)
        e = tl.load(spare + CELLS + source, mask=i < count, other=-1)
        tl.store(held + i, cell, mask=i < count)
        tl.store(held + CELLS + i, e, mask=i < count)
        tl.store(seen + e, -1, mask=(i >= unused) & (i < count))


@triton.jit(
    do_not_specialize=["layer", "step", "at", "entries", "most"],
    do_not_specialize_on_alignment=["position", "start", "first", "ring", "end"],
)
def _resolve(  # noqa: PLR0913
    chosen, position, start, first, ring, end, places, cells, held, seen, jobs, counts, spare, asked, entries,
    layer, step, at, most, RINGS: tl.constexpr, PLACES: tl.constexpr, CELLS: tl.constexpr, K: tl.constexpr,
    PER_ROW: tl.constexpr, K_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    leads = (tl.load(position + token) >= 0) & (tl.load(first + token) == token)
    own = tl.load(ring + token).to(tl.int64)
    length = tl.load(end + token) - tl.load(start + token)
    count = tl.load(cells + own, mask=leads, other=0)
    if (count == 0) | (length > most):
        tl.store(counts + token, 0)
        return
    chosen += token * K
    seen += own * entries
    choices = length * K
    if _mark(chosen, choices, seen, K, K_TILE) > -2:
        tl.store(counts + token, 0)
        return
    tl.debug_barrier()
    held += (layer.to(tl.int64) * RINGS + own) * (2 * CELLS)
    spare += own * (2 * CELLS)
    others = _part(held, spare, seen, count, CELLS, TILE)
    tl.debug_barrier()
    taken = _take(chosen, choices, seen, spare, jobs + token * (2 * K), K, K_TILE, CELLS)
    tl.store(counts + token, taken)
    lane = tl.arange(0, 2)
    more = tl.where(lane == 0, count - others + taken, taken)
    tl.atomic_add(asked + lane, more.to(tl.int64), sem="relaxed")
    tl.debug_barrier()
    _number(chosen, choices, seen, places + own * PLACES, step, at, K, K_TILE, PER_ROW)
    tl.debug_barrier()
    _order(held, spare, seen, count, others, taken, CELLS, TILE)


def resolve(  # noqa: PLR0913
    chosen: Tensor, flat: Flat, end: Tensor, hot: HotRows, layer: int, to: Numbering, per_row: int, most: int
) -> None:
    tokens, k = chosen.shape
    _, rings, _, cells = hot.held.shape
    assert chosen.is_contiguous() and tokens <= len(hot.counts) and tokens * k <= len(hot.jobs)
    if not tokens:
        return
    _resolve[(tokens,)](
        chosen, *flat[:4], end, *hot, hot.seen.shape[1], layer, to.step, to.first, most,
        RINGS=rings, PLACES=hot.places.shape[1], CELLS=cells, K=k, PER_ROW=per_row,
        K_TILE=triton.next_power_of_2(k), TILE=min(CELLS_TILE, triton.next_power_of_2(cells)), num_warps=8,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["step", "at", "address", "stride", "pages_width", "rows"],
    do_not_specialize_on_alignment=["ring"],
)
def _gather(  # noqa: PLR0913
    ring, places, jobs, counts, pages, pages_width, address, stride, rows, step, at,
    PLACES: tl.constexpr, K: tl.constexpr, PER_ROW: tl.constexpr, ROW_STRIDE: tl.constexpr,
    VALUE: tl.constexpr, SCALE: tl.constexpr, WORD: tl.constexpr, WORD_BYTES: tl.constexpr,
    TILE: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """A tile has some entries: the value and then the scale of each."""
    token = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + token)
    begin = tl.program_id(1) * TOGETHER
    if begin >= count:
        return
    own = tl.load(ring + token).to(tl.int64)
    pages += own * pages_width
    places += own * PLACES
    jobs += token * (2 * K)
    byte = (tl.arange(0, TILE) * WORD_BYTES)[None, :]
    while begin < count:
        job = begin + tl.arange(0, TOGETHER)
        e = tl.load(jobs + 2 * job, mask=job < count, other=0)
        cell = tl.load(jobs + 2 * job + 1, mask=job < count, other=0)
        far = tl.load(pages + e // PER_ROW, mask=job < count, other=0).to(tl.int64) * stride + address
        near = tl.load(places + cell // PER_ROW, mask=job < count, other=0).to(tl.int64) * step + at
        near = near * ROW_STRIDE + rows
        far, near = far[:, None] + byte, near[:, None] + byte
        e, cell = (e % PER_ROW)[:, None], (cell % PER_ROW)[:, None]
        scales = PER_ROW * VALUE - VALUE
        far += tl.where(byte < VALUE, e * VALUE, scales + e * SCALE)
        near += tl.where(byte < VALUE, cell * VALUE, scales + cell * SCALE)
        mask = (job < count)[:, None] & (byte < VALUE + SCALE)
        word = tl.load(far.to(tl.pointer_type(WORD)), mask=mask)
        tl.store(near.to(tl.pointer_type(WORD)), word, mask=mask)
        begin += tl.num_programs(1) * TOGETHER


def gather(hot: HotRows, flat: Flat, k: int, source: HostRows, rows: Entries, to: Numbering) -> None:
    """The widest word that fits every address is used."""
    tokens, (value, scale) = len(flat.ring), (*rows.sizes, 0)[:2]
    if not tokens:
        return
    size = _word(value, scale, source.address, source.stride, rows.rows.data_ptr(), rows.rows.stride(0))
    word: Any = WORDS[size]
    programs = min(triton.cdiv(k, TOGETHER), max(GATHER_LEAST, GATHER_PROGRAMS // tokens))
    _gather[tokens, programs](
        flat.ring, hot.places, hot.jobs, hot.counts, source.pages, source.pages.stride(0),
        source.address, source.stride, rows.rows.data_ptr(), to.step, to.first,
        PLACES=hot.places.shape[1], K=k, PER_ROW=rows.per_row, ROW_STRIDE=rows.rows.stride(0), VALUE=value,
        SCALE=scale, WORD=word, WORD_BYTES=size, TILE=triton.next_power_of_2((value + scale) // size),
        TOGETHER=TOGETHER, num_warps=1,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["address", "stride", "rows", "staged"],
    do_not_specialize_on_alignment=["jobs", "count"],
)
def _stage(  # noqa: PLR0913
    jobs, count, address, stride, rows, staged,
    ROW_STRIDE: tl.constexpr, ROW_WORDS: tl.constexpr, WORD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (ROW_WORDS + TILE - 1) // TILE
    total = tl.load(count) * tiles
    work = tl.program_id(0)
    while work < total:
        job = jobs + work // tiles * 2
        far = tl.load(job).to(tl.int64) * stride + address
        near = (tl.load(job + 1).to(tl.int64) + staged) * ROW_STRIDE + rows
        word = work % tiles * TILE + tl.arange(0, TILE)
        data = tl.load(far.to(tl.pointer_type(WORD)) + word, mask=word < ROW_WORDS)
        tl.store(near.to(tl.pointer_type(WORD)) + word, data, mask=word < ROW_WORDS)
        work += tl.num_programs(0)


def stage(jobs: Tensor, count: Tensor, source: HostRows, rows: Entries, to: Numbering) -> None:
    width = rows.rows.shape[1]
    size = _word(width, source.address, source.stride, rows.rows.data_ptr(), rows.rows.stride(0))
    word: Any = WORDS[size]
    _stage[(STAGE_PROGRAMS,)](
        jobs, count, source.address, source.stride, rows.rows.data_ptr(), to.staged,
        ROW_STRIDE=rows.rows.stride(0), ROW_WORDS=width // size, WORD=word, TILE=STAGE_TILE // size,
        num_warps=8,
    )  # fmt: skip


def _word(*numbers: int) -> int:
    """The size of the widest word that divides all of these."""
    return next(size for size in WORDS if all(number % size == 0 for number in numbers))
