"""What a cache holds and has moved, in true bytes, and checks that its counts are right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from tiercel.cache.request import all_ids
from tiercel.pages.frames import Frames
from tiercel.pages.pool import PagePool
from tiercel.spec.cache_spec import CacheSpec
from tiercel.transfer.plan import NO_PLACE, Direction
from tiercel.tree import check as tree_check
from tiercel.tree.node import ids_of
from tiercel.tree.owners import ItemBytes, Owner
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import Kind, Tier

if TYPE_CHECKING:
    from tiercel.cache.core import Core
    from tiercel.cache.request import Request

LEAVES = {
    Tier.DEVICE: ("room", "limit", "path"),
    Tier.HOST: ("room", "limit", "path"),
    Tier.STORE: ("room",),
}
"""Reasons why an item leaves a tier."""

WORDS = {Direction.LOAD: "loaded", Direction.SAVE: "saved"}


@dataclass(frozen=True)
class StoreStats:
    """An attached store. What is not known is None."""

    state: str
    """The state of the breaker: working, off or trying."""
    refused: bool
    """Whether it did not keep the last write, although it works: it is full, or has no memory."""
    saved_bytes: int
    read_bytes: int
    read_bytes_s: float | None
    compute_tokens_s: float | None
    queued_bytes: int
    flaws: Mapping[str, int]
    """Records that were not what was asked for, by flaw."""
    counters: Mapping[str, int]
    records: int | None
    bytes: int | None
    store: Mapping[str, Any]
    """The store's own statistics."""


@dataclass(frozen=True)
class PoolStats:
    capacity: int
    free: int


@dataclass(frozen=True)
class CacheStats:
    """Numbers updated with every change, so `stats` costs the same however much is cached."""

    identity: Mapping[str, str]
    cached_bytes: Mapping[str, Mapping[str, int]]
    """Bytes of each tier and stream."""
    cached_items: Mapping[str, Mapping[str, int]]
    """Pages and tails of each tier."""
    capacity_bytes: Mapping[str, int]
    """Bytes of the pools of each tier."""
    tail_streams: Sequence[str]
    """The streams of tails; all others are streams of pages."""
    moved_bytes: Mapping[str, Mapping[str, int]]
    """Bytes that were `loaded` and `saved`, of each stream."""
    moved_s: Mapping[str, Mapping[str, float]]
    """Time spent copying, by `loaded` and `saved`, and by pages and tails."""
    hit_tokens: Mapping[str, int]
    """Prompt tokens that each tier supplied. Tokens that were computed again are not among them."""
    compute_saved_s: float
    """How long computing these tokens would have taken: the sum over requests, estimated when each began."""
    evicted: Mapping[str, Mapping[str, Mapping[str, int]]]
    """What left a tier: by tier, by pages and tails, and by reason (`tree.copies`)."""
    pools: Mapping[str, PoolStats]
    compute_tokens_s: float | None
    """Recent speed of computing prompts; None: nothing was computed yet."""
    copier: str
    """The way of copying between device and host; empty without a host tier."""
    store: StoreStats | None
    counters: Mapping[str, int]
    owners: Mapping[str, Mapping[str, int]] = field(default_factory=dict, kw_only=True)
    """Bytes on device and host of each owner (`tree.owners`), and its limit, if it has one."""
    sparse: Mapping[str, int] | None = field(default=None, kw_only=True)
    """Pages of running texts, each text for itself: whole on the device, or sparse; places of their hot rows.
    An engine adds what its model read on the host. None: all pages of running texts are always whole."""


def stats(cache: Core) -> CacheStats:
    counters, controller = cache.counters, cache.controller
    device, host = cache.tree.copies.on_device, cache.tree.copies.on_host
    seconds = controller.tickets.seconds if controller else {}
    pages, host_pages = pools = cache.places.pages, cache.places.host
    device_spec, pages_here = cache.device_spec, device[Kind.PAGE]
    parts_here = [pages_here, pages_here - cache.tree.copies.sparse]
    return CacheStats(
        identity={**asdict(cache.identity), "share": cache.identity.share},
        cached_bytes={
            "device": _bytes_by_stream(device_spec, pages_here, device[Kind.TAIL], parts_here),
            "host": _bytes_by_stream(cache.spec, host[Kind.PAGE], host[Kind.TAIL]),
        },
        cached_items={
            "device": {"pages": pages_here, "tails": device[Kind.TAIL]},
            "host": {"pages": host[Kind.PAGE], "tails": host[Kind.TAIL]},
        },
        capacity_bytes={
            "device": pages.capacity * device_spec.unit_bytes,
            "host": host_pages.capacity * cache.spec.place_bytes,
        },
        tail_streams=[stream.name for stream in cache.spec.tail_streams],
        moved_bytes={
            word: _bytes_by_stream(device_spec, counters[f"pages_{word}"], counters[f"tails_{word}"], parts)
            for word, parts in (("loaded", cache.flights.parts_loaded), ("saved", None))
        },
        moved_s={WORDS[direction]: dict(spent) for direction, spent in seconds.items()},
        hit_tokens={tier.value: counters[f"tokens_{tier.value}"] for tier in Tier},
        compute_saved_s=cache.compute_saved_s,
        evicted=_evicted(cache.tree),
        compute_tokens_s=cache.compute.per_s,
        copier=controller.how if controller else "",
        pools={pool.name: PoolStats(pool.capacity, pool.free) for pool in pools},
        store=cache.stores.attached.stats() if cache.stores.attached else None,
        counters=dict(counters),
        owners={name: _owned(owner) for name, owner in cache.tree.owners.all.items()},
    )


def _evicted(tree: PrefixTree) -> dict[str, dict[str, dict[str, int]]]:
    """All counters are there from the start, as 0."""
    return {
        tier.value: {
            kind.plural: {why: tree.copies.evicted[tier, kind, why] for why in whys} for kind in Kind
        }
        for tier, whys in LEAVES.items()
    }


def _owned(owner: Owner) -> dict[str, int]:
    held = {f"{tier.value}_bytes": count for tier, count in owner.bytes.items()}
    return held if owner.bytes_most is None else held | {"bytes_most": owner.bytes_most}


def item_bytes(device: CacheSpec, host: CacheSpec) -> ItemBytes:
    """Bytes of a page and of a tail on the device and on the host."""
    return {
        (tier, kind): sum(_bytes_by_stream(spec, *counts).values())
        for tier, spec in ((Tier.DEVICE, device), (Tier.HOST, host))
        for kind, counts in ((Kind.PAGE, (1, 0)), (Kind.TAIL, (0, 1)))
    }


def _bytes_by_stream(
    spec: CacheSpec, pages: int, tails: int, parts: Sequence[int] | None = None
) -> dict[str, int]:
    """`parts`: where a page has two parts, the number of pages with each of them; None: all have both."""
    own = [pages] * len(spec.pools) if parts is None or not spec.second else parts
    counts = [(stream, own[spec.pool_of(stream)]) for stream in spec.page_streams]
    counts += [(stream, tails) for stream in spec.tail_streams]
    return {stream.name: count * spec.bytes_of(stream) for stream, count in counts}


def check(cache: Core) -> None:
    """Check every invariant of the tree, of the host pool and of the fetches."""
    tree_check.check(cache.tree)
    _check_owners(cache.places.host, _host_owners(cache))
    for store in cache.stores.all():
        store.fetches.check()
        store.writes.check()


def _check_owners(pool: PagePool[Any] | Frames[Any], owned: Iterable[int]) -> None:
    """I4: a place has one owner, the tree, a request or a transfer."""
    pool.check()
    assert sorted(owned) == sorted(pool.owned_ids()), f"I4: owners of {pool.name}"


def _host_owners(cache: Core) -> Iterator[int]:
    for item in cache.tree.items():
        yield from item.host or ()
    landing = (move for transfer in cache.landings.transfers for move in transfer.moves)
    for move in {id(move.item): move for move in (*cache.flights.moves(), *landing)}.values():
        if move.item.gone:
            yield from move.host
    read = {*cache.leases.items(), *(item for store in cache.stores.all() for item in store.writes.items())}
    for item in read:
        if item.gone and item.load is None:  # a load that reads it was counted above
            yield from item.host or ()
    for store in cache.stores.all():
        yield from store.fetches.host_places()


def check_device(cache: Core, requests: Iterable[Request], others: Iterable[int] = ()) -> None:
    """Check the invariants of the device pool. `others`: places that belong to no page and no text."""
    owned: list[int] = [*others]
    for item in cache.tree.items():
        if item.device is not None:
            owned += ids_of(item.device)
    for request in requests:
        owned += all_ids(request.table[request.committed :])
        owned += chain.from_iterable(request.tails.values())
        owned += request.hot
        if cache.places.pools > 1:
            table = enumerate(request.table[: request.committed])
            sparse = {at for at, places in table if len(ids_of(places)) == 1}
            assert sparse == request.sparse, "I2: a text knows its sparse pages"
            assert not sparse or request.hot, "I2: a text that reads sparse pages has hot rows"
            assert len(sparse) <= cache.config.staged_pages, "I2: a step can stage all that a text has sparse"
    for move in cache.flights.moves():
        if NO_PLACE in move.near:
            continue  # a part of a page comes back: its place is one of `others`
        if move.item.gone or move.item.device != move.device:
            owned += move.near
    _check_owners(cache.places.pages, owned)
