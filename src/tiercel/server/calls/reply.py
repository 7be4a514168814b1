"""From asks to the bytes of an answer: one path for all calls, streamed or not.

groups ──► Answering ──► Delta, Delta, … ──► Answer, Answer, …
                           │                    └──► whole ──► JSON
                           └──► piece, …, last ──► server-sent events
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar

import pydantic_core
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tiercel.asks.ask import Answer, Ask, Delta, Finish
from tiercel.asks.service import Service
from tiercel.server.calls.answering import Answering
from tiercel.server.calls.grammars import Trying
from tiercel.server.calls.trials import Trials
from tiercel.server.http.aside import Aside
from tiercel.server.http.body import BodyLimits, read_body
from tiercel.server.http.border import visit_now, visit_of
from tiercel.server.http.errors import ApiError, ClientGone, translate
from tiercel.server.http.metrics import Metrics
from tiercel.server.options import ServerOptions

Asked = TypeVar("Asked", bound=BaseModel)
T = TypeVar("T")
AskGroup = Sequence[Ask]

LONG_TOKENS = 256
"""From this many prompt logprobs on, JSON is written off the event loop: it takes about a millisecond."""

DEFAULT_MODEL = "default"
"""SGLang's clients send this if they name no model."""


@dataclass(frozen=True)
class Api:
    """What every handler needs."""

    service: Service
    options: ServerOptions
    metrics: Metrics
    aside: Aside

    @cached_property
    def trials(self) -> Trials:
        return Trials(self.service.text.grammars, self.off_loop)

    def trying(self, request: Request) -> Trying:
        """How the grammars of a call are tried. It ends if the client leaves."""
        owner = visit_of(request).payer
        return Trying(
            owner, lambda recipe: while_present(request.receive, self.trials.grammar(recipe, owner))
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model; the first is the service's own."""
        return tuple(dict.fromkeys((self.service.model_name, *self.options.model_names)))

    @property
    def names_accepted(self) -> tuple[str, ...]:
        """The names by which a client may call the model: also its folder."""
        path = () if self.options.model_path is None else (self.options.model_path,)
        return tuple(dict.fromkeys((*self.names, *path, DEFAULT_MODEL)))

    def check_model(self, name: str | None) -> None:
        """A client that names no model means the one that is served."""
        if name is not None and name not in self.names_accepted:
            listed = ", ".join(map(repr, self.names))
            message = f"model {name[:100]!r} is not served here; the served model has the names {listed}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def off_loop(self, work: Callable[..., T], *given: Any) -> T:
        """Runs work in a thread, so that templates and tokenizing do not block the event loop."""
        return await self.aside.text(visit_now(), work, *given)

    async def on_body(self, work: Callable[..., T], *given: Any) -> T:
        """Runs work on the request's body: in a thread if the body is large."""
        return await self.aside.body(visit_now(), work, *given)

    @property
    def body_limits(self) -> BodyLimits:
        """The limits of a body. It may have as many token ids as four of the longest prompts, or the usual
        number
        if that is more."""
        least = BodyLimits(self.options.body_bytes_max)
        return replace(least, numbers_max=max(least.numbers_max, 4 * self.service.context_tokens))

    def check_alive(self) -> None:
        if self.service.failure is not None:
            raise self.service.failure

    def check_ready(self) -> None:
        self.check_alive()
        if not self.service.ready:
            headers = {"retry-after": "1"}
            raise ApiError(503, "the server is starting or shutting down", code="not_ready", headers=headers)

    async def read(self, request: Request, model: type[Asked]) -> Asked:
        """The body of a call."""
        self.check_ready()
        return await read_body(request, model, self.body_limits, self.on_body, strict=self.options.strict)

    async def read_ask(self, request: Request, model: type[Asked]) -> Asked:
        """The body of a call for an answer. A tenant above its limits gets none: its body is not read."""
        visit = visit_of(request)
        if (over := visit.begin()) is not None and visit.tenant is not None:
            self.metrics.refused(visit.tenant.name, over.limit)
            headers = {"retry-after": str(over.retry_s)}
            raise ApiError(
                429, f"{visit.tenant.name}: {over}", code=over.limit.replace("-", "_"), headers=headers
            )
        return await self.read(request, model)


class Reply(Protocol):
    """How one call writes its answers as JSON. `answers` are in the order of the asks. It is called from one
    thread at a time, not always the same."""

    def whole(self, answers: Sequence[Answer]) -> str:
        """The complete answer of a call that does not stream."""
        ...

    def piece(self, index: int, answer: Answer, delta: Delta) -> Iterable[str]:
        """The events for one Delta, which was already added to its answer."""
        ...

    def last(self, answers: Sequence[Answer]) -> Iterable[str]:
        """The last events of a stream."""
        ...

    def framed(self, event: str) -> str:
        """An event as it is sent."""
        ...

    def failed(self, error: ApiError) -> str:
        """The last event of a stream that an error ends."""
        ...

    ended: str
    """What is sent after the last event of a stream that no error ended."""


class DataEvents:
    """Streams of OpenAI's older calls and of SGLang: events without a name, then [DONE]."""

    ended = "data: [DONE]\n\n"

    def framed(self, event: str) -> str:
        return f"data: {event}\n\n"

    def failed(self, error: ApiError) -> str:
        return json.dumps(error.body())


class NamedEvents:
    """Streams of newer calls: every event is named by its field `type`, and the last one tells the end."""

    ended = ""

    def framed(self, event: str) -> str:
        name = event.removeprefix('{"type":"').partition('"')[0]
        return f"event: {name}\ndata: {event}\n\n"


def to_json(value: object) -> str:
    return pydantic_core.to_json(value).decode()  # several times as fast as `json.dumps`


def finish_reason(answer: Answer) -> Literal["stop", "length", "abort"] | None:
    """Why an answer ended: `abort` if a client wanted it. `Answering` raises every other ending as an
    error."""
    match answer.finish:
        case Finish.STOP:
            return "stop"
        case Finish.LENGTH:
            return "length"
        case Finish.ABORT:
            return "abort"
    assert answer.finish is None
    return None


async def respond(
    api: Api, request: Request, groups: Sequence[AskGroup], reply: Reply, *, stream: bool
) -> Response:
    """Submits the asks and sends the answers in the form of `reply`. An error before the first token sets the
    status code."""
    every = [ask for group in groups for ask in group]
    visit = visit_of(request)
    visit.answers = answers = [Answer() for _ in every]
    asked = Answering(api.service, groups, answers, visit)
    try:
        if stream:
            chunks = _chunks(api, asked, reply)
            return EventStream(await while_present(request.receive, _next(chunks)), chunks, asked)
        await while_present(request.receive, asked.run())
    except BaseException:
        await asked.close()
        raise
    await asked.close()
    logged = any(ask.sampling.logprobs is not None for ask in every)
    text = await api.off_loop(reply.whole, answers) if logged else reply.whole(answers)
    return Response(text, media_type="application/json")


async def _chunks(api: Api, asked: Answering, reply: Reply) -> AsyncGenerator[bytes, None]:
    """A stream of events as bytes. What arrives together is one chunk. An error before the first chunk is
    raised; a later one becomes the last event."""
    events: list[str] = []
    begun = False

    def write(index: int, delta: Delta) -> None:
        events.extend(reply.piece(index, asked.answers[index], delta))

    def chunk(ended: str = "") -> bytes:
        text = "".join([*map(reply.framed, events), ended])
        events.clear()
        return text.encode()

    try:
        while asked.going:
            await asked.wait()
            for index, delta in asked.take():
                if len(delta.prompt) > LONG_TOKENS:
                    await api.off_loop(write, index, delta)
                else:
                    write(index, delta)
            if events and asked.going:
                begun = True
                yield chunk()
        await asked.close()
        events.extend(reply.last(asked.answers))
        yield chunk(reply.ended)
    except Exception as error:
        if not (begun or events):
            raise
        events.append(reply.failed(translate(error)))
        yield chunk()


async def _next(chunks: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(chunks)


async def while_present(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects first, the work is cancelled.

    The body was read, so the only message that can still arrive is the disconnect.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends the chunks of a generator. The asks are always closed: a client may leave at any time."""

    media_type = "text/event-stream"

    def __init__(self, head: bytes, rest: AsyncGenerator[bytes, None], asked: Answering) -> None:
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._head, self._rest, self._asked = head, rest, asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 (of ASGI)
        try:
            with suppress(ClientGone):
                await while_present(receive, self._send(send))
        finally:
            await self._asked.close()
            await self._rest.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._head, "more_body": True})
        async for chunk in self._rest:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
