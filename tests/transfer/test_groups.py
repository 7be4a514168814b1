"""Goal: a load for a step is queued group by group, in order, and an error in the middle is not lost. Method:
groups that tell when they are queued, and events that tell when they are waited for. No GPU is needed."""

from typing import Any

import pytest

from tiercel.errors import TransferError
from tiercel.transfer.cuda import Events


class Event:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.passed = name, log, False

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")

    def query(self) -> bool:
        return self.passed


def groups_of(log: list[str], broken: int | None = None) -> Any:
    """Layers 0 to 4, 5 to 14, 15 to 42."""
    for i, last in enumerate((4, 14, 42)):
        if i == broken:
            raise TransferError("no")
        log.append(f"queue {last}")
        yield last, Event(str(last), log)


def test_a_group_is_queued_when_it_is_waited_for():
    log: list[str] = []
    events = Events(groups_of(log))
    assert log == ["queue 4"], "the first is queued at once"
    for layer in (0, 4, 5, 20, 3):
        events.wait(layer)
    assert log[1:] == ["wait 4", "wait 4", "queue 14", "wait 14", "queue 42", "wait 42", "wait 4"]


def test_who_asks_whether_it_is_done_queues_the_rest():
    log: list[str] = []
    events = Events(groups_of(log))
    assert not events.done() and log == ["queue 4", "queue 14", "queue 42"]
    events.events[-1][1].passed = True  # type: ignore[attr-defined]
    assert events.done() and events.error is None


@pytest.mark.parametrize("broken", [0, 1])
def test_behind_an_error_nothing_is_queued_and_the_error_is_told(broken):
    log: list[str] = []
    events = Events(groups_of(log, broken))
    events.wait(42)  # its reader goes on, and what it computes is thrown away
    events.queue_all()
    assert isinstance(events.error, TransferError) and len(events.events) == broken
    for _, event in events.events:
        event.passed = True  # type: ignore[attr-defined]
    assert events.done(), "it ends, with its error"


def test_nothing_to_wait_for_is_done():
    events = Events()
    events.wait(7)
    assert events.done() and events.error is None
