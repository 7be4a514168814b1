from __future__ import annotations

import pytest
import torch

from tests.memory.specs import FLASH, SPECS, V4
from tests.transfer.rig import Rig, device_page, device_tail, host_page
from tiercel.config import COPIERS as CONFIGURED
from tiercel.errors import ConfigError, RefusedError
from tiercel.memory.layout import LAYOUTS
from tiercel.spec import CacheSpec
from tiercel.transfer.copier import COPIERS, Copier, make_copier
from tiercel.transfer.plan import DeviceEntry, Direction, EntryPair, HostEntry, PageLeg, Plan, TailLeg

LOAD, SAVE = Direction.LOAD, Direction.SAVE
FLASH_LAYER = FLASH.stage(2, 3)

every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_copier = pytest.mark.parametrize("copier_name", COPIERS)
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def is_refused(spec: CacheSpec, layout: str, copier: str) -> bool:
    """The rule in other words: kernel always; direct where page_first mixes the entries of several layers."""
    cut = [
        stream
        for stream in spec.page_streams
        if len(stream.layers) > 1
        and stream.entries_per_row(spec.page_tokens) > 1
        and stream.cut_by_entries(spec.page_tokens)
    ]
    return copier == "kernel" or (copier == "direct" and layout == "page_first" and bool(cut))


def make_pair(spec: CacheSpec, layout: str, copier_name: str) -> tuple[Rig, Copier] | None:
    rig = Rig(spec, layout)
    if is_refused(spec, layout, copier_name):
        with pytest.raises(RefusedError) as refused:
            make_copier(copier_name, spec, rig.device, rig.host)
        assert (refused.value.layout, refused.value.copier) == (layout, copier_name)
        assert refused.value.stream in [stream.name for stream in spec.streams]
        return None
    return rig, make_copier(copier_name, spec, rig.device, rig.host)


def carry(copier: Copier, plan: Plan) -> None:
    for layer in copier.spec.layers:
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
        copier = make_copier("direct", spec, rig.device, rig.host)
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
    carry(make_copier("reference", spec, rig.device, rig.host), rig.save_plan())
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


@pytest.mark.parametrize("copier_name", ["reference", "direct"])
def test_a_layer_nobody_stores_is_no_work(copier_name: str) -> None:
    rig = Rig(V4, "page_first_direct")
    copier = make_copier(copier_name, V4, rig.device, rig.host)
    before = rig.host.flat.clone()
    for leg in rig.save_plan().legs:
        copier.copy(SAVE, leg, 99)
    assert torch.equal(rig.host.flat, before)


@pytest.mark.parametrize("copier_name", ["reference", "direct"])
def test_places_that_do_not_exist_are_bugs(copier_name: str) -> None:
    rig = Rig(V4, "layer_first")
    copier = make_copier(copier_name, V4, rig.device, rig.host)
    tail = tuple(host_page(i) for i in range(V4.host_pages_per_tail))
    for leg in (
        PageLeg((device_page(9),), (host_page(0),)),
        PageLeg((device_page(0),), (host_page(rig.host.pages),)),
        TailLeg((device_tail(5),), (tail,)),
        TailLeg((device_tail(0),), ((*tail[1:], host_page(rig.host.pages)),)),
    ):
        with pytest.raises(AssertionError):
            copier.copy(SAVE, leg, 1)


# Entries


def make_entry_pairs(*moves: tuple[tuple[int, int], tuple[int, int]]) -> list[EntryPair]:
    return [EntryPair(DeviceEntry(device_page(d), i), HostEntry(host_page(h), j)) for (d, i), (h, j) in moves]


@pytest.mark.parametrize("copier_name", ["reference", "direct"])
@every_layout
def test_flash_entries_move_as_value_and_scale_and_leave_their_neighbours(
    layout: str, copier_name: str
) -> None:
    """Compressed tokens 0, 63, 64 and 191 of three host pages, to other entries of other device pages."""
    rig = Rig(FLASH_LAYER, layout)
    copier = make_copier(copier_name, FLASH_LAYER, rig.device, rig.host)
    c4 = FLASH_LAYER.stream("c4")
    moves = [((8, 5), (0, 0)), ((8, 63), (0, 63)), ((2, 0), (1, 0)), ((0, 17), (2, 63))]
    expected = rig.device.view("c4", 2).clone()
    for (to_page, to_entry), (page, entry) in moves:
        row = rig.host.layout.region(c4, 2, page).offset
        for start, size in ((0, 576), (36_864, 8)):
            there, here = start + size * to_entry, row + start + size * entry
            expected[to_page, there : there + size] = rig.host.flat[here : here + size]
    host_before = rig.host.flat.clone()
    copier.copy_entries(LOAD, c4, 2, make_entry_pairs(*moves))
    assert torch.equal(rig.device.view("c4", 2), expected)
    assert torch.equal(rig.host.flat, host_before)


@every_spec
@every_layout
@every_copier
def test_entries_go_out_and_come_back_to_other_entries(
    spec: CacheSpec, layout: str, copier_name: str
) -> None:
    made = make_pair(spec, layout, copier_name)
    if made is None:
        return
    rig, copier = made
    for stream in spec.page_streams:
        last = stream.entries_per_row(spec.page_tokens) - 1
        for layer in stream.layers:
            view = rig.device.view(stream.name, layer)
            expected = view.clone()
            for target, source in zip(
                stream.part_ranges(0, spec.page_tokens),
                stream.part_ranges(last, spec.page_tokens),
                strict=True,
            ):
                expected[6, target[0] : sum(target)] = view[1, source[0] : sum(source)]
            copier.copy_entries(SAVE, stream, layer, make_entry_pairs(((1, last), (4, last // 2))))
            copier.copy_entries(LOAD, stream, layer, make_entry_pairs(((6, 0), (4, last // 2))))
            assert torch.equal(view, expected)


def test_entries_of_tails_are_a_bug() -> None:
    rig = Rig(V4, "page_first_direct")
    copier = make_copier("direct", V4, rig.device, rig.host)
    with pytest.raises(AssertionError, match="move whole"):
        copier.copy_entries(SAVE, V4.stream("window"), 0, make_entry_pairs(((0, 0), (0, 0))))


# Refusals


def test_direct_refuses_rows_in_blocks_and_says_what_to_use() -> None:
    rig = Rig(SPECS["mha"], "page_first")
    with pytest.raises(
        RefusedError, match="copier direct refuses stream k in layout page_first.*page_first_direct"
    ):
        make_copier("direct", SPECS["mha"], rig.device, rig.host)


def test_kernel_needs_cuda() -> None:
    rig = Rig(V4, "layer_first")
    with pytest.raises(RefusedError, match="needs CUDA"):
        make_copier("kernel", V4, rig.device, rig.host)


@pytest.mark.parametrize("copier_name", ["reference", "direct"])
def test_a_device_nobody_can_copy_to_is_refused(copier_name: str) -> None:
    rig = Rig(V4, "layer_first")
    rig.device.device = torch.device("meta")
    with pytest.raises(RefusedError, match="the device is meta"):
        make_copier(copier_name, V4, rig.device, rig.host)


def test_the_configuration_knows_every_copier() -> None:
    assert set(COPIERS) == set(CONFIGURED)
    rig = Rig(V4, "layer_first")
    with pytest.raises(ConfigError, match="telepathy"):
        make_copier("telepathy", V4, rig.device, rig.host)


def test_a_copier_keeps_no_closed_memory_mapped() -> None:
    rig = Rig(V4, "layer_first")
    copier = make_copier("direct", V4, rig.device, rig.host)
    carry(copier, rig.save_plan())
    memory = rig.host._map
    rig.host.close()
    assert memory.closed
