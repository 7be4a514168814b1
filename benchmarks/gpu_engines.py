"""Engines for `benchmarks.gpu`: one model, for each question a cache of its own on the same device memory;
and how much is measured.

model = OneModel("v4-flash-8e", "cuda", device_bytes=4 * GIB)
with model.engine(pages=600, tails=64, host_pages=4000) as running:
    took_ms, usage = running.first_token(model.words(8192, seed=0))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import torch

from tiercel.asks.ask import Ask, Delta, Sampling, Usage
from tiercel.cache import Request, RequestState, TieredCache, Wait
from tiercel.cache.memories import make_memories
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.engine.engine import Engine
from tiercel.engine.loop import steps_of
from tiercel.engine.queue_runner import QueueRunner, make_runner
from tiercel.engine.runner import LocalRunner
from tiercel.engine.step import Drawn, Step
from tiercel.storage.open import open_store

GIB = 1024**3
RUNNING = 64
STEP_TOKENS = {"cpu": 512, "cuda": 8192}
REST_S = 120.0
"""Copies and writes to a store end sooner, or something is broken."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured. The defaults are meant for six to seven minutes on an H200."""

    device_bytes: int = 4 * GIB
    batches: tuple[int, ...] = (1, 16, 64)
    running: int = RUNNING
    prefill: int = 8192
    prefill_beside: int = 2048
    """Tokens of the prefill that `transformers` does too: it materialises the scores of attention."""
    decode_context: int = 2048
    decode_steps: int = 100
    their_context: int = 128
    their_steps: int = 8
    step_context: int = 512
    itl_running: int = 32
    itl_others: int = 16
    itl_prefix: int = 8192
    itl_steps: int = 100
    itl_rounds: int = 3
    prefixes: Mapping[str, int] = field(
        default_factory=lambda: {"8k": 8192, "32k": 32768, "128k": 131072},
    )
    new_tokens: int = 256
    ttft_rounds: int = 5
    recomputed: int = 2
    no_hit_prompt: int = 16384
    no_hit_prompts: int = 3
    no_hit_rounds: int = 3
    conversations: int = 64
    turns: int = 6
    shared: int = 8192
    turn_tokens: int = 512
    answer: int = 16


QUICK = Sizes(
    device_bytes=GIB,
    prefill=1024,
    prefill_beside=256,
    decode_context=128,
    decode_steps=5,
    their_context=32,
    their_steps=2,
    step_context=64,
    itl_running=8,
    itl_others=16,
    itl_prefix=1024,
    itl_steps=15,
    itl_rounds=2,
    prefixes={"1k": 1024, "2k": 2048, "4k": 4096},
    new_tokens=128,
    ttft_rounds=2,
    recomputed=1,
    no_hit_prompt=1024,
    no_hit_prompts=2,
    no_hit_rounds=2,
    conversations=10,
    turns=3,
    shared=512,
    turn_tokens=128,
    answer=4,
)


QUICK_CPU = replace(
    QUICK,
    device_bytes=GIB // 4,
    batches=(1, 2),
    running=2,
    prefill=256,
    prefill_beside=16,
    their_context=8,
    decode_context=64,
    decode_steps=4,
    their_steps=1,
    itl_running=2,
    itl_others=3,
    itl_prefix=256,
    itl_steps=6,
    itl_rounds=1,
    prefixes={"1k": 256, "2k": 384},
    new_tokens=64,
    ttft_rounds=1,
    no_hit_prompt=256,
    no_hit_prompts=1,
    no_hit_rounds=1,
    conversations=5,
    turns=2,
    shared=128,
    answer=2,
)


class OneModel:
    """A model and its device memory. Its engines are used one after the other: each begins with nothing."""

    def __init__(
        self, name: str, device: str, device_bytes: int, *, context: int | None = None, **cache: Any
    ) -> None:
        """`context`: the longest text. `cache`: settings of the first engine's cache."""
        self.name, self.device = name, torch.device(device)
        kind = self.device.type
        self.step_tokens = STEP_TOKENS[kind]
        build = Build(model=name, device=device, device_bytes=device_bytes)
        config = EngineConfig(
            running_max=RUNNING, step_tokens=self.step_tokens, speculate="off", context_tokens=context
        )
        self._first = open_engine(build, replace(config, cache=replace(config.cache, **cache)))[0]
        assert isinstance(self._first.runner, LocalRunner)
        self.model: Any = self._first.runner.model
        self.spec, self.page_tokens = self._first.cache.spec, self._first.page_tokens
        self.vocab_size = self._first.vocab_size

    @property
    def first(self) -> Engine:
        """The engine that the model was opened with. What is recorded reads its host memory, if it reads
        any."""
        return self._first

    def engine(
        self,
        *,
        pages: int | None = None,
        tails: int | None = None,
        host_pages: int = 0,
        store: str | None = None,
        overlap: bool = True,
    ) -> RunningEngine:
        """An engine with places for so many pages and tails on the device (None: all that there are) and on
        the host."""
        first, each = self._first, self.spec.places_per_tail
        most = first.cache.pages.capacity
        settings = CacheConfig(
            device_pages=min(pages + (tails or 64) * each, most) if pages else most,
            staging_tails=first.cache.config.staging_tails,
            host_bytes=host_pages * self.spec.place_bytes,
        )
        return self.with_cache(settings, store=store, overlap=overlap)

    def with_cache(
        self, settings: CacheConfig, *, store: str | None = None, overlap: bool = True
    ) -> RunningEngine:
        """An engine with a cache of these settings, which is to fit into the device memory of the model."""
        first = self._first
        memories = make_memories(self.spec, settings, first.cache.device)
        cache = TieredCache(self.spec, settings, memories, identity=first.cache.identity)
        config = replace(first.config, cache=settings, overlap=overlap)
        runner = make_runner(self.model, cache, first.text, config)
        running = RunningEngine(Engine(runner, cache, first.text, config))
        if store is not None:
            running.attach(store)
        return running

    def words(self, count: int, seed: int) -> tuple[int, ...]:
        """Random tokens."""
        random = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(200, self.vocab_size, (count,), generator=random).tolist())

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def host_pages_of(self, tokens: int, tails: int) -> int:
        """Host pages for a text and so many tails."""
        return self.pages_of(tokens) + tails * self.spec.places_per_tail


class RunningEngine:
    """An engine and the loop that drives it, from this thread. Answers have no end."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.cache = engine, engine.cache
        self._executor = ThreadPoolExecutor(1)
        self._asked, self.sampled = 0, False
        """Whether tokens are sampled. Else they are the best ones."""

    @cached_property
    def steps(self) -> Generator[list[Delta]]:
        """Made at the first step: a `HostClock` comes before it."""
        steps = steps_of(self.engine, self._executor)
        assert isinstance(steps, Generator)
        return steps

    def attach(self, url: str) -> None:
        self.cache.attach(open_store(url))

    def add(self, prompt: Sequence[int], tokens: int, turn_ends: tuple[int, ...] = ()) -> str:
        """Ask for so many tokens. Answers the name of the request."""
        self._asked += 1
        name = str(self._asked)
        sampling = Sampling(tokens, temperature=0, ignore_eos=True)
        if self.sampled:
            sampling = replace(sampling, temperature=0.8, top_p=0.95, top_k=50)
        self.engine.add(Ask(name, tuple(prompt), sampling, turn_ends))
        return name

    def step(self) -> list[Delta]:
        """What the next step brings. A request that ends with an error ends the measurement."""
        deltas = next(self.steps)
        for delta in deltas:
            if delta.error:
                raise RuntimeError(f"request {delta.request_id} ended with an error: {delta.error}")
        return deltas

    def first_token(self, prompt: tuple[int, ...], turn_ends: tuple[int, ...] = ()) -> tuple[float, Usage]:
        """Milliseconds from the ask to its first token, and where its prompt came from."""
        start = time.perf_counter()
        name = self.add(prompt, 1, turn_ends)
        while True:
            for delta in self.step():
                if delta.request_id == name and delta.finish is not None:
                    return 1e3 * (time.perf_counter() - start), delta.usage

    def why(self) -> str:
        """What the last request reused, and why not more."""
        explained = self.engine.explain(str(self._asked))
        return str(explained.reuse) if explained else "not known"

    def decode(self, count: int, prompt_of: Callable[[int], Sequence[int]], tokens: int) -> None:
        """Let so many texts run until each has drawn a token."""
        missing = {self.add(prompt_of(i), tokens) for i in range(count)}
        while missing:
            missing.difference_update(delta.request_id for delta in self.step() if delta.tokens)

    def end_all(self) -> None:
        """End every text that runs."""
        for name in list(self.engine.tasks):
            self.engine.abort(name)
        self.rest()

    def rest(self) -> None:
        """Wait until nothing runs, no copy is under way, and the store has what it is to get."""
        until = time.perf_counter() + REST_S
        while not self.engine.idle:
            next(self.steps)
            if time.perf_counter() > until:
                raise RuntimeError(f"copies did not end within {REST_S:.0f} s")

    def empty_device(self) -> None:
        """Everything cached leaves the device."""
        self.rest()
        places, count = self.cache.places, self.cache.config.device_pages
        while isinstance(room := places.reserve(self, count), Wait):
            self.rest()
        with room:
            pass
        self.rest()

    def empty_device_and_host(self) -> None:
        """Only the store has what was cached."""
        self.rest()
        stay = self.engine.flush()
        assert stay == 0, f"{stay} pages are in use"

    def miss_always(self, miss: bool) -> None:
        """True: tiers off. Nothing is found, and nothing is kept for later."""
        self.cache.config = replace(self.cache.config, force_miss=miss)

    def close(self, store_wait_s: float = REST_S) -> None:
        self.steps.close()
        self._executor.shutdown()
        self.cache.close(store_wait_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.end_all()
            self.close()
            return
        with suppress(Exception):  # the error on its way is the one to be told
            self.close(0.0)


class HostClock:
    """Measures how long an engine's thread waits for the model; the rest of the time is work of the host.

    It stands between the loop and the runner. A device is waited for before the result is asked for, so the
    work on the result counts as work. On a CPU the whole forward counts as waiting.
    """

    def __init__(self, running: RunningEngine) -> None:
        self.waited_s = 0.0
        self._runner: Any = running.engine.runner
        if isinstance(self._runner, QueueRunner):
            self._inner = self._runner.start
            self._runner.start = self._start
        else:
            self._inner = self._runner.run
            self._runner.run = self._run

    def _start(self, step: Step) -> Callable[[], Drawn]:
        result: Callable[[], Drawn] = self._inner(step)
        queued = torch.cuda.Event()
        queued.record()

        def wait() -> Drawn:
            start = time.perf_counter()
            queued.synchronize()
            self.waited_s += time.perf_counter() - start
            return result()

        return wait

    def _run(self, step: Step) -> Drawn:
        start = time.perf_counter()
        drawn: Drawn = self._inner(step)
        self.waited_s += time.perf_counter() - start
        return drawn


class Traffic:
    """Texts that come from the host and go to it beside an engine's steps, with nothing computed for them.

    Each text begins with a long prefix that only the host has: it is loaded. Then as many new tokens count as
    written, whatever their bytes are: they are saved. When that is done, the text leaves the device, so that
    its prefix comes from the host the next time.
    """

    def __init__(self, model: OneModel, running: RunningEngine, *, texts: int, tokens: int) -> None:
        self._model, self._cache, self.tokens = model, running.cache, tokens
        self._prefixes = [model.words(tokens, seed=7000 + i) for i in range(texts)]
        self._loading: list[Request] = []
        self._saving: list[Any] = []
        """Keys of texts that are still on the device because of their saves."""
        self._begun = self.loaded = 0
        for prefix in self._prefixes:
            request = self._cache.begin(self._cache.chain(prefix))
            assert isinstance(request, Request)
            self._write(request, tokens)
            running.rest()
        running.empty_device()
        self._chains: list[Any] = []

    def prepare(self, count: int) -> None:
        """Make the keys of the next texts now: this is not what is measured."""
        for i in range(self._begun, self._begun + count):
            prefix = self._prefixes[i % len(self._prefixes)]
            self._chains.append(self._cache.chain(prefix + self._model.words(self.tokens, seed=9000 + i)))

    def step(self) -> None:
        """The next text begins to load, and those that have arrived are saved."""
        self._loading = [each for each in self._loading if not self._saved(each)]
        self._saving = [each for each in self._saving if self._cache.leave_device(each)]
        if not self._chains or self._chains[0].keys[0] in {each.keys[0] for each in self._saving}:
            return
        request = self._cache.begin(self._chains[0])
        if isinstance(request, Wait):
            return
        self._chains.pop(0)
        self._begun += 1
        if request.reuse.host_tokens != self.tokens:
            raise RuntimeError(f"the prefix did not come from the host: {request.reuse}")
        self.loaded += 1
        self._loading.append(request)

    def finish(self) -> None:
        """No more texts. Those under way are given up."""
        self._chains.clear()
        for request in self._loading:
            if request.state is not RequestState.ENDED:
                self._saving.append(request.chain)
                self._cache.abort(request)
        self._loading.clear()

    def _saved(self, request: Request) -> bool:
        return request.state is RequestState.RUNNING and self._write(request, 2 * self.tokens)

    def _write(self, request: Request, upto: int) -> bool:
        """False: there is no room on the device yet."""
        if isinstance(self._cache.extend(request, upto), Wait):
            return False
        self._cache.commit(request, upto)
        self._cache.finish(request)
        self._saving.append(request.chain)
        return True
