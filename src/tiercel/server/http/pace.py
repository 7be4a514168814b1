"""Limits how fast clients come in, so that one client does not use all the time of the event loop.

    connections ──► Door ──► requests ──► Pace ──► application

Every connection and every request takes a part of a millisecond of the event loop, whatever becomes of it.

The door lets in 200 connections a second, after a pause 512 at once. If more come, addresses take turns.
Within an address, its newest and its oldest connection take turns: a new one need not wait behind a crowd,
and none waits for ever.

The pace counts the time that requests of each owner take (an API key, a tenant, or else an address). While
another owner has a request open, an owner gets only a part of the event loop's time: what it sends is read
later, and its requests begin later. An owner that is alone is not held up.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

log = logging.getLogger("tiercel.server")

TAKEN_AT_ONCE, LET_IN_AT_ONCE = 64, 16
"""Connections in one turn of the event loop: taken from the system, and let in. So other work gets time."""

LET_IN_PER_S, LET_IN_AFTER_A_PAUSE = 200.0, 512
"""A connection that says little takes 0.3 ms of the event loop (a 2 GHz core)."""

BACKLOG = 2048
"""Connections that the system keeps for us until we take them."""

RETRY_S = 1.0
"""The pause after an error, such as too many open files."""

OWNER_MS_PER_S, OWNER_MS_AFTER_A_PAUSE = 150.0, 50
"""The event loop's time for requests of one owner while other owners have requests."""

REQUEST_MS = 1.0
"""The time of any request: 0.7 on a 2 GHz core, more if it is busy. So 150 requests of an owner begin in a
second while other owners have requests."""

OWNERS_KEPT = 1024
"""The most owners without an open request that are remembered."""


class Bucket:
    """`per_s` units a second, and `at_once` units after a pause. It may be overdrawn; then it is empty until
    the debt is paid."""

    def __init__(self, per_s: float, at_once: int, now_s: float) -> None:
        self._per_s, self._most = per_s, at_once
        self._left = float(at_once)
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until one may be taken."""
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        missing = 1 - self._left
        return missing / self._per_s if missing > 1e-9 else 0.0

    def take(self, count: float) -> None:
        self._left -= count


class Door:
    """Lets connections in, in the place of an `asyncio.Server`. One event loop uses it."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        held_max: int,
    ) -> None:
        """`listeners` belong to the door. If more than `held_max` connections wait, the oldest one of the
        address with the most is closed."""
        self.sockets = listeners
        self._protocol, self._tls = protocol, tls
        self._loop = asyncio.get_running_loop()
        self._bucket = Bucket(LET_IN_PER_S, LET_IN_AFTER_A_PAUSE, self._loop.time())
        self._held: dict[str, deque[socket.socket]] = {}
        """Connections that wait at the door, by address, the oldest first. The first address is next."""
        self._newest = False
        """Whether the last connection let in was the newest of its address."""
        self._held_count, self._held_max = 0, held_max
        self._timer: asyncio.TimerHandle | None = None
        self._coming: dict[asyncio.Task[None], socket.socket] = {}
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self._open(listener)

    def close(self) -> None:
        for listener in self.sockets:
            if listener.fileno() >= 0:
                self._loop.remove_reader(listener)
                listener.close()
        for client in (each for line in self._held.values() for each in line):
            client.close()
        self._held.clear()
        for task in self._coming:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._coming, return_exceptions=True)

    def _open(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener, self._take, listener)

    def _take(self, listener: socket.socket) -> None:
        """Takes connections from the system."""
        try:
            for _ in range(TAKEN_AT_ONCE):
                client, address = listener.accept()
                self._held.setdefault(address[0], deque()).append(client)
                self._held_count += 1
                if self._held_count > self._held_max:
                    longest = max(self._held.values(), key=len)
                    longest.popleft().close()
                    self._held_count -= 1
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            pass
        except OSError as error:
            log.error("no connection can be accepted now: %s", error)
            self._loop.remove_reader(listener)
            self._loop.call_later(RETRY_S, self._open, listener)
        if self._timer is None:
            self._let_in()

    def _let_in(self) -> None:
        self._timer, wait_s = None, 0.0
        for _ in range(LET_IN_AT_ONCE):
            wait_s = self._bucket.wait_s(self._loop.time())
            if wait_s or not self._held:
                break
            self._bucket.take(1)
            address = next(iter(self._held))
            line = self._held.pop(address)
            self._newest = not self._newest
            client = line.pop() if self._newest else line.popleft()
            self._held_count -= 1
            if line:
                self._held[address] = line  # behind the others
            coming = self._loop.create_task(self._connect(client))
            self._coming[coming] = client
            coming.add_done_callback(self._came)
        if self._held:
            self._timer = self._loop.call_later(wait_s, self._let_in)

    def _came(self, coming: asyncio.Task[None]) -> None:
        client = self._coming.pop(coming)
        if coming.cancelled():
            client.close()  # its task may not have begun

    async def _connect(self, client: socket.socket) -> None:
        client.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._protocol, client, ssl=self._tls)
        except OSError as error:  # a TLS handshake that failed
            log.debug("a connection failed: %s", error)


class Pace:
    """Divides the event loop's time among owners. One event loop uses it."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._buckets: dict[str, Bucket] = {}
        """Milliseconds of each owner."""
        self._lines: dict[str, deque[Callable[[], bool]]] = {}
        """Requests that wait to begin, by owner."""

    def spend(self, owner: str, seconds: float) -> float:
        """Counts work for an owner. Returns how many seconds its next work should wait."""
        bucket, now_s = self._bucket(owner), asyncio.get_running_loop().time()
        if self._others(owner) or not bucket.wait_s(now_s):
            bucket.take(1e3 * seconds)  # an owner that was alone owes nothing
        return self._wait_s(owner)

    def begin(self, owner: str, start: Callable[[], bool]) -> None:
        """Calls `start`, now or later. It returns False if nothing was begun: the client has left."""
        if owner in self._lines:
            self._lines[owner].append(start)
        elif not (wait_s := self._wait_s(owner)):
            self._start(owner, start)
        else:
            self._lines[owner] = deque([start])
            asyncio.get_running_loop().call_later(wait_s, self._next, owner)

    def counting(self, owner: str, app: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        """An ASGI application whose requests are open requests of this owner."""

        async def counted(*given: Any) -> None:
            self._open[owner] += 1
            try:
                await app(*given)
            finally:
                self._open[owner] -= 1
                if not self._open[owner]:
                    del self._open[owner]

        return counted

    def _start(self, owner: str, start: Callable[[], bool]) -> None:
        if start():
            self.spend(owner, REQUEST_MS / 1e3)

    def _next(self, owner: str) -> None:
        line, wait_s = self._lines[owner], 0.0
        while line and not (wait_s := self._wait_s(owner)):
            self._start(owner, line.popleft())
        if line:
            asyncio.get_running_loop().call_later(wait_s, self._next, owner)
        else:
            del self._lines[owner]

    def _wait_s(self, owner: str) -> float:
        if not self._others(owner):
            return 0.0
        return self._bucket(owner).wait_s(asyncio.get_running_loop().time())

    def _others(self, owner: str) -> bool:
        return len(self._open) > (owner in self._open)

    def _bucket(self, owner: str) -> Bucket:
        if owner not in self._buckets:
            if len(self._buckets) >= OWNERS_KEPT:
                kept = self._open.keys() | self._lines.keys()
                self._buckets = {name: each for name, each in self._buckets.items() if name in kept}
            now_s = asyncio.get_running_loop().time()
            self._buckets[owner] = Bucket(OWNER_MS_PER_S, OWNER_MS_AFTER_A_PAUSE, now_s)
        return self._buckets[owner]
