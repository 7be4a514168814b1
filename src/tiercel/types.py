"""Typed ids and the small words every room shares.

A page id is an opaque integer made by one pool. It carries the pool's tag and a generation, so an id
of another pool, or one kept after its release, is never equal to a live one:

    63      56 55            32 31             0
    ┌─────────┬────────────────┬────────────────┐
    │ pool tag│   generation   │ place          │
    └─────────┴────────────────┴────────────────┘

`place(id)` is the only thing memory needs: the row number inside the pool's buffers.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NewType

PageKey = NewType("PageKey", bytes)
"""Content name of a page: the digest of everything from the start of the text to the page's end."""

DevicePageId = NewType("DevicePageId", int)
HostPageId = NewType("HostPageId", int)

Namespace = tuple[str, ...]
"""Tenant, LoRA, salt … as separate words: ("a", "bc") and ("ab", "c") never share a page."""

PLACE_BITS = 32
GENERATION_BITS = 24
PLACE_MASK = (1 << PLACE_BITS) - 1
GENERATION_ONE = 1 << PLACE_BITS
TAG_SHIFT = PLACE_BITS + GENERATION_BITS


def place(page_id: int) -> int:
    """The row number of an id inside its pool's memory."""
    return page_id & PLACE_MASK


class Kind(IntEnum):
    """What is cached. The numbers are part of stored records."""

    PAGE = 1
    TAIL = 2

    @property
    def plural(self) -> str:
        """The name in statistics."""
        return f"{self.name.lower()}s"


class Tier(Enum):
    """Where bytes are, nearest first."""

    DEVICE = "device"
    HOST = "host"
    STORE = "store"
