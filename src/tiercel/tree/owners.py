"""Owners of pages and tails: the bytes of each, counted as they change, and their limits.

An owner is a tenant of a server. All that it caches is in namespaces of its own, so a page has one owner, the
same as the page before it. Bytes are counted in each tier where something can be read.

An owner above its limit loses its own coldest items, from both tiers at once, until it is below. Items that a
request holds or a copy moves stay until that has ended; so do the pages before them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tiercel.tree.candidates import EvictOrder
from tiercel.tree.node import Item, Tail, idle
from tiercel.types import Kind, Tier

ItemBytes = Mapping[tuple[Tier, Kind], int]
"""Bytes of a page and of a tail in each tier."""

MakeOrder = Callable[[Callable[[Any], bool], str], EvictOrder]
"""Makes the order, by the tree's policy, of the items for which a condition holds."""


def tail_in_pages(item_bytes: ItemBytes) -> float:
    """The bytes of a tail on the host, counted in pages."""
    page_bytes = item_bytes.get((Tier.HOST, Kind.PAGE), 1) or 1  # a stage of a model may keep tails only
    return item_bytes.get((Tier.HOST, Kind.TAIL), 1) / page_bytes


def may_go(item: Item) -> bool:
    """Whether an item may leave all tiers now."""
    if item.gone or not idle(item) or item.readers:
        return False
    if isinstance(item, Tail):
        return True
    return item.children == 0 and (item.tail is None or (idle(item.tail) and not item.tail.readers))


class Owner:
    """One owner. The order of what may go is kept even without a limit, so that setting one walks no tree."""

    def __init__(self, order: EvictOrder, item_bytes: ItemBytes) -> None:
        self.bytes = {Tier.DEVICE: 0, Tier.HOST: 0}
        self.bytes_most: int | None = None
        self.order = order
        self._item_bytes = item_bytes

    @property
    def over(self) -> bool:
        return self.bytes_most is not None and sum(self.bytes.values()) > self.bytes_most

    @property
    def keeps(self) -> bool:
        """Whether anything of it stays cached."""
        return self.bytes_most != 0

    def count(self, tier: Tier, kind: Kind, items: int) -> None:
        self.bytes[tier] += items * self._item_bytes[tier, kind]

    def offer(self, item: Item) -> None:
        """Called whenever an item of this owner may have become free to go."""
        self.order.offer(item)


class Owners:
    """All owners by name. The tree tells it of every change."""

    def __init__(self, make_order: MakeOrder, item_bytes: ItemBytes | None = None) -> None:
        self._make_order = make_order
        self._item_bytes = item_bytes or {(tier, kind): 1 for tier in Tier for kind in Kind}
        self.all: dict[str, Owner] = {}

    def named(self, name: str) -> Owner:
        if name not in self.all:
            self.all[name] = Owner(self._make_order(may_go, "in_owner"), self._item_bytes)
        return self.all[name]

    def bytes_of(self, tier: Tier, item: Item) -> int:
        return self._item_bytes[tier, item.kind]

    def over(self) -> list[Owner]:
        """Owners above their limits."""
        return [owner for owner in self.all.values() if owner.over]
