"""Kill a store's process at any moment, again and again, and look what is left.

    python -m tests.storage.file.kill_loop [--kills 5000] [--seed 1] [--folder /some/disk]

What was acknowledged must be there, byte for byte; what was deleted must not; nothing may be there wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from tests.storage.file.make import SEGMENT_BYTES, SIZE, bytes_of, held, make_store
from tests.storage.file.victim import NAMES_OF, THREADS, names_of
from tiercel.storage.file.direct import ALIGN

ROOT = Path(__file__).parents[3]
NAMES = [name for thread in range(THREADS) for name in names_of(thread)]
ROOMY, TIGHT = 64 * SIZE, 8 * SEGMENT_BYTES + 4 * ALIGN
"""Sizes: a store in which nothing must be evicted, and one in which something always must."""


class State(Enum):
    THERE = "acknowledged"
    GONE = "deleted, or never put"
    OPEN = "either is right"


class Ledger:
    """What a store must have, from what its process told before it was killed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.states = dict.fromkeys(NAMES, State.GONE)
        self.gone_while_put: set[str] = set()
        """What the store let go before the put of it was answered."""
        self.busy: dict[str, list[str]] = {}
        """What each thread is doing."""

    def hear(self, line: str) -> None:
        word, *words = line.split()
        getattr(self, f"hear_{word}")(*words)

    def hear_put(self, thread: str, *names: str) -> None:
        self.busy[thread] = list(names)
        self.gone_while_put.difference_update(names)
        for name in names:
            if self.states[name] is State.GONE:
                self.states[name] = State.OPEN

    def hear_kept(self, thread: str, answers: str) -> None:
        for name, answer in zip(self.busy.pop(thread), answers, strict=True):
            assert answer == "1", "there is always room"
            self.states[name] = State.OPEN if name in self.gone_while_put else State.THERE

    def hear_delete(self, thread: str, *names: str) -> None:
        self.busy[thread] = list(names)
        for name in names:
            if self.states[name] is State.THERE:
                self.states[name] = State.OPEN

    def hear_deleted(self, thread: str) -> None:
        for name in self.busy.pop(thread):
            self.states[name] = State.GONE

    def hear_clear(self) -> None:
        for name, state in self.states.items():
            if state is State.THERE:
                self.states[name] = State.OPEN

    def hear_cleared(self) -> None:
        self.states = dict.fromkeys(NAMES, State.GONE)

    def hear_removed(self, *names: str) -> None:
        for name in names:
            assert self.size == TIGHT, "nothing has to go from a roomy store"
            if self.states[name] is State.THERE:
                self.states[name] = State.OPEN
            self.gone_while_put.add(name)

    def hear_wrong(self, *words: str) -> None:
        raise AssertionError(" ".join(words).replace(" | ", "\n"))

    def check(self, store) -> None:
        found = dict(zip(NAMES, held(store, *NAMES), strict=True))
        lost = [name for name in NAMES if self.states[name] is State.THERE and not found[name]]
        back = [name for name in NAMES if self.states[name] is State.GONE and found[name]]
        assert not lost, f"acknowledged, and lost: {lost}"
        assert not back, f"deleted, and back: {back}"
        assert store.check().bad == []

    def settle(self, store) -> None:
        """What is there now is what counts from here on."""
        self.busy.clear()
        for name, hit in zip(NAMES, held(store, *NAMES), strict=True):
            self.states[name] = State.THERE if hit else State.GONE


@contextmanager
def victims():
    """The process that forks them, and the lines it tells."""
    command = [sys.executable, "-m", "tests.storage.file.victim"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


def kill_one(process, path: Path, ledger: Ledger, chance: random.Random) -> None:
    """Start a child, let it work for a moment, kill it; hear everything that it told."""
    os.write(process.stdin.fileno(), f"{path} {ledger.size} {chance.randrange(10**9)}\n".encode())
    child, told = 0, b""
    lines = 0
    end = chance.choice([chance.randrange(1, 20), chance.randrange(1, 80)])
    while True:
        # Now and then in the middle of whatever it does after its last words, and not just after them.
        due = child > 0 and lines >= end  # the child may speak before its parent has told its pid
        patience = chance.random() * 0.01 if due else 60
        if not select.select([process.stdout], [], [], patience)[0]:
            assert due, "it hangs"
            os.kill(child, signal.SIGKILL)
            end = 10**9
            continue
        told += os.read(process.stdout.fileno(), 65536)
        *whole, told = told.split(b"\n")
        for line in whole:
            lines += 1
            if line == b"ended":
                return
            if line.startswith(b"pid "):
                child = int(line[4:])
            else:
                ledger.hear(line.decode())
        if child > 0 and lines >= end and chance.random() < 0.5:
            os.kill(child, signal.SIGKILL)
            end = 10**9


def run(folder: Path, size: int, kills: int, seed: int) -> None:
    """One folder that lives through all of these."""
    chance = random.Random(seed)
    path, ledger = folder / f"store {seed}", Ledger(size)
    with victims() as process:
        for number in range(kills):
            kill_one(process, path, ledger, chance)
            read_only = chance.random() < 0.5 and path.exists()  # killed at once, it made no folder
            try:
                with make_store(path, size, read_only=read_only) as store:
                    ledger.hear_removed(*(NAMES_OF[key] for key in store.removed()))
                    ledger.check(store)
                    assert bytes_of(path) <= size
                    ledger.settle(store)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, kill {number}, in {path}: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--folder", help="on the disk in question")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for number, start in enumerate(range(0, options.kills, 25)):
            run(
                Path(folder),
                (ROOMY, TIGHT)[number % 2],
                min(25, options.kills - start),
                options.seed + number,
            )
            print(f"{start + 25} killed", flush=True)  # noqa: T201 - it is told as it goes


if __name__ == "__main__":
    main()
