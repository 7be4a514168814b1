"""Checks the tree: its invariants counted again, what each tier can read, a picture for failing tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tiercel.tree.node import Cleared, Event, Item, Page, Tail, event, parent_of
from tiercel.tree.owners import Owner, may_go
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import Kind, Tier


def check(tree: PrefixTree) -> None:
    """Assertions cite the invariants of ARCHITECTURE.md."""
    children: Counter[Page] = Counter()
    children_device: Counter[Page] = Counter()
    for key, page in tree.index.items():
        parent = page.parent
        assert parent is not None and page.key == key and page.depth == parent.depth + 1
        known = parent is tree.root or tree.index.get(parent.key) is parent
        assert known, "I6: a page's ancestors are present"
        children[parent] += 1
        if page.device is not None:
            children_device[parent] += 1
            assert parent is tree.root or parent.device is not None, "I6: the device holds a prefix"
            arrived = page.load is not None or parent.load is None
            assert arrived, "I2: a readable page below one that is arriving"
        tail = page.tail
        assert tail is None or tail.page is page
        if tail is not None and tail.device is not None:
            children_device[page] += 1
            assert page.device is not None, "I6: the device holds a tail with its page"
    for page in (tree.root, *tree.index.values()):
        assert page.children == children[page] and page.children_device == children_device[page]
    items = [*tree.items()]
    for item in items:
        _check_item(tree, item)
    both = [item for item in items if item.on_device and item.on_host and not item.readers]
    doubles = {item for item in both if isinstance(item, Tail) or _places(item) == tree.copies.pools}
    assert doubles == set(tree.doubles), "a double is what both tiers can read whole, no more and no less"
    tree.doubles.check()
    sparse = sum(item.on_device and not tree.is_whole(item) for item in items)
    assert tree.copies.sparse == sparse, "sparse pages are counted"
    for kind in Kind:
        counted = tree.copies.on_device[kind], tree.copies.on_host[kind]
        of_kind = [item for item in items if item.kind is kind]
        held = sum(item.on_device for item in of_kind), sum(item.on_host for item in of_kind)
        assert counted == held, "what is counted is what can be read"
    _check_owners(tree, items)
    owned = [owner.order for owner in tree.owners.all.values()]
    for order in (tree.device, tree.host, *owned):
        for item in order:
            assert not (item.gone and order.ready(item)), f"I3: gone, but may be evicted: {_row(item)}"


def _check_owners(tree: PrefixTree, items: Sequence[Item]) -> None:
    """Bytes by owner counted again; nothing that may go is left out of an order."""
    counted = {id(owner): dict.fromkeys(owner.bytes, 0) for owner in tree.owners.all.values()}
    for item in items:
        page = item.page if isinstance(item, Tail) else item
        owner, above = item.owner, parent_of(page)
        assert above is tree.root or above.owner is page.owner, "a text has one owner"
        if not isinstance(owner, Owner):
            continue
        for tier, readable in ((Tier.DEVICE, item.on_device), (Tier.HOST, item.on_host)):
            counted[id(owner)][tier] += readable * tree.owners.bytes_of(tier, item)
        left_out = owner.bytes_most is not None and may_go(item) and item not in owner.order
        assert not left_out, f"may go, but is not in its owner's order: {_row(item)}"
    for name, owner in tree.owners.all.items():
        assert counted[id(owner)] == owner.bytes, f"bytes of {name!r}"


def _check_item(tree: PrefixTree, item: Item) -> None:
    assert not item.gone and item.lock >= 0
    assert item.device is not None or item.host is not None, "what no tier holds is not in the tree"
    assert item.load is None or item.device is not None
    assert item.save is None or item.host is not None
    assert item.load is None or item.on_host, "I2: a load reads a readable copy"
    whole = isinstance(item, Tail) or item.device is None or _places(item) == tree.copies.pools
    assert whole or item.on_host, "I2: a part of a sparse page is on the host only"
    assert not item.readers or item.on_host, "I2: stores and peers are given a readable copy"
    for order in (tree.device, tree.host):
        assert item in order or not order.ready(item), f"may leave a tier, but is no candidate: {_row(item)}"


def _places(page: Page) -> int:
    return len(page.device) if isinstance(page.device, tuple) else 1


def readable(tree: PrefixTree) -> list[Event | Cleared]:
    """Everything a tier can read, as events."""
    return [
        event(True, tier, item)
        for item in tree.items()
        for tier, here in zip(Tier, (item.on_device, item.on_host, item.stored), strict=True)
        if here
    ]


def show(tree: PrefixTree) -> str:
    """One line per page, indented where the text branches; what was used first is above:

    a1b2c3d4 D H lock=1 used=7 hits=2
    └ tail   D .
    """
    below: dict[Page | None, list[Page]] = {}
    for page in sorted(tree.index.values(), key=lambda page: page.used):
        below.setdefault(page.parent, []).append(page)
    lines: list[str] = []
    todo = [(page, 0) for page in reversed(below.get(tree.root, []))]
    while todo:
        page, indent = todo.pop()
        lines += [" " * indent + _row(item) for item in (page, page.tail) if item is not None]
        children = below.get(page, [])
        todo += [(child, indent + (2 if len(children) > 1 else 0)) for child in reversed(children)]
    return "\n".join(lines)


def _row(item: Item) -> str:
    """Large letters for what can be read, small ones for what is arriving."""
    device = "D" if item.on_device else "." if item.device is None else "d"
    host = "H" if item.on_host else "." if item.host is None else "h"
    name = item.key.hex()[:8] if isinstance(item, Page) else "└ tail  "
    return f"{name} {device} {host} lock={item.lock} used={item.used} hits={item.hits}"
