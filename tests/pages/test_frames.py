"""Goal: narrow and wide places never overlap, and what is granted can be taken. Method: take and give back
at random, and compare with a plain map of units."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.pages.frames import Frames
from tiercel.types import TAG_SHIFT, place


def make_frames(frames=3, units=4):
    return Frames("units", frames, units, tags=(1, 2), order=list(range(frames)))


def units_of(frames, page_id):
    if page_id >> TAG_SHIFT == 1:
        return {place(page_id)}
    first = place(page_id) * frames.units
    return set(range(first + 1, first + frames.units))


CALLS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 2), st.randoms(use_true_random=False)), max_size=40
)


@given(CALLS, st.integers(1, 5), st.integers(2, 5))
def test_whatever_is_granted_is_free_and_overlaps_nothing(calls, count, units):
    frames, taken = make_frames(count, units), {}
    for narrow, wide, random in calls:
        whole = sum(
            not any(set(range(f * units + 1, f * units + units)) & held for held in taken.values())
            for f in range(count)
        )
        if frames.lack(narrow, wide) <= 0:
            assert wide <= whole
            for page_id in frames.take(narrow, wide):
                own = units_of(frames, page_id)
                assert not any(own & held for held in taken.values())
                taken[page_id] = own
        gone = random.sample(sorted(taken), random.randint(0, len(taken)))
        going = random.sample(gone, random.randint(0, len(gone)))
        frames.leave(going)
        frames.check()
        later = [frames.lack(*counts, later=True) for counts in ((0, 0), (narrow, wide))]
        assert frames.leaving == len(going)
        frames.release(going)
        assert [frames.lack(*counts) for counts in ((0, 0), (narrow, wide))] == later
        assert frames.leaving == 0
        frames.release([page_id for page_id in gone if page_id not in going])
        for page_id in gone:
            del taken[page_id]
        frames.check()
        assert frames.owned_ids() == set(taken)
    frames.release(list(taken))
    assert frames.lack(count * units) <= 0 and frames.lack(count, count) <= 0


def test_a_page_breaks_no_body_and_a_tail_fills_what_is_broken():
    frames = make_frames()
    frames.take(1, 1)
    assert [place(unit) for unit in frames.take(2)] == [4, 8]
    assert frames.lack(0, 2) <= 0, "all heads are taken, and no body is broken"
    broken = frames.take(1)
    assert frames.lack(0, 2) == 1 and frames.lack(2, 1) <= 0, "two more units fit beside it"
    assert frames.lack(3, 1) == 1
    frames.release(broken)
    assert frames.lack(0, 2) <= 0


def test_units_of_two_broken_bodies_are_no_body():
    frames = make_frames(2)
    heads, units = frames.take(2), frames.take(6)
    frames.release([units[0], units[1], units[3], units[4]])
    assert frames.free == 4 and frames.lack(0, 1) == 1
    frames.release([units[2]])
    assert frames.lack(0, 1) <= 0
    frames.release([*heads, units[5]])


def test_an_id_that_was_given_back_is_not_owned():
    frames = make_frames()
    old = frames.take(1, 1)
    frames.release(old)
    new = frames.take(1, 1)
    assert frames.own(new) and not any(frames.own([each]) for each in old)
    assert [place(each) for each in old] == [place(each) for each in new]


def test_units_are_taken_where_the_fewest_are_free_so_that_other_bodies_become_whole():
    frames = make_frames(2)
    frames.take(2)
    units = frames.take(6)
    frames.release([units[0], units[3], units[4]])
    assert frames.take(1) == [next(each for each in frames.owned_ids() if place(each) == place(units[0]))]
    frames.release([units[5]])
    assert frames.lack(0, 1) <= 0


def test_what_is_not_owned_does_not_leave_and_nothing_leaves_twice():
    frames = make_frames()
    first, second = frames.take(2)
    frames.leave([first])
    frames.release([second])
    for page_id in (first, second):
        with pytest.raises(AssertionError, match="I3"):
            frames.leave([page_id])
