"""Rows of the cache in plain torch, on any device: how `reference` reads and writes rings, pages and tails.

    store_window     kv of a call           → an encoded row for each token
    compress_store   recent rows            → the encoded entry in its page, where a token ends one
    keep             new rows of a call     → rings
    write_tails      rings and new rows     → rows of tails, at a boundary
    restore          rows of tails          → rings
    row_before       new rows and rings     → for each token the row of the token before it
    best_rows        queries and keys       → the numbers of the best keys of each query
    attention        queries, rows, entries → the attended values

All kernel sets take the same: flat tokens, encoded entries, page tables. Padding has position -1: it reads
and writes nothing. Position p of a text lies in row ring · ring_rows + p % ring_rows of what rings keep, or
among the new rows of this call. Entry e of a text is entry e % per_row of the page at
pages[ring, e // per_row].
"""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.kernels.entries import (
    Entries,
    Flat,
    Numbering,
    move_entries_plain,
    read_entries,
    read_rows,
    write_entries,
)
from tiercel.kernels.reference.layers import CosSin, norm_rotate

QUERIES_AT_ONCE = 256
"""How many queries are gathered together: [256, rows, dim] stays in the tens of megabytes."""

Rows = Entries | Tensor
"""Encoded rows, one entry each; or fp32 rows: a compressor's [rows, 2 · channels], kv and then gate, or a
model's streams. New streams may be bf16."""


def store_window(kv: Tensor, rotation: CosSin, eps: float, weight: Tensor, new: Entries) -> None:
    """Norm and rotate kv [tokens, dim] into the first rows of `new`: a row is the entry of a token."""
    x = norm_rotate(kv.float()[:, None, :], rotation, eps=eps, weight=weight)[:, 0, :]
    write_entries(new, torch.arange(len(kv), device=kv.device), x)


# Rings and tails


def keep(kept: Rows, new: Rows, flat: Flat, end: Tensor, ring_rows: int) -> None:
    """Copy the last `ring_rows` rows of every span into its ring.

    end int32 [tokens]: the position after the token's span. A ring does not remember a span whose end is
    given as 2^31 - 1.
    """
    chosen = ((flat.position >= 0) & (flat.position >= end - ring_rows)).nonzero()[:, 0]
    rows = flat.ring[chosen] * ring_rows + flat.position[chosen] % ring_rows
    _copy(kept, rows.long(), new, chosen)


def write_tails(recent: tuple[Rows, Rows], tails: Entries, moves: Tensor, ring_rows: int) -> None:
    """Write the rows of tails: the positions before each boundary, from the ring or from this call.

    moves int32 [tails, 5]: place of the tail (-1: padding, behind the last tail), boundary, ring, start of
    the span, flat number of the span's first token. A tail holds only the first channels of a compressor's
    rows: later entries use no others. Positions before the text are zeros. It holds only the last position of
    streams, which is always new: their rings are not given.
    """
    kept, new = recent
    for place, boundary, ring, start, first in moves.tolist():
        if place < 0:
            continue
        at = torch.arange(boundary - tails.per_row, boundary, device=moves.device)
        own = tails._replace(rows=tails.rows[place : place + 1])
        own.rows[:, : tails.per_row * sum(tails.sizes)] = 0
        old, fresh = at[(at >= 0) & (at < start)], at[at >= max(start, 0)]
        before = boundary - tails.per_row
        _copy(own, old - before, _first_channels(kept, tails), ring * ring_rows + old % ring_rows)
        _copy(own, fresh - before, _first_channels(new, tails), first + fresh - start)


def restore(kept: Rows, tails: Entries, moves: Tensor, ring_rows: int) -> None:
    """Copy the newest entries of tails into rings: as many as a ring has rows.

    moves int32 [tails, 3 or more]: place of the tail (-1: padding, behind the last tail), boundary, ring.
    """
    count = min(ring_rows, tails.per_row)
    for place, boundary, ring, *_ in moves.tolist():
        if place < 0:
            continue
        at = torch.arange(max(boundary - count, 0), boundary, device=moves.device)
        own = tails._replace(rows=tails.rows[place : place + 1])
        rows, numbers = ring * ring_rows + at % ring_rows, at - (boundary - tails.per_row)
        if isinstance(kept, Entries):
            _copy(kept, rows, own, numbers)
            continue
        dim, channels = tails.sizes[0] // 8, kept.shape[1] // 2
        halves = read_entries(own, numbers).unflatten(1, (2, dim))
        kept.unflatten(1, (2, channels))[rows, :, :dim] = halves


def row_before(kept: Tensor, new: Tensor, flat: Flat, ring_rows: int) -> Tensor:
    """For each token the row of the token before it: of this call, or for a span's first token from the ring.
    Zeros for the first token of a text, and for padding. kept: fp32 [rings · ring_rows, n]; new [tokens, n].
    """
    before = torch.cat([new[:1], new[:-1]])
    begins = flat.first == torch.arange(len(new), device=new.device)
    rows = flat.ring[begins] * ring_rows + (flat.position[begins] - 1) % ring_rows
    before[begins] = kept[rows.long()].to(new.dtype)
    before[flat.position <= 0] = 0
    return before


def _copy(to: Rows, to_rows: Tensor, source: Rows, rows: Tensor) -> None:
    """Rows of one kind, or numbers of fp32 into entries of fp32."""
    if isinstance(source, Entries):
        assert isinstance(to, Entries)
        move_entries_plain(to, to_rows, source, rows)
    elif isinstance(to, Entries):
        write_entries(to, to_rows, source[rows].float())
    else:
        to[to_rows] = source[rows].to(to.dtype)


def _first_channels(rows: Rows, tails: Entries) -> Rows:
    """The channels of a compressor's rows that a tail holds; other rows as they are."""
    if isinstance(rows, Entries):
        return rows
    dim, channels = tails.sizes[0] // 8, rows.shape[1] // 2
    return rows if dim == channels else rows.unflatten(1, (2, channels))[:, :, :dim].flatten(1)


# Compressed entries


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
    """For every token whose position ends an entry, and is not below `write_from`: compress the rows of its
    window, norm, rotate at the position of the entry's first token, and encode it into its page.

    recent: fp32 rows [rings · ring_rows, 2 · channels] that are kept, and [tokens, 2 · channels] of this
    call; bias [ratio, channels]; weight [dim]; `table`: (cos, sin) of all positions; write_from: int32
    [tokens].
    """
    (ratio, channels), dim, at = bias.shape, len(weight), flat.position
    ends = (at >= 0) & ((at + 1) % ratio == 0) & (at >= write_from)
    if not ends.any():
        return
    own = _part(flat, ends.nonzero()[:, 0])
    where = own.position[:, None] + torch.arange(1 - ratio * channels // dim, 1, device=at.device)
    rows = torch.cat(recent)[_recent(where, own, ring_rows, len(recent[0])).clamp(min=0)]
    x = compress(rows, where < 0, bias, dim)
    entry = own.position // ratio
    rotation = table[0][entry * ratio], table[1][entry * ratio]
    x = norm_rotate(x[:, None, :], rotation, eps=eps, weight=weight)[:, 0, :]
    write_entries(pages, _numbers(entry[:, None], pages, own)[:, 0], x)


def compress(rows: Tensor, none: Tensor, bias: Tensor, dim: int) -> Tensor:
    """Entries [n, dim] of windows of rows [n, width, 2 · channels]: for each channel, values weighted by the
    softmax of the gates over the window. none [n, width]: rows that do not exist.

    A row is kv, then gate, `channels` each; bias [ratio, channels] is added to the gates. If a window is two
    ratios wide, its first half uses the first channels of its rows, the second half the last channels.
    """
    ratio, channels = bias.shape
    both = rows.unflatten(2, (2, channels)).clone()
    both[:, :, 1] += bias.repeat(rows.shape[1] // ratio, 1)
    if rows.shape[1] > ratio:
        both = torch.cat([both[:, :ratio, :, :dim], both[:, ratio:, :, dim:]], dim=1)
    gate = both[:, :, 1].masked_fill(none[..., None], float("-inf"))
    values: Tensor = both[:, :, 0].masked_fill(none[..., None], 0.0)  # 0 · NaN is NaN
    return (values * torch.softmax(gate, dim=1)).sum(dim=1)


# Attention


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
    """The lightning indexer. int32 [tokens, k]: the numbers of each query's k best entries, ascending in its
    text; -1: fewer. `to`: how they are numbered; None: as in `keys`.

    score = sum over heads of weight · ReLU(q · key). q [tokens, heads, dim], weights [tokens, heads]. A query
    sees the keys that ended with its token or before; `most`: no query sees more. Ties go to the earlier key.
    """
    out = torch.full((len(q), k), -1, dtype=torch.int32, device=q.device)
    for part in _queries(q):
        own = _part(flat, part)
        visible = (own.position + 1) // ratio
        number = torch.arange(most, device=q.device)[None, :]
        rows = _numbers(torch.where(number < visible[:, None], number, 0), keys, own)
        seen = _read(keys, rows, number >= visible[:, None])
        scores = torch.relu_(torch.matmul(q[part], seen.transpose(1, 2)))
        scores = torch.matmul(weights[part][:, None, :], scores).squeeze(1)
        best = top_numbers(scores, visible, k)
        if best.shape[1]:
            out[part, : best.shape[1]] = numbered(best, keys.per_row, own, to or Numbering(flat.pages)).int()
    return out


def numbered(best: Tensor, per_row: int, flat: Flat, to: Numbering) -> Tensor:
    """The numbers of entries [tokens, n] of each token's text; -1 stays."""
    entry = best.clamp(min=0)
    place = to.pages[flat.ring.long()[:, None], entry // per_row].long()
    row = torch.where(place >= 0, place * to.step + to.first, to.staged - 2 - place)
    number = torch.where(place == -1, -2 - entry, row * per_row + entry % per_row)
    return torch.where(best < 0, -1, number)


def top_numbers(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """The numbers of the k best scores among the first `visible` of each query, ascending; -1: fewer."""
    tokens, n = scores.shape
    number = torch.arange(n, device=scores.device)
    hidden = number[None, :] >= visible[:, None]
    if n <= k:
        return torch.where(hidden, -1, number.expand(tokens, n))
    bits = scores.float().contiguous().view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # the order of floats, as integers; -0 is 0
    keys = (ordered << 32) | (n - 1 - number)
    keys = keys.masked_fill(hidden, torch.iinfo(torch.int64).min)
    best, picked = keys.topk(k, dim=-1)
    chosen = torch.where(best == torch.iinfo(torch.int64).min, n, picked).sort(dim=-1).values
    return torch.where(chosen == n, -1, chosen)


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
    """q [tokens, heads, dim] → the same shape and type. A row is key and value.

    A query sees the `window` positions up to its own, and entries. `recent`: kept and new rows; a ring has
    `spare` rows more than the window needs. `chosen`, int32 [tokens, k]: numbers in `entries`, -1: none;
    without it, a query sees all entries of its text that ended with its token or before. sinks [heads], fp32:
    logits without a value.
    """
    kept, new = recent
    out = torch.empty_like(q)
    pool = torch.cat([read_rows(each, torch.arange(len(each.rows), device=q.device)) for each in recent])
    for part in _queries(q):
        own = _part(flat, part)
        where = own.position[:, None] + torch.arange(1 - window, 1, device=q.device)
        near = _recent(where, own, max(window - 1, 1) + spare, len(kept.rows))
        seen, none = [pool[near.clamp(min=0)]], [near < 0]
        if entries is not None:
            far = _listed(chosen[part]) if chosen is not None else _visible(entries, ratio, own)
            seen.append(_read(entries, far.clamp(min=0), far < 0))
            none.append(far < 0)
        out[part] = attend(q[part].float(), torch.cat(seen, 1), torch.cat(none, 1), sinks, scale).to(q.dtype)
    return out


def attend(q: Tensor, seen: Tensor, none: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Attention of queries [n, heads, dim] to rows [n, m, dim] each; none [n, m]: rows that do not exist."""
    seen = seen.masked_fill(none[..., None], 0.0)  # they may hold NaN, and 0 · NaN is NaN
    scores = torch.matmul(q, seen.transpose(1, 2)) * scale
    scores = scores.masked_fill_(none[:, None, :], float("-inf"))
    sink = sinks.view(1, -1, 1).expand(scores.shape[0], -1, 1)
    weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights, seen)


# Where rows are


def _queries(q: Tensor) -> list[slice]:
    return [slice(at, at + QUERIES_AT_ONCE) for at in range(0, len(q), QUERIES_AT_ONCE)]


def _part(flat: Flat, tokens: slice | Tensor) -> Flat:
    """Some tokens, as int64."""
    position, start, first, ring = (each[tokens].long() for each in flat[:4])
    return Flat(position, start, first, ring, flat.pages)


def _recent(where: Tensor, flat: Flat, ring_rows: int, kept: int) -> Tensor:
    """Rows of positions [tokens, n]: below `kept` in rings, then those of this call; -1: before the text."""
    old = flat.ring[:, None] * ring_rows + where % ring_rows
    fresh = kept + flat.first[:, None] + where - flat.start[:, None]
    return torch.where(where < 0, -1, torch.where(where < flat.start[:, None], old, fresh))


def _numbers(entry: Tensor, entries: Entries, flat: Flat) -> Tensor:
    """Numbers in the pages of entries [tokens, n] of each token's text."""
    place = flat.pages[flat.ring[:, None], entry // entries.per_row].long()
    return place * entries.per_row + entry % entries.per_row


def _visible(entries: Entries, ratio: int, flat: Flat) -> Tensor:
    """[tokens, most]: the numbers of the entries that each token sees; -1 behind them."""
    visible = ((flat.position + 1) // ratio)[:, None]
    number = torch.arange(int(visible.max()), device=visible.device)[None, :]
    rows = _numbers(torch.where(number < visible, number, 0), entries, flat)
    return torch.where(number < visible, rows, -1)


def _listed(chosen: Tensor) -> Tensor:
    """Lists without the columns that name nothing."""
    return chosen[:, (chosen >= 0).any(0)].long()


def _read(entries: Entries, numbers: Tensor, none: Tensor) -> Tensor:
    """[tokens, n, dim]: entries by their numbers, each of them read once; zeros where there is none."""
    each, at = torch.where(none, -1, numbers).unique(return_inverse=True)
    return read_entries(entries, each.clamp(min=0))[at].masked_fill(none[..., None], 0.0)
