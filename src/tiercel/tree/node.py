"""The two things that the tree caches, pages and tails, and what the tree says of them.

    page   one node of the tree; its parent is the page before it in the text
    tail   hangs on the page after which it continues

Both have one copy in each of two pools, the device's and the host's: places, and what is filling them. The
copies are fields, not objects: there are millions of pages, and an object per copy makes `insert` half as
slow again.

    device   load     meaning                       host   save     meaning
    None     None     not on the device             None   None     not on the host
    ids      number   a load is filling it          ids    ids      a save is filling it
    ids      None     readable                      ids    None     readable

On the device, a page has one id and a tail a tuple of them. Where the device has two pools, a page has a
tuple too: its place in the first pool, and mostly one in the second. A page without the second is sparse: a
part of it is read on the host.

The number is the batch that a load travels with. The ids of `save` are the device places that a save reads:
the page may leave the device before the save ends, and may even be back at another place by then. FOREIGN
stands for a place that is not ours: another engine or a peer fills the host copy.

The garbage collector does not visit pages and tails (`collector`). Those that have left the tree are part of
no circle: a page that is gone knows no tail.

A page with `device` set has a parent with `device` set: what the device holds of a text is a prefix of it. A
tail with `device` set hangs on a page with `device` set: of both, the tail leaves the device first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Protocol

from tiercel.policy.placement import Boundary
from tiercel.policy.worth import Chance
from tiercel.types import DevicePageId, HostPageId, Kind, PageKey, Tier

FOREIGN = -1


@dataclass(eq=False, repr=False, slots=True)
class Cached:
    """What pages and tails have in common: a copy in each pool, and their use (see `policy.evict.Used`)."""

    kind: ClassVar[Kind]
    device: Any
    used: int
    priority: int
    host: tuple[HostPageId, ...] | None = field(default=None, init=False)
    load: int | None = field(default=None, init=False)
    save: Any = field(default=None, init=False)
    hits: int = field(default=0, init=False)
    lock: int = field(default=0, init=False)
    children: int = field(default=0, init=False)
    children_device: int = field(default=0, init=False)
    """Children that the device holds, the page's own tail among them. A tail has none."""
    readers: int = field(default=0, init=False)
    """Writes to the store and leases of peers that read the host copy: it stays until they have ended."""
    stored: bool = field(default=False, init=False)
    """The store had it. Whether it still does is not known: others use the store too."""
    gone: bool = field(default=False, init=False)
    in_device: int = field(default=0, init=False)
    in_host: int = field(default=0, init=False)
    in_owner: int = field(default=0, init=False)
    """Its place in the order of what may leave the device, the host, or all tiers for its owner; 0: in none.
    (In fields, because a table of a million places is copied whenever it is full.)"""
    double: int = field(default=0, init=False)
    """Its place among the items that device and host can both read."""

    @property
    def on_device(self) -> bool:
        """Readable on the device."""
        return self.device is not None and self.load is None

    @property
    def on_host(self) -> bool:
        """Readable on the host."""
        return self.host is not None and self.save is None


class ItemOwner(Protocol):
    """Is told of the bytes of pages and tails (`tree.owners`)."""

    @property
    def keeps(self) -> bool: ...

    def count(self, tier: Tier, kind: Kind, items: int) -> None: ...

    def offer(self, item: Item) -> None: ...


@dataclass(eq=False, repr=False, slots=True)
class Page(Cached):
    """A page in the tree. Locking it protects its whole path: only leaves are ever evicted."""

    kind: ClassVar[Kind] = Kind.PAGE
    key: PageKey
    parent: Page | None
    depth: int
    tail: Tail | None = field(default=None, init=False)
    hits_given: int = field(default=0, init=False)
    """Hits that the parent has inherited already."""
    tokens: bytes = field(default=b"", init=False)
    """Its tokens, if an observer wants them."""
    fetched: bool = field(default=False, init=False)
    """The store brought it, and no request has used it since."""
    owner: ItemOwner | None = field(default=None, init=False)
    """Whose page it is; None: no owner."""


@dataclass(eq=False, repr=False, slots=True)
class Tail(Cached):
    """What is needed besides the pages to continue after `page`."""

    kind: ClassVar[Kind] = Kind.TAIL
    page: Page
    boundary: Boundary
    chance: Chance | None = field(default=None, init=False)
    """Its class, if its worth is used (`policy.worth`), and since when it has this class."""
    since: int = field(default=0, init=False)

    @property
    def owner(self) -> ItemOwner | None:
        return self.page.owner


Item = Page | Tail
"""Anything the tree caches."""


depth_of = attrgetter("depth")
"""The depth of a page. In the order of depths, parents come before their children."""


def parent_of(page: Page) -> Page:
    assert page.parent is not None, "the root is never asked for its parent"
    return page.parent


def inherit(parent: Page, page: Page) -> None:
    """A parent was used whenever its child was."""
    if page.used > parent.used:
        parent.used = page.used
    if page.priority > parent.priority:
        parent.priority = page.priority
    parent.hits += page.hits - page.hits_given
    page.hits_given = page.hits


def ids_of(device: Any) -> tuple[DevicePageId, ...]:
    """The places of a page or tail on the device, all in a tuple."""
    return device if isinstance(device, tuple) else (device,)


def idle(item: Item) -> bool:
    """Held by no request and moved by no copy between device and host."""
    return item.lock == 0 and item.load is None and item.save is None


def may_leave_device(item: Item) -> bool:
    return item.device is not None and item.children_device == 0 and item.lock == 0 and item.load is None


def may_leave_host(item: Item) -> bool:
    """Whether only the host holds the item and, if it is a page, it is a leaf without a tail in use."""
    if item.device is not None or item.children or item.readers or not (item.on_host and idle(item)):
        return False
    return isinstance(item, Tail) or item.tail is None or idle(item.tail)


# What the tree has decided, and others must do or may want to know


class Move(NamedTuple):
    """One page or tail on its way between the tiers, and the places it goes between."""

    item: Item
    device: Any
    """The id of a page, or the ids of a tail; a page may have several ids too."""
    host: tuple[HostPageId, ...]

    @property
    def near(self) -> tuple[int, ...]:
        """All its places on the device."""
        return ids_of(self.device)


class Event(NamedTuple):
    """Something became readable in a tier, or is no longer there."""

    stored: bool
    tier: Tier
    kind: Kind
    key: PageKey
    parent: PageKey = PageKey(b"")
    """The key of the page before it; empty for the first page of a text."""
    tokens: bytes = b""
    """The tokens of the page as little-endian uint32; empty where they are not known."""


def event(stored: bool, tier: Tier, item: Item) -> Event:
    page = item.page if isinstance(item, Tail) else item
    parent = page.parent.key if page.parent is not None else PageKey(b"")
    return Event(stored, tier, item.kind, page.key, parent, page.tokens)


class Cleared(NamedTuple):
    """Nothing of what a tier held is there any more."""

    tier: Tier


@dataclass
class Actions:
    """What the tree has decided and someone else must do."""

    device: list[DevicePageId] = field(default_factory=list)
    """Places to be given back."""
    leaving: list[DevicePageId] = field(default_factory=list)
    """Places that will be given back when a save has ended."""
    host: list[HostPageId] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)
