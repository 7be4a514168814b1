"""What the tree has decided and someone else must do or may want to know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tiercel.tree.node import Item, Tail
from tiercel.types import DevicePageId, DeviceTailId, HostPageId, PageKey, Tier


class Move(NamedTuple):
    """One page or tail on its way between the tiers, and the places it goes between."""

    item: Item
    device: int
    host: tuple[HostPageId, ...]


class Event(NamedTuple):
    """Something became readable in a tier, or is no longer there."""

    stored: bool
    tier: Tier
    tail: bool
    key: PageKey
    parent: PageKey = PageKey(b"")
    """Of the page before it; empty for the first page of a text."""
    tokens: bytes = b""
    """Of the page, little-endian uint32; empty where they are not known."""


def event(stored: bool, tier: Tier, item: Item) -> Event:
    page = item.page if isinstance(item, Tail) else item
    parent = page.parent.key if page.parent is not None else PageKey(b"")
    return Event(stored, tier, page is not item, page.key, parent, page.tokens)


class Cleared(NamedTuple):
    """Nothing of what a tier held is there any more."""

    tier: Tier


@dataclass
class Actions:
    """What the tree has decided and someone else must do."""

    pages: list[DevicePageId] = field(default_factory=list)
    tails: list[DeviceTailId] = field(default_factory=list)
    host: list[HostPageId] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)
