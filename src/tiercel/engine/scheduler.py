"""Decides what is computed when: who is let in, which positions a step computes, who gives its places up.

    plan      what arrived, who is let in, which positions are computed next
    seal      … as a step, with what changed since the last one
    advance   the step was run: pages and tails are shared, texts go on or end

The scheduler touches no tensor. What is computed for a text does not depend on what else is in a step, so no
decision made here changes an answer.

A step with guesses (`StepPart.guesses`) draws one token or more. While it is under way the next step is
planned as if it drew one, with room for more; `seal` moves the plan to where the text then ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic

from tiercel.cache import TieredCache, Wait, WaitFor
from tiercel.engine.ask import TokenOut
from tiercel.engine.config import EngineConfig
from tiercel.engine.guessing import Guessing, source_of
from tiercel.engine.step import Drawn, PageTable, Step, StepPart, share
from tiercel.engine.task import Outcome, Seat, Stage, Task
from tiercel.engine.tasks import Tasks
from tiercel.types import place

PROMPT_TOKENS = 16
"""A step with more tokens per text than this is a prefill step: its time measures the prefill rate."""

STEP_TOKENS = 512
"""Of one step, where nothing else is asked for."""

AHEAD_TOKENS = 4
"""So many tokens before its page is full, a text asks for the next one. What has to leave for it is saved
meanwhile: that takes two steps."""


class Scheduler(Tasks):
    """One thread drives it."""

    def __init__(
        self, cache: TieredCache, config: EngineConfig, clock: Callable[[], float] = monotonic
    ) -> None:
        super().__init__(cache, config, clock)
        self.guessing = Guessing(config.guesses_max, self.counters, clock)
        self._ahead = min(AHEAD_TOKENS, self.page_tokens // 2)
        self._sealed: deque[list[Seat]] = deque()
        """Who computes in each step that was sealed and has not advanced yet, part by part."""
        self._standing: list[Seat] = []
        """Texts that the last plan left out: a page was promised to each, and was still leaving."""

    @property
    def idle(self) -> bool:
        return not (self.tasks or self._ended or self.cache.busy)

    @property
    def unsure(self) -> bool:
        """How many tokens a step under way draws is not known: it has guesses."""
        return any(seat.guesses for seats in self._sealed for seat in seats)

    # A step

    def plan(self) -> list[StepPart]:
        """What to compute next. A step under way counts as done, and its tasks keep what they hold."""
        busy = {seat.task for seats in self._sealed for seat in seats if seat.task.seat is seat}
        self.stalled = False
        self.collect()
        self._abort_marked(busy)
        self._serve_standing()
        self._admit(busy)
        parts = self._choose(busy)
        if not parts and not busy and self._resume_early():
            parts = self._choose(busy)
        return parts

    def seal(self, parts: Sequence[StepPart]) -> Step:
        """The step that computes what was planned, of tasks that still run, with all that changed."""
        sealed, seats, page_tokens = [], [], self.page_tokens
        for planned in parts:
            seat = self._in_ring.get(planned.ring)
            part = planned if seat is None else self._moved(seat, planned)
            if seat is None or part is None:
                continue  # its task ended with the step before, or drew more tokens than there is room for
            seats.append(seat)
            seat.guesses = part.guesses
            first, last = part.start // page_tokens + 1, (part.end + part.guesses) // page_tokens
            if first <= last:
                tails = seat.request.tails.items()
                due = ((b * page_tokens, place(tail)) for b, tail in tails if first <= b <= last)
                part = part._replace(tails=tuple(due))
            sealed.append(part)
        if seats:
            self._sealed.append(seats)
        else:
            self.guessing.paused()
        changes, self._changes = tuple(self._changes), []
        loads, self._loads = tuple(self._loads), []
        return Step(changes, tuple(sealed), loads)

    def _moved(self, seat: Seat, part: StepPart) -> StepPart | None:
        """A part as it was planned, behind the tokens that the step before drew. None: there is no room."""
        ahead, room = seat.planned - part.end, seat.request.extended_tokens - seat.planned
        if room < 0:
            seat.planned, self.stalled = part.start + ahead, True
            return None
        if ahead or part.guesses:
            guesses = min(part.guesses, room, self._guesses_at(seat, seat.planned))
            part = part._replace(start=part.start + ahead, end=seat.planned, guesses=guesses)
        return part

    def replan(self, step: Step) -> Step:
        """Plan again, with the room that the last step gave back. What was sealed was not run."""
        if step.parts:
            for part, seat in zip(step.parts, self._sealed.pop(), strict=True):
                seat.planned, seat.guesses = part.start, 0
        parts = self.plan()
        self._changes[:0] = step.changes
        self._loads[:0] = step.loads
        return self.seal(parts)

    def advance(self, step: Step, drawn: Drawn) -> list[Outcome]:
        """A step was run: share what it computed, and let its texts go on or end.

        Where the step was queued before the last one had advanced, some of its texts may have ended there.
        What was computed for them is not looked at.
        """
        self._settle_early(step)
        outcomes, tokens, computed = list[Outcome](), 0, 0
        now, gaps = self._clock(), dict[tuple[float, int], int]()
        seats = self._sealed.popleft() if step.parts else []
        for part, outs, seat in zip(step.parts, drawn.results, seats, strict=True):
            task = seat.task
            if task.seat is not seat:
                continue
            if isinstance(outs, Exception):
                self._fail(task, outs)
                continue
            if part.score_from is not None:
                task.scores += drawn.scores.get(part.ring, ())
            if part.guesses and outs:
                self.guessing.drew(seat, part, drawn.guessed.get(part.ring, 0), len(outs))
                seat.planned += len(outs) - 1
                seat.guesses = 0
            came = self._go_on(task, seat, part.end, outs or ())
            if came:
                if task.drew_s is None:
                    task.times.first_s = now
                    self.times.first_token[source_of(seat.request.reuse)].add(now - task.times.added_s)
                else:
                    gap = task.drew_s, len(came)
                    gaps[gap] = gaps.get(gap, 0) + 1
                task.drew_s = now
            computed += seat.computed - part.start
            tokens += len(came)
            outcomes += came
        self.times.drawn(now, gaps)
        if step.parts:
            if computed > PROMPT_TOKENS * len(step.parts):
                self.cache.compute.observe(computed, drawn.seconds)
            self.guessing.stepped(step, drawn)
            self.counters["steps"] += 1
            self.counters["tokens_drawn"] += tokens
            self.counters["tokens_computed"] += computed
        return self._ends() + outcomes

    def _go_on(self, task: Task, seat: Seat, end: int, outs: Sequence[TokenOut]) -> list[Outcome]:
        """A text has been computed up to `end`, and goes on with these tokens, of which all but the last have
        been computed, too; or it ends with one of them."""
        outcomes: list[Outcome] = []
        seat.computed = end
        if end // self.page_tokens != seat.committed:
            self._commit(task, seat)
        for i, out in enumerate(outs):
            if i:
                seat.computed = end + i
                if seat.computed // self.page_tokens != seat.committed:
                    self._commit(task, seat)
            if task.simple and len(task.tokens) + 1 < task.longest and out.token not in task.ends:
                task.tokens.append(out.token)  # most of the time
                outcomes.append(Outcome(task, out))
                continue
            try:
                outcome = task.take(out)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one text is that task's
                self._fail(task, error)
                break
            outcomes.append(outcome)
            if outcome.finish is not None:
                self._end(task, outcome.finish)
                break
        return outcomes

    def _settle_early(self, step: Step) -> None:
        """The step has computed with what its loads brought: they have ended."""
        if step.loads:
            self.collect()

    def failed(self, step: Step, error: Exception) -> list[Outcome]:
        """A step could not be run: its texts end, the others go on."""
        self.counters["steps_failed"] += 1
        self.guessing.paused()
        for seat in self._sealed.popleft() if step.parts else []:
            if seat.task.seat is seat:
                self._fail(seat.task, error)
        return self._ends()

    def _ends(self) -> list[Outcome]:
        ended, self._ended = self._ended, []
        return ended

    # Choosing

    def _choose(self, busy: set[Task]) -> list[StepPart]:
        """Running answers first, one token each; then prompts, sharing what is left of the step."""
        parts: list[StepPart] = []
        prompts: list[tuple[Task, Seat, int]] = []
        running, ahead = Stage.RUNNING, self._ahead
        for task in self.running.copy():
            seat = task.seat
            if task.stage is not running or task.aborted or seat is None:
                continue  # it was preempted for one before it, or ends once its step is done
            known = len(task.tokens)
            if busy and task in busy and seat.planned == known:
                known += 1  # the token that is being drawn
                if known >= task.longest:
                    continue
            missing = known - seat.planned
            if missing > 1:
                prompts.append((task, seat, missing))
            elif missing == 1:
                room = seat.request.extended_tokens - known
                if room < ahead and not self._room_for(task, seat, busy):
                    continue
                scored = task.score_from if task.scoring else None
                parts.append(StepPart(seat.ring, seat.planned, known, True, scored))
                seat.planned = known
        parts = [part for part in parts if part.ring in self._in_ring]  # others were preempted meanwhile
        step_tokens, answers = self.config.step_tokens or STEP_TOKENS, len(parts)
        tokens = max(step_tokens - answers, self.page_tokens)
        shares = share(tokens, [missing for _, _, missing in prompts], self.page_tokens)
        for (task, seat, missing), count in zip(prompts, shares, strict=True):
            if count and task.stage is running:
                end = seat.planned + count
                self._extend_prompt(seat, end)
                parts.append(StepPart(seat.ring, seat.planned, end, count == missing, task.score_from))
                seat.planned = end
                step_tokens -= count
        if answers and (self.guessing.awake() or self.unsure):
            parts[:answers] = self._with_guesses(parts[:answers], step_tokens - answers, sum(shares))
        return parts

    def _with_guesses(self, parts: list[StepPart], tokens: int, others: int) -> list[StepPart]:
        """Parts that draw one token each get guesses, `tokens` at most, as far as there is room: a guess
        waits for nothing and preempts nobody."""
        seats = [self._in_ring[part.ring] for part in parts]
        room = [self._guesses_at(seat, part.end) for part, seat in zip(parts, seats, strict=True)]
        chosen = self.guessing.choose(seats, room, tokens, others)
        for i, (part, seat, count) in enumerate(zip(parts, seats, chosen, strict=True)):
            upto = min(part.end + seat.guesses + count, seat.task.longest)
            if upto > seat.request.extended_tokens:
                self._add_pages(seat, seat.request.extended_tokens, early=True)
            parts[i] = part._replace(guesses=count)
        return parts

    def _guesses_at(self, seat: Seat, end: int) -> int:
        """How many guesses make sense behind `end`: one token more is drawn than they are. None behind the
        first token of a text, which has nothing to guess by, and while the prompt is scored."""
        return 0 if end == 1 or seat.task.scoring else max(0, seat.task.longest - 1 - end)

    def _room_for(self, task: Task, seat: Seat, busy: set[Task]) -> bool:
        """Make room for the next position, if need be by preempting the last running task. False: not yet.
        Where there is room, ask early for the next page."""
        extended = seat.request.extended_tokens
        if seat.planned < extended < task.longest:
            self._add_pages(seat, extended, early=True)
        while seat.planned >= seat.request.extended_tokens:
            waits = self._add_pages(seat, seat.planned)
            if waits is None:
                return True
            if waits.what is WaitFor.LEAVING:
                self._standing.append(seat)
                return False
            last = self.running[-1]
            if last in busy:
                self.stalled = True
                return False
            self._preempt(last)
            if last is task:
                return False
        return True

    def _serve_standing(self) -> None:
        """Pages that were promised to running texts go to them before anybody is let in."""
        standing, self._standing = self._standing, []
        for seat in standing:
            if seat.task.seat is seat and not seat.task.aborted:
                self._add_pages(seat, seat.planned)

    def _add_pages(self, seat: Seat, upto: int, *, early: bool = False) -> Wait | None:
        table = seat.request.table
        first = len(table)
        waits = self._extend(seat, upto, early=early)
        if waits is None:
            self._changes.append(PageTable(seat.ring, first, tuple(map(place, table[first:]))))
        return waits

    def _commit(self, task: Task, seat: Seat) -> None:
        if seat.computed < seat.write_from:
            return  # a replay is not over
        seat.committed = seat.computed // self.page_tokens
        task.name_pages()
        request, first = seat.request, seat.request.committed
        own = request.table[first : seat.committed]
        self.cache.commit(request, seat.computed)
        if request.table[first : seat.committed] != own:  # another task was first: its pages are used
            shared = map(place, request.table[first : seat.committed])
            self._changes.append(PageTable(seat.ring, first, tuple(shared)))
