"""What may take long: a bar on a terminal meanwhile, and a line in the log at its end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from time import perf_counter

log = logging.getLogger(__name__)

PROGRESS_S = 1.0
"""Work that takes longer than this has a bar."""


@contextmanager
def progress(what: str, size: int, *, counted: str = "") -> Iterator[Callable[[int], None]]:
    """Wraps work on `size` bytes, or on `size` things of the kind that `counted` names. It yields a function:
    call it, from any thread, with the size of each part that is done. There is a bar only if stderr is a
    terminal."""
    from rich import progress as rich  # here: a library should not load it without need
    from rich.console import Console

    sizes = rich.MofNCompleteColumn() if counted else rich.DownloadColumn()
    columns = rich.TextColumn("{task.description}"), rich.BarColumn(), sizes, rich.TimeRemainingColumn()
    bar = rich.Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    )
    task = bar.add_task(what, total=size)
    timer, start = Timer(PROGRESS_S, bar.start), perf_counter()
    timer.daemon = True
    timer.start()
    try:
        yield lambda more: bar.advance(task, more)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
    shown = f"{size:,} {counted}" if counted else f"{size / 1e9:.2f} GB"
    log.info("%s: %s in %.1f s", what, shown, perf_counter() - start)
