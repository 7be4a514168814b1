# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Choices of the indexer that give a hit rate: random weights choose at random, which no model does.

    entries of a text   │ stratum 0 │ stratum 1 │ … │ stratum k - 1 │
    choice              one of each stratum; after `period` tokens it is another one, each at its own time

So of k chosen entries k / period are new in each step, and the hot rows of a text have 1 - 1 / period
of them.
The substitute stands behind `best_rows`, which has done its work: only the numbers are others. It is part of
recorded forwards, and is switched on and off by a number on the device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercel.kernels.cuda import index
from tiercel.kernels.cuda.kernels import CudaKernels
from tiercel.kernels.entries import Numbering


@triton.jit(do_not_specialize=["width", "step", "first", "staged"])
def _choose(  # noqa: PLR0913
    out, position, ring, period, pages, width, step, first, staged,
    RATIO: tl.constexpr, PER_ROW: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    every, here = tl.load(period), tl.load(position + token)
    visible = (here + 1) // RATIO // 256 * 256
    if (every == 0) | (visible <= K):
        return
    j = tl.arange(0, TILE)
    number = (here + j % every) // every * 7919 + j * 31 + token * 0
    stratum = visible // K
    e = j * stratum + (number * 40503 & 0xFFFF) % stratum
    place = tl.load(pages + tl.load(ring + token).to(tl.int64) * width + e // PER_ROW, mask=j < K, other=0)
    row = tl.where(place >= 0, place * step + first, staged - 2 - place)
    tl.store(out + token * K + j, tl.where(place == -1, -2 - e, row * PER_ROW + e % PER_ROW), mask=j < K)


class Choices:
    """Stands in for `CudaKernels.best_rows`, in all models that are opened afterwards."""

    def __init__(self, device: str) -> None:
        self._period = torch.zeros(1, dtype=torch.int32, device=device)
        CudaKernels.best_rows = staticmethod(self._best_rows)  # type: ignore[assignment]

    def every(self, period: int) -> None:
        """From now on each chosen entry stays for so many tokens; 0: the indexer chooses."""
        self._period.fill_(period)

    def _best_rows(  # noqa: PLR0913
        self, q: Tensor, weights: Tensor, keys: Any, ratio: int, flat: Any, k: int, most: int,
        to: Numbering | None = None,
    ) -> Tensor:  # fmt: skip
        out, to = index.best_rows(q, weights, keys, ratio, flat, k, most, to), to or Numbering(flat.pages)
        _choose[(len(out),)](
            out, flat.position, flat.ring, self._period, to.pages, to.pages.stride(0), *to[1:],
            RATIO=ratio, PER_ROW=keys.per_row, K=k, TILE=triton.next_power_of_2(k), num_warps=4,
        )  # fmt: skip
        return out
