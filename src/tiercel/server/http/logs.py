"""Logs: each line has a time, a level, a logger and, where there is one, a request's id and its tenant.

    2026-11-16T17:00:01.250Z INFO tiercel.access [req-1 team-a] POST /v1/chat/completions 200, 12 ms, …
    {"time": "2026-11-16T17:00:01.250Z", "level": "info", "logger": "tiercel.access", "message": …}

A thread of its own writes the lines: neither the event loop nor the engine waits for a slow reader.
If `LINES_MOST` lines wait, new ones are dropped, and the log says how many.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import IO, Any

LINES_MOST = 10_000
FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
STOP_S = 2.0
"""How long the last lines may take at the end: a reader that is stuck must not keep the process."""

CURRENT: ContextVar[Mapping[str, str]] = ContextVar("tiercel request")
"""Request id and tenant of the request that this code works for."""


def whose(record: logging.LogRecord) -> dict[str, str]:
    """Request id and tenant of a line: given with the line (`extra`), or those of the current request. The
    engine's ids have a part that is not the client's (`asks.own_id`): it is left out."""
    current = CURRENT.get({})
    found = {name: getattr(record, name, None) or current.get(name) for name in ("request_id", "tenant")}
    return {name: value.rpartition("/")[2] for name, value in found.items() if value}


def _time(record: logging.LogRecord) -> str:
    when = datetime.fromtimestamp(record.created, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormat(logging.Formatter):
    """The format for people."""

    def format(self, record: logging.LogRecord) -> str:
        named = " ".join(whose(record).values())
        head = f"{_time(record)} {record.levelname} {record.name}{f' [{named}]' if named else ''}"
        error = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{head} {record.getMessage()}{error}"


class JsonFormat(logging.Formatter):
    """The format for programs: one object on each line. `fields` of a line are members of it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        line |= whose(record) | {"message": record.getMessage()} | getattr(record, "fields", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class LineWriter(logging.Handler):
    """Formats in the thread that logs, and writes in a thread of its own."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        super().__init__()
        self._stream = stream or sys.stderr
        self._lines: queue.Queue[str | None] = queue.Queue(LINES_MOST)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="tiercel-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1
        except Exception:  # noqa: BLE001 - logging's own way: a line that can not be made is told, not raised
            self.handleError(record)

    def close(self) -> None:
        """Write what waits, for `STOP_S` at most."""
        try:
            self._lines.put(None, timeout=STOP_S)
            self._thread.join(STOP_S)
        except queue.Full:
            pass
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            dropped, self._dropped = self._dropped, 0
            if dropped:
                record = {
                    "name": "tiercel.log",
                    "levelname": "WARNING",
                    "msg": f"{dropped} lines were dropped",
                }
                line = f"{line}\n{self.format(logging.makeLogRecord(record))}"
            try:
                self._stream.write(f"{line}\n")
                self._stream.flush()
            except (OSError, ValueError):
                self._dropped += 1  # the log is not read any more


def start_logging(how: str, level: str) -> LineWriter:
    """Logs of this process go to stderr from now on. The caller closes what is returned."""
    writer = LineWriter()
    writer.setFormatter(JsonFormat() if how == "json" else TextFormat())
    logging.basicConfig(handlers=[writer], force=True)
    logging.getLogger("tiercel").setLevel(level.upper())
    return writer
