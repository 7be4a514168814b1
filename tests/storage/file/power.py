"""A disk that can lose power, and processes that can be killed before it does.

Every change goes to a real file. Beside it stands what a power loss would leave: what was synced for certain,
of everything else any part. A sector that was written is there or not, whatever became of its neighbours;
sizes come in their order; a name that was made or removed is there or not.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

from tiercel.storage.file import direct

SECTOR = 4096


class Killed(BaseException):
    """The process is dead: nothing it would still do happens."""


class File:
    """The bytes of a file: those that are safe, and the changes since."""

    def __init__(self) -> None:
        self.safe = b""
        self.now = bytearray()
        self.changes: list[tuple[int, bytes | None]] = []
        """Offset and bytes written; or a new size and None."""

    def resize(self, size: int) -> None:
        self.changes.append((size, None))
        _resize(self.now, size)

    def write(self, offset: int, data: bytes) -> None:
        self.changes.append((offset, data))
        assert offset + len(data) <= len(self.now), "the space is taken before"
        self.now[offset : offset + len(data)] = data

    def sync(self) -> None:
        self.safe, self.changes = bytes(self.now), []

    def left(self, chance: random.Random) -> bytes:
        """What may be there after a power loss."""
        data = bytearray(self.safe)
        likely = chance.choice((0.0, 0.5, 0.9, 1.0))
        resizes = chance.randint(0, sum(written is None for _, written in self.changes))
        for offset, written in self.changes:
            if written is None:
                if resizes > 0:
                    _resize(data, offset)
                resizes -= 1
                continue
            for at in range(0, len(written), SECTOR):
                if chance.random() < likely and offset + at + SECTOR <= len(data):
                    data[offset + at : offset + at + SECTOR] = written[at : at + SECTOR]
        return bytes(data)


class Disk(direct.Calls):
    """The files of one folder. `at_call` is called before every change, with its number."""

    def __init__(self) -> None:
        self.at_call = lambda number: None
        self.count = 0
        self.dead = False
        self.files: dict[int, File] = {}
        """Files by inode."""
        self.safe: dict[str, File] = {}
        """Names that are safe."""
        self.changes: list[tuple[str, File | None]] = []

    def before(self) -> None:
        if self.dead:
            raise Killed
        self.count += 1
        self.at_call(self.count)
        if self.dead:
            raise Killed

    def image(self, path: Path, chance: random.Random) -> None:
        """A folder as a power loss would leave it now."""
        names: dict[str, File] = dict(self.safe)
        for name, file in self.changes:
            if chance.random() < 0.5:
                continue
            if file is None:
                names.pop(name, None)
            else:
                names[name] = file
        path.mkdir()
        for name, file in names.items():
            (path / name).write_bytes(file.left(chance))

    def of(self, file: int) -> File:
        return self.files[os.fstat(file).st_ino]

    def open(self, path, flags):
        if self.dead:
            raise Killed
        new = flags & os.O_CREAT and not Path(path).exists()
        if new:
            self.before()
        file = super().open(path, flags)
        if new:
            self.files[os.fstat(file).st_ino] = made = File()
            self.changes.append((Path(path).name, made))
        return file

    def pwritev(self, file, views, offset):
        self.before()
        data = b"".join(map(bytes, views))
        self.of(file).write(offset, data)
        return super().pwritev(file, views, offset)

    def fdatasync(self, file):
        self.before()
        self.of(file).sync()

    def fsync(self, file):
        self.before()
        for name, made in self.changes:
            if made is None:
                self.safe.pop(name, None)
            else:
                self.safe[name] = made
        self.changes = []

    def fallocate(self, file, offset, size):
        self.before()
        self.of(file).resize(max(len(self.of(file).now), offset + size))
        super().fallocate(file, offset, size)

    def ftruncate(self, file, size):
        self.before()
        self.of(file).resize(size)
        super().ftruncate(file, size)

    def unlink(self, path):
        self.before()
        self.changes.append((Path(path).name, None))
        super().unlink(path)


def _resize(data: bytearray, size: int) -> None:
    del data[size:]
    data.extend(bytes(size - len(data)))
