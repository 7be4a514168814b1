"""An engine behind a thread, for programs that wait on many answers at once.

    event loop                     engine's thread
    submit ──── inbox ──────────►  add, abort, flush …      between two steps
    put    ◄─── one call a step ── deltas

The engine is driven by its own thread only; everything else asks it through the inbox.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tiercel.asks.ask import Ask, Delta, EngineStats, Explanation, Finish, Usage, first_token
from tiercel.engine.engine import Engine
from tiercel.engine.loop import WAIT_S, steps_of
from tiercel.engine.pulling import Address, Pulls
from tiercel.engine.step import Drawn
from tiercel.errors import EngineError, QueueFull, StoreError
from tiercel.events import EventPublisher
from tiercel.peers.offering import Offering
from tiercel.storage.open import hide, open_store
from tiercel.storage.peer import PeerStore
from tiercel.text.text import Text
from tiercel.threads import start
from tiercel.transfer.mover import StoreMover
from tiercel.types import PageKey

log = logging.getLogger(__name__)

T = TypeVar("T")

WATCHED_S = 0.02
"""While other servers watch: the time between two looks at what was saved."""

PENDING_S = 0.5
"""The longest wait between two steps while only a store is still working: it may have to be given up, or
tried again."""

STOPPED = "the engine has stopped"


class EngineService:
    """The `Service` of an engine in this process. Made in any thread, used from one event loop, closed once.
    After a `failure` every call except `explain` raises it."""

    def __init__(
        self,
        engine: Engine,
        model_name: str,
        store_url: str | None = None,
        events: EventPublisher | None = None,
    ) -> None:
        """`events`: the publisher of KV events; its counters are part of `stats`."""
        self.model_name = model_name
        self._events = events
        self.store_url = hide(store_url, store_url) if store_url else ""
        self.context_tokens = engine.context_tokens
        self.page_tokens = engine.page_tokens
        self.vocab_size = engine.vocab_size
        """How many token ids the model reads and draws. Its tokenizer may know fewer, or more."""
        self._engine = engine
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = engine.cache.transfer_ended
        """Notified when the inbox has something new, an answer has gone on, or a transfer has ended."""
        self._closing = self._ending = self._stopped = False
        self.failure: EngineError | None = None
        self._refusal: EngineError | None = None
        """Why the engine's thread does nothing more: the failure, or that it has stopped."""
        """Why nothing is served any more."""
        self._offering: Offering | None = None
        self._shared_at: Address | None = None
        self._pulls: Pulls | None = None
        self._prefilling: set[str] = set()
        """Requests whose prompts are computed for other servers."""
        self._peers: tuple[PeerStore, ...] = ()
        self._pulling: set[threading.Event] = set()
        self._answers: dict[str, _Listener] = {}
        self._thread = threading.Thread(target=self._run, name="tiercel-engine", daemon=True)
        self._thread.start()

    @property
    def text(self) -> Text:
        return self._engine.text

    @property
    def ready(self) -> bool:
        return self._thread.is_alive() and self.failure is None and not self._closing

    # Asking

    async def submit(self, ask: Ask, put: Callable[[Delta], None]) -> None:
        """See `Service.submit`. A prompt that another server computes is pulled first."""
        for_others = self._for_others(ask)
        if for_others:
            ask = replace(ask, sampling=first_token(ask.sampling), for_others=True)
        elif ask.prefiller is not None and self._pulls is not None and not self._ending:
            await self._pull(ask, self._pulls)
        if self._ending:
            put(Delta(ask.request_id, Usage(len(ask.prompt)), finish=Finish.ABORT))
            return
        listener = _Listener(asyncio.get_running_loop(), put)

        def add() -> None:
            self._engine.add(ask)
            self._answers[ask.request_id] = listener
            if for_others:
                self._prefilling.add(ask.request_id)

        adding = self._ask(add)
        try:
            await asyncio.wrap_future(adding)
            await listener.ended.wait()
        except QueueFull:
            if not for_others:
                raise
            # routers make the client fail with an error of this server; the other one computes instead
            put(Delta(ask.request_id, Usage(len(ask.prompt)), finish=Finish.LENGTH))
        finally:
            if not (listener.ended.is_set() or adding.cancel() or adding.exception()):
                listener.put = lambda _: None
                self._ask(lambda: self._engine.abort(ask.request_id))
                await listener.ended.wait()

    def _for_others(self, ask: Ask) -> bool:
        """Whether another server goes on from the prompt: then routers tell this one its own address."""
        named = ask.prefiller
        return named is not None and (named.host, named.port) == self._shared_at

    def _abandon(self, pages: set[PageKey]) -> None:
        """The server that waited for these pages is gone: their prompts are not computed to the end."""
        for name in list(self._prefilling):
            task = self._engine.tasks.get(name)
            if task is not None and not pages.isdisjoint(task.name_pages().keys):
                self._engine.abort(name)

    async def _pull(self, ask: Ask, pulls: Pulls) -> None:
        """Wait for the pages of a prompt that a peer computes."""
        self._engine.check(ask)
        left = threading.Event()
        self._pulling.add(left)
        try:
            pages = await asyncio.wrap_future(start(lambda: pulls.pull(ask, left), "tiercel-pull"))
        finally:
            left.set()
            self._pulling.discard(left)
        self._ask(lambda: self._engine.counters.update(prompts_elsewhere=1, pages_elsewhere=pages))

    async def flush(self, timeout_s: float) -> int:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while True:
            stayed = await asyncio.wrap_future(self._ask(self._engine.flush))
            if not stayed or loop.time() >= until:
                return stayed
            await asyncio.sleep(0.01)

    def limit_tenants(self, bytes_most: Mapping[str, int | None]) -> None:

        def limit() -> None:
            cache = self._engine.cache
            for name in {*cache.owners(), *bytes_most}:
                cache.limit(name, bytes_most.get(name))

        self._ask(limit)

    def explain(self, request_id: str) -> Explanation | None:
        return self._engine.explain(request_id)

    async def stats(self) -> EngineStats:
        stats = await asyncio.wrap_future(self._ask(self._engine.stats))
        shared = self._offering.stats() if self._offering else None
        return replace(stats, events=self._events.stats() if self._events else None, shared=shared)

    # The store

    async def attach_store(self, url: str) -> None:
        mover = await asyncio.wrap_future(start(lambda: self._open_store(url), "tiercel-store-open"))
        try:
            await asyncio.wrap_future(self._ask(lambda: self._engine.cache.stores.attach_mover(mover)))
        except BaseException:
            start(mover.close, "tiercel-store-close")
            raise
        self.store_url = hide(url, url)

    def _open_store(self, url: str) -> StoreMover:
        store = open_store(url)
        try:
            return self._engine.cache.stores.mover_for(store)
        except BaseException:
            store.close()
            raise

    async def detach_store(self) -> None:
        cache = self._engine.cache
        await asyncio.wrap_future(self._ask(cache.detach))
        await _until(lambda: not cache.stores.detaching, cache.config.store_timeout_s)

    async def clear_store(self) -> None:
        store = self._engine.cache.store
        if store is None:
            raise StoreError("no store is attached")
        clear = await asyncio.wrap_future(self._ask(store.clear))
        if not await _until(lambda: clear.ended_s > 0, self._engine.cache.config.store_timeout_s):
            raise StoreError("the store has not answered yet")
        if clear.error is not None:
            raise clear.error

    def offer_pages(
        self,
        listener: socket.socket,
        *,
        at: Address | None = None,
        key: str = "",
        mooncake: str | None = None,
    ) -> None:
        """Other servers may read our host pages from now on. Called once at most; `close` ends it. `at`: the
        address by which requests name this server, if it computes prompts for others."""
        self._shared_at = at
        self._offering = Offering(self._engine.cache, self._ask, listener, key=key, mooncake=mooncake)
        self._offering.questions.abandoned = self._abandon

    def pull_prompts(self, peers: Mapping[Address, PeerStore], patience_s: float) -> None:
        """Requests may name these peers to compute their prompts. `close` closes them."""
        self._peers = tuple(peers.values())
        self._pulls = Pulls(self._engine.cache, self._ask, peers, patience_s)

    # Ending

    def close(self, timeout_s: float = 10.0) -> bool:
        """Wait up to `timeout_s` for running answers, then abort them. True: all had finished."""
        self._closing = True
        if self._offering is not None:
            self._offering.close()
        with self._wake:
            self._wake.wait_for(lambda: self.failure or not self._engine.tasks, timeout_s)
            finished = not self._engine.tasks
        if not finished or self._pulling:
            self.abort_all()
        self._ask(self._stop)
        self._thread.join()
        for peer in self._peers:
            peer.close()
        try:
            self._engine.cache.close()
        except Exception:
            if self.failure is None:
                raise
            log.exception("the cache of an engine that failed could not be closed")
        return finished

    def abort_all(self) -> None:
        self._closing = self._ending = True
        for left in list(self._pulling):
            left.set()
        self._ask(self._abort_all)

    def _abort_all(self) -> None:
        for request_id in list(self._engine.tasks):
            self._engine.abort(request_id)

    # The engine's thread

    def _ask(self, what: Callable[[], T]) -> Future[T]:
        """Have the engine's thread do something between two steps."""
        future: Future[T] = Future()

        def do() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller has gone
            try:
                if self._refusal is not None:
                    raise self._refusal
                future.set_result(what())
            except Exception as error:  # noqa: BLE001 - the caller gets it
                future.set_exception(error)

        with self._wake:
            if self._refusal is None:
                self._inbox.append(do)
                self._wake.notify_all()
            else:
                future.set_exception(self._refusal)
        return future

    def _stop(self) -> None:
        self._stopped = True

    def _run(self) -> None:
        try:
            with ThreadPoolExecutor(1, "tiercel-forward") as executor:
                steps = steps_of(self._engine, executor, self._meanwhile, self._rest)
                while not self._stopped or self._engine.tasks:
                    self._wait_for_work()
                    self._step(steps)
                for _ in range(2):  # the last outcomes are still to be emitted
                    self._step(steps)
        except Exception as error:  # noqa: BLE001 - no task is to blame, so the engine stops
            self._fail(error)
        self._refuse(self.failure or EngineError(STOPPED))
        if self._pulls is not None:
            self._pulls.end(self.failure or StoreError(STOPPED))

    def _refuse(self, why: EngineError) -> None:
        """From now on, whatever is asked of the engine's thread is refused; also what waits already."""
        with self._wake:
            self._refusal = why
            self._wake.notify_all()
        while self._inbox:
            self._inbox.popleft()()

    def _fail(self, error: Exception) -> None:
        """The engine's state may be wrong, and wrong bytes must not be served: every open answer ends with an
        error, and every later call is refused at once."""
        open_ids = ", ".join(self._answers) or "no request"
        log.critical("the engine failed and serves no more; this ends %s", open_ids, exc_info=error)
        self.failure = EngineError("the engine failed and serves no more; the log says why")
        self._refuse(self.failure)
        for name in list(self._answers):
            task = self._engine.tasks.get(name)
            usage = task.usage if task is not None else Usage(0)
            self._tell([Delta(name, usage, finish=Finish.ERROR, error=str(self.failure))])

    def _step(self, steps: Iterator[list[Delta]]) -> None:
        while self._inbox:
            self._inbox.popleft()()
        deltas = next(steps)
        if self._pulls is not None:
            self._pulls.step()
        if self._offering is not None and self._offering.questions.watched:
            self._offering.questions.step()
        if deltas:
            self._tell(deltas)
            with self._wake:
                self._wake.notify_all()

    def _meanwhile(self, computing: Future[Drawn]) -> None:
        """A step is computed elsewhere. Serve other servers that read our pages meanwhile, because a step of
        a prompt takes long."""
        if self._offering is None or not self._offering.questions.watched:
            return
        computing.add_done_callback(lambda _: self._notify())
        while not computing.done():
            with self._wake:
                self._wake.wait_for(lambda: self._inbox or computing.done(), WATCHED_S)
            while self._inbox:
                self._inbox.popleft()()
            self._engine.scheduler.collect()
            self._offering.questions.step()

    def _rest(self) -> None:
        """Nothing can be computed, and something is under way. If only a store works, and no request waits,
        the thread sleeps until it has ended or the inbox has something. (A CUDA device notifies nobody.)"""
        store_s = WAIT_S if self._engine.tasks else PENDING_S
        self._engine.cache.wait_until(lambda: bool(self._inbox) or self._stopped, WAIT_S, store_s=store_s)

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def _wait_for_work(self) -> None:
        engine = self._engine
        with self._wake:
            if engine.idle and not (self._inbox or self._stopped):
                self._wake.wait(PENDING_S if engine.cache.stores.pending else None)

    def _tell(self, deltas: list[Delta]) -> None:
        """Deliver deltas: one call into each event loop for all its answers of a step."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Listener, Delta]]] = {}
        for delta in deltas:
            found = self._answers.get(delta.request_id)
            if found is None:
                continue
            if delta.finish is not None:
                del self._answers[delta.request_id]
                self._prefilling.discard(delta.request_id)
            by_loop.setdefault(found.loop, []).append((found, delta))
        for loop, answers in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put, answers)
            except RuntimeError:  # the loop was closed: nobody waits any more
                for _, delta in answers:
                    if delta.finish is None:
                        self._engine.abort(delta.request_id)


async def _until(there: Callable[[], bool], timeout_s: float) -> bool:
    """Poll a condition for `timeout_s` at most. Returns whether it became true."""
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    while not there() and loop.time() < until:
        await asyncio.sleep(0.005)
    return there()


@dataclass
class _Listener:
    """A caller that waits for an answer, and its event loop."""

    loop: asyncio.AbstractEventLoop
    put: Callable[[Delta], None]
    ended: asyncio.Event = field(default_factory=asyncio.Event)


def _put(answers: list[tuple[_Listener, Delta]]) -> None:
    for listener, delta in answers:
        listener.put(delta)
        if delta.finish is not None:
            listener.ended.set()
