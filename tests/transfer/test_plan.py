from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.rig import device_page, device_tail, host_page
from tiercel.transfer.plan import (
    DeviceEntry,
    Direction,
    EntryPair,
    HostEntry,
    PageLeg,
    Plan,
    Run,
    TailLeg,
    split_entries,
)

LOAD, SAVE = Direction.LOAD, Direction.SAVE


def make_page_leg(*pairs: tuple[int, int]) -> PageLeg:
    return PageLeg(tuple(device_page(d) for d, _ in pairs), tuple(host_page(h) for _, h in pairs))


def make_tail_leg(*pairs: tuple[int, tuple[int, ...]]) -> TailLeg:
    return TailLeg(tuple(device_tail(d) for d, _ in pairs), tuple(tuple(map(host_page, h)) for _, h in pairs))


def make_pair(device: tuple[int, int], host: tuple[int, int]) -> EntryPair:
    return EntryPair(DeviceEntry(device_page(device[0]), device[1]), HostEntry(host_page(host[0]), host[1]))


def whole_row(device: int, host: int, entries: int) -> list[EntryPair]:
    return [make_pair((device, entry), (host, entry)) for entry in range(entries)]


def test_a_plan_of_pairs_has_a_leg_for_each_kind() -> None:
    pages = [(device_page(1), host_page(2)), (device_page(4), host_page(0))]
    tails = [(device_tail(3), (host_page(5), host_page(6)))]
    plan = Plan.of(LOAD, pages, tails)
    assert plan.legs == (make_page_leg((1, 2), (4, 0)), make_tail_leg((3, (5, 6))))
    assert Plan.of(SAVE).legs == ()


def test_a_plan_that_writes_a_place_twice_is_a_bug() -> None:
    two_to_one = make_page_leg((1, 5), (2, 5))
    with pytest.raises(AssertionError, match="I1"):
        Plan(SAVE, (two_to_one,))
    assert Plan(LOAD, (two_to_one,)).legs == (two_to_one,)
    with pytest.raises(AssertionError, match="I1"):
        Plan(SAVE, (make_page_leg((1, 5)), make_tail_leg((1, (4, 5)))))


def test_a_leg_with_a_side_missing_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="I7"):
        PageLeg((device_page(1),), ())
    with pytest.raises(AssertionError, match="I7"):
        TailLeg((), ((host_page(1),),))


def test_runs_are_neighbours_on_both_sides() -> None:
    leg = make_page_leg((4, 2), (5, 3), (6, 4), (7, 9), (9, 10), (10, 11), (3, 12))
    assert leg.runs == (Run(4, 2, 3), Run(7, 9, 1), Run(9, 10, 2), Run(3, 12, 1))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_runs_and_places_are_the_same_pages(pairs: list[tuple[int, int]]) -> None:
    leg = make_page_leg(*pairs)
    assert list(leg.places) == pairs
    assert [(d + i, h + i) for d, h, length in leg.runs for i in range(length)] == pairs
    assert leg.places_max == (max([d for d, _ in pairs], default=-1), max([h for _, h in pairs], default=-1))


# Entries


def test_whole_aligned_rows_become_pages() -> None:
    pairs = whole_row(3, 7, 4) + whole_row(1, 2, 4)
    assert split_entries(pairs, 4) == ([(device_page(3), host_page(7)), (device_page(1), host_page(2))], [])


def test_64_entries_of_64_pages_stay_entries() -> None:
    pairs = [make_pair((page, page % 64), (63 - page, page % 64)) for page in range(64)]
    assert split_entries(pairs, 64) == ([], pairs)


def test_64_entries_of_one_page_to_64_pages_stay_entries() -> None:
    pairs = [make_pair((0, entry), (entry, entry)) for entry in range(64)]
    assert split_entries(pairs, 64) == ([], pairs)


def test_a_whole_row_that_lands_one_entry_further_stays_entries() -> None:
    pairs = [make_pair((0, entry), (5, (entry + 1) % 4)) for entry in range(4)]
    assert split_entries(pairs, 4) == ([], pairs)


def test_a_row_that_lacks_one_entry_stays_entries() -> None:
    pairs = whole_row(0, 1, 4)[:3]
    assert split_entries(pairs, 4) == ([], pairs)


def test_one_entry_four_times_is_not_a_row() -> None:
    pairs = [make_pair((0, 1), (2, 1))] * 4
    assert split_entries(pairs, 4) == ([], pairs)


def test_the_order_of_the_pairs_does_not_matter_for_a_row() -> None:
    pairs = whole_row(0, 1, 4) + [make_pair((2, 3), (2, 0)), make_pair((2, 1), (1, 1))]
    random.Random(3).shuffle(pairs)
    pages, entries = split_entries(pairs, 4)
    assert pages == [(device_page(0), host_page(1))]
    assert entries == [p for p in pairs if p.device.page == device_page(2)]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)),
        max_size=30,
        unique_by=lambda pair: pair[:2],
    )
)
def test_split_entries_moves_exactly_what_the_pairs_move(numbers: list[tuple[int, int, int, int]]) -> None:
    pairs = [make_pair((d, i), (h, j)) for d, i, h, j in numbers]
    pages, entries = split_entries(pairs, 3)
    rows = [
        EntryPair(DeviceEntry(device, entry), HostEntry(host, entry))
        for device, host in pages
        for entry in range(3)
    ]
    assert sorted(rows + entries) == sorted(pairs)
