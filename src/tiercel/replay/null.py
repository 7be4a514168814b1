"""The shipping cache over nothing: memories without bytes, and copies that take time on a clock.

    TieredCache ── plans ──► ClockController      a copy has landed after bytes ÷ rate
                ── store operations ──► `replay.store`

Everything that decides (tree, pools, policies, flights, fetches) is the code that serves. The same calls in
the same order give the same answers, always: there are no threads here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tiercel.cache import TieredCache
from tiercel.cache.host_tier import Executors
from tiercel.config import CacheConfig
from tiercel.errors import ConfigError
from tiercel.memory.buffers import DeviceMemory, HostMemory, Memory
from tiercel.spec.cache_spec import CacheSpec
from tiercel.transfer.controller import Controller, Done, Ticket
from tiercel.transfer.plan import Direction
from tiercel.tree.keys import KeyChain, Tokens
from tiercel.types import Namespace, PageKey


@dataclass
class Clock:
    """Simulated seconds."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class Pipe:
    """Something that is done piece by piece, in order, at a rate."""

    def __init__(self, clock: Clock, bytes_s: float) -> None:
        self._clock, self._bytes_s = clock, bytes_s
        self._free_s = 0.0

    def send(self, size: int) -> tuple[float, float]:
        """When so many bytes begin and end to move, if they are sent now."""
        begin_s = max(self._clock.now_s, self._free_s)
        self._free_s = begin_s + size / self._bytes_s
        return begin_s, self._free_s


class NamedText(tuple[int, ...]):
    """So many tokens that are not known, with the keys of the pages that they and their answer fill."""

    keys: list[PageKey]

    def __new__(cls, tokens: int, keys: Iterable[PageKey]) -> NamedText:
        text = super().__new__(cls, (0,) * tokens)
        text.keys = list(keys)
        return text


class NamedChain(KeyChain):
    """The keys of one text that has names for its pages instead of tokens."""

    def __init__(self, text: NamedText, page_tokens: int, owner: str) -> None:
        self.page_tokens, self.owner = page_tokens, owner
        self.texts = None
        self.tokens = len(text)
        self._all = text.keys
        self.keys = self._all[: self.tokens // page_tokens]

    def extend(self, tokens: Tokens) -> None:
        self.tokens += len(tokens)
        self.keys += self._all[len(self.keys) : self.tokens // self.page_tokens]


class NullHostMemory(HostMemory):
    """Places without bytes."""

    def __init__(self, spec: CacheSpec, bytes_budget: int) -> None:
        self.spec = spec
        self.device = torch.device("meta")
        self.pages, self.tails, self.rows = bytes_budget // spec.host_page_bytes, 0, {}
        if self.pages < spec.host_pages_per_tail or not self.pages:
            least = max(1, spec.host_pages_per_tail) * spec.host_page_bytes
            raise ConfigError("host_bytes", bytes_budget, f"a page and a tail take {least:,} B")

    def close(self) -> None:
        pass


class ClockController(Controller):
    """Moves nothing. A plan has ended when its bytes would have been copied."""

    how = "a clock"

    def __init__(self, spec: CacheSpec, clock: Clock, bytes_s: float) -> None:
        super().__init__()
        self._spec = spec
        self._clock = clock
        self._pipes = {direction: Pipe(clock, bytes_s) for direction in Direction}
        self._due: dict[Direction, deque[tuple[float, Ticket]]] = {each: deque() for each in Direction}

    def _start(self, ticket: Ticket, *, layered: bool) -> None:  # noqa: ARG002 - no layers are told apart
        plan = ticket.plan
        size = sum(self._spec.item_bytes(leg.kind) * len(leg.device) for leg in plan.legs)
        begin_s, end_s = self._pipes[plan.direction].send(size)
        self.seconds[plan.direction]["pages"] += end_s - begin_s
        self._due[plan.direction].append((end_s, ticket))

    def poll(self) -> list[Done]:
        for due in self._due.values():
            while due and due[0][0] <= self._clock.now_s:
                self._end(due.popleft()[1], None)
        return super().poll()

    @property
    def has_landed(self) -> bool:
        return any(due and due[0][0] <= self._clock.now_s for due in self._due.values())

    def next_s(self) -> float | None:
        """When the next copy ends."""
        return min((due[0][0] for due in self._due.values() if due), default=None)

    def close(self) -> None:
        pass


class NullCache(TieredCache):
    """A `TieredCache` of any size that takes no memory."""

    def __init__(self, spec: CacheSpec, config: CacheConfig, clock: Clock, link_bytes_s: float) -> None:
        self.clock, self._link_bytes_s = clock, link_bytes_s
        device = DeviceMemory(spec, config.device_pages, config.device_tails, "meta")
        super().__init__(spec, config, device=device)

    def _host_memory(self, device: Memory | Controller) -> HostMemory:  # noqa: ARG002 - there are no bytes
        return NullHostMemory(self.spec, self.config.host_bytes)

    def _controller(
        self,
        device: Memory,  # noqa: ARG002 - there are no bytes
        host: HostMemory,  # noqa: ARG002
        executors: Executors | None,  # noqa: ARG002
    ) -> Controller:
        return ClockController(self.spec, self.clock, self._link_bytes_s)

    def chain(self, tokens: Tokens = (), namespace: Namespace = (), owner: str = "") -> KeyChain:
        """Of a text whose pages have names. (Its namespace is part of the names.)"""
        assert isinstance(tokens, NamedText) and not namespace, "a replay knows no tokens"
        return NamedChain(tokens, self.spec.page_tokens, owner)

    def next_s(self) -> float | None:
        """When the next transfer ends; None: none is under way."""
        movers = (store.mover for store in self._stores())
        sources = [*movers, *([self.flights.controller] if self.flights.controller else [])]
        return min((at for each in sources if (at := each.next_s()) is not None), default=None)  # type: ignore[attr-defined]
