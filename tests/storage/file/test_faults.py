"""Goal: no failing call loses what was acknowledged. Method: a script in which every call to the disk that
changes something fails in turn, once with each error, and once does only half; afterwards the same store goes
on, and opened again it has what it must have."""

import errno
import os
import shutil

import pytest

from tests.storage.file.make import SIZE, Watched, delete, held, in_memory, keep, key_of, make_store, put
from tiercel.errors import StoreError
from tiercel.storage.file import direct

NAMES = [f"{number}:9000" for number in range(40)]
SMALL = SIZE // 2


class Ledger:
    """What a store must have, must not have; the rest it may have."""

    def __init__(self):
        self.there, self.gone = set(), set()

    def doubt(self, names):
        self.there -= set(names)
        self.gone -= set(names)

    def put(self, store, *names):
        new = [name for name in names if name not in self.there]
        self.doubt(new)
        try:
            answers = put(store, *names)
        except StoreError:
            return
        self.there |= {name for name, kept in zip(names, answers, strict=True) if kept}

    def delete(self, store, *names):
        self.doubt(names)
        try:
            delete(store, *names)
        except StoreError:
            return
        self.gone |= set(names)

    def clear(self, store):
        before = self.there | self.gone
        self.doubt(before)
        try:
            store.clear()
        except StoreError:
            return
        self.gone |= set(NAMES)

    def compact(self, store):
        try:
            store.compact()
        except StoreError:
            return

    def check(self, store):
        removed = set(store.removed())
        self.doubt([name for name in self.there if key_of(name) in removed])
        found = dict(zip(NAMES, held(store, *NAMES), strict=True))
        assert not [name for name in self.there if not found[name]], "acknowledged, and lost"
        assert not [name for name in self.gone if found[name]], "deleted, and back"


def script(path, ledger, look):
    """Segments end, records are moved and evicted, files go; a store is closed and opened again, twice."""
    store = open_store(path)
    ledger.put(store, *NAMES[:3])
    ledger.delete(store, NAMES[1])
    ledger.put(store, *NAMES[3:9])
    look(store)
    store.close()
    store = open_store(path)
    ledger.put(store, NAMES[9], NAMES[1])
    for start in range(10, 22, 3):
        held(store, *NAMES[2:5])
        ledger.put(store, *NAMES[start : start + 3])
    ledger.delete(store, *NAMES[2:12:2])
    look(store)
    ledger.compact(store)
    look(store)
    ledger.put(store, *NAMES[22:26])
    look(store)
    store.close()
    store = open_store(path)
    look(store)
    ledger.clear(store)
    look(store)
    ledger.put(store, *NAMES[26:34], NAMES[0])
    look(store)
    return store


def open_store(path):
    try:
        return make_store(path, SMALL)
    except StoreError:  # the fault hit the opening: the next one is not hit
        return make_store(path, SMALL)


class NthFails:
    """Every call counts; one of them fails."""

    def __init__(self, nth, fault):
        self.nth, self.fault, self.count = nth, fault, 0
        self.hit = None

    def __call__(self, call):
        self.count += 1
        if self.count != self.nth:
            return None
        self.hit = call
        if self.fault == "short":
            return 4096 if call == "pwritev" else None
        if self.fault == "nothing":
            return 0 if call == "pwritev" else None
        raise OSError(self.fault, os.strerror(self.fault))


@pytest.fixture
def folder(tmp_path):
    with in_memory(tmp_path) as folder:
        yield folder


def calls_of_the_script(folder, monkeypatch):
    counting = NthFails(0, None)
    with monkeypatch.context() as context:
        context.setattr(direct, "calls", Watched(counting))
        script(folder / "count", Ledger(), lambda store: None).close()
    return counting.count


@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC, "short", "nothing"])
def test_whichever_call_fails_nothing_acknowledged_is_lost(folder, monkeypatch, fault):
    calls = calls_of_the_script(folder, monkeypatch)
    assert calls > 60
    hit = set()
    for nth in range(1, calls + 1):
        path = folder / f"{nth}"
        ledger, failing = Ledger(), NthFails(nth, fault)
        with monkeypatch.context() as context:
            context.setattr(direct, "calls", Watched(failing))
            store = script(path, ledger, ledger.check)
            hit.add(failing.hit)
            failing.nth = 0
            keep(store, "at the end")
            ledger.check(store)
            assert store.check().bad == []
            shutil.copytree(path, folder / "crashed")
            store.close()
        for each in (path, folder / "crashed"):
            with make_store(each, SMALL) as store:
                ledger.check(store)
                assert held(store, "at the end") == [True] and store.check().bad == []
            shutil.rmtree(each)
    assert hit >= {"pwritev", "fdatasync", "fsync", "fallocate", "ftruncate", "unlink"}


@pytest.mark.parametrize("call", Watched.CHANGES)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_while_a_call_always_fails_nothing_is_lost_and_afterwards_all_is_well(
    folder, monkeypatch, call, code
):
    ledger = Ledger()
    with make_store(folder / "store", SMALL) as store:
        ledger.put(store, *NAMES[:20])

        def fail(name):
            if name == call:
                raise OSError(code, os.strerror(code))

        with monkeypatch.context() as context:
            context.setattr(direct, "calls", Watched(fail))
            for start in range(20, 32, 3):
                ledger.put(store, *NAMES[start : start + 3])
                ledger.delete(store, NAMES[start - 1])
            ledger.check(store)
        keep(store, "at the end")
        ledger.check(store)
        shutil.copytree(folder / "store", folder / "crashed")
    for name in ("store", "crashed"):
        with make_store(folder / name, SMALL) as store:
            ledger.check(store)
            assert held(store, "at the end") == [True]
