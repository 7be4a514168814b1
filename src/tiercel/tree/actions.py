"""What the tree has decided and someone else must do or may want to know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tiercel.tree.node import Item
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


@dataclass
class Actions:
    """What the tree has decided and someone else must do."""

    pages: list[DevicePageId] = field(default_factory=list)
    tails: list[DeviceTailId] = field(default_factory=list)
    host: list[HostPageId] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)
