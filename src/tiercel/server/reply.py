"""How one call writes its answers, and the one place that sends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from tiercel.engine.ask import Delta
from tiercel.server.answers import Answer, Family, Step, steps
from tiercel.server.body import read_body
from tiercel.server.border import Visit, visit_of
from tiercel.server.errors import ApiError, ClientGone
from tiercel.server.metrics import Metrics
from tiercel.server.options import ServerOptions
from tiercel.server.service import Service
from tiercel.server.sse import EventStream

Asked = TypeVar("Asked", bound=BaseModel)
Result = TypeVar("Result")

TEXT_THREADS = 4
"""Long texts take seconds each, and a short one should find a thread. Tokenizing needs no GIL."""

LONG_TOKENS = 256
"""Logprobs of a prompt that are not written on the event loop: a millisecond or so."""


@dataclass(frozen=True)
class Front:
    """What every handler needs."""

    service: Service
    options: ServerOptions
    metrics: Metrics
    aside: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(TEXT_THREADS, "tiercel-text")
    )

    async def off_loop(self, work: Callable[..., Result], *given: Any) -> Result:
        """Templates and tokenizing, which take as long as a text is: the event loop goes on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self.aside, work, *given)

    def check_alive(self) -> None:
        if self.service.failure is not None:
            raise self.service.failure

    def check_ready(self) -> None:
        self.check_alive()
        if not self.service.ready:
            headers = {"retry-after": "1"}
            raise ApiError(503, "the server is starting or ending", code="not_ready", headers=headers)

    async def read(self, request: Request, model: type[Asked]) -> Asked:
        """The body of a call that wants an answer."""
        return await read_body(request, model, self.options.body_bytes_max, strict=self.options.strict)

    def check_batch(self, field: str, count: int) -> None:
        if count > self.options.batch_max:
            message = f"{field} has {count} prompts, {self.options.batch_max} are allowed"
            raise ApiError(400, message, param=field, code="invalid_value")


class Reply(Protocol):
    """The words of one call, as models or as JSON. `answers` are in the order of the asks, complete up to
    now. Called from one thread at a time, not always the same."""

    def whole(self, answers: Sequence[Answer]) -> BaseModel | str:
        """Everything at once."""
        ...

    def piece(self, index: int, answer: Answer, delta: Delta) -> Iterable[BaseModel | str]:
        """What one Delta, already added to its answer, makes known."""
        ...

    def last(self, answers: Sequence[Answer]) -> Iterable[BaseModel | str]:
        """What a stream ends with."""
        ...


async def respond(
    front: Front, request: Request, families: Sequence[Family], reply: Reply, *, stream: bool
) -> Response:
    """Asks, and sends what `reply` makes of it. What fails before the first token has a status of its own."""
    coming = steps(front.service, families)
    answers = [Answer(ask) for family in families for ask in family]
    if stream:
        pieces = _pieces(front, coming, answers, reply, visit_of(request))
        return EventStream(await while_present(request, _next(pieces)), pieces)
    await while_present(request, _gather(coming, answers, visit_of(request)))
    if any(answer.ask.sampling.logprobs is not None for answer in answers):
        text = await front.off_loop(lambda: _json(reply.whole(answers)))
    else:
        text = _json(reply.whole(answers))
    return Response(text, media_type="application/json")


def _json(said: BaseModel | str) -> str:
    return said if isinstance(said, str) else said.model_dump_json(exclude_unset=True)


async def _gather(coming: AsyncGenerator[Step, None], answers: Sequence[Answer], visit: Visit) -> None:
    async with aclosing(coming):
        async for step in coming:
            visit.token_seen()
            answers[step.index].add(step.delta)


async def _pieces(
    front: Front, coming: AsyncGenerator[Step, None], answers: Sequence[Answer], reply: Reply, visit: Visit
) -> AsyncGenerator[str, None]:
    def written(step: Step) -> list[str]:
        return [_json(piece) for piece in reply.piece(step.index, answers[step.index], step.delta)]

    async with aclosing(coming):
        async for step in coming:
            visit.token_seen()
            answers[step.index].add(step.delta)
            long = len(step.delta.prompt) > LONG_TOKENS
            for piece in await front.off_loop(written, step) if long else written(step):
                yield piece
    for last in reply.last(answers):
        yield _json(last)


async def _next(pieces: AsyncGenerator[str, None]) -> str:
    return await anext(pieces)


async def while_present(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result, unless the client leaves first: then the work is cancelled.

    The body was read: all that can still be received is that the client is gone.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
