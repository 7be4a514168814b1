"""Workers of one run share the cores: torch would start as many threads in each as there are cores. Without a
GPU Triton's kernels run in its interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    from tests.interpreter import repair

    repair()


def pytest_configure() -> None:
    if os.environ.get("TIERCEL_GPU") and not torch.cuda.is_available():
        raise pytest.UsageError("TIERCEL_GPU is set, and torch sees no CUDA device")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))
