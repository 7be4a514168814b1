"""What one layer keeps in the cache: kernels read and write pages, rings and tails in place.

    every layer        window entries: in tails, and of running texts in rings
    sparse (ratio 4)   compressed entries and the keys of the indexer: in pages; open rows in rings and tails
    heavy (ratio 128)  compressed entries: in pages; open rows in rings

A query at position t sees the compressed entries i < (t + 1) // ratio: entry i exists once its last token
does, and is then in the pages. So a call first writes its new entries, then all its queries read, and the
page table is the only thing between them.

A request keeps in rings what its next tokens need: per layer the last w - 1 window entries, encoded as in a
tail; per compressor (kv, gate) of the last 8 or 128 tokens. A call whose last tokens are guesses may be
followed by one that begins earlier: a ring has a spare row for each guess, so that a refused guess overwrites
no row that is still needed.

Whatever is read back was encoded before, also within one call: a value never depends on whether it has been
through the cache. Nothing waits for a device, and everything that a call queues has a shape that its spans
alone decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tiercel.kernels.choice import Kernels
from tiercel.kernels.entries import Entries, Numbering
from tiercel.kernels.reference import CosSin
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.apart import ApartRows
from tiercel.models.base import Weights, part_of
from tiercel.models.beside import Beside
from tiercel.models.deepseek_v4.config import SPARSE_RATIO, V4Config
from tiercel.models.flat import FlatBatch
from tiercel.models.rotary import Rotary
from tiercel.models.rows import entries_of, rows_before
from tiercel.spec.deepseek_v4 import ENTRIES, INDEX, STATE_OF, WINDOW


class Setup(NamedTuple):
    """What all layers of one model share."""

    config: V4Config
    kernels: Kernels
    memory: DeviceMemory
    rings: int
    beside: Beside
    guesses_max: int = 0
    """How many guesses of a text a call may compute that are refused later: spare rows of every ring."""


class Index(NamedTuple):
    """What the indexer reads."""

    q: Tensor
    """[tokens, heads, dim], rotated."""
    weights: Tensor
    """[tokens, heads]."""
    rows: Tensor
    """What keys are made of."""


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
        self._k, self._eps, self._rotary = setup.kernels, setup.config.rms_norm_eps, rotary
        self._norm, self._bias = weights["kv_norm.weight"], weights["position_bias"]
        self.ratio, channels = self._bias.shape
        self._ring_rows = self.ratio * channels // len(self._norm) + setup.guesses_max
        self.pages = entries_of(setup.memory, role, layer)
        self.pool = setup.memory.spec.pool_of(setup.memory.stream(role, layer))
        keeps = setup.memory.spec.find(STATE_OF[role], layer) is not None
        self._tails = entries_of(setup.memory, STATE_OF[role], layer) if keeps else None
        """The rows of entries that a boundary leaves open, if it can leave any."""
        shape = setup.rings * self._ring_rows, 2 * channels
        self._kept = torch.zeros(shape, device=setup.memory.device)

    def extend(self, batch: FlatBatch, rows: Tensor) -> None:
        """Write the entries that end in this call, and the open rows of its tails."""
        table = self._rotary.table(batch.longest)
        both, how = (self._kept, rows), (self._bias, self._norm, self._eps, table)
        where = batch.pools[self.pool], batch.write_from, self._ring_rows
        self._k.compress_store(both, *how, self.pages, *where)
        if self._tails is not None:
            self._k.write_tails(both, self._tails, batch.tails, self._ring_rows)
        self._k.keep(*both, batch.flat, batch.end, self._ring_rows)

    def restore(self, moves: Tensor) -> None:
        if self._tails is not None:
            self._k.restore(self._kept, self._tails, moves, self._ring_rows)


class LayerRows:
    """The cached rows of one layer, and attention on them."""

    def __init__(self, setup: Setup, layer: int, weights: Weights, rotary: Rotary) -> None:
        c, self._config, self._k = setup.config, setup.config, setup.kernels
        draft, self._layer = layer >= c.layers, layer
        self._tails = entries_of(setup.memory, WINDOW, layer)
        self._spare = setup.guesses_max
        self._ring_rows = rows_before(c.window) + self._spare
        self._row_bytes = -(-sum(self._tails.sizes) // 16) * 16
        """Rows begin at multiples of 16 bytes: loads are that wide."""
        kept = setup.rings * self._ring_rows, self._row_bytes
        self._kept = self._rows(torch.zeros(kept, dtype=torch.uint8, device=setup.memory.device))
        self._compressors = {
            role: Compressor(setup, layer, role, part_of(weights, prefix), rotary)
            for role, prefix in compressors_of(0 if draft else c.ratios[layer]).items()
        }
        self._norm, self._sinks, self._scale = weights["kv_norm.weight"], weights["sinks"], c.head_dim**-0.5
        compressor = self._compressors.get(ENTRIES)
        self._entries = compressor.pages if compressor else None
        """What attention reads, as it is numbered there."""
        self._pool, self._ratio = (compressor.pool, compressor.ratio) if compressor else (0, 1)
        self._apart: Callable[[FlatBatch], Numbering] | None = None
        """How entries are numbered that lie in another pool than the keys of the indexer."""
        if len({compressor.pool for compressor in self._compressors.values()}) > 1:
            rows = ApartRows.of(setup.memory, ENTRIES, layer)
            self._entries, self._apart = rows.entries, rows.numbering

    def _rows(self, rows: Tensor) -> Entries:
        """Window entries, one to a row. Rows that a text has not reached are never read."""
        return self._tails._replace(rows=rows, per_row=1)

    def restore(self, moves: Tensor) -> None:
        """Rings go on from tails. `moves`: see `kernels.reference.rows.restore`."""
        self._k.restore(self._kept, self._tails, moves, self._ring_rows)
        for compressor in self._compressors.values():
            compressor.restore(moves)

    def choose(self, batch: FlatBatch, index: Index) -> Tensor:
        """Write the keys that this call adds, and choose what each of its tokens attends to. Chosen entries
        that are on the host are on their way to the device then."""
        k, keys = self._k, self._compressors[INDEX]
        keys.extend(batch, index.rows)
        to = None if self._apart is None else self._apart(batch)
        where = self._ratio, batch.pools[keys.pool], self._config.index_topk, batch.longest // self._ratio
        chosen = k.best_rows(index.q, index.weights, keys.pages, *where, to)
        if batch.host is not None:
            batch.host.bring(self._layer, chosen)
        return chosen

    def write(self, batch: FlatBatch, kv: Tensor, rotation: CosSin, rows: Tensor | None) -> Entries:
        """Write the compressed entries that this call adds. Returns its window entries: `attend` writes them.

        kv [tokens, dim], neither normed nor rotated; `rows`: what the entries are made of.
        """
        if rows is not None:
            self._compressors[ENTRIES].extend(batch, rows)
        shape = kv.shape[0], self._row_bytes
        new = self._rows(torch.empty(shape, dtype=torch.uint8, device=kv.device))
        self._k.store_window(kv, rotation, self._config.rms_norm_eps, self._norm, new)
        return new

    def attend(self, batch: FlatBatch, q: Tensor, new: Entries, chosen: Tensor | None) -> Tensor:
        """Attend to what each token sees. q [tokens, heads, dim]; `chosen`: only for a sparse layer."""
        both, host = (self._kept, new), batch.host if chosen is not None else None
        if host is not None:
            host.wait(self._layer)
        how = batch.pools[self._pool], self._sinks, self._scale, self._spare
        out = self._k.attention(q, both, self._config.window, self._entries, chosen, self._ratio, *how)
        if host is not None:
            host.used()
        self._remember(batch, both)
        return out

    def store(self, batch: FlatBatch, kv: Tensor, rotation: CosSin) -> None:
        """Write the same window entries as `attend`, for a layer without compressors."""
        assert not self._compressors
        self._remember(batch, (self._kept, self.write(batch, kv, rotation, None)))

    def _remember(self, batch: FlatBatch, both: tuple[Entries, Entries]) -> None:
        self._k.write_tails(both, self._tails, batch.tails, self._ring_rows)
        self._k.keep(*both, batch.flat, batch.end, self._ring_rows)
