"""One factory per noun, with tiny numbers."""

from __future__ import annotations

from itertools import count

from tiercel.policy.evict import make_evict_policy
from tiercel.spec.identity import Identity
from tiercel.tree.keys import KeyChain
from tiercel.tree.prefix_tree import PrefixTree
from tiercel.types import DevicePageId, HostPageId, PageKey

IDENTITY = Identity("model").digest


def make_keys(text: str, namespace: tuple[str, ...] = ()) -> list[PageKey]:
    """One letter is one page."""
    chain = KeyChain(IDENTITY, namespace, page_tokens=1)
    chain.extend([ord(letter) for letter in text])
    return chain.keys


class TreeDriver:
    """A tree with made-up places: texts are words, a letter is a page."""

    def __init__(self, *, evict: str = "lru", host_pages: int = 0, **options: int) -> None:
        self.tree = PrefixTree(evict=make_evict_policy(evict), **options)
        self.ids = count(1)
        self.host_free = host_pages

    def add(self, text: str, *, priority: int = 0) -> None:
        """Compute what is missing of a text and insert it, as a request would."""
        keys = make_keys(text)
        match = self.tree.match(keys, len(keys))
        start = match.device
        page = self.tree.index[keys[start - 1]] if start else self.tree.root
        ids = [DevicePageId(next(self.ids)) for _ in keys[start:]]
        self.tree.insert(page, keys[start:], ids, priority)

    def add_tail(self, text: str, *, places: int = 1) -> None:
        self.tree.insert_tail(self.page(text), tuple(DevicePageId(next(self.ids)) for _ in range(places)))

    def page(self, text: str):
        return self.tree.index[make_keys(text)[-1]]

    def find(self, text: str, *, priority: int = 0):
        """A request that looks a text up and uses what it finds."""
        match = self.match(text)
        if match.boundary:
            self.tree.touch(match.page, match.tails, priority)
        return match

    def match(self, text: str, **options: bool):
        keys = make_keys(text)
        return self.tree.match(keys, len(keys), **options)

    def take_host(self, n: int) -> tuple[HostPageId, ...] | None:
        self.host_free += len(self.tree.copies.actions.host)
        self.tree.copies.actions.host.clear()
        if n > self.host_free:
            return None
        self.host_free -= n
        return tuple(HostPageId(next(self.ids)) for _ in range(n))

    def evict(self, n: int = 1, *, finish_saves: bool = True) -> int:
        going = self.tree.evict(n, self.take_host)
        if finish_saves:
            self.finish_saves()
        return going

    def finish_saves(self, ok: bool = True) -> None:
        saves, self.tree.copies.actions.saves = self.tree.copies.actions.saves, []
        for move in saves:
            self.tree.save_done(move, ok)

    def save(self, text: str) -> None:
        """Copy every page of a text to the host and keep it on the device."""
        for end in range(1, len(text) + 1):
            page = self.page(text[:end])
            if page.host is None:
                host = self.take_host(1)
                assert host is not None
                self.tree.save_start(page, host)
        self.finish_saves()

    def on(self, tier: str, *texts: str) -> list[str]:
        """Which of the texts end in a page that this tier can read."""
        held = []
        for text in texts:
            page = self.tree.index.get(make_keys(text)[-1])
            if page and (page.on_device if tier == "device" else page.on_host):
                held.append(text)
        return held
