"""The rows of one layer in device memory, as kernels take them."""

from __future__ import annotations

from torch import Tensor

from tiercel.errors import ConfigError, SpecError
from tiercel.kernels.entries import Entries
from tiercel.memory.buffers import DeviceMemory
from tiercel.spec.stream import Stream

ENTRIES_MOST = 2**31
"""Kernels read numbers of entries as int32."""

NUMBER_BYTES = {"fp32": 4, "bf16": 2, "fp8_row": 1, "fp8_groups": 1}
"""Bytes of a number of each encoding. Rope channels of `fp8_groups` take two."""


def rows_before(window: int) -> int:
    """Rows of a ring for a window: the tokens before the current one, and at least one row."""
    return max(window - 1, 1)


def entries_of(memory: DeviceMemory, role: str, layer: int) -> Entries:
    """The entries of one layer in the stream of this role."""
    stream = memory.stream(role, layer)
    return entries_in(memory.view(stream.name, layer), stream, memory.spec.page_tokens)


def entries_in(rows: Tensor, stream: Stream, page_tokens: int) -> Entries:
    """The entries in rows [places, row_bytes] of a stream."""
    if stream.encoding not in NUMBER_BYTES:
        raise SpecError(f"{stream.name}.encoding", stream.encoding, "is not one that a model here writes")
    sizes, per_row = tuple(part.bytes for part in stream.parts), stream.entries_per_row(page_tokens)
    dim = sizes[0] // NUMBER_BYTES[stream.encoding] - stream.rope
    if (count := len(rows) * per_row) > ENTRIES_MOST:
        why = f"gives {count:,} entries of {stream.name}, {ENTRIES_MOST:,} have numbers"
        raise ConfigError("device_bytes", rows.numel(), why)
    return Entries(rows, per_row, sizes, stream.encoding, dim, stream.rope, stream.group)
