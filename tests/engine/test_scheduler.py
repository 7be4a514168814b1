"""Goal: each part of the scheduler can be used alone, and steps that are taken together are what they would
be one by one. Method: parts on a small cache; then the same asks on two schedulers, one of which takes all
quiet steps at once, and faults in what it calls quiet."""

from collections import Counter
from random import Random
from unittest.mock import patch

import pytest

from tests.simulation.specs import K, V
from tiercel.asks.ask import Ask, Finish, Sampling, TokenOut
from tiercel.asks.times import EngineTimes
from tiercel.cache import TieredCache
from tiercel.config import CacheConfig
from tiercel.engine.admission import Admission
from tiercel.engine.config import EngineConfig
from tiercel.engine.scheduler import Scheduler
from tiercel.engine.seats import Seats
from tiercel.engine.step import Begin, Drawn, PageTable, Step
from tiercel.engine.task import Stage, Task
from tiercel.engine.waiting import PASSED_MOST, Waiting
from tiercel.spec import CacheSpec, Part, Stream, Window

PAGE = 16
SPEC = CacheSpec("mha", PAGE, (K, V))


def make_cache(pages=8):
    return TieredCache(SPEC, CacheConfig(device_pages=pages))


def make_ask(name, tokens, count=4, *, first=0, **options):
    return Ask(name, tuple(range(first, first + tokens)), Sampling(count, temperature=0.0), **options)


def make_task(number, *, tokens=3, order=None):
    return Task(make_ask(str(number), tokens), (order or number, number), None, None, frozenset())


def make_admission(pages=8, **options):
    cache, config = make_cache(pages), EngineConfig(**options)
    seats = Seats(cache, config.running_max, pages * PAGE)
    return Admission(cache, config, seats, EngineTimes(), Counter(), lambda: 0.0), seats


def names(tasks):
    return [task.ask.request_id for task in tasks]


# Who waits


def test_tasks_wait_in_their_order_and_know_how_many_tokens_are_before_them():
    waiting = Waiting()
    tasks = [make_task(0, tokens=5), make_task(1, tokens=7), make_task(2, tokens=9, order=0.5)]
    for task in tasks:
        waiting.add(task)
    assert names(waiting) == ["0", "2", "1"] and waiting.first is tasks[0]
    assert [waiting.tokens_before(task) for task in tasks] == [0, 14, 5]
    waiting.remove(tasks[0])
    assert names(waiting) == ["2", "1"] and waiting.tokens_before(tasks[1]) == 9


def test_nobody_passes_a_task_that_waits_for_room():
    waiting, asked = Waiting(), []
    for number in range(3):
        waiting.add(make_task(number))
    waiting.ask_each(lambda task: bool(asked.append(task.ask.request_id)) or task.order[1] != 1)
    assert asked == ["0", "1"]


def test_tasks_that_let_others_by_are_asked_in_turns():
    waiting, count = Waiting(), 3 * PASSED_MOST
    for number in range(count):
        waiting.add(make_task(number))
    asked = [[] for _ in range(6)]
    for each in asked:
        waiting.ask_each(lambda task, each=each: each.append(task) or True)
    assert len(asked[0]) == count, "all are asked once"
    assert all(0 < len(each) <= PASSED_MOST for each in asked[1:])
    assert {task for each in asked[1:] for task in each} == set(asked[0])


# What running texts hold


def test_a_ring_is_taken_told_of_once_and_given_back():
    cache = make_cache()
    seats, task = Seats(cache, 2, 8 * PAGE), make_task(0, tokens=20)
    task.chain = cache.chain(task.tokens)
    seat = seats.take(task, cache.begin(task.chain, room_for=32))
    assert seats.in_ring == {seat.ring: seat} and len(seats.free) == 1 and task.seat is seat
    seats.begin(seat)
    (begin, table), loads = seats.tell()
    assert isinstance(begin, Begin) and isinstance(table, PageTable) and len(table.rows[0]) == 2
    assert loads == () and seats.tell() == ((), ())
    assert seats.add_pages(seat, 32) is None
    [more], _ = seats.tell()
    assert (more.first, len(more.rows[0])) == (2, 1), "only what is new"
    seats.tell_again(Step((more,)))
    assert seats.tell() == ((more,), ())
    cache.abort(seat.request)
    seats.leave(seat)
    assert sorted(seats.free) == [0, 1] and task.seat is None and not seats.in_ring


# Who is let in


def test_tasks_are_let_in_in_their_order_and_a_refused_one_is_not_tried_again_before_something_changes():
    admission, seats = make_admission(pages=4)
    begun, real = [], admission._cache.begin
    admission._cache.begin = lambda chain, **options: begun.append(1) or real(chain, **options)
    for number, tokens in enumerate([20, 40, 4]):
        admission.add(make_ask(str(number), tokens, first=100 * number), None, frozenset())
    admission.admit(set())
    assert names(admission.running) == ["0"] and names(admission.waiting) == ["1", "2"]
    assert len(begun) == 2 and admission.quiet
    admission.admit(set())
    assert len(begun) == 2, "nothing has changed"
    admission.end(admission.running[0], Finish.LENGTH)
    assert not admission.quiet
    admission.admit(set())
    assert names(admission.running) == ["1", "2"], "nobody has passed who waited for room"
    for task in list(admission.tasks.values()):
        admission.end(task, Finish.ABORT)
    assert not admission.tasks and len(seats.free) == EngineConfig().running_max
    admission._cache.check()


def test_who_is_preempted_waits_again_and_gives_everything_back():
    admission, seats = make_admission(running_max=1)
    admission.add(make_ask("slow", 20), None, frozenset())
    admission.admit(set())
    slow = admission.tasks["slow"]
    admission.add(make_ask("urgent", 20, first=50, priority=1), None, frozenset())
    assert admission.admit({slow}), "it can not stop now"
    assert names(admission.running) == ["slow"]
    assert not admission.admit(set()) and names(admission.running) == ["urgent"]
    assert slow.stage is Stage.WAITING and slow.seat is None and not seats.free


# Quiet steps


def drive(asks, *, together, pages=24, running_max=4):
    """The steps of a scheduler: what each text had drawn and held after each, and how often each was run."""
    cache = make_cache(pages)
    scheduler = Scheduler(cache, EngineConfig(running_max=running_max, step_tokens=32), lambda: 0.0)
    told, runs, asks = [], [], list(asks)
    for _ in range(3000):
        if asks and len(told) >= asks[0][0]:
            scheduler.add(asks.pop(0)[1], None, frozenset())
        elif not scheduler.tasks and asks:
            told.append({})
            continue
        if not (asks or scheduler.tasks):
            cache.check()
            return told, runs, cache.counters, scheduler.counters
        step = scheduler.seal(scheduler.plan())
        steps = scheduler.quiet_steps() if together else 1
        if asks:
            steps = min(steps, max(1, asks[0][0] - len(told)))
        drawn = (TokenOut(0),) * steps
        results = [drawn if part.draws else None for part in step.parts]
        running = list(scheduler.running)
        held = {task.ask.request_id: task.seat.request.extended_tokens for task in running}
        scheduler.advance(step, Drawn(results, {}, 0.0, steps=steps))
        for later in range(steps)[::-1]:
            told.append({task.ask.request_id: (task.drawn - later, held) for task in running})
        runs.append(steps)
    raise AssertionError("it does not end")


def random_asks(seed):
    random, at = Random(seed), 0
    for number in range(14):
        at += random.choice([0, 1, 40])
        tokens, count = random.randint(1, 50), random.randint(1, 60)
        first = random.choice([0, 0, 1000 * number])
        yield at, make_ask(f"a{number}", tokens, count, first=first, priority=random.choice([0, 0, 1]))


@pytest.fixture(scope="module")
def one_by_one():
    """By seed."""
    return [drive(random_asks(seed), together=False, pages=9 if seed % 2 else 24) for seed in range(8)]


def compare(one_by_one):
    """Returns how many steps were not taken alone."""
    together = 0
    for seed, (told, runs, cached, counted) in enumerate(one_by_one):
        pages = 9 if seed % 2 else 24
        told_too, runs_too, cached_too, counted_too = drive(random_asks(seed), together=True, pages=pages)
        assert told_too == told and sum(runs_too) == len(runs) == counted_too["steps"], seed
        assert cached_too == cached and counted_too == counted, seed
        together += sum(steps for steps in runs_too if steps > 1)
    return together


def test_quiet_steps_taken_together_are_what_they_are_one_by_one(one_by_one):
    assert compare(one_by_one) > 500


def no_page_is_ever_full(self, seat):
    return min(seat.task.longest - 1, seat.request.extended_tokens - self._ahead + 1)


def no_text_ends(self, seat):
    return (seat.committed + 1) * PAGE


def room_is_never_asked_for(self, seat):
    return min(seat.task.longest - 1, (seat.committed + 1) * PAGE)


FAULTS = no_page_is_ever_full, no_text_ends, room_is_never_asked_for


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_step_that_is_not_quiet_is_noticed(one_by_one, fault):
    with patch.object(Scheduler, "_calm_upto", fault), pytest.raises((AssertionError, AttributeError)):
        compare(one_by_one)


def quiet_after(steps, *asks, **options):
    """How many steps are quiet after `steps` steps."""
    scheduler = Scheduler(make_cache(), EngineConfig(**{"running_max": 4} | options), lambda: 0.0)
    for ask in asks:
        scheduler.add(ask, None, frozenset())
    for _ in range(steps):
        step = scheduler.seal(scheduler.plan())
        scheduler.advance(step, Drawn([(TokenOut(0),) for _ in step.parts], {}, 0.0))
    scheduler.seal(scheduler.plan())
    return scheduler.quiet_steps()


def test_steps_are_quiet_until_a_text_asks_for_room_fills_a_page_or_ends():
    assert quiet_after(0, make_ask("a", 3, 60)) == 1, "a prompt"
    assert quiet_after(1, make_ask("a", 3, 60)) == 9, "up to four tokens before the page is full"
    assert quiet_after(1, make_ask("a", 3, 5)) == 3, "up to the last token but one"
    assert quiet_after(1, make_ask("a", 3, 13)) == 11, "it needs no other page"
    assert quiet_after(1, make_ask("a", 3, 60), make_ask("b", 3, 5)) == 3, "the first of them"


def test_steps_with_guesses_and_texts_that_may_stop_anywhere_are_looked_at_one_by_one():
    stops = Ask("a", (1, 2, 3), Sampling(60, temperature=0.0, stop=("end",)))
    assert quiet_after(0, stops) == 1
    assert quiet_after(1, make_ask("a", 3, 60), speculate="ngram") == 1


def test_a_token_that_ends_a_text_ends_it_within_quiet_steps():
    scheduler = Scheduler(make_cache(), EngineConfig(running_max=4), lambda: 0.0)
    ended = []
    scheduler.finished = ended.append
    for name in ("a", "b"):
        scheduler.add(make_ask(name, 3, 60, first=10 * ord(name)), None, frozenset({7}))
    first = scheduler.seal(scheduler.plan())
    scheduler.advance(first, Drawn([(TokenOut(0),)] * 2, {}, 0.0))
    step = scheduler.seal(scheduler.plan())
    steps = scheduler.quiet_steps()
    drawn = [tuple(map(TokenOut, tokens)) for tokens in ([1, 7, 2, 3], [1, 2, 3, 4])]
    assert steps >= 4
    outcomes = scheduler.advance(step, Drawn(drawn, {}, 0.0, steps=4))
    assert names(ended) == ["a"] and names(scheduler.running) == ["b"]
    assert [out.token.token for out in outcomes if out.task is ended[0]] == [1, 7], "the rest is dropped"
    assert scheduler.tasks["b"].tokens[-5:] == [0, 1, 2, 3, 4]
    [part] = scheduler.plan()
    assert (part.start, part.end) == (7, 8)


# Tails


WINDOW = CacheSpec("window", PAGE, (K, Stream("window", (1,), (Part("x", 40),), Window(PAGE))))


def make_scheduler(texts, *, staging, spare=0, host_pages=0):
    """Room for texts of two pages, each with its tails."""
    places = texts * (2 + 2 * WINDOW.places_per_tail) + spare
    host_bytes = host_pages * WINDOW.place_bytes
    config = CacheConfig(places, staging, host_bytes, tail_every_pages=99, tails_per_path=99)
    cache = TieredCache(WINDOW, config)
    return Scheduler(cache, EngineConfig(config, running_max=texts, step_tokens=texts * PAGE))


def run_to_the_end(scheduler, steps=400):
    """Run to the end. Returns the steps."""
    done = []
    while scheduler.tasks:
        step = scheduler.seal(scheduler.plan())
        drawn = [(TokenOut(0),) if part.draws else None for part in step.parts]
        scheduler.advance(step, Drawn(drawn, {}, 0.01))
        done.append(step)
        assert len(done) < steps, "they do not end"
    return done


def test_texts_that_reach_a_boundary_together_write_their_tails_in_turns_and_none_is_skipped():
    scheduler = make_scheduler(64, staging=2)
    for number in range(64):
        ask = make_ask(str(number), PAGE - 3, 8, first=100 * number)
        scheduler.add(ask, None, frozenset())
    chains = [task.chain for task in scheduler.tasks.values()]
    steps = run_to_the_end(scheduler)
    written = [len(part.tails) for step in steps for part in step.parts]
    assert sum(written) == 64 and max(sum(len(part.tails) for part in step.parts) for step in steps) == 2
    index = scheduler.cache.tree.index
    assert all(index[chain.keys[0]].tail is not None for chain in chains)
    assert len(steps) <= 64 // 2 + 10, "who has its tail goes on at once"


def test_a_prompt_that_passes_more_boundaries_than_a_step_can_write_is_computed_in_pieces():
    scheduler = make_scheduler(4, staging=1)
    ends = tuple(range(PAGE, 5 * PAGE, PAGE))
    scheduler.add(make_ask("long", 5 * PAGE + 2, 2, turn_ends=ends), None, frozenset())
    (task,) = scheduler.tasks.values()
    chain, steps = task.chain, run_to_the_end(scheduler)
    assert [part.end for step in steps for part in step.parts if not part.draws] == [
        *(page * PAGE - 1 for page in (2, 3, 4, 5)),
    ]
    index = scheduler.cache.tree.index
    assert all(index[key].tail is not None for key in chain.keys[:5])


def test_guesses_end_before_a_boundary_whose_tail_has_no_staging_place():
    scheduler = make_scheduler(2, staging=1)
    for name, first in (("a", 0), ("b", 500)):
        scheduler.add(make_ask(name, PAGE - 3, 8, first=first), None, frozenset())
    drawn = scheduler.seal(scheduler.plan())
    scheduler.advance(drawn, Drawn([(TokenOut(0),)] * 2, {}, 0.01))
    for seat in scheduler.seats.in_ring.values():
        scheduler.seats.add_pages(seat, PAGE)
    parts = [part._replace(guesses=5) for part in scheduler.plan()]
    step = scheduler.seal(parts)
    assert [(part.end, part.guesses, len(part.tails)) for part in step.parts] == [
        (PAGE - 2, 5, 1),
        (PAGE - 2, 1, 0),
    ]


def test_what_makes_room_for_a_plan_is_saved_while_the_plan_is_computed():
    """And not only when the next plan begins: a text that waits begins one step earlier."""
    config = CacheConfig(6, host_bytes=40 * SPEC.place_bytes, save="back")
    scheduler = Scheduler(TieredCache(SPEC, config), EngineConfig(config, running_max=2))
    scheduler.add(make_ask("first", 5 * PAGE, 1), None, frozenset())
    run_to_the_end(scheduler)
    scheduler.add(make_ask("other", 4 * PAGE, 1, first=500), None, frozenset())
    assert not scheduler.plan() and scheduler.cache.pages.leaving == 4
    scheduler.cache.wait(5.0)
    assert scheduler.cache.flights.has_landed
    assert scheduler.plan()
