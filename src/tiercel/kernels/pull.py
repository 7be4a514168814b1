# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Small numbers of the host, which a kernel on the device reads for itself (Triton).

A copy would wait for other copies: while a copy engine moved gigabytes of a load, the 7 KB of a step's
numbers waited until the load was over (docs/log.md). A kernel reads the numbers while the load goes on.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from threading import Lock
from typing import Any

import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
BUFFER_BYTES_LEAST = 64 * 1024


@triton.jit(do_not_specialize=["source", "words"])
def _pull(source, target, words, TILE: tl.constexpr):
    word = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = source.to(tl.pointer_type(tl.int32)) + word
    tl.store(target + word, tl.load(there, mask=word < words), mask=word < words)


class PinnedBuffers:
    """Pinned buffers of one device. A buffer is used again when the kernel that reads it has ended."""

    def __init__(self) -> None:
        self._sent: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._lock = Lock()

    def send(self, numbers: npt.NDArray[Any], target: Tensor) -> None:
        """Queue on the current stream: `target`, on the device, gets these numbers. The caller may
        change its array afterwards."""
        assert numbers.nbytes == target.nbytes and not target.nbytes % 4 and target.is_contiguous()
        words = target.nbytes // 4
        if not words:
            return
        buffer, event = self._free(numbers.nbytes)
        buffer.numpy()[: numbers.nbytes] = numbers.reshape(-1).view("uint8")
        own = target.view(torch.int32)
        _pull[(triton.cdiv(words, TILE),)](buffer.data_ptr(), own, words, TILE=TILE)
        event.record()
        with self._lock:
            self._sent.append((buffer, event))

    def _free(self, size: int) -> tuple[Tensor, torch.cuda.Event]:
        with self._lock:
            if self._sent and len(self._sent[0][0]) >= size and self._sent[0][1].query():
                return self._sent.popleft()
        room = max(BUFFER_BYTES_LEAST, triton.next_power_of_2(size))
        return torch.empty(room, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()


def pull(numbers: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Queue on the current stream: these numbers on the device. They may change then."""
    target = torch.empty(numbers.shape, dtype=torch.from_numpy(numbers).dtype, device=device)
    buffers_of(device).send(numbers, target)
    return target


@cache
def buffers_of(_device: torch.device) -> PinnedBuffers:
    return PinnedBuffers()
