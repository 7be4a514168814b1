"""Goal: bytes are counted for whom they belong to, and who has too much loses its own coldest. Method: words
as texts, a letter is a page; the whole tree is counted again after every change."""

import pytest

from tests.make import TreeDriver, make_keys
from tiercel.tree.check import check
from tiercel.types import Kind, Tier

ITEM_BYTES = {(tier, kind): 10 if kind is Kind.PAGE else 3 for tier in Tier for kind in Kind}


class Owned(TreeDriver):
    def __init__(self, **options):
        super().__init__(item_bytes=ITEM_BYTES, **options)

    def own(self, owner: str, text: str) -> None:
        """A text of an owner; its letters are its own, as namespaces would make them."""
        keys = make_keys(text)
        start = self.tree.match(keys, len(keys)).device
        page = self.tree.index[keys[start - 1]] if start else self.tree.root
        self.tree.insert(page, keys[start:], [next(self.ids) for _ in keys[start:]], owner=owner)
        check(self.tree)

    def bytes(self, owner: str) -> tuple[int, int]:
        counted = self.tree.owners.named(owner).bytes
        return counted[Tier.DEVICE], counted[Tier.HOST]

    def trim(self) -> bool:
        gone = self.tree.trim(100)
        check(self.tree)
        return gone > 0


@pytest.fixture
def tree():
    return Owned(host_pages=20, pages_per_window=0)


def test_bytes_are_counted_by_owner_and_tier_as_they_come_and_go(tree):
    tree.own("one", "abc")
    tree.own("two", "xy")
    tree.own("", "q")
    assert (tree.bytes("one"), tree.bytes("two")) == ((30, 0), (20, 0))
    tree.save("abc")
    tree.add_tail("abc")
    assert tree.bytes("one") == (33, 30)
    tree.evict(7)  # the pages of the others, the tail of the first, and its pages behind the tail
    assert (tree.bytes("one"), tree.bytes("two")) == ((0, 33), (0, 20))
    check(tree.tree)
    tree.tree.flush()
    assert tree.bytes("one") == tree.bytes("two") == (0, 0)


def test_who_has_too_much_loses_its_own_coldest_leaf_and_nobody_else_loses_any(tree):
    for text in ("ab", "cd", "e"):
        tree.own("one", text)
    tree.own("two", "xyz")
    tree.find("ab")
    tree.tree.limit("one", 40)
    assert tree.trim()
    assert tree.on("device", "ab", "a", "cd", "c", "e", "xyz") == ["ab", "a", "c", "e", "xyz"]
    assert tree.bytes("one") == (40, 0)
    assert not tree.trim(), "nothing goes below the limit"


def test_what_is_on_device_and_host_goes_from_both(tree):
    tree.own("one", "ab")
    tree.save("ab")
    tree.tree.limit("one", 25)
    tree.trim()
    assert tree.bytes("one") == (10, 10) and tree.on("host", "a", "ab") == ["a"]


def test_what_is_used_stays_until_it_is_not_and_the_limit_holds_then(tree):
    tree.tree.limit("one", 10)
    tree.own("one", "abc")
    tree.tree.lock(tree.page("abc"))
    assert not tree.trim() and tree.bytes("one") == (30, 0)
    tree.tree.unlock(tree.page("abc"))
    assert tree.trim() and tree.bytes("one") == (10, 0)


def test_what_a_save_or_a_reader_reads_stays(tree):
    tree.own("one", "a")
    tree.tree.save_start(tree.page("a"), tree.take_host(1))
    tree.tree.limit("one", 0)
    assert not tree.trim()
    tree.finish_saves()
    tree.tree.read_start(tree.page("a"))
    assert not tree.trim()
    tree.tree.read_done(tree.page("a"))
    assert tree.trim() and tree.bytes("one") == (0, 0)


def test_a_limit_can_be_lifted_and_set_again(tree):
    tree.tree.limit("one", 0)
    tree.tree.limit("one", None)
    tree.own("one", "abc")
    assert not tree.trim()
    tree.tree.limit("one", 20)
    assert tree.trim() and tree.bytes("one") == (20, 0)


def test_what_an_owner_that_keeps_nothing_has_on_the_device_leaves_without_a_copy(tree):
    tree.own("one", "ab")
    tree.own("two", "x")
    tree.tree.limit("one", 0)
    assert tree.evict(3) == 3
    assert tree.on("host", "ab", "x") == ["x"] and tree.bytes("one") == (0, 0)
    check(tree.tree)
