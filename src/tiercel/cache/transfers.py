"""Transfers that a caller has asked for by name: into his own places, out of them, or by his own hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tiercel.errors import TransferError
from tiercel.tree.actions import Move
from tiercel.tree.node import Item, Page


@dataclass(eq=False)
class Transfer:
    """What was asked for together. Places the caller named belong to it until a `step` has told its end."""

    moves: list[Move] = field(default_factory=list)
    held: list[Item] = field(default_factory=list)
    """Locked on the host: what a load reads, and what the caller reads there himself until he lets go."""
    hold: bool = False
    writers: int = 1
    """Who has not yet said that he has written his part: the copier, the caller, or both."""
    error: TransferError | None = None

    def pages(self) -> Iterator[Move]:
        """The pages that move: `item.depth` tells which, `host` where they are on the host."""
        return (move for move in self.moves if isinstance(move.item, Page))

    def tails(self) -> Iterator[Move]:
        """The tails that move: `item.page.depth` tells at which boundary."""
        return (move for move in self.moves if not isinstance(move.item, Page))


@dataclass(frozen=True)
class Ended:
    """A transfer ended. With an error, a load's targets hold anything, and what was to be saved is not."""

    transfer: Transfer
    error: TransferError | None
