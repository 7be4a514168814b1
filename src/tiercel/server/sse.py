"""Server-sent events: a streamed answer.

    data: {…}\n\n  data: {…}\n\n  …  data: [DONE]\n\n

An error after the first event becomes the last event, without [DONE].
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tiercel.server.errors import translate


def event(data: str) -> str:
    return f"data: {data}\n\n"


class EventStream(StreamingResponse):
    """Sends the JSON of a generator, and always closes the generator: a client may leave at any time."""

    media_type = "text/event-stream"

    def __init__(self, head: str, rest: AsyncGenerator[str, None]) -> None:
        self._events = _events(head, rest)
        self._rest = rest
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._events, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await self._rest.aclose()


async def _events(head: str, rest: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    yield event(head)
    try:
        async for piece in rest:
            yield event(piece)
    except Exception as error:  # noqa: BLE001 (the status code is sent already)
        yield event(json.dumps(translate(error).body()))
    else:
        yield event("[DONE]")
