from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.memory.specs import SPECS, V4
from tests.transfer.borrowed import make_borrowed
from tests.transfer.rig import DEVICE_PAGES, DEVICE_TAILS, Rig, device_page, host_page, pieces_of
from tiercel.config import COPIERS as CONFIGURED
from tiercel.config import LAYOUT_NAMES
from tiercel.errors import ConfigError
from tiercel.memory.buffers import Memory
from tiercel.spec import CacheSpec
from tiercel.transfer.copier import COPIERS, WAYS, Copier, make_copier
from tiercel.transfer.plan import Direction, Leg, Plan
from tiercel.types import Kind

LOAD, SAVE = Direction.LOAD, Direction.SAVE

every_layout = pytest.mark.parametrize("layout", LAYOUT_NAMES)
every_copier = pytest.mark.parametrize("copier_name", COPIERS)
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def make_pair(spec: CacheSpec, layout: str, copier_name: str) -> tuple[Rig, Copier]:
    rig = Rig(spec, layout)
    return rig, make_copier(copier_name, rig.device, rig.host)


def carry(copier: Copier, plan: Plan) -> None:
    for leg in plan.legs:
        copier.copy(plan.direction, leg)


@every_spec
@every_layout
@every_copier
def test_every_pair_round_trips_through_other_places(spec: CacheSpec, layout: str, copier_name: str) -> None:
    rig, copier = make_pair(spec, layout, copier_name)
    expected = rig.device_after_round_trip()
    device_before, host_before = rig.device_bytes(), rig.host.flat.clone()

    carry(copier, rig.save_plan())
    assert rig.holds(device_before)
    untouched = ~rig.host_bytes_named()
    assert torch.equal(rig.host.flat[untouched], host_before[untouched])
    host_saved = rig.host.flat.clone()

    carry(copier, rig.load_plan())
    assert rig.holds(expected)
    assert torch.equal(rig.host.flat, host_saved)


@every_spec
@every_layout
def test_direct_writes_the_very_bytes_that_reference_writes(spec: CacheSpec, layout: str) -> None:
    rig, direct = make_pair(spec, layout, "direct")
    carry(direct, rig.save_plan())
    by_direct = rig.host.flat.clone()
    rig.poison(seed=0)
    carry(make_copier("reference", rig.device, rig.host), rig.save_plan())
    assert torch.equal(rig.host.flat, by_direct)


@every_copier
def test_places_that_do_not_exist_are_bugs(copier_name: str) -> None:
    rig = Rig(V4, "layer_first")
    copier = make_copier(copier_name, rig.device, rig.host)
    tail = tuple(host_page(i) for i in range(V4.places_per_tail))
    near = tuple(device_page(i) for i in range(V4.places_per_tail))
    for leg in (
        Leg(Kind.PAGE, ((device_page(rig.device.pages),),), ((host_page(0),),)),
        Leg(Kind.PAGE, ((device_page(0),),), ((host_page(rig.host.pages),),)),
        Leg(Kind.TAIL, ((*near[1:], device_page(rig.device.pages)),), (tail,)),
        Leg(Kind.TAIL, (near,), ((*tail[1:], host_page(rig.host.pages)),)),
    ):
        with pytest.raises(AssertionError):
            copier.copy(SAVE, leg)


# Refusals


@every_copier
def test_a_device_nobody_can_copy_to_is_refused(copier_name: str) -> None:
    rig = Rig(V4, "layer_first")
    rig.device.device = torch.device("meta")
    with pytest.raises(ConfigError, match="the device is meta"):
        make_copier(copier_name, rig.device, rig.host)


def test_the_configuration_knows_every_copier() -> None:
    assert {*COPIERS, *WAYS} == set(CONFIGURED)
    rig = Rig(V4, "layer_first")
    with pytest.raises(ConfigError, match="telepathy"):
        make_copier("telepathy", rig.device, rig.host)


def test_a_copier_keeps_no_closed_memory_mapped() -> None:
    rig = Rig(V4, "layer_first")
    copier = make_copier("direct", rig.device, rig.host)
    carry(copier, rig.save_plan())
    memory = rig.host._map
    rig.host.close()
    assert memory._map.closed


# Between memories of two owners


@every_spec
@every_layout
@every_copier
def test_what_a_borrowed_memory_saves_another_memory_loads_and_back(
    spec: CacheSpec, layout: str, copier_name: str
) -> None:
    rig, theirs = Rig(spec, layout), make_borrowed(spec, DEVICE_PAGES, DEVICE_TAILS)
    before = {name: buffer.clone() for name, (buffer, _) in theirs.rows.items()}
    carry(make_copier(copier_name, theirs, rig.host), rig.save_plan(theirs=True))
    carry(make_copier(copier_name, rig.device, rig.host), rig.load_plan())
    for name, layer, source, _, ours in rows_moved(rig):
        row = bytes_of(theirs, name, layer, source)
        assert torch.equal(bytes_of(rig.device, name, layer, ours), row) and row.any()
    again = make_borrowed(spec, DEVICE_PAGES, DEVICE_TAILS)
    carry(make_copier(copier_name, again, rig.host), rig.load_plan(theirs=True))
    for name, layer, source, target, _ in rows_moved(rig):
        assert torch.equal(bytes_of(theirs, name, layer, source), bytes_of(again, name, layer, target))
        again.view(name, layer)[target[0]] = theirs.view(name, layer)[target[0]]
    for name, bytes_before in before.items():
        assert torch.equal(again.rows[name][0], bytes_before), "a byte beside the rows"


def bytes_of(memory: Memory, name: str, layer: int, places: tuple[int, ...]) -> torch.Tensor:
    return torch.cat(pieces_of(memory, name, layer, places))


Places = tuple[int, ...]


def rows_moved(rig: Rig) -> Iterator[tuple[str, int, Places, Places, Places]]:
    """(stream, layer, from, to, to in our own device memory) of every row of a round trip of others."""
    pages = [((a,), (b,), (b,)) for (a, _), (b, _) in zip(rig.pages, rig.pages_back, strict=True)]
    each = zip(rig.their_tails, rig.their_tails_back, rig.tails_back, strict=True)
    tails = [(a, b, ours) for (a, _), (b, _), (ours, _) in each]
    for streams, moves in ((rig.spec.page_streams, pages), (rig.spec.tail_streams, tails)):
        for stream in streams:
            for layer in stream.layers:
                for move in moves:
                    yield stream.name, layer, *move


@every_copier
def test_a_memory_with_some_of_the_layers_moves_those(copier_name: str) -> None:
    rig = Rig(V4, "page_first_direct")
    carry(make_copier(copier_name, rig.device, rig.host), rig.save_plan())
    carry(make_copier(copier_name, rig.device, rig.host), rig.load_plan())
    half = make_borrowed(V4.stage(1, 3), DEVICE_PAGES, DEVICE_TAILS)
    host_before = rig.host.flat.clone()
    copier = make_copier(copier_name, half, rig.host)
    carry(copier, rig.load_plan(theirs=True))
    for name, layer, _, target, ours in rows_moved(rig):
        if layer in (1, 2):
            assert torch.equal(bytes_of(half, name, layer, target), bytes_of(rig.device, name, layer, ours))
    assert torch.equal(rig.host.flat, host_before)
