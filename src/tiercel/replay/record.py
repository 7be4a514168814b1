"""`tiercel serve --trace FILE`: one JSON line for each finished request, for `tiercel replay`.

    {"tiercel_trace": 1, "model": …, "page_tokens": 256, "began_s": …, …}   each start: `replay.server`
    {"time_s": 3.2, "pages": ["5f0c…", …], "prompt_tokens": …, "output_tokens": …, "turn_ends": […], …}

Nothing of a text is in the file. Pages are named by a keyed hash of their keys; its salt is random, is made
at each start, and is never written: so neither the file nor the server's secrets can show whether a text was
asked for. Pages of two starts therefore have different names.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

from tiercel.engine.task import Task
from tiercel.errors import ConfigError
from tiercel.replay.server import TracedServer
from tiercel.threads import Crew

log = logging.getLogger(__name__)

NAME_BYTES = 8
"""The length of a page's name. Two of a million pages have the same name once in 37 million files."""


def open_trace(file: str | Path) -> TextIO:
    """Open a trace to append to. A server does so before it reads weights: a wrong path fails early."""
    try:
        return Path(file).open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError("trace", str(file), f"can not be written: {error}") from error


class Recorder:
    """Appends to one file, in a thread of its own. An error there is logged once, and no request is
    affected."""

    def __init__(
        self,
        file: TextIO,
        server: TracedServer,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`file`: from `open_trace`; `close` closes it. `clock`: the one that requests are timed with."""
        self._file = file
        self._page_tokens = server.page_tokens
        self._salt = secrets.token_bytes(32)
        self._began_s = clock()
        self._failed = False
        try:
            self._write(server.head() | {"began_s": time.time()})
        except OSError as error:
            raise ConfigError("trace", file.name, f"can not be written: {error}") from error
        self._crew = Crew(1, "tiercel-trace")

    def ended(self, task: Task) -> None:
        """A request has finished. Called by the engine's thread; never raises, and waits for nothing."""
        try:
            self._crew.submit(self._add, self._row(task), list(task.name_pages().keys), task.ask.namespace)
        except Exception as error:  # noqa: BLE001 - a trace must not fail a request
            self._fail(error)

    def _row(self, task: Task) -> dict[str, Any]:
        times, (device, host, store, replayed) = task.times, task.reused
        ends = {end // self._page_tokens for end in task.ask.turn_ends}
        row: dict[str, Any] = {
            "time_s": round(max(0.0, times.added_s - self._began_s), 6),
            "prompt_tokens": task.prompt_tokens,
            "output_tokens": task.drawn,
            "turn_ends": sorted(ends - {0}),
            "device": device,
            "host": host,
            "store": store,
            "replayed": replayed,
            "priority": task.ask.priority,
        }
        if times.first_s is not None and times.running_s is not None and times.ended_s is not None:
            row["prefill_s"] = round(times.first_s - times.running_s, 6)
            row["decode_s"] = round(times.ended_s - times.first_s, 6)
        return row

    def _add(self, row: dict[str, Any], keys: list[bytes], namespace: tuple[str, ...]) -> None:
        try:
            row["pages"] = [self._name(key) for key in keys]
            row["namespace"] = self._name(json.dumps(namespace).encode()) if namespace else ""
            self._write(row)
        except Exception as error:  # noqa: BLE001 - a full disk, for example
            self._fail(error)

    def _name(self, what: bytes) -> str:
        return blake2b(what, digest_size=NAME_BYTES, key=self._salt).hexdigest()

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
        self._file.flush()

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            log.warning("the trace lacks requests: %s", error)
        self._failed = True

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._crew.shutdown(wait=True)
        try:
            self._file.close()
        except OSError as error:
            self._fail(error)
