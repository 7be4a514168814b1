"""Checks of one store used by several threads at the same time."""

from __future__ import annotations

import random
import time
from functools import partial
from threading import Semaphore

from tiercel.errors import StoreError
from tiercel.storage.conformance.samples import (
    WAIT_S,
    Read,
    expect,
    expect_absent,
    expect_there,
    keep,
    maker,
    together,
)
from tiercel.storage.conformance.subject import Check, Subject

_THREADS = 8


def what_is_there_is_never_missed(subject: Subject) -> None:
    """A value is found while others put it again. (After a wrong miss the caller would delete it.)"""
    store = subject.open()
    samples = [maker(store)(number, 20_000) for number in range(4)]
    keep(store, samples)

    def put_again() -> None:
        for _ in range(30):
            keep(store, samples)

    def find() -> None:
        for _ in range(30):
            expect_there(store, samples, "while others put it again")

    together([put_again, find] * (_THREADS // 2))


def what_one_thread_keeps_others_find(subject: Subject) -> None:
    """Eight threads put different values at the same time; afterwards each is found by another."""
    store = subject.open()
    make = maker(store)
    shares = [[make(10 * thread + n, 20_000) for n in range(4)] for thread in range(_THREADS)]
    together(partial(keep, store, share) for share in shares)
    together(partial(expect_there, store, share, "put by another thread") for share in shares[::-1])


def threads_see_whole_values_or_none(subject: Subject) -> None:
    """Eight threads put, get, delete and clear the same keys. A value that is found is always whole."""
    store = subject.open()
    sizes = (100, 4000, 4000, 30_000, 30_000, 200_000)
    samples = [maker(store)(number, size) for number, size in enumerate(sizes)]
    puts = {sample: sample.put() for sample in samples}

    def act(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            some = chance.choices(samples, k=chance.randint(1, 3))
            keys = [sample.key for sample in some]
            match chance.choices(("put", "get", "delete", "contains", "clear"), (40, 45, 8, 5, 2))[0]:
                case "put":
                    answer = store.put([puts[sample] for sample in some])
                    expect(len(answer) == len(some), f"put of {len(some)} answered {answer}")
                case "get":
                    reads = [Read(sample) for sample in some]
                    for read, hit in zip(reads, store.get([read.get for read in reads]), strict=True):
                        if hit:
                            read.check("while others put, delete and clear")
                case "delete":
                    gone = store.delete(keys)
                    expect(0 <= gone <= len(set(keys)), f"delete of {len(keys)} answered {gone}")
                case "contains":
                    store.contains(keys)
                case _:
                    store.clear()

    together(partial(act, seed) for seed in range(_THREADS))
    store.clear()
    expect_absent(store, samples, "cleared when all was over")
    keep(store, samples)
    expect_there(store, samples, "put when all was over")


def closing_under_way_breaks_nothing(subject: Subject) -> None:
    """A call during `close` by another thread gets an answer or a StoreError, never a part of a value."""
    store = subject.open()
    sample = maker(store)(1, 200_000)
    keep(store, [sample])
    begun = Semaphore(0)

    def use() -> None:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            read = Read(sample)
            try:
                if store.get([read.get]) == [True]:
                    read.check("while it was closed")
                store.put([sample.put()])
            except StoreError:
                return
            finally:
                begun.release()
        raise AssertionError("closed, and yet it goes on answering")

    def close() -> None:
        for _ in range(_THREADS):
            begun.acquire(timeout=WAIT_S)
        store.close()

    together([use] * (_THREADS - 1) + [close])


CHECKS: tuple[Check, ...] = (
    what_is_there_is_never_missed,
    what_one_thread_keeps_others_find,
    threads_see_whole_values_or_none,
    closing_under_way_breaks_nothing,
)
