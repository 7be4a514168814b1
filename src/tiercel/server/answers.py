"""From asks to answers: one path for all calls, streamed or not.

    groups ──► submit ──► AnswerDelta, AnswerDelta, … ──► Answer, Answer, …

A group is one prompt asked n times. The first ask starts alone; the others start at its first Delta, so that
they find the prompt in the cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from anyio import CancelScope

from tiercel.engine.ask import Answer, Ask, Delta, Finish, TokenOut
from tiercel.server.errors import ApiError
from tiercel.server.service import Service

AskGroup = Sequence[Ask]


@dataclass(frozen=True)
class AnswerDelta:
    """One Delta of the ask number `index`, counted over all groups."""

    index: int
    delta: Delta


def finish_reason(answer: Answer) -> Literal["stop", "length"] | None:
    """Why an answer ended. `answer_deltas` raises every other ending as an error."""
    match answer.finish:
        case Finish.STOP:
            return "stop"
        case Finish.LENGTH:
            return "length"
    assert answer.finish is None
    return None


async def answer_deltas(service: Service, groups: Sequence[AskGroup]) -> AsyncGenerator[AnswerDelta, None]:
    """All Deltas of all asks, in the order of their arrival. Closing the generator ends every ask."""
    running = _Running(service)
    open_asks = 0
    for group in groups:
        running.start(open_asks, group[0], group[1:])
        open_asks += len(group)
    try:
        while open_asks:
            match await running.queue.get():
                case AnswerDelta() as new:
                    yield new
                case None:
                    open_asks -= 1
                case error:
                    raise error
    finally:
        # When a client is gone Starlette cancels again at every await. `close` must run once, to its end.
        with CancelScope(shield=True):
            await running.close()


class _Running:
    """The asks of one call. One asyncio task for each ask puts its Deltas into a shared queue.

    The queue has no limit, because the engine must not wait for a slow client. It holds one call's answers at
    most.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.queue: asyncio.Queue[AnswerDelta | Exception | None] = asyncio.Queue()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.ending: set[int] = set()

    def start(
        self, index: int, ask: Ask, others: Sequence[Ask] = (), prompt: tuple[TokenOut, ...] = ()
    ) -> None:
        """Starts an ask. Its first Delta starts the `others`, which get the prompt's logprobs from it."""
        self.tasks[index] = asyncio.create_task(self._follow(index, ask, others, prompt))

    async def close(self) -> None:
        """Ends the asks that still run, and waits until they have given back all memory."""
        for index, task in self.tasks.items():
            if index not in self.ending:
                task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def _follow(
        self, index: int, ask: Ask, others: Sequence[Ask], prompt: tuple[TokenOut, ...]
    ) -> None:
        """Queues every Delta of an ask; then None, or the error that ended the ask."""
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
                    self.queue.put_nowait(AnswerDelta(index, delta))
                    if delta.finish:
                        self.ending.add(index)
                        break
                else:
                    raise AssertionError(f"the answer to {ask.request_id} has no end")
            self.queue.put_nowait(None)
        except Exception as error:  # noqa: BLE001 (`answer_deltas` raises it)
            self.queue.put_nowait(error)


def _check(delta: Delta) -> None:
    if delta.finish is Finish.ERROR:
        raise ApiError(500, delta.error or "the engine failed", code="engine_error")
    if delta.finish is Finish.ABORT:
        raise ApiError(503, delta.error or "the server ended the request", code="aborted")
