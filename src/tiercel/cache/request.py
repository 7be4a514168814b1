"""What a cache works on (requests and transfers) and what its calls return (what was found, and outcomes)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

from tiercel.errors import TransferError
from tiercel.policy.placement import Boundary
from tiercel.policy.resume import Reuse, Why, choose_resume, tokens_by_tier
from tiercel.spec.cache_spec import CacheSpec
from tiercel.tree.keys import KeyChain
from tiercel.tree.node import Item, Move, Page, Tail, ids_of
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import PLACE_MASK, DevicePageId, place

PagePlaces = DevicePageId | tuple[DevicePageId, ...]
"""Where a page is on the device. With two pools: its place in each, or in the first alone."""

TailPlaces = tuple[DevicePageId, ...]
"""The device places that a tail is kept in."""


class WaitFor(Enum):
    """What a request lacks. All but the last come by themselves, as requests end and transfers arrive."""

    DEVICE_PAGES = "device pages"
    LEAVING = "device pages that are free as soon as what leaves them has been saved"
    ARRIVING = "a transfer that is bringing or taking what it wants to reuse"
    STORE = "what the store is bringing, as long as that is sooner than computing it"
    COMPUTING = "pages that another request is computing, which is sooner than computing them twice"
    FOUND_LEFT = "something that was found, and has left since: find it again"
    LARGER_DEVICE = "more device pages than there are"


@dataclass(frozen=True)
class Wait:
    """Not now. Nothing is held, and what was evicted to make room stays evicted. Ask again after a `step`."""

    what: WaitFor
    missing: int = 0


@dataclass(frozen=True)
class Extended:
    """There is room. `tails` maps a boundary, in tokens, to the places where its tail is to be kept."""

    tails: dict[int, TailPlaces]


class RequestState(Enum):
    LOADING = "loading"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False)
class Request:
    """One running text: its page table, which pages of it are shared, what it holds locked."""

    chain: KeyChain
    priority: int
    reuse: Reuse
    held: list[Item]
    """Locked items. First the deepest shared page: its lock protects the shared part of the table."""
    prompt_pages: int
    committed: int
    """How many pages of the table are shared."""
    extended_tokens: int
    tails_upto: int
    """In pages: up to here, places for tails were asked for, or no tail is to be written."""
    table: list[PagePlaces]
    """Device places of the text's pages, shared ones first; behind `committed` they are the request's own."""
    resume_tails: tuple[Tail, ...]
    """Tails to continue from, the last first: read them before the first `commit`."""
    tail_boundaries: dict[int, Boundary]
    """Boundaries of the prompt that get a tail, in pages, and why."""
    for_others: bool = False
    """Other servers read its prompt on the host."""
    state: RequestState = RequestState.RUNNING
    tails: dict[int, TailPlaces] = field(default_factory=dict)
    """Places for tails not shared yet, by boundary in pages."""
    written_tokens: int = 0
    load: int | None = None
    """The number of the transfer that brings what it reuses, once the transfer was sent."""
    sparse: set[int] = field(default_factory=set)
    """The numbers of its shared pages that are without a place in the second pool (`cache.residency`)."""
    left: int = 0
    """Pages before this number are sparse."""
    hot: tuple[DevicePageId, ...] = ()
    """Places of the second pool for single entries of its sparse pages."""
    hot_changed: bool = False
    changed: set[int] = field(default_factory=set)
    """Numbers of pages whose places are others than the last step was told."""
    bare: int = 0
    """How many pages at the end of the table have no place in the second pool yet. They get one before they
    are computed."""

    @property
    def page(self) -> Page:
        """The deepest shared page."""
        assert isinstance(self.held[0], Page)
        return self.held[0]

    def tail_places(self, page_tokens: int) -> list[tuple[int, tuple[int, ...]]]:
        """(boundary in tokens, device rows) of the tails to continue from, the earliest first."""
        at = ((tail.page.depth, tail.device) for tail in reversed(self.resume_tails))
        return [(depth * page_tokens, tuple(map(place, ids))) for depth, ids in at if ids is not None]


def rows_of(
    table: Sequence[PagePlaces], pools: int, host: Callable[[int], int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """A part of a page table as row numbers of device memory: a row for each pool. A page without a place in
    the second pool has -1 there. `host`: tells where such a page is on the host, by its number in this part;
    that is one more row, with -1 for all other pages."""
    if pools == 1:
        return (tuple(map(place, cast(Sequence[int], table))),)
    ids = list(map(ids_of, table))
    firsts = tuple([each[0] & PLACE_MASK for each in ids])
    seconds = tuple([each[1] & PLACE_MASK if len(each) > 1 else -1 for each in ids])
    if host is None:
        return firsts, seconds
    return firsts, seconds, tuple([host(i) if second < 0 else -1 for i, second in enumerate(seconds)])


def all_ids(table: Iterable[PagePlaces]) -> list[DevicePageId]:
    """All places of these pages."""
    return [each for places in table for each in ids_of(places)]


@dataclass(frozen=True)
class Loaded:
    """The loads of a request ended; with an error the request ended too, and may begin again."""

    request: Request
    error: TransferError | None = None


@dataclass(eq=False)
class Transfer:
    """Loads or saves that a caller asked for together. The caller's places belong to the transfer until
    `step` has returned its end."""

    moves: list[Move] = field(default_factory=list)
    held: list[Item] = field(default_factory=list)
    """Locked on the host: what a load reads, and what the caller reads there until `release`."""
    hold: bool = False
    writers: int = 1
    """How many have not finished writing their part: the copier, the caller, or both."""
    error: TransferError | None = None

    def pages(self) -> Iterator[Move]:
        """The pages that move: `item.depth` tells which, `host` where they are on the host."""
        return (move for move in self.moves if isinstance(move.item, Page))

    def tails(self) -> Iterator[Move]:
        """The tails that move: `item.page.depth` tells at which boundary."""
        return (move for move in self.moves if not isinstance(move.item, Page))


@dataclass(frozen=True)
class Ended:
    """A transfer ended. With an error, the targets of a load hold undefined bytes, and nothing was saved."""

    transfer: Transfer
    error: TransferError | None


@dataclass(frozen=True)
class Found:
    """What a request is going to reuse.

    root ── ■ ── ■ ── ■ ── □ ── □            ■ on the device, □ on the host only
                   near │       │ page       where the device's part ends, where the reused part ends
    """

    chain: KeyChain
    page: Page
    near: Page
    far: list[Page]
    tails: tuple[Tail, ...]
    branch: int
    pages_found: int
    """Pages in any tier; without a tail not all of them help."""
    reuse: Reuse

    @property
    def pages(self) -> int:
        return self.page.depth

    @property
    def items(self) -> list[Item]:
        """Everything that the reuse depends on. Pages before `near` are there when `near` is."""
        near = [self.near] if self.near.parent else []
        return [*near, *self.far, *self.tails]


def find(
    tree: PrefixTree, spec: CacheSpec, chain: KeyChain, *, load: bool, replay: bool, most: int | None = None
) -> Found:
    """The longest prefix to resume from, of at most `most` tokens. The last token is always computed."""
    whole, limit = pages_useful(chain, spec), pages_useful(chain, spec, most)
    match, page_tokens = tree.match(chain.keys, limit, device_only=not load), spec.page_tokens
    found_tokens = match.found * page_tokens
    cost = None if spec.replay_tokens is None else min(spec.replay_tokens, found_tokens)
    resume = choose_resume(
        found=match.found,
        boundary=match.boundary,
        page_tokens=page_tokens,
        replay_cost=cost if replay else None,
    )
    pages = [tree.index[key] for key in chain.keys[: resume.pages]]
    near = min(match.device, resume.pages)
    if resume.pages < match.found:
        why = Why.NO_TAIL
    elif resume.pages == limit:
        complete = Why.REPLAYED if resume.replay_tokens else Why.COMPLETE
        why = complete if limit == whole else Why.NOT_WANTED
    else:
        why = Why.NOT_ON_DEVICE if chain.keys[resume.pages] in tree.index else Why.NOT_CACHED
    fetched, replay_tokens = [page.fetched for page in pages[near:]], resume.replay_tokens
    supplied = tokens_by_tier(near, fetched, page_tokens=page_tokens, replay_tokens=replay_tokens)
    return Found(
        chain=chain,
        page=pages[-1] if pages else tree.root,
        near=pages[near - 1] if near else tree.root,
        far=pages[near:],
        tails=() if resume.by_replay else match.tails,
        branch=match.branch,
        pages_found=match.found,
        reuse=Reuse(
            chain.tokens,
            *supplied,
            found_tokens=found_tokens,
            replay_tokens=replay_tokens,
            replay_cost_tokens=cost,
            why=why,
        ),
    )


def pages_useful(chain: KeyChain, spec: CacheSpec, most: int | None = None) -> int:
    """Pages that help if they are cached: at least the last token is always computed."""
    tokens = max(0, chain.tokens - 1)
    return (tokens if most is None else min(tokens, most)) // spec.page_tokens


def find_nothing(tree: PrefixTree, chain: KeyChain) -> Found:
    """An empty result, for a cache that is told to miss."""
    reuse = Reuse(chain.tokens, 0, 0, 0, 0, 0, None, Why.FORCED_MISS)
    return Found(chain, tree.root, tree.root, [], (), 0, 0, reuse)
