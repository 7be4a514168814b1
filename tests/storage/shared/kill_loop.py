"""Kill processes that share a store, and its owner, at any moment, and look what is left.

    python -m tests.storage.shared.kill_loop [--kills 1000] [--seed 1] [--folder /some/disk]

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
from pathlib import Path

from tests.storage.file.kill_loop import ROOMY, ROOT, Ledger, State
from tests.storage.file.make import held, make_store
from tests.storage.file.victim import names_of
from tests.storage.shared.make import kill_owner, make_shared, owner_of, wait_for_end
from tests.storage.shared.worker import WORKERS

NAMES = [name for number in range(WORKERS) for name in names_of(number)]
OWNER_EVERY = 4
"""Of so many kills one hits the owner."""


class Hearing:
    """The processes at work, and what they tell."""

    def __init__(self, path: Path, size: int, seed: int) -> None:
        self.ledger = Ledger(size)
        self.ledger.states = dict.fromkeys(NAMES, State.GONE)
        self.running: dict[int, int] = {}
        self.lines = 0
        self._path, self._size = path, size
        self._chance = random.Random(seed)
        self._ended: set[int] = set()
        self._told = b""
        command = [sys.executable, "-m", "tests.storage.shared.worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert self._process.stdin and self._process.stdout
        self._asked, self._heard = self._process.stdin.fileno(), self._process.stdout.fileno()

    def start(self, number: int) -> None:
        self._say("start", self._path, self._size, number, self._chance.randrange(10**9))
        self.hear_until(lambda: number in self.running)

    def kill(self, number: int) -> None:
        process = self.running.pop(number)
        os.kill(process, signal.SIGKILL)
        self._say("reap", process)
        self.hear_until(lambda: process in self._ended)  # and with it all that it told before
        self.ledger.busy.pop(str(number), None)

    def hear_until(self, done) -> None:
        until_s = time.monotonic() + 120
        while not done():
            assert time.monotonic() < until_s, "it hangs"
            if not select.select([self._heard], [], [], 1.0)[0]:
                continue
            *whole, self._told = (self._told + os.read(self._heard, 65536)).split(b"\n")
            for line in whole:
                self._hear(line.decode())

    def _hear(self, line: str) -> None:
        self.lines += 1
        word, *words = line.split()
        if word == "started":
            self.running[int(words[0])] = int(words[1])
        elif word == "ended":
            self._ended.add(int(words[0]))
        else:
            self.ledger.hear(line)

    def _say(self, *words: object) -> None:
        os.write(self._asked, (" ".join(map(str, words)) + "\n").encode())

    def close(self) -> None:
        for number in list(self.running):
            self.kill(number)
        with self._process as process:
            process.kill()


def run(folder: Path, kills: int, seed: int, size: int = ROOMY) -> None:
    path, chance = folder / f"shared {seed}".replace(" ", "-"), random.Random(seed)
    hearing = Hearing(path, size, seed)
    owners = set[int]()
    with make_shared(path, size) as store:
        try:
            for number in range(WORKERS):
                hearing.start(number)
            for kill in range(kills):
                heard = hearing.lines
                hearing.hear_until(lambda heard=heard: hearing.lines > heard + chance.randrange(1, 60))
                time.sleep(chance.random() * 0.005)
                owners.add(owner_of(store))
                if kill % OWNER_EVERY == OWNER_EVERY - 1:
                    kill_owner(store)
                else:
                    number = chance.randrange(WORKERS)
                    hearing.kill(number)
                    hearing.start(number)
            for number in list(hearing.running):
                hearing.kill(number)
            check(hearing.ledger, store)
            owner = owner_of(store)
        finally:
            hearing.close()
    wait_for_end(owner)
    with make_store(path, size) as alone:  # what is on the disk
        check(hearing.ledger, alone)
    assert len(owners) >= 1 + (kills - 1) // OWNER_EVERY, "an owner was not killed"


def check(ledger: Ledger, store) -> None:
    found = dict(zip(NAMES, held(store, *NAMES), strict=True))
    lost = [name for name in NAMES if ledger.states[name] is State.THERE and not found[name]]
    back = [name for name in NAMES if ledger.states[name] is State.GONE and found[name]]
    assert not lost, f"acknowledged, and lost: {lost}"
    assert not back, f"deleted, and back: {back}"
    assert store.check().bad == []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--folder", help="on the disk in question")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for seed in range(options.seed, options.seed + -(-options.kills // 40)):
            run(Path(folder), min(40, options.kills), seed)
            print(f"seed {seed}: {min(40, options.kills)} killed", flush=True)  # noqa: T201 - as it goes


if __name__ == "__main__":
    main()
