"""The kernel set for CUDA: what `reference/` defines, in Triton."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from tiercel.kernels.cuda import attention, draw, experts, grouped, hot, index, matrix, rings, rows
from tiercel.kernels.cuda.matrix import Weight


class CudaKernels:
    """Activations and matrices of one type: bf16, or fp32 to compare with a CPU."""

    NAME = "cuda"
    EXACT = True
    FP8_MATRICES = True
    QUEUES = True
    SOURCES = tuple(Path(__file__).parent.glob("*.py"))

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype

    pack = staticmethod(matrix.pack)
    pack_all = staticmethod(matrix.pack_all)
    linear_groups = staticmethod(matrix.linear_groups)
    norm_rotate = staticmethod(rows.norm_rotate)
    masked = staticmethod(draw.masked)
    greedy = staticmethod(draw.greedy)
    sample = staticmethod(draw.sample)
    route = staticmethod(experts.route)
    experts = staticmethod(experts.experts)
    store_window = staticmethod(rows.store_window)
    compress_store = staticmethod(rows.compress_store)
    keep = staticmethod(rings.keep)
    write_tails = staticmethod(rings.write_tails)
    restore = staticmethod(rings.restore)
    row_before = staticmethod(rings.row_before)
    best_rows = staticmethod(index.best_rows)
    resolve = staticmethod(hot.resolve)
    gather = staticmethod(hot.gather)
    stage = staticmethod(hot.stage)
    attention = staticmethod(attention.attention)
    route_softmax = staticmethod(grouped.route_softmax)
    gated = staticmethod(grouped.gated)
    store_heads = staticmethod(grouped.store_heads)
    grouped_attention = staticmethod(grouped.grouped_attention)

    def built_from(self) -> tuple[str, ...]:
        return version("triton"), str(self.dtype)

    def linear(self, x: Tensor, weight: Weight, *, wide: bool = False) -> Tensor:
        return matrix.linear(x, weight, torch.float32 if wide else None)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rows.norm(x, weight, eps, self.dtype)
