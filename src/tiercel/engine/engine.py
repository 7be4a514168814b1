"""The engine: asks in, tokens out. One thread drives it, step by step.

    plan      what arrived, who is let in, which positions are computed      (bookkeeping only)
    spans     … as the model is asked for them
    forward   the model computes them                                        (touches device memory only)
    advance   tokens are drawn, pages and tails shared, texts ended
    emit      tokens become text

`loop.py` calls these in turn, or plans the next step while this one is computed. What is computed for a text
does not depend on what else is in a step, so the order of things never changes an answer.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor

from tiercel.cache import Loaded, RequestState, TieredCache, Wait, WaitFor
from tiercel.engine.ask import Ask, Delta, Finish, TokenOut
from tiercel.engine.config import EngineConfig
from tiercel.engine.explain import Explained
from tiercel.engine.plan import Outcome, Part, Plan, Work, share
from tiercel.engine.sampling import Sampler, best_tokens, check
from tiercel.engine.scoring import take_scores
from tiercel.engine.task import PRIORITY_S, Stage, Task
from tiercel.errors import AskError, QueueFull
from tiercel.models.base import Model, Span
from tiercel.text.stream import TextStream
from tiercel.text.text import Text
from tiercel.types import place

log = logging.getLogger(__name__)

PROMPT_TOKENS = 16
"""A step with so many tokens for each text in it tells how fast prompts are computed."""

PASSED_MOST = 64
"""So many that let others by are looked at in a step."""

LET_OTHERS_BY = WaitFor.STORE, WaitFor.COMPUTING
"""Who waits for these holds no room, and needs none before they end."""


class Engine:
    """Runs asks on one model and its cache."""

    def __init__(
        self,
        model: Model,
        cache: TieredCache,
        text: Text,
        config: EngineConfig,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.model = model
        self.cache = cache
        self.text = text
        self.config = config
        self.page_tokens = cache.spec.page_tokens
        self.vocab_size = model.vocab_size
        fits = cache.pages.capacity * self.page_tokens
        self.context_tokens = min(fits, config.context_tokens or fits)
        self.waiting: list[Task] = []
        self.loading: dict[int, Task] = {}
        self.running: list[Task] = []
        self.tasks: dict[str, Task] = {}
        self.counters: Counter[str] = Counter()
        self.stalled = False
        """The last plan left someone out whose room was with a task under way."""
        self._rings = list(range(config.running_max))
        self._forward_s = 0.0
        self._clock = clock
        self._number = self._plans = self._passed = 0
        self._aborted: list[Task] = []
        self._ended: list[Outcome] = []
        """Ended outside a step's own tokens: aborted, or failed."""
        self._explained = Explained()

    # Asks

    def check(self, ask: Ask) -> None:
        """Whether an ask can ever be served. What is wrong is named."""
        check(ask.sampling, self.vocab_size)
        if not ask.prompt:
            raise AskError("prompt", ask.prompt, "has no tokens")
        worst = max(ask.prompt), min(ask.prompt)
        if worst[0] >= self.vocab_size or worst[1] < 0:
            bad = worst[0] if worst[1] >= 0 else worst[1]
            raise AskError("prompt", bad, f"is no token: the vocabulary has {self.vocab_size}")
        if len(ask.prompt) + ask.sampling.max_tokens > self.context_tokens:
            asked = f"{len(ask.prompt)} tokens of prompt and {ask.sampling.max_tokens} of answer"
            raise AskError("max_tokens", ask.sampling.max_tokens, f"{asked}; {self.context_tokens} fit")
        if ask.request_id in self.tasks:
            raise AskError("request_id", ask.request_id, "is in use")

    def add(self, ask: Ask) -> None:
        """Queue an ask. Raises `AskError` or `QueueFull`, and then nothing has happened."""
        self.check(ask)
        if len(self.waiting) >= self.config.waiting_max:
            raise QueueFull(waiting=len(self.waiting), waiting_max=self.config.waiting_max)
        sampler = Sampler(ask.sampling, ask.prompt, self.vocab_size)
        stream = TextStream(self.text, ask.sampling.stop, ask.sampling.keep_stop)
        order = self._clock() - PRIORITY_S * ask.priority, self._number
        task = Task(ask, order, self.cache.chain(ask.prompt, ask.namespace), sampler, stream)
        task.ends = ask.sampling.stop_tokens | (frozenset() if ask.sampling.ignore_eos else self.text.eos)
        self._number += 1
        self.tasks[ask.request_id] = task
        insort(self.waiting, task, key=lambda each: each.order)
        self.counters["asks"] += 1
        self.cache.prefetch(
            task.chain, replay=self.config.replay, reuse_most=task.scores_from, wait_s=self._wait_s(task)
        )

    def _wait_s(self, task: Task) -> float:
        """How long the prompts before it take to compute, as far as known."""
        if self.cache.store is None:
            return 0.0
        before = (each for each in (*self.running, *self.waiting) if each.order < task.order)
        tokens = sum(len(each.tokens) - each.computed for each in before)
        return self.cache.compute.seconds(tokens) or 0.0

    def abort(self, request_id: str) -> None:
        """End a request, at any moment. It is not known any more: nothing happens."""
        task = self.tasks.get(request_id)
        if task is not None:
            task.aborted = True
            self._aborted.append(task)

    @property
    def idle(self) -> bool:
        return not (self.tasks or self._ended or self.cache.busy)

    def flush(self) -> int:
        """Forget what is cached; answers how many pages stay because they are in use."""
        return self.cache.flush()

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """What a request reused, from where, and why not more."""
        return self._explained.get(request_id)

    def stats(self) -> dict[str, Any]:
        queue = {"waiting": len(self.waiting), "loading": len(self.loading), "running": len(self.running)}
        return {**self.cache.stats(), "queue": queue, "engine": dict(self.counters)}

    # A step

    def plan(self, under_way: Sequence[Part] = ()) -> Plan:
        """What to compute next. `under_way` is being computed: it counts as done, and its tasks keep what
        they hold."""
        busy = {part.task for part in under_way}
        self.stalled = False
        for loaded in self.cache.step():
            self._arrived(loaded)
        self._abort_marked(busy)
        self._admit(busy)
        return self._choose(busy)

    def _abort_marked(self, busy: set[Task]) -> None:
        marked, self._aborted = self._aborted, []
        for task in marked:
            if task in busy:
                self._aborted.append(task)
            elif task.stage is not Stage.ENDED:
                self._end(task, Finish.ABORT)
                self._ended.append(Outcome(task, finish=Finish.ABORT))

    def spans(self, plan: Plan) -> Work:
        """What the model is asked; it depends on nothing that changes while the next step is planned."""
        return Work([self._span(part) for part in plan], every_token=self._scores(plan))

    def forward(self, work: Work) -> Tensor | None:
        """Logits of the last position of each part, or of all positions if a prompt is to be scored."""
        if not work.spans:
            return None
        began_s = perf_counter()
        rows = range(sum(len(span.tokens) for span in work.spans)) if work.every_token else None
        logits = self.model.forward(work.spans, rows)
        self._forward_s = perf_counter() - began_s
        return logits

    def _span(self, part: Part) -> Span:
        task = part.task
        tails = {b: p for b, p in task.tails.items() if part.start < b <= part.end} if task.tails else {}
        tokens = torch.tensor(task.tokens[part.start : part.end])
        return Span(tokens, part.start, task.places, task.ring, tails, task.write_from)

    def _scores(self, plan: Plan) -> bool:
        return any(part.task.scoring for part in plan)

    def advance(self, plan: Plan, logits: Tensor | None) -> list[Outcome]:
        """The model answered: draw, share, end. What can not be drawn or told ends its own task."""
        outcomes = list[Outcome]()
        if logits is not None:
            self._draw(plan, logits, outcomes)
        ended, self._ended = self._ended, []
        return ended + outcomes

    def _draw(self, plan: Plan, logits: Tensor, outcomes: list[Outcome]) -> None:
        if self._scores(plan):
            logits = take_scores(plan, logits, self._fail)
        best, drawn, computed = best_tokens(logits), 0, 0
        page_tokens = self.page_tokens
        for i, (task, start, end, draws) in enumerate(plan):
            if task.stage is Stage.ENDED:
                continue  # its scores could not be made
            task.computed = end
            computed += end - start
            if end // page_tokens != task.committed:
                self._commit(task)
            if not draws:
                continue
            drawn += 1
            token = best[i]
            more = len(task.tokens) + 1 < task.longest
            if task.simple and more and token >= 0 and token not in task.ends:  # most of the time
                task.tokens.append(token)
                outcomes.append(Outcome(task, TokenOut(token)))
                continue
            try:
                plain = task.sampler.plain and token >= 0
                out = TokenOut(token) if plain else task.sampler.draw(logits[i])
                outcome = self._drawn(task, out)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one row or text is that task's
                self._fail(task, error)
                continue
            outcomes.append(outcome)
            if outcome.finish is not None:
                self._end(task, outcome.finish)
        if computed > PROMPT_TOKENS * len(plan):
            self.cache.compute.observe(computed, self._forward_s)
        self.counters["steps"] += 1
        self.counters["tokens_drawn"] += drawn
        self.counters["tokens_computed"] += computed

    def failed(self, plan: Plan, error: Exception) -> None:
        """The model raised: the texts of this step end, the engine goes on."""
        self.counters["steps_failed"] += 1
        for part in plan:
            self._fail(part.task, error)

    def _fail(self, task: Task, error: Exception) -> None:
        """One task can not go on. Nobody computes it now."""
        log.error("%s ends with an error", task.ask.request_id, exc_info=error)
        self._end(task, Finish.ERROR)
        self._ended.append(Outcome(task, finish=Finish.ERROR, error=str(error)))

    def emit(self, outcomes: Sequence[Outcome]) -> list[Delta]:
        """What the askers are told. A text that can not be told ends with an error; nothing follows it."""
        deltas = []
        for outcome in outcomes:
            task = outcome.task
            if task.failed:
                continue
            try:
                deltas.append(self._delta(outcome))
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one text is its own
                log.error("%s can not be told", task.ask.request_id, exc_info=error)
                task.failed = True
                self.abort(task.ask.request_id)  # at the next plan: a step may be computing it
                deltas.append(Delta(task.ask.request_id, task.usage, finish=Finish.ERROR, error=str(error)))
        return deltas

    def _delta(self, outcome: Outcome) -> Delta:
        task, text = outcome.task, outcome.text
        if text is None:
            shown = outcome.token is not None and outcome.stopped_by is None
            text = task.stream.push(outcome.token.token).text if shown and outcome.token else ""
            if outcome.finish is not None:
                text += task.stream.finish()
        tokens = () if outcome.token is None else (outcome.token,)
        name, told = task.ask.request_id, outcome
        return Delta(name, task.usage, tokens, text, told.prompt, told.finish, told.stopped_by, told.error)

    # Letting in

    def _arrived(self, loaded: Loaded) -> None:
        task = self.loading.get(id(loaded.request))
        if task is None:
            return
        if loaded.error is None:
            self._resume(task)
            return
        log.warning("a load failed, %s computes instead: %s", task.ask.request_id, loaded.error)
        self.counters["loads_failed"] += 1
        task.load = False
        del self.loading[id(loaded.request)]
        self._wait_again(task)

    def _admit(self, busy: set[Task]) -> None:
        """In order, and nobody is passed: who waits for room gets it when it is there. Only who waits for the
        store, or for what another task is computing, lets others by. Of these at most PASSED_MOST are looked
        at in one step, in turns, so that they cost little however many they are."""
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
            if not self._rings and (last := self._gives_way(task, busy)) is None:
                return False
            waits = self._begin(task, last)
            if waits is None or waits.what in LET_OTHERS_BY:
                return True
            on_the_way = waits.what is not WaitFor.DEVICE_PAGES or self.cache.places.pages_leaving
            if on_the_way or (last := self._gives_way(task, busy)) is None:
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
        request = self.cache.begin(
            task.name_pages(),
            priority=task.ask.priority,
            turn_ends=task.ask.turn_ends,
            load=task.load,
            replay=self.config.replay,
            reuse_most=task.scores_from,
            room_for=self._page_end(len(task.tokens)),
        )
        if isinstance(request, Wait):
            return request
        if instead_of is not None:
            self._preempt(instead_of)
        self.waiting.remove(task)
        task.request, task.stage = request, Stage.LOADING
        self.loading[id(request)] = task
        roomy = self._extend(task, len(task.tokens))
        assert roomy, "the pages were reserved with the beginning"
        task.ring = self._rings.pop()
        task.computed = task.planned = request.reuse.tokens - request.reuse.replay_tokens
        task.write_from = request.reuse.tokens
        task.committed = -1
        task.scores.clear()
        if not task.drawn:
            task.reuse = request.reuse
            self._explained.add(task.ask.request_id, request.reuse)
        if request.state is RequestState.RUNNING:
            self._resume(task)
        return None

    def _resume(self, task: Task) -> None:
        """Everything it reuses is on the device."""
        request = task.request
        assert request is not None
        try:
            self.model.resume(task.ring, request.tail_places(self.page_tokens))
        except Exception as error:  # noqa: BLE001 - whatever a model raises: this text ends
            self._fail(task, error)
            return
        del self.loading[id(request)]
        task.stage = Stage.RUNNING
        insort(self.running, task, key=lambda each: each.order)

    def _extend(self, task: Task, upto: int) -> bool:
        """Room up to the end of the page that position `upto` lies in."""
        assert task.request is not None
        room = self.cache.extend(task.request, self._page_end(upto))
        if isinstance(room, Wait):
            return False
        task.room = task.request.extended_tokens
        task.tails.update({boundary: place(tail) for boundary, tail in room.tails.items()})
        task.places = torch.from_numpy(task.request.places()).long()
        return True

    def _page_end(self, position: int) -> int:
        return min((position // self.page_tokens + 1) * self.page_tokens, self.context_tokens)

    # Choosing

    def _choose(self, busy: set[Task]) -> Plan:
        """Running answers first, one token each; then prompts, sharing what is left of the step."""
        plan: Plan = []
        prompts: list[tuple[Task, int]] = []
        running = Stage.RUNNING
        for task in self.running.copy():
            if task.stage is not running or task.aborted:
                continue  # it was preempted for one before it, or ends once its step is done
            known = len(task.tokens)
            if busy and task in busy and task.planned == known:
                known += 1  # the token that is being drawn
                if known - len(task.ask.prompt) >= task.ask.sampling.max_tokens:
                    continue
            missing = known - task.planned
            if missing > 1:
                prompts.append((task, missing))
            elif missing == 1 and (known <= task.room or self._room_for(task, busy)):
                plan.append(Part(task, task.planned, known, True))
                task.planned = known
        plan = [part for part in plan if part.task.stage is running]
        tokens = max(self.config.step_tokens - len(plan), self.page_tokens)
        for (task, missing), count in zip(
            prompts, share(tokens, [missing for _, missing in prompts], self.page_tokens), strict=True
        ):
            if count and task.stage is running:
                plan.append(Part(task, task.planned, task.planned + count, draws=count == missing))
                task.planned += count
        return plan

    def _room_for(self, task: Task, busy: set[Task]) -> bool:
        """Whether the next position has a place; others may have to give theirs up for it."""
        while task.planned >= task.room:
            if self._extend(task, task.planned):
                return True
            last = self.running[-1]
            if self.cache.places.pages_leaving:
                return False  # places are on their way
            if last in busy:
                self.stalled = True
                return False
            self._preempt(last)
            if last is task:
                return False
        return True

    def _preempt(self, task: Task) -> None:
        """The last in line gives its places up. What it has computed stays cached."""
        assert task.request is not None
        self.counters["preemptions"] += 1
        self.cache.preempt(task.request)
        self.running.remove(task)
        self._wait_again(task)

    def _wait_again(self, task: Task) -> None:
        self._give_back(task)
        task.stage = Stage.WAITING
        insort(self.waiting, task, key=lambda each: each.order)

    # Ending

    def _drawn(self, task: Task, token: TokenOut) -> Outcome:
        """The text goes on with a token, or ends."""
        sampling = task.ask.sampling
        drawn = len(task.tokens) - task.prompt_tokens
        prompt, task.scoring = () if drawn else tuple(task.scores), False
        if sampling.max_tokens == 0:
            return Outcome(task, prompt=prompt, finish=Finish.LENGTH)
        task.tokens.append(token.token)
        finish = Finish.LENGTH if drawn + 1 >= sampling.max_tokens else None
        if token.token in task.ends:
            return Outcome(task, token, None, prompt, Finish.STOP, token.token)
        if not sampling.stop:
            return Outcome(task, token, None, prompt, finish)
        piece = task.stream.push(token.token)
        if piece.stopped_by is not None:
            return Outcome(task, token, piece.text, prompt, Finish.STOP, piece.stopped_by)
        rest = task.stream.finish() if finish else ""
        return Outcome(task, token, piece.text + rest, prompt, finish)

    def _commit(self, task: Task) -> None:
        assert task.request is not None
        first = task.committed < 0
        task.committed = task.computed // self.page_tokens
        if task.computed < task.write_from:
            task.committed = -1  # a replay is not over
            return
        task.name_pages()
        self.cache.commit(task.request, task.computed)
        if not first or task.committed:
            task.places = torch.from_numpy(task.request.places()).long()
        task.tails = {b: p for b, p in task.tails.items() if b > task.computed}

    def _end(self, task: Task, finish: Finish) -> None:
        if task.stage is Stage.WAITING:
            self.waiting.remove(task)
            self.cache.withdraw(task.chain)
        elif task.stage is Stage.LOADING:
            self.loading.pop(id(task.request))
        elif task.stage is Stage.RUNNING:
            self.running.remove(task)
        if task.request is not None and task.request.state is not RequestState.ENDED:
            whole = finish in (Finish.STOP, Finish.LENGTH)
            (self.cache.finish if whole else self.cache.abort)(task.request)
        self._give_back(task)
        task.stage = Stage.ENDED
        del self.tasks[task.ask.request_id]
        self.counters[f"finished_{finish.value}"] += 1

    def _give_back(self, task: Task) -> None:
        if task.ring >= 0:
            self._rings.append(task.ring)
        task.ring, task.request, task.tails = -1, None, {}
