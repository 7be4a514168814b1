"""What both device and host can read: the first host copies to go when the host is full.

Those the store has as well go before the others, and may go for less: nothing is lost with them.
"""

from __future__ import annotations

from collections.abc import Iterator

from tiercel.tree.node import Item


class Doubles:
    """In the order they came; the latest goes first, the device will not need the host's copy for longest."""

    def __init__(self) -> None:
        self._stored: dict[Item, None] = {}
        self._others: dict[Item, None] = {}

    def add(self, item: Item) -> None:
        """Also when it has become known whether the store has it."""
        self.discard(item)
        (self._stored if item.stored else self._others)[item] = None

    def discard(self, item: Item) -> None:
        self._stored.pop(item, None)
        self._others.pop(item, None)

    def pop(self) -> Item | None:
        return self.pop_stored() or (self._others.popitem()[0] if self._others else None)

    def pop_stored(self) -> Item | None:
        return self._stored.popitem()[0] if self._stored else None

    def __contains__(self, item: Item) -> bool:
        return item in self._stored or item in self._others

    def __iter__(self) -> Iterator[Item]:
        yield from self._stored
        yield from self._others

    def check(self) -> None:
        assert all(item.stored for item in self._stored) and not any(item.stored for item in self._others)
