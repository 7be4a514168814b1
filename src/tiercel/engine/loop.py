"""Driving an engine: two ways, the same answers.

plain        plan ─ forward ─ advance ─ emit ─ plan ─ forward ─ …

overlapped   forward 1 │ forward 2 │ forward 3
             plan 2    │ plan 3    │ plan 4             while the model computes
             emit 0    │ emit 1    │ emit 2
                    advance 1   advance 2               between two forwards
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future

from torch import Tensor

from tiercel.engine.ask import Delta
from tiercel.engine.engine import Engine
from tiercel.engine.plan import Outcome, Plan
from tiercel.engine.task import Stage

WAIT_S = 0.001
"""While nothing can be computed and a transfer is under way: so long it is waited for at a time."""


def plain_steps(engine: Engine) -> Iterator[list[Delta]]:
    """One step after the other, for ever. The plain truth."""
    while True:
        plan = engine.plan()
        if not plan:
            engine.cache.wait(WAIT_S)
        yield engine.emit(_advance(engine, plan, lambda: engine.forward(engine.spans(plan))))  # noqa: B023


def overlapped_steps(engine: Engine, executor: Executor) -> Iterator[list[Delta]]:
    """The next step is decided, and the last one's tokens become text, while the model computes."""
    plan, outcomes = engine.plan(), list[Outcome]()
    while True:
        computing = _start(engine, executor, plan)
        deltas = engine.emit(outcomes)
        ahead = engine.plan(plan)
        outcomes = _advance(engine, plan, computing.result)
        plan = [part for part in ahead if part.task.stage is Stage.RUNNING]
        if engine.stalled or not plan:  # it takes what this step gave back
            for part in plan:
                part.task.planned = part.start
            plan = engine.plan()
        if not plan:  # nothing to compute meanwhile: what is known is told now
            deltas, outcomes = deltas + engine.emit(outcomes), []
            if not deltas:
                engine.cache.wait(WAIT_S)
        yield deltas


def _start(engine: Engine, executor: Executor, plan: Plan) -> Future[Tensor | None]:
    """What the model is asked is put together now, before the next step is planned."""
    try:
        return executor.submit(engine.forward, engine.spans(plan))
    except Exception as error:  # noqa: BLE001 - like an error of the model
        failed: Future[Tensor | None] = Future()
        failed.set_exception(error)
        return failed


def _advance(engine: Engine, plan: Plan, forward: Callable[[], Tensor | None]) -> list[Outcome]:
    try:
        logits = forward()
    except Exception as error:  # noqa: BLE001 - whatever a model raises: its texts end, the engine goes on
        engine.failed(plan, error)
        logits = None
    return engine.advance(plan, logits)
