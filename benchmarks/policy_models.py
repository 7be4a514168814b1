"""Bounds for `benchmarks.policy`: models of one tier that know the future.

oracle     LRU; tails only where a later request resumes, as long as one will
no_tails   LRU; no tail is needed, as with full attention
belady     no tail is needed, and the page that is used again last is evicted first: no policy can do better
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf

from tiercel.replay.trace import Trace
from tiercel.types import PageKey


def useful_pages(prompt_tokens: int, page_tokens: int) -> int:
    """The last token of a prompt is always computed."""
    return (prompt_tokens - 1) // page_tokens


class Node:
    """A page, or the tail on it (then `tail_of` is the page)."""

    __slots__ = ("children", "here", "key", "parent", "tail", "tail_of", "used")

    def __init__(self, key: PageKey | None, parent: Node | None, used: float, tail_of: Node | None = None):
        self.key, self.parent, self.used, self.tail_of = key, parent, used, tail_of
        self.children, self.here = 0, True
        self.tail: Node | None = None


class Model:
    """One tier of `capacity` pages, leaves leave first. Lower `used` goes first."""

    def __init__(self, capacity: int, tail_pages: int) -> None:
        self.root = Node(None, None, inf)
        self.index: dict[PageKey, Node] = {}
        self.heap: list[tuple[float, int, Node]] = []
        self.capacity, self.tail_pages, self.taken, self._serial = capacity, tail_pages, 0, 0

    def offer(self, node: Node) -> None:
        self._serial += 1
        heappush(self.heap, (node.used, self._serial, node))
        if len(self.heap) > 1000 + 8 * (len(self.index) + 1):
            self.heap = [entry for entry in self.heap if entry[2].here and entry[0] == entry[2].used]
            heapify(self.heap)

    def make_room(self, pages: int, keep: Node) -> bool:
        while self.taken + pages > self.capacity:
            kept = []
            while self.heap:
                used, _, node = heappop(self.heap)
                if not node.here or node.children or node is self.root or used != node.used:
                    continue
                if node is keep or node is keep.tail:
                    kept.append(node)
                    continue
                break
            else:
                node = self.root
            for each in kept:
                self.offer(each)
            if node is self.root:
                return False
            self.remove(node)
        return True

    def remove(self, node: Node) -> None:
        node.here = False
        page = node.tail_of
        if page is not None:
            self.taken -= self.tail_pages
            page.tail = None
            if not page.children:
                self.offer(page)
            return
        if node.tail is not None:
            self.remove(node.tail)
        self.taken -= 1
        assert node.key is not None and node.parent is not None
        del self.index[node.key]
        parent = node.parent
        parent.children -= 1
        if not parent.children and parent is not self.root:
            self.offer(parent)


def resumed_at(trace: Trace) -> dict[PageKey, list[int]]:
    """Where requests would resume if nothing was ever evicted: the page, and the numbers of the requests."""
    seen: set[PageKey] = set()
    needed: dict[PageKey, list[int]] = {}
    for number, request in enumerate(trace.requests):
        depth = 0
        for key in request.keys[: useful_pages(request.prompt_tokens, trace.page_tokens)]:
            if key not in seen:
                break
            depth += 1
        if depth:
            needed.setdefault(request.keys[depth - 1], []).append(number)
        seen.update(request.keys)
    return needed


class Lru(Model):
    """`needed`: where tails are kept, from `resumed_at`; None: no tail is needed."""

    def __init__(self, capacity: int, tail_pages: int, needed: dict[PageKey, list[int]] | None) -> None:
        super().__init__(capacity, tail_pages)
        self.needed = needed

    def resume(self, number: int, keys: Sequence[PageKey]) -> tuple[Node, int]:
        """The page that a request resumes after, and how many pages that are."""
        page, found, depth = self.root, self.root, 0
        for position, key in enumerate(keys, 1):
            if key not in self.index:
                break
            page = self.index[key]
            page.used = number
            if self.needed is None or page.tail is not None:
                found, depth = page, position
        if found.tail is not None:
            found.tail.used = number
            self.offer(found.tail)
            if not self._needed_after(found.key, number):
                self.remove(found.tail)
        return found, depth

    def grow(self, number: int, page: Node, keys: Sequence[PageKey]) -> None:
        for key in keys:
            following = self.index.get(key)
            if following is None:
                if not self.make_room(1, page):
                    break
                following = self.index[key] = Node(key, page, number)
                page.children += 1
                self.taken += 1
            following.used = number
            page = following
            wanted = page.tail is None and self._needed_after(key, number)
            if wanted and self.make_room(self.tail_pages, page):
                page.tail = Node(None, None, number, page)
                self.taken += self.tail_pages
                self.offer(page.tail)
        if page is not self.root and not page.children:
            self.offer(page)

    def _needed_after(self, key: PageKey | None, number: int) -> bool:
        return self.needed is not None and key in self.needed and self.needed[key][-1] > number


def lru(trace: Trace, capacity: int, tail_pages: int, needed: dict[PageKey, list[int]] | None) -> float:
    """Token hit ratio."""
    model, asked, hit = Lru(capacity, tail_pages, needed), 0, 0
    for number, request in enumerate(trace.requests):
        useful = useful_pages(request.prompt_tokens, trace.page_tokens)
        page, depth = model.resume(number, request.keys[:useful])
        asked += request.prompt_tokens
        hit += depth * trace.page_tokens
        model.grow(number, page, request.keys[depth:])
    return hit / asked


def belady(trace: Trace, capacity: int) -> float:
    """Token hit ratio of the best policy for pages. The pages before a page are used with it, so leaves are
    used again last, and leave first by themselves."""
    uses: dict[PageKey, list[int]] = {}
    for number, request in enumerate(trace.requests):
        for key in request.keys:
            uses.setdefault(key, []).append(number)
    held: dict[PageKey, float] = {}
    heap: list[tuple[float, int, PageKey]] = []
    asked = hit = 0
    for number, request in enumerate(trace.requests):
        depth = 0
        for key in request.keys[: useful_pages(request.prompt_tokens, trace.page_tokens)]:
            if key not in held:
                break
            depth += 1
        asked += request.prompt_tokens
        hit += depth * trace.page_tokens
        for position, key in enumerate(request.keys):
            following = bisect_right(uses[key], number)
            next_use = uses[key][following] if following < len(uses[key]) else inf
            held[key] = next_use
            heappush(heap, (-next_use, -position, key))
        while len(held) > capacity:
            next_use, _, key = heappop(heap)
            if held.get(key) == -next_use:
                del held[key]
    return hit / asked
