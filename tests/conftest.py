"""Workers of one run share the cores, and so do the processes that tests start: each would otherwise compute
with as many threads as there are cores, and threads that wait for each other spin. Without a GPU Triton's
kernels run in its interpreter.

A test marked `rotate("overlap")` has many cases. Of those that differ in this parameter only, one runs: which
one depends on the rest of the case, so that all values of the parameter are met in some case. `make soak` and
machines with a GPU run all (TIERCEL_ALL).

Tests of whole servers come first: they wait for processes, and other tests use the cores meanwhile.
"""

import gc
import os
from collections import defaultdict
from zlib import crc32

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
THREADS = max(1, len(os.sched_getaffinity(0)) // WORKERS)
os.environ["OMP_NUM_THREADS"] = str(THREADS)  # before torch is imported

import pytest  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    from tests.interpreter import repair

    repair()


def pytest_configure() -> None:
    if os.environ.get("TIERCEL_GPU") and not torch.cuda.is_available():
        raise pytest.UsageError("TIERCEL_GPU is set, and torch sees no CUDA device")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # thousands of tests and modules stay: the collector need not visit them again


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith("tests/whole/"))
    if os.environ.get("TIERCEL_ALL") or os.environ.get("TIERCEL_GPU"):
        return
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if (rotate := item.get_closest_marker("rotate")) is not None:
            params = item.callspec.params  # type: ignore[attr-defined]
            rest = sorted((name, str(value)) for name, value in params.items() if name not in rotate.args)
            groups[f"{item.nodeid.split('[')[0]} {rest}"].append(item)
    left_out = {
        item
        for name, group in groups.items()
        for number, item in enumerate(group)
        if number != crc32(name.encode()) % len(group)
    }
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]
