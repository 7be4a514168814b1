"""Where kernels for CUDA run: in Triton's interpreter on the CPU, or, where there is one, on a GPU."""

import pytest
import torch

interpreted = pytest.param(
    "cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
)
on_gpu = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
)
every_device = pytest.mark.parametrize("device", [interpreted, on_gpu])


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
