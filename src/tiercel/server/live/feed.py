"""The feed of the page: the state of the server as server-sent events, once a second, only what has changed.

    first event    the whole state, and the server's clock
    other events   a JSON merge patch (RFC 7396): what is new or different; null: it is gone

The numbers are those of `/metrics`. With listeners they are read once a second, for all of them together;
without one every ten seconds, because the page shows the past (`history`). It is an admin call, because it
tells about the requests of all users.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse

from tiercel.errors import TiercelError
from tiercel.server.calls.reply import Api, to_json
from tiercel.server.http import keys
from tiercel.server.live.history import READ_S, History, counters
from tiercel.server.live.recent import Recent
from tiercel.server.live.status import stats_json

EVERY_S = 1.0
SILENCE_S = 15.0
"""If nothing changes for this time, a comment is sent, so that no proxy ends the connection."""

State = dict[str, Any]


def changes(before: State, after: State) -> State:
    """The merge patch that makes `after` of `before`."""
    patch: State = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if value is old:  # steps of the past: most do not change any more
            continue
        if isinstance(value, dict) and isinstance(old, dict):
            if below := changes(old, value):
                patch[name] = below
        elif value != old:
            patch[name] = value
    return patch


class Feed:
    """The state of one server, for any number of listeners."""

    def __init__(self, api: Api, recent: Recent) -> None:
        self.api = api
        self.recent = recent
        self.history = History()
        self._about = {
            "version": version("tiercel"),
            "model": api.service.model_name,
            "page_tokens": api.service.page_tokens,
            **self.history.about(),
        }
        self._ending = asyncio.Event()
        self._state: State = {}
        self._made_s = -EVERY_S
        self._turn = asyncio.Lock()

    async def watch(self) -> None:
        """Reads the counters at the end of each step, until the server shuts down or its engine fails."""
        with suppress(TiercelError):
            while not await self._ends_within(READ_S - time.time() % READ_S):
                await self.state()

    def close(self) -> None:
        """Ends all feeds, and `watch`: the server shuts down."""
        self._ending.set()

    async def _ends_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)
        return self._ending.is_set()

    async def listen(self) -> Response:
        """The state of the server, as it changes."""
        self.api.check_ready()
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(self.events(), media_type="text/event-stream", headers=headers)

    async def events(self) -> AsyncGenerator[str, None]:
        """Ends when the server shuts down, or when its engine fails."""
        sent: State = {}
        silent_s = 0.0
        with suppress(TiercelError):
            while True:
                state = await self.state()
                patch = changes(sent, state)
                if not sent:
                    patch["now_s"] = time.time()
                if patch:
                    yield f"data: {to_json(patch)}\n\n"
                elif silent_s >= SILENCE_S:
                    yield ": nothing new\n\n"
                silent_s = 0.0 if patch or silent_s >= SILENCE_S else silent_s + EVERY_S
                sent = state
                if await self._ends_within(EVERY_S):
                    break

    async def state(self) -> State:
        """All that the page shows. All listeners get the same state within a second."""
        async with self._turn:
            if time.monotonic() - self._made_s >= EVERY_S / 2:
                service = self.api.service
                stats, http = stats_json(await service.stats()), self.api.metrics.counts()
                self.history.add(counters(stats, http))
                self._state = {
                    "server": self._about | {"store_url": service.store_url},
                    "stats": stats,
                    "http": http,
                    "history": self.history.json(),
                    "requests": self.recent.json(),
                }
                self._made_s = time.monotonic()
            return self._state


def router(feed: Feed) -> APIRouter:
    routes = APIRouter(dependencies=keys.admin(feed.api.options))
    # Not in the schema: programs that try every call of it would wait for an end that does not come.
    routes.add_api_route("/feed", feed.listen, response_class=Response, include_in_schema=False)
    return routes
