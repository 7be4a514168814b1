"""Goal: no step takes longer because much is cached. Method: counts of what is looked at, never times: what
the collector sees, how many entries an offer checks, how long tables are."""

import gc
import sys
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.make import TreeDriver, make_keys
from tiercel.policy.evict import Lru
from tiercel.tree.candidates import ROW, SWEEP_ENTRIES, Candidates, Doubles
from tiercel.tree.check import check
from tiercel.tree.index import Index
from tiercel.tree.node import Page
from tiercel.tree.valued import Valued, Worth
from tiercel.types import Kind, PageKey, Tier

POLICIES = pytest.mark.parametrize("evict", ["value", "lru", "lfu"])


def make_tree(evict: str = "value", **options) -> TreeDriver:
    bytes_of = {(tier, kind): 1 for tier in Tier for kind in Kind}
    return TreeDriver(evict=evict, host_pages=600, pages_per_window=1, item_bytes=bytes_of, **options)


def grow(tree: TreeDriver, texts: int, *, owner: str = "") -> None:
    """Short texts, each with a tail and a host copy; a third leaves the device again."""
    for n in range(texts):
        text = chr(1000 + n) + "ab"
        keys = make_keys(text)
        tree.tree.insert(tree.tree.root, keys, [next(tree.ids) for _ in keys], owner=owner)
        tree.add_tail(text)
        tree.save(text)
    tree.evict(texts)
    tree.tree.evict(texts // 3, tree.take_host)
    tree.finish_saves()


@pytest.fixture
def no_collections():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# What the collector sees


def holders(keys: list[PageKey]) -> list[int]:
    """How often each key is held: by its page, by the index, by the list here."""
    return [sys.getrefcount(keys[n]) for n in range(len(keys))]


@POLICIES
def test_the_collector_does_not_visit_what_is_cached(evict):
    tree = make_tree(evict)
    grow(tree, 10, owner="one")
    gc.collect()
    before = len(gc.get_objects())
    grow(tree, 150, owner="one")
    gc.collect()  # tuples of numbers are visited once
    assert len(gc.get_objects()) - before < 50 and len(tree.tree.index) > 400


@POLICIES
def test_what_has_left_the_tree_is_freed_without_the_collector(evict, no_collections):
    tree = make_tree(evict)
    keys = make_keys("abc")
    before = holders(keys)
    tree.tree.insert(tree.tree.root, keys, [next(tree.ids) for _ in keys], owner="one")
    tree.add_tail("abc")
    tree.save("abc")
    assert holders(keys) == [each + 2 for each in before]
    tree.tree.flush()
    assert holders(keys) == before and not tree.tree.index


@POLICIES
def test_a_tree_that_nobody_uses_is_freed_whole(evict):
    tree = make_tree(evict)
    grow(tree, 20, owner="one")
    keys = list(tree.tree.index)
    before = holders(keys)
    del tree
    gc.collect()
    assert holders(keys) == [each - 2 for each in before]


def test_a_circle_elsewhere_is_collected_and_frees_the_page_it_held(no_collections):
    class Request:
        """Knows itself, as an exception and its frame do."""

        def __init__(self, page) -> None:
            self.page, self.me = page, self

    tree = make_tree()
    keys = make_keys("ab")
    tree.tree.insert(tree.tree.root, keys, [1, 2])
    before = holders(keys)
    request = weakref.ref(Request(tree.page("ab")))
    tree.tree.flush()
    assert request() is not None and holders(keys) == [each - 1 for each in before], "not the index any more"
    gc.collect()
    assert request() is None and holders(keys) == [each - 2 for each in before]


# Sweeps


@dataclass(eq=False)
class Thing:
    used: int
    hits: int = 0
    priority: int = 0
    free: bool = True
    place: int = 0


class Counted:
    """How often it was asked whether something is ready."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, item) -> bool:
        self.asked += 1
        return item.free if isinstance(item, Thing) else item.lock == 0


def things_of(kind: str):
    """A line, and items for it without end."""
    ready = Counted()
    if kind == "candidates":
        return ready, Candidates(Lru(), ready, "place"), lambda n: Thing(n)
    clock = 10**6
    worth = Worth(1, 1.0, None, lambda: clock)
    root = Page(None, 0, 0, PageKey(b""), None, 0)

    def make(n: int):
        page = Page(n + 1, n, 0, PageKey(bytes(32)), root, 1)
        page.hits = n % 4
        page.children = n % 2  # half of them are reachable
        return page

    return ready, Valued(worth, ready, "in_device"), make


def lock(item) -> None:
    if isinstance(item, Thing):
        item.free = False
    else:
        item.lock = 1


@pytest.mark.parametrize("kind", ["candidates", "valued"])
def test_an_offer_looks_at_a_few_entries_however_long_the_line(kind):
    ready, line, make = things_of(kind)
    most = 0
    for n in range(4000):
        item = make(n)
        ready.asked = 0
        line.offer(item)
        most = max(most, ready.asked)
        if n % 3:
            lock(item)
    assert most <= SWEEP_ENTRIES + 2
    assert len(line) < 2.5 * 4000 / 3 + 100, "what may not leave was swept out"


@pytest.mark.parametrize("kind", ["candidates", "valued"])
def test_during_a_sweep_the_first_to_go_is_still_the_first(kind):
    ready, line, make = things_of(kind)
    items = [make(n) for n in range(300)]
    Random(1).shuffle(items)
    waiting = []
    for n, item in enumerate(items):
        line.offer(item)
        waiting.append(item)
        if n % 5 == 4:
            first = line.pop()
            unreachable = [each for each in waiting if isinstance(each, Page) and not each.children]
            assert first in (unreachable or waiting)
            if kind == "candidates" or unreachable:
                assert first.used == min(each.used for each in unreachable or waiting)
            waiting.remove(first)
    assert set(line) == set(waiting)


# Tables


def test_the_index_is_many_short_tables():
    index, root = Index(), Page(None, 0, 0, PageKey(b""), None, 0)
    random = Random(0)
    for _ in range(5000):
        index.add(Page(None, 0, 0, PageKey(random.randbytes(32)), root, 1))
    assert max(map(len, index.shards)) < 60


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60))
def test_the_index_is_a_dict(steps):
    index, model, root = Index(), dict[PageKey, Page](), Page(None, 0, 0, PageKey(b""), None, 0)
    for add, number in steps:
        key = PageKey(bytes([number % 3, number]))
        if add and key not in model:
            model[key] = Page(None, 0, 0, key, root, 1)
            index.add(model[key])
        elif not add and key in model:
            index.remove(model.pop(key))
        assert index == model and set(index.values()) == set(model.values()) and len(index) == len(model)
        assert index.get(key) is model.get(key) and (key in index) == (key in model)


@dataclass(eq=False)
class Both:
    stored: bool = False
    double: int = field(default=0, init=False)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["add", "add", "remove", "stored", "latest", "oldest"]),
                          st.integers(0, 700)), max_size=200))  # fmt: skip
def test_doubles_leave_latest_first_or_oldest_first_those_of_the_store_before_the_others(steps):
    doubles, items = Doubles(), [Both() for _ in range(701)]
    models: dict[bool, OrderedDict[Both, None]] = {True: OrderedDict(), False: OrderedDict()}

    def expected(last: bool) -> Both | None:
        for stored in (True, False):
            if models[stored]:
                return models[stored].popitem(last)[0]
        return None

    for each in items[: ROW + 3]:
        doubles.add(each)
        models[False][each] = None
    for action, number in steps:
        item = items[number]
        if action in ("add", "stored"):
            item.stored = action == "stored" or item.stored
            for model in models.values():
                model.pop(item, None)
            models[item.stored][item] = None
            doubles.add(item)
        elif action == "remove":
            doubles.discard(item)
            for model in models.values():
                model.pop(item, None)
        else:
            assert (doubles.pop() if action == "latest" else doubles.pop_oldest()) is expected(
                action == "latest"
            )
        assert list(doubles) == [*models[True], *models[False]]
        assert (item in doubles) == any(item in model for model in models.values())


# Owners


def test_limits_are_set_without_a_walk_and_what_is_too_much_leaves_in_pieces():
    tree = make_tree()
    for owner in "abc":
        for n in range(8):
            keys = make_keys(f"{owner}{n}")
            tree.tree.insert(tree.tree.root, keys, [next(tree.ids) for _ in keys], owner=owner)
    rows, tree.tree.index.rows = tree.tree.index.rows, None  # nobody can walk it
    for owner in "abc":
        tree.tree.limit(owner, 3 if owner != "b" else None)
    tree.tree.index.rows = rows
    assert tree.tree.trim(5) == 5
    check(tree.tree)
    gone = 5
    while some := tree.tree.trim(5):
        gone += some
    assert gone == sum(owner.bytes[Tier.DEVICE] == 3 for owner in tree.tree.owners.all.values()) * 6
