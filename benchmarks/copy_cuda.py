"""The measurements of `benchmarks.copy` on a CUDA device. Every number that ends in `_share` is a ratio to
one large pinned copy in the same run, and includes the time to queue the copies."""

from __future__ import annotations

import itertools
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tiercel.config import CacheConfig
from tiercel.kernels.entries import Entries
from tiercel.kernels.move import move_entries
from tiercel.memory.buffers import BorrowedMemory, DeviceMemory, HostMemory, Memory
from tiercel.memory.layout import LAYOUTS
from tiercel.spec import CacheSpec, load
from tiercel.transfer.copier import WAYS
from tiercel.transfer.cuda import CudaController
from tiercel.transfer.plan import Direction, Plan
from tiercel.types import HostPageId

LOAD, SAVE = Direction.LOAD, Direction.SAVE
MATMULS = 14
GIB = 1024**3
SLEEP_CYCLES = 1_000_000
"""Half a millisecond: the device starts after everything is queued."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    pages: int = 512
    device_pages: int = 2000
    host_pages: int = 1500
    matmul: int = 8192
    pin_bytes: int = 8 * GIB
    exit_bytes: int = 32 * GIB
    entries: tuple[int, ...] = (2048, 65536)
    rows: int = 8192


QUICK = Sizes(32, 100, 110, 512, GIB // 4, GIB // 4, (64,), 256)

Pairs = list[tuple[tuple[int, ...], tuple[HostPageId, ...]]]


def measure(*, quick: bool = False) -> dict[str, object]:
    sizes = QUICK if quick else Sizes()
    spec = load("deepseek-v4-flash")
    result: dict[str, object] = {"pin_gb_s": pin_rate(spec, sizes)}
    hosts = {
        layout: HostMemory(spec, layout, sizes.host_pages * spec.place_bytes, pin=True, huge_pages=True)
        for layout in LAYOUTS
    }
    devices: dict[str, Memory] = {
        "own": DeviceMemory(spec, sizes.device_pages, 4, "cuda"),
        "borrowed": rows_apart(spec, sizes),
    }
    chance = random.Random(0)
    each = spec.places_per_tail
    places = chance.sample(range(sizes.device_pages), 2 * sizes.pages + each)
    host_places = iter(chance.sample(range(sizes.host_pages), 2 * sizes.pages + each))

    def take(count: int) -> tuple[HostPageId, ...]:
        return tuple(map(HostPageId, itertools.islice(host_places, count)))

    pages: Pairs = [((place,), take(1)) for place in places[: sizes.pages]]
    others: Pairs = [((place,), take(1)) for place in places[sizes.pages : -each]]
    tail: Pairs = [(tuple(places[-each:]), take(each))]
    host = hosts["page_first_direct"]
    flat, large = (
        host.flat[: sizes.pages * spec.page_bytes],
        torch.ones(sizes.pages * spec.page_bytes, dtype=torch.uint8),
    )
    large = large.cuda()
    link = {
        LOAD: median_ms(lambda: large.copy_(flat, non_blocking=True)),
        SAVE: median_ms(lambda: flat.copy_(large, non_blocking=True)),
    }
    gb = large.numel() / 1e6
    result |= {f"link_{d.value}_gb_s": gb / ms for d, ms in link.items()}
    shares: dict[str, float] = {}
    for owner, layout, way in itertools.product(devices, LAYOUTS, WAYS):
        controller = CudaController(devices[owner], hosts[layout], way)
        for direction in Direction:
            ms = carried_ms(controller, Plan.of(direction, pages))[0]
            shares[f"{direction.value}.{owner}.{layout}.{way}"] = link[direction] / ms
    result["share"] = shares
    for direction in Direction:
        result[f"{direction.value}_share"] = max(
            v for k, v in shares.items() if k.startswith(direction.value)
        )
    result["worst_pair_share"] = min(shares.values())
    controller = CudaController(devices["own"], host)
    result["both_ways_share"] = both_ways(controller, pages, others, large, flat)
    result |= restore(controller, Plan.of(LOAD, pages, tail), Plan.of(LOAD, (), tail), link[LOAD] / gb, sizes)
    result |= dict(slowdowns(controller, pages, sizes))
    result |= single_entries(host, large, sizes)
    result["exit_s"] = exit_seconds(sizes)
    for memory in hosts.values():
        memory.close()
    return result


def rows_apart(spec: CacheSpec, sizes: Sizes) -> BorrowedMemory:
    """As other engines allocate: a tensor for each layer."""
    places = {True: sizes.device_pages, False: 4}
    return BorrowedMemory(
        spec,
        {
            (stream.name, layer): torch.empty(
                places[stream in spec.page_streams], spec.row_bytes(stream), dtype=torch.uint8, device="cuda"
            )
            for stream in spec.streams
            for layer in stream.layers
        },
    )


def pin_rate(spec: CacheSpec, sizes: Sizes) -> float:
    """Touched, pinned and given back."""
    start = time.perf_counter()
    host = HostMemory(spec, "page_first_direct", sizes.pin_bytes, pin=True, huge_pages=True)
    seconds = time.perf_counter() - start
    host.close()
    return sizes.pin_bytes / seconds / 1e9


def exit_seconds(sizes: Sizes) -> float:
    """From SIGTERM to the end of a process that holds pinned memory."""
    code = (
        "import time; from tiercel.memory.host import HostMap\n"
        f"memory = HostMap({sizes.exit_bytes}, huge_pages=True, pin=True)\n"
        "print('there', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        start = time.perf_counter()
        process.terminate()
        process.wait(60)
        return time.perf_counter() - start


def single_entries(host: HostMemory, large: torch.Tensor, sizes: Sizes) -> dict[str, float]:
    """Scattered entries of 576 + 8 bytes from pinned memory into device rows, in one launch."""
    per_row, parts = 64, (576, 8)
    row_bytes = 37_440
    far = Entries(
        host.flat[: sizes.rows * row_bytes].view(-1, row_bytes), per_row, parts, "fp8_groups", 512, 64, 64
    )
    near = far._replace(rows=large[: sizes.rows * row_bytes].view(-1, row_bytes))
    found = {}
    for count in sizes.entries:
        numbers = [torch.randperm(sizes.rows * per_row, device="cuda")[:count] for _ in range(2)]
        ms = median_ms(lambda n=numbers: move_entries(near, n[0], far, n[1]))  # type: ignore[misc]
        found[f"entries_{count}_gb_s"] = count * sum(parts) / ms / 1e6
    return found


def median_ms(queue: Callable[[], object], stream: torch.cuda.Stream | None = None, runs: int = 9) -> float:
    """Device time from before `queue` is called to the end of what it queued."""
    stream, times = stream or torch.cuda.Stream(), []
    for _ in range(runs):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            start.record()
            queue()
            end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def layers_ms(controller: CudaController, plan: Plan, runs: int = 21) -> tuple[float, float, float]:
    """(until the last byte is there, of the CPU; until the first layers are there) for a step that waits for
    a load layer by layer, medians."""
    rows = []
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        ready = controller.ready(controller.submit(plan, layered=True).number)
        ready.queue_all()
        queued = time.perf_counter()
        ready.events[-1][1].synchronize()
        took = time.perf_counter()
        controller.poll()
        again = time.perf_counter()
        ready = controller.ready(controller.submit(plan, layered=True).number)
        ready.events[0][1].synchronize()
        rows.append([took - start, queued - start, time.perf_counter() - again])
        torch.cuda.synchronize()
        controller.close()
        assert all(done.error is None for done in controller.poll())
    total, cpu, first = (statistics.median(column) * 1e3 for column in zip(*rows, strict=True))
    return total, cpu, first


def carried_ms(controller: CudaController, plan: Plan, runs: int = 9) -> tuple[float, float, float]:
    """(until the last byte is there, of the CPU; device time alone) for a plan that is queued as a whole,
    medians."""
    rows = []
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        events = controller.ready(controller.submit(plan).number).events
        queued = time.perf_counter()
        events[-1][1].synchronize()
        rows.append([time.perf_counter() - start, queued - start])
        (done,) = controller.poll()
        assert done.error is None
    stream = controller._queued[plan.direction].stream

    def alone() -> None:
        torch.cuda._sleep(SLEEP_CYCLES)
        controller.submit(plan)

    sleep = median_ms(lambda: torch.cuda._sleep(SLEEP_CYCLES), stream)
    device = median_ms(alone, stream) - sleep
    assert all(done.error is None for done in controller.poll())
    total, cpu = (statistics.median(column) * 1e3 for column in zip(*rows, strict=True))
    return total, cpu, device


def both_ways(
    controller: CudaController, pages: Pairs, others: Pairs, large: torch.Tensor, flat: torch.Tensor
) -> float:
    """Loads and saves at once, over two large copies at once; several of each, as under load."""
    up, down, second = torch.cuda.Stream(), torch.cuda.Stream(), torch.empty_like(large)
    spare = torch.empty_like(flat).pin_memory()

    def two_large() -> None:
        for _ in range(4):
            with torch.cuda.stream(up):
                large.copy_(flat, non_blocking=True)
            with torch.cuda.stream(down):
                spare.copy_(second, non_blocking=True)

    plans = Plan.of(LOAD, pages), Plan.of(SAVE, others)

    def ours() -> None:
        for plan in plans * 4:
            controller.submit(plan)

    times: dict[Callable[[], None], list[float]] = {two_large: [], ours: []}
    for _ in range(9):
        for queue, own in times.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            queue()
            torch.cuda.synchronize()
            own.append(time.perf_counter() - start)
            controller.poll()
    return statistics.median(times[two_large]) / statistics.median(times[ours])


def restore(
    controller: CudaController, whole: Plan, tail: Plan, ms_per_mb: float, sizes: Sizes
) -> dict[str, float]:
    """A prefix of 128 K tokens and its tail, from the decision to the last fence: in groups of layers, as a
    step that waits for it; and the CPU's time for whole pages."""
    spec = controller.host.spec
    launches = controller.launches
    controller.submit(whole, layered=True)
    controller.close()  # waits for all of it
    launches = controller.launches - launches
    controller.poll()
    total, cpu, first = layers_ms(controller, whole)
    _, whole_cpu, _ = carried_ms(controller, whole, 21)
    tail_total, tail_cpu, tail_device = carried_ms(controller, tail, 41)
    link_ms = (sizes.pages * spec.page_bytes + spec.tail_bytes) / 1e6 * ms_per_mb
    return {
        "launches_per_restore": launches,
        "restore_128k": total / link_ms,
        "restore_128k_ms": total,
        "restore_128k_cpu_ms": cpu,
        "restore_128k_whole_cpu_ms": whole_cpu,
        "first_layer_ms": first,
        "tail_us": tail_device * 1e3,
        "tail_link_us": spec.tail_bytes / 1e6 * ms_per_mb * 1e3,
        "tail_wall_us": tail_total * 1e3,
        "tail_cpu_us": tail_cpu * 1e3,
    }


def slowdowns(controller: CudaController, pages: Pairs, sizes: Sizes) -> Iterator[tuple[str, float]]:
    """A stream of bf16 products beside copies, over the same alone; alternating.

    Everything is queued while the stream sleeps, and the copies begin with the first product: the time to
    queue them is not counted here.
    """
    left, right = (
        torch.randn(sizes.matmul, sizes.matmul, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    budget = CacheConfig(1).save_step_bytes // controller.host.spec.page_bytes
    beside = {
        "step": [Plan.of(SAVE, pages[:budget])],  # a step of about 20 ms, with all saves it may start
        "load": [Plan.of(LOAD, pages)] * 3,
        "save": [Plan.of(SAVE, pages)] * 3,
    }

    def products_ms(plans: list[Plan]) -> float:
        torch.cuda.synchronize()
        torch.cuda._sleep(20 * SLEEP_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        controller.after = start
        for plan in plans:
            controller.submit(plan)
        for _ in range(MATMULS):
            torch.matmul(left, right)
        end.record()
        torch.cuda.synchronize()
        assert all(done.error is None for done in controller.poll())
        return start.elapsed_time(end)

    for _ in range(15):
        products_ms([])  # the clocks settle
    for name, plans in beside.items():
        ratios = [products_ms(plans) / products_ms([]) for _ in range(15)]
        yield f"compute_slowdown_{name}", statistics.median(ratios)
    controller.after = None
