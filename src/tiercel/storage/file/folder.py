"""The folder of a file store: what may lie in it, and who may write there.

LOCK                       locked by the process that writes; contains its process id
segment-0000000001.tcs     records; the lowest number is the oldest
uses                       how records were used; may be missing
SOCKET, owner.log          of the process that owns the folder for others (`storage.shared`)
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
SOCKET = "SOCKET"
OWNER_LOG = "owner.log"
_FILES = _LOCK, _USES, OWNER_LOG
_OTHERS = SOCKET, "lost+found"  # every new ext file system has this folder
_NUMBERS = 2**30
"""Numbers of segments are smaller than this: enough for centuries, and the index packs them with a row."""


class Folder:
    """Segments by number. Files with other names are never changed."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        """Opens the folder, or creates it. Raises ConfigError."""
        self.path = path
        self._file = self._lock = -1
        try:
            if not read_only:
                make(path)
            self.numbers()
            self._file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if not read_only:
                self._take_lock()
        except (OSError, ConfigError) as error:
            self.close()
            if isinstance(error, ConfigError):
                raise
            raise _not_usable(path, error) from error
        self.direct_io = self._takes_direct_io()

    def numbers(self) -> list[int]:
        """The numbers of the segments, oldest first. Raises ConfigError if there are other files."""
        numbers = []
        with os.scandir(self.path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                number, ours = _number(entry.name), entry.is_file(follow_symlinks=False)
                if number is not None and ours:
                    numbers.append(number)
                elif entry.name not in _OTHERS and not (entry.name in _FILES and ours):
                    why = f"holds {entry.name!r}, which does not belong to a store"
                    raise ConfigError("store", str(self.path), why)
        return numbers

    def segment(self, number: int) -> Path:
        return self.path / f"segment-{number:010}.tcs"

    @property
    def uses(self) -> Path:
        return self.path / _USES

    def sync(self) -> None:
        """Make the creation and removal of files durable."""
        direct.calls.fsync(self._file)

    def space(self) -> direct.Space:
        return direct.calls.space(str(self.path))

    def close(self) -> None:
        """Release the lock. The lock file stays: if it were removed, two processes could hold the lock."""
        for file in (self._lock, self._file):
            if file >= 0:
                os.close(file)
        self._lock = self._file = -1

    def _take_lock(self) -> None:
        """The kernel releases this lock when the process ends, in whatever way."""
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
        """Whether the file system takes direct I/O, for all files alike. It is tried with the lock file."""
        with suppress(OSError):
            os.close(direct.calls.open(str(self.path / _LOCK), os.O_RDONLY | os.O_DIRECT | direct.NO_LINKS))
            return True
        return False


def make(path: Path) -> None:
    """Create the folder if it is not there, durably. Raises ConfigError."""
    try:
        if path.is_dir():
            return
        path.mkdir(parents=True, exist_ok=True)
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
    except OSError as error:
        raise _not_usable(path, error) from error


def _not_usable(path: Path, error: OSError) -> ConfigError:
    other = isinstance(error, FileExistsError | NotADirectoryError)
    return ConfigError(
        "store", str(path), "is not a folder" if other else f"can not be used: {error.strerror}"
    )


def _number(name: str) -> int | None:
    """The number of the segment with this file name. None: it is not the name of a segment."""
    match = re.fullmatch(r"segment-(\d{10})\.tcs", name, re.ASCII)
    return int(match[1]) if match and int(match[1]) < _NUMBERS else None
