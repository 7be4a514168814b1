"""Driving an engine: three ways, the same answers.

plain        plan ─ run ─ advance ─ emit ─ plan ─ run ─ …

overlapped   run 1     │ run 2     │ run 3
             plan 2    │ plan 3    │ plan 4             while the model computes
             emit 0    │ emit 1    │ emit 2
                    advance 1   advance 2               between two steps

queued       run 1     ╎ run 2     ╎ run 3              a device, or a group of stages, goes on by itself
             plan 2, start 2 ─ advance 1, emit 1, plan 3, start 3 ─ advance 2, emit 2 …
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial

from tiercel.asks.ask import Delta
from tiercel.engine.engine import Engine
from tiercel.engine.step import Drawn, Queues, Step, StepPart
from tiercel.engine.task import Outcome
from tiercel.errors import RunnerLost

WAIT_S = 0.001
"""How long a transfer is waited for at a time, while nothing can be computed."""


Meanwhile = Callable[[Future[Drawn]], None]
"""Called while a step is computed elsewhere and the next one is planned: there is time for other things."""

Rest = Callable[[], None]
"""Called when nothing can be computed: returns when a transfer may have ended."""


def steps_of(
    engine: Engine, executor: Executor, meanwhile: Meanwhile = lambda _: None, rest: Rest | None = None
) -> Iterator[list[Delta]]:
    """The loop for an engine: the one that keeps its device busy, or plain if that was asked for."""
    if not engine.config.overlap:
        return plain_steps(engine, rest)
    if isinstance(engine.runner, Queues):
        return queued_steps(engine, engine.runner.start, rest)
    return overlapped_steps(engine, executor, meanwhile, rest)


def plain_steps(engine: Engine, rest: Rest | None = None) -> Iterator[list[Delta]]:
    """One step after the other, for ever: the plain form that the others must agree with."""
    scheduler, runner, rest = engine.scheduler, engine.runner, rest or partial(engine.cache.wait, WAIT_S)
    while True:
        step = scheduler.seal(scheduler.plan())
        if not step.parts:
            rest()
        try:
            outcomes = _advance(engine, step, partial(runner.run, step))
        except RunnerLost as error:
            outcomes = engine.lost(error)
        yield engine.emit(outcomes)


def overlapped_steps(
    engine: Engine, executor: Executor, meanwhile: Meanwhile = lambda _: None, rest: Rest | None = None
) -> Iterator[list[Delta]]:
    """The next step is decided, and the last one's tokens become text, while the model computes."""
    scheduler, runner, rest = engine.scheduler, engine.runner, rest or partial(engine.cache.wait, WAIT_S)
    step, outcomes = scheduler.seal(scheduler.plan()), list[Outcome]()
    while True:
        computing = executor.submit(runner.run, step)
        deltas = engine.emit(outcomes)
        ahead = scheduler.plan()
        meanwhile(computing)
        outcomes = _advance(engine, step, computing.result)
        step = scheduler.seal(ahead)
        if scheduler.stalled or not step.parts:  # it takes what this step gave back
            step = scheduler.replan(step)
        if not step.parts:  # nothing to compute meanwhile: emit now
            deltas, outcomes = deltas + engine.emit(outcomes), []
            if not deltas:
                rest()
        yield deltas


def queued_steps(
    engine: Engine, start: Callable[[Step], Callable[[], Drawn]], rest: Rest | None = None
) -> Iterator[list[Delta]]:
    """The next step is queued before the tokens of this one are known.

    `start` queues a step and returns a function that waits for its result. Steps and copies are carried out
    in the order they are queued: places that a text gives up are not written before its last step has ended.
    A text that ends may be computed once more, for nothing.
    """
    scheduler, rest = engine.scheduler, rest or partial(engine.cache.wait, WAIT_S)
    step = scheduler.seal(scheduler.plan())
    result = start(step)
    try:
        while True:
            try:
                step, result, outcomes = _next_queued(engine, start, step, result)
            except RunnerLost as error:  # with all steps under way
                outcomes = engine.lost(error)
                step = scheduler.seal(scheduler.plan())
                result = start(step)
            deltas = engine.emit(outcomes)
            if not step.parts and not deltas:
                rest()
            yield deltas
    except GeneratorExit:
        with suppress(RunnerLost):
            _advance(engine, step, result)  # nothing more was asked, and a step is under way
        raise


Queued = tuple[Step, Callable[[], Drawn], list[Outcome]]
"""The step that was queued last, what waits for its result, and what came of the step before."""


def _next_queued(
    engine: Engine, start: Callable[[Step], Callable[[], Drawn]], step: Step, result: Callable[[], Drawn]
) -> Queued:
    scheduler = engine.scheduler
    if scheduler.unsure:  # how far its texts get is known only with its tokens
        outcomes = _advance(engine, step, result)
        step = scheduler.seal(scheduler.plan())
        return step, start(step), outcomes
    if (ahead := scheduler.plan()) and not scheduler.stalled and not _guesses(ahead):
        following = scheduler.seal(ahead)
        following_result = start(following)
        return following, following_result, _advance(engine, step, result)
    # It needs what this step gives back, or its tokens.
    outcomes = _advance(engine, step, result)
    step = scheduler.seal(ahead)
    if scheduler.stalled or not step.parts:
        step = scheduler.replan(step)
    return step, start(step), outcomes


def _guesses(parts: Sequence[StepPart]) -> bool:
    return any(part.guesses for part in parts)


def _advance(engine: Engine, step: Step, run: Callable[[], Drawn]) -> list[Outcome]:
    try:
        drawn = run()
    except RunnerLost:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a model raises: its texts end, the engine goes on
        return engine.scheduler.failed(step, error)
    return engine.scheduler.advance(step, drawn)
