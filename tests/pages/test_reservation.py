"""Goal: all or nothing. Method: make the pool short, make the block fail."""

import pytest

from tiercel.pages.frames import Frames
from tiercel.pages.pool import PagePool, Short, reserve


def make_pool():
    return PagePool("pages", 2, tag=1)


def test_a_short_pool_is_left_untouched():
    pool = make_pool()
    assert reserve(pool, 3) == Short("pages", 1)
    assert pool.free == 2


def test_a_block_that_raises_gives_everything_back():
    pool = make_pool()
    with pytest.raises(KeyError), reserve(pool, 2):
        assert pool.free == 0
        raise KeyError
    assert pool.free == 2


def test_leaving_the_block_without_keep_gives_everything_back():
    pool = make_pool()
    with reserve(pool, 1):
        pass
    assert pool.free == 2


def test_what_is_kept_belongs_to_the_caller():
    pool = make_pool()
    with reserve(pool, 2) as held:
        ids = held.ids
        held.keep()
    assert pool.free == 0 and pool.owned_ids() == set(ids)


def test_a_spent_reservation_is_not_used_again():
    with reserve(make_pool(), 1) as held:
        held.keep()
    with pytest.raises(AssertionError):
        held.ids  # noqa: B018 - reading it is the misuse
    with pytest.raises(AssertionError):
        held.keep()


def test_both_kinds_of_places_are_reserved_together_or_not_at_all():
    frames = Frames("units", 2, 4, tags=(1, 2), order=[0, 1])
    assert reserve(frames, 3, 2) == Short("units", 1)  # eight units are free, and nine are not
    assert frames.lack(2, 2) <= 0
    with reserve(frames, 2, 2) as held:
        assert len(held.ids) == 4 and frames.free == 0
    assert frames.free == 8
