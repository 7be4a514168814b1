"""One text's way from the store to the host.

    ASKING ── the store says what it has ──► PLANNING ── host places ──► READING ── all landed ──► OVER
       │                                        │                           │
       └──── nothing there, store off ──────────┴── not worth it, no room ──┴── too late, damaged ──► OVER

What was read becomes visible page by page from the front, as soon as everything before it has: so a fetch
that ends early has brought a prefix. It locks nothing: if what it goes on from has left meanwhile, it ends.
Host places of a read that nobody waits for any more come back when the read has ended, never before (I3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tiercel.policy.fetch import Held, Wanted
from tiercel.policy.resume import Why
from tiercel.transfer.operation import Operation, Presence, RecordPlace
from tiercel.tree.keys import KeyChain
from tiercel.tree.match import Match
from tiercel.tree.node import Page
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import HostPageId

READ_BYTES_MOST = 8 * 1024**2
READ_BYTES_LEAST = 256 * 1024
READS = 8
"""A fetch is cut into so many reads, within these sizes: enough to use every worker and to show how it
goes, few enough that a read is large."""


class FetchStage(Enum):
    ASKING = "asking"
    PLANNING = "planning"
    READING = "reading"
    OVER = "over"


@dataclass(eq=False)
class Fetch:
    """What is known of one text, and what is under way for it."""

    chain: KeyChain
    limit: int
    """Pages that would help."""
    replay: bool
    match: Match
    """What the nearer tiers had when the store was asked."""
    began_s: float
    wait_s: float = 0.0
    """How long it waits for its turn anyway, as far as known."""
    stage: FetchStage = FetchStage.ASKING
    why: Why | None = None
    """Why it brought less than the text has."""
    pages_stored: int = 0
    """Pages the store has, one after the other, behind those that were found."""
    tails_stored: frozenset[int] = frozenset()
    planned: bool = False
    """Somebody has looked at what the store said."""
    spared_tokens: int = 0
    """What it saves if all goes well."""
    depth: int = 0
    """Pages of the text that are published, or were found."""
    reads: list[Operation] = field(default_factory=list)
    """Not published yet, in the order of the text."""
    landed: set[Operation] = field(default_factory=set)
    """Those of them that have ended: they wait for the ones before."""
    bytes_held: int = 0
    """Of host memory, for this request's sake, until it begins or leaves."""
    moved_s: float = 0.0
    """When it last got on."""
    turn_s: float | None = None
    """When its request could have begun without it."""

    def held(self, tree: PrefixTree, match: Match) -> Held:
        """What the tree has of it now, beside what the store said."""
        stored = self.match.found + self.pages_stored - match.found
        path = self.chain.keys[: match.found]
        tails = frozenset(depth for depth, key in enumerate(path, 1) if tree.index[key].tail is not None)
        gone = match.found < self.match.found  # what was not asked for then is not known now
        return Held(match.boundary, match.found, 0 if gone else max(0, stored), tails, self.tails_stored)

    def pieces(self, held: Held, wanted: Wanted) -> Iterator[RecordPlace]:
        """What is to be read, in the order of the text: a tail follows its page."""
        tails = set(wanted.tails)
        for depth in range(1, wanted.upto + 1):
            key = self.chain.keys[depth - 1]
            if depth > held.found:
                yield RecordPlace(False, key)
            if depth in tails:
                yield RecordPlace(True, key)

    def publish(self, tree: PrefixTree) -> bool:
        """What has landed at the front becomes visible; False when the rest can not be used any more."""
        while self.reads and self.reads[0] in self.landed:
            read = self.reads.pop(0)
            good = [answer is Presence.HERE for answer in read.answers]
            pages_lost = [i for i, piece in enumerate(read.pieces) if not (good[i] or piece.tail)]
            whole = pages_lost[0] if pages_lost else len(good)
            if Presence.DAMAGED in read.answers:
                self.why = Why.STORE_DAMAGED
            elif not all(good) and read.error is not None:
                self.why = Why.STORE_OFF
            parent = self._page(tree, self.depth)
            if parent is None:
                give_back(tree, read.pieces)
                return False
            self._insert(tree, parent, list(zip(read.pieces, good, strict=True))[:whole])
            give_back(tree, read.pieces[whole:])
            if pages_lost:
                return False
        return True

    def _page(self, tree: PrefixTree, depth: int) -> Page | None:
        return tree.index.get(self.chain.keys[depth - 1]) if depth else tree.root

    def _insert(self, tree: PrefixTree, parent: Page, landed: Sequence[tuple[RecordPlace, bool]]) -> None:
        """Pages first, the tails hang on them."""
        pages = [piece for piece, _ in landed if not piece.tail]
        if pages:
            until = self.depth + len(pages)
            texts = self.chain.texts[self.depth : until] if self.chain.texts else [b""] * len(pages)
            named = [(page.key, page.host, text) for page, text in zip(pages, texts, strict=True)]
            tree.insert_fetched(parent, named)
            self.depth = until
        for piece, good in landed:
            page = tree.index.get(piece.key) if piece.tail else None
            if page is not None and good:
                tree.insert_fetched_tail(page, piece.host)
            elif piece.tail:
                tree.actions.host.extend(piece.host)

    def end(self, tree: PrefixTree, why: Why | None = None) -> None:
        """Nothing more is published. Places of reads under way come back when these have ended."""
        if self.stage is FetchStage.OVER:
            return
        self.stage = FetchStage.OVER
        self.why = why or self.why
        for read in self.reads:
            if read in self.landed:
                give_back(tree, read.pieces)
            else:
                read.cancel()
        self.reads = []

    def host_places(self) -> Iterator[HostPageId]:
        """Of reads that have ended and wait to be published."""
        for read in self.reads:
            if read in self.landed:
                for piece in read.pieces:
                    yield from piece.host


def give_back(tree: PrefixTree, pieces: Sequence[RecordPlace]) -> None:
    for piece in pieces:
        tree.actions.host.extend(piece.host)


def cut(pieces: Sequence[RecordPlace], bytes_of: dict[bool, int]) -> Iterator[list[RecordPlace]]:
    """One fetch as several reads."""
    total = sum(bytes_of[piece.tail] for piece in pieces)
    size = min(max(total // READS, READ_BYTES_LEAST), READ_BYTES_MOST)
    batch: list[RecordPlace] = []
    filled = 0
    for piece in pieces:
        if batch and filled + bytes_of[piece.tail] > size:
            yield batch
            batch, filled = [], 0
        batch.append(piece)
        filled += bytes_of[piece.tail]
    if batch:
        yield batch
