"""The folder of a file store: what may lie in it, and who may write there.

LOCK                       held by the process that writes; it holds that process's number
segment-0000000001.tcs     records, oldest first
uses                       how records were used; nothing depends on it
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path

from tiercel.errors import ConfigError
from tiercel.storage.file import direct

_LOCK = "LOCK"
_USES = "uses"
_LOST_FOUND = "lost+found"
"""It is in every new file system of its own."""

_NUMBERS = 2**30
"""Segments have smaller numbers than this: enough for centuries, and they fit into places (`index`)."""


class Folder:
    """Segments by number. Nothing in it is touched that is not named as one of ours."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        """Opens the folder, which is made if it is not there; raises ConfigError."""
        self.path = path
        self._file = self._lock = -1
        try:
            if not read_only and not path.exists():
                path.mkdir(parents=True)
                _sync(path.parent)
            self.numbers()
            self._file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if not read_only:
                self._take_lock()
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError("store", str(path), "is not a folder") from error
        except OSError as error:
            self.close()
            raise ConfigError("store", str(path), f"can not be used: {error.strerror}") from error
        except ConfigError:
            self.close()
            raise
        self.direct_io = self._takes_direct_io()

    def numbers(self) -> list[int]:
        """Of the segments that are there, oldest first. Raises ConfigError: there is something of others."""
        numbers = []
        with os.scandir(self.path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                number, ours = _number(entry.name), entry.is_file(follow_symlinks=False)
                if number is not None and ours:
                    numbers.append(number)
                elif entry.name != _LOST_FOUND and not (entry.name in (_LOCK, _USES) and ours):
                    why = f"holds {entry.name!r}, which is not of a store"
                    raise ConfigError("store", str(self.path), why)
        return numbers

    def segment(self, number: int) -> Path:
        return self.path / _name(number)

    @property
    def uses(self) -> Path:
        return self.path / _USES

    def sync(self) -> None:
        """What was created or removed, is."""
        direct.calls.fsync(self._file)

    def bytes_free(self) -> int:
        """What the file system has left for us."""
        return direct.calls.space(str(self.path)).free

    def bytes_in_all(self) -> int:
        """How large the file system is."""
        return direct.calls.space(str(self.path)).in_all

    def close(self) -> None:
        """Let go of the lock. The file stays: a lock that is removed can be held twice."""
        for file in (self._lock, self._file):
            if file >= 0:
                os.close(file)
        self._lock = self._file = -1

    def _take_lock(self) -> None:
        """A lock of the kernel's: it goes with its process, however that ends."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | direct.NO_LINKS
        self._lock = os.open(self.path / _LOCK, flags, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            why = f"is open in process {owner}; each process needs a folder of its own, or read_only"
            raise ConfigError("store", str(self.path), why) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _takes_direct_io(self) -> bool:
        """Tried with the lock file: the answer is the file system's, the same for every file in it."""
        with suppress(OSError):
            os.close(direct.calls.open(str(self.path / _LOCK), os.O_RDONLY | os.O_DIRECT | direct.NO_LINKS))
            return True
        return False


def _name(number: int) -> str:
    return f"segment-{number:010}.tcs"


def _number(name: str) -> int | None:
    """Of a segment of this name; None: it is not one of ours."""
    match = re.fullmatch(r"segment-(\d{10})\.tcs", name, re.ASCII)
    return int(match[1]) if match and int(match[1]) < _NUMBERS else None


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
