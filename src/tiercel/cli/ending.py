"""How a command ends by SIGTERM or Ctrl-C before it has anything to lose: at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def ends_at_once(first: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Within this, a signal ends the process within moments, with the exit status that shells expect. `first`
    is called before that.

    A thread does it: the main thread may be in a call that takes a minute (weights are read, memory is
    pinned). The signal's own default would not end the first process of a container. Processes of stages end
    by themselves when this one is gone.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    thread = Thread(target=_wait, args=(reads, first), name="tiercel-ending", daemon=True)
    thread.start()
    # A handler that does nothing loses every signal that is not written into the pipe: the pipe comes first,
    # and goes last.
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(writes)
        thread.join()
        os.close(reads)


def _wait(reads: int, first: Callable[[], object]) -> None:
    """The C part of Python writes the number of every signal into the pipe, whatever the main thread does."""
    while number := os.read(reads, 1):
        if number[0] in SIGNALS:
            try:
                first()
            finally:
                os._exit(128 + number[0])
