"""Goal: pages of one path that leave together are those that would leave one by one. Method: two trees do the
same, and only one of them may evict several pages at once. (Where a full host loses pages for them, the
simulation's model checks each of the victims.)"""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.make import TreeDriver
from tiercel.tree.check import check
from tiercel.tree.node import Page


def two_trees(**options) -> tuple[TreeDriver, TreeDriver]:
    return TreeDriver(**options), TreeDriver(**options)


def held(driver: TreeDriver) -> dict[bytes, tuple]:
    """Of each page: its tiers, its use, whether a save is under way."""
    return {
        key: (page.device is None, page.host is None, page.save is None, page.used, page.hits, page.priority)
        for key, page in driver.tree.index.items()
    }


def evict_one_by_one(driver: TreeDriver, count: int, room: TreeDriver | None) -> int:
    gone = 0
    while gone < count and driver.tree.evict(Page, 1, room):
        gone += 1
    return gone


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "priority"])
@given(seed=st.integers(0, 10**9), host_pages=st.sampled_from([0, 1000]))
@settings(max_examples=60, deadline=None)
def test_together_or_one_by_one(policy, seed, host_pages):
    random = Random(seed)
    texts = ["".join(random.choices("ab", k=random.randint(1, 3))) + word for word in ("", *WORDS) * 2]
    both = two_trees(evict=policy, host_pages=host_pages)
    for _ in range(60):
        what, text = random.choice(["add", "add", "find", "evict", "evict", "save"]), random.choice(texts)
        count, priority = random.randint(1, 12), random.randint(0, 1)
        gone = set()
        for driver in both:
            room = driver if host_pages else None
            if what == "add":
                driver.add(text, priority=priority)
            elif what == "find":
                driver.find(text, priority=priority)
            elif what == "save":
                driver.finish_saves()
            elif driver is both[0]:
                gone.add(evict_one_by_one(driver, count, room))
            else:
                gone.add(driver.tree.evict(Page, count, room))
        assert held(both[0]) == held(both[1]) and len(gone) < 2
        for driver in both:
            check(driver.tree)


WORDS = ("cdefgh", "cdefghijklm", "cdxyz", "pqrstuvwxyz")


@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("host_pages", [0, 20])
def test_a_text_leaves_at_once_and_asks_for_the_coldest_only_once(window, host_pages):
    """Behind the page of its tail, if it has one: pages and tails have different worths."""
    tree = TreeDriver(evict="value", host_pages=host_pages, pages_per_window=window)
    tree.add("abcdefgh")
    if window:
        tree.add_tail("abcdefgh")
    tree.add("zz")
    if window:
        tree.add_tail("zz")
    pops, pop = [], tree.tree.device[Page].pop
    tree.tree.device[Page].pop = lambda: pops.append(pop()) or pops[-1]
    assert tree.tree.evict(Page, 8, tree if host_pages else None) == 8
    assert tree.on("device", "a", "zz") == ["zz"]
    assert len(pops) == (1 if not window and not host_pages else 2)


def test_what_a_request_holds_or_another_text_needs_stays():
    tree = TreeDriver(host_pages=20)
    for text in ("abcdef", "abx"):
        tree.add(text)
    tree.tree.lock(tree.page("abcd"))
    assert tree.tree.evict(Page, 9, tree) == 3 and tree.on("device", "ab", "abcd", "abcde") == ["ab", "abcd"]
    tree.tree.unlock(tree.page("abcd"))
    assert tree.tree.evict(Page, 2, tree) == 2 and tree.on("device", "ab", "abc") == ["ab"]


def test_only_as_many_leave_as_the_host_has_room_for():
    tree = TreeDriver(host_pages=3)
    tree.add("abcdef")
    assert tree.tree.evict(Page, 6, tree) == 3 and tree.on("device", "abc", "abcd") == ["abc"]
    tree.finish_saves()
    assert tree.on("host", "abcd", "abcde", "abcdef") == ["abcd", "abcde", "abcdef"]
