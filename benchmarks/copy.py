"""How fast pages and tails move: every layout × copier against one large copy of the same bytes.

    python -m benchmarks.copy [--json] [--device cuda]

DeepSeek-V4-Flash geometry. `scattered`: no two pages are neighbours. `neighbours`: both sides in one run.
Each number is the median of several runs; the ratios are to the large copy of this run, with all threads
and with one. A copier uses one thread: the other cores belong to the model.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.machine import describe
from tiercel.memory.buffers import DeviceMemory, HostMemory
from tiercel.memory.layout import LAYOUTS
from tiercel.spec import CacheSpec, load
from tiercel.transfer.copier import COPIERS, Copier, make_copier
from tiercel.transfer.plan import Direction, Leg, Plan
from tiercel.types import DevicePageId, DeviceTailId, HostPageId

PAGES = 64
TAILS = 16
PLACES = 256
"""More places than are moved, so that a copy does not find its bytes in a cache by chance."""
RUNS = 7


@dataclass(frozen=True)
class Rate:
    """One line of the table. `key` is its name in the JSON."""

    key: str
    gb_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        from benchmarks import copy_cuda  # here: it imports Triton

        print(json.dumps({"machine": describe()} | copy_cuda.measure(), indent=1))
        return
    as_json = arguments.json
    spec = load("deepseek-v4-flash")
    limits = [Rate("limit_gb_s", measure_limit(spec))]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    limits.append(Rate("limit_one_thread_gb_s", measure_limit(spec)))
    torch.set_num_threads(threads)
    rates = [*limits, *measure_all(spec)]
    print(json.dumps(to_json(rates), indent=1) if as_json else to_table(spec, rates))


# Measuring


def measure_limit(spec: CacheSpec) -> float:
    """One torch copy of as many bytes as the pages have."""
    source, target = (torch.ones(PAGES * spec.page_bytes, dtype=torch.uint8) for _ in range(2))
    return gb_s(source.numel(), lambda: target.copy_(source))


def measure_all(spec: CacheSpec) -> Iterator[Rate]:
    device = DeviceMemory(spec, pages=PLACES, tails=TAILS)
    for flat in (device.flat_pages, device.flat_tails):
        flat.fill_(1)
    for layout in LAYOUTS:
        with HostMemory(spec, layout, PLACES * spec.host_page_bytes) as host:
            for name in COPIERS:
                yield from measure_copier(f"{layout}.{name}", make_copier(name, device, host))


def measure_copier(name: str, copier: Copier) -> Iterator[Rate]:
    for what, leg, size in legs(copier.host.spec):
        for direction in (Direction.SAVE, Direction.LOAD):
            rate = gb_s(size, lambda d=direction, leg=leg: copier.copy(d, leg))  # type: ignore[misc]
            yield Rate(f"{direction.value}{what}_gb_s.{name}", rate)


def legs(spec: CacheSpec) -> Iterator[tuple[str, Leg, int]]:
    """(word in the key, leg, bytes). Tails take host pages anywhere, as after some hours."""
    random.seed(0)
    scattered = [random.sample(range(0, PLACES, 2), PAGES) for _ in range(2)]
    anywhere = iter(random.sample(range(PLACES), TAILS * spec.host_pages_per_tail))
    tails = [(i, tuple(next(anywhere) for _ in range(spec.host_pages_per_tail))) for i in range(TAILS)]
    yield "", page_leg(*scattered), PAGES * spec.page_bytes
    yield "_neighbours", page_leg(range(PAGES), range(PLACES - PAGES, PLACES)), PAGES * spec.page_bytes
    pairs = [(DeviceTailId(device), tuple(map(HostPageId, host))) for device, host in tails]
    yield "_tails", Plan.of(Direction.SAVE, tails=pairs).legs[0], TAILS * spec.tail_bytes


def page_leg(device: list[int] | range, host: list[int] | range) -> Leg:
    pairs = ((DevicePageId(d), (HostPageId(h),)) for d, h in zip(device, host, strict=True))
    return Plan.of(Direction.SAVE, pages=pairs).legs[0]


def gb_s(size: int, copy: Callable[[], object]) -> float:
    copy()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        copy()
        times.append(time.perf_counter() - start)
    return size / statistics.median(times) / 1e9


# Telling


def to_json(rates: list[Rate]) -> dict[str, float | str]:
    return {"machine": describe()} | {rate.key: round(rate.gb_s, 2) for rate in rates}


def to_table(spec: CacheSpec, rates: list[Rate]) -> str:
    limit, one = rates[0].gb_s, rates[1].gb_s
    sizes = f"{PAGES} pages of {spec.page_bytes:,} B, {TAILS} tails of {spec.tail_bytes:,} B"
    lines = [f"{describe()}\n{sizes}\n", f"{'':50}{'GB/s':>6}{'of limit':>10}{'of one thread':>15}"]
    lines += [f"{r.key:50}{r.gb_s:6.2f}{r.gb_s / limit:10.2f}{r.gb_s / one:15.2f}" for r in rates]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
