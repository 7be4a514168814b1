"""Device memory as other engines allocate it: a tensor for each layer, with a type and strides of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.memory.buffers import BorrowedMemory
from tiercel.spec import CacheSpec


def make_borrowed(
    spec: CacheSpec, pages: int, tails: int, seed: int = 0, device: str = "cpu"
) -> BorrowedMemory:
    """Some rows lie alone, some beside those of other layers, some with a gap after each; never any zeros."""
    generator = torch.Generator().manual_seed(seed)
    rows: dict[tuple[str, int], Tensor] = {}
    for stream in spec.streams:
        size = spec.row_bytes(stream)
        places = pages if stream in spec.page_streams else tails
        shape = (places, len(stream.layers), size + 3)
        together = torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator).to(device)
        for index, layer in enumerate(stream.layers):
            alone = torch.randint(1, 256, (places, size), dtype=torch.uint8, generator=generator).to(device)
            if layer % 3 == 0:
                rows[stream.name, layer] = together[:, index, 2 : 2 + size]
            elif layer % 3 == 1 and size % 2 == 0:
                rows[stream.name, layer] = alone.view(torch.int16)
            else:
                rows[stream.name, layer] = alone
    return BorrowedMemory(spec, rows)
