"""Processes that work on one shared store until they are killed.

    python -m tests.storage.shared.worker

Started once. `start PATH SIZE NUMBER SEED` forks a process that works; `reap PID` waits for the end of one
that was killed. What a process is about to do and has done it tells on the same pipe, as in `file.victim`.
Each has names of its own, and reads those of all.
"""

import os
import random
import sys
import traceback
from pathlib import Path

from tests.storage.file.make import delete, got, put
from tests.storage.file.victim import names_of, tell
from tests.storage.shared.make import make_shared
from tiercel.errors import StoreError

WORKERS = 8


def work(path: Path, size: int, number: int, seed: int) -> None:
    chance = random.Random(seed)
    with make_shared(path, size) as store:
        while True:
            names = chance.sample(names_of(number), chance.randint(1, 4))
            what = chance.random()
            if what < 0.5:
                tell("put", number, *names)
                answers = put(store, *names)
                tell("kept", number, "".join(str(int(answer)) for answer in answers))
            elif what < 0.6:
                tell("delete", number, *names)
                delete(store, *names)
                tell("deleted", number)
            else:
                got(store, *names_of(chance.randrange(WORKERS)))  # compares every byte


def main() -> None:
    for line in sys.stdin:
        word, *words = line.split()
        if word == "reap":
            os.waitpid(int(words[0]), 0)
            tell("ended", words[0])
            continue
        path, size, number, seed = words
        child = os.fork()
        if child == 0:
            try:
                work(Path(path), int(size), int(number), int(seed))
            except StoreError as error:
                tell("wrong", f"process {number}: {error}")
            except BaseException:  # noqa: BLE001 - told to who listens
                tell("wrong", traceback.format_exc().replace("\n", " | "))
            os._exit(1)
        tell("started", number, child)


if __name__ == "__main__":
    main()
