"""A process that works on a store until it is killed.

    python -m tests.storage.file.victim

Started once; for every line `PATH SIZE SEED` it forks a child that works, and tells when that has ended. So a
kill costs a fork and not the start of an interpreter. What the child is about to do and has done it tells on
the same pipe, a line each, before and after (`kill_loop` reads them):

    pid 123            the child to kill
    put T a b c        thread T is going to put these
    kept T 110         it was answered: two were kept, one not
    delete T a b       thread T is going to delete these
    deleted T
    clear / cleared    alone, no other thread is at work
    removed a b        the store lets these go: told before their file does
    wrong …            something that must not be
    ended              the child is dead
"""

from __future__ import annotations

import os
import random
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.storage.file.make import delete, got, key_of, make_store, put
from tiercel.storage.file.index import Index

THREADS = 3
NAMES = 30
"""Names of each thread: few, so that they are put, deleted and put again."""


def names_of(thread: int) -> list[str]:
    return [f"{thread}.{number}" for number in range(NAMES)]


def tell(*words: object) -> None:
    """One write: lines of threads do not mix, and none is cut by a kill."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def act(store, thread: int, chance: random.Random) -> None:
    names = chance.sample(names_of(thread), chance.randint(1, 4))
    what = chance.random()
    if what < 0.65:
        tell("put", thread, *names)
        answers = put(store, *names)
        tell("kept", thread, "".join(str(int(answer)) for answer in answers))
    elif what < 0.85:
        tell("delete", thread, *names)
        delete(store, *names)
        tell("deleted", thread)
    else:
        got(store, *names)


NAMES_OF = {key_of(name): name for thread in range(THREADS) for name in names_of(thread)}


def tell_what_goes() -> None:
    """The listener must know of an eviction even if this process is killed in the middle of it."""
    evict = Index.evict

    def told(index, segment):
        if keys := [segment.table.keys[row] for row in index.live(segment)]:
            tell("removed", *(NAMES_OF[key] for key in keys))
        return evict(index, segment)

    Index.evict = told


def act_alone(store, path: Path, size: int, chance: random.Random):
    """What no other thread may be in the way of, so that one who listens knows what to expect."""
    what = chance.random()
    if what < 0.1:
        tell("clear")
        store.clear()
        tell("cleared")
    elif what < 0.2:
        store.compact()
    elif what < 0.4:
        store.close()
        return make_store(path, size)
    return store


def work(path: Path, size: int, seed: int) -> None:
    chances = [random.Random(f"{seed} {thread}") for thread in range(THREADS + 1)]
    tell_what_goes()
    store = make_store(path, size)

    def act_often(thread: int) -> None:
        for _ in range(6):
            act(store, thread, chances[thread])

    with ThreadPoolExecutor(THREADS) as pool:
        while True:
            list(pool.map(act_often, range(THREADS)))
            store = act_alone(store, path, size, chances[THREADS])


def main() -> None:
    for line in sys.stdin:
        path, size, seed = line.rsplit(" ", 2)
        child = os.fork()
        if child == 0:
            try:
                work(Path(path), int(size), int(seed))
            except BaseException:  # noqa: BLE001 - told to who listens
                tell("wrong", traceback.format_exc().replace("\n", " | "))
            os._exit(1)
        tell("pid", child)
        os.waitpid(child, 0)
        tell("ended")


if __name__ == "__main__":
    main()
