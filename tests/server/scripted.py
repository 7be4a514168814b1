"""A service that answers from a script, and everything a test needs to talk to one.

Text: a few words are one token each, everything else one token per byte. Answers: the words of the script,
one per Delta. Cached: a prompt that was asked before in the same namespace, all but its last token.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from tiercel.asks.ask import Ask, Delta, EngineStats, Explanation, Finish, QueueStats, TokenOut, Usage
from tiercel.asks.times import RequestTimes
from tiercel.cache.audit import PoolStats, StoreStats
from tiercel.errors import ConfigError, EngineError, InputError, LengthError, StoreError
from tiercel.policy.resume import Reuse, Why
from tiercel.server.app import create_app
from tiercel.server.listen import Server
from tiercel.server.options import ServerOptions
from tiercel.text.answer import CallFormat
from tiercel.text.grammar import Grammars

WORDS = ("Hello", " world", "!", " and", " again", "one", " two", " three")
TOKEN_BYTES_MOST = max(map(len, WORDS))
EOS = 256 + len(WORDS)
REUSE = Reuse(100, 16, 8, 4, 32, 3, 5, Why.NOT_CACHED)
"""The reuse of every request."""
GOODBYE = 50
"""Turns of the loop that a request takes to release what it holds. A caller that does not wait cuts it
off."""


@dataclass(frozen=True)
class ScriptedPrompt:
    tokens: tuple[int, ...]
    turn_ends: tuple[int, ...]
    thinks: bool = False


class ScriptedText:
    def __init__(self) -> None:
        self.grammars = Grammars(self)
        self.threads: set[threading.Thread] = set()
        """Threads that encoded a prompt."""

    eos = frozenset({EOS})
    vocab_size = EOS + 1
    token_ids = vocab_size
    control = eos
    calls = CallFormat.DSML
    think_end = None

    def encode(
        self,
        text: str,
        *,
        field: str = "text",
        tokens_max: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        if tokens_max is not None:
            self.threads.add(threading.current_thread())
        if tokens_max is not None and len(text.encode()) > TOKEN_BYTES_MOST * tokens_max:
            raise LengthError(field, tokens=len(text.encode()) // TOKEN_BYTES_MOST, tokens_max=tokens_max)
        tokens: list[int] = []
        while text:
            word = next((word for word in WORDS if text.startswith(word)), None)
            if word:
                tokens.append(256 + WORDS.index(word))
                text = text.removeprefix(word)
            else:
                tokens += text[0].encode()
                text = text[1:]
        return tokens

    def tokens_within(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(self.piece_bytes(token) for token in ids).decode(errors="replace")

    def piece(self, token: int) -> str:
        return self.decode([token])

    def piece_bytes(self, token: int) -> bytes:
        if token >= EOS:
            return b""
        return bytes([token]) if token < 256 else WORDS[token - 256].encode()

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Any = (),
        kwargs: Any = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tokens_max: int | None = None,
    ) -> ScriptedPrompt:
        self.threads.add(threading.current_thread())
        tokens: list[int] = []
        ends = []
        for index, message in enumerate(messages):
            if message["content"] == "impossible":
                raise InputError(f"messages[{index}].content", message["content"], "can not be said")
            content = message["content"] or ""
            parts = [content] if isinstance(content, str) else [part["text"] for part in content]
            tokens += self.encode(f"{message['role']}:{''.join(parts)}\n")
            ends.append(len(tokens))
        if continue_final_message:
            del tokens[-1], ends[-1]
        elif add_generation_prompt:
            tokens += self.encode("assistant:")
        return ScriptedPrompt(tuple(tokens), tuple(ends))


STORE = StoreStats(
    state="working",
    refused=False,
    saved_bytes=10,
    read_bytes=20,
    read_bytes_s=None,
    compute_tokens_s=None,
    queued_bytes=7,
    flaws={"CHECKSUM": 1},
    counters={"failures": 0},
    records=3,
    bytes=300,
    store={"records": 3},
)


@dataclass(frozen=True)
class ScriptedStats(EngineStats):
    """Statistics with fields that no table knows."""

    exact: bool = True
    device: str = "cpu"


@dataclass
class ScriptedService:
    """Set what it shall do, read what it was asked."""

    script: tuple[str, ...] = ("Hello", " world", "!")
    text: Any = field(default_factory=ScriptedText)
    """The text: scripted, or a model's own."""
    more_tokens: int = 0
    """Tokens that the model draws and its tokenizer does not know."""
    model_name: str = "scripted"
    context_tokens: int = 4096
    page_tokens: int = 128
    ready: bool = True
    failure: EngineError | None = None
    fail_first: Exception | None = None
    """Raised instead of the first Delta."""
    fail_after: tuple[int, Exception] | None = None
    """(tokens, error): raised after this many tokens."""
    end: Finish | None = None
    """How the answer ends, if not as it should."""
    hold_after: int | None = None
    """After this many tokens it waits for ever."""
    pages_in_use: int = 0
    store: StoreStats | None = None
    store_url: str = ""
    store_fails: StoreError | None = None
    store_tokens: int = 0
    """This many of the cached tokens come from the store."""
    replayed_tokens: int = 0
    """This many of the found tokens are computed again."""
    asks: list[Ask] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    holding: threading.Event = field(default_factory=threading.Event)
    """Set when it waits."""
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to end every answer."""
    closed: threading.Event = field(default_factory=threading.Event)
    """Set when a request has ended, one way or another."""
    _seen: set[Any] = field(default_factory=set)

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size + self.more_tokens

    @property
    def ask(self) -> Ask:
        (only,) = self.asks
        return only

    async def submit(self, ask: Ask, put: Callable[[Delta], None]) -> None:
        self.asks.append(ask)
        self.events.append(f"begin {ask.request_id}")
        try:
            if self.fail_first:
                raise self.fail_first
            async for delta in self._answer(ask):
                self.events.append(f"delta {ask.request_id}")
                put(delta)
                await asyncio.sleep(0)  # the steps of an engine do not come at once
        finally:
            for _ in range(GOODBYE):
                await asyncio.sleep(0)
            self.events.append(f"end {ask.request_id}")
            self.closed.set()

    async def _answer(self, ask: Ask) -> AsyncIterator[Delta]:
        known = (ask.namespace, ask.prompt) in self._seen
        self._seen.add((ask.namespace, ask.prompt))
        cached = len(ask.prompt) - 1 - self.store_tokens - self.replayed_tokens if known else 0
        usage = {
            "prompt_tokens": len(ask.prompt),
            "device_tokens": cached // 2,
            "host_tokens": -(-cached // 2),
            "store_tokens": self.store_tokens if known else 0,
            "replayed_tokens": self.replayed_tokens if known else 0,
        }
        prompt = self._prompt(ask)
        told = 0
        for word in self.script:
            await self._trouble(told)
            if told == ask.sampling.max_tokens or self.ending.is_set():
                break
            tokens = self.text.encode(word)
            token = tokens[-1]
            told += 1
            stop = next((each for each in ask.sampling.stop if each in word), None)
            if stop is None and token in ask.sampling.stop_tokens:
                stop = token
            yield Delta(
                ask.request_id,
                Usage(**usage, completion_tokens=told),
                tokens=tuple(self._scored(ask, each, told) for each in tokens),
                text="" if stop is not None else word,
                prompt=prompt,
                finish=Finish.STOP if stop is not None else None,
                stopped_by=stop,
            )
            if stop is not None:
                return
            prompt = ()
        await self._trouble(told)
        length = told == ask.sampling.max_tokens
        yield Delta(
            ask.request_id,
            Usage(**usage, completion_tokens=told),
            prompt=prompt,
            finish=self.end or (Finish.LENGTH if length else Finish.STOP),
            stopped_by=None if length else EOS,
            error="the device is on fire" if self.end else "",
        )

    async def _trouble(self, told: int) -> None:
        if self.hold_after == told:
            self.holding.set()
            await self.ending.wait()
            self.end = Finish.ABORT
        if self.fail_after and self.fail_after[0] == told:
            raise self.fail_after[1]

    def _scored(self, ask: Ask, token: int, at: int) -> TokenOut:
        if ask.sampling.logprobs is None:
            return TokenOut(token)
        top = [(token, -at / 4), (ord("x"), -5.0), (0xC3, -6.0), (ord("y"), float("-inf"))]
        return TokenOut(token, -at / 4, tuple(top[: ask.sampling.logprobs]))

    def _prompt(self, ask: Ask) -> tuple[TokenOut, ...]:
        begin = ask.prompt_logprobs_from
        if begin is None:
            return ()
        every = [self._scored(ask, token, at) for at, token in enumerate(ask.prompt)]
        every[0] = TokenOut(ask.prompt[0])
        return tuple(every[begin:])

    def abort_all(self) -> None:
        self.ending.set()

    async def flush(self, timeout_s: float) -> int:
        self.events.append(f"flush {timeout_s}")
        self._seen.clear()
        return self.pages_in_use

    async def attach_store(self, url: str) -> None:
        assert self.store is None
        self.events.append(f"attach {url}")
        await self._store_trouble()
        if not url.startswith("memory:"):
            raise ConfigError("store", url, f"{url} is not a store that the script knows")
        self.store, self.store_url = STORE, url

    async def detach_store(self) -> None:
        assert self.store is not None
        await self._store_trouble()
        self.store = None

    async def clear_store(self) -> None:
        assert self.store is not None
        await self._store_trouble()
        self.store = replace(self.store, records=0, bytes=0)

    async def _store_trouble(self) -> None:
        """Pause, so that others come in between; then perhaps fail."""
        await asyncio.sleep(0)
        if self.store_fails:
            raise self.store_fails

    def explain(self, request_id: str) -> Explanation | None:
        known = {ask.request_id for ask in self.asks}
        times = RequestTimes(1.0, None, 1.5, 1.75, 1.75, 2.75)
        return Explanation(REUSE, "bits", 1.5, times, sparse_pages=2) if request_id in known else None

    def limit_tenants(self, bytes_most: Mapping[str, int | None]) -> None:
        self.events.append(f"limit {dict(bytes_most)}")

    async def stats(self) -> EngineStats:
        return ScriptedStats(
            identity={"weights": "w", "share": "bits"},
            cached_bytes={"device": {"kv": 100, "index": 7}, "host": {"kv": 300}},
            cached_items={"device": {"pages": 2, "tails": 1}, "host": {"pages": 3, "tails": 0}},
            capacity_bytes={"device": 1000, "host": 2000},
            tail_streams=["index"],
            compute_tokens_s=50.0,
            moved_bytes={"loaded": {"kv": 5}},
            moved_s={"loaded": {"pages": 0.5}},
            hit_tokens={"device": 10, "host": 20, "store": 30},
            compute_saved_s=1.5,
            evicted={"device": {"pages": {"room": 9}}},
            copier="direct",
            pools={"device pages": PoolStats(capacity=8, free=3)},
            store=self.store,
            counters={"pages_saved": 4},
            queue=QueueStats(waiting=2, loading=0, running=len(self.asks), tokens=40),
            engine={"tokens_drawn": 6, "guessing_steps": 2, "guessing_tokens": 5},
            accept_length={"device": 2.5, "computed": 1.75},
            sparse={"pages_sparse": 6, "entries_hit": 11},
        )


LOOPBACK = ServerOptions(
    loopback=True, store_allow=("memory:", "file:///caches", "redis://host"), priority_max=10
)


def client_of(service: ScriptedService, options: ServerOptions = LOOPBACK) -> httpx.AsyncClient:
    """Straight into the application, without a network."""
    app = create_app(service, options)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@contextmanager
def talking(service: ScriptedService, options: ServerOptions = LOOPBACK):
    """Yields a function that makes one call after the other to one application."""
    with asyncio.Runner() as runner:
        client = client_of(service, options)

        def each(method: str, path: str, **more: Any) -> httpx.Response:
            return runner.run(client.request(method, path, **more))

        yield each
        runner.run(client.aclose())


def call(
    method: str,
    path: str,
    service: ScriptedService | None = None,
    options: ServerOptions = LOOPBACK,
    **more: Any,
) -> httpx.Response:
    """One call to a fresh application."""
    with talking(service or ScriptedService(), options) as talk:
        return talk(method, path, **more)


def post(path: str, service: ScriptedService | None = None, **body: Any) -> httpx.Response:
    return call("POST", path, service, json=body)


def events_of(response: httpx.Response) -> list[str]:
    """The data of server-sent events."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    return [block.removeprefix("data: ") for block in blocks]


@contextmanager
def served(service: ScriptedService, options: ServerOptions = LOOPBACK, shutdown_s: int = 0):
    """A real server on a free port of this machine; yields its address."""
    server = Server(service, replace(options, port=0, shutdown_s=shutdown_s), log_config=None)
    thread = threading.Thread(target=server.run)
    listening = threading.Event()
    startup = server.startup

    async def startup_and_tell(sockets: Any = None) -> None:
        await startup(sockets)
        listening.set()

    server.startup = startup_and_tell  # type: ignore[method-assign]
    thread.start()
    try:
        assert listening.wait(10)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive()
    assert not server.server_state.connections, "all are closed"
