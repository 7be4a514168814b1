"""The run: who asks when.

conversations   a fixed number of clients. Each asks the next turn of the conversation that has waited
                longest, so that others ask between two turns of one conversation
trace           every request at its time, whether others have ended or not
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from tiercel.bench.client import Client, Measured
from tiercel.bench.load import Conversation
from tiercel.bench.sending import Form, Said

WAKE_S = 0.02
"""How often it is measured how late this process is."""


@dataclass
class Run:
    """What was measured. It grows while the run goes on."""

    measured: list[Measured] = field(default_factory=list)
    seconds: float = 0.0
    client_late_s: array[float] = field(default_factory=lambda: array("d"))
    """How late this process was, each time that it wanted to be woken. All times have such an error."""
    counters: dict[str, float] = field(default_factory=dict)
    """By how much the counters of the server's `/metrics` grew."""
    interrupted: bool = False
    _digests: dict[tuple[int, int], bytes] = field(default_factory=dict)

    @property
    def sent_sha256(self) -> str:
        """Of all requests, in the order of their conversations. Two runs with one value sent the same."""
        return sha256(b"".join(self._digests[key] for key in sorted(self._digests))).hexdigest()

    def note(self, measured: Measured, body: bytes) -> None:
        self.measured.append(measured)
        self._digests[measured.conversation, measured.turn] = sha256(body).digest()


@dataclass
class Asking:
    """One conversation on its way."""

    number: int
    conversation: Conversation
    said: Said
    turns_asked: int = 0


async def run(  # noqa: PLR0913
    client: Client,
    conversations: Sequence[Conversation],
    form: Form,
    *,
    concurrency: int | None,
    timed: bool,
    done: Callable[[int], None],
) -> Run:
    """Ask all conversations. `timed`: at their times, at most `concurrency` at once if that is given; else by
    `concurrency` clients. Cancelled, it returns what there is so far."""
    found, before = Run(), await client.counters()
    begin_s, watch = time.perf_counter(), asyncio.create_task(_watch(found))
    asking = [Asking(n, each, Said(each, form)) for n, each in enumerate(conversations)] if not timed else []

    async def turn(each: Asking, *, late_s: float | None = None) -> bool:
        """Ask the next turn. Returns whether another one follows; an error ends the conversation."""
        asked = each.conversation.turns[each.turns_asked]
        body = client.body(each.said.ask(asked), asked.answer.tokens)
        measured = Measured(each.number, each.turns_asked, time.perf_counter() - begin_s, late_s)
        await client.ask(form.path, body, measured)
        found.note(measured, body)
        each.turns_asked += 1
        done(1)
        if measured.error:
            return False
        each.said.answered(asked, measured.text)
        return each.turns_asked < len(each.conversation.turns)

    async def work(waiting: deque[Asking]) -> None:
        while waiting:
            each = waiting.popleft()
            if await turn(each):
                waiting.append(each)

    async def at_its_time(each: Asking, places: Any) -> None:
        async with places:
            late_s = time.perf_counter() - begin_s - each.conversation.begins_s
            await turn(each, late_s=max(0.0, late_s))

    try:
        async with asyncio.TaskGroup() as tasks:
            if timed:
                places = asyncio.Semaphore(concurrency) if concurrency else nullcontext()
                for number, each in enumerate(conversations):
                    await asyncio.sleep(max(0.0, begin_s + each.begins_s - time.perf_counter()))
                    tasks.create_task(at_its_time(Asking(number, each, Said(each, form)), places))
            else:
                waiting = deque(asking)
                for _ in range(concurrency or 1):
                    tasks.create_task(work(waiting))
    except asyncio.CancelledError:  # Ctrl-C; requests that were under way are left out
        found.interrupted = True
        if task := asyncio.current_task():
            task.uncancel()  # what follows is not to be cancelled
    found.seconds = time.perf_counter() - begin_s
    watch.cancel()
    found.counters = await _grown(client, before)
    return found


async def _watch(found: Run) -> None:
    while True:
        begin_s = time.perf_counter()
        await asyncio.sleep(WAKE_S)
        found.client_late_s.append(time.perf_counter() - begin_s - WAKE_S)


async def _grown(client: Client, before: dict[str, float]) -> dict[str, float]:
    after = await client.counters()
    return {
        name: value - before.get(name, 0.0) for name, value in after.items() if value > before.get(name, 0.0)
    }
