"""One fetch: what is read for one text, from the store to the host.

    ASKING ── the store says what it has ──► PLANNING ── host places ──► READING ── all landed ──► OVER
       │                                        │                           │
       └──── nothing there, store off ──────────┴── not worth it, no room ──┴── too late, damaged ──► OVER

Pages that were read become visible from the front, each as soon as all pages before it are: so a fetch that
ends early has brought a prefix. A fetch locks nothing: if the page it continues has left meanwhile, it ends.
Host places of a read that nobody waits for come back when the read has ended, never before (I3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tiercel.policy.fetch import Held, Wanted
from tiercel.policy.resume import Why
from tiercel.transfer.mover import ItemPlace, Operation, Presence
from tiercel.tree.keys import KeyChain
from tiercel.tree.prefix_tree import Match, PrefixTree
from tiercel.types import Kind, PageKey

READ_BYTES_MOST = 8 * 1024**2
READ_BYTES_LEAST = 256 * 1024
READS = 8
"""A fetch is cut into this many reads, within these sizes: enough to use every worker and to show progress,
few enough that a read is large."""


class FetchStage(Enum):
    ASKING = "asking"
    PLANNING = "planning"
    READING = "reading"
    OVER = "over"


@dataclass(eq=False)
class Fetch:
    """What is known of one text in the store, and the reads under way for it."""

    chain: KeyChain
    limit: int
    """Pages that would help."""
    replay: bool
    match: Match
    """What the nearer tiers had when the store was asked."""
    expected_s: float
    """When the request is expected to want to begin."""
    moved_s: float
    """Time of the last progress."""
    stored: bool = True
    """Whether its pages are in our own store, and need not be written there again."""
    stage: FetchStage = FetchStage.ASKING
    turn_s: float | None = None
    """When the request could first have begun without the fetch."""
    why: Why | None = None
    """Why it brought less than the text has."""
    pages_stored: int = 0
    """Pages in the store that follow the found ones without a gap."""
    tails_stored: frozenset[int] = frozenset()
    spared_tokens: int = 0
    depth: int = 0
    """Pages of the text that were found, or are published."""
    reads: list[Operation] = field(default_factory=list)
    """Reads that are not published yet, in the order of the text."""
    landed: set[Operation] = field(default_factory=set)
    """Reads that have ended and wait for the reads before them."""
    coming: set[PageKey] = field(default_factory=set)
    """Pages that reads under way bring."""
    bytes_held: int = 0
    """Host memory that belongs to this request until it begins or leaves."""
    bytes_upto: int = 0
    """All bytes that were sent for any fetch up to the end of this one."""

    def held(self, tree: PrefixTree, match: Match) -> Held:
        """What the tree has of the text now, and what the store has in addition."""
        stored = self.match.found + self.pages_stored - match.found
        path = self.chain.keys[: match.found]
        tails = frozenset(depth for depth, key in enumerate(path, 1) if tree.index[key].tail is not None)
        gone = match.found < self.match.found  # the store was not asked for pages that have left since
        return Held(match.boundary, match.found, 0 if gone else max(0, stored), tails, self.tails_stored)

    def pieces(self, held: Held, wanted: Wanted) -> Iterator[ItemPlace]:
        """What is to be read, in the order of the text: a tail follows its page."""
        tails = set(wanted.tails)
        for depth, key in enumerate(self.chain.keys[: wanted.upto], 1):
            if depth > held.found:
                yield ItemPlace(Kind.PAGE, key)
            if depth in tails:
                yield ItemPlace(Kind.TAIL, key)

    def publish(self, tree: PrefixTree) -> bool:
        """Insert what has landed at the front. Returns False if the rest can not be used any more."""
        while self.reads and self.reads[0] in self.landed:
            read = self.reads.pop(0)
            if Presence.DAMAGED in read.answers:
                self.why = Why.STORE_DAMAGED
            elif Presence.MISSING in read.answers and read.error is not None:
                self.why = Why.STORE_OFF
            for number, (piece, answer) in enumerate(zip(read.pieces, read.answers, strict=True)):
                if answer is Presence.HERE and self._insert(tree, piece):
                    continue
                if piece.kind is Kind.PAGE:
                    give_back(tree, read.pieces[number:])
                    return False
                give_back(tree, [piece])
        return True

    def _insert(self, tree: PrefixTree, piece: ItemPlace) -> bool:
        """Insert one record. Returns False if the page that it belongs to or continues has left."""
        if piece.kind is Kind.TAIL:
            page = tree.index.get(piece.key)
            if page is not None:
                tree.insert_fetched_tail(page, piece.host, stored=self.stored)
            return page is not None
        parent = tree.index.get(self.chain.keys[self.depth - 1]) if self.depth else tree.root
        if parent is not None:
            tokens = self.chain.texts[self.depth] if self.chain.texts else b""
            brought = [(piece.key, piece.host, tokens)]
            tree.insert_fetched(parent, brought, stored=self.stored, owner=self.chain.owner)
            self.depth += 1
        return parent is not None

    def end(self, tree: PrefixTree, why: Why | None = None) -> None:
        """Publish nothing more. Places of reads under way come back when these reads have ended."""
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


def give_back(tree: PrefixTree, pieces: Sequence[ItemPlace]) -> None:
    for piece in pieces:
        tree.copies.actions.host.extend(piece.host)


def cut(pieces: Sequence[ItemPlace], bytes_of: Callable[[ItemPlace], int]) -> Iterator[list[ItemPlace]]:
    """Cut one fetch into several reads."""
    size = min(max(sum(map(bytes_of, pieces)) // READS, READ_BYTES_LEAST), READ_BYTES_MOST)
    batch: list[ItemPlace] = []
    filled = 0
    for piece in pieces:
        if batch and filled + bytes_of(piece) > size:
            yield batch
            batch, filled = [], 0
        batch.append(piece)
        filled += bytes_of(piece)
    if batch:
        yield batch
