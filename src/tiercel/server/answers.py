"""Asks in, answers out: one path for all calls, streamed or whole.

    families ──► submit ──► Step, Step, … ──► Answer, Answer, …

A family is one prompt asked n times. Its first ask goes ahead; the others follow when the first has its
first Delta, and so find its prompt in the cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from anyio import CancelScope

from tiercel.engine.ask import Ask, Delta, Finish, TokenOut, Usage
from tiercel.server.errors import ApiError
from tiercel.server.service import Service

Family = Sequence[Ask]


@dataclass(frozen=True)
class Step:
    """One Delta of the ask number `index`, counted over all families."""

    index: int
    delta: Delta


@dataclass
class Answer:
    """What has come so far for one ask."""

    ask: Ask
    usage: Usage = field(init=False)
    text: str = ""
    tokens: list[TokenOut] = field(default_factory=list)
    prompt: tuple[TokenOut, ...] = ()
    finish: Finish | None = None
    stopped_by: str | int | None = None

    def __post_init__(self) -> None:
        self.usage = Usage(prompt_tokens=len(self.ask.prompt))

    def add(self, delta: Delta) -> None:
        self.usage = delta.usage
        self.text += delta.text
        self.tokens += delta.tokens
        self.prompt = self.prompt or delta.prompt
        self.finish = delta.finish
        self.stopped_by = delta.stopped_by

    @property
    def finish_reason(self) -> Literal["stop", "length"] | None:
        """Other ends never get here: `steps` raises them."""
        match self.finish:
            case Finish.STOP:
                return "stop"
            case Finish.LENGTH:
                return "length"
        assert self.finish is None
        return None


async def steps(service: Service, families: Sequence[Family]) -> AsyncGenerator[Step, None]:
    """Everything that comes, in the order it comes. Closing this ends every ask."""
    running = _Running(service)
    open_asks = 0
    for family in families:
        running.start(open_asks, family[0], family[1:])
        open_asks += len(family)
    try:
        while open_asks:
            match await running.queue.get():
                case Step() as step:
                    yield step
                case None:
                    open_asks -= 1
                case error:
                    raise error
    finally:
        # Starlette cancels again at every step of a stream whose client is gone; one farewell must be enough.
        with CancelScope(shield=True):
            await running.close()


class _Running:
    """The asks of one call, each followed by a task of its own into one queue.

    The queue has no limit, because nothing may wait in the engine for a slow client. It holds at most the
    answers that were asked for.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.queue: asyncio.Queue[Step | Exception | None] = asyncio.Queue()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.ending: set[int] = set()

    def start(
        self, index: int, ask: Ask, others: Sequence[Ask] = (), prompt: tuple[TokenOut, ...] = ()
    ) -> None:
        """Follows an ask. With its first Delta the others begin, told what it learned of the prompt."""
        self.tasks[index] = asyncio.create_task(self._follow(index, ask, others, prompt))

    async def close(self) -> None:
        """Ends what still runs, and waits until all have given back what they held."""
        for index, task in self.tasks.items():
            if index not in self.ending:
                task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def _follow(
        self, index: int, ask: Ask, others: Sequence[Ask], prompt: tuple[TokenOut, ...]
    ) -> None:
        """From the first Delta to the last; then None, or the error that ended it."""
        began = False
        try:
            async with aclosing(self.service.submit(ask)) as deltas:
                async for delta in deltas:
                    _check(delta)
                    if not began:
                        began = True
                        delta = delta._replace(prompt=delta.prompt or prompt)
                        for place, other in enumerate(others, start=1):
                            self.start(index + place, other, prompt=delta.prompt)
                    self.queue.put_nowait(Step(index, delta))
                    if delta.finish:
                        self.ending.add(index)
                        break
                else:
                    raise AssertionError(f"the answer to {ask.request_id} has no end")
            self.queue.put_nowait(None)
        except Exception as error:  # noqa: BLE001 (whoever reads the steps raises it)
            self.queue.put_nowait(error)


def _check(delta: Delta) -> None:
    if delta.finish is Finish.ERROR:
        raise ApiError(500, delta.error or "the engine failed", code="engine_error")
    if delta.finish is Finish.ABORT:
        raise ApiError(503, delta.error or "the request was ended by the server", code="aborted")
