"""Finds the owner of a folder, or starts it."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiercel.errors import ConfigError, StoreError
from tiercel.storage.file.folder import OWNER_LOG
from tiercel.storage.shared.wire import VERSION, Line, LineLost, connect

START_S = 15.0
"""How long an owner is waited for that is ending, perhaps because it has other options and nobody uses it."""


def connect_or_start(folder: str, options: dict[str, Any]) -> Line:
    """A connection to the owner, after the greeting."""
    until_s = time.monotonic() + START_S
    while True:
        try:
            line = Line(connect(folder))
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if time.monotonic() > until_s:
                why = f"see {Path(folder, OWNER_LOG)}"
                raise StoreError(f"the owner of {folder} ends as soon as it is started: {why}") from error
            _start(folder, options)
            continue
        except OSError as error:
            raise StoreError(f"the owner of {folder} can not be asked: {error}") from error
        try:
            _greet(line, folder, options)
            return line
        except BaseException as error:
            line.close()
            if not isinstance(error, _Differs | LineLost):
                raise
            if time.monotonic() > until_s:
                raise (error.told if isinstance(error, _Differs) else error) from None
        time.sleep(0.1)


class _Differs(Exception):
    def __init__(self, told: ConfigError) -> None:
        self.told = told


def _greet(line: Line, folder: str, options: dict[str, Any]) -> None:
    line.send({"version": VERSION, "options": options, "pid": os.getpid()})
    words = line.receive().words
    if "refused" in words:
        raise StoreError(f"the owner of {folder} refuses this process: {words['refused']}")
    if "differs" in words:
        name, value = words["differs"]
        why = f"others have the store open with {name} = {value!r}, by their owner, process {words['pid']}"
        raise _Differs(ConfigError(name, options[name], why))


def _start(folder: str, options: dict[str, Any]) -> None:
    """Start an owner, unless another process has just started one. Returns when it can be asked."""
    with _starting(folder) as log:
        try:
            connect(folder).close()
            return
        except (FileNotFoundError, ConnectionRefusedError):
            pass
        read, write = os.pipe()
        with os.fdopen(read) as told:
            try:
                arguments = folder, json.dumps(options), str(write)
                command = [sys.executable, "-P", "-m", "tiercel.storage.shared.owner", *arguments]
                paths = os.pathsep.join(filter(None, sys.path))
                started = subprocess.Popen(
                    command,
                    env={**os.environ, "PYTHONPATH": paths},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[write],
                    start_new_session=True,
                )
            finally:
                os.close(write)
            started.wait()
            line = told.readline()
    if not line:
        raise StoreError(f"the owner of {folder} did not start; see {Path(folder, OWNER_LOG)}")
    words = json.loads(line)
    if "field" in words:
        raise ConfigError(words["field"], words["value"], words["why"])
    if "error" in words:
        raise StoreError(words["error"])


@contextmanager
def _starting(folder: str) -> Iterator[int]:
    """One process at a time starts an owner. Yields the file that the owner logs to."""
    path, flags = Path(folder, OWNER_LOG), os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = os.open(path, os.O_WRONLY | flags, 0o600)  # the owner keeps it open, but not the lock
        try:
            yield file
        finally:
            os.close(file)
    finally:
        os.close(lock)
