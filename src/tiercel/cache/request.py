"""A request as the cache sees it, and the outcomes of asking for something."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from tiercel.errors import TransferError
from tiercel.policy.resume import Reuse
from tiercel.tree.keys import KeyChain
from tiercel.tree.node import Item, Page, Tail
from tiercel.types import DevicePageId, DeviceTailId, place


class WaitFor(Enum):
    """What a request lacks. All but the last pass by themselves as requests end and transfers arrive."""

    DEVICE_PAGES = "device pages"
    DEVICE_TAILS = "device places for tails"
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
    """There is room. `tails` maps a boundary, in tokens, to the place the tail at it is to be written to."""

    tails: dict[int, DeviceTailId]


class RequestState(Enum):
    LOADING = "loading"
    RUNNING = "running"
    ENDED = "ended"


class Request:
    """One running text: its page table, what of it is shared, what it holds locked."""

    def __init__(self, chain: KeyChain, priority: int, reuse: Reuse, held: list[Item]) -> None:
        self.chain = chain
        self.priority = priority
        self.reuse = reuse
        self.state = RequestState.RUNNING
        self.table: list[DevicePageId] = []
        """Device pages of the text, shared ones first; behind `committed` they are this request's own."""
        self.held = held
        """What it has locked. First the deepest shared page: that protects the shared part of the table."""
        self.committed = self.page.depth
        self.resume_tails: tuple[Tail, ...] = ()
        """Tails to continue from, the last first: read them before the first `commit`."""
        self.tails: dict[int, DeviceTailId] = {}
        """Places for tails not shared yet, by boundary in pages."""
        self.tail_boundaries: frozenset[int] = frozenset()
        """Boundaries of the prompt that get a tail, in pages."""
        self.prompt_pages = 0
        self.extended_tokens = 0
        self.written_tokens = 0

    @property
    def page(self) -> Page:
        """The deepest shared page."""
        assert isinstance(self.held[0], Page)
        return self.held[0]

    def tail_places(self, page_tokens: int) -> list[tuple[int, int]]:
        """(boundary in tokens, device row) of the tails to continue from, the earliest first."""
        at = ((tail.page.depth, tail.device) for tail in reversed(self.resume_tails))
        return [(depth * page_tokens, place(device)) for depth, device in at if device is not None]

    def places(self) -> npt.NDArray[np.int32]:
        """The page table as row numbers of device memory."""
        return np.fromiter(map(place, self.table), np.int32, len(self.table))


@dataclass(frozen=True)
class Loaded:
    """The loads of a request ended; with an error the request ended too, and may begin again."""

    request: Request
    error: TransferError | None = None
