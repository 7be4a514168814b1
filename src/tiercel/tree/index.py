"""The pages of a tree by key.

A large dict is copied when it is full: 44 ms for 700,000 pages, in which nobody is served. So the keys are in
256 small dicts, by their first byte (keys are digests, so all of them are about equally long). They hold row
numbers, not pages: a dict of bytes and numbers is nothing that the garbage collector visits, and the list of
rows is hidden from it (`collector`).

    shards   0a: {0a31…: 2}  0b: {}  0c: {0cf2…: 0, 0c77…: 3}  …
    rows     page, None, page, page                                 None: free for the next page
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, ValuesView

from tiercel.collector import hidden_list
from tiercel.tree.node import Page
from tiercel.types import PageKey


class Index(Mapping[PageKey, Page]):
    """Pages in no order that counts."""

    def __init__(self) -> None:
        self.shards: list[dict[PageKey, int]] = [{} for _ in range(256)]
        self.rows: list[Page | None] = hidden_list()
        """For those who can not afford a call for each page: `rows[shards[key[0]][key]]`."""
        self._free: list[int] = hidden_list()

    def add(self, page: Page) -> None:
        if self._free:
            row = self._free.pop()
            self.rows[row] = page
        else:
            row = len(self.rows)
            self.rows.append(page)
        self.shards[page.key[0]][page.key] = row

    def remove(self, page: Page) -> None:
        row = self.shards[page.key[0]].pop(page.key)
        self.rows[row] = None
        self._free.append(row)

    def __getitem__(self, key: PageKey) -> Page:
        page = self.rows[self.shards[key[0]][key]]
        assert page is not None
        return page

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key in self.shards[key[0]]

    def __len__(self) -> int:
        return len(self.rows) - len(self._free)

    def __iter__(self) -> Iterator[PageKey]:
        return (page.key for page in self.rows if page is not None)

    def values(self) -> ValuesView[Page]:
        return _Pages(self)

    def __del__(self) -> None:
        """The tree is not used any more. A page and its tail know each other, and so do a page and its owner
        (by the owner's line): the collector does not see them, so they are parted here."""
        for page in self.rows:
            if page is not None:
                page.tail = page.owner = None


class _Pages(ValuesView[Page]):
    """Without a lookup for each."""

    _mapping: Index

    def __iter__(self) -> Iterator[Page]:
        return (page for page in self._mapping.rows if page is not None)
