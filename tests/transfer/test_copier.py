from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.memory.specs import SPECS, V4
from tests.transfer.borrowed import make_borrowed
from tests.transfer.rig import DEVICE_PAGES, DEVICE_TAILS, Rig, device_page, device_tail, host_page
from tiercel.config import COPIERS as CONFIGURED
from tiercel.errors import ConfigError, RefusedError
from tiercel.memory.layout import LAYOUTS
from tiercel.spec import CacheSpec
from tiercel.transfer.copier import COPIERS, Copier, make_copier
from tiercel.transfer.plan import Direction, Leg, Plan

LOAD, SAVE = Direction.LOAD, Direction.SAVE

every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_copier = pytest.mark.parametrize("copier_name", COPIERS)
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def is_refused(spec: CacheSpec, layout: str, copier: str) -> bool:
    """The rule in other words: direct where page_first mixes the entries of several layers."""
    cut = [
        stream
        for stream in spec.page_streams
        if len(stream.layers) > 1
        and stream.entries_per_row(spec.page_tokens) > 1
        and stream.cut_by_entries(spec.page_tokens)
    ]
    return copier == "direct" and layout == "page_first" and bool(cut)


def make_pair(spec: CacheSpec, layout: str, copier_name: str) -> tuple[Rig, Copier] | None:
    rig = Rig(spec, layout)
    if is_refused(spec, layout, copier_name):
        with pytest.raises(RefusedError) as refused:
            make_copier(copier_name, rig.device, rig.host)
        assert (refused.value.layout, refused.value.copier) == (layout, copier_name)
        assert refused.value.stream in [stream.name for stream in spec.streams]
        return None
    return rig, make_copier(copier_name, rig.device, rig.host)


def carry(copier: Copier, plan: Plan) -> None:
    for layer in copier.layers:
        for leg in plan.legs:
            copier.copy(plan.direction, leg, layer)


@every_spec
@every_layout
@every_copier
def test_every_pair_round_trips_through_other_places_or_is_refused(
    spec: CacheSpec, layout: str, copier_name: str
) -> None:
    made = make_pair(spec, layout, copier_name)
    if made is None:
        return
    rig, copier = made
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@every_spec
@every_layout
def test_direct_round_trips_on_cuda_as_on_the_cpu(spec: CacheSpec, layout: str) -> None:
    made = make_pair(spec, layout, "direct")
    if made is None:
        return
    on_cpu, on_cuda = made[0], Rig(spec, layout, device="cuda")
    expected = on_cuda.device_after_round_trip()
    for rig in (on_cpu, on_cuda):
        copier = make_copier("direct", rig.device, rig.host)
        carry(copier, rig.save_plan())
        carry(copier, rig.load_plan())
    assert torch.equal(on_cuda.host.flat, on_cpu.host.flat)
    assert on_cuda.holds(expected)


@every_spec
@every_layout
def test_direct_writes_the_very_bytes_that_reference_writes(spec: CacheSpec, layout: str) -> None:
    made = make_pair(spec, layout, "direct")
    if made is None:
        return
    rig, direct = made
    carry(direct, rig.save_plan())
    by_direct = rig.host.flat.clone()
    rig.poison(seed=0)
    carry(make_copier("reference", rig.device, rig.host), rig.save_plan())
    assert torch.equal(rig.host.flat, by_direct)


@every_copier
def test_one_layer_moves_alone(copier_name: str) -> None:
    made = make_pair(V4, "page_first_direct", copier_name)
    if made is None:
        return
    rig, copier = made
    carry(copier, rig.save_plan())
    before, after = rig.device_bytes(), rig.device_after_round_trip()
    for leg in rig.load_plan().legs:
        copier.copy(LOAD, leg, 3)
    for layer in V4.layers:
        assert rig.holds(after if layer == 3 else before, layer)


@every_copier
def test_a_layer_nobody_stores_is_no_work(copier_name: str) -> None:
    rig = Rig(V4, "page_first_direct")
    copier = make_copier(copier_name, rig.device, rig.host)
    before = rig.host.flat.clone()
    for leg in rig.save_plan().legs:
        copier.copy(SAVE, leg, 99)
    assert torch.equal(rig.host.flat, before)


@every_copier
def test_places_that_do_not_exist_are_bugs(copier_name: str) -> None:
    rig = Rig(V4, "layer_first")
    copier = make_copier(copier_name, rig.device, rig.host)
    tail = tuple(host_page(i) for i in range(V4.host_pages_per_tail))
    for leg in (
        Leg(False, (device_page(9),), ((host_page(0),),)),
        Leg(False, (device_page(0),), ((host_page(rig.host.pages),),)),
        Leg(True, (device_tail(5),), (tail,)),
        Leg(True, (device_tail(0),), ((*tail[1:], host_page(rig.host.pages)),)),
    ):
        with pytest.raises(AssertionError):
            copier.copy(SAVE, leg, 1)


# Refusals


def test_direct_refuses_rows_in_blocks_and_says_what_to_use() -> None:
    rig = Rig(SPECS["mha"], "page_first")
    with pytest.raises(
        RefusedError, match="copier direct refuses stream k in layout page_first.*page_first_direct"
    ):
        make_copier("direct", rig.device, rig.host)


@every_copier
def test_a_device_nobody_can_copy_to_is_refused(copier_name: str) -> None:
    rig = Rig(V4, "layer_first")
    rig.device.device = torch.device("meta")
    with pytest.raises(RefusedError, match="the device is meta"):
        make_copier(copier_name, rig.device, rig.host)


def test_the_configuration_knows_every_copier() -> None:
    assert set(COPIERS) == set(CONFIGURED)
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
    if is_refused(spec, layout, copier_name):
        return
    rig, theirs = Rig(spec, layout), make_borrowed(spec, DEVICE_PAGES, DEVICE_TAILS)
    before = {name: buffer.clone() for name, (buffer, _) in theirs.rows.items()}
    carry(make_copier(copier_name, theirs, rig.host), rig.save_plan())
    carry(make_copier(copier_name, rig.device, rig.host), rig.load_plan())
    for stream, layer, moves in rows_moved(rig):
        for source, target in moves:
            ours, row = rig.device.view(stream, layer)[target], theirs.view(stream, layer)[source]
            assert torch.equal(ours, row) and row.any()
    again = make_borrowed(spec, DEVICE_PAGES, DEVICE_TAILS)
    carry(make_copier(copier_name, again, rig.host), rig.load_plan())
    for stream, layer, moves in rows_moved(rig):
        for source, target in moves:
            again.view(stream, layer)[target] = theirs.view(stream, layer)[target]
            assert torch.equal(theirs.view(stream, layer)[source], rig.device.view(stream, layer)[target])
    for name, bytes_before in before.items():
        assert torch.equal(again.rows[name][0], bytes_before), "a byte beside the rows"


def rows_moved(rig: Rig) -> Iterator[tuple[str, int, list[tuple[int, int]]]]:
    """(stream, layer, (from, to) of every row) of the round trip."""
    for streams, there, back in (
        (rig.spec.page_streams, rig.pages, rig.pages_back),
        (rig.spec.tail_streams, rig.tails, rig.tails_back),
    ):
        for stream in streams:
            for layer in stream.layers:
                yield stream.name, layer, [(a, b) for (a, _), (b, _) in zip(there, back, strict=True)]


@every_copier
def test_a_memory_with_some_of_the_layers_moves_those(copier_name: str) -> None:
    rig = Rig(V4, "page_first_direct")
    carry(make_copier(copier_name, rig.device, rig.host), rig.save_plan())
    half = make_borrowed(V4.stage(1, 3), DEVICE_PAGES, DEVICE_TAILS)
    host_before = rig.host.flat.clone()
    copier = make_copier(copier_name, half, rig.host)
    assert copier.layers == (1, 2)
    carry(copier, rig.load_plan())
    for stream, layer, moves in rows_moved(rig):
        if layer in (1, 2):
            for source, target in moves:
                assert torch.equal(half.view(stream, layer)[target], rig.device.view(stream, layer)[source])
    assert torch.equal(rig.host.flat, host_before)
