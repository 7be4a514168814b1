"""The kernel set for CUDA: what `reference.py` defines, in Triton. Rows in the cache are read and written in
place (`attention`, `index`, `rows`, `rings`), so this set has no functions on lists of rows."""

from __future__ import annotations

from importlib.metadata import version

import torch
from torch import Tensor

from tiercel.kernels.cuda import draw, experts, hyper, matrix, rows
from tiercel.kernels.cuda.matrix import Weight


class CudaKernels:
    """Activations and matrices of one type: bf16, or fp32 to compare with a CPU."""

    NAME = "cuda"
    EXACT = True

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype

    pack = staticmethod(matrix.pack)
    pack_all = staticmethod(matrix.pack_all)
    linear_groups = staticmethod(matrix.linear_groups)
    norm_rotate = staticmethod(rows.norm_rotate)
    hyper_read = staticmethod(hyper.hyper_read)
    hyper_write = staticmethod(hyper.hyper_write)
    hyper_head = staticmethod(hyper.hyper_head)
    masked = staticmethod(draw.masked)
    greedy = staticmethod(draw.greedy)
    sample = staticmethod(draw.sample)
    route = staticmethod(experts.route)
    experts = staticmethod(experts.experts)

    def built_from(self) -> tuple[str, ...]:
        return version("triton"), str(self.dtype)

    def linear(self, x: Tensor, weight: Weight, *, wide: bool = False) -> Tensor:
        return matrix.linear(x, weight, torch.float32 if wide else None)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rows.norm(x, weight, eps, self.dtype)
