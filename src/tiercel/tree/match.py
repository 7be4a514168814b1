"""What the tiers hold of a text, and how far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tiercel.tree.node import Page, Tail
from tiercel.types import PageKey


class Match(NamedTuple):
    """What the tiers hold of a text. Counts are in pages from its start."""

    found: int
    """Pages in any tier."""

    device: int
    """Pages on the device, those a load is bringing included."""

    boundary: int
    """The longest prefix that can be resumed: all pages found, and the tails it needs."""

    page: Page
    """The page that ends at `boundary` (the root when it is 0)."""

    tails: tuple[Tail, ...]
    """The tails a resume at `boundary` reads, the last one first."""

    branch: int
    """Where this text leaves the others: a boundary that deserves a tail; 0 when it does not branch off."""


def prefix(keys: Sequence[PageKey], most: int, holds: Callable[[PageKey], bool]) -> int:
    """How many of the first `most` keys satisfy `holds`, which is true up to some key and false after it."""
    if most == 0 or holds(keys[most - 1]):
        return most
    low, high = 0, most - 1
    while low < high:
        middle = (low + high + 1) // 2
        if holds(keys[middle - 1]):
            low = middle
        else:
            high = middle - 1
    return low


def resumable(page: Page, pages_per_window: int, device_only: bool) -> tuple[Tail, ...]:
    """The tails of the deepest page with one on it and on enough pages before it, the last first. I6."""
    run: list[Tail] = []
    here: Page | None = page
    while here is not None:
        tail = here.tail
        if tail is None or (device_only and tail.device is None):
            run = []
        else:
            run.append(tail)
            if len(run) == pages_per_window or here.depth == 1:
                return tuple(run)
        here = here.parent
        while here is not None and here.tail is None and not run:
            here = here.parent
    return ()


def descendants(pages: Iterable[Page], page: Page) -> list[Page]:
    """Everything below a page. `pages` are all there are, parents before their children."""
    below = {page: None}
    for each in pages:
        if each.parent in below:
            below[each] = None
    return list(below)[1:]
