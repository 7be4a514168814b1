"""The two things the tree caches: pages and tails.

    page   one node of the tree; its parent is the page before it in the text
    tail   hangs on the page it continues after

Both have one copy in each of two pools, the device's and the host's: places there, and a state. A copy is two
fields of its page or tail, not an object, since there are millions; `copies` shows it as one.

    device   load     meaning                       host   save     meaning
    None     None     not on the device             None   None     not on the host
    id       number   a load is filling it          ids    id       a save is filling it
    id       None     readable                      ids    None     readable

The number is the batch a load travels with. The id is the device place a save reads: the page may leave the
device before the save ends, and may even be back at another place by then. FOREIGN stands for a place that is
not ours: somebody else fills the host copy.

The store is not ours alone, so of it only two things are known: `storing`, the host copy is being written to
it and stays until that ended; `stored`, it has been there.

A page with `device` set has a parent with `device` set: what the device holds of a text is a prefix of it.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from tiercel.types import DevicePageId, DeviceTailId, HostPageId, PageKey, Tier

FOREIGN = -1


class CopyState(Enum):
    """What can be done with a copy in a pool."""

    ABSENT = "absent"
    ARRIVING = "arriving"
    READABLE = "readable"


class Copy(NamedTuple):
    """What one pool has of a page or tail: of the streams that the pool holds."""

    ids: tuple[int, ...]
    state: CopyState

    @property
    def readable(self) -> bool:
        return self.state is CopyState.READABLE


def _copy(ids: tuple[int, ...], arrives_by: int | None) -> Copy:
    state = CopyState.READABLE if arrives_by is None else CopyState.ARRIVING
    return Copy(ids, state if ids else CopyState.ABSENT)


class Cached:
    """What pages and tails have in common: places in two tiers, and their use (see `policy.evict.Used`)."""

    __slots__ = ("gone", "hits", "host", "load", "lock", "priority", "save", "stored", "storing", "used")

    device: Any
    host: tuple[HostPageId, ...] | None
    load: int | None
    save: int | None
    lock: int
    used: int
    hits: int
    priority: int
    storing: bool
    stored: bool
    gone: bool

    @property
    def copies(self) -> dict[Tier, Copy]:
        """Its copy in each pool, the nearest first."""
        device = () if self.device is None else (self.device,)
        return {Tier.DEVICE: _copy(device, self.load), Tier.HOST: _copy(self.host or (), self.save)}

    @property
    def on_host(self) -> bool:
        """Readable on the host."""
        return self.host is not None and self.save is None


class Page(Cached):
    """A page in the tree. Locking it protects its whole path: only leaves are ever evicted."""

    __slots__ = (
        "children",
        "children_device",
        "depth",
        "device",
        "fetched",
        "hits_given",
        "key",
        "parent",
        "tail",
        "tokens",
    )

    def __init__(
        self, key: PageKey, parent: Page | None, device: DevicePageId | None, used: int, priority: int
    ) -> None:
        self.key = key
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.device: DevicePageId | None = device
        self.host = None
        self.load = self.save = None
        self.tail: Tail | None = None
        self.lock = self.children = self.children_device = self.hits = self.hits_given = 0
        self.used = used
        self.priority = priority
        self.tokens = b""
        """Its tokens, if somebody wants to be told of them."""
        self.fetched = False
        """The store brought it, and no request has used it since."""
        self.storing = self.stored = self.gone = False


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
        self.storing = self.stored = self.gone = False


Item = Page | Tail
"""Anything the tree caches."""


def parent_of(page: Page) -> Page:
    assert page.parent is not None, "the root is never asked for its parent"
    return page.parent


def device_of(page: Page) -> DevicePageId:
    assert page.device is not None
    return page.device


def inherit(parent: Page, page: Page) -> None:
    """A parent was used whenever its child was."""
    if page.used > parent.used:
        parent.used = page.used
    if page.priority > parent.priority:
        parent.priority = page.priority
    parent.hits += page.hits - page.hits_given
    page.hits_given = page.hits


# Who may go


def idle(item: Item) -> bool:
    """Held by no request and moved by no copy between device and host."""
    return item.lock == 0 and item.load is None and item.save is None


def page_may_leave_device(page: Page) -> bool:
    return page.device is not None and page.children_device == 0 and page.lock == 0 and page.load is None


def tail_may_leave_device(tail: Tail) -> bool:
    return tail.device is not None and tail.lock == 0 and tail.load is None


def may_leave_host(item: Item) -> bool:
    """Only what the host alone holds, and of pages only leaves without a tail in use."""
    if not (item.on_host and idle(item)) or item.storing:
        return False
    if isinstance(item, Tail):
        return item.device is None
    return item.device is None and item.children == 0 and (item.tail is None or idle(item.tail))
