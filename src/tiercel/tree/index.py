"""The pages of a tree by key.

A large dict is copied when it is full: 44 ms for 700,000 pages, in which no request is served. So the keys
are in 256 small dicts, by their first byte (keys are digests, so all of them are about equally long). They
hold row numbers, not pages: the garbage collector does not visit a dict of bytes and numbers, and the lists
of rows are hidden from it (`collector`). One long list would be copied, too, when it is full: 4 ms.

    shards   0a: {0a31…: 2}            0b: {}   0c: {0cf2…: 0, 0c77…: 1}  …
    rows     0a: [None, None, page]    0b: []   0c: [page, page]          …    None: free for the next page
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, ValuesView
from itertools import chain

from tiercel.collector import hidden_list
from tiercel.tree.node import Page
from tiercel.types import PageKey


class Index(Mapping[PageKey, Page]):
    """The pages; their order has no meaning."""

    def __init__(self) -> None:
        self.shards: list[dict[PageKey, int]] = [{} for _ in range(256)]
        self.rows: list[list[Page | None]] = [hidden_list() for _ in range(256)]
        """For callers that can not afford a call for each page: `rows[key[0]][shards[key[0]][key]]`."""
        self._free: list[list[int]] = [hidden_list() for _ in range(256)]
        self._parts = [*zip(self.shards, self.rows, self._free, strict=True)]

    def add(self, page: Page) -> None:
        key = page.key
        shard, rows, free = self._parts[key[0]]
        if free:
            row = free.pop()
            rows[row] = page
        else:
            row = len(rows)
            rows.append(page)
        shard[key] = row

    def remove(self, page: Page) -> None:
        shard, rows, free = self._parts[page.key[0]]
        row = shard.pop(page.key)
        rows[row] = None
        free.append(row)

    def __getitem__(self, key: PageKey) -> Page:
        page = self.rows[key[0]][self.shards[key[0]][key]]
        assert page is not None
        return page

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key in self.shards[key[0]]

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def __iter__(self) -> Iterator[PageKey]:
        return chain.from_iterable(self.shards)

    def values(self) -> ValuesView[Page]:
        return _Pages(self)

    def __del__(self) -> None:
        """The tree is not used any more. A page and its tail know each other, and so do a page and its owner
        (by the owner's order): the collector does not see them, so they are separated here."""
        for page in self.values():
            page.tail = page.owner = None


class _Pages(ValuesView[Page]):
    """All pages, without a lookup for each."""

    _mapping: Index

    def __iter__(self) -> Iterator[Page]:
        return (page for page in chain.from_iterable(self._mapping.rows) if page is not None)
