"""The spans of one forward as numbers on a device: kernels find rows by themselves, so no lists are made.

One copy takes everything to the device, and nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tiercel.kernels.entries import Flat
from tiercel.models.base import Span

FORGET = 2**31 - 1
"""As the end of a span: the rings do not remember the span."""


class FlatBatch:
    """What `Batch` is on a CPU. `table` [rings, most pages] keeps the page tables of running texts."""

    def __init__(self, spans: Sequence[Span], table: Tensor) -> None:
        lengths = np.array([len(span.tokens) for span in spans])
        starts = np.array([span.start for span in spans])
        ends, first = starts + lengths, lengths.cumsum() - lengths
        rings = np.array([span.ring for span in spans])
        kept = np.where([span.keep for span in spans], ends, FORGET)
        of_spans = np.stack([starts, first, rings, kept, [span.write_from for span in spans]])
        of_tokens = of_spans.repeat(lengths, axis=1)
        position = np.arange(lengths.sum()) + of_tokens[0] - of_tokens[1]
        tails = [
            (place, boundary, span.ring, span.start, at)
            for span, at in zip(spans, first, strict=True)
            for boundary, place in span.tails.items()
        ]
        pages = np.zeros((len(spans), max(len(span.pages) for span in spans)), np.int32)
        for row, span in zip(pages, spans, strict=True):
            row[: len(span.pages)] = span.pages
        tokens = np.concatenate([span.tokens.numpy() for span in spans])
        last, moves = first + lengths - 1, np.array(tails, np.int32).reshape(-1, 5)
        parts = [position, *of_tokens, tokens, last, rings, moves, pages]
        sent = _send([np.asarray(each, np.int32) for each in parts], table.device)
        self.positions, start, first_of, ring, self.end, self.write_from, self.tokens, *rest = sent
        self.last, own, self.tails, own_pages = rest
        table[own.long(), : own_pages.shape[1]] = own_pages
        self.rings = ring.long()
        self.flat = Flat(self.positions, start, first_of, ring, table)
        self.longest = int(ends.max())
        """How many positions the longest text has behind this call."""


def _send(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """int32 arrays, to the device in one copy."""
    whole = torch.from_numpy(np.concatenate([each.ravel() for each in arrays]))
    if device.type == "cuda":
        whole = whole.pin_memory().to(device, non_blocking=True)
    pieces = whole.split([each.size for each in arrays])
    return [piece.view(each.shape) for piece, each in zip(pieces, arrays, strict=True)]
