"""Prompts that another server computes. Their pages are pulled as they are saved there (docs/peers.md).

    peer      computes page 1 │ page 2 │ … │ the last page and the tail behind it
    watch               1 here   2 here   …   all here             it tells, a thread here listens
    pull                  read and verified, into host pages of our own
    begin                                        the request finds them on the host, and computes the rest

Pages that the peer does not announce in time are computed here: a request never fails because a peer did.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from time import monotonic
from typing import Any

from tiercel.asks.ask import Ask
from tiercel.cache import TieredCache
from tiercel.cache.request import pages_useful
from tiercel.errors import StoreError
from tiercel.storage.peer import PeerStore
from tiercel.storage.record import ALIGN_LEAST
from tiercel.transfer.mover import forms_of
from tiercel.tree.keys import KeyChain
from tiercel.types import Kind

log = logging.getLogger(__name__)

WATCHED_S = 3600.0
"""The longest time for a prompt. A peer that brings nothing is given up sooner, by `patience_s`."""

Address = tuple[str, int]


class Pulls:
    """Called from threads of its callers. Whatever needs the cache is asked of the thread that drives it."""

    def __init__(
        self,
        cache: TieredCache,
        ask: Callable[[Callable[[], Any]], Future[Any]],
        peers: Mapping[Address, PeerStore],
        patience_s: float,
    ) -> None:
        """`patience_s`: the longest time without a new page from the peer."""
        self._cache, self._ask, self._peers, self._patience_s = cache, ask, peers, patience_s
        self._forms = forms_of(cache.spec, ALIGN_LEAST)
        self._reading: dict[KeyChain, Future[None]] = {}
        """Texts whose pages are being read, and what waits for each. Only the engine's thread uses it."""

    def pull(self, ask: Ask, left: threading.Event) -> int:
        """Returns when the request may begin: all pages that help are on the host, or no more will come.
        `left`: whether the asker has gone. Returns how many pages the peer had."""
        assert ask.prefiller is not None
        peer = self._peers[ask.prefiller.host, ask.prefiller.port]
        chain: KeyChain = self._ask(lambda: self._cache.chain(ask.prompt, ask.namespace, ask.tenant)).result()
        last = pages_useful(chain, self._cache.spec, ask.prompt_logprobs_from)
        if not (last and self._forms[Kind.PAGE]):
            return 0
        try:
            return self._follow(peer, chain, last, left)
        except StoreError as error:
            log.warning("%s computes its prompt: %s", ask.request_id, error)
            return 0
        finally:
            self._ask(lambda: self._cache.withdraw(chain))

    def _follow(self, peer: PeerStore, chain: KeyChain, last: int, left: threading.Event) -> int:
        # The peer's host has all records of a page, or none: one of them is watched.
        pages = [self._forms[Kind.PAGE][0].key(key) for key in chain.keys[:last]]
        tail = [form.key(chain.keys[last - 1]) for form in self._forms[Kind.TAIL][:1]]
        here, pulled, heard_s = set[bytes](), 0, monotonic()
        for news in peer.watch([*pages, *tail], WATCHED_S):
            here.update(news.here)
            count = next((i for i, key in enumerate(pages) if key not in here), last)
            whole = len(here) == len(pages) + len(tail)
            if left.is_set():
                break
            if count > pulled or whole:
                self._read(chain, count, tail=whole and bool(tail))
                pulled, heard_s = count, monotonic()
            if whole or news.absent or monotonic() - heard_s > self._patience_s:
                break
        return pulled

    def _read(self, chain: KeyChain, upto: int, *, tail: bool) -> None:
        """Read pages that the peer announced. It holds them until this returns."""

        def start() -> Future[None]:
            self._cache.pull(chain, upto, tail=tail)
            self._reading[chain] = Future()
            return self._reading[chain]

        self._ask(start).result().result()

    # In the engine's thread

    def step(self) -> None:
        """Called after each step of the engine: wakes the pulls whose pages are here now."""
        for chain in [each for each in self._reading if self._cache.pulled(each)]:
            self._reading.pop(chain).set_result(None)

    def end(self, why: Exception) -> None:
        """No step follows: wake every pull."""
        while self._reading:
            self._reading.popitem()[1].set_exception(why)
