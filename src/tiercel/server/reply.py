"""`Reply`: how a call formats its answers. `respond`: the one function that sends them."""

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

from tiercel.engine.ask import Answer, Delta
from tiercel.server.answers import AnswerDelta, AskGroup, answer_deltas
from tiercel.server.body import read_body
from tiercel.server.border import Visit, visit_of
from tiercel.server.errors import ApiError, ClientGone
from tiercel.server.metrics import Metrics
from tiercel.server.options import ServerOptions
from tiercel.server.service import Service
from tiercel.server.sse import EventStream

Asked = TypeVar("Asked", bound=BaseModel)
T = TypeVar("T")

TEXT_THREADS = 4
"""A long text takes seconds, and a short one should find a free thread. Tokenizing releases the GIL."""

LONG_TOKENS = 256
"""From this many prompt logprobs on, JSON is written off the event loop: it takes about a millisecond."""


@dataclass(frozen=True)
class Front:
    """What every handler needs."""

    service: Service
    options: ServerOptions
    metrics: Metrics
    aside: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(TEXT_THREADS, "tiercel-text")
    )

    async def off_loop(self, work: Callable[..., T], *given: Any) -> T:
        """Runs work in a thread, so that templates and tokenizing do not block the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.aside, work, *given)

    def check_alive(self) -> None:
        if self.service.failure is not None:
            raise self.service.failure

    def check_ready(self) -> None:
        self.check_alive()
        if not self.service.ready:
            headers = {"retry-after": "1"}
            raise ApiError(503, "the server is starting or shutting down", code="not_ready", headers=headers)

    async def read(self, request: Request, model: type[Asked]) -> Asked:
        """The body of a call for an answer."""
        return await read_body(request, model, self.options.body_bytes_max, strict=self.options.strict)

    def check_batch(self, field: str, count: int) -> None:
        if count > self.options.batch_max:
            message = f"{field} has {count} prompts, {self.options.batch_max} are allowed"
            raise ApiError(400, message, param=field, code="invalid_value")


class Reply(Protocol):
    """How one call formats its answers, as models or as JSON. `answers` are in the order of the asks. It is
    called from one thread at a time, not always the same."""

    def whole(self, answers: Sequence[Answer]) -> BaseModel | str:
        """The complete answer of a call that does not stream."""
        ...

    def piece(self, index: int, answer: Answer, delta: Delta) -> Iterable[BaseModel | str]:
        """The events for one Delta, which was already added to its answer."""
        ...

    def last(self, answers: Sequence[Answer]) -> Iterable[BaseModel | str]:
        """The last events of a stream."""
        ...


async def respond(
    front: Front, request: Request, groups: Sequence[AskGroup], reply: Reply, *, stream: bool
) -> Response:
    """Submits the asks and sends the answers in the form of `reply`. An error before the first token sets the
    status code."""
    every = [ask for group in groups for ask in group]
    coming, answers = answer_deltas(front.service, groups), [Answer() for _ in every]
    if stream:
        pieces = _pieces(front, coming, answers, reply, visit_of(request))
        return EventStream(await while_present(request, _next(pieces)), pieces)
    await while_present(request, _gather(coming, answers, visit_of(request)))
    if any(ask.sampling.logprobs is not None for ask in every):
        text = await front.off_loop(lambda: _json(reply.whole(answers)))
    else:
        text = _json(reply.whole(answers))
    return Response(text, media_type="application/json")


def _json(said: BaseModel | str) -> str:
    return said if isinstance(said, str) else said.model_dump_json(exclude_unset=True)


async def _gather(coming: AsyncGenerator[AnswerDelta, None], answers: Sequence[Answer], visit: Visit) -> None:
    async with aclosing(coming):
        async for new in coming:
            visit.token_seen()
            answers[new.index].add(new.delta)


async def _pieces(
    front: Front,
    coming: AsyncGenerator[AnswerDelta, None],
    answers: Sequence[Answer],
    reply: Reply,
    visit: Visit,
) -> AsyncGenerator[str, None]:
    def written(new: AnswerDelta) -> list[str]:
        return [_json(piece) for piece in reply.piece(new.index, answers[new.index], new.delta)]

    async with aclosing(coming):
        async for new in coming:
            visit.token_seen()
            answers[new.index].add(new.delta)
            long = len(new.delta.prompt) > LONG_TOKENS
            for piece in await front.off_loop(written, new) if long else written(new):
                yield piece
    for last in reply.last(answers):
        yield _json(last)


async def _next(pieces: AsyncGenerator[str, None]) -> str:
    return await anext(pieces)


async def while_present(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects first, the work is cancelled.

    The body was read, so the only message that can still arrive is the disconnect.
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
