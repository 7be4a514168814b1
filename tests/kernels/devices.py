"""Which kernels run where: those for CUDA in Triton's interpreter on the CPU, or, where there is one, on a
GPU; the native and the plain ones on the CPU."""

import pytest
import torch

from tiercel.kernels import native, reference
from tiercel.kernels.cuda.kernels import CudaKernels

interpreted = pytest.param(
    "cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
)
on_gpu = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
)
every_device = pytest.mark.parametrize("device", [interpreted, on_gpu])

CUDA = CudaKernels()
_cuda = [
    pytest.param(CUDA, each.values[0], marks=each.marks, id=f"cuda on {each.values[0]}")
    for each in (interpreted, on_gpu)
]
_native, _plain = (pytest.param(each, "cpu", id=each.NAME) for each in (native, reference))
every_set = pytest.mark.parametrize(("kernels", "device"), [*_cuda, _native, _plain])
every_exact_set = pytest.mark.parametrize(("kernels", "device"), [*_cuda, _native])
"""Sets whose bits do not depend on the batch."""


def skip_unless_computed(kernels, dtype):
    """Only the kernels for CUDA compute in another type than fp32."""
    if kernels is not CUDA and dtype != torch.float32:
        pytest.skip("these kernels compute in fp32")


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
