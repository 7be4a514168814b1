"""A scheduler, a runner and a cache with a scripted model, driven step by step by numbers.

The model writes bytes that are a function of the text they end (`bytes`), and what it draws next is a
function of the text that it finds in its pages, tails and rings. So one wrong place, one row read too early
or one page given away too soon changes an answer, and every answer is known beforehand.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import torch

import tiercel.cache.fetch as fetch_module
from tests.simulation.bytes import POISON, Bytes
from tests.simulation.copies import FaultyCopier, HeldCopies
from tests.simulation.sparse import HostReads, sparse_options
from tests.simulation.specs import SELECTIVE, SPECS
from tests.simulation.stores import FAULTS, LIES, FalseStore
from tiercel.asks.ask import Ask, Finish, Sampling
from tiercel.cache import TieredCache
from tiercel.cache.memories import Memories, make_memories
from tiercel.config import EVICT_POLICIES, FETCH_POLICIES, LAYOUTS, SAVE_POLICIES, CacheConfig
from tiercel.engine.config import EngineConfig
from tiercel.engine.drafting import DraftText
from tiercel.engine.loop import overlapped_steps, plain_steps, queued_steps
from tiercel.engine.runner import LocalRunner
from tiercel.engine.scheduler import Scheduler
from tiercel.engine.step import Drawn, Step, StepPart
from tiercel.engine.task import Outcome
from tiercel.errors import QueueFull
from tiercel.models.base import BeforeLayer, Span, at_once
from tiercel.policy.speculate import GuessRecord
from tiercel.text.stream import TextPiece
from tiercel.transfer.controller import LocalController
from tiercel.transfer.mover import Workers
from tiercel.transfer.plan import Direction
from tiercel.transfer.staging import Staging

VOCABULARY = 11
LONGEST = 48
STEPS_TO_END = 3000

Places = tuple[int, ...]
"""The places of a page, one in each pool of the device; the staging place of a tail. Where pages may be
sparse: the place on the host too; -1 where there is none."""


class ScriptedFaultError(RuntimeError):
    """The fault the simulation makes."""


def next_token(text: Sequence[int]) -> int:
    return hashlib.blake2b(bytes(text), digest_size=1).digest()[0] % VOCABULARY


class ScriptedModel:
    """Knows of a text only what it reads back."""

    vocab_size = VOCABULARY
    draft = None

    def __init__(self, cache: TieredCache, guesses_max: int = 0) -> None:
        self.guesses_max = guesses_max
        self.spec, self.page_tokens = cache.spec, cache.spec.page_tokens
        self.bytes = Bytes(cache.spec, cache.device)
        self.host_reads = HostReads(cache, self.bytes, guesses_max) if cache.residency else None
        self._texts: dict[bytes, list[int]] = {}
        self._rings: dict[int, list[int]] = {}
        self.faults = 0
        """This many calls fail."""
        self.load_failed = False
        """A load of this step failed: what its texts read is anything."""
        self._lost: set[int] = set()
        """Rings whose texts went on from such bytes."""

    def warm_up(self, _longest: int) -> None:
        """Nothing is slow here."""

    def resume(self, ring: int, tails: Sequence[tuple[int, int]]) -> None:
        self._maybe_fail()
        self._rings.pop(ring, None)
        if self.host_reads is not None:
            self.host_reads.begin(ring)
        self._lost.discard(ring)
        with self._may_be_lost(ring):
            self._restore(ring, tails)

    def forget(self) -> None:
        """The device is another one: its rings are empty."""
        self._rings.clear()
        self._lost.clear()

    def take_hot(self, ring: int, places: Sequence[int]) -> None:
        assert self.host_reads is not None
        self.host_reads.take_hot(ring, places)

    @contextmanager
    def _may_be_lost(self, ring: int) -> Iterator[None]:
        try:
            yield
        except AssertionError:
            if not (self.load_failed or ring in self._lost):
                raise
            self._lost.add(ring)

    def _restore(self, ring: int, tails: Sequence[tuple[int, int]]) -> None:
        for boundary, place in tails:
            text = self._read((place,), tail=True)
            assert len(text) == boundary, f"I2: a tail at {boundary} holds the text up to {len(text)}"
            self._rings[ring] = text

    def forward(
        self, spans: Sequence[Span], rows: Sequence[int] | None = None, before: BeforeLayer = at_once
    ) -> torch.Tensor:
        self._maybe_fail()
        for layer in self.spec.layers:
            before(layer)
        assert len({span.ring for span in spans}) == len(spans), "two spans of one ring"
        if self.host_reads is not None:
            self.host_reads.check(spans)
        drawn: list[int] = []
        for span in spans:
            own = [7] * len(span.tokens)
            with self._may_be_lost(span.ring):
                own = self._span(span)
            drawn += own
        chosen = drawn if rows is None else [drawn[row] for row in rows]
        logits = torch.zeros(len(chosen), VOCABULARY)
        logits[range(len(chosen)), chosen] = 1.0
        return logits

    def _span(self, span: Span) -> list[int]:
        page_tokens, tokens = self.page_tokens, span.tokens.tolist()
        pages = [tuple(places) for places in span.pages.T.tolist()]
        before = self._before(span, pages)
        assert len(before) >= span.start, f"I2: {len(before)} tokens are known before {span.start}"
        text, drawn = before[: span.start], list[int]()
        replayed = before[span.start : span.start + len(span.tokens)]
        assert tokens[: len(replayed)] == replayed, "I2: another text than in the pages"
        full = min(span.start, span.write_from) if span.write_from > span.start else span.start
        for page in range(full // page_tokens):
            own = self._read(pages[page], tail=False)
            assert own == text[: (page + 1) * page_tokens], f"I2: page {page} holds {own}, not {text}"
        if self.host_reads is not None:
            self.host_reads.read(span, text)
        for token in tokens:
            text.append(token)
            drawn.append(next_token(text))
            if len(text) % page_tokens == 0:
                if len(text) > span.write_from:
                    self._write(pages[len(text) // page_tokens - 1], text, tail=False)
                if len(text) in span.tails:
                    self._write((span.tails[len(text)],), text, tail=True)
        self._rings[span.ring] = text
        return drawn

    def _before(self, span: Span, pages: Sequence[Places]) -> list[int]:
        """The text so far: from the ring, or at a replay or without tails from the pages."""
        known = self._rings.get(span.ring)
        if known is not None and 0 <= len(known) - span.start <= self.guesses_max:
            return known[: span.start]  # the others were guesses that were refused
        assert known is None, f"the ring is at {len(known)}, the span begins at {span.start}"
        whole = span.write_from // self.page_tokens
        replays = span.start < span.write_from
        assert replays or not (whole and self.spec.tail_streams), "a text goes on without its tails"
        return self._read(pages[whole - 1], tail=False) if whole else []

    def _read(self, places: Places, *, tail: bool) -> list[int]:
        found = self._texts.get(self._rows(places, tail=tail))
        assert found is not None, f"I2: nobody wrote what is at {places} ({'tail' if tail else 'page'})"
        return list(found)

    def _write(self, places: Places, text: list[int], *, tail: bool) -> None:
        for row, data in self.bytes.expected(bytes(text), tail):
            assert places[self.spec.pool_of(self.spec.stream(row[0]))] >= 0, "what is written is whole"
            self._row(row, places)[:] = data
        self._texts[self._rows(places, tail=tail)] = list(text)

    def _rows(self, places: Places, *, tail: bool) -> bytes:
        streams = self.spec.tail_streams if tail else self.spec.page_streams
        rows = (self._row((stream.name, layer), places) for stream in streams for layer in stream.layers)
        return bytes([tail]) + b"".join(row.tobytes() for row in rows)

    def _row(self, row: tuple[str, int], places: Places) -> Any:
        pool = self.spec.pool_of(self.spec.stream(row[0]))
        if self.host_reads is not None and pool and places[pool] < 0:
            return self.host_reads.row(row, places[2])
        return self.bytes.columns[row][places[pool]]

    def _maybe_fail(self) -> None:
        if self.faults:
            self.faults -= 1
            raise ScriptedFaultError("the simulation made the model fail")


class SlowRunner(LocalRunner):
    """Computes slowly by the simulation's clock, so that reading from a store is worth it."""

    def run(self, step: Step) -> Drawn:
        assert isinstance(self.model, ScriptedModel)
        self.model.load_failed = False
        return super().run(step)._replace(seconds=sum(part.end - part.start for part in step.parts) * 0.05)

    def _take(self, step: Step) -> Any:
        work = super()._take(step)
        reads = self.model.host_reads  # type: ignore[attr-defined]
        for part in step.parts if reads is not None else ():
            tokens, ring = part.end + part.guesses - part.start, self._rings[part.ring]
            fits = not (ring.sparse and part.guesses) or reads.is_short(part.ring, tokens, ring.sparse)
            assert fits or ring.error, f"hot rows have no room for what {part.guesses} guesses read"
        return work


class ScriptedDrafter:
    """Guesses right with a probability, and not always as much as it may."""

    def __init__(self, random: Random) -> None:
        self._random, self._right = random, random.choice([0.3, 0.8, 0.95])

    def begin(self, ring: int) -> None:
        """Nothing to do: it knows every text."""

    def guess(self, texts: Sequence[DraftText], counts: Sequence[int]) -> list[list[int]]:
        return [self._guess(text.tokens.tolist(), count) for text, count in zip(texts, counts, strict=True)]

    def _guess(self, text: list[int], most: int) -> list[int]:
        guesses: list[int] = []
        for _ in range(self._random.choice([most, self._random.randint(0, most)])):
            wrong = self._random.random() > self._right
            guesses.append(self._random.randrange(VOCABULARY) if wrong else next_token(text + guesses))
        return guesses


class RandomPolicy:
    """Any number of guesses for any text."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def accepted(self, record: GuessRecord, *, asked: int, made: int, accepted: int) -> None:
        assert 0 <= accepted <= made <= asked

    def stepped(self, **told: float) -> None:
        assert told["rows"] > 0

    def choose(self, records: Sequence[GuessRecord], most: Sequence[int], others: int = 0) -> list[int]:
        assert len(records) == len(most) and min(most) >= 0 <= others
        if self._random.random() < 0.3:
            return [0] * len(most)
        return [self._random.randint(0, each) for each in most]


class ScriptedStream:
    """A text that stops at some tokens."""

    def __init__(self, stops: bool) -> None:
        self.stops = stops

    def push(self, token: int) -> TextPiece:
        return TextPiece("", "stop" if self.stops and token == 7 else None)

    def finish(self) -> str:
        return ""


class LateExecutor(Executor):
    """Runs a step at once, or when its result is asked for: after the next step was planned."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        done: list[Future[Any]] = []

        def run() -> Any:
            if not done:
                done.append(future)
                try:
                    future.set_result(fn(*args, **kwargs))
                except Exception as error:  # noqa: BLE001 - what a real executor does
                    future.set_exception(error)
            return Future.result(future)

        future.result = lambda timeout=None: run()  # type: ignore[method-assign]
        if self._random.random() < 0.5:
            with suppress(Exception):  # it is told when the result is asked for
                run()
        return future


class Stream:
    """Work that is carried out in the order it is queued, some time later, as by a CUDA stream."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self.queued = self._done = 0

    def add(self, work: Callable[[], None]) -> int:
        self._queue.append(work)
        self.queued += 1
        return self.queued

    def carry_out(self, count: int) -> None:
        """Carry out the first `count` of all that were ever queued."""
        while self._done < count:
            self._done += 1
            self._queue.popleft()()

    def forget(self) -> None:
        """What is queued is not carried out."""
        self._queue.clear()
        self._done = self.queued


class OrderedCopies(HeldCopies):
    """Copies that begin behind what was queued before them."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        before = self._stream.queued

        def copy() -> Any:
            self._stream.carry_out(before)
            return fn(*args, **kwargs)

        return super().submit(copy)


class Landing:
    """A load that a step waits for, as `Events` of a device."""

    def __init__(self, world: ScheduleWorld, number: int) -> None:
        self._world, self._number = world, number

    def wait(self, layer: int) -> None:
        held, controller = self._world.copies[Direction.LOAD], self._world.cache.core.controller
        assert controller is not None
        before = [
            each.number for each in controller.tickets._queues[Direction.LOAD] if each.number <= self._number
        ]
        while held.held and not controller.tickets._ended.keys() >= set(before):
            held.run(0)
        done = controller.tickets._ended.get(self._number)
        self._world.model.load_failed = self._world.model.load_failed or bool(done and done.error)


@dataclass
class Asked:
    """An ask, what must come of it, and what came."""

    ask: Ask
    truth: list[int]
    tokens: list[int] = field(default_factory=list)
    prompt: list[int] | None = None
    finish: Finish | None = None
    aborted: bool = False


class WatchedScheduler(Scheduler):
    """Every running text that can be served advances: each that does not has a page of its own leaving, or
    one that becomes sparse as soon as it is saved, or some became sparse for it, which were not enough. The
    last one may wait for a load as well, after which the loaded text gives way to it."""

    def plan(self) -> list[StepPart]:
        sparse = self.cache.counters["pages_sparse"]
        parts = super().plan()
        stand = 0 if self.stalled else self._standing_still({part.ring for part in parts})
        tree, leaving = self.cache.tree, self.cache.pages.leaving
        if stand > leaving + bool(self.admission.loading):
            coldest = tree.device.coldest()
            waits = coldest is not None and tree._waits_for_saves(coldest)
            if self.cache.residency is not None:
                waits = waits or bool(tree.copies.saving) or self.cache.counters["pages_sparse"] > sparse
            assert waits, f"{stand} texts stand still, and {leaving} pages are leaving"
        return parts

    def _standing_still(self, planned: set[int]) -> int:
        """Running texts whose next token is known, and that are in no step."""
        in_step = {seat for seats in self._sealed for seat in seats}
        seats = (task.seat for task in self.running if not task.aborted)
        standing = (seat for seat in seats if seat and seat not in in_step and seat.ring not in planned)
        return sum(len(seat.task.tokens) - seat.planned == 1 for seat in standing)


class ScheduleWorld:
    """What drives a scheduler from numbers. It has what a loop needs of an engine."""

    NAMES: tuple[str, ...] = tuple(sorted(SPECS))
    """The declarations that it is made of."""
    LOOPS: tuple[str, ...] = ("plain", "overlapped", "queued")

    def __init__(self, setup: int) -> None:
        random = Random(setup)
        self.random = random
        self.now_s = 0.0
        self.spec = SPECS[random.choice(self.NAMES)]
        self.loop = random.choice(self.LOOPS)
        self.stream = Stream()
        self.copies = {direction: OrderedCopies(self.stream) for direction in Direction}
        self.store_copies = {name: HeldCopies() for name in ("ask", "read", "write")}
        self.cache = self._make_cache(random, sparse_options(self.spec, setup))
        self.cache.wait = lambda timeout_s: self._land(1.0)  # type: ignore[method-assign]
        self.copier: FaultyCopier | None = None
        controller = self.cache.flights.controller
        if isinstance(controller, LocalController):
            self.copier = FaultyCopier(controller._copier)
            controller._copier = self.copier  # type: ignore[assignment]
        guesses_max = random.choice([0, 1, 3, 5])
        self.model = ScriptedModel(self.cache, guesses_max)
        if isinstance(controller, LocalController) and random.random() < 0.5:
            controller.in_order = True
            controller.ready = lambda number: Landing(self, number)  # type: ignore[method-assign]
        self._poison_what_is_freed()
        config = EngineConfig(
            running_max=random.choice([1, 2, 3, 8]),
            waiting_max=random.choice([3, 30]),
            step_tokens=random.choice([1, 4, 9, 40]),
            context_tokens=LONGEST,
            replay=random.random() < 0.5,
            speculate="ngram" if guesses_max else "off",
            draft_tokens_max=max(guesses_max, 1),
        )
        self.scheduler = WatchedScheduler(self.cache, config, lambda: self.now_s)
        self.scheduler.guessing.policy = RandomPolicy(Random(random.getrandbits(32)))
        drafter = ScriptedDrafter(Random(random.getrandbits(32)))
        staging = Staging(self.cache.device) if self.spec.tail_streams else None  # type: ignore[arg-type]
        ready = controller.ready if controller else None
        self.runner = SlowRunner(self.model, ready, drafter, staging=staging)
        self.steps: Iterator[list[Outcome]] = {  # type: ignore[assignment]
            "plain": lambda: plain_steps(self),  # type: ignore[arg-type]
            "overlapped": lambda: overlapped_steps(self, LateExecutor(random)),  # type: ignore[arg-type]
            "queued": lambda: queued_steps(self, self._start),  # type: ignore[arg-type]
        }[self.loop]()
        self.store: FalseStore | None = None
        if self.cache.host is not None and random.random() < 0.6:
            fetch_module.READ_BYTES_LEAST = 64  # so that a fetch of these few bytes is several reads
            self.store = FalseStore(Random(random.getrandbits(32)))
            workers = Workers(*self.store_copies.values(), retry_after_s=(0.0,))
            self.cache.attach(self.store, clock=lambda: self.now_s, workers=workers)
        self.asked: dict[str, Asked] = {}
        self.texts: list[list[int]] = [[1]]
        self.faults = self.steps_taken = 0
        self.log: list[str] = []

    def _make_cache(self, random: Random, options: Mapping[str, object]) -> TieredCache:
        spec, least = self.spec, max(1, self.spec.places_per_tail)
        tails = random.choice([2, 3, 7]) * spec.pages_per_window
        config = CacheConfig(
            device_pages=random.choice([2, 4, 6, 9, 14]) - (-tails * spec.units_per_tail // spec.frame_units),
            staging_tails=random.choice([1, 2, 7]) * spec.pages_per_window,
            host_bytes=spec.place_bytes * least * random.choice([0, 2, 8, 30]),
            layout=random.choice(LAYOUTS),
            copier="reference",
            save=random.choice(SAVE_POLICIES),
            fetch=random.choice(FETCH_POLICIES),
            evict=random.choice(EVICT_POLICIES),
            tail_every_pages=random.randint(1, 4),
            tails_per_path=random.randint(1, 4),
            **options,  # type: ignore[arg-type]
        )
        shuffled = lambda count: random.sample(range(count), count)  # noqa: E731
        return TieredCache(spec, config, self._memories(config), pool_order=shuffled)

    def _memories(self, config: CacheConfig) -> Memories:
        return make_memories(self.spec, config, executors=self.copies)

    def _poison_what_is_freed(self) -> None:
        real = self.cache.pages.release

        def release(ids):
            ids = list(ids)
            poison = partial(self._poison, ids)
            if self.loop == "queued":
                self.stream.add(poison)
            else:
                poison()
            real(ids)

        self.cache.pages.release = release  # type: ignore[method-assign]
        host, real_host = self.cache.host, self.cache.host_pages.release

        def release_host(ids):
            for page_id in ids:  # at once: not all that writes there waits for steps
                for view in host.views([page_id], [self.spec.place_bytes])[0] if host else ():
                    view[:] = bytes([POISON]) * len(view)
            real_host(ids)

        self.cache.host_pages.release = release_host  # type: ignore[method-assign]

    def _poison(self, ids: Sequence[Any]) -> None:
        for page_id in ids:
            self.model.bytes.poison_place(page_id)

    def _start(self, step: Step) -> Callable[[], Drawn]:
        """Queue a step. It is carried out now, when something behind it is, or when its result is needed."""
        came: list[Drawn | Exception] = []

        def work() -> None:
            try:
                came.append(self.runner.run(step))
            except Exception as error:  # noqa: BLE001 - what an executor does
                came.append(error)

        number = self.stream.add(work)
        if self.random.random() < 0.3:
            self.stream.carry_out(number)

        def result() -> Drawn:
            self.stream.carry_out(number)
            if isinstance(came[0], Exception):
                raise came[0]
            return came[0]

        return result

    # What happens

    ACTIONS = (
        ("ask", 20),
        ("abort", 4),
        ("step", 60),
        ("land", 20),
        ("fault", 2),
        ("pass_time", 4),
        ("flush", 1),
    )

    def step(self, number: int) -> None:
        random = Random(number)
        names, weights = zip(*self.ACTIONS, strict=True)
        (name,) = random.choices(names, weights)
        self.log.append(f"{number}: {name}")
        getattr(self, f"_do_{name}")(random)

    def run(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.step(number)
        self.wind_down()

    def _do_ask(self, random: Random) -> None:
        base = random.choice(self.texts[-12:])
        most = min(LONGEST, self.scheduler.context_tokens)
        tokens = base[: random.choice([len(base), random.randint(1, len(base))])]
        tokens = (tokens + [random.randrange(VOCABULARY) for _ in range(random.randint(0, 9))])[: most - 1]
        self.texts.append(tokens)
        count = random.choice([0, 1, *(random.randint(0, most - len(tokens)) for _ in range(4))])
        sampling = Sampling(
            min(count, most - len(tokens)),
            temperature=0.0,
            stop=("stop",) if random.random() < 0.2 else (),
            logprobs=0 if random.random() < 0.2 else None,
        )
        scored = random.randint(0, len(tokens)) if random.random() < 0.15 else None
        turns = tuple(random.randint(0, len(tokens)) for _ in range(random.randint(0, 2)))
        ask = Ask(
            f"a{len(self.asked)}", tuple(tokens), sampling, turns, (), random.choice([0, 0, 0, 1, 2]), scored
        )
        ends = frozenset({random.randrange(VOCABULARY)} if random.random() < 0.3 else ())
        told = f"{tokens}, {sampling.max_tokens} more, priority {ask.priority}, turns {turns}"
        self.log[-1] += f" {ask.request_id}: {told}, scores {scored}, ends {set(ends)}, {sampling.stop}"
        try:
            self.scheduler.add(ask, ScriptedStream(bool(sampling.stop)), ends)  # type: ignore[arg-type]
        except QueueFull:
            return
        self.asked[ask.request_id] = Asked(ask, _truth(ask, ends))

    def _do_abort(self, random: Random) -> None:
        if self.scheduler.tasks:
            name = random.choice(sorted(self.scheduler.tasks))
            self.asked[name].aborted = True
            self.log[-1] += f" {name}"
            self.scheduler.abort(name)

    def _do_step(self, random: Random) -> None:
        self.steps_taken += 1
        for outcome in next(self.steps):
            self._take(outcome)
        if self.steps_taken % 8 == 0:
            self.cache.check()
            self._check_waiting()

    def _check_waiting(self) -> None:
        own = self.scheduler
        for task in own.waiting:
            before = [each for each in (*own.running, *own.waiting) if each.order < task.order]
            computed = sum(each.seat.computed for each in before if each.seat)
            assert own.admission.tokens_before(task) == sum(len(each.tokens) for each in before) - computed

    def _do_land(self, random: Random) -> None:
        self._land(random.random())

    def _land(self, share: float) -> None:
        for copies in (*self.copies.values(), *self.store_copies.values()):
            for _ in range(round(share * len(copies.held) + 0.5)):
                if copies.held:
                    copies.run(self.random.randrange(len(copies.held)))

    def _do_fault(self, random: Random) -> None:
        self.faults += 1
        if self.copier is not None and random.random() < 0.4:
            self.copier.copies_until_fault = random.randint(0, 8)
        elif self.store is not None and random.random() < 0.6:
            self.store.mood = random.choice([None, *LIES, *FAULTS])
            self.store.times = random.choice([1, 2, 5])
        else:
            self.model.faults = 1

    def _do_pass_time(self, random: Random) -> None:
        self.now_s += random.choice([0.1, 3.0, 30.0])

    def _do_flush(self, random: Random) -> None:
        self.cache.flush()

    def emit(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """A loop's engine makes text of outcomes; here they are looked at."""
        return list(outcomes)

    # What must be true

    def _take(self, outcome: Outcome) -> None:
        asked = self.asked[outcome.task.ask.request_id]
        assert asked.finish is None, f"{asked.ask.request_id} goes on after its end"
        if outcome.token is not None:
            asked.tokens.append(outcome.token.token)
            assert asked.tokens == asked.truth[: len(asked.tokens)], f"{asked.ask}: {asked.tokens}"
        if outcome.prompt:
            asked.prompt = [each.token for each in outcome.prompt]
        asked.finish = outcome.finish
        if outcome.finish in (Finish.STOP, Finish.LENGTH):
            assert asked.tokens == asked.truth, f"{asked.ask} ended early: {asked.tokens}, not {asked.truth}"
            scored = asked.ask.prompt_logprobs_from
            if scored is not None and scored < len(asked.ask.prompt):
                assert asked.prompt == list(asked.ask.prompt[scored:]), f"{asked.ask}: {asked.prompt} scored"
        elif outcome.finish is Finish.ERROR:
            assert "simulation" in outcome.error and self.faults, outcome.error
        elif outcome.finish is Finish.ABORT:
            assert asked.aborted

    def wind_down(self) -> None:
        """Nothing new comes and nothing fails any more: everything asked ends, all is given back."""
        self.model.faults = 0
        if self.store is not None:
            self.store.mood = None
        if self.copier is not None:
            self.copier.copies_until_fault = None
        for _ in range(STEPS_TO_END):
            if self.scheduler.idle and all(asked.finish for asked in self.asked.values()):
                break
            self.now_s += 0.05
            self._do_step(self.random)
            self._land(1.0)
        left = [name for name, asked in self.asked.items() if asked.finish is None]
        assert not left, f"these do not end: {left}"
        self.cache.check()
        own = self.scheduler
        assert not (own.tasks or own.running or own.waiting or own.loading)
        assert sorted(own.free_rings) == list(range(own.config.running_max))
        self.steps.close()  # type: ignore[attr-defined]  # a loop that nobody needs runs its last step


def _truth(ask: Ask, ends: frozenset[int]) -> list[int]:
    """The tokens that must be drawn."""
    text, answer = list(ask.prompt), list[int]()
    while len(answer) < ask.sampling.max_tokens:
        answer.append(next_token(text))
        text.append(answer[-1])
        if answer[-1] in ends or (ask.sampling.stop and answer[-1] == 7):
            break
    return answer


class SparseScheduleWorld(ScheduleWorld):
    """One whose pages may be sparse."""

    NAMES = SELECTIVE
