"""What may take long: a bar on a terminal meanwhile, and a line in the log at its end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Timer
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, Task
    from rich.text import Text

log = logging.getLogger(__name__)

PROGRESS_S = 1.0
"""Work that takes longer than this has a bar."""

WHOLE_S = 1e9
"""The time left follows from the speed since the beginning: each part may take minutes."""

_outer: ContextVar[Progress | None] = ContextVar("_outer", default=None)
"""Of the work that this is a part of."""


@contextmanager
def progress(what: str, size: int | None, *, counted: str = "") -> Iterator[Callable[[int], None]]:
    """Wraps work on `size` bytes, or on `size` things of the kind that `counted` names; None: the size is not
    known. It yields a function: call it, from any thread, with the size of each part that is done. There is a
    bar only if stderr is a terminal. Work within other work has its bar below the other's."""
    outer = _outer.get()
    bar = outer or _make(hidden=not sys.stderr.isatty())
    task = bar.add_task(what, total=size, visible=outer is None, counted=counted)
    bar.advance(task, 0)  # its speed counts from now on

    def show() -> None:
        if outer is not None:
            bar.update(task, visible=True)
        else:
            bar.start()
            bar.console.show_cursor(True)  # a process that is killed could not bring it back

    timer, start, inside = Timer(PROGRESS_S, show), perf_counter(), _outer.set(bar)
    timer.daemon = True
    timer.start()
    done = 0.0
    try:
        yield lambda more: bar.advance(task, more)
    finally:
        _outer.reset(inside)
        timer.cancel()
        timer.join()
        done = next(each.completed for each in bar.tasks if each.id == task)
        if outer is not None:
            bar.remove_task(task)
        else:
            bar.stop()
    size = int(done) if size is None else size
    shown = f"{size:,} {counted}" if counted else f"{size / 1e9:.2f} GB"
    log.info("%s: %s in %.1f s", what, shown, perf_counter() - start)


def is_shown() -> bool:
    """Whether this is a part of work that has a bar."""
    return _outer.get() is not None


def show_none() -> None:
    """From now on this thread shows no bar: another process does."""
    _outer.set(_make(hidden=True))


def _make(*, hidden: bool) -> Progress:
    from rich import progress as rich  # here: a library should not load it without need
    from rich.console import Console

    columns = [rich.TextColumn("{task.description}"), rich.BarColumn(), *_columns()]
    console = Console(stderr=True)
    return rich.Progress(
        *columns, console=console, transient=True, disable=hidden, speed_estimate_period=WHOLE_S
    )


def _columns() -> Sequence[ProgressColumn]:
    """How much is done of how much, and the time left."""
    from rich import progress as rich
    from rich.text import Text

    things, size = rich.MofNCompleteColumn(), rich.DownloadColumn()

    class Done(rich.ProgressColumn):
        def render(self, task: Task) -> Text:
            return things.render(task) if task.fields["counted"] else size.render(task)

    class TimeLeft(rich.TimeRemainingColumn):
        """Nothing until a speed is known."""

        def render(self, task: Task) -> Text:
            known = task.total is not None and task.time_remaining is not None
            return super().render(task).append(" left") if known else Text("")

    return Done(), TimeLeft()
