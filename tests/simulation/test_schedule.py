"""Goal: whatever arrives, leaves, fails or is preempted, in whatever memory, everything asked ends, and says
what it would have said alone. Method: a scheduler, a runner and a cache with a scripted model, from seeds, in
every loop; then faults are put into scheduler and runner, and the simulation must notice each."""

import logging
import pickle
from collections import Counter, deque
from contextlib import suppress
from dataclasses import replace
from unittest.mock import patch

import pytest

from tests.simulation.copies import HeldCopies
from tests.simulation.run import numbers_of, run
from tests.simulation.schedule import OrderedCopies, ScheduleWorld, SparseScheduleWorld
from tests.simulation.stages import StagedScheduleWorld
from tiercel.cache.places import Places
from tiercel.cache.residency import Residency
from tiercel.cache.tiered_cache import TieredCache
from tiercel.engine.admission import Admission
from tiercel.engine.runner import LocalRunner, Ring
from tiercel.engine.scheduler import Scheduler
from tiercel.engine.seats import Seats
from tiercel.engine.step import Begin
from tiercel.transfer.remote import RemoteController

STEPS = 1000
COUNTED = 30
"""The first seeds are run by the test that counts what happens."""
SEEDS_PER_TEST = 10
SPARSE_COUNTED = 26
STAGED_COUNTED = 30
BLOCKS = 2


@pytest.fixture(autouse=True)
def quiet():
    """The simulation makes the model fail, and the scheduler logs each failure."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_seed_ends_and_answers_right(block):
    first = COUNTED + block * SEEDS_PER_TEST
    worlds = [run(seed, STEPS, ScheduleWorld) for seed in range(first, first + SEEDS_PER_TEST)]
    assert sum(world.steps_taken for world in worlds) > 500 * SEEDS_PER_TEST


def test_the_simulation_reaches_what_it_is_meant_to_test():
    seen: dict[str, int] = {}
    for seed in range(COUNTED):
        world = run(seed, STEPS, ScheduleWorld)
        for counters in (world.scheduler.counters, world.cache.counters):
            for name, count in counters.items():
                seen[name] = seen.get(name, 0) + count
        seen[world.loop] = seen.get(world.loop, 0) + 1
    for name in (
        "finished_length", "finished_stop", "finished_abort", "finished_error", "preemptions",
        "steps_failed", "loads_failed", "tokens_device", "tokens_host", "tokens_store", "tails_loaded",
        "begun_early", "guesses", "guesses_accepted",
    ):  # fmt: skip
        assert seen.get(name, 0) >= 20, f"{name} hardly ever happens"
    assert min(seen[loop] for loop in ("plain", "overlapped", "queued")) > 4


def test_the_simulation_of_sparse_pages_reaches_what_it_is_meant_to_test():
    """Texts choose entries of pages on the host, which leave and come back while steps are under way."""
    seen: Counter[str] = Counter()
    for seed in range(SPARSE_COUNTED):
        world = run(seed, STEPS, SparseScheduleWorld)
        seen.update(world.cache.counters + world.scheduler.counters)
        seen.update(world.model.host_reads.seen if world.model.host_reads else {})
    for name in (
        "pages_sparse", "pages_back", "sparse_read", "hot_read", "staged_read", "preemptions",
        "finished_abort", "steps_failed", "loads_failed", "guesses_accepted",
    ):  # fmt: skip
        assert seen[name] >= 10, f"{name} hardly ever happens"


def test_the_simulation_of_stages_reaches_what_it_is_meant_to_test():
    """Copies of stages end late and in any order, and stages die."""
    seen: Counter[str] = Counter()
    for seed in range(STAGED_COUNTED):
        world = run(seed, STEPS, StagedScheduleWorld)
        seen.update(world.cache.counters + world.scheduler.counters)
        seen.update({"deaths": world.deaths, world.loop: 1})
    for name, count in {
        "deaths": 100, "pages_loaded": 100, "tails_loaded": 100, "begun_early": 50, "finished_error": 100,
        "preemptions": 100, "tokens_store": 50, "guesses_accepted": 50, "loads_failed": 10,
        "pages_sparse": 10, "plain": 5, "queued": 5,
    }.items():  # fmt: skip
        assert seen[name] >= count, f"{name} hardly ever happens: {seen[name]}"


def test_a_step_is_a_value():
    """Two runs of one seed decide the same steps, which can be compared and printed."""

    def steps_of(seed):
        told = []
        with patch.object(LocalRunner, "run", _told(LocalRunner.run, told)):
            ScheduleWorld(seed).run(numbers_of(seed, 200))
        return told

    first, again = steps_of(4), steps_of(4)
    assert len(first) > 50 and _unseeded(first) == _unseeded(again)
    assert "Begin(ring=" in repr(first) and "StepPart(ring=" in repr(first)
    assert pickle.loads(pickle.dumps(first)) == first


def _told(real, told):
    def run(self, step):
        told.append(step)
        return real(self, step)

    return run


def _unseeded(steps):
    """Without seeds, which are made up."""
    return [
        (
            [each._replace(sampling=None) if isinstance(each, Begin) else each for each in step.changes],
            step.parts,
        )
        for step in steps
    ]


# Faults

real_plan, real_seal, real_commit = Scheduler.plan, Scheduler.seal, Seats.commit
real_place, real_begin, real_replan = Ring.place, Seats.begin, Scheduler.replan
real_go_on, real_moved, real_span = Scheduler._go_on, Scheduler._moved, Ring.span
real_leave, real_advance, real_arrived = Seats.leave, Scheduler.advance, Admission._arrived
real_tell, real_release = Seats._tell_residency, Residency.release
real_acknowledge, real_arrive = RemoteController.acknowledge, StagedScheduleWorld.acknowledge
real_lost = Scheduler.lost


def who_is_computed_may_be_preempted(self):
    sealed, self._sealed = self._sealed, deque()
    try:
        return real_plan(self)
    finally:
        self._sealed = sealed


def the_table_is_not_told_again(self, seat):
    changes = len(self._changes)
    real_commit(self, seat)
    del self._changes[changes:]


def tails_are_not_written(self, parts):
    step = real_seal(self, parts)
    return replace(step, parts=tuple(part._replace(tails=()) for part in step.parts))


def tails_are_not_read(self, seat):
    real_begin(self, seat)
    begin = self._changes[-2]
    self._changes[-2] = begin._replace(tails=())


def a_replay_writes_its_pages_again(self, seat):
    real_begin(self, seat)
    begin = self._changes[-2]
    self._changes[-2] = begin._replace(write_from=0)


def an_appended_page_is_put_first(self, change):
    real_place(self, change._replace(first=max(0, change.first - 1)))


def what_was_not_run_counts_as_planned(self, step):
    if step.parts:
        self._sealed.pop()
    parts = self.plan()
    self.seats.tell_again(step)
    return self.seal(parts)


def changes_are_lost_when_planned_again(self, step):
    sealed = real_replan(self, step)
    return replace(sealed, changes=sealed.changes[len(step.changes) :])


def early_loads_are_not_waited_for(self, parts):
    return replace(real_seal(self, parts), loads=())


def an_early_load_that_failed_counts_as_there(self, loaded):
    if id(loaded.request) in self.arriving:
        loaded = replace(loaded, error=None)
    real_arrived(self, loaded)


def who_began_early_begins_again(self, loaded):
    self.loading.update(self.arriving)
    self.arriving.clear()
    real_arrived(self, loaded)


def a_ring_is_lost(self, seat):
    real_leave(self, seat)
    if seat.task.aborted:
        self.free.remove(seat.ring)


def the_drawn_token_is_forgotten(self, token):
    self.count += 1
    self.tokens[self.count - 1] = 0


def who_is_in_the_ring_now_gets_the_token(self, step, drawn):
    if step.parts:
        parts = zip(step.parts, self._sealed[0], strict=True)
        self._sealed[0] = [self.seats.in_ring.get(part.ring, was) for part, was in parts]
    return real_advance(self, step, drawn)


def copies_do_not_wait_for_queued_steps(self, fn, /, *args, **kwargs):
    return HeldCopies.submit(self, fn, *args, **kwargs)


def refused_guesses_count_as_computed(self, task, seat, end, outs):
    return real_go_on(self, task, seat, end + (len(outs) == 1), outs)


def only_one_token_of_a_step_is_taken(self, task, seat, end, outs):
    return real_go_on(self, task, seat, end, outs[:1])


def the_plan_stays_where_it_was(self, seat, part):
    ahead = seat.planned - part.end
    moved = real_moved(self, seat, part)
    return moved and moved._replace(start=moved.start - ahead, end=moved.end - ahead)


def guesses_need_no_room(self, seat, part):
    moved = real_moved(self, seat, part)
    return moved and moved._replace(guesses=part.guesses)


def a_text_that_drew_more_than_there_is_room_for_goes_on(self, seat, part):
    ahead = seat.planned - part.end
    return part._replace(start=part.start + ahead, end=seat.planned)


def a_step_with_guesses_is_not_waited_for(self):
    return False


def wrong_guesses_are_kept(self, part, guesses, staged):
    span = real_span(self, part, guesses, staged)
    self.count += len(guesses) > 1
    return span


def a_page_that_is_leaving_counts_for_everybody(self, running):
    return (0,) * self.pools


def what_became_sparse_is_not_told(self, seat):
    seat.request.changed.clear()
    real_tell(self, seat)


def hot_rows_are_not_told(self, seat):
    seat.request.hot_changed = False
    real_tell(self, seat)


def guesses_need_no_hot_rows(self, request):
    return self.guesses_max


def who_is_whole_again_needs_no_host_copy(self, ids, *, locked=None, read=None):
    if read is not None:
        self._let_go(read)
    real_release(self, ids, locked=locked)


def one_stage_is_enough(self, ack):
    with suppress(KeyError):
        for rank in self._ranks:
            real_acknowledge(self, replace(ack, rank=rank))


def what_a_dead_stage_copied_counts(self, why):
    for ticket, _ in self._waiting.values():
        self.tickets.end(ticket, None)
    self._waiting.clear()


def a_step_is_told_before_its_loads(self, share):
    if share < 1.0:
        real_arrive(self, share)


def only_the_first_step_under_way_is_lost(self, error):
    later = list(self._sealed)[1:]
    outcomes = real_lost(self, error)
    self._sealed.extend(later)
    return outcomes


def what_was_to_be_told_is_kept(self):
    pass


def the_device_is_kept(self):
    pass


MUTANTS = {
    a_page_that_is_leaving_counts_for_everybody: (Places, "_before"),
    refused_guesses_count_as_computed: (Scheduler, "_go_on"),
    only_one_token_of_a_step_is_taken: (Scheduler, "_go_on"),
    the_plan_stays_where_it_was: (Scheduler, "_moved"),
    guesses_need_no_room: (Scheduler, "_moved"),
    a_text_that_drew_more_than_there_is_room_for_goes_on: (Scheduler, "_moved"),
    wrong_guesses_are_kept: (Ring, "span"),
    who_is_computed_may_be_preempted: (Scheduler, "plan"),
    the_table_is_not_told_again: (Seats, "commit"),
    tails_are_not_written: (Scheduler, "seal"),
    tails_are_not_read: (Seats, "begin"),
    a_replay_writes_its_pages_again: (Seats, "begin"),
    an_appended_page_is_put_first: (Ring, "place"),
    what_was_not_run_counts_as_planned: (Scheduler, "replan"),
    changes_are_lost_when_planned_again: (Scheduler, "replan"),
    a_ring_is_lost: (Seats, "leave"),
    the_drawn_token_is_forgotten: (Ring, "append"),
    who_is_in_the_ring_now_gets_the_token: (Scheduler, "advance"),
    copies_do_not_wait_for_queued_steps: (OrderedCopies, "submit"),
    early_loads_are_not_waited_for: (Scheduler, "seal"),
    an_early_load_that_failed_counts_as_there: (Admission, "_arrived"),
    who_began_early_begins_again: (Admission, "_arrived"),
    a_step_with_guesses_is_not_waited_for: (Scheduler, "unsure"),
}

SPARSE_MUTANTS = {
    what_became_sparse_is_not_told: (Seats, "_tell_residency"),
    hot_rows_are_not_told: (Seats, "_tell_residency"),
    guesses_need_no_hot_rows: (Residency, "guesses_of"),
    who_is_whole_again_needs_no_host_copy: (Residency, "release"),
}
"""Of pages of running texts that are without their part in the second pool."""

STAGED_MUTANTS = {
    one_stage_is_enough: (RemoteController, "acknowledge"),
    what_a_dead_stage_copied_counts: (RemoteController, "fail"),
    a_step_is_told_before_its_loads: (StagedScheduleWorld, "acknowledge"),
    only_the_first_step_under_way_is_lost: (Scheduler, "lost"),
    what_was_to_be_told_is_kept: (Seats, "forget"),
    the_device_is_kept: (TieredCache, "lose_device"),
    copies_do_not_wait_for_queued_steps: (OrderedCopies, "submit"),
}
"""Of stages, and of stages that die."""


RARE = {
    who_is_computed_may_be_preempted: 27,
    what_was_to_be_told_is_kept: 81,
    a_page_that_is_leaving_counts_for_everybody: 16,
    guesses_need_no_hot_rows: 13,
    who_is_whole_again_needs_no_host_copy: 9,
    one_stage_is_enough: 21,
}
"""As in `test_mutants`."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_simulation_catches(mutant):
    (owner, name), first = MUTANTS[mutant], RARE.get(mutant, 0)
    check_noticed(owner, name, mutant, (first, *range(360)), ScheduleWorld)


@pytest.mark.parametrize("mutant", SPARSE_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_simulation_of_sparse_pages_catches(mutant):
    (owner, name), first = SPARSE_MUTANTS[mutant], RARE.get(mutant, 0)
    check_noticed(owner, name, mutant, (first, *range(60)), SparseScheduleWorld)


@pytest.mark.parametrize("mutant", STAGED_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_simulation_of_stages_catches(mutant):
    (owner, name), first = STAGED_MUTANTS[mutant], RARE.get(mutant, 0)
    check_noticed(owner, name, mutant, (first, *range(60)), StagedScheduleWorld)


def check_noticed(owner, name, mutant, seeds, make):
    mutant = property(mutant) if isinstance(vars(owner).get(name), property) else mutant
    with patch.object(owner, name, mutant):
        for seed in seeds:
            world = make(seed)
            try:
                world.run(numbers_of(seed, 400))
            except (AssertionError, KeyError, IndexError, ValueError):
                return
            finally:
                with suppress(Exception):  # a loop runs its last step, and not when garbage is collected
                    world.steps.close()  # type: ignore[attr-defined]
    raise AssertionError("nothing was noticed")
