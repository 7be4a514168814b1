"""From asks to the bytes of an answer: one path for all calls, streamed or not.

    groups ──► submit ──► Delta, Delta, … ──► Answer, Answer, …     `answer_deltas`
                            │                    └──► whole ──► JSON
                            └──► piece, …, last ──► server-sent events

A group is one prompt asked n times. The first ask starts alone; the others start at its first Delta, so that
they find the prompt in the cache.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import pydantic_core
from anyio import CancelScope
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tiercel.engine.ask import Answer, Ask, Delta, Finish, TokenOut, Usage
from tiercel.server.body import read_body
from tiercel.server.border import Visit, visit_of
from tiercel.server.errors import ApiError, ClientGone, translate
from tiercel.server.metrics import Metrics
from tiercel.server.options import ServerOptions

if TYPE_CHECKING:
    from tiercel.engine.service import EngineService


Asked = TypeVar("Asked", bound=BaseModel)
T = TypeVar("T")
AskGroup = Sequence[Ask]

TEXT_THREADS = 4
"""A long text takes seconds, and a short one should find a free thread. Tokenizing releases the GIL."""

LONG_TOKENS = 256
"""From this many prompt logprobs on, JSON is written off the event loop: it takes about a millisecond."""

DEFAULT_MODEL = "default"
"""SGLang's clients send this if they name no model."""

FAILED = {
    Finish.ERROR: (500, "the engine failed", "engine_error"),
    Finish.ABORT: (503, "the server ended the request", "aborted"),
}
"""Endings that are errors: status, message, code."""


@dataclass(frozen=True)
class Front:
    """What every handler needs."""

    service: EngineService
    options: ServerOptions
    metrics: Metrics
    aside: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(TEXT_THREADS, "tiercel-text")
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
        """The body of a call."""
        self.check_ready()
        return await read_body(request, model, self.options.body_bytes_max, strict=self.options.strict)

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


@dataclass(frozen=True)
class Abort:
    """A client's wish to end an answer early, by the engine's id of its request."""

    request_id: str

    def concerns(self, ask: Ask) -> bool:
        """Ids of several prompts, or of several answers, are derived from the request's."""
        return ask.request_id == self.request_id or ask.request_id.startswith(f"{self.request_id}.")


def finish_reason(answer: Answer) -> Literal["stop", "length", "abort"] | None:
    """Why an answer ended: `abort` if a client wanted it. `answer_deltas` raises every other ending as an
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
    front: Front, request: Request, groups: Sequence[AskGroup], reply: Reply, *, stream: bool
) -> Response:
    """Submits the asks and sends the answers in the form of `reply`. An error before the first token sets the
    status code."""
    every = [ask for group in groups for ask in group]
    visit = visit_of(request)
    visit.answers = answers = [Answer() for _ in every]
    coming = answer_deltas(front.service, groups, answers, visit)
    if stream:
        pieces = _pieces(front, coming, answers, reply)
        return EventStream(await while_present(request, _next(pieces)), pieces, reply)
    await while_present(request, _gather(coming))
    logged = any(ask.sampling.logprobs is not None for ask in every)
    text = await front.off_loop(reply.whole, answers) if logged else reply.whole(answers)
    return Response(text, media_type="application/json")


AnswerDeltas = AsyncGenerator[tuple[int, Delta], None]
"""Deltas with the number of their ask, counted over all groups."""


async def answer_deltas(
    service: EngineService, groups: Sequence[AskGroup], answers: Sequence[Answer], visit: Visit
) -> AnswerDeltas:
    """All Deltas of all asks, in the order of their arrival, added to `answers`. Closing the generator ends
    every ask."""
    running = _Running(service)
    groups = [[visit.bind(ask) for ask in group] for group in groups]
    visit.asks = every = [ask for group in groups for ask in group]
    open_asks = set(range(len(every)))
    first = 0
    for group in groups:
        running.start(first, group[0], group[1:])
        first += len(group)
    visit.abort = lambda request_id: running.queue.put_nowait(Abort(request_id))
    try:
        while open_asks:
            match await running.queue.get():
                case Abort() as abort:
                    for index in [index for index in open_asks if abort.concerns(every[index])]:
                        open_asks.discard(index)
                        running.cancel(index)
                        usage = (
                            answers[index].usage if answers[index].tokens else Usage(len(every[index].prompt))
                        )
                        delta = Delta(every[index].request_id, usage, finish=Finish.ABORT)
                        answers[index].add(delta)
                        yield index, delta
                case (index, _) if index not in open_asks:
                    pass  # it came after the abort
                case (index, None):
                    open_asks.discard(index)
                case (index, Delta() as delta):
                    visit.token_seen()
                    answers[index].add(delta)
                    yield index, delta
                case Exception() as error:
                    raise error
    finally:
        visit.abort = None
        visit.usage = _usage(groups, answers)
        # When a client is gone Starlette cancels again at every await. `close` must run once, to its end.
        with CancelScope(shield=True):
            await running.close()


def _usage(groups: Sequence[AskGroup], answers: Sequence[Answer]) -> Usage:
    """Tokens of a call: a prompt that is asked n times is counted once, every answer is."""
    firsts, index = [], 0
    for group in groups:
        firsts.append(answers[index].usage)
        index += len(group)
    drawn = sum(answer.usage.completion_tokens for answer in answers)
    prompts, _, device, host, store = (sum(numbers) for numbers in zip(*firsts, strict=True))
    return Usage(prompts, drawn, device, host, store)


class _Running:
    """The asks of one call. One asyncio task for each ask puts its Deltas into a shared queue.

    The queue has no limit, because the engine must not wait for a slow client. It holds one call's answers at
    most.
    """

    def __init__(self, service: EngineService) -> None:
        self.service = service
        self.queue: asyncio.Queue[tuple[int, Delta | None] | Exception | Abort] = asyncio.Queue()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.ending: set[int] = set()

    def start(
        self, index: int, ask: Ask, others: Sequence[Ask] = (), prompt: tuple[TokenOut, ...] = ()
    ) -> None:
        """Starts an ask. Its first Delta starts the `others`, which get the prompt's logprobs from it."""
        self.tasks[index] = asyncio.create_task(self._follow(index, ask, others, prompt))

    def cancel(self, index: int) -> None:
        """Ends an ask, if it was started. `close` waits for it."""
        if index in self.tasks and index not in self.ending:
            self.tasks[index].cancel()

    async def close(self) -> None:
        """Ends the asks that still run, and waits until they have given back all memory."""
        for index, task in self.tasks.items():
            if index not in self.ending:
                task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def _follow(
        self, index: int, ask: Ask, others: Sequence[Ask], prompt: tuple[TokenOut, ...]
    ) -> None:
        """Queues every Delta of an ask; then None instead of one, or the error that ended the ask."""
        began = False
        try:
            async with aclosing(self.service.submit(ask)) as deltas:
                async for delta in deltas:
                    if delta.finish in FAILED:
                        status, message, code = FAILED[delta.finish]
                        raise ApiError(status, delta.error or message, code=code)
                    if not began:
                        began = True
                        delta = delta._replace(prompt=delta.prompt or prompt)
                        for place, other in enumerate(others, start=1):
                            self.start(index + place, other, prompt=delta.prompt)
                    self.queue.put_nowait((index, delta))
                    if delta.finish:
                        self.ending.add(index)
                        break
                else:
                    raise AssertionError(f"the answer to {ask.request_id} has no end")
            self.queue.put_nowait((index, None))
        except Exception as error:  # noqa: BLE001 (`answer_deltas` raises it)
            self.queue.put_nowait(error)


async def _gather(coming: AnswerDeltas) -> None:
    async with aclosing(coming):
        async for _ in coming:
            pass


async def _pieces(
    front: Front, coming: AnswerDeltas, answers: Sequence[Answer], reply: Reply
) -> AsyncGenerator[str, None]:
    def written(index: int, delta: Delta) -> list[str]:
        return list(reply.piece(index, answers[index], delta))

    async with aclosing(coming):
        async for new in coming:
            long = len(new[1].prompt) > LONG_TOKENS
            for piece in await front.off_loop(written, *new) if long else written(*new):
                yield piece
    for last in reply.last(answers):
        yield last


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


class EventStream(StreamingResponse):
    """Sends the JSON of a generator as server-sent events, framed by the reply.

    An error after the first event becomes the last event. The generator is always closed: a client may leave
    at any time.
    """

    media_type = "text/event-stream"

    def __init__(self, head: str, rest: AsyncGenerator[str, None], reply: Reply) -> None:
        self._events = _events(head, rest, reply)
        self._rest = rest
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._events, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await self._rest.aclose()


async def _events(head: str, rest: AsyncGenerator[str, None], reply: Reply) -> AsyncGenerator[str, None]:
    yield reply.framed(head)
    try:
        async for piece in rest:
            yield reply.framed(piece)
    except Exception as error:  # noqa: BLE001 (the status code is sent already)
        yield reply.framed(reply.failed(translate(error)))
    else:
        yield reply.ended
