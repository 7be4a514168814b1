"""Goal: all or nothing over any set of pools. Method: make each pool short, make the block fail."""

import pytest

from tiercel.pages.pool import PagePool, Short, reserve


def make_pools():
    return [PagePool(f"pool {i}", 2, tag=i) for i in range(1, 4)]


def free(pools):
    return [pool.free for pool in pools]


@pytest.mark.parametrize("short", [0, 1, 2])
def test_one_short_pool_leaves_all_pools_untouched(short):
    pools = make_pools()
    needs = [(pool, 3 if i == short else 2) for i, pool in enumerate(pools)]
    assert reserve(*needs) == Short(f"pool {short + 1}", 1)
    assert free(pools) == [2, 2, 2]


def test_a_block_that_raises_gives_everything_back():
    pools = make_pools()
    with pytest.raises(KeyError), reserve((pools[0], 2), (pools[2], 1)):
        assert free(pools) == [0, 2, 1]
        raise KeyError
    assert free(pools) == [2, 2, 2]


def test_leaving_the_block_without_keep_gives_everything_back():
    pools = make_pools()
    with reserve((pools[0], 2)):
        pass
    assert free(pools) == [2, 2, 2]


def test_what_is_kept_belongs_to_the_caller():
    pools = make_pools()
    with reserve((pools[0], 2), (pools[1], 1)) as held:
        ids = held.ids(pools[0])
        held.keep()
    assert free(pools) == [0, 1, 2] and pools[0].owned_ids() == set(ids)


def test_two_needs_from_one_pool_add_up():
    pools = make_pools()
    assert reserve((pools[0], 1), (pools[0], 2)) == Short("pool 1", 1)
    with reserve((pools[0], 1), (pools[0], 1)) as held:
        assert len(held.ids(pools[0])) == 2


def test_a_spent_reservation_is_not_used_again():
    (pool, *_) = make_pools()
    with reserve((pool, 1)) as held:
        held.keep()
    with pytest.raises(AssertionError):
        held.ids(pool)
    with pytest.raises(AssertionError):
        held.keep()
