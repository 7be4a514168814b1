"""Attention of one layer on cached rows.

    every layer        the window: the last w tokens, own token included
    sparse (ratio 4)   and the best k of the compressed entries, chosen by the indexer
    heavy (ratio 128)  and all compressed entries

A query at position t sees the compressed entries i < (t + 1) // ratio: entry i exists once its last token
does, and is then in the pages. So a call first writes its new entries, then all its queries read, and the
page table is the only thing between them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.kernels.choice import Kernels
from tiercel.kernels.reference import CosSin
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.batch import Batch, rows_before
from tiercel.models.deepseek_v4.blocks import Weights, part_of
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.entries import EntryRows, plain_codec
from tiercel.models.rings import Rings
from tiercel.models.rotary import Rotary


class Compressor:
    """Turns every `ratio` tokens into one entry; with overlap, each token counts in two entries.

    tokens      … 4i-4 … 4i-1 │ 4i … 4i+3 │ …
    entry i     first halves  ┴ second halves              ratio 4: width 8, stride 4
    """

    def __init__(
        self,
        config: V4Config,
        kernels: Kernels,
        weights: Weights,
        rotary: Rotary,
        pages: EntryRows,
        rings: int,
    ) -> None:
        self._k = kernels
        self._eps = config.rms_norm_eps
        self._norm, self._bias = weights["kv_norm.weight"], weights["position_bias"]
        self._rotary = rotary
        self.tails: EntryRows | None = None
        """Where the rows of an open entry go, if a boundary can leave any."""
        self.pages = pages
        self.ratio, self._channels = self._bias.shape
        self.dim = self._norm.shape[0]
        self._width = self.ratio * self._channels // self.dim
        self.weight = torch.cat([weights["kv_proj.weight"], weights["gate_proj.weight"]])
        """Projects a token to its row: kv, then gate."""
        self._recent = Rings(kernels, rings, self._width, plain_codec(2 * self._channels))

    @property
    def sparse(self) -> bool:
        return self._width > self.ratio

    def extend(self, batch: Batch, rows: Tensor) -> None:
        """Write the entries that end in this call, and the open rows of its tails."""
        recent = self._recent
        made = batch.new_entries(self.ratio, self._width, recent.rows, self.pages.per_row)
        if made is not None:
            entry = self._k.compress((recent.read(), rows), made.rows, self._bias, self.dim)
            turn = self._rotary.at(made.positions)
            entry = self._k.norm_rotate(entry[:, None, :], turn, eps=self._eps, weight=self._norm)
            self.pages.write(made.pages, entry[:, 0, :])
        data = recent.codec.encode(rows)
        for i, span in enumerate(batch.spans if self.tails else ()):
            for boundary, place in span.tails.items():
                numbers = batch.recent_before(boundary, self.ratio, i, recent.rows)
                self._write_tail(place, recent.codec.decode(recent.gather(data, numbers)))
        recent.keep(batch, data)

    def _write_tail(self, place: int, rows: Tensor) -> None:
        """Of open rows only the first channels count any more."""
        assert self.tails is not None
        halves = rows.unflatten(1, (2, self._channels))[:, :, : self.dim].flatten(1)
        self.tails.write_row(place, self.tails.codec.encode(halves))

    def restore(self, ring: int, place: int, boundary: int) -> None:
        if self.tails is None:
            return
        halves = self.tails.codec.decode(self.tails.read_row(place)).unflatten(1, (2, self.dim))
        rows = torch.zeros(len(halves), 2, self._channels)
        rows[:, :, : self.dim] = halves
        self._recent.restore(ring, boundary, self._recent.codec.encode(rows.flatten(1)))

    def entries(self, batch: Batch, *, in_place: bool) -> Tensor:
        """The pool that `batch.entries` numbers."""
        if in_place:
            return self.pages.all()
        rows = batch.entries(self.ratio, self.pages.per_row, in_place=True)
        return self.pages.read(rows[rows >= 0].long())


class Attention:
    """One layer. `__call__` takes flat tokens of several spans."""

    def __init__(
        self,
        config: V4Config,
        kernels: Kernels,
        layer: int,
        weights: Weights,
        rotary: Rotary,
        memory: DeviceMemory,
        rings: int,
    ) -> None:
        draft = layer == config.layers
        ratio = 0 if draft else config.ratios[layer]
        self._config, self._k = config, kernels
        self._scale = config.head_dim**-0.5
        self._memory, self._layer, self._rings = memory, layer, rings
        self.rotary = rotary
        self._tails = self._rows("draft_window" if draft else "window")
        self._recent = Rings(kernels, rings, rows_before(config.window), self._tails.codec)
        self._compressors: list[Compressor] = []
        if ratio:
            self._compressors.append(self._compressor(f"c{ratio}", part_of(weights, "compressor.")))
            if self._compressors[0].sparse:
                index = part_of(weights, "compressor.indexer.")
                self._compressors.append(self._compressor(f"c{ratio}_index", index))
        self._in_place = all(each.pages.in_place for each in self._compressors)
        self._take_weights(weights)

    def _rows(self, stream_name: str) -> EntryRows:
        memory = self._memory
        stream, rows = memory.spec.stream(stream_name), memory.view(stream_name, self._layer)
        return EntryRows(self._k, rows, stream, memory.spec.page_tokens, self._config.rope_dim)

    def _compressor(self, name: str, weights: Weights) -> Compressor:
        own = Compressor(self._config, self._k, weights, self.rotary, self._rows(name), self._rings)
        if any(stream.name == f"{name}_state" for stream in self._memory.spec.tail_streams):
            own.tails = self._rows(f"{name}_state")
        return own

    def _take_weights(self, w: Weights) -> None:
        """Everything that reads the same input is one matrix."""
        c, pack = self._config, self._k.pack
        inputs = [w["q_a_proj.weight"], w["kv_proj.weight"], *(each.weight for each in self._compressors)]
        queries = [w["q_b_proj.weight"]]
        if len(self._compressors) == 2:
            scale = c.index_head_dim**-0.5 * c.index_heads**-0.5
            inputs.append(w["compressor.indexer.scorer.weights_proj.weight"] * scale)
            queries.append(w["compressor.indexer.q_b_proj.weight"])
        self._input, self._widths = pack(torch.cat(inputs)), [len(each) for each in inputs]
        self._queries, self._query_widths = pack(torch.cat(queries)), [len(each) for each in queries]
        self._q_norm, self._kv_norm = w["q_a_norm.weight"], w["kv_norm.weight"]
        self._sinks = w["sinks"]
        self._out_low = self._k.pack_all(w["o_a_proj.weight"].unflatten(0, (c.o_groups, -1)))
        self._out = pack(w["o_b_proj.weight"])

    def restore(self, ring: int, place: int, boundary: int) -> None:
        """The ring goes on where the tail at this place was written."""
        self._recent.restore(ring, boundary, self._tails.read_row(place))
        for compressor in self._compressors:
            compressor.restore(ring, place, boundary)

    def __call__(self, h: Tensor, turn: CosSin, batch: Batch) -> Tensor:
        """h [tokens, d], normed; `turn` of the layer's kind at these positions."""
        c, k = self._config, self._k
        q_low, kv, *rest = k.linear(h, self._input).split(self._widths, 1)
        q, *index_q = k.linear(k.norm(q_low, self._q_norm, c.rms_norm_eps), self._queries).split(
            self._query_widths, 1
        )
        q = k.norm_rotate(q.unflatten(1, (c.heads, c.head_dim)), turn, eps=c.rms_norm_eps)
        kv = k.norm_rotate(kv[:, None, :], turn, eps=c.rms_norm_eps, weight=self._kv_norm)[:, 0, :]
        new = self._recent.codec.encode(kv)
        for compressor, rows in zip(self._compressors, rest, strict=False):
            compressor.extend(batch, rows)
        if index_q:
            entries, chosen = self._best_entries(batch, index_q[0], rest[2], turn)
        elif self._compressors:
            entries, chosen = self._all_entries(batch)
        else:
            entries, chosen = kv, torch.empty(len(h), 0, dtype=torch.int32)
        out = k.attention(
            q,
            (self._recent.read(), self._recent.codec.decode(new)),
            batch.window(c.window),
            entries,
            chosen,
            self._sinks,
            self._scale,
        )
        self._write_tails(batch, new)
        self._recent.keep(batch, new)
        out = k.norm_rotate(out, turn, back=True).flatten(1)
        return k.linear(k.linear_groups(out, self._out_low), self._out)

    def _all_entries(self, batch: Batch) -> tuple[Tensor, Tensor]:
        own = self._compressors[0]
        seen = batch.seen_entries(own.ratio, own.pages.per_row, in_place=self._in_place)
        return own.entries(batch, in_place=self._in_place), seen

    def _best_entries(self, batch: Batch, q: Tensor, weights: Tensor, turn: CosSin) -> tuple[Tensor, Tensor]:
        """The compressed entries, and the rows of those that the indexer finds best for each token."""
        c, (own, index) = self._config, self._compressors
        q = self._k.norm_rotate(q.unflatten(1, (c.index_heads, c.index_head_dim)), turn)
        rows = batch.entries(own.ratio, own.pages.per_row, in_place=self._in_place)
        keys = index.entries(batch, in_place=self._in_place)
        visible = batch.visible(own.ratio)
        chosen = self._k.best_rows(q, weights, keys, rows, batch.span, visible, c.index_topk)
        return own.entries(batch, in_place=self._in_place), chosen

    def _write_tails(self, batch: Batch, new: tuple[Tensor, ...]) -> None:
        for i, span in enumerate(batch.spans):
            for boundary, place in span.tails.items():
                assert boundary > span.start, "a tail is written by the span that reaches it"
                # of a window longer than a page, the tails before it have the rest
                numbers = batch.recent_before(boundary, self._tails.per_row, i, self._recent.rows)
                self._tails.write_row(place, self._recent.gather(new, numbers))
