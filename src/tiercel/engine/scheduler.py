"""Decides what is computed when: which tasks begin, which positions a step computes, which tasks give way.

    plan      what arrived, who is let in, which positions are computed next
    seal      … as a step, with what changed since the last one
    advance   the step was run: pages and tails are shared, texts go on or end

The scheduler touches no tensor. What is computed for a text does not depend on what else is in a step, so no
decision made here changes an answer.

A step with guesses (`StepPart.guesses`) draws one token or more. While it is under way the next step is
planned as if it drew one, with room for more; `seal` moves the plan to where the text then ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from time import monotonic

from tiercel.asks.ask import Finish, TokenOut
from tiercel.asks.times import EngineTimes
from tiercel.cache import TieredCache, WaitFor
from tiercel.engine.admission import Admission
from tiercel.engine.config import EngineConfig
from tiercel.engine.guessing import Guessing, source_of
from tiercel.engine.seats import Seats
from tiercel.engine.step import Drawn, Step, StepPart, share
from tiercel.engine.task import Outcome, Seat, Stage, Task
from tiercel.errors import RunnerLost
from tiercel.types import place

PROMPT_TOKENS = 16
"""A step with more tokens per text than this is a prefill step: its time measures the prefill rate."""

STEP_TOKENS = 512
"""Tokens of one step, if nothing else is asked for."""

AHEAD_TOKENS = 4
"""How many tokens before its page is full a text asks for the next one. What has to leave for it is saved
meanwhile: that takes two steps."""


COUNTED = (
    *("asks", "steps", "steps_failed", "tokens_drawn", "tokens_computed", "preemptions", "loads_failed"),
    *("begun_early", "guesses", "guesses_accepted", "guessing_steps", "guessing_tokens"),
    *("prompts_elsewhere", "pages_elsewhere", *(f"finished_{finish.value}" for finish in Finish)),
)
"""What the engine counts: all counters are there from the start, so that a rate has a first value."""


class Scheduler:
    """Decides each step. One thread drives it."""

    def __init__(
        self, cache: TieredCache, config: EngineConfig, clock: Callable[[], float] = monotonic
    ) -> None:
        self.cache, self.config = cache, config
        self.page_tokens = cache.spec.page_tokens
        fits = cache.pages_most * self.page_tokens
        self.context_tokens = min(fits, config.context_tokens or fits)
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.times = EngineTimes()
        self.seats = Seats(cache, config.running_max, self.context_tokens)
        self.admission = Admission(cache, config, self.seats, self.times, self.counters, clock)
        self.guessing = Guessing(config.guesses_max, self.counters, clock)
        self.add, self.abort, self.collect = self.admission.add, self.admission.abort, self.admission.collect
        self.tasks, self.explained = self.admission.tasks, self.admission.explained
        self.waiting, self.loading = self.admission.waiting, self.admission.loading
        self.running, self.free_rings = self.admission.running, self.seats.free
        self.finished: Callable[[Task], None] = lambda _: None
        """Told of each task that ended with its whole answer. It must not raise."""
        self.stalled = False
        """The last plan left a task out because a task of the step under way holds the room it needs."""
        self._clock = clock
        self._ahead = min(AHEAD_TOKENS, self.page_tokens // 2)
        self._sealed: deque[list[Seat]] = deque()
        """For each step that was sealed and has not advanced yet: the seat of each part."""
        self._staged: set[int] = set()
        """Host pages whose rows the planned step stages."""
        if cache.residency is not None:
            cache.residency.under_way, cache.residency.guesses_max = self._under_way, config.guesses_max
        self._standing: list[Seat] = []
        """Texts that the last plan left out: a page was promised to each, and was still leaving."""

    @property
    def idle(self) -> bool:
        return not (self.tasks or self.admission.ended or self.cache.busy)

    @property
    def unsure(self) -> bool:
        """Whether the number of tokens that a step under way draws is unknown: it has guesses."""
        return any(seat.guesses for seats in self._sealed for seat in seats)

    def _under_way(self) -> int:
        return len(self._sealed)

    # A step

    def plan(self) -> list[StepPart]:
        """What to compute next. A step under way counts as done, and its tasks keep what they hold."""
        busy = {seat.task for seats in self._sealed for seat in seats if seat.task.seat is seat}
        self.collect()
        self.admission.end_aborted(busy)
        self._serve_standing()
        self.stalled = self.admission.admit(busy)
        parts = self._choose(busy)
        if not parts and not busy and self.admission.resume_early():
            parts = self._choose(busy)
        self.cache.send_saves()  # what makes room for this plan is gone by the next one
        return parts

    def seal(self, parts: Sequence[StepPart]) -> Step:
        """The step that computes what was planned, for tasks that still run, with all that changed."""
        sealed, seats, page_tokens = [], [], self.page_tokens
        staging = self.cache.config.staging_tails
        for planned in parts:
            seat = self.seats.in_ring.get(planned.ring)
            if seat is not None and seat.planned == planned.end < seat.calm_upto:  # the common case
                seats.append(seat)
                sealed.append(planned)
                continue
            part = planned if seat is None else self._moved(seat, planned)
            if seat is None or part is None:
                continue  # its task ended with the step before, or drew more tokens than there is room for
            first, last = part.start // page_tokens + 1, (part.end + part.guesses) // page_tokens
            if first <= last:
                part = self._with_tails(seat, part, staging)
                if part is None:
                    continue
                staging -= len(part.tails)
            seats.append(seat)
            seat.guesses = part.guesses
            sealed.append(part)
        if seats:
            self._sealed.append(seats)
        else:
            self.guessing.paused()
        changes, loads = self.seats.tell()
        return Step(changes, tuple(sealed), loads)

    def _with_tails(self, seat: Seat, part: StepPart, staging: int) -> StepPart | None:
        """A part that passes boundaries, with the tails it writes. If there are fewer staging places, the
        part ends before the next tail, and the text goes on a step later. None: nothing is left of it."""
        page_tokens, end = self.page_tokens, part.end + part.guesses
        due = [b for b in sorted(seat.request.tails) if part.start < b * page_tokens <= end]
        if len(due) > staging:
            end, due = due[staging] * page_tokens - 1, due[:staging]
            cut = min(part.end, end)
            part = part._replace(end=cut, draws=part.draws and cut == part.end, guesses=max(0, end - cut))
            seat.planned = cut
            if cut <= part.start:
                return None
        tails = ((b * page_tokens, tuple(map(place, seat.request.tails[b]))) for b in due)
        return part._replace(tails=tuple(tails))

    def _moved(self, seat: Seat, part: StepPart) -> StepPart | None:
        """A planned part, moved behind the tokens that the step before drew. None: there is no room."""
        ahead, room = seat.planned - part.end, self.seats.reach(seat) - seat.planned
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
        self.seats.tell_again(step)
        return self.seal(parts)

    def advance(self, step: Step, drawn: Drawn) -> list[Outcome]:
        """A step was run: share what it computed, and let its texts go on or end. It may have been run
        several times in a row, `quiet_steps` at most (`Drawn.steps`).

        Where the step was queued before the last one had advanced, some of its texts may have ended there.
        What was computed for them is dropped.
        """
        if step.loads:  # the step has computed with what these loads brought
            self.collect()
        outcomes, computed, steps = list[Outcome](), 0, drawn.steps
        now, gaps = self._clock(), Counter[tuple[float, int]]()
        calm_s: list[float] = []
        """When each of the calm texts drew its last token."""
        seats = self._unseal(step)
        for part, outs, seat in zip(step.parts, drawn.results, seats, strict=True):
            task = seat.task
            if task.seat is not seat:
                continue
            before_s = task.drew_s
            last = part.end + steps - 1
            if last < seat.calm_upto and before_s is not None and isinstance(outs, tuple):
                if steps == 1 and outs[0].token not in task.ends:  # the common case
                    task.tokens.append(outs[0].token)
                    seat.computed = last
                    task.drew_s = now
                    calm_s.append(before_s)
                    outcomes.append(Outcome(task, outs[0]))
                    continue
                tokens = [out.token for out in outs]
                if steps > 1 and task.ends.isdisjoint(tokens):  # the same, several times in a row
                    task.tokens += tokens
                    seat.computed = seat.planned = last
                    task.drew_s = now
                    gaps[before_s, steps] += 1
                    computed += steps
                    outcomes += [Outcome(task, out) for out in outs]
                    continue
            if before_s is None and isinstance(outs, tuple):
                task.times.first_s = now  # also if this token ends the answer
            came = self._came_of(part, outs, seat, drawn)
            if came:
                task.drew_s = now
                if before_s is None:
                    self.times.first_token[source_of(seat.request.reuse)].add(now - task.times.added_s)
                else:
                    gaps[before_s, len(came)] += 1
            seat.calm_upto = self._calm_upto(seat)
            computed += seat.computed - part.start
            outcomes += came
        computed += len(calm_s)
        gaps.update({(before_s, 1): texts for before_s, texts in Counter(calm_s).items()})
        self.times.drawn(now, gaps)
        if step.parts:
            if computed > PROMPT_TOKENS * len(step.parts) * steps:
                self.cache.compute.observe(computed, drawn.seconds)
            self.guessing.stepped(step, drawn)
            self.counters["steps"] += steps
            self.waiting.rounds += steps - 1
            self.counters["tokens_drawn"] += len(outcomes)
            self.counters["tokens_computed"] += computed
        return self._ended() + outcomes

    def _came_of(
        self, part: StepPart, outs: tuple[TokenOut, ...] | Exception | None, seat: Seat, drawn: Drawn
    ) -> list[Outcome]:
        """The outcomes of one part of a step for its text."""
        task = seat.task
        if isinstance(outs, Exception):
            self.admission.fail(task, outs)
            return []
        if part.score_from is not None:
            task.scores += drawn.scores.get(part.ring, ())
        if part.guesses and outs:
            self.guessing.drew(seat, part, drawn.guessed.get(part.ring, 0), len(outs))
            seat.guesses = 0
        if outs:
            seat.planned += len(outs) - 1
        return self._go_on(task, seat, part.end, outs or ())

    def _go_on(self, task: Task, seat: Seat, end: int, outs: Sequence[TokenOut]) -> list[Outcome]:
        """A text has been computed up to `end`. It goes on with these tokens (all but the last are computed
        too), or ends with one of them."""
        outcomes: list[Outcome] = []
        for seat.computed, out in enumerate(outs or (None,), end):
            if seat.computed // self.page_tokens != seat.committed:
                self.seats.commit(seat)
            if out is None:
                break
            if task.simple and len(task.tokens) + 1 < task.longest and out.token not in task.ends:
                task.tokens.append(out.token)  # the common case
                outcomes.append(Outcome(task, out))
                continue
            try:
                outcome = task.take(out)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one text is that task's
                self.admission.fail(task, error)
                break
            outcomes.append(outcome)
            if outcome.finish is not None:
                self.admission.end(task, outcome.finish)
                self.finished(task)
                break
        return outcomes

    def _calm_upto(self, seat: Seat) -> int:
        """See `Seat`. 0: the next step of this text has to be looked at."""
        task, extended = seat.task, seat.request.extended_tokens
        if self.guessing.most or not task.simple or task.sampling.grammar is not None:
            return 0
        if seat.committed < 0 or task.drew_s is None or seat.computed + 1 < len(task.tokens):
            return 0  # a prompt, or the first token after one
        upto = min(task.longest - 1, (seat.committed + 1) * self.page_tokens)
        return upto if extended >= task.longest else min(upto, extended - self._ahead + 1)

    def quiet_steps(self) -> int:
        """How often the step that was sealed last may be run in a row, each time one token later. Meanwhile
        nothing but the drawn tokens can change (`Drawn.steps`).

        More than 1: every running text draws one token in each run, no text fills a page, reaches its length
        or asks for room, no guess is made, and no task could begin. Required: no ask and no abort comes, and
        `collect` is called between two runs, as `plan` would do. A drawn token may end its text
        (`Task.ends`); what is drawn for that text afterwards is dropped.
        """
        seats = self._sealed[-1] if len(self._sealed) == 1 else []
        if len(seats) != len(self.running) or not self.admission.quiet:
            return 1
        return max(1, min((seat.calm_upto - seat.planned for seat in seats), default=1))

    def failed(self, step: Step, error: Exception) -> list[Outcome]:
        """A step could not be run: its texts end, the others go on."""
        self._fail(self._unseal(step), error)
        return self._ended()

    def lost(self, error: RunnerLost) -> list[Outcome]:
        """The device has lost all that it held, and no copy is under way. The texts of all steps under way
        end, if they were being computed. All other running texts give up what they have and wait again."""
        while self._sealed:
            seats = self._unseal_first()
            if error.computing:
                self._fail(seats, error)
        self.admission.begin_again()
        self.cache.lose_device()
        return self._ended()

    def _fail(self, seats: Sequence[Seat], error: Exception) -> None:
        self.counters["steps_failed"] += 1
        self.guessing.paused()
        for seat in seats:
            if seat.task.seat is seat:
                self.admission.fail(seat.task, error)

    def _unseal(self, step: Step) -> list[Seat]:
        """The seats of a step that has ended."""
        return self._unseal_first() if step.parts else []

    def _unseal_first(self) -> list[Seat]:
        if self.cache.residency is not None:
            self.cache.residency.advanced()
        return self._sealed.popleft()

    def _ended(self) -> list[Outcome]:
        ended, self.admission.ended = self.admission.ended, []
        return ended

    # Choosing

    def _choose(self, busy: set[Task]) -> list[StepPart]:
        """Running answers first, one token each; then prompts, sharing what is left of the step."""
        parts: list[StepPart] = []
        prompts: list[tuple[Task, Seat, int]] = []
        running = Stage.RUNNING
        self._staged.clear()
        for task in self.running.copy():
            seat = task.seat
            if task.stage is not running or task.aborted or seat is None:
                continue  # it was preempted for a task before it, or ends once its step is done
            known = len(task.tokens)
            if busy and task in busy and seat.planned == known:
                known += 1  # the token that is being drawn
                if known >= task.longest:
                    continue
            missing = known - seat.planned
            if missing > 1:
                if self._may_stage(seat, missing):
                    prompts.append((task, seat, missing))
            elif missing == 1 and (known < seat.calm_upto or self._room_for(task, seat, busy)):
                scored = task.score_from if task.scoring else None
                parts.append(StepPart(seat.ring, seat.planned, known, True, scored))
                seat.planned = known
        in_ring, more = self.seats.in_ring, list[StepPart]()
        parts = [part for part in parts if part.ring in in_ring]  # others were preempted meanwhile
        step_tokens = (self.config.step_tokens or STEP_TOKENS) - len(parts)
        tokens = max(step_tokens, self.page_tokens)
        shares = share(tokens, [missing for _, _, missing in prompts], self.page_tokens)
        for (task, seat, missing), count in zip(prompts, shares, strict=True):
            if count and task.stage is running:
                last = seat.planned + missing
                end = self._prompt_end(task, seat, seat.planned + count, busy)
                if end > seat.planned:
                    more.append(StepPart(seat.ring, seat.planned, end, end == last, task.score_from))
                    seat.planned = end
                    step_tokens -= count
        parts = [part for part in parts if part.ring in in_ring]  # prompts may preempt too, for their tails
        self._staged.clear()
        more = [part for part in more if self._still_staged(part)]  # prompts may have pages become sparse
        if parts and (self.guessing.awake() or self.unsure):
            parts = self._with_guesses(parts, step_tokens, sum(shares))
        return parts + more

    def _prompt_end(self, task: Task, seat: Seat, end: int, busy: set[Task]) -> int:
        """How far a prompt is computed: `end`, or less where tails wait for places. If it could not go on at
        all, the last running task gives way, as for pages."""
        while True:
            end_now, waits = self.seats.extend_prompt(seat, end)
            if end_now > seat.planned or waits is None or waits.what is WaitFor.LEAVING:
                return end_now
            if not self._preempt_last(task, busy):
                return seat.planned

    def _may_stage(self, seat: Seat, tokens: int) -> bool:
        """Whether a step can read the sparse pages of one more prompt. A page that several texts have is
        staged once. If there is no room, the text waits for the next step, and others have its share."""
        if (residency := self.cache.residency) is None or not seat.request.sparse:
            return True
        staged = self._staged.union(residency.staged(seat.request, tokens))
        if len(staged) > self.cache.config.staged_pages:
            return False
        self._staged = staged
        return True

    def _still_staged(self, part: StepPart) -> bool:
        """Whether the step can still read what a prompt has on the host. If not, the prompt waits."""
        seat = self.seats.in_ring[part.ring]
        if self._may_stage(seat, part.end - part.start):
            return True
        seat.planned = part.start
        return False

    def _with_guesses(self, parts: list[StepPart], tokens: int, others: int) -> list[StepPart]:
        """Give guesses to parts that draw one token each: at most `tokens`, and only where there is room. A
        guess waits for nothing and preempts nobody."""
        seats = [self.seats.in_ring[part.ring] for part in parts]
        room = [self._guesses_at(seat, part.end) for part, seat in zip(parts, seats, strict=True)]
        chosen = self.guessing.choose(seats, room, tokens, others)
        for i, (part, seat, count) in enumerate(zip(parts, seats, chosen, strict=True)):
            upto = min(part.end + seat.guesses + count, seat.task.longest)
            if upto > self.seats.reach(seat):
                self.seats.add_pages(seat, seat.request.extended_tokens, early=True)
            parts[i] = part._replace(guesses=count)
        return parts

    def _guesses_at(self, seat: Seat, end: int) -> int:
        """How many guesses make sense behind `end`, as one more token is drawn than guessed. None behind the
        first token of a text, and none while the prompt is scored."""
        if end == 1 or seat.task.scoring:
            return 0
        most = seat.task.longest - 1 - end
        if (residency := self.cache.residency) is not None and seat.request.sparse:
            most = min(most, residency.guesses_of(seat.request))
        return max(0, most)

    def _room_for(self, task: Task, seat: Seat, busy: set[Task]) -> bool:
        """Make room for the next position, if need be by preempting the last running task. False: not yet.
        Where there is room, ask early for the next page."""
        extended = seat.request.extended_tokens
        if extended - seat.planned > self._ahead:
            return True
        if seat.planned < extended < task.longest:
            self.seats.add_pages(seat, extended, early=True)
        while seat.planned >= self.seats.reach(seat):
            waits = self.seats.add_pages(seat, seat.planned)
            if waits is None:
                return True
            if waits.what is WaitFor.LEAVING:
                self._standing.append(seat)
                return False
            if not self._preempt_last(task, busy):
                return False
        return True

    def _preempt_last(self, task: Task, busy: set[Task]) -> bool:
        """Preempt the last running task for this one. False: it is this task itself, or it can not stop. A
        task whose pages are being loaded came later: it runs, and can be preempted, as soon as they are."""
        last = self.running[-1]
        if last in busy or (last is task and self.admission.loading):
            self.stalled = self.stalled or last in busy
            return False
        self.admission.preempt(last)
        return last is not task

    def _serve_standing(self) -> None:
        """Give pages that were promised to running texts to them, before other tasks are let in."""
        standing, self._standing = self._standing, []
        for seat in standing:
            if seat.task.seat is seat and not seat.task.aborted:
                self.seats.add_pages(seat, seat.planned)
