"""Tails between the two ways in which device memory holds them.

    staging place 1    │ window 0 │ window 1 │ state 0 │        in one piece: kernels write and read it here
                          │ pour            ▲ collect
    pages 7, 2         │ page 7          │ page 2 ┄┄┄┄│        in places of pages: here it is kept

A step writes its tails to staging places and pours them behind its forward. A text that goes on from tails
collects them before its first forward. Both are queued where the step is computed, so they wait for nothing,
and all staging places are free again when the next step is queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tiercel.kernels.copy import copy_extents
from tiercel.memory.buffers import DeviceMemory
from tiercel.transfer.extents import cut_row, join

if TYPE_CHECKING:
    from tiercel.kernels.move import Mover

PROGRAMS = 256
"""Programs of a launch: enough for the bandwidth of a device, and few enough for a small tail."""

Staged = tuple[int, tuple[int, ...]]
"""A staging place, and the places of pages that the same tail is kept in."""


class Staging:
    """Copies whole tails within one device memory."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.places = memory.tails
        self._memory = memory
        rows = [(stream.name, layer) for stream in memory.spec.tail_streams for layer in stream.layers]
        found = (extent for row in rows for extent in cut_row(memory.columns[row], memory.rows[row]))
        self._extents = join(found)

    def pour(self, tails: Sequence[Staged]) -> None:
        """Copy from staging places to where the tails are kept."""
        self._copy(tails, load=False)

    def collect(self, tails: Sequence[Staged]) -> None:
        """Copy to staging places from where the tails are kept."""
        self._copy(tails, load=True)

    def _copy(self, tails: Sequence[Staged], *, load: bool) -> None:
        if not tails:
            return
        near = np.array([[place] for place, _ in tails], np.int64)
        far = np.array([kept for _, kept in tails], np.int64)
        assert near.max() < self.places and far.max() < self._memory.pages, "I7: no such place"
        if self._memory.device.type == "cpu":
            copy_extents(self._extents, near, far, self._memory.flat_pages.data_ptr(), load=load)
        else:
            from tiercel.kernels.pull import pull  # here: Triton takes a second to import

            here, there = (pull(each, self._memory.device) for each in (near, far))
            self._mover(here, there, PROGRAMS, load=load)

    @cached_property
    def _mover(self) -> Mover:
        from tiercel.kernels.move import Mover  # here: Triton takes a second to import

        return Mover(self._extents, self._memory.device, self._memory.flat_pages.data_ptr())
