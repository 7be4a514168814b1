"""What one layer keeps in the cache, on a CPU: lists of rows are made for each call, entries are decoded.

    every layer        window entries: in tails, and of running texts in rings
    sparse (ratio 4)   compressed entries and the keys of the indexer: in pages; open rows in rings and tails
    heavy (ratio 128)  compressed entries: in pages; open rows in rings

A query at position t sees the compressed entries i < (t + 1) // ratio: entry i exists once its last token
does, and is then in the pages. So a call first writes its new entries, then all its queries read, and the
page table is the only thing between them.

A request keeps in rings what its next tokens need: per layer the last w - 1 window entries, encoded as in a
tail; per compressor (kv, gate) of the last 8 or 128 tokens. A call whose last tokens are guesses may be
followed by one that begins earlier: a ring has a spare row for each guess, so that a refused guess overwrites
no row that is still needed. `cuda_rows.py` has the same for CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from tiercel.kernels.choice import Kernels, ListKernels
from tiercel.kernels.reference import CosSin
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import Weights, part_of
from tiercel.models.batch import Batch, rows_before
from tiercel.models.deepseek_v4.config import SPARSE_RATIO, V4Config
from tiercel.models.entries import Codec, EntryRows, Parts, Rings, plain_codec
from tiercel.models.rotary import Rotary
from tiercel.spec.deepseek_v4 import ENTRIES, INDEX, STATE_OF, WINDOW


class Setup(NamedTuple):
    """What all layers of one model share."""

    config: V4Config
    kernels: Kernels
    memory: DeviceMemory
    rings: int
    guesses_max: int = 0
    """How many guesses of a text a call may compute that are refused later: spare rows of every ring."""

    @property
    def lists(self) -> ListKernels:
        """The kernels. `LayerRows` needs a set that finds rows by lists."""
        return cast("ListKernels", self.kernels)

    def rows(self, role: str, layer: int) -> EntryRows:
        stream = self.memory.stream(role, layer)
        rows = self.memory.view(stream.name, layer)
        return EntryRows(self.lists, rows, stream, self.memory.spec.page_tokens)

    def make_rings(self, rows: int, codec: Codec) -> Rings:
        """Rings with room for `rows` rows."""
        return Rings(self.lists, self.rings, rows + self.guesses_max, codec, self.memory.device)


class Index(NamedTuple):
    """The indexer's queries: q [tokens, heads, dim], rotated; weights [tokens, heads]."""

    q: Tensor
    weights: Tensor


def compressors_of(ratio: int) -> dict[str, str]:
    """The roles of the streams that a layer of this ratio compresses into, and where their weights are."""
    found = {ENTRIES: "compressor."} if ratio else {}
    return found | ({INDEX: "compressor.indexer."} if ratio == SPARSE_RATIO else {})


class Compressor:
    """Turns every `ratio` tokens into one entry; with overlap, each token counts in two entries.

    tokens      … 4i-4 … 4i-1 │ 4i … 4i+3 │ …
    entry i     first halves  ┴ second halves              ratio 4: width 8, stride 4
    """

    def __init__(self, setup: Setup, layer: int, role: str, weights: Weights, rotary: Rotary) -> None:
        self._k, self._eps, self._rotary = setup.lists, setup.config.rms_norm_eps, rotary
        self._norm, self._bias = weights["kv_norm.weight"], weights["position_bias"]
        self.pages = setup.rows(role, layer)
        keeps = setup.memory.spec.find(STATE_OF[role], layer) is not None
        self._tails = setup.rows(STATE_OF[role], layer) if keeps else None
        """The rows of entries that a boundary leaves open, if it can leave any."""
        self.ratio, self._channels = self._bias.shape
        self._dim = len(self._norm)
        self._width = self.ratio * self._channels // self._dim
        self._recent = setup.make_rings(self._width, plain_codec(4 * 2 * self._channels))

    def extend(self, batch: Batch, rows: Tensor) -> None:
        """Write the entries that end in this call, and the open rows of its tails."""
        recent = self._recent
        made = batch.new_entries(self.ratio, self._width, recent.rows, self.pages.per_row)
        if made is not None:
            entry = self._k.compress((recent.read(), rows), made.rows, self._bias, self._dim)
            rotation = self._rotary.at(made.positions, batch.longest)
            entry = self._k.norm_rotate(entry[:, None, :], rotation, eps=self._eps, weight=self._norm)
            self.pages.write(made.pages, entry[:, 0, :])
        data = recent.codec.encode(rows)
        for i, span in enumerate(batch.spans if self._tails else ()):
            for boundary, place in span.tails.items():
                numbers = batch.recent_before(boundary, self.ratio, i, recent.rows)
                self._write_tail(place, recent.codec.decode(recent.gather(data, numbers)))
        recent.keep(batch, data)

    def _write_tail(self, place: int, rows: Tensor) -> None:
        """Write the open rows of a tail: later entries use only their first channels."""
        assert self._tails is not None
        halves = rows.unflatten(1, (2, self._channels))[:, :, : self._dim].flatten(1)
        self._tails.write_row(place, self._tails.codec.encode(halves))

    def restore(self, ring: int, place: int, boundary: int) -> None:
        if self._tails is None:
            return
        halves = self._tails.codec.decode(self._tails.read_row(place)).unflatten(1, (2, self._dim))
        rows = halves.new_zeros(len(halves), 2, self._channels)
        rows[:, :, : self._dim] = halves
        self._recent.restore(ring, boundary, self._recent.codec.encode(rows.flatten(1)))

    def entries(self, batch: Batch, *, in_place: bool) -> Tensor:
        """The pool that `batch.entries` numbers."""
        if in_place:
            return self.pages.all()
        rows = batch.entries(self.ratio, self.pages.per_row, in_place=True)
        return self.pages.read(rows[rows >= 0].long())


class LayerRows:
    """The cached rows of one layer, and attention on them."""

    def __init__(self, setup: Setup, layer: int, weights: Weights, rotary: Rotary) -> None:
        self._config, self._k = setup.config, setup.lists
        draft = layer >= self._config.layers
        ratio = 0 if draft else self._config.ratios[layer]
        self._tails = setup.rows(WINDOW, layer)
        self._recent = setup.make_rings(rows_before(self._config.window), self._tails.codec)
        self._compressors = [
            Compressor(setup, layer, role, part_of(weights, prefix), rotary)
            for role, prefix in compressors_of(ratio).items()
        ]
        self._in_place = all(each.pages.in_place for each in self._compressors)
        self._norm, self._sinks = weights["kv_norm.weight"], weights["sinks"]
        self._scale = self._config.head_dim**-0.5

    def restore(self, ring: int, place: int, boundary: int) -> None:
        """The ring goes on from the tail at this place."""
        self._recent.restore(ring, boundary, self._tails.read_row(place))
        for compressor in self._compressors:
            compressor.restore(ring, place, boundary)

    def attend(
        self,
        batch: Batch,
        q: Tensor,
        kv: Tensor,
        rotation: CosSin,
        rows: Sequence[Tensor],
        index: Index | None,
    ) -> Tensor:
        """Write what the tokens of this call add, and attend to what each of them sees.

        q [tokens, heads, dim]; kv [tokens, dim], neither normed nor rotated; `rows`: what each compressor
        makes entries of; `index`: only for a sparse layer.
        """
        new = self._encode(kv, rotation)
        recent = self._recent.read(), self._recent.codec.decode(new)
        for compressor, own_rows in zip(self._compressors, rows, strict=True):
            compressor.extend(batch, own_rows)
        entries = recent[1]  # where nothing is compressed, none of them is chosen
        if index is not None:
            chosen = self._best_rows(batch, index)
        elif self._compressors:
            own = self._compressors[0]
            chosen = batch.seen_entries(own.ratio, own.pages.per_row, in_place=self._in_place)
        else:
            chosen = kv.new_empty(len(kv), 0, dtype=torch.int32)
        if self._compressors:
            entries = self._compressors[0].entries(batch, in_place=self._in_place)
        window = batch.window(self._config.window, self._recent.rows)
        out = self._k.attention(q, recent, window, entries, chosen, self._sinks, self._scale)
        self._remember(batch, new)
        return out

    def store(self, batch: Batch, kv: Tensor, rotation: CosSin) -> None:
        """Write the same window entries as `attend`, for a layer without compressors."""
        assert not self._compressors
        self._remember(batch, self._encode(kv, rotation))

    def _encode(self, kv: Tensor, rotation: CosSin) -> Parts:
        eps = self._config.rms_norm_eps
        kv = self._k.norm_rotate(kv[:, None, :], rotation, eps=eps, weight=self._norm)[:, 0, :]
        return self._recent.codec.encode(kv)

    def _remember(self, batch: Batch, new: Parts) -> None:
        self._write_tails(batch, new)
        self._recent.keep(batch, new)

    def _best_rows(self, batch: Batch, index: Index) -> Tensor:
        """The rows of the compressed entries that the indexer finds best for each token."""
        own, keys = self._compressors
        rows = batch.entries(own.ratio, own.pages.per_row, in_place=self._in_place)
        found = keys.entries(batch, in_place=self._in_place)
        visible, most = batch.visible(own.ratio), self._config.index_topk
        return self._k.best_rows(index.q, index.weights, found, rows, batch.span, visible, most)

    def _write_tails(self, batch: Batch, new: Parts) -> None:
        for i, span in enumerate(batch.spans):
            for boundary, place in span.tails.items():
                assert boundary > span.start, "a tail is written by the span that reaches it"
                # if a window is longer than a page, the tails before have the rest
                numbers = batch.recent_before(boundary, self._tails.per_row, i, self._recent.rows)
                self._tails.write_row(place, self._recent.gather(new, numbers))
