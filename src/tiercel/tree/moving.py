"""How pages and tails move between the tiers, as far as the books are concerned.

The life of a place on the device, and who gives it back:

    insert ──────────────► readable ── evict, copy on the host ─────────► given back at once
    load_start ─ load_done ─►│
                             └────── evict, no copy yet: save ─ save_done ► given back when the copy ended

A host copy arrives from a place of ours (`save_start`) or from elsewhere (`arrive_start`: another engine's
memory, a peer); either way it is readable when it is there, and not before.
"""

from __future__ import annotations

from typing import Any

from tiercel.tree.actions import Move
from tiercel.tree.books import Books
from tiercel.tree.node import FOREIGN, Item, Page, parent_of
from tiercel.types import HostPageId, Tier


class Moving(Books):
    """Every move has a start and an end, and between them its places stay where they are."""

    def load_start(self, item: Item, device: Any, batch: int) -> Move:
        """A load is going to fill `device` from the host copy."""
        assert item.device is None and item.on_host and item.host is not None, (
            "I2: a load reads a readable copy"
        )
        item.device = device
        item.load = batch
        if isinstance(item, Page):
            parent = parent_of(item)
            assert parent is self.root or parent.device is not None, "the device holds a prefix"
            parent.children_device += 1
        return Move(item, device, item.host)

    def load_done(self, move: Move, ok: bool) -> None:
        """The load ended. If it failed, the host copy is what it was. Children come before their parents."""
        item = move.item
        if item.gone:
            self._give_device(item, move.device)
            item.device = item.load = None
            self._give_host(item)
            return
        if ok:
            if not item.storing:
                self.doubles.add(item)
            self._tell(True, Tier.DEVICE, item)
        else:
            self._leave_device(item)
        item.load = None
        self._offer(item)

    def save_start(self, item: Item, host: tuple[HostPageId, ...]) -> None:
        """A save is going to fill `host` from the device copy, whose place it holds until it ended."""
        assert item.device is not None and item.load is None and item.host is None
        item.host = host
        item.save = item.device
        self._saving += 1
        self.actions.saves.append(Move(item, item.device, host))

    def save_done(self, move: Move, ok: bool) -> None:
        """The save ended. What was evicted meanwhile gives its place back now, and is lost if it failed."""
        item = move.item
        self._saving -= 1
        if item.device != move.device:
            self._give_device(item, move.device)
            self.leaving[type(item)] -= 1
        self.arrive_done(item, move.host, ok)

    def arrive_start(self, item: Item, host: tuple[HostPageId, ...]) -> None:
        """Somebody is going to fill `host`, from no place of ours."""
        assert item.host is None and not item.gone, "I1: a host copy is written once"
        item.host = host
        item.save = FOREIGN

    def arrive_done(self, item: Item, host: tuple[HostPageId, ...], ok: bool) -> None:
        """Nobody writes `host` any more. If not all of it is there, what no other tier holds is lost."""
        if item.gone:
            self.actions.host.extend(host)
            return
        item.save = None
        if ok:
            self._tell(True, Tier.HOST, item)
            if item.device is not None:
                self.doubles.add(item)
        else:
            item.host = None
            self.actions.host.extend(host)
            if item.device is None:
                self._drop(item)
                return
        self._offer(item)

    def store_start(self, item: Item) -> None:
        """The host copy is being written to the store, and stays until that ended."""
        assert item.on_host and not item.storing and not item.gone, "I2: the store is given a readable copy"
        item.storing = True
        self.doubles.discard(item)

    def store_done(self, item: Item, ok: bool) -> None:
        item.storing = False
        if item.gone:
            self._give_host(item)
            return
        if item.device is not None and item.load is None:
            self.doubles.add(item)
        if ok:
            self.mark_stored(item)
        self._offer(item)

    def unsaved(self, page: Page) -> list[Page]:
        """Pages at the end of a path that have no host copy and none on its way, the deepest last."""
        pages = []
        while page is not self.root and page.host is None:
            pages.append(page)
            page = parent_of(page)
        return pages[::-1]
