"""Goal: a CUDA device moves exactly the named rows, whatever the order of its streams. Method: every
declaration, layout and way; hundreds of permuted pages; random schedules with delays in every stream, where a
kernel in the place of attention counts bytes that are not there yet or not there any more."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.memory.specs import FLASH, SPECS
from tests.transfer.borrowed import make_borrowed
from tests.transfer.parts import APART, LOADS, Parts
from tests.transfer.rig import DEVICE_PAGES, DEVICE_TAILS, Rig, device_page, host_page, pieces_of
from tiercel.config import LAYOUT_NAMES
from tiercel.memory.buffers import BorrowedMemory, DeviceMemory, HostMemory, Memory
from tiercel.spec import CacheSpec, load, mha, mla
from tiercel.transfer.controller import Ticket
from tiercel.transfer.copier import WAYS, make_copier
from tiercel.transfer.cuda import CopyEngines, CudaController
from tiercel.transfer.plan import Direction, Plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

LOAD, SAVE = Direction.LOAD, Direction.SAVE
SPEC = FLASH.stage(2, 10)
"""Eight layers: pages of 190 KB, enough for two groups of layers that the copy engines move."""
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
every_layout = pytest.mark.parametrize("layout", LAYOUT_NAMES)
every_way = pytest.mark.parametrize("way", WAYS)


def finish(controller: CudaController, ticket: Ticket) -> None:
    controller.close()
    (done,) = controller.poll()
    assert done.ticket is ticket and done.error is None, done.error


@every_spec
@every_layout
@every_way
def test_every_way_round_trips_and_touches_nothing_else(spec: CacheSpec, layout: str, way: str) -> None:
    rig = Rig(spec, layout, device="cuda")
    expected = rig.device_after_round_trip()
    before, host_before = rig.device_bytes(), rig.host.flat.clone()
    controller = CudaController(rig.device, rig.host, way)
    finish(controller, controller.submit(rig.save_plan()))
    assert all(map(torch.equal, rig.device_bytes(), before))
    untouched = ~rig.host_bytes_named()
    assert torch.equal(rig.host.flat[untouched], host_before[untouched])
    saved = rig.host.flat.clone()
    finish(controller, controller.submit(rig.load_plan()))
    assert all(map(torch.equal, rig.device_bytes(), expected)) and torch.equal(rig.host.flat, saved)
    rig.host.close()


@every_spec
@every_layout
@every_way
def test_borrowed_rows_are_moved_as_the_cpu_moves_them(spec: CacheSpec, layout: str, way: str) -> None:
    rig = Rig(spec, layout, device="cuda")
    theirs = make_borrowed(spec, DEVICE_PAGES, DEVICE_TAILS, device="cuda")
    controller = CudaController(theirs, rig.host, way)
    finish(controller, controller.submit(rig.save_plan(theirs=True)))
    saved = rig.host.flat.clone()
    rig.poison(seed=0)
    twin = make_borrowed(spec, DEVICE_PAGES, DEVICE_TAILS)
    reference = make_copier("reference", twin, rig.host)
    for leg in rig.save_plan(theirs=True).legs:
        reference.copy(SAVE, leg)
    assert torch.equal(rig.host.flat, saved)
    back = rig.load_plan(theirs=True)
    finish(controller, controller.submit(back))
    for leg in back.legs:
        reference.copy(LOAD, leg)
    for stream in spec.streams:
        for layer in stream.layers:
            assert torch.equal(theirs.rows[stream.name, layer][0].cpu(), twin.rows[stream.name, layer][0])
    rig.host.close()


@pytest.mark.parametrize("spec", APART.values(), ids=APART)
@every_layout
@every_way
@pytest.mark.parametrize("which", LOADS.values(), ids=LOADS)
def test_parts_of_pages_come_back_alone(
    spec: CacheSpec, layout: str, way: str, which: tuple[str, ...]
) -> None:
    rig = Parts(spec, layout, device="cuda")
    controller = CudaController(rig.device, rig.host, way, shares=(0.4,), grouped_bytes=0)
    saved = rig.device.flat_pages.clone()
    finish(controller, controller.submit(rig.save()))
    assert torch.equal(rig.device.flat_pages, saved)
    there = rig.host.flat.clone()
    for layered in (False, True):
        rig.device.flat_pages.random_(0, 256)
        plan, moves = rig.load(which)
        wanted = rig.after(saved, rig.device.flat_pages, moves)
        finish(controller, controller.submit(plan, layered=layered))
        assert torch.equal(rig.device.flat_pages, wanted) and torch.equal(rig.host.flat, there)
    rig.host.close()


@every_way
def test_with_two_pools_flash_pages_are_moved_in_groups_by_the_copy_engines(way: str) -> None:
    spec = replace(FLASH, second=("c4",))
    rig = Parts(spec, "page_first_direct", device="cuda")
    controller = CudaController(rig.device, rig.host, way, grouped_bytes=0)
    engines = way != "kernel"
    assert (controller.how == "copy engines") == engines and len(controller._groups) == (3 if engines else 1)
    saved = rig.device.flat_pages.clone()
    finish(controller, controller.submit(rig.save()))
    rig.device.flat_pages.random_(0, 256)
    plan, moves = rig.load(LOADS["some of each"])
    wanted = rig.after(saved, rig.device.flat_pages, moves)
    finish(controller, controller.submit(plan, layered=True))
    assert torch.equal(rig.device.flat_pages, wanted)
    rig.host.close()


def layer_first(spec: CacheSpec, pages: int, tails: int) -> BorrowedMemory:
    """As vLLM allocates: a tensor for each layer."""
    rows = {
        (stream.name, layer): torch.empty(
            pages if stream in spec.page_streams else tails,
            spec.row_bytes(stream),
            dtype=torch.uint8,
            device="cuda",
        )
        for stream in spec.streams
        for layer in stream.layers
    }
    return BorrowedMemory(spec, rows)


LARGE: dict[str, CacheSpec] = {
    "flash": FLASH,
    "pro": load("deepseek-v4-pro"),
    "gqa": mha("gqa", 16, 32, kv_heads=8, head_dim=128),
    "mla": mla("mla", 64, 61, kv_lora_rank=512, rope_dim=64),
}
COUNTS = [(name, count) for name in LARGE for count in (1, 63, 64, 65, 128)]


@pytest.mark.parametrize(("name", "count"), [*COUNTS, ("flash", 300), ("flash", 499), ("flash", 500)])
@pytest.mark.parametrize("owner", ["own", "borrowed"])
@every_way
def test_hundreds_of_pages_come_back(name: str, count: int, owner: str, way: str) -> None:
    """From one device memory to the host, and from there into another one, at other places."""
    spec, pages, chance = LARGE[name], count + 10, random.Random(count)
    tails, tail_pages = (2, spec.places_per_tail) if spec.tail_streams else (0, 0)
    host = HostMemory(spec, "page_first_direct", (pages + tail_pages) * spec.place_bytes, pin=True)
    make = layer_first if owner == "borrowed" else lambda *sizes: DeviceMemory(*sizes, device="cuda")
    own = owner == "own"  # then a tail is kept in places of pages
    more = 2 * tail_pages if own else 0
    source, target = make(spec, pages + more, tails), make(spec, pages + more, tails)
    words = torch.Generator(device="cuda").manual_seed(count)
    for flat, _ in source.rows.values():
        flat.random_(0, 256, generator=words)
    near = (
        [tuple(range(first, first + tail_pages)) for first in (pages, pages + tail_pages)]
        if own
        else [(1,), (0,)]
    )
    there, middle, back = (chance.sample(range(pages), count) for _ in range(3))
    tail = tuple(host_page(place) for place in range(pages, pages + tail_pages))
    for memory, direction, places, tail_place in (
        (source, SAVE, there, near[0]),
        (target, LOAD, back, near[1]),
    ):
        controller = CudaController(memory, host, way)
        pairs = [((device_page(d),), (host_page(h),)) for d, h in zip(places, middle, strict=True)]
        ends = [(tuple(map(device_page, tail_place)), tail)] if tails else []
        finish(controller, controller.submit(Plan.of(direction, pairs, ends)))
        spent = controller.tickets.seconds[direction]
        assert spent["pages"] > 0 and (spent["tails"] > 0) == bool(tails)
    for stream in spec.streams:
        pages_moved = zip(((place,) for place in there), ((place,) for place in back), strict=True)
        for here, gone in pages_moved if stream in spec.page_streams else [near]:
            for layer in stream.layers:
                each = ((source, here), (target, gone))
                left, right = (torch.cat(pieces_of(m, stream.name, layer, at)) for m, at in each)
                assert torch.equal(left, right), (stream.name, layer)
    host.close()


def test_the_batch_call_is_used_where_it_works() -> None:
    engines = CopyEngines()
    assert engines.batched == (torch.cuda.get_device_capability()[0] >= 9), (
        "it works on an H200 with driver 580"
    )


def test_plain_copies_are_the_way_back() -> None:
    rig = Rig(SPECS["v4"], "page_first_direct", device="cuda")
    expected = rig.device_after_round_trip()
    controller = CudaController(rig.device, rig.host, "direct")
    for queue in controller._queued.values():
        queue._engines.batched = False
    finish(controller, controller.submit(rig.save_plan()))
    finish(controller, controller.submit(rig.load_plan()))
    assert all(map(torch.equal, rig.device_bytes(), expected))
    rig.host.close()


def test_an_error_fails_the_plan_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(SPEC, "page_first_direct", device="cuda")
    controller = CudaController(rig.device, rig.host, "direct")
    engines = controller._queued[LOAD]._engines
    monkeypatch.setattr(engines, "_batch", lambda *_: engines._check("the call", 1))
    ticket = controller.submit(rig.load_plan())
    (done,) = controller.poll()
    assert done.ticket is ticket and "the call: cudaErrorInvalidValue" in str(done.error)
    monkeypatch.delattr(engines, "_batch")
    finish(controller, controller.submit(rig.load_plan()))
    rig.host.close()


# Order


PLACES = 24
DELAY_CYCLES = 4_000_000
"""Up to 2 ms: the device falls behind the host, so that only fences keep the order."""


class Stage:
    """Pages whose bytes are a number, written and checked by kernels on a compute stream full of delays."""

    def __init__(self, way: str, memory: Memory, chance: random.Random) -> None:
        self.host = HostMemory(SPEC, "page_first_direct", (PLACES + 8) * SPEC.place_bytes, pin=True)
        self.memory, self.chance, self.implicit = memory, chance, False
        self.controller = CudaController(memory, self.host, way, shares=(0.4,), grouped_bytes=0)
        grouped = isinstance(memory, DeviceMemory) and way != "kernel"
        assert len(self.controller._groups) == 1 + grouped
        self.compute = torch.cuda.Stream()
        self.wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.rows = {(s, layer): memory.view(s.name, layer) for s in SPEC.page_streams for layer in s.layers}

    def delay(self) -> None:
        for stream in (self.compute, *(queue.stream for queue in self.controller._queued.values())):
            if self.chance.random() < 0.3:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(self.chance.randrange(DELAY_CYCLES))

    def fence(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.compute)
        return event

    def write(self, place: int, number: int) -> None:
        with torch.cuda.stream(self.compute):
            for view in self.rows.values():
                view[place].fill_(number)

    def check(self, place: int, number: int, layer: int) -> None:
        with torch.cuda.stream(self.compute):
            for (_, own), view in self.rows.items():
                if own == layer:
                    self.wrong += (view[place] != number).sum()

    def submit(self, direction: Direction, pairs: list[tuple[int, int]], after: torch.cuda.Event) -> Ticket:
        plan = Plan.of(direction, [((device_page(d),), (host_page(h),)) for d, h in pairs])
        self.controller.after = None if self.implicit else after
        self.delay()
        with torch.cuda.stream(self.compute):
            layered = direction is LOAD and self.chance.random() < 0.5
            return self.controller.submit(plan, layered=layered)


def random_schedule(stage: Stage, rounds: int, *, broken: str = "") -> int:
    """Pages are written, saved, overwritten, loaded elsewhere and read layer by layer, without one host wait
    between. Returns how many bytes a reader found wrong. `broken` leaves one fence out: the control."""
    chance, ready_none = stage.chance, torch.cuda.Event()
    ready_none.record(stage.compute)
    for _ in range(rounds):
        count = chance.randint(1, 6)
        sources, targets = chance.sample(range(PLACES), count), chance.sample(range(PLACES), count)
        hosts = chance.sample(range(PLACES), count)
        numbers = [chance.randrange(1, 255) for _ in range(count)]
        stage.delay()
        for place, number in zip(sources, numbers, strict=True):
            stage.write(place, number)
        stage.delay()
        after = ready_none if broken == "save" else stage.fence()
        save = stage.submit(SAVE, list(zip(sources, hosts, strict=True)), after)
        saved = stage.controller.ready(save.number).events[-1][1]
        stage.compute.wait_event(saved)  # a place is written again after its last reader
        for place in {*sources, *targets}:
            stage.write(place, 255)
        stage.delay()
        freed = ready_none if broken == "free" else stage.fence()
        stage.controller._queued[LOAD].stream.wait_event(saved)  # host bytes are readable once they are there
        load = stage.submit(LOAD, list(zip(targets, hosts, strict=True)), freed)
        ready = stage.controller.ready(load.number)
        for layer in SPEC.layers:
            if broken != "load":
                with torch.cuda.stream(stage.compute):
                    ready.wait(layer)
            for place, number in zip(targets, numbers, strict=True):
                stage.check(place, number, layer)
        # the next round's copies begin behind these readers, by the fence of its own writes
        if chance.random() < 0.2:
            assert all(done.error is None for done in stage.controller.poll())
        stage.compute.wait_event(ready.events[-1][1])
    torch.cuda.synchronize()
    assert all(done.error is None for done in stage.controller.poll())
    wrong = int(stage.wrong)
    stage.wrong.zero_()
    return wrong


@pytest.mark.parametrize("owner", ["own", "borrowed"])
@every_way
def test_no_reader_sees_a_byte_too_early_or_too_late(owner: str, way: str) -> None:
    memory = layer_first(SPEC, PLACES, 1) if owner == "borrowed" else DeviceMemory(SPEC, PLACES, 1, "cuda")
    stage = Stage(way, memory, random.Random(f"{owner}{way}"))
    assert random_schedule(stage, 400) == 0
    stage.host.close()


def test_copies_wait_for_what_their_submitter_has_queued() -> None:
    stage = Stage("direct", DeviceMemory(SPEC, PLACES, 1, "cuda"), random.Random(2))
    stage.implicit = True
    assert random_schedule(stage, 400) == 0
    stage.host.close()


@pytest.mark.parametrize("broken", ["save", "free", "load"])
def test_a_fence_that_is_left_out_is_noticed(broken: str) -> None:
    stage = Stage("direct", DeviceMemory(SPEC, PLACES, 1, "cuda"), random.Random(1))
    assert random_schedule(stage, 100, broken=broken) > 0
    stage.host.close()
