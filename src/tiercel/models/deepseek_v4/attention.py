"""Attention of one layer on cached rows.

    every layer        the window: the last w tokens, own token included
    sparse (ratio 4)   and the best k of the compressed entries, chosen by the indexer
    heavy (ratio 128)  and all compressed entries

A query at position t sees the compressed entries i < (t + 1) // ratio: entry i exists once its last token
does, and is then in the pages. So a span first writes its new entries, then all its queries read, and the
page table is the only thing between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from tiercel.kernels.attention import (
    best_rows_reference,
    compress_reference,
    sparse_attention_reference,
)
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.deepseek_v4.batch import Span
from tiercel.models.deepseek_v4.blocks import Weights, norm, part_of, rms
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.entries import EntryRows, codec_of
from tiercel.models.deepseek_v4.recent import RecentEntries, RecentRows
from tiercel.models.deepseek_v4.rope import Rotary, Turn, rotate
from tiercel.spec.stream import Stream


class Compressor:
    """Turns every `ratio` tokens into one entry; with overlap, each token counts in two entries.

    tokens      … 4i-4 … 4i-1 │ 4i … 4i+3 │ …
    entry i     first halves  ┴ second halves              ratio 4: width 8, stride 4
    """

    def __init__(
        self,
        config: V4Config,
        weights: Weights,
        rotary: Rotary,
        pages: EntryRows,
        tails: EntryRows | None,
        rings: int,
    ) -> None:
        self._eps = config.rms_norm_eps
        self._w = weights
        self._rotary = rotary
        self._tails = tails
        self.pages = pages
        self.ratio = weights["position_bias"].shape[0]
        self.dim = weights["kv_norm.weight"].shape[0]
        channels = weights["kv_proj.weight"].shape[0]
        self.overlap = channels == 2 * self.dim
        self.recent = RecentRows(rings, 2 * self.ratio if self.overlap else self.ratio, channels)

    def project(self, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(kv, gate) of flat tokens, the gate with its position's bias."""
        gate = F.linear(h, self._w["gate_proj.weight"]) + self._w["position_bias"][positions % self.ratio]
        return F.linear(h, self._w["kv_proj.weight"]), gate

    def extend(self, span: Span, kv: Tensor, gate: Tensor) -> None:
        """Write the entries that end in this span, and the open rows of its tails."""
        rows = self.recent.extend(span.ring, kv, gate)
        first = max(span.start, span.write_from) // self.ratio
        entries = torch.arange(first, span.end // self.ratio)
        if len(entries):
            self._write(span, rows, entries)
        if self._tails is None:
            return
        for boundary, place in span.tails.items():
            end = boundary - span.start + self.recent.rows
            open_rows = rows[end - self.ratio : end, :, : self.dim].flatten(1)
            self._tails.write_row(place, self._tails.codec.encode(open_rows))

    def restore(self, ring: int, place: int) -> None:
        if self._tails is not None:
            open_rows = self._tails.codec.decode(self._tails.read_row(place))
            self.recent.restore(ring, open_rows.unflatten(1, (2, self.dim)))

    def _write(self, span: Span, rows: Tensor, entries: Tensor) -> None:
        width = 2 * self.ratio if self.overlap else self.ratio
        ends = (entries + 1) * self.ratio - span.start + self.recent.rows
        window = rows[ends[:, None] - torch.arange(width, 0, -1)]
        kv, gate = window[:, :, 0], window[:, :, 1]
        if self.overlap:
            halves = torch.arange(width) < self.ratio
            kv = torch.where(halves[None, :, None], kv[..., : self.dim], kv[..., self.dim :])
            gate = torch.where(halves[None, :, None], gate[..., : self.dim], gate[..., self.dim :])
            if entries[0] == 0:
                gate[0, : self.ratio] = float("-inf")
                kv[0, : self.ratio] = 0
        entry = norm(compress_reference(kv, gate), self._w["kv_norm.weight"], self._eps)
        entry = rotate(entry, self._rotary.at(entries * self.ratio))
        self.pages.write(*self.where(span, entries), entry)

    def where(self, span: Span, entries: Tensor) -> tuple[Tensor, Tensor]:
        """(place, entry in the row) of entries of the text."""
        per_page = self.pages.parts[0].shape[1]
        return span.pages[entries // per_page], entries % per_page

    def read(self, span: Span, entries: Tensor) -> Tensor:
        return self.pages.read(*self.where(span, entries))


class Attention:
    """One layer. `__call__` takes flat tokens of several spans."""

    def __init__(
        self, config: V4Config, layer: int, weights: Weights, rotary: Rotary, memory: DeviceMemory, rings: int
    ) -> None:
        draft = layer == config.layers
        ratio = 0 if draft else config.ratios[layer]
        self._config = config
        self._w = weights
        self._scale = config.head_dim**-0.5
        spec = memory.spec
        self.rotary = rotary
        window = spec.stream("draft_window" if draft else "window")
        codec = codec_of(window, config.rope_dim)
        self.window = RecentEntries(rings, config.window - 1, window, codec)
        self.window_tails = EntryRows.over(memory.view(window.name, layer), window, spec.page_tokens, codec)
        self.compressor: Compressor | None = None
        self.indexer: Compressor | None = None
        if ratio:
            self.compressor = self._compressor(memory, layer, f"c{ratio}", "compressor.", rings)
        self._index_weights = part_of(weights, "compressor.indexer.")
        if self.compressor is not None and self.compressor.overlap:
            self.indexer = self._compressor(memory, layer, f"c{ratio}_index", "compressor.indexer.", rings)

    def _compressor(self, memory: DeviceMemory, layer: int, name: str, prefix: str, rings: int) -> Compressor:
        def entries(stream: Stream) -> EntryRows:
            codec = codec_of(stream, self._config.rope_dim)
            return EntryRows.over(memory.view(stream.name, layer), stream, spec.page_tokens, codec)

        spec = memory.spec
        states = [entries(stream) for stream in spec.tail_streams if stream.name == f"{name}_state"]
        return Compressor(
            self._config,
            part_of(self._w, prefix),
            self.rotary,
            entries(spec.stream(name)),
            states[0] if states else None,
            rings,
        )

    def restore(self, ring: int, place: int) -> None:
        """The ring goes on where the tail at this place was written."""
        self.window.restore(ring, self.window_tails.read_row(place))
        for compressor in (self.compressor, self.indexer):
            if compressor is not None:
                compressor.restore(ring, place)

    def __call__(self, h: Tensor, positions: Tensor, turn: Turn, spans: Sequence[Span]) -> Tensor:
        """h [tokens, d], normed; `turn` of the layer's kind at these positions."""
        c, w = self._config, self._w
        q_low = norm(F.linear(h, w["q_a_proj.weight"]), w["q_a_norm.weight"], c.rms_norm_eps)
        q = F.linear(q_low, w["q_b_proj.weight"]).unflatten(1, (c.heads, c.head_dim))
        q = rotate(rms(q, c.rms_norm_eps), turn)
        kv = rotate(norm(F.linear(h, w["kv_proj.weight"]), w["kv_norm.weight"], c.rms_norm_eps), turn)
        compressed = self._compress(h, positions)
        scores = self._index_queries(h, q_low, turn)
        out, at = torch.empty_like(q), 0
        for span in spans:
            part = slice(at, at + len(span.tokens))
            pools, rows = self._rows(span, kv[part], [x[part] for x in compressed], [x[part] for x in scores])
            out[part] = sparse_attention_reference(q[part], pools, rows, w["sinks"], self._scale)
            at += len(span.tokens)
        out = rotate(out, turn, back=True).reshape(len(h), c.o_groups, -1)
        groups = w["o_a_proj.weight"].unflatten(0, (c.o_groups, -1)).transpose(1, 2)
        low = torch.bmm(out.transpose(0, 1), groups).transpose(0, 1)
        return F.linear(low.flatten(1), w["o_b_proj.weight"])

    def _compress(self, h: Tensor, positions: Tensor) -> list[Tensor]:
        """(kv, gate) of the compressor, then of the indexer, on flat tokens."""
        both = [each for each in (self.compressor, self.indexer) if each is not None]
        return [x for each in both for x in each.project(h, positions)]

    def _index_queries(self, h: Tensor, q_low: Tensor, turn: Turn) -> list[Tensor]:
        """The indexer's queries and head weights, scaled, on flat tokens."""
        if self.indexer is None:
            return []
        c, w = self._config, self._index_weights
        q = F.linear(q_low, w["q_b_proj.weight"]).unflatten(1, (c.index_heads, c.index_head_dim))
        weights = F.linear(h, w["scorer.weights_proj.weight"]) * (
            c.index_head_dim**-0.5 * c.index_heads**-0.5
        )
        return [rotate(q, turn), weights]

    def _rows(
        self, span: Span, kv: Tensor, compressed: list[Tensor], queries: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What each token of a span attends to: pools of entries, and the rows of each."""
        c, n = self._config, len(span.tokens)
        parts = self.window.extend(span.ring, kv, keep=span.keep)
        pools, rows = [self.window.codec.decode(parts)], [_window_rows(span, c.window)]
        for boundary, place in span.tails.items():
            end = boundary - span.start + self.window.rows
            assert boundary > span.start, "a tail is written by the span that reaches it"
            self.window_tails.write_row(place, tuple(part[end - c.window : end] for part in parts))
        if self.compressor is None:
            return pools, rows
        self.compressor.extend(span, compressed[0], compressed[1])
        visible = (torch.arange(span.start, span.end) + 1) // self.compressor.ratio
        entries = torch.arange(span.end // self.compressor.ratio)
        if self.indexer is None:
            chosen = torch.where(entries[None, :] < visible[:, None], entries, -1)
        else:
            self.indexer.extend(span, compressed[2], compressed[3])
            chosen = best_rows_reference(
                queries[0], queries[1], self.indexer.read(span, entries), visible, c.index_topk
            )
        if chosen.numel() < len(entries):  # few queries: read what they chose, not everything
            pools.append(self.compressor.read(span, chosen.clamp(min=0).flatten()))
            chosen = torch.where(chosen < 0, -1, torch.arange(chosen.numel()).view_as(chosen))
        else:
            pools.append(self.compressor.read(span, entries))
        assert chosen.shape[0] == n
        return pools, [*rows, chosen]


def _window_rows(span: Span, window: int) -> Tensor:
    """[n, window]: rows of the recent entries followed by the span's own, the newest last."""
    n = len(span.tokens)
    rows = torch.arange(n)[:, None] + torch.arange(window)[None, :]
    return torch.where(rows + span.start >= window - 1, rows, -1)
