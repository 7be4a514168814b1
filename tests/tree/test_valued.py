"""Goal: what saves least leaves first, and the chances of tails follow the traffic. Method: small trees, and
pages that no tail reaches searched for after random steps."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.make import TreeDriver
from tiercel.policy.placement import Boundary
from tiercel.policy.worth import FIRST_CHANCE, Chances
from tiercel.tree.check import check
from tiercel.tree.valued import unreachable


def make_tree(**options) -> TreeDriver:
    return TreeDriver(evict="value", pages_per_window=1, **options)


def evicted(tree: TreeDriver, *texts: str) -> list[str]:
    """The texts in the order in which their last pages leave the device."""
    order: list[str] = []
    while len(order) < len(texts):
        assert tree.evict() == 1
        here = tree.on("device", *texts)
        order += [text for text in texts if text not in here and text not in order]
    return order


def test_a_page_that_no_tail_reaches_leaves_before_everything_else():
    tree = make_tree()
    tree.add("x")
    tree.add_tail("x")
    tree.add("ab")
    tree.add_tail("ab")
    tree.add("abcd")
    assert evicted(tree, "x", "ab", "abc", "abcd") == ["abcd", "abc", "x", "ab"]


def test_a_passed_tail_leaves_before_an_older_end():
    tree = make_tree()
    tree.add("pq")
    tree.add_tail("pq")
    tree.add("abcd")
    tree.add_tail("ab")
    tree.add_tail("abcd")
    assert tree.tree.device.pop() is tree.page("ab").tail


def test_an_end_becomes_a_passed_tail_when_the_text_goes_on():
    tree = make_tree()
    tree.add("ab")
    tree.add_tail("ab")
    tree.add("pq")
    tree.add_tail("pq")
    assert tree.tree.device.coldest() is tree.page("ab").tail
    tree.add("pqrs")
    tree.tree.lock(tree.page("pqrs"))  # no tail reaches it: it would leave first
    assert tree.tree.device.coldest() is tree.page("pq").tail


def test_a_tail_where_two_texts_part_stays_longer_than_one_that_a_text_has_passed():
    tree = make_tree()
    tree.add("abcdefgh")
    tree.add("abcXY")
    for text in ("abc", "abcdef", "abcdefgh", "abcXY"):
        tree.add_tail(text)
    assert tree.tree.device.pop() is tree.page("abcdef").tail


def test_the_tail_before_inherits_the_use_of_one_that_leaves():
    tree = make_tree()
    tree.add("abcd")
    tree.add_tail("ab")
    tree.add_tail("abcd")
    later = tree.page("abcd").tail.used
    tree.tree.copies.remove_tail(tree.page("abcd").tail)
    assert tree.page("ab").tail.used == later


def test_what_is_worth_less_than_all_on_the_host_is_not_saved():
    tree = make_tree(host_pages=3)
    tree.add("pq")
    tree.add_tail("pq")
    tree.evict(3)
    assert tree.on("host", "p", "pq") == ["p", "pq"] and tree.page("pq").tail.on_host
    tree.add("ab")
    tree.evict(2)
    assert tree.on("host", "p", "pq") == ["p", "pq"] and not tree.on("host", "a", "ab")


def test_a_page_that_leaves_the_device_keeps_the_pages_after_it_on_the_host():
    tree = make_tree(host_pages=4)
    tree.add("abcd")
    for _ in range(20):
        tree.add_tail("abcd")  # its end was used lately, its first page was not
    tree.evict(4)
    assert tree.on("host", "ab", "abc", "abcd") == ["ab", "abc", "abcd"]
    tree.evict()
    assert tree.on("host", "a", "ab", "abc", "abcd") == ["a", "ab", "abc", "abcd"], "the tail made room"


def test_a_tree_without_tails_evicts_least_recently_used_pages():
    tree = TreeDriver(evict="value")
    tree.add("ab")
    tree.add("xy")
    tree.find("ab")
    assert evicted(tree, "a", "ab", "x", "xy") == ["xy", "x", "ab", "a"]


def test_a_tail_that_is_found_almost_never_is_not_written_to_a_store():
    tree = make_tree()
    tree.add("abcd")
    tree.add_tail("ab")
    tree.add_tail("abcd")
    passed, end = tree.page("ab").tail, tree.page("abcd").tail
    assert tree.tree.worth_keeping(passed) and tree.tree.worth_keeping(end)
    watch(tree.tree.worth.chances, tree.tree.worth.chances.end, 500, 500)
    watch(tree.tree.worth.chances, passed.chance, 0, 1000)
    assert not tree.tree.worth_keeping(passed)
    assert tree.tree.worth_keeping(end) and tree.tree.worth_keeping(passed.page)


# Chances


def watch(chances: Chances, chance, hits: int, misses: int) -> None:
    for n in range(hits + misses):
        chances.observe(chance, used=0, since=0, now=1000, hit=n < hits)


def test_the_chance_of_a_passed_tail_follows_what_is_found():
    chances = Chances()
    never, often = chances.passed[Boundary.EVERY], chances.passed[Boundary.TURN]
    watch(chances, chances.end, 100, 100)
    watch(chances, never, 0, 200)
    watch(chances, often, 100, 100)
    assert never.factor < FIRST_CHANCE / 10
    assert often.factor == pytest.approx(1.0, rel=0.1)
    assert chances.passed[Boundary.PROMPT].factor == FIRST_CHANCE


def test_new_traffic_outweighs_old_traffic():
    chances = Chances()
    chance = chances.passed[Boundary.TURN]
    watch(chances, chances.end, 10_000, 10_000)
    watch(chances, chance, 0, 20_000)
    before = chance.factor
    watch(chances, chances.end, 3000, 3000)
    watch(chances, chance, 3000, 3000)
    assert before < 0.01 < 0.5 < chance.factor


# The property


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_what_no_tail_reaches_is_always_first(seed):
    random = Random(seed)
    tree = make_tree(host_pages=random.choice([0, 6]))
    for _ in range(80):
        text, action = "".join(random.choices("ab", k=random.randint(1, 7))), random.random()
        found = tree.match(text).found
        if action < 0.5:
            tree.add(text)
        elif action < 0.8 and found and tree.page(text[:found]).on_device:
            tree.add_tail(text[:found])
        elif action < 0.9:
            tree.find(text)
        else:
            line, pages = tree.tree.device, tree.tree.index.values()
            if line.coldest() is not None:
                tree.tree.evict(random.randint(0, 1))  # what was coldest may not be so any more
            useless = [page for page in pages if unreachable(page) and line.ready(page)]
            if useless:
                assert (first := line.coldest()) in useless
                assert first.used == min(page.used for page in useless)
            tree.evict()
        check(tree.tree)
