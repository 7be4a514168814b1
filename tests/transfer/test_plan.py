from __future__ import annotations

import pickle

import pytest

from tests.transfer.rig import device_page, host_page
from tiercel.transfer.plan import NO_PLACE, Direction, Leg, Plan
from tiercel.types import Kind

LOAD, SAVE = Direction.LOAD, Direction.SAVE


def make_page_leg(*pairs: tuple[int, int]) -> Leg:
    return Leg(
        Kind.PAGE, tuple((device_page(d),) for d, _ in pairs), tuple((host_page(h),) for _, h in pairs)
    )


def make_tail_leg(*pairs: tuple[tuple[int, ...], tuple[int, ...]]) -> Leg:
    device, host = (tuple(each) for each in zip(*pairs, strict=True))
    return Leg(
        Kind.TAIL,
        tuple(tuple(map(device_page, places)) for places in device),
        tuple(tuple(map(host_page, places)) for places in host),
    )


def test_a_plan_of_pairs_has_a_leg_for_each_kind() -> None:
    pages = [((device_page(1),), (host_page(2),)), ((device_page(4),), (host_page(0),))]
    tails = [((device_page(3), device_page(7)), (host_page(5), host_page(6)))]
    plan = Plan.of(LOAD, pages, tails)
    assert plan.legs == (make_page_leg((1, 2), (4, 0)), make_tail_leg(((3, 7), (5, 6))))
    assert Plan.of(SAVE).legs == ()


def test_a_plan_that_writes_a_place_twice_is_a_bug() -> None:
    two_to_one = make_page_leg((1, 5), (2, 5))
    with pytest.raises(AssertionError, match="I1"):
        Plan(SAVE, (two_to_one,))
    assert Plan(LOAD, (two_to_one,)).legs == (two_to_one,)
    with pytest.raises(AssertionError, match="I1"):
        Plan(SAVE, (make_page_leg((1, 5)), make_tail_leg(((1, 6), (4, 5)))))


def test_a_leg_with_a_side_missing_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="I7"):
        Leg(Kind.PAGE, ((device_page(1),),), ())
    with pytest.raises(AssertionError, match="I7"):
        Leg(Kind.TAIL, (), ((host_page(1),),))


def test_a_callers_places_for_pages_and_tails_may_have_the_same_numbers() -> None:
    plan = Plan.of(LOAD, [((3,), (host_page(1),))], [((3,), (host_page(2),))])
    assert len(plan.legs) == 2
    with pytest.raises(AssertionError, match="I1"):
        Plan.of(LOAD, [((3,), (host_page(1),)), ((4, 3), (host_page(2),))])


def test_pages_that_move_in_different_parts_are_in_different_legs() -> None:
    near = [(1, 21), (NO_PLACE, 22), (3,), (NO_PLACE, 24), (5, 25)]
    plan = Plan.of(LOAD, [(device, (host_page(i),)) for i, device in enumerate(near)])
    assert [leg.device for leg in plan.legs] == [
        ((3,),),
        ((1, 21), (5, 25)),
        ((NO_PLACE, 22), (NO_PLACE, 24)),
    ]
    assert [leg.host for leg in plan.legs] == [
        ((host_page(2),),),
        ((host_page(0),), (host_page(4),)),
        ((host_page(1),), (host_page(3),)),
    ]


def test_a_part_that_does_not_move_is_no_place_that_is_written_twice() -> None:
    pairs = [((NO_PLACE, 7), (host_page(1),)), ((NO_PLACE, 8), (host_page(2),))]
    assert len(Plan.of(LOAD, pairs).legs) == 1
    with pytest.raises(AssertionError, match="I1"):
        Plan.of(LOAD, [*pairs, ((NO_PLACE, 7), (host_page(3),))])


def test_a_plan_survives_pickling_whether_it_was_looked_at_or_not() -> None:
    plan = Plan.of(
        SAVE, [((device_page(1),), (host_page(2),))], [((device_page(3),), (host_page(5), host_page(6)))]
    )
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan and again.direction is SAVE
    assert pickle.loads(pickle.dumps(plan)) == plan
