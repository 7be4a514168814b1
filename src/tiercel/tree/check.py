"""A look at the tree: its invariants counted again, what each tier can read, a picture for a failing test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from tiercel.tree.actions import Cleared, Event, event
from tiercel.tree.candidates import Candidates
from tiercel.tree.node import CopyState, Item, Page, Tail
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import Tier


def check(tree: PrefixTree) -> None:
    """Assertions cite the invariants of ARCHITECTURE.md."""
    children: Counter[Page] = Counter()
    children_device: Counter[Page] = Counter()
    doubles: set[Item] = set()
    held = {tier: Counter({Page: 0, Tail: 0}) for tier in (Tier.DEVICE, Tier.HOST)}
    for key, page in tree.index.items():
        parent = page.parent
        assert parent is not None and page.key == key and page.depth == parent.depth + 1
        assert parent is tree.root or tree.index.get(parent.key) is parent, (
            "I6: a page's ancestors are present"
        )
        children[parent] += 1
        if page.device is not None:
            children_device[parent] += 1
            assert parent is tree.root or parent.device is not None, "I6: the device holds a prefix"
            assert page.load is not None or parent.load is None, (
                "I2: a readable page below one that is arriving"
            )
        for item in _items(page):
            _check_item(item)
            for tier, copy in item.copies.items():
                held[tier][type(item)] += copy.readable
            if all(copy.readable for copy in item.copies.values()) and not item.storing:
                doubles.add(item)
    for page in (tree.root, *tree.index.values()):
        assert page.children == children[page] and page.children_device == children_device[page]
    assert doubles == set(tree.doubles), "a double is what both tiers can read, no more and no less"
    tree.doubles.check()
    assert [tree.on_device, tree.on_host] == [*held.values()], "what is counted is what can be read"
    _check_candidates(tree)


def _items(page: Page) -> Iterator[Item]:
    yield page
    if page.tail is not None:
        assert page.tail.page is page
        yield page.tail


def _check_item(item: Item) -> None:
    assert not item.gone and item.lock >= 0
    assert item.device is not None or item.host is not None, "what no tier holds is not in the tree"
    assert item.load is None or item.device is not None
    assert item.save is None or item.host is not None
    assert item.load is None or item.on_host, "I2: a load reads a readable copy"
    assert not item.storing or item.on_host, "I2: the store is given a readable copy"


def _check_candidates(tree: PrefixTree) -> None:
    """Whoever may go stands in line; who may not is passed over when its turn comes."""
    lines: tuple[Candidates[Any], ...] = tree.device_pages, tree.device_tails, tree.host
    for line in lines:
        for item in line:
            assert not (item.gone and line.ready(item)), f"I3: gone, but may be evicted: {_row(item)}"
    for page in tree.index.values():
        on_device = page in tree.device_pages or not tree.device_pages.ready(page)
        assert on_device, f"may leave the device, but stands in no line: {_row(page)}"
        tail = page.tail
        on_device = tail is None or tail in tree.device_tails or not tree.device_tails.ready(tail)
        assert on_device, f"its tail may leave the device, but stands in no line: {_row(page)}"
        for item in _items(page):
            on_host = item in tree.host or not tree.host.ready(item)
            assert on_host, f"may leave the host, but stands in no line: {_row(item)}"


def readable(tree: PrefixTree) -> list[Event | Cleared]:
    """Everything a tier can read, as if it had just been told."""
    events: list[Event | Cleared] = []
    for page in tree.index.values():
        for item in _items(page):
            told = (event(True, tier, item) for tier, copy in item.copies.items() if copy.readable)
            events += told
            if item.stored:
                events.append(event(True, Tier.STORE, item))
    return events


def show(tree: PrefixTree) -> str:
    """One line per page, indented where the text branches:

    a1b2c3d4 D H lock=1 used=7 hits=2
    └ tail   D .
    """
    below: dict[Page, list[Page]] = {}
    for page in tree.index.values():
        assert page.parent is not None
        below.setdefault(page.parent, []).append(page)
    lines: list[str] = []
    todo = [(page, 0) for page in reversed(below.get(tree.root, []))]
    while todo:
        page, indent = todo.pop()
        lines += [" " * indent + _row(item) for item in _items(page)]
        children = below.get(page, [])
        todo += [(child, indent + (2 if len(children) > 1 else 0)) for child in reversed(children)]
    return "\n".join(lines)


def _row(item: Item) -> str:
    marks = {CopyState.ABSENT: "..", CopyState.ARRIVING: "dh", CopyState.READABLE: "DH"}
    device, host = (marks[copy.state][i] for i, copy in enumerate(item.copies.values()))
    name = item.key.hex()[:8] if isinstance(item, Page) else "└ tail  "
    return f"{name} {device} {host} lock={item.lock} used={item.used} hits={item.hits}"
