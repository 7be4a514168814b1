"""Tasks on one cache: who is let in, who gives its places up, and how tasks end.

`Scheduler` adds to it which positions are computed when. No tensor is touched here.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable
from itertools import takewhile
from time import monotonic

from tiercel.cache import Loaded, RequestState, TieredCache, Wait, WaitFor
from tiercel.engine.ask import Ask, Finish
from tiercel.engine.config import EngineConfig
from tiercel.engine.guessing import Explained
from tiercel.engine.step import Begin, PageTable
from tiercel.engine.task import PRIORITY_S, Outcome, Seat, Stage, Task
from tiercel.engine.times import EngineTimes
from tiercel.errors import GrammarError, QueueFull
from tiercel.text.stream import TextStream
from tiercel.types import place

log = logging.getLogger(__name__)

PASSED_MOST = 64
"""At most so many tasks that let others by are tried again in one step."""

EXPLAINED_MOST = 4096

LET_OTHERS_BY = WaitFor.STORE, WaitFor.COMPUTING
"""A task that waits for these holds no pages, so tasks behind it may begin."""


COUNTED = (
    *("asks", "steps", "steps_failed", "tokens_drawn", "tokens_computed", "preemptions", "loads_failed"),
    *("begun_early", "guesses", "guesses_accepted", "guessing_steps", "guessing_tokens"),
    *("prompts_elsewhere", "pages_elsewhere", *(f"finished_{finish.value}" for finish in Finish)),
)
"""What the engine counts: all of it is there from the start, so that a rate over time has a first value."""


class Tasks:
    """Tasks, and what they hold of the cache."""

    def __init__(
        self, cache: TieredCache, config: EngineConfig, clock: Callable[[], float] = monotonic
    ) -> None:
        self.cache = cache
        self.config = config
        self.page_tokens = cache.spec.page_tokens
        fits = cache.pages.capacity * self.page_tokens
        self.context_tokens = min(fits, config.context_tokens or fits)
        self.waiting: list[Task] = []
        self._tokens_waiting = 0
        self.loading: dict[int, Task] = {}
        self.arriving: dict[int, Task] = {}
        """Running tasks whose loads have not ended: the device waits for them, layer by layer."""
        self.running: list[Task] = []
        self.tasks: dict[str, Task] = {}
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.times = EngineTimes()
        self.explained: OrderedDict[str, Explained] = OrderedDict()
        """What the last `EXPLAINED_MOST` requests reused."""
        self.stalled = False
        """The last plan left a task out because a task of the step under way holds the room it needs."""
        self.free_rings = list(range(config.running_max))
        self._in_ring: dict[int, Seat] = {}
        self._changes: list[Begin | PageTable] = []
        self._loads: list[int] = []
        self._clock = clock
        self._number = self._plans = self._passed = 0
        self._aborted: list[Task] = []
        self.finished: Callable[[Task], None] = lambda _: None
        """Told of each task that ended with its whole answer. It must not raise."""
        self._ended: list[Outcome] = []
        """Ended outside a step's own tokens: aborted, or failed."""

    # Asks

    def add(self, ask: Ask, stream: TextStream, ends: frozenset[int]) -> None:
        """Queue an ask that can be served. `ends`: tokens that end its answer."""
        if len(self.waiting) >= self.config.waiting_max:
            raise QueueFull(waiting=len(self.waiting), waiting_max=self.config.waiting_max)
        now = self._clock()
        order = now - PRIORITY_S * ask.priority, self._number
        chain = self.cache.chain(ask.prompt, ask.namespace, ask.tenant, keys=ask.keys)
        task = Task(ask, order, chain, stream, ends, now)
        self._number += 1
        self.tasks[ask.request_id] = task
        self._wait(task)
        self.counters["asks"] += 1
        self.cache.prefetch(
            task.chain, replay=self.config.replay, reuse_most=task.score_from, wait_s=self._wait_s(task)
        )

    def _wait_s(self, task: Task) -> float:
        """How long the prompts before it take to compute, as far as known."""
        if self.cache.store is None:
            return 0.0
        return self.cache.compute.seconds(self._tokens_before(task)) or 0.0

    def _tokens_before(self, task: Task) -> int:
        """Tokens to compute before a waiting task."""
        behind = takewhile(lambda each: each is not task, reversed(self.waiting))  # mostly none
        tokens = self._tokens_waiting - len(task.tokens) - sum(len(each.tokens) for each in behind)
        for each in self.running:
            if each.order < task.order:
                tokens += len(each.tokens) - (each.seat.computed if each.seat else 0)
        return tokens

    def _wait(self, task: Task) -> None:
        task.stage = Stage.WAITING
        insort(self.waiting, task, key=lambda each: each.order)
        self._tokens_waiting += len(task.tokens)

    def _wait_no_more(self, task: Task) -> None:
        self.waiting.remove(task)
        self._tokens_waiting -= len(task.tokens)

    def abort(self, request_id: str) -> None:
        """End a request, at any moment. It is not known any more: nothing happens."""
        task = self.tasks.get(request_id)
        if task is not None:
            task.aborted = True
            self._aborted.append(task)

    # Letting in

    def collect(self) -> None:
        """What copies have brought. May be called at any moment."""
        for loaded in self.cache.step():
            self._arrived(loaded)

    def _arrived(self, loaded: Loaded) -> None:
        early = self.arriving.pop(id(loaded.request), None)
        task = early or self.loading.pop(id(loaded.request), None)
        if task is None:
            return
        if loaded.error is None:
            if not early:
                self._loaded(task)
            return
        log.warning("a load failed, the tokens are computed instead: %s", loaded.error, extra=task.named)
        self.counters["loads_failed"] += 1
        task.load = False
        if early:
            self.running.remove(task)
        self._wait_again(task)

    def _resume_early(self) -> bool:
        """There is nothing else to compute: begin with what is being loaded, if the device can wait for it.
        Where texts are computed already, they do not wait: the loading ones join them later."""
        loads = {
            id(seat.request): number
            for task in self.loading.values()
            if (seat := task.seat) and (number := self.cache.load_under_way(seat.request)) is not None
        }
        for key, number in loads.items():
            task = self.arriving[key] = self.loading.pop(key)
            if number not in self._loads:
                self._loads.append(number)
            self.counters["begun_early"] += 1
            self._loaded(task)
        return bool(loads)

    def _abort_marked(self, busy: set[Task]) -> None:
        marked, self._aborted = self._aborted, []
        for task in marked:
            if task in busy:
                self._aborted.append(task)
            elif task.stage is not Stage.ENDED:
                self._end(task, Finish.ABORT)
                self._ended.append(Outcome(task, finish=Finish.ABORT))

    def _admit(self, busy: set[Task]) -> None:
        """Tasks begin in their order. A task that waits for room is passed by nobody. A task that waits for
        the store, or for what another task is computing, lets others by. Of these at most PASSED_MOST are
        looked at in one step, in turns, so that they cost little however many they are."""
        self._plans += 1
        turns, passed = self._passed // PASSED_MOST + 1, 0
        for task in self.waiting.copy():
            if not (task.passed and (task.order[1] + self._plans) % turns):
                if not self._let_in(task, busy):
                    break
                task.passed = task.stage is Stage.WAITING
            passed += task.passed
        self._passed = passed

    def _let_in(self, task: Task, busy: set[Task]) -> bool:
        """Begin a task, if need be in place of running ones of lower priority. False: the task waits for
        room, and no task behind it may take that room."""
        while True:
            last = None
            if not self.free_rings and (last := self._gives_way(task, busy)) is None:
                return False
            waits = self._begin(task, last)
            if waits is None or waits.what in LET_OTHERS_BY:
                return True
            if waits.what is not WaitFor.DEVICE_PAGES or (last := self._gives_way(task, busy)) is None:
                return False
            self._preempt(last)

    def _gives_way(self, task: Task, busy: set[Task]) -> Task | None:
        """The last running task that has a lower priority and comes after this one, if it can stop now."""
        for last in reversed(self.running):
            if last.order < task.order:
                break
            if last.ask.priority < task.ask.priority:
                self.stalled = self.stalled or last in busy
                return None if last in busy else last
        return None

    def _begin(self, task: Task, instead_of: Task | None = None) -> Wait | None:
        """`instead_of`: a running task that gives its ring up, where there is no other."""
        times, now, fresh = task.times, self._clock(), not task.chain.counted
        if (refusal := self._refusal(task)) is not None:
            return refusal
        request = self.cache.begin(
            task.name_pages(),
            priority=task.ask.priority,
            turn_ends=task.ask.turn_ends,
            load=task.load,
            replay=self.config.replay,
            reuse_most=task.score_from,
            room_for=self._page_end(len(task.tokens)),
            for_others=task.ask.for_others,
        )
        if isinstance(request, Wait):
            if request.what is WaitFor.STORE and times.store_s is None:
                times.store_s = now
            if request.what is WaitFor.DEVICE_PAGES:
                task.refused = self.cache.changes, request
            return request
        if instead_of is not None:
            self._preempt(instead_of)
        self._wait_no_more(task)
        reuse = request.reuse
        cached = reuse.cached_tokens
        task.seat = seat = Seat(task, request, self.free_rings.pop(), cached, cached)
        self._in_ring[seat.ring] = seat
        task.scores.clear()
        if fresh:  # later it finds what it has computed itself
            self.explained[task.ask.request_id] = Explained(reuse, task.guesses, times)
            task.reused = reuse.device_tokens, reuse.host_tokens, reuse.store_tokens, reuse.replay_tokens
            if len(self.explained) > EXPLAINED_MOST:
                self.explained.popitem(last=False)
        if not task.drawn:
            if times.begun_s is None:
                self.times.queue.add(now - times.added_s)
            times.matched_s, times.begun_s = now, self._clock()
            times.running_s = times.begun_s
        if request.state is RequestState.RUNNING:
            self._resume(task)
        else:
            task.stage = Stage.LOADING
            self.loading[id(request)] = task
        return None

    def _refusal(self, task: Task) -> Wait | None:
        """What a task that found no device pages would be told again, because nothing has changed."""
        if task.refused is None or task.refused[0] != self.cache.changes:
            return None
        return task.refused[1]

    def _loaded(self, task: Task) -> None:
        """Its load has ended, or the device waits for it."""
        if not task.drawn:
            task.times.running_s = self._clock()
        self._resume(task)

    def _resume(self, task: Task) -> None:
        """All that the task reuses is on the device: it runs from now on."""
        seat = task.seat
        assert seat is not None
        tails, tokens = tuple(seat.request.tail_places(self.page_tokens)), tuple(task.tokens)
        self._changes += (
            Begin(seat.ring, tokens, task.prompt_tokens, task.sampling, tails, seat.write_from),
            PageTable(seat.ring, 0, tuple(map(place, seat.request.table))),
        )
        task.stage = Stage.RUNNING
        insort(self.running, task, key=lambda each: each.order)

    def _extend_prompt(self, seat: Seat, end: int) -> None:
        """A step is going to compute a prompt up to here: places for the tails that it writes. They are not
        reserved before: a long prompt writes more tails than there are places."""
        if end > seat.request.extended_tokens or end <= seat.write_from:
            waits = self._extend(seat, end)
            assert waits is None, "the pages were reserved by `begin`"

    def _extend(self, seat: Seat, upto: int, *, early: bool = False) -> Wait | None:
        """Room up to the end of the page that position `upto` lies in; or what the task waits for."""
        extended = self.cache.extend(seat.request, self._page_end(upto), early=early)
        return extended if isinstance(extended, Wait) else None

    def _page_end(self, position: int) -> int:
        return min((position // self.page_tokens + 1) * self.page_tokens, self.context_tokens)

    def _preempt(self, task: Task) -> None:
        """A running task gives its pages up and waits again. What it has computed stays cached."""
        assert task.seat is not None
        self.counters["preemptions"] += 1
        self.cache.preempt(task.seat.request)
        self.running.remove(task)
        self._wait_again(task)

    def _wait_again(self, task: Task) -> None:
        self._leave_seat(task)
        self._wait(task)

    # Ending

    def _fail(self, task: Task, error: Exception) -> None:
        """End one task with an error. It is in no step under way."""
        finish = Finish.ERROR
        if isinstance(error, GrammarError):  # of the client
            finish = Finish.GRAMMAR
            log.warning("a request ends: %s", error, extra=task.named)
        else:
            log.error("a request ends with an error", exc_info=error, extra=task.named)
        self._end(task, finish)
        self._ended.append(Outcome(task, finish=finish, error=str(error)))

    def _end(self, task: Task, finish: Finish) -> None:
        seat = task.seat
        if task.stage is Stage.WAITING:
            self._wait_no_more(task)
            self.cache.withdraw(task.chain)
        elif task.stage is Stage.RUNNING:
            self.running.remove(task)
        elif seat is not None:
            self.loading.pop(id(seat.request))
        if seat is not None and seat.request.state is not RequestState.ENDED:
            whole = finish in (Finish.STOP, Finish.LENGTH)
            (self.cache.finish if whole else self.cache.abort)(seat.request)
        self._leave_seat(task)
        task.stage = Stage.ENDED
        task.times.ended_s = self._clock()
        del self.tasks[task.ask.request_id]
        self.counters[f"finished_{finish.value}"] += 1
        if finish in (Finish.STOP, Finish.LENGTH):
            self.finished(task)

    def _leave_seat(self, task: Task) -> None:
        if task.seat is not None:
            self.arriving.pop(id(task.seat.request), None)
            self.free_rings.append(task.seat.ring)
            del self._in_ring[task.seat.ring]
            task.seat = None
