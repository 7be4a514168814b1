"""How fast matrix products and experts are on a GPU: weights read per second, and arithmetic.

    python -m benchmarks.products_cuda [--json] [--quick] [--device cpu]

The matrices of DeepSeek-V4-Flash, the experts of one layer (top 6 of 8, and of 64). Each call has weights of
its own, 512 MB or more in all, so that none are in the L2 cache. The calls are recorded in a graph, as a
model's are; a time is the median of several replays, divided by the calls. With `--quick --device cpu` small
products run in Triton's interpreter: that shows that the benchmark works, nothing else.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from benchmarks.machine import describe, parser_of

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from tiercel.kernels.cuda.experts import experts, route
from tiercel.kernels.cuda.matrix import Weight, linear, linear_groups, pack_all

MATRICES = {
    "input": (1, 4160, 4096),
    "queries": (1, 40960, 1024),
    "output groups": (8, 1024, 4096),
    "output": (1, 4096, 8192),
    "head": (1, 129280, 4096),
}
TOPK = 6
HEAD_ROWS_MOST = 256


@dataclass(frozen=True)
class Sizes:
    """How much is measured, and where."""

    matrices: Mapping[str, tuple[int, int, int]] = field(default_factory=lambda: MATRICES)
    experts: tuple[int, ...] = (8, 64)
    d: int = 4096
    inner: int = 2048
    rows: tuple[int, ...] = (1, 16, 64, 256, 8192)
    weight_bytes: int = 512 * 2**20
    runs: int = 9
    device: str = "cuda"


SMALL = {"input": (1, 128, 128), "output groups": (2, 128, 128)}
QUICK = Sizes(SMALL, (8,), 128, 128, (1,), 0, 3)


@dataclass(frozen=True)
class Line:
    name: str
    dtype: str
    rows: int
    us: float
    weights_tb_s: float
    tflop_s: float


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args()
    if options.device == "cpu" and not options.quick:
        parser.error("--device cpu is for --quick: Triton's interpreter would take days for the rest")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; --quick --device cpu shows that it works")
    lines = []
    for line in measure(replace(QUICK if options.quick else Sizes(), device=options.device)):
        lines.append(line)
        if not options.json:
            told = f"{line.us:10.1f} us {line.weights_tb_s:6.2f} TB/s {line.tflop_s:7.1f} TFLOP/s"
            print(f"{line.name:16} {line.dtype:5} {line.rows:5} rows {told}", flush=True)
    if options.json:
        print(json.dumps({"machine": describe(), "lines": [asdict(line) for line in lines]}, indent=1))


def measure(sizes: Sizes) -> Iterator[Line]:
    for name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
        how = {"dtype": dtype, "device": sizes.device}
        for matrix, shape in sizes.matrices.items():
            copies = copies_of(lambda shape=shape, how=how: (weight(*shape, **how),), sizes)
            (m, n, k), most = shape, HEAD_ROWS_MOST if matrix == "head" else max(sizes.rows)
            for rows in (each for each in sizes.rows if each <= most):
                x = torch.randn(rows, m * k, device=sizes.device, dtype=torch.bfloat16)
                us = time_us([lambda x=x, own=own: multiply(x, *own) for own in copies], sizes)
                rates = size_of(copies[0]) / us / 1e6, 2 * rows * m * n * k / us / 1e6
                yield Line(matrix, name, rows, us, *rates)
            del copies
        for count in sizes.experts:
            shapes = (count + 1, 2 * sizes.inner, sizes.d), (count + 1, sizes.d, sizes.inner)
            copies = copies_of(
                lambda shapes=shapes, how=how: tuple(weight(*each, **how) for each in shapes), sizes
            )
            for rows in sizes.rows:
                yield of_experts(f"{count} experts", name, rows, copies, sizes)
            del copies


def of_experts(name: str, dtype: str, rows: int, copies: list[tuple[Weight, ...]], sizes: Sizes) -> Line:
    """The weights of experts that nobody asks are not counted."""
    count, device = copies[0][0].shape[0] - 1, sizes.device
    x = torch.randn(rows, sizes.d, device=device, dtype=torch.bfloat16)
    bias = torch.zeros(count, device=device)
    chosen, weights = route(torch.randn(rows, count, device=device), None, bias, TOPK, 1.5)
    us = time_us([lambda own=own: experts(x, chosen, weights, own, 10.0) for own in copies], sizes)
    asked = (int(chosen.unique().numel()) + 1) / (count + 1)
    flops = 2 * rows * (TOPK + 1) * 3 * sizes.inner * sizes.d
    return Line(name, dtype, rows, us, size_of(copies[0]) * asked / us / 1e6, flops / us / 1e6)


def weight(m: int, n: int, k: int, *, dtype: torch.dtype, device: str) -> Weight:
    scale = torch.ones(m, -(-n // 128), -(-k // 128), device=device) if dtype.itemsize == 1 else None
    return pack_all(torch.randn(m, n, k, device=device, dtype=torch.bfloat16).to(dtype), scale)


def multiply(x: Tensor, weight: Weight) -> Tensor:
    data, scale = weight
    if len(data) > 1:
        return linear_groups(x, weight)
    return linear(x, Weight(data[0], None if scale is None else scale[0]))


def size_of(weights: tuple[Weight, ...]) -> int:
    return sum(each.data.nbytes for each in weights)


def copies_of(make: Callable[[], tuple[Weight, ...]], sizes: Sizes) -> list[tuple[Weight, ...]]:
    first = make()
    return [first, *(make() for _ in range(sizes.weight_bytes // size_of(first)))]


def time_us(calls: list[Callable[[], Tensor]], sizes: Sizes) -> float:
    """The time of one call."""
    for call in calls[:2]:  # compiled before it is recorded
        call()
    if sizes.device == "cpu":
        start = time.perf_counter()
        calls[0]()
        return (time.perf_counter() - start) * 1e6
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(sizes.runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
