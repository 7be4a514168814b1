"""Goal: a table of extents moves exactly the bytes that the reference copier moves. Method: every
declaration, every layout, our own and a borrowed device; in C, its plain twin, and the Triton kernel (in
Triton's interpreter where there is no GPU)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.memory.specs import FLASH, SPECS
from tests.transfer.borrowed import make_borrowed
from tests.transfer.rig import DEVICE_PAGES, DEVICE_TAILS, Rig
from tiercel.kernels.copy import copy_extents, copy_extents_plain
from tiercel.memory.buffers import DeviceMemory, HostMemory, Memory
from tiercel.memory.layout import LAYOUTS
from tiercel.spec import CacheSpec
from tiercel.transfer.copier import make_copier
from tiercel.transfer.extents import Extents, LegPlaces, extents_of, ranges
from tiercel.transfer.plan import Direction, Plan
from tiercel.types import Kind

Move = Callable[[Extents, LegPlaces, int, bool], None]


def in_c(table: Extents, places: LegPlaces, host: int, load: bool) -> None:
    copy_extents(table, *places, host, load=load)


def plain(table: Extents, places: LegPlaces, host: int, load: bool) -> None:
    copy_extents_plain(table, *places, host, load=load)


def in_triton(table: Extents, places: LegPlaces, host: int, load: bool) -> None:
    from tiercel.kernels.move import Mover

    near, far = (torch.from_numpy(each) for each in places)
    Mover(table, "cpu", host)(near, far, 3, load=load)


def by_ranges(table: Extents, places: LegPlaces, host: int, load: bool) -> None:
    """As a copy engine is told: one (address, address, bytes) for each extent of each item."""
    whole, one = np.zeros((1, 7), np.int64), np.zeros((1, 1), np.int64)
    for near, far, size in zip(*ranges(table, places), strict=True):
        whole[0] = near, 0, 0, far, 0, 0, size
        copy_extents_plain(whole, one, one, host, load=load)


MOVES = [in_c, plain, by_ranges] + ([] if torch.cuda.is_available() else [in_triton])
"""On a device the kernel runs in test_cuda.py."""
moves = pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)


def carry(device: Memory, host: HostMemory, plan: Plan, move: Move) -> None:
    for leg in plan.legs:
        table = extents_of(device, host, leg.kind)
        move(table, LegPlaces.of(leg, device, host), host.flat.data_ptr(), plan.direction is Direction.LOAD)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("layout", LAYOUTS)
@moves
def test_extents_move_what_the_reference_moves(spec: CacheSpec, layout: str, move: Move) -> None:
    rig = Rig(spec, layout)
    expected = rig.device_after_round_trip()
    carry(rig.device, rig.host, rig.save_plan(), move)
    saved = rig.host.flat.clone()
    carry(rig.device, rig.host, rig.load_plan(), move)
    assert rig.holds(expected) and torch.equal(rig.host.flat, saved)
    rig.poison(seed=0)
    reference = make_copier("reference", rig.device, rig.host)
    for leg in rig.save_plan().legs:
        reference.copy(Direction.SAVE, leg)
    assert torch.equal(rig.host.flat, saved)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@moves
def test_a_borrowed_device_is_moved_whatever_its_strides(spec: CacheSpec, move: Move) -> None:
    rig, theirs = Rig(spec, "page_first_direct"), make_borrowed(spec, DEVICE_PAGES, DEVICE_TAILS)
    carry(theirs, rig.host, rig.save_plan(theirs=True), move)
    saved = rig.host.flat.clone()
    rig.poison(seed=0)
    reference = make_copier("reference", theirs, rig.host)
    for leg in rig.save_plan(theirs=True).legs:
        reference.copy(Direction.SAVE, leg)
    assert torch.equal(rig.host.flat, saved)


def test_layers_are_cut_into_groups_that_make_the_whole() -> None:
    rig = Rig(SPECS["v4"], "page_first_direct")
    whole = extents_of(rig.device, rig.host, Kind.PAGE)
    parts = [extents_of(rig.device, rig.host, Kind.PAGE, layers=range(i, i + 1)) for i in range(6)]
    assert sum(part[:, 6].sum() for part in parts) == whole[:, 6].sum() == SPECS["v4"].page_bytes


def test_where_both_sides_agree_a_flash_page_is_one_extent() -> None:
    host = HostMemory(FLASH, "page_first_direct", 2 * FLASH.place_bytes)
    device = DeviceMemory(FLASH, 2, 1)
    assert len(extents_of(device, host, Kind.PAGE)) == 62  # layer first: a row each
    mirror = HostMemory(FLASH, "page_first_direct", 2 * FLASH.place_bytes)
    (extent,) = extents_of(mirror, host, Kind.PAGE)
    assert extent[6] == FLASH.page_bytes
    host.close(), mirror.close()


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
def test_the_kernel_takes_the_widest_word_that_fits(shift: int) -> None:
    from tiercel.kernels.move import Mover

    table = np.array([[4096 + shift, 1024, 1, 2048, 1024, 3, 64]], np.int64)
    assert Mover(table, "cpu").word == (shift or 8)
