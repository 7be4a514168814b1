"""Goal: each policy orders as its name says, and ranks never fall. Method: small uses, all pairs."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.config import EVICT_POLICIES
from tiercel.errors import ConfigError
from tiercel.policy.evict import AGE, EvictPolicy, make_evict_policy


def make_use(used=0, hits=0, priority=0):
    return SimpleNamespace(used=used, hits=hits, priority=priority)


@pytest.mark.parametrize(
    ("policy", "first", "second"),
    [
        ("lru", make_use(used=1, hits=9, priority=9), make_use(used=2)),
        ("lfu", make_use(hits=1, used=9), make_use(hits=2, used=1)),
        ("lfu", make_use(hits=1, used=1), make_use(hits=1, used=2)),
        ("slru", make_use(hits=1, used=9), make_use(hits=2, used=1)),
        ("slru", make_use(hits=5, used=1), make_use(hits=2, used=2)),
        ("priority", make_use(priority=0, used=9), make_use(priority=1, used=1)),
        ("priority", make_use(priority=1, used=1), make_use(priority=1, used=2)),
    ],
)
def test_the_policy_evicts_the_first_before_the_second(policy, first, second):
    rank = make_evict_policy(policy).rank
    assert rank(first) < rank(second)


@pytest.mark.parametrize("policy", ["lfu", "slru"])
def test_what_was_found_often_long_ago_leaves_before_what_was_found_lately(policy):
    rank = make_evict_policy(policy).rank
    once_popular, new = make_use(hits=7), make_use(used=AGE // 2, hits=1)
    assert rank(once_popular) > rank(new)
    assert rank(once_popular) < rank(make_use(used=3 * AGE, hits=1))


USES = st.integers(0, 9)


@given(st.sampled_from(EVICT_POLICIES), USES, USES, USES, USES, USES, USES)
def test_a_rank_never_falls_with_use(policy, used, hits, priority, more_used, more_hits, more_priority):
    rank = make_evict_policy(policy).rank
    before = make_use(used, hits, priority)
    after = make_use(used + more_used, hits + more_hits, priority + more_priority)
    assert rank(after) >= rank(before)


class Newest(EvictPolicy):
    """A user's own policy: what came last goes first is not allowed (ranks would fall); constant order is."""

    def rank(self, use):
        return use.priority


def test_a_users_own_class_is_loaded_by_its_name():
    assert isinstance(make_evict_policy(f"{__name__}:Newest"), Newest)


BAD = [f"{__name__}:{name}" for name in ("Missing", "make_use", "EvictPolicy")]


@pytest.mark.parametrize("name", ["no.such.module:Class", ":", ".x:Y", *BAD])
def test_a_class_that_can_not_be_used_is_a_clear_error(name):
    with pytest.raises(ConfigError, match="evict"):
        make_evict_policy(name)
