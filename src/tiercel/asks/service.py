"""The border between a server and an engine: `Service` is all that a server needs.

`engine.service.EngineService` runs an engine in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from tiercel.asks.ask import Ask, Delta, EngineStats, Explanation
from tiercel.errors import EngineError
from tiercel.text.text import Text


class Service(Protocol):
    """One model, called from an event loop."""

    @property
    def model_name(self) -> str: ...

    @property
    def text(self) -> Text:
        """The tokenizer and the chat format."""

    @property
    def context_tokens(self) -> int:
        """The most tokens that a text may have."""

    @property
    def page_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int:
        """How many token ids the model reads and draws. Its tokenizer may know fewer, or more."""

    @property
    def store_url(self) -> str:
        """The store that is attached, without its secrets; empty: none is."""

    @property
    def ready(self) -> bool:
        """Whether new asks are accepted."""

    @property
    def failure(self) -> EngineError | None:
        """Why nothing is served any more."""

    async def submit(self, ask: Ask, put: Callable[[Delta], None]) -> None:
        """Gives the answer to `put` as it arrives, in this event loop; returns after the last Delta.

        Guaranteed: `AskError` or `QueueFull` is raised before the first Delta or never; only the last Delta
        has `finish`; a prompt's logprobs come with the first Delta. Cancelling the call ends the request at
        any moment, and `put` is called no more. After that all memory is given back and the id is free.
        Required of the caller: an id that is not in use; a `put` that raises nothing and takes little time,
        because all answers of a step are given one after the other.
        """

    def explain(self, request_id: str) -> Explanation | None:
        """What a request reused. None: the request is not known, or forgotten."""

    async def stats(self) -> EngineStats: ...

    async def flush(self, timeout_s: float) -> int:
        """Empty the cache; wait up to `timeout_s` for pages in use. Returns how many pages stayed."""

    def limit_tenants(self, bytes_most: Mapping[str, int | None]) -> None:
        """Limit the bytes that each tenant may cache. A tenant with None, or not named, has no limit."""

    async def attach_store(self, url: str) -> None:
        """Use a store from now on. Raises `ConfigError` or `StoreError`, and then nothing has happened.
        Required of the caller: no store is attached."""

    async def detach_store(self) -> None:
        """Detach the store and wait until it is closed, for `store_timeout_s` at most."""

    async def clear_store(self) -> None:
        """Have the store forget everything. Raises `StoreError`."""

    def abort_all(self) -> None:
        """End all answers, and take no more asks."""
