"""What one layer keeps in the cache, on CUDA: kernels read and write pages, rings and tails in place.

It does what `rows.py` does on a CPU; that file says what is kept where. Nothing waits for the device, and
everything that a call queues has a shape that its spans alone decide.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.kernels.cuda.attention import attention
from tiercel.kernels.cuda.index import best_rows
from tiercel.kernels.cuda.rings import keep, restore, write_tails
from tiercel.kernels.cuda.rows import compress_store, store_window
from tiercel.kernels.entries import Entries
from tiercel.kernels.reference import CosSin
from tiercel.models.base import Weights, part_of
from tiercel.models.batch import rows_before
from tiercel.models.deepseek_v4.rows import Index, Setup, compressors_of
from tiercel.models.flat import FlatBatch
from tiercel.models.rotary import Rotary
from tiercel.spec.deepseek_v4 import STATE_OF, WINDOW


def entries_of(setup: Setup, role: str, layer: int) -> Entries:
    """The entries of one layer in the stream of this role, in device memory."""
    own = setup.memory.stream(role, layer)
    sizes = tuple(part.bytes for part in own.parts)
    dim = sizes[0] // {"fp32": 4, "bf16": 2}.get(own.encoding, 1) - own.rope  # rope: two bytes each
    rows, per_row = setup.memory.view(own.name, layer), own.entries_per_row(setup.memory.spec.page_tokens)
    return Entries(rows, per_row, sizes, own.encoding, dim, own.rope, own.group)


class CudaCompressor:
    """The entries of one stream that a layer compresses into, and the rows of what is still open."""

    def __init__(self, setup: Setup, layer: int, role: str, weights: Weights, rotary: Rotary) -> None:
        self._eps, self._rotary = setup.config.rms_norm_eps, rotary
        self._norm, self._bias = weights["kv_norm.weight"], weights["position_bias"]
        self.ratio, channels = self._bias.shape
        self._ring_rows = self.ratio * channels // len(self._norm) + setup.guesses_max
        self.pages = entries_of(setup, role, layer)
        keeps = setup.memory.spec.find(STATE_OF[role], layer) is not None
        self._tails = entries_of(setup, STATE_OF[role], layer) if keeps else None
        shape = setup.rings * self._ring_rows, 2 * channels
        self._kept = torch.zeros(shape, device=setup.memory.device)

    def extend(self, batch: FlatBatch, rows: Tensor) -> None:
        """Write the entries that end in this call, and the open rows of its tails."""
        table = self._rotary.table(batch.longest)
        both = self._kept, rows
        compress_store(
            both, self._bias, self._norm, self._eps, table, self.pages, batch.flat, batch.write_from,
            self._ring_rows,
        )  # fmt: skip
        if self._tails is not None:
            write_tails(both, self._tails, batch.tails, self._ring_rows)
        keep(*both, batch.flat, batch.end, self._ring_rows)

    def restore(self, moves: Tensor) -> None:
        if self._tails is not None:
            restore(self._kept, self._tails, moves, self._ring_rows)


class CudaRows:
    """The cached rows of one layer, and attention on them."""

    def __init__(self, setup: Setup, layer: int, weights: Weights, rotary: Rotary) -> None:
        self._config = c = setup.config
        draft = layer >= c.layers
        self._tails = entries_of(setup, WINDOW, layer)
        self._spare = setup.guesses_max
        self._ring_rows = rows_before(c.window) + self._spare
        self._kept = self._rows(setup.rings * self._ring_rows, setup.memory.device, zeros=True)
        self._compressors = [
            CudaCompressor(setup, layer, role, part_of(weights, prefix), rotary)
            for role, prefix in compressors_of(0 if draft else c.ratios[layer]).items()
        ]
        self._norm, self._sinks, self._scale = weights["kv_norm.weight"], weights["sinks"], c.head_dim**-0.5

    def _rows(self, count: int, device: torch.device, *, zeros: bool = False) -> Entries:
        """Window entries, one to a row. Rows begin at multiples of 16 bytes: loads are that wide. Rows
        that a text has not reached are never read."""
        make = torch.zeros if zeros else torch.empty
        rows = make(count, -(-sum(self._tails.sizes) // 16) * 16, dtype=torch.uint8, device=device)
        return self._tails._replace(rows=rows, per_row=1)

    def restore(self, moves: Tensor) -> None:
        """Rings go on from tails. `moves`: see `kernels.cuda.rings.restore`."""
        restore(self._kept, self._tails, moves, self._ring_rows)
        for compressor in self._compressors:
            compressor.restore(moves)

    def attend(
        self,
        batch: FlatBatch,
        q: Tensor,
        kv: Tensor,
        rotation: CosSin,
        rows: Sequence[Tensor],
        index: Index | None,
    ) -> Tensor:
        """Write what the tokens of this call add, and attend to what each of them sees."""
        c, flat = self._config, batch.flat
        new = self._encode(kv, rotation)
        for compressor, own_rows in zip(self._compressors, rows, strict=True):
            compressor.extend(batch, own_rows)
        chosen, entries, ratio = None, None, 1
        if self._compressors:
            entries, ratio = self._compressors[0].pages, self._compressors[0].ratio
        if index is not None:
            keys, most = self._compressors[1].pages, batch.longest // ratio
            chosen = best_rows(index.q, index.weights, keys, ratio, flat, c.index_topk, most)
        out = attention(
            q,
            (self._kept, new),
            c.window,
            entries,
            chosen,
            ratio,
            flat,
            self._sinks,
            self._scale,
            self._spare,
        )
        self._remember(batch, new)
        return out

    def store(self, batch: FlatBatch, kv: Tensor, rotation: CosSin) -> None:
        """Write the same window entries as `attend`, for a layer without compressors."""
        assert not self._compressors
        self._remember(batch, self._encode(kv, rotation))

    def _encode(self, kv: Tensor, rotation: CosSin) -> Entries:
        new = self._rows(len(kv), kv.device)
        store_window(kv, rotation, self._config.rms_norm_eps, self._norm, new)
        return new

    def _remember(self, batch: FlatBatch, new: Entries) -> None:
        both = self._kept, new
        write_tails(both, self._tails, batch.tails, self._ring_rows)
        keep(*both, batch.flat, batch.end, self._ring_rows)
