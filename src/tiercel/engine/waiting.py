"""Tasks that wait to begin: their order, and which of them are looked at before a step."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from itertools import takewhile

from tiercel.engine.task import Stage, Task

PASSED_MOST = 64
"""The most tasks that let others by and are tried again in one step."""


class Waiting:
    """The queue. It knows nothing of the cache: the caller decides whether a task can begin."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []
        self._tokens = self._passed = 0
        self.rounds = 0
        """How often all tasks were asked to begin. Tasks that let others by take turns by this number."""

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    @property
    def first(self) -> Task | None:
        return self._tasks[0] if self._tasks else None

    def add(self, task: Task) -> None:
        task.stage = Stage.WAITING
        insort(self._tasks, task, key=lambda each: each.order)
        self._tokens += len(task.tokens)

    def remove(self, task: Task) -> None:
        self._tasks.remove(task)
        self._tokens -= len(task.tokens)

    def tokens_before(self, task: Task) -> int:
        """Tokens of the tasks that wait before this one."""
        behind = takewhile(lambda each: each is not task, reversed(self._tasks))  # mostly none
        return self._tokens - len(task.tokens) - sum(len(each.tokens) for each in behind)

    def ask_each(self, let_in: Callable[[Task], bool]) -> None:
        """Have tasks begin in order. `let_in` returns False if the task waits for room: no task passes it. If
        it returns True and the task still waits, others may pass it. At most PASSED_MOST such tasks are asked
        in one round, in turns, so that many of them cost little."""
        self.rounds += 1
        turns, passed = self._passed // PASSED_MOST + 1, 0
        for task in self._tasks.copy():
            if not (task.passed and (task.order[1] + self.rounds) % turns):
                if not let_in(task):
                    break
                task.passed = task.stage is Stage.WAITING
            passed += task.passed
        self._passed = passed
