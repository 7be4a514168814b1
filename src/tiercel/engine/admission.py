"""Which task begins, which one gives its places up, and how tasks end. The scheduler decides which positions
are computed when. No tensor is touched here."""

from __future__ import annotations

import logging
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial

from tiercel.asks.ask import Ask, Finish
from tiercel.asks.times import EngineTimes
from tiercel.cache import Loaded, RequestState, TieredCache, Wait, WaitFor
from tiercel.engine.config import EngineConfig
from tiercel.engine.guessing import Explained
from tiercel.engine.seats import Seats
from tiercel.engine.task import PRIORITY_S, Outcome, Stage, Task
from tiercel.engine.waiting import Waiting
from tiercel.errors import GrammarError, QueueFull, RunnerLost
from tiercel.text.stream import TextStream

log = logging.getLogger(__name__)

EXPLAINED_MOST = 4096

LET_OTHERS_BY = WaitFor.STORE, WaitFor.COMPUTING
"""A task that waits for these holds no pages, so tasks behind it may begin."""


class Admission:
    """Tasks, from `add` until they end."""

    def __init__(
        self,
        cache: TieredCache,
        config: EngineConfig,
        seats: Seats,
        times: EngineTimes,
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self.waiting = Waiting()
        self.loading: dict[int, Task] = {}
        self.arriving: dict[int, Task] = {}
        """Running tasks whose loads have not ended: the device waits for them, layer by layer."""
        self.running: list[Task] = []
        self.tasks: dict[str, Task] = {}
        self.explained: OrderedDict[str, Explained] = OrderedDict()
        """What the last `EXPLAINED_MOST` requests reused, in the order in which they began."""
        self._cache, self._config, self._seats = cache, config, seats
        self._times, self._counters, self._clock = times, counters, clock
        self._number = 0
        self._stalled = False
        self._aborted: list[Task] = []
        self.ended: list[Outcome] = []
        """Ended outside a step's own tokens: aborted, or failed."""

    # Asks

    def add(self, ask: Ask, stream: TextStream, ends: frozenset[int]) -> None:
        """Queue an ask that can be served. `ends`: tokens that end its answer."""
        if len(self.waiting) >= self._config.waiting_max:
            raise QueueFull(waiting=len(self.waiting), waiting_max=self._config.waiting_max)
        now = self._clock()
        order = now - PRIORITY_S * ask.priority, self._number
        tokens = ask.prompt_array if ask.keys is None else ask.prompt  # with keys they are only counted
        chain = self._cache.chain(tokens, ask.namespace, ask.tenant, keys=ask.keys)
        task = Task(ask, order, chain, stream, ends, now)
        self._number += 1
        self.tasks[ask.request_id] = task
        self.waiting.add(task)
        self._counters["asks"] += 1
        self._cache.prefetch(
            task.chain, replay=self._config.replay, reuse_most=task.score_from, wait_s=self._wait_s(task)
        )

    def _wait_s(self, task: Task) -> float:
        """Seconds to compute the prompts before this task, as far as known."""
        if self._cache.store is None:
            return 0.0
        return self._cache.compute.seconds(self.tokens_before(task)) or 0.0

    def tokens_before(self, task: Task) -> int:
        """Tokens to compute before a waiting task."""
        tokens = self.waiting.tokens_before(task)
        for each in self.running:
            if each.order < task.order:
                tokens += len(each.tokens) - (each.seat.computed if each.seat else 0)
        return tokens

    def abort(self, request_id: str) -> None:
        """End a request, at any moment. If it is not known any more, nothing happens."""
        task = self.tasks.get(request_id)
        if task is not None:
            task.aborted = True
            self._aborted.append(task)

    # Letting in

    def collect(self) -> None:
        """Take in what copies have brought. May be called at any moment."""
        for loaded in self._cache.step():
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
        self._counters["loads_failed"] += 1
        task.load = False
        if early:
            self.running.remove(task)
        self._wait_again(task)

    def resume_early(self) -> bool:
        """There is nothing else to compute: begin with what is being loaded, if the device can wait for it.
        Texts that are computed already do not wait: the loading ones join them later."""
        loads = {
            id(seat.request): number
            for task in self.loading.values()
            if (seat := task.seat) and (number := self._cache.load_under_way(seat.request)) is not None
        }
        for key, number in loads.items():
            task = self.arriving[key] = self.loading.pop(key)
            self._seats.wait_for(number)
            self._counters["begun_early"] += 1
            self._loaded(task)
        return bool(loads)

    def end_aborted(self, busy: set[Task]) -> None:
        """End tasks that were aborted, unless a step under way computes them."""
        marked, self._aborted = self._aborted, []
        for task in marked:
            if task in busy:
                self._aborted.append(task)
            elif task.stage is not Stage.ENDED:
                self.end(task, Finish.ABORT)
                self.ended.append(Outcome(task, finish=Finish.ABORT))

    def admit(self, busy: set[Task]) -> bool:
        """Let tasks begin in order, if need be in place of running ones of lower priority. Returns whether
        one has to wait because a task of the step under way (`busy`) can not stop now."""
        self._stalled = False
        self.waiting.ask_each(partial(self._let_in, busy=busy))
        return self._stalled

    def _let_in(self, task: Task, busy: set[Task]) -> bool:
        """Begin a task. False: it waits for room, and no task behind it may take that room."""
        while True:
            last = None
            if not self._seats.free and (last := self._gives_way(task, busy)) is None:
                return False
            waits = self._begin(task, last)
            if waits is None or waits.what in LET_OTHERS_BY:
                return True
            if waits.what is not WaitFor.DEVICE_PAGES or (last := self._gives_way(task, busy)) is None:
                return False
            self.preempt(last)

    def _gives_way(self, task: Task, busy: set[Task]) -> Task | None:
        """The last running task that has a lower priority and comes after this one, if it can stop now."""
        for last in reversed(self.running):
            if last.order < task.order:
                break
            if last.ask.priority < task.ask.priority:
                self._stalled = self._stalled or last in busy
                return None if last in busy else last
        return None

    def _begin(self, task: Task, instead_of: Task | None = None) -> Wait | None:
        """`instead_of`: a running task that gives up its ring if no ring is free."""
        times, now, fresh = task.times, self._clock(), not task.chain.counted
        if (refusal := self._refusal(task)) is not None:
            return refusal
        request = self._cache.begin(
            task.name_pages(),
            priority=task.ask.priority,
            turn_ends=task.ask.turn_ends,
            load=task.load,
            replay=self._config.replay,
            reuse_most=task.score_from,
            room_for=self._seats.page_end(len(task.tokens)),
            for_others=task.ask.for_others,
        )
        if isinstance(request, Wait):
            if request.what is WaitFor.STORE and times.store_s is None:
                times.store_s = now
            if request.what is WaitFor.DEVICE_PAGES:
                task.refused = self._cache.changes, request
            return request
        if instead_of is not None:
            self.preempt(instead_of)
        self.waiting.remove(task)
        self._seats.take(task, request)
        reuse = request.reuse
        task.scores.clear()
        if fresh:  # a task that begins again finds what it has computed itself
            self.explained[task.ask.request_id] = Explained(reuse, task.guesses, times, len(request.sparse))
            task.reused = reuse.device_tokens, reuse.host_tokens, reuse.store_tokens, reuse.replay_tokens
            if len(self.explained) > EXPLAINED_MOST:
                self.explained.popitem(last=False)
        if not task.drawn:
            if times.begun_s is None:
                self._times.queue.add(now - times.added_s)
            times.matched_s, times.begun_s = now, self._clock()
            times.running_s = times.begun_s
        if request.state is RequestState.RUNNING:
            self._resume(task)
        else:
            task.stage = Stage.LOADING
            self.loading[id(request)] = task
        return None

    def _refusal(self, task: Task) -> Wait | None:
        """The same refusal as before for a task that found no device pages, if nothing has changed."""
        if task.refused is None or task.refused[0] != self._cache.changes:
            return None
        return task.refused[1]

    @property
    def quiet(self) -> bool:
        """Whether the next plans let no task in and end none, as long as no ask and no abort comes, no text
        ends and no page is asked for. No task waits for what lands meanwhile."""
        first = self.waiting.first
        if self.loading or self._aborted or first is None:
            return not (self.loading or self._aborted)
        if first.passed or self._gives_way(first, set()) is not None:
            return False
        return not self._seats.free or (not self._cache.busy and self._refusal(first) is not None)

    def _loaded(self, task: Task) -> None:
        """The task's load has ended, or the device waits for it."""
        if not task.drawn:
            task.times.running_s = self._clock()
        self._resume(task)

    def _resume(self, task: Task) -> None:
        """All that the task reuses is on the device: it runs from now on."""
        assert task.seat is not None
        self._seats.begin(task.seat)
        task.stage = Stage.RUNNING
        insort(self.running, task, key=lambda each: each.order)

    def preempt(self, task: Task) -> None:
        """A running task gives its pages up and waits again. What it has computed stays cached."""
        assert task.seat is not None
        self._counters["preemptions"] += 1
        self._cache.preempt(task.seat.request)
        self.running.remove(task)
        self._wait_again(task)

    def begin_again(self) -> None:
        """The device has lost all that it held: tasks that run, or whose pages are being loaded, wait again.
        Every copy that was under way, or is sent from now on, fails."""
        for task in reversed(self.running.copy()):
            self.preempt(task)
        loading = list(self.loading.values())
        while self._cache.moving:
            self.collect()
        for task in loading:
            task.load = True  # its load did not fail for anything that it loads
        self._seats.forget()

    def _wait_again(self, task: Task) -> None:
        self._leave_seat(task)
        self.waiting.add(task)

    # Ending

    def fail(self, task: Task, error: Exception) -> None:
        """End one task with an error. Required: it is in no step under way."""
        finish = Finish.ERROR
        if isinstance(error, GrammarError):  # the client's error
            finish = Finish.GRAMMAR
            log.warning("a request ends: %s", error, extra=task.named)
        elif isinstance(error, RunnerLost):  # what was lost has been told
            log.error("a request ends: %s", error, extra=task.named)
        else:
            log.error("a request ends with an error", exc_info=error, extra=task.named)
        self.end(task, finish)
        self.ended.append(Outcome(task, finish=finish, error=str(error)))

    def end(self, task: Task, finish: Finish) -> None:
        """End a task: it gives everything up and is forgotten."""
        seat = task.seat
        if task.stage is Stage.WAITING:
            self.waiting.remove(task)
            self._cache.withdraw(task.chain)
        elif task.stage is Stage.RUNNING:
            self.running.remove(task)
        elif seat is not None:
            self.loading.pop(id(seat.request))
        if seat is not None and seat.request.state is not RequestState.ENDED:
            whole = finish in (Finish.STOP, Finish.LENGTH)
            (self._cache.finish if whole else self._cache.abort)(seat.request)
        self._leave_seat(task)
        task.stage = Stage.ENDED
        task.times.ended_s = self._clock()
        del self.tasks[task.ask.request_id]
        self._counters[f"finished_{finish.value}"] += 1

    def _leave_seat(self, task: Task) -> None:
        if task.seat is not None:
            self.arriving.pop(id(task.seat.request), None)
            self._seats.leave(task.seat)
