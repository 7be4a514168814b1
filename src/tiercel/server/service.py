"""What the server needs from an engine: the only border between the two.

Everything here is a contract, nothing acts. An engine, a router to other engines, or the script of a test
may stand behind it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from tiercel.engine.ask import Ask, Delta
from tiercel.errors import EngineError


class Prompt(Protocol):
    """A conversation as tokens."""

    @property
    def tokens(self) -> tuple[int, ...]: ...

    @property
    def turn_ends(self) -> tuple[int, ...]: ...

    @property
    def thinks(self) -> bool:
        """Whether the answer begins with thoughts."""
        ...


class Text(Protocol):
    """Between text and tokens. Raises `InputError` naming the field, such as `messages[0].content`."""

    @property
    def eos(self) -> frozenset[int]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def calls(self) -> bool:
        """Whether calls of tools can be read in an answer."""
        ...

    def encode(self, text: str, /, *, field: str, tokens_max: int) -> list[int]:
        """Raises `LengthError`, before it is encoded, if it can not have so few tokens."""
        ...

    def decode(self, tokens: Sequence[int], /) -> str: ...

    def piece(self, token: int, /) -> str:
        """One token alone; half a character is shown as U+FFFD."""
        ...

    def piece_bytes(self, token: int, /) -> bytes:
        """One token alone, exactly."""
        ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
        tokens_max: int,
    ) -> Prompt:
        """A conversation, up to where the assistant begins to speak. Raises `LengthError`, as `encode`."""
        ...


class Service(Protocol):
    """An engine as the server sees it. All calls are made from one event loop."""

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
        """Why nothing is served any more. Every call but `explain` raises it then."""
        ...

    def submit(self, ask: Ask) -> AsyncGenerator[Delta, None]:
        """The answer as it comes.

        Guaranteed: raises `errors.QueueFull` before the first Delta or never; the last Delta, and only that
        one, has `finish`; a prompt's logprobs come with the first Delta; nothing waits for a slow reader.
        Closing or cancelling the generator, at any moment, ends the request and gives back all it holds.
        Required of the caller: an id that is not in use, and an ask that `asks.check` let pass.
        """
        ...

    async def flush(self, timeout_s: float) -> int:
        """Forgets what is cached, waiting so long for what is in use. Returns the pages that stayed."""
        ...

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """What a request reused, from where, and why not more. None: not known, or no longer."""
        ...

    async def stats(self) -> dict[str, Any]:
        """Numbers, nested by name; `metrics.FAMILIES` says which levels become labels."""
        ...

    async def attach_store(self, url: str) -> dict[str, Any]:
        """Use a store from now on; answers as `store_status` does.

        Raises `ConfigError` for a URL that names no store that can be opened, `StoreError` for a store that
        does not answer. Required of the caller: none is attached.
        """
        ...

    async def store_status(self) -> dict[str, Any]:
        """`{"attached": False}`, or what `store.StoreStatus` describes."""
        ...

    async def detach_store(self) -> dict[str, Any]:
        """Use the store no more; it keeps what it has. Answers as `store_status` does. Raises `StoreError`.
        Required of the caller: one is attached."""
        ...

    async def clear_store(self) -> None:
        """Forget everything in the store. Raises `StoreError`. Required of the caller: one is attached."""
        ...

    def abort_all(self) -> None:
        """End every answer with `Finish.ABORT`, and begin none any more: the server is ending."""
        ...
