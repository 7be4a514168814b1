"""What passes between the scheduler's process and the processes of stages. Plans go as tickets, and acks come
back (`transfer.remote`)."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

from tiercel.engine.config import Build, EngineConfig
from tiercel.engine.step import Change, Drawn, ReadOnHost, Step, StepPart
from tiercel.errors import EngineError
from tiercel.models.base import Stage


class StagePart(NamedTuple):
    """What a process is told first."""

    build: Build
    """Its device is the stage's own."""
    config: EngineConfig
    own_draft: bool
    apart: bool
    stage: Stage
    number: int
    of: int
    meeting: str
    quiet: bool
    """Whether another process shows how far this is."""
    """A file by which the stages find each other."""
    wire: str
    """How they send: a backend of `torch.distributed`."""


class StageRoom(NamedTuple):
    """What a process is told when it has its weights: the same numbers of places in all stages."""

    frames: int
    staging: int
    staged_pages: int
    host: tuple[str, int] | None
    """The host memory of all stages: where it is mapped, and its size in the settings. None: no host tier."""


class StepOrder(NamedTuple):
    """A step on its way to the stages. Its parts are sent in columns: this takes a third of the time."""

    number: int
    changes: tuple[Change, ...]
    columns: tuple[tuple[Any, ...], ...]
    loads: tuple[int, ...]

    @staticmethod
    def of(number: int, step: Step) -> StepOrder:
        return StepOrder(number, step.changes, tuple(zip(*step.parts, strict=True)), step.loads)

    @property
    def step(self) -> Step:
        return Step(self.changes, tuple(map(StepPart, *self.columns)) if self.columns else (), self.loads)


class Reply(NamedTuple):
    """A stage has run a step."""

    number: int
    stage: int
    drawn: Drawn | None
    """Of the last stage."""
    errors: dict[int, Exception]
    """Why texts can not be computed, by the number of their part."""
    error: Exception | None
    """Why the step could not be computed."""
    read: ReadOnHost
    came_s: float
    """When the step was here, on the clock that all processes of a machine share."""
    began_s: float
    """When the stage took it up, and when it was done with it."""
    ended_s: float
    busy_s: float
    """How long it was computed here: the rest of the time this stage waited for others."""


def told(error: BaseException | None) -> Exception:
    """An error as another process can read it."""
    try:
        again = pickle.loads(pickle.dumps(error))
        if isinstance(again, Exception):
            return again
    except Exception:  # noqa: BLE001, S110 - it can not be sent as it is
        pass
    return EngineError(repr(error))
