"""Copying rows and single entries between two buffers, in plain torch.

They define what the copy kernels do, on any device. The Triton kernels for CUDA, which read and write
registered host memory from the device, will take the same arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def copy_rows_reference(source: Tensor, target: Tensor, source_rows: Tensor, target_rows: Tensor) -> None:
    """target[target_rows[i]] = source[source_rows[i]], whole rows.

    source [n, row], target [m, row]: bytes. source_rows, target_rows [k]: int64; target rows do not repeat.
    """
    target.index_copy_(0, target_rows, source.index_select(0, source_rows))


def copy_entries_reference(
    source: Tensor,
    target: Tensor,
    source_at: Tensor,
    target_at: Tensor,
    parts: Sequence[tuple[int, int]],
    entries: int,
) -> None:
    """Copies single entries. A row holds its parts one after the other; an entry is one byte range per part.

        │ value 0 │ value 1 │ … │ scale 0 │ scale 1 │ … │ padding │
        └ parts[0] = (0, 576)   └ parts[1] = (36864, 8)

    source [n, row], target [m, row]: bytes. source_at, target_at [k, 2]: (row, entry), int64; targets do not
    repeat. parts: (offset of entry 0, bytes of one entry) for each part. entries: how many a row has.
    """
    for offset, size in parts:
        there = target[:, offset : offset + entries * size].view(len(target), entries, size)
        here = source[:, offset : offset + entries * size].view(len(source), entries, size)
        there[target_at[:, 0], target_at[:, 1]] = here[source_at[:, 0], source_at[:, 1]]
