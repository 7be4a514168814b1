"""The two things the tree caches: pages and tails.

    page   one node of the tree; its parent is the page before it in the text
    tail   hangs on the page it continues after

Both live in up to two tiers, and each tier's copy is absent, on its way, or readable:

    device   load     meaning                       host   save     meaning
    None     None     not on the device             None   None     not on the host
    id       number   a load is filling it          ids    id       a save is filling it
    id       None     readable                      ids    None     readable

The number is the batch a load travels with. The id is the device place a save reads: the page may leave the
device before the save ends, and may even be back at another place by then.

A page with `device` set has a parent with `device` set: what the device holds of a text is a prefix of it.
"""

from __future__ import annotations

from tiercel.types import DevicePageId, DeviceTailId, HostPageId, PageKey


class Cached:
    """What pages and tails have in common: places in two tiers, and their use (see `policy.evict.Used`)."""

    __slots__ = ("gone", "hits", "host", "load", "lock", "priority", "save", "used")

    host: tuple[HostPageId, ...] | None
    load: int | None
    save: int | None
    lock: int
    used: int
    hits: int
    priority: int
    gone: bool

    @property
    def on_host(self) -> bool:
        """Readable on the host."""
        return self.host is not None and self.save is None


class Page(Cached):
    """A page in the tree. Locking it protects its whole path: only leaves are ever evicted."""

    __slots__ = ("children", "children_device", "depth", "device", "hits_given", "key", "parent", "tail")

    def __init__(
        self, key: PageKey, parent: Page | None, device: DevicePageId | None, used: int, priority: int
    ) -> None:
        self.key = key
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.device = device
        self.host = None
        self.load = self.save = None
        self.tail: Tail | None = None
        self.lock = self.children = self.children_device = self.hits = self.hits_given = 0
        self.used = used
        self.priority = priority
        self.gone = False


class Tail(Cached):
    """What is needed besides the pages to continue after `page`."""

    __slots__ = ("device", "page")

    def __init__(self, page: Page, device: DeviceTailId | None, used: int, priority: int) -> None:
        self.page = page
        self.device = device
        self.host = None
        self.load = self.save = None
        self.lock = self.hits = 0
        self.used = used
        self.priority = priority
        self.gone = False


Item = Page | Tail
"""Anything the tree caches."""
