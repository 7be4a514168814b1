"""The half of the contract for stores that can only be read. Every public function is a check: it takes the
subject, whose records others have put there. It raises AssertionError."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import isfunction

from tiercel.errors import StoreError
from tiercel.storage.base import Get, Put, Store
from tiercel.storage.conformance.samples import expect, together
from tiercel.storage.record import RecordKey

_BESIDE = b"\xa5\xa5\xa5"  # bytes between the parts of a read: `get` must not change them
_THREADS = 8


@dataclass(frozen=True)
class ReadSubject:
    """How to open the store to check, and what it holds as long as the checks run."""

    open: Callable[[], Store]
    held: Sequence[tuple[RecordKey, bytes]]
    """Keys and whole values, three or more, of two lengths or more."""
    absent: Sequence[RecordKey]
    """Keys that are not there."""


class _Memory:
    """Memory for one value: parts that end at `cuts`, at odd addresses, and do not touch."""

    def __init__(self, key: RecordKey, size: int, cuts: Sequence[int] = ()) -> None:
        ends = sorted({cut for cut in cuts if 0 < cut < size} | {size})
        parts, at = list[slice](), 0
        for end in ends:
            begin = at + len(_BESIDE) * (len(parts) + 1)
            parts.append(slice(begin, begin + end - at))
            at = end
        self._parts = parts
        self._memory = bytearray(_BESIDE) * (parts[-1].stop // len(_BESIDE) + 2)
        view = memoryview(self._memory)
        self.get = Get(key, [view[part] for part in parts])

    def check(self, value: bytes, what: str) -> None:
        expect(b"".join(self.get.parts) == value, f"{what}: get answered True with other bytes")
        beside = bytearray(self._memory)
        for part in reversed(self._parts):
            del beside[part]
        expect(not beside.strip(_BESIDE), f"{what}: get wrote outside the parts it was given")


def _read(store: Store, held: Sequence[tuple[RecordKey, bytes]], what: str) -> None:
    keys = [key for key, _ in held]
    expect(store.contains(keys) == [True] * len(keys), f"{what}: contains")
    memory = [_Memory(key, len(value)) for key, value in held]
    answer = store.get([each.get for each in memory])
    expect(answer == [True] * len(keys), f"{what}: contains says it is there, get answered {answer}")
    for each, (_, value) in zip(memory, held, strict=True):
        each.check(value, what)


def what_is_there_is_read_as_it_was_put(subject: ReadSubject) -> None:
    """Each alone, and all in one batch."""
    store = subject.open()
    expect(not store.writes, "it says that it can be written to")
    for one in subject.held:
        _read(store, [one], f"{len(one[1])} B")
    _read(store, subject.held, "all together")


def parts_may_be_many_and_lie_anywhere(subject: ReadSubject) -> None:
    """Hundreds of parts, of one byte and of many."""
    store, (key, value) = subject.open(), subject.held[0]
    for cuts in (random.Random(1).sample(range(len(value)), min(300, len(value) - 1)), [1], [len(value) - 1]):
        memory = _Memory(key, len(value), cuts)
        expect(store.get([memory.get]) == [True], "it was not found")
        memory.check(value, f"read as {len(memory.get.parts)} parts")


def registered_memory_makes_no_difference(subject: ReadSubject) -> None:
    """Values inside and outside of registered memory, in one batch. The store is closed before the memory."""
    (first, one), (second, two) = subject.held[:2]
    memory = memoryview(bytearray(len(one) + 7))
    with subject.open() as store:
        store.register(memory)
        outside = _Memory(second, len(two))
        answer = store.get([Get(first, [memory[: len(one)]]), outside.get])
        expect(answer == [True, True], f"get into registered memory answered {answer}")
        expect(memory[: len(one)] == one, "in registered memory: other bytes")
        expect(bytes(memory[len(one) :]) == bytes(7), "get wrote outside the parts it was given")
        outside.check(two, "beside one in registered memory")


def a_miss_is_an_answer(subject: ReadSubject) -> None:
    """A key that is not there is a miss, for both questions."""
    store, keys = subject.open(), list(subject.absent)
    expect(store.contains(keys) == [False] * len(keys), "contains of what is not there")
    answer = store.get([_Memory(key, len(subject.held[0][1])).get for key in keys])
    expect(answer == [False] * len(keys), f"get of what is not there answered {answer}")


def another_length_is_a_miss(subject: ReadSubject) -> None:
    """A get for more or fewer bytes than it has returns False, and the next one finds it."""
    store, (key, value) = subject.open(), subject.held[0]
    for more in (1, -1, 100_000, 1 - len(value)):
        answer = store.get([_Memory(key, len(value) + more).get])
        expect(answer == [False], f"asked for {more:+} bytes, get answered {answer}")
    _read(store, subject.held[:1], "after asking for another length")


def a_batch_answers_each_in_its_place(subject: ReadSubject) -> None:
    """Hits, misses, wrong lengths and repeated keys in one batch."""
    store, absent = subject.open(), subject.absent[0]
    (a, one), (b, two) = subject.held[:2]
    found = store.contains([absent, a, absent, b, a])
    expect(found == [False, True, False, True, True], f"contains answered {found}")
    sizes = [(absent, 100), (b, len(two)), (a, len(one) + 9), (a, len(one)), (absent, 5), (b, len(two))]
    memory = [_Memory(key, size) for key, size in sizes]
    answer = store.get([each.get for each in memory])
    expect(answer == [False, True, False, True, False, True], f"get answered {answer}")
    for number, value in ((1, two), (3, one), (5, two)):
        memory[number].check(value, "one of a batch")


def an_empty_batch_is_nothing(subject: ReadSubject) -> None:
    store = subject.open()
    answers = (store.contains([]), store.get([]), store.put([]), store.delete([]))
    expect(answers == ([], [], [], 0), f"contains, get, put, delete of nothing answered {answers}")


def nothing_is_ever_written(subject: ReadSubject) -> None:
    """`put` returns False; `delete` and `clear` raise StoreError. Nothing has changed."""
    store, (key, value) = subject.open(), subject.held[0]
    answer = store.put([Put(key, [value]), Put(subject.absent[0], [value])])
    expect(answer == [False, False], f"put answered {answer}")
    _expect_refused("delete", lambda: store.delete([key]))
    _expect_refused("clear", store.clear)
    expect(store.kept([key]) == [False], "it says that it has kept what was put")
    _read(store, subject.held, "after put, delete and clear")
    expect(store.contains(subject.absent) == [False] * len(subject.absent), "a refused value is there")


def threads_read_at_the_same_time(subject: ReadSubject) -> None:
    store = subject.open()

    def read() -> None:
        for _ in range(10):
            _read(store, subject.held, "while others read")

    together([read] * _THREADS)


def closing_under_way_breaks_nothing(subject: ReadSubject) -> None:
    """A call during `close` by another thread gets an answer or a StoreError, never other bytes."""
    store = subject.open()

    def read() -> None:
        memory = [_Memory(key, len(value)) for key, value in subject.held]
        try:
            for _ in range(1000):
                answers = store.get([each.get for each in memory])
                for each, here, (_, value) in zip(memory, answers, subject.held, strict=True):
                    if here:
                        each.check(value, "while it is closed")
        except StoreError:
            return

    together([read] * (_THREADS - 1) + [store.close])


def stats_has_records_and_bytes(subject: ReadSubject) -> None:
    stats = subject.open().stats()
    expect({"records", "bytes"} <= stats.keys(), f"stats answered {stats}")


def a_closed_store_refuses(subject: ReadSubject) -> None:
    """After `close` every other call raises StoreError. `close` may be called again, and `with` closes."""
    with subject.open() as store:
        _read(store, subject.held, "before it is closed")
    store.close()
    key, value = subject.held[0]
    _expect_refused("contains", lambda: store.contains([key]))
    _expect_refused("get", lambda: store.get([_Memory(key, len(value)).get]))
    _expect_refused("put", lambda: store.put([Put(key, [value])]))
    _expect_refused("delete", lambda: store.delete([key]))
    _expect_refused("clear", store.clear)
    _expect_refused("stats", store.stats)
    _expect_refused("keys", lambda: list(store.keys()))


def _expect_refused(name: str, call: Callable[[], object]) -> None:
    try:
        answer = call()
    except StoreError:
        return
    raise AssertionError(f"{name} answered {answer}")


READ_CHECKS = [
    each
    for name, each in list(globals().items())
    if isfunction(each) and each.__module__ == __name__ and not name.startswith("_")
]
