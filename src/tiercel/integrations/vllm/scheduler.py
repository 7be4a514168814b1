"""The half of the connector that decides what vLLM loads and saves.

A load is a plan of its own, so that it fails alone. A request whose load failed is computed. It begins when
no other request holds blocks for a load: vLLM schedules nothing behind a request that does not fit, also not
what would free blocks.

What is saved of windows are tails at few boundaries (`cache.tails`): the end of a prompt, where texts part,
every so many pages.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercel.cache.host_cache import HostCache
from tiercel.cache.memories import make_memories
from tiercel.cache.request import Found, Transfer, Wait
from tiercel.cache.tails import tails_of_prompt
from tiercel.config import CacheConfig
from tiercel.integrations.vllm.groups import Groups, Table
from tiercel.integrations.vllm.model import extra_of, namespace_of
from tiercel.integrations.vllm.worker import Acks, Plans
from tiercel.spec.identity import Identity
from tiercel.storage.open import open_now_or_later
from tiercel.transfer.controller import Ticket
from tiercel.transfer.plan import NO_PLACE
from tiercel.transfer.remote import RemoteController
from tiercel.tree.keys import KeyChain

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

SAVE_ALL = 2**62
"""Bytes of saves in a step: the blocks are vLLM's again after it."""
IDLE_S = 0.002
"""A step in which nothing is computed waits so long for the store: vLLM would ask again at once."""
STEPS_KEPT = 8
"""Steps that vLLM may have planned and not told the result of."""


@dataclass(eq=False)
class Text:
    """A request."""

    request: Request
    chain: KeyChain | None
    """None: it is not cached."""
    found: Found | None = None
    """What is held for it, until it is loaded."""
    device: int = 0
    """Tokens that vLLM has itself of what was found."""
    stored: int = 0
    """Tokens of its load that came from the store."""
    saved: int = 0
    """Its first pages that the host was given."""
    boundaries: frozenset[int] = frozenset()
    """Where its prompt gets tails, in pages."""
    failed: bool = False
    """A load of it has failed."""


class Scheduler:
    """Decides what is loaded and saved. vLLM's scheduler calls it."""

    def __init__(self, groups: Groups, identity: Identity, host_bytes: int, store: str) -> None:
        self._groups, self._page_tokens = groups, groups.page_tokens
        settings = CacheConfig(host_bytes=host_bytes, host_shared=True, save_step_bytes=SAVE_ALL)
        self._every = settings.tail_every_pages
        self._remote = RemoteController(1)
        memories = make_memories(groups.spec, settings, None, controller=self._remote)
        self.cache = HostCache(groups.spec, settings, memories, identity=identity)
        assert memories.host is not None
        self._host = memories.host.path, settings.host_bytes
        if store:
            self.cache.attach(open_now_or_later(store))
        self.texts: dict[str, Text] = {}
        self._loading = set[str]()
        """Requests that hold blocks for a load, and were not scheduled since."""
        self._failed = set[str]()
        """Requests whose load failed, and which have not begun again."""
        self._epoch: tuple[str, ...] = ()
        self._tickets: list[Ticket] = []
        self._loads: dict[int, str] = {}
        self._steps = deque[tuple[float, int]](maxlen=STEPS_KEPT)
        self._ended_s = 0.0

    # Finding

    def find(self, request: Request, device: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded behind those that vLLM has itself; None: ask again."""
        name = request.request_id
        text = self._text(request)
        self._loading.discard(name)
        if self._failed:
            if text.failed and self._loading:
                return None, False
            self._failed.discard(name)
            return 0, False
        if text.chain is None or text.failed:
            return 0, False
        if text.found is None:
            self._extend(text, text.chain)
            found = self.cache.find(text.chain, hold=True)
            if isinstance(found, Wait):
                return None, False
            text.found = found
            text.boundaries = frozenset(tails_of_prompt(self.cache.spec, found, (), self._every))
        tokens = text.found.pages * self._page_tokens - device
        if tokens <= 0:
            self._release(text)
            return 0, False
        text.device = device
        return tokens, True

    def _text(self, request: Request) -> Text:
        text = self.texts.get(request.request_id)
        if text is None:
            chain = None
            if not request.resumable:  # the text of such a session may change
                chain = self.cache.chain(namespace=(*namespace_of(request), *self._epoch))
                prompt = request.all_token_ids[: request.num_prompt_tokens]
                chain.extend(prompt, extra=extra_of(request, self._page_tokens))
            text = self.texts[request.request_id] = Text(request, chain)
        return text

    def _extend(self, text: Text, chain: KeyChain) -> None:
        if chain.tokens < text.request.num_tokens:
            chain.extend(text.request.all_token_ids[chain.tokens :])

    def _release(self, text: Text) -> None:
        if text.found is not None:
            self.cache.release(text.found)
            text.found = None

    # Loading

    def load(self, request: Request, tables: Sequence[Table], tokens: int) -> None:
        """vLLM has taken blocks for a request. Each load is a plan of its own: it fails alone."""
        text = self._text(request)
        found = text.found
        if not tokens or found is None:
            assert not tokens, "vLLM loads what was not found"
            self._release(text)
            return
        device, groups = text.device, self._groups
        assert tokens == found.pages * self._page_tokens - device, "vLLM loads another part than was found"
        first = device // self._page_tokens
        places = [groups.page(tables, n, after=device) for n in range(first, found.pages)]
        tails = [groups.tail(tables, tail.page.depth, after=device) for tail in found.tails]
        while tails and all(place == NO_PLACE for place in tails[-1]):
            tails.pop()
        stored = sum(page.fetched for page in found.far[first:]) * self._page_tokens
        text.stored, text.found = min(stored, tokens), None
        self._send()
        loading = self.cache.load(found, places, first=first, tails=tails)
        assert isinstance(loading, Transfer), "what is held can not have left"
        for ticket in self._send():
            self._loads[ticket.number] = request.request_id
        self._loading.add(request.request_id)
        text.saved = max(text.saved, found.pages)

    def _send(self) -> list[Ticket]:
        """Have what was queued carried out in the next step."""
        self.cache.step()
        tickets = self._remote.take()
        self._tickets += tickets
        return tickets

    # Saving

    def plan(self, output: SchedulerOutput) -> Plans:
        """A step: save the pages that it fills."""
        blocks = output.kv_connector_block_state
        for name, tokens in output.num_scheduled_tokens.items():
            self._loading.discard(name)
            text = self.texts.get(name)
            if text is None or text.chain is None:
                continue
            self._release(text)
            request = text.request
            pages = min(request.num_computed_tokens + tokens, request.num_tokens) // self._page_tokens
            if pages > text.saved:
                self._save(text, text.chain, blocks.get_block_ids(name), pages)
        self._send()
        idle = not output.num_scheduled_tokens
        if idle and not self._loads and self.cache.stores.busy:
            self.cache.wait(IDLE_S)
        prompts = output.total_num_scheduled_tokens - len(output.num_scheduled_tokens)
        self._steps.append((time.monotonic(), prompts))
        (tickets, self._tickets), (loads, self._loads) = (self._tickets, []), (self._loads, {})
        return Plans(self._host, tickets, loads, idle)

    def _save(self, text: Text, chain: KeyChain, tables: Sequence[Table], pages: int) -> None:
        first, text.saved = text.saved, pages
        if len(chain.keys) < pages:
            self._extend(text, chain)
        wanted = (n for n in range(first + 1, pages + 1) if self._deserves_tail(text, n))
        tails = {boundary: self._groups.tail(tables, boundary) for boundary in wanted}
        tails = {boundary: tail for boundary, tail in tails.items() if NO_PLACE not in tail}
        there = self.cache.tree.match(chain.keys, pages).found
        first = min(first, there)  # earlier pages may have left the host
        places = [self._groups.page(tables, n) for n in range(first, pages)]
        self.cache.save(chain, first, places, tails=tails)

    def _deserves_tail(self, text: Text, boundary: int) -> bool:
        """In an answer: every so many pages, and the boundaries before that a window reads too."""
        if boundary * self._page_tokens <= text.request.num_prompt_tokens:
            return boundary in text.boundaries
        return -boundary % self._every < self.cache.spec.pages_per_window

    # The end of things

    def ended(self, output: KVConnectorOutput) -> None:
        """A step was run."""
        if isinstance(acks := output.kv_connector_worker_meta, Acks):
            for ack in acks.acks:
                self._remote.acknowledge(ack)
        for name in output.failed_recving:
            if text := self.texts.get(name):
                text.failed = True
                self._failed.add(name)
        now = time.monotonic()
        if self._steps:
            begin, tokens = self._steps.popleft()
            self.cache.compute.observe(tokens, now - max(begin, self._ended_s))
        self._ended_s = now
        self.cache.step()

    def forget(self, name: str) -> None:
        """A request has ended."""
        self._loading.discard(name)
        self._failed.discard(name)
        if (text := self.texts.pop(name, None)) and text.chain is not None:
            self.cache.withdraw(text.chain)

    def reset(self) -> bool:
        """Nothing that was kept until now is found any more, in no tier: vLLM's weights may be others now.
        What the store has stays there for the next process."""
        self._epoch = ("after reset", uuid.uuid4().hex)
        for text in self.texts.values():
            if text.chain is not None:
                self.cache.withdraw(text.chain)
                text.chain = text.found = None
        self.cache.flush()
        return True

    def close(self) -> None:
        self._remote.fail("the engine ends")
        self.cache.close()
