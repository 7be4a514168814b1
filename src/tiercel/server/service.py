"""What the server needs from an engine: the only border between the two.

A contract without code. Behind it may be an engine, a router to other engines, or the script of a test.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from tiercel.engine.ask import Ask, Delta, EngineStats, Explanation
from tiercel.errors import EngineError
from tiercel.text.text import Text


class Service(Protocol):
    """An engine as the server sees it. All calls come from one event loop."""

    @property
    def text(self) -> Text: ...

    @property
    def model_name(self) -> str: ...

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer together."""
        ...

    @property
    def page_tokens(self) -> int: ...

    @property
    def ready(self) -> bool: ...

    @property
    def failure(self) -> EngineError | None:
        """Set when the engine has failed. Then every call except `explain` raises it."""
        ...

    def submit(self, ask: Ask) -> AsyncGenerator[Delta, None]:
        """The answer as it arrives.

        Guaranteed: `errors.QueueFull` is raised before the first Delta or never; only the last Delta has
        `finish`; a prompt's logprobs come with the first Delta; the engine never waits for a slow reader.
        Closing or cancelling the generator ends the request at any moment. After that all memory is given
        back and the id is free.
        Required of the caller: an id that is not in use, and an ask that passed `asks.check`.
        """
        ...

    async def flush(self, timeout_s: float) -> int:
        """Empties the cache. Waits up to `timeout_s` for pages in use; returns how many of them stayed."""
        ...

    def explain(self, request_id: str) -> Explanation | None:
        """What a request reused. None: the request is not known, or forgotten."""
        ...

    async def stats(self) -> EngineStats:
        """Statistics of this moment."""
        ...

    @property
    def store_url(self) -> str:
        """URL of the store that was attached last, without its password."""
        ...

    async def attach_store(self, url: str) -> None:
        """Use a store from now on.

        Raises `ConfigError` if the URL names no store that can be opened, `StoreError` if the store does not
        answer. Required of the caller: no store is attached.
        """
        ...

    async def detach_store(self) -> None:
        """Stop using the store, which keeps its records. Raises `StoreError`.
        Required of the caller: a store is attached."""
        ...

    async def clear_store(self) -> None:
        """Remove every record of the store. Raises `StoreError`.
        Required of the caller: a store is attached."""
        ...

    def abort_all(self) -> None:
        """End every answer with `Finish.ABORT` and start no new one: the server is shutting down."""
        ...
