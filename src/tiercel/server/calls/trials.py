"""Grammars of clients, tried in another process before they are compiled in this one (`text/trial.py`).

    recipe ── known? ──► outcome
      │
      └── its owner's turn ──► trial in the other process ──► compiled here ──► outcome, remembered

Each owner (an API key, a tenant, or else an address) has one trial at a time, so no owner blocks the others.
A trial ends when its client leaves. Nothing here occupies a thread that serves calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import pickle
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tiercel.errors import GrammarError, QueueFull
from tiercel.server.http.errors import ApiError
from tiercel.text.grammar import SOURCE_BYTES_MOST, Compiled, Grammar, Grammars, Vocabulary
from tiercel.text.trial import Recipe, pieces_of, send
from tiercel.threads import Crew, start

AT_ONCE = 4
"""The most trials of all owners at a time. Each may take 128 MiB."""
WAITING_MOST = 32
"""How many requests of one owner may wait for their turn."""
DEADLINE_S = 30.0
"""A trial ends after this time. It has 1 s of CPU time, on a core that may be busy."""
REMEMBERED, REMEMBERED_S = 256, 300.0
"""How many outcomes are remembered, and for how long if the grammar can not be used."""
PROGRAM = "from tiercel.text.trial import main; main()"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Outcome:
    """What is known of a recipe: the grammar's source, or what is wrong."""

    source: str = ""
    bytes: int = 0
    """Memory that the grammar takes when it is compiled."""
    error: str = ""
    part: int | None = None
    """Which part of the recipe is wrong."""


class Trials:
    """The trials of one server. One event loop uses it."""

    def __init__(self, grammars: Grammars, off_loop: Callable[..., Awaitable[bytes]]) -> None:
        """`off_loop` runs short work in a thread."""
        self._grammars, self._off_loop = grammars, off_loop
        self._compiler = Crew(1, "tiercel-grammar")
        self._known: OrderedDict[bytes, tuple[Outcome, float]] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()
        self._places = asyncio.Semaphore(AT_ONCE)
        self._starting = asyncio.Lock()
        self._process: TrialProcess | None = None

    async def grammar(self, recipe: Recipe, owner: str) -> tuple[Outcome, Compiled | None]:
        """The outcome, and the compiled grammar if it can be used. Raises `QueueFull`, or `ApiError` if the
        outcome can not be known now. Cancelling the call ends the trial."""
        try:
            written = await self._off_loop(_written, recipe)
        except GrammarError as error:
            return Outcome(error=str(error)), None
        digest = hashlib.sha256(written).digest()
        known = self._find(digest)
        if known is not None and (known.error or self._grammars.keeps(known.source)):
            return self._checked(known)
        async with self._turn(owner):
            known = self._find(digest) or await self._tried(digest, written, owner)
            return await asyncio.wrap_future(self._compiler.submit(self._checked, known))

    def _checked(self, known: Outcome) -> tuple[Outcome, Compiled | None]:
        if known.error:
            return known, None
        try:
            return known, self._grammars.check(Grammar(known.source), known.bytes)
        except GrammarError as error:
            return Outcome(error=str(error)), None

    def _find(self, digest: bytes) -> Outcome | None:
        found, until_s = self._known.get(digest, (None, 0.0))
        if found is None or until_s < time.monotonic():
            return None
        self._known.move_to_end(digest)
        return found

    async def _tried(self, digest: bytes, written: bytes, owner: str) -> Outcome:
        if (pause_s := self._grammars.pause_s(owner)) > 0:
            why = "the masks of a grammar of this key took too long, so it may use no new grammar now"
            raise _later(429, why, "grammars_paused", math.ceil(pause_s))
        try:
            async with asyncio.timeout(DEADLINE_S):
                outcome = Outcome(**json.loads(await self._answer(written)))
        except TimeoutError as error:
            raise _later(503, f"the grammar could not be tried within {DEADLINE_S:g} s", "busy") from error
        except (OSError, EOFError) as error:
            raise _later(503, "the grammar could not be tried; the trial was ended", "busy") from error
        until_s = time.monotonic() + REMEMBERED_S if outcome.error else math.inf
        self._known[digest] = outcome, until_s
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return outcome

    @asynccontextmanager
    async def _turn(self, owner: str) -> AsyncIterator[None]:
        if self._waiting[owner] >= WAITING_MOST:
            raise QueueFull(waiting=self._waiting[owner], waiting_max=WAITING_MOST)
        lock = self._locks.setdefault(owner, asyncio.Lock())
        self._waiting[owner] += 1
        try:
            async with lock, self._places:
                yield
        finally:
            self._waiting[owner] -= 1
            if not self._waiting[owner]:
                del self._waiting[owner], self._locks[owner]

    async def _answer(self, written: bytes) -> bytes:
        """What a trial says. Raises `OSError` or `EOFError` if it says nothing."""
        ours, theirs = socket.socketpair()
        with ours:  # the trial ends when it is closed
            with theirs:
                await self._hand_over(theirs)
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                writer.write(struct.pack("<I", len(written)) + written)
                (count,) = struct.unpack("<I", await reader.readexactly(4))
                return await reader.readexactly(count)
            finally:
                writer.transport.abort()

    async def _hand_over(self, connection: socket.socket) -> None:
        """Give a connection to the other process, which is started if it does not run."""
        async with self._starting:
            if self._process is None or not self._process.alive:
                text = self._grammars.text
                starting = start(lambda: TrialProcess(text), "tiercel-trials")
                self._process = await asyncio.wrap_future(starting)
            self._process.hand_over(connection)


class TrialProcess:
    """The other process, as long as this object lives."""

    def __init__(self, text: Vocabulary) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | ONE_THREAD,
                pass_fds=[theirs.fileno()],
            )
        weakref.finalize(self, _end, self._child, self._control)
        self.pid = self._child.pid
        send(self._control, pickle.dumps(pieces_of(text)))

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def hand_over(self, connection: socket.socket) -> None:
        socket.send_fds(self._control, [b"."], [connection.fileno()])


def _end(child: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()  # the process ends its trials, and then itself
    try:
        child.wait(ENDS_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


ENDS_S = 0.2
"""The time to end: a process that waits for work ends at once."""


def _later(status: int, why: str, code: str, retry_s: int = 1) -> ApiError:
    headers = {"retry-after": str(retry_s)}
    return ApiError(status, f"{why}; try again in {retry_s} s or more", code=code, headers=headers)


def _written(recipe: Recipe) -> bytes:
    """The recipe as JSON. One that must become too long is refused before all of it is walked."""
    left, todo = SOURCE_BYTES_MOST, list[Any](recipe.values())
    while todo:
        each = todo.pop()
        left -= len(each) if isinstance(each, str | list | dict) else 1
        if isinstance(each, dict):
            left -= sum(map(len, each)) if left >= 0 else 0
        if left < 0:
            raise GrammarError(f"it is longer than {SOURCE_BYTES_MOST:,} B")
        if isinstance(each, list):
            todo += each
        elif isinstance(each, dict):
            todo += each.values()
    try:
        return json.dumps(recipe).encode()
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error
