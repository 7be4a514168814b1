"""Goal: misuse of places is found at once. Method: small pools, every kind of misuse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.pages.pool import PagePool
from tiercel.types import GENERATION_BITS, GENERATION_ONE, PLACE_MASK, place


def make_pool(capacity=4, tag=1, **options):
    return PagePool("pool", capacity, tag=tag, **options)


def test_a_place_comes_back_under_another_id():
    pool = make_pool(1)
    (first,) = pool.take(1)
    pool.release([first])
    (second,) = pool.take(1)
    assert place(first) == place(second) == 0
    assert first != second and pool.own([second]) and not pool.own([first])


def test_places_are_given_out_in_the_order_asked_for():
    pool = make_pool(3, order=[2, 0, 1])
    assert [place(i) for i in pool.take(1) + pool.take(2)] == [2, 0, 1]


def test_neighbours_stay_neighbours():
    pool = make_pool(6)
    first, second = pool.take(3), pool.take(3)
    pool.release(first)
    assert [place(i) for i in pool.take(3)] == [place(i) for i in first] == [0, 1, 2]
    pool.release(second)


def test_an_order_that_forgets_a_place_is_refused():
    with pytest.raises(AssertionError):
        make_pool(3, order=[0, 1, 1])


@pytest.mark.parametrize("misuse", ["twice", "twice in one call", "foreign", "stale", "never taken"])
def test_misuse_is_an_assertion_and_changes_nothing(misuse):
    pool, other = make_pool(tag=1), make_pool(tag=2)
    (one,) = pool.take(1)
    (foreign,) = other.take(1)
    stale = one
    pool.release([one])
    (one,) = pool.take(1)
    bad = {
        "twice": lambda: (pool.release([one]), pool.release([one])),
        "twice in one call": lambda: pool.release([one, one]),
        "foreign": lambda: pool.release([one, foreign]),
        "stale": lambda: pool.release([stale]),
        "never taken": lambda: pool.release([one ^ 1]),
    }[misuse]
    with pytest.raises(AssertionError, match="I3"):
        bad()
    if misuse != "twice":
        assert pool.own([one]) and not pool.own([stale]) and not pool.own([foreign])
        assert len(pool.owned_ids()) == 1 and pool.free == 3
        pool.release([one])
    pool.check()


def test_taking_more_than_is_free_is_an_assertion():
    with pytest.raises(AssertionError):
        make_pool(2).take(3)


def test_ids_of_two_pools_never_coincide_even_for_the_same_places():
    one, two = make_pool(4, tag=1), make_pool(4, tag=2)
    assert not set(one.take(4)) & set(two.take(4))


def test_a_generation_wraps_inside_its_own_bits():
    pool = make_pool(1)
    last = pool._free[0] | ((1 << GENERATION_BITS) - 1) * GENERATION_ONE
    pool._free = [last]
    (page_id,) = pool.take(1)
    pool.release([page_id])
    (page_id,) = pool.take(1)
    assert page_id & PLACE_MASK == 0
    pool.check()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5))))
def test_free_and_owned_always_add_up(steps):
    pool, owned = make_pool(5), []
    for take, n in steps:
        if take and n <= pool.free:
            owned += pool.take(n)
        elif not take:
            pool.release(owned[:n])
            del owned[:n]
        pool.check()
        assert pool.owned_ids() == set(owned) and pool.free + len(owned) == 5


def test_the_check_finds_a_lost_place():
    pool = make_pool(3)
    pool._free.pop()
    with pytest.raises(AssertionError, match="I4"):
        pool.check()
