"""How fast pages and tails move: every layout × copier against one large copy of the same bytes.

    python -m benchmarks.copy [--json] [--quick] [--device cuda]

DeepSeek-V4-Flash geometry. `scattered`: no two pages are neighbours. `neighbours`: both sides in one run.
Each number is the median of several runs; the ratios are to the large copy of this run, with all threads
and with one. A copier uses one thread: the other cores belong to the model.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.machine import describe, parser_of
from tiercel.memory.buffers import DeviceMemory, HostMemory
from tiercel.memory.layout import LAYOUTS
from tiercel.spec import CacheSpec, load
from tiercel.transfer.copier import COPIERS, Copier, make_copier
from tiercel.transfer.plan import Direction, Leg, Plan
from tiercel.types import DevicePageId, HostPageId


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    layers: tuple[int, int] = (0, 43)
    pages: int = 64
    tails: int = 16
    places: int = 256
    """More places than are moved, so that a copy does not find its bytes in a cache by chance."""
    runs: int = 7

    @property
    def spec(self) -> CacheSpec:
        return load("deepseek-v4-flash").stage(*self.layers)


QUICK = Sizes(layers=(2, 10), pages=4, tails=1, places=32, runs=1)


@dataclass(frozen=True)
class Rate:
    """One line of the table. `key` is its name in the JSON."""

    key: str
    gb_s: float


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device cuda: torch sees no CUDA device; nothing of this part runs without one")
        from benchmarks import copy_cuda  # here: it imports Triton

        print(json.dumps({"machine": describe()} | copy_cuda.measure(quick=options.quick), indent=1))
        return
    bench = Bench(QUICK if options.quick else Sizes())
    limits = [Rate("limit_gb_s", bench.limit())]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    limits.append(Rate("limit_one_thread_gb_s", bench.limit()))
    torch.set_num_threads(threads)
    rates = [*limits, *bench.copiers()]
    print(json.dumps(to_json(rates), indent=1) if options.json else to_table(bench.sizes, rates))


# Measuring


class Bench:
    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.spec = sizes, sizes.spec

    def limit(self) -> float:
        """One torch copy of as many bytes as the pages have."""
        size = self.sizes.pages * self.spec.page_bytes
        source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
        return self.gb_s(source.numel(), lambda: target.copy_(source))

    def copiers(self) -> Iterator[Rate]:
        device = DeviceMemory(self.spec, pages=self.sizes.places, tails=self.sizes.tails)
        for flat in (device.flat_pages, device.flat_tails):
            flat.fill_(1)
        for layout in LAYOUTS:
            with HostMemory(self.spec, layout, self.sizes.places * self.spec.place_bytes) as host:
                for name in COPIERS:
                    yield from self.copier(f"{layout}.{name}", make_copier(name, device, host))

    def copier(self, name: str, copier: Copier) -> Iterator[Rate]:
        for what, leg, size in self.legs():
            for direction in (Direction.SAVE, Direction.LOAD):
                rate = self.gb_s(size, lambda d=direction, leg=leg: copier.copy(d, leg))  # type: ignore[misc]
                yield Rate(f"{direction.value}{what}_gb_s.{name}", rate)

    def legs(self) -> Iterator[tuple[str, Leg, int]]:
        """(word in the key, leg, bytes). Tails take pages anywhere, as after some hours."""
        random.seed(0)
        pages, places, each = self.sizes.pages, self.sizes.places, self.spec.places_per_tail
        scattered = [random.sample(range(0, places, 2), pages) for _ in range(2)]
        anywhere = iter(random.sample(range(places), self.sizes.tails * each))
        there = iter(random.sample(range(places), self.sizes.tails * each))
        tails = [
            tuple(tuple(next(side) for _ in range(each)) for side in (there, anywhere))
            for _ in range(self.sizes.tails)
        ]
        yield "", page_leg(*scattered), pages * self.spec.page_bytes
        near = page_leg(range(pages), range(places - pages, places))
        yield "_neighbours", near, pages * self.spec.page_bytes
        pairs = [(device, tuple(map(HostPageId, host))) for device, host in tails]
        leg = Plan.of(Direction.SAVE, tails=pairs).legs[0]
        yield "_tails", leg, self.sizes.tails * self.spec.tail_bytes

    def gb_s(self, size: int, copy: Callable[[], object]) -> float:
        copy()
        times = []
        for _ in range(self.sizes.runs):
            start = time.perf_counter()
            copy()
            times.append(time.perf_counter() - start)
        return size / statistics.median(times) / 1e9


def page_leg(device: Sequence[int], host: Sequence[int]) -> Leg:
    pairs = (((DevicePageId(d),), (HostPageId(h),)) for d, h in zip(device, host, strict=True))
    return Plan.of(Direction.SAVE, pages=pairs).legs[0]


# Telling


def to_json(rates: list[Rate]) -> dict[str, float | str]:
    return {"machine": describe()} | {rate.key: round(rate.gb_s, 3) for rate in rates}


def to_table(sizes: Sizes, rates: list[Rate]) -> str:
    spec = sizes.spec
    limit, one = rates[0].gb_s, rates[1].gb_s
    moved = f"{sizes.pages} pages of {spec.page_bytes:,} B, {sizes.tails} tails of {spec.tail_bytes:,} B"
    lines = [f"{describe()}\n{moved}\n", f"{'':50}{'GB/s':>6}{'of limit':>10}{'of one thread':>15}"]
    lines += [f"{r.key:50}{r.gb_s:6.2f}{r.gb_s / limit:10.2f}{r.gb_s / one:15.2f}" for r in rates]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
