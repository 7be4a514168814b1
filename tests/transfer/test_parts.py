"""Goal: a part of a page moves alone, and nothing else is touched. Method: whole pages are saved, and any
parts of them are loaded to other places, by every copier and controller."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from tests.memory.specs import FLASH, V4
from tests.transfer.parts import APART, LOADS, Parts
from tests.transfer.rig import host_page
from tiercel.config import LAYOUT_NAMES
from tiercel.memory.buffers import DeviceMemory, HostMemory
from tiercel.spec import CacheSpec
from tiercel.transfer.controller import Controller, LocalController
from tiercel.transfer.copier import COPIERS, make_copier
from tiercel.transfer.extents import LegPlaces, extents_of, held, moved
from tiercel.transfer.plan import NO_PLACE, Direction, Leg, Plan
from tiercel.transfer.remote import RankWorker, RemoteController
from tiercel.types import Kind

every_layout = pytest.mark.parametrize("layout", LAYOUT_NAMES)
every_copier = pytest.mark.parametrize("copier_name", COPIERS)
every_load = pytest.mark.parametrize("which", LOADS.values(), ids=LOADS)
every_apart = pytest.mark.parametrize("spec", APART.values(), ids=APART)


@every_apart
@every_layout
@every_copier
@every_load
def test_parts_of_pages_come_back_alone(
    spec: CacheSpec, layout: str, copier_name: str, which: tuple[str, ...]
) -> None:
    rig = Parts(spec, layout)
    copier = make_copier(copier_name, rig.device, rig.host)
    saved = rig.device.flat_pages.clone()
    for leg in rig.save().legs:
        copier.copy(Direction.SAVE, leg)
    assert torch.equal(rig.device.flat_pages, saved)
    there = rig.host.flat.clone()
    rig.device.flat_pages.random_(0, 256)
    plan, moves = rig.load(which)
    wanted = rig.after(saved, rig.device.flat_pages, moves)
    for leg in plan.legs:
        copier.copy(Direction.LOAD, leg)
    assert torch.equal(rig.device.flat_pages, wanted) and torch.equal(rig.host.flat, there)


@every_apart
@every_layout
def test_a_part_that_is_saved_alone_leaves_the_other_part_of_the_host_page(
    spec: CacheSpec, layout: str
) -> None:
    rig = Parts(spec, layout)
    places = {name: rig.device.rows[name][1][0][0] for name in rig.rows()}
    before = rig.host.flat.clone()
    make_copier("direct", rig.device, rig.host).copy(
        Direction.SAVE, Leg(Kind.PAGE, ((NO_PLACE, 5),), ((host_page(2),),))
    )
    for name in rig.rows():
        ((_, piece),) = rig.host.rows[name][1]
        offset, size = piece.at(2)
        own = rig.row(rig.device.flat_pages, *name, (NO_PLACE, 5)) if places[name] else None
        wanted = before[offset : offset + size] if own is None else own
        assert torch.equal(rig.host.flat[offset : offset + size], wanted)
        before[offset : offset + size] = wanted
    assert torch.equal(rig.host.flat, before)


def carry(kind: str, rig: Parts, plan: Plan) -> None:
    """Through a controller here, or one whose rank is another process that gets pickled tickets."""
    local: Controller = LocalController(make_copier("direct", rig.device, rig.host))
    if kind == "local":
        local.submit(plan)
        local.close()
        (done,) = local.poll()
    else:
        remote, rank = RemoteController(1), RankWorker(0, local)
        remote.submit(plan)
        (ticket,) = remote.take()
        rank.start(pickle.loads(pickle.dumps(ticket)))
        rank.wait(30)
        (ack,) = rank.acks()
        remote.acknowledge(ack)
        (done,) = remote.poll()
        local.close()
    assert done.error is None, done.error


@pytest.mark.parametrize("kind", ["local", "remote"])
@every_load
def test_every_controller_moves_parts(kind: str, which: tuple[str, ...]) -> None:
    rig = Parts(APART["v4, c4 apart"], "page_first_direct")
    saved = rig.device.flat_pages.clone()
    carry(kind, rig, rig.save())
    rig.device.flat_pages.random_(0, 256)
    plan, moves = rig.load(which)
    wanted = rig.after(saved, rig.device.flat_pages, moves)
    carry(kind, rig, plan)
    assert torch.equal(rig.device.flat_pages, wanted)


@every_copier
def test_a_rank_without_the_second_pool_has_nothing_to_do_for_it(copier_name: str) -> None:
    spec = replace(V4, second=("c4",))
    rank = DeviceMemory(spec.only(["c128", "window"]), 9, 1)
    with HostMemory(spec, "page_first_direct", 9 * spec.place_bytes) as host:
        host.flat.random_(1, 256)
        copier = make_copier(copier_name, rank, host)
        copier.copy(Direction.LOAD, Leg(Kind.PAGE, ((NO_PLACE, 3),), ((host_page(1),),)))
        assert not rank.flat_pages.any()
        copier.copy(Direction.LOAD, Leg(Kind.PAGE, ((4, 3),), ((host_page(1),),)))
        assert rank.view("c128", 2)[4].all() and not rank.view("c128", 2)[:4].any()


# Extents


def test_with_two_pools_a_page_is_one_extent_for_each() -> None:
    spec = replace(FLASH, second=("c4",))
    device = DeviceMemory(spec, 2, 1, "meta")
    with HostMemory(spec, "page_first_direct", 4 * spec.place_bytes) as host:
        table = extents_of(device, host, Kind.PAGE)
        assert table[:, 2].tolist() == [0, 1] and table[:, 6].tolist() == [211_968, 786_240]
        for group in spec.layer_groups():
            assert len(extents_of(device, host, Kind.PAGE, group)) == 2
        tail = extents_of(device, host, Kind.TAIL)
        ends = spec.units_per_tail + spec.places_per_tail - 1
        assert tail[:, 6].sum() == spec.tail_bytes and len(tail) == ends, "poured over whole pieces"


def test_what_moves_is_what_every_item_has_a_place_for() -> None:
    rig = Parts(APART["v4, c4 apart"], "page_first_direct")
    table = extents_of(rig.device, rig.host, Kind.PAGE)
    for near, here in (((3,), (0,)), ((3, NO_PLACE), (0,)), ((NO_PLACE, 3), (1,)), ((2, 3), (0, 1))):
        leg = Leg(Kind.PAGE, (near,), ((host_page(0),),))
        places = LegPlaces.of(leg, rig.device, rig.host)
        assert places.near.tolist() == [list(near)] and held(places.near) == here
        own = moved(table, places.near)
        assert set(own[:, 2].tolist()) == set(here) and (own is table) == (here == (0, 1))


def test_a_leg_whose_items_move_in_different_parts_is_a_bug() -> None:
    rig = Parts(APART["v4, c4 apart"], "page_first_direct")
    mixed = Leg(Kind.PAGE, ((1, 2), (NO_PLACE, 3)), ((host_page(0),), (host_page(1),)))
    missing = Leg(Kind.PAGE, ((1, 2),), ((NO_PLACE,),))  # type: ignore[arg-type]
    for leg in (mixed, missing):
        with pytest.raises(AssertionError, match="I7"):
            LegPlaces.of(leg, rig.device, rig.host)
