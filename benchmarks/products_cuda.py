"""How fast matrix products and experts are on a GPU: weights read per second, and arithmetic.

    python -m benchmarks.products_cuda [--json]

The matrices of DeepSeek-V4-Flash, the experts of one layer (top 6 of 8, and of 64). Each call has weights of
its own, 512 MB or more in all, so that none are in the L2 cache. The calls are recorded in a graph, as a
model's are; a time is the median of several replays, divided by the calls.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks.machine import describe
from tiercel.kernels.cuda.experts import experts, route
from tiercel.kernels.cuda.matrix import Weight, linear, linear_groups, pack_all

MATRICES = {
    "input": (1, 4160, 4096),
    "queries": (1, 40960, 1024),
    "output groups": (8, 1024, 4096),
    "output": (1, 4096, 8192),
    "head": (1, 129280, 4096),
}
EXPERTS, D, INNER, TOPK = (8, 64), 4096, 2048, 6
ROWS = (1, 16, 64, 256, 8192)
HEAD_ROWS_MOST = 256
WEIGHT_BYTES = 512 * 2**20
RUNS = 9


@dataclass(frozen=True)
class Line:
    name: str
    dtype: str
    rows: int
    us: float
    weights_tb_s: float
    tflop_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    as_json = parser.parse_args().json
    lines = []
    for line in measure():
        lines.append(line)
        if not as_json:
            told = f"{line.us:10.1f} us {line.weights_tb_s:6.2f} TB/s {line.tflop_s:7.1f} TFLOP/s"
            print(f"{line.name:16} {line.dtype:5} {line.rows:5} rows {told}", flush=True)
    if as_json:
        print(json.dumps({"machine": describe(), "lines": [asdict(line) for line in lines]}, indent=1))


def measure() -> Iterator[Line]:
    for name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
        for matrix, (m, n, k) in MATRICES.items():
            copies = copies_of(lambda m=m, n=n, k=k, dtype=dtype: (weight(m, n, k, dtype),))
            for rows in ROWS if matrix != "head" else [r for r in ROWS if r <= HEAD_ROWS_MOST]:
                x = torch.randn(rows, m * k, device="cuda", dtype=torch.bfloat16)
                us = time_us([lambda x=x, own=own: multiply(x, *own) for own in copies])
                yield Line(
                    matrix, name, rows, us, size_of(copies[0]) / us / 1e6, 2 * rows * m * n * k / us / 1e6
                )
            del copies
        for count in EXPERTS:
            copies = copies_of(
                lambda count=count, dtype=dtype: (
                    weight(count + 1, 2 * INNER, D, dtype),
                    weight(count + 1, D, INNER, dtype),
                )
            )
            for rows in ROWS:
                yield of_experts(f"{count} experts", name, rows, copies)
            del copies


def of_experts(name: str, dtype: str, rows: int, copies: list[tuple[Weight, ...]]) -> Line:
    """The weights of experts that nobody asks are not counted."""
    count = copies[0][0].shape[0] - 1
    x = torch.randn(rows, D, device="cuda", dtype=torch.bfloat16)
    bias = torch.zeros(count, device="cuda")
    chosen, weights = route(torch.randn(rows, count, device="cuda"), None, bias, TOPK, 1.5)
    us = time_us([lambda own=own: experts(x, chosen, weights, own, 10.0) for own in copies])
    asked = (int(chosen.unique().numel()) + 1) / (count + 1)
    flops = 2 * rows * (TOPK + 1) * 3 * INNER * D
    return Line(name, dtype, rows, us, size_of(copies[0]) * asked / us / 1e6, flops / us / 1e6)


def weight(m: int, n: int, k: int, dtype: torch.dtype) -> Weight:
    scale = torch.ones(m, -(-n // 128), -(-k // 128), device="cuda") if dtype.itemsize == 1 else None
    return pack_all(torch.randn(m, n, k, device="cuda", dtype=torch.bfloat16).to(dtype), scale)


def multiply(x: Tensor, weight: Weight) -> Tensor:
    data, scale = weight
    if len(data) > 1:
        return linear_groups(x, weight)
    return linear(x, Weight(data[0], None if scale is None else scale[0]))


def size_of(weights: tuple[Weight, ...]) -> int:
    return sum(each.data.nbytes for each in weights)


def copies_of(make: Callable[[], tuple[Weight, ...]]) -> list[tuple[Weight, ...]]:
    first = make()
    return [first, *(make() for _ in range(WEIGHT_BYTES // size_of(first)))]


def time_us(calls: list[Callable[[], Tensor]]) -> float:
    """The time of one call."""
    for call in calls[:2]:  # compiled before it is recorded
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
