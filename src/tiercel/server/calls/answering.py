"""The asks of one call, and their Deltas as they arrive.

    engine's step ──► put, put, …  ──► one wake-up ──► take ──► Delta, Delta, … ──► Answer, Answer, …

A group is one prompt asked n times. The first ask starts alone; the others start at its first Delta, so that
they find the prompt in the cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiercel.asks.ask import Answer, Ask, Delta, Finish, TokenOut, Usage
from tiercel.asks.service import Service
from tiercel.server.http.border import Visit
from tiercel.server.http.errors import ApiError

FAILED = {
    Finish.ERROR: (500, "the engine failed", "engine_error"),
    Finish.ABORT: (503, "the server ended the request", "aborted"),
    Finish.GRAMMAR: (400, "the answer can not follow its grammar", "invalid_grammar"),
}
"""Endings that are errors: status, message, code."""


@dataclass(frozen=True)
class Abort:
    """A client's wish to end an answer early, by the engine's id of its request."""

    request_id: str

    def concerns(self, ask: Ask) -> bool:
        """Whether it ends this ask. Ids of several prompts or answers are derived from the request's id."""
        return ask.request_id == self.request_id or ask.request_id.startswith(f"{self.request_id}.")


class Answering:
    """The asks of one call, from their start to `close`, which must be called.

    What arrives waits in a list without a limit, because the engine must not wait for a slow client. The list
    holds one call's answers at most.
    """

    def __init__(
        self,
        service: Service,
        groups: Sequence[Sequence[Ask]],
        answers: Sequence[Answer],
        visit: Visit,
    ) -> None:
        self.answers = answers
        self._service, self._visit = service, visit
        self._groups = [[visit.bind(ask) for ask in group] for group in groups]
        visit.asks = self._asks = [ask for group in self._groups for ask in group]
        self._open = set(range(len(self._asks)))
        self._ending: set[int] = set()
        """Asks that were cancelled, or whose last Delta has arrived."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._arrived: list[tuple[int, Delta] | Abort | Exception] = []
        self._waiter: asyncio.Future[None] | None = None
        first = 0
        for group in self._groups:
            self._start(first, group[0], group[1:])
            first += len(group)
        visit.abort = lambda request_id: self._put(Abort(request_id))

    @property
    def going(self) -> bool:
        """Whether `take` has not given the end of every answer yet."""
        return bool(self._open)

    async def wait(self) -> None:
        """Wait until there is something to take."""
        if not self._arrived:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def take(self) -> Iterator[tuple[int, Delta]]:
        """What has arrived, in its order: Deltas with the number of their ask, counted over all groups. Each
        was just added to its answer. Raises the error that ended an ask."""
        arrived, self._arrived = self._arrived, []
        for new in arrived:
            if isinstance(new, tuple):
                index, delta = new
                if index in self._open:  # nothing more is sent after an abort
                    yield self._added(index, delta)
            elif isinstance(new, Abort):
                yield from self._aborted(new)
            else:
                raise new

    def _added(self, index: int, delta: Delta) -> tuple[int, Delta]:
        if delta.finish is not None:
            self._open.discard(index)
        self._visit.token_seen()
        self.answers[index].add(delta)
        return index, delta

    def _aborted(self, abort: Abort) -> Iterator[tuple[int, Delta]]:
        for index in [index for index in self._open if abort.concerns(self._asks[index])]:
            self._cancel(index)
            answer, ask = self.answers[index], self._asks[index]
            usage = answer.usage if answer.tokens else Usage(len(ask.prompt))
            yield self._added(index, Delta(ask.request_id, usage, finish=Finish.ABORT))

    async def run(self) -> None:
        """Take everything, to the end."""
        while self.going:
            await self.wait()
            for _ in self.take():
                pass

    async def close(self) -> None:
        """End the asks that still run, and wait until they have given back all memory. Does nothing the
        second time."""
        self._visit.abort = None
        self._visit.usage = _usage(self._groups, self.answers)
        for index in self._tasks:
            self._cancel(index)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _cancel(self, index: int) -> None:
        """Ends an ask, if it was started. `close` waits for it."""
        if index in self._tasks and index not in self._ending:
            self._ending.add(index)
            self._tasks[index].cancel()

    # Asks on their way

    def _put(self, new: tuple[int, Delta] | Abort | Exception) -> None:
        self._arrived.append(new)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _start(
        self, index: int, ask: Ask, others: Sequence[Ask] = (), prompt: tuple[TokenOut, ...] = ()
    ) -> None:
        """Starts an ask. Its first Delta starts the `others`, which get the prompt's logprobs from it."""
        self._tasks[index] = asyncio.create_task(self._follow(index, ask, others, prompt))

    async def _follow(
        self, index: int, ask: Ask, others: Sequence[Ask], prompt: tuple[TokenOut, ...]
    ) -> None:
        began = False

        def put(delta: Delta) -> None:
            nonlocal began
            if delta.finish is not None:
                self._ending.add(index)
                if delta.finish in FAILED:
                    status, message, code = FAILED[delta.finish]
                    self._put(ApiError(status, delta.error or message, code=code))
                    return
            if not began:
                began = True
                delta = delta._replace(prompt=delta.prompt or prompt)
                for place, other in enumerate(others, start=1):
                    self._start(index + place, other, prompt=delta.prompt)
            self._put((index, delta))

        try:
            await self._service.submit(ask, put)
            assert index in self._ending, f"the answer to {ask.request_id} has no end"
        except Exception as error:  # noqa: BLE001 (`take` raises it)
            self._put(error)


def _usage(groups: Sequence[Sequence[Ask]], answers: Sequence[Answer]) -> Usage:
    """Tokens of a call. A prompt that is asked n times is counted once, every answer each time."""
    firsts, index = [], 0
    for group in groups:
        firsts.append(answers[index].usage)
        index += len(group)
    drawn = sum(answer.usage.completion_tokens for answer in answers)
    summed = Usage(*(sum(numbers) for numbers in zip(*firsts, strict=True)))
    return summed._replace(completion_tokens=drawn)
