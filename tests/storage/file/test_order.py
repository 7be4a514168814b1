"""Goal: threads that write at the same time do not harm each other, and what is acknowledged would be found
after a crash. Method: a thread that is stopped at a call, and what the others and the folder are like."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from threading import Thread, current_thread

import pytest

from tests.storage.file.make import (
    Watched,
    delete,
    has_all,
    has_none,
    held,
    keep,
    key_of,
    make_store,
    page_key,
    put,
)
from tests.wait import until
from tiercel.errors import StoreError
from tiercel.storage.file import direct


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Meanwhile(direct.Calls):
    """At the first write of the main thread others put, up to the moment when all of them wait."""

    def __init__(self, store, pool, names):
        self.store, self.pool, self.names = store, pool, names
        self.answers, self.syncs = [], 0

    def pwritev(self, file, views, offset):
        if current_thread().name == "MainThread" and not self.answers:
            self.answers = [self.pool.submit(put, self.store, name) for name in self.names]
            until(
                lambda: len(self.store._log.commit.queue) == 1 + len(self.names),
                "all writers are in the queue",
            )
            self.look()
        return super().pwritev(file, views, offset)

    def fdatasync(self, file):
        self.syncs += 1
        super().fdatasync(file)

    def look(self):
        pass


def test_one_writes_for_all_who_wait_and_nobody_is_acknowledged_before(path, pool, monkeypatch):
    with make_store(path, segment_bytes=256 * 1024) as store:
        keep(store, "first")

        class Look(Meanwhile):
            def look(self):
                assert not any(answer.done() for answer in self.answers)
                assert held(store, "first", "a", "b", "c", "d") == [True, False, False, False, False]
                shutil.copytree(path, path.with_name("copy"))

        calls = Look(store, pool, ["b", "c", "d"])
        monkeypatch.setattr(direct, "calls", calls)
        keep(store, "a")
        assert [answer.result() for answer in calls.answers] == [[True]] * 3
        assert calls.syncs == 2, "one for the first, one for all the others"
        assert has_all(store, "first", "a", "b", "c", "d")
    with make_store(path) as store:
        assert has_all(store, "first", "a", "b", "c", "d")
    with make_store(path.with_name("copy")) as store:
        assert has_all(store, "first") and has_none(store, "a", "b", "c", "d")


@pytest.mark.parametrize("code", [5, 28])
def test_a_failed_write_takes_nobody_along(path, pool, monkeypatch, code):
    """Those who shared it are tried again, each by itself."""
    with make_store(path) as store:
        keep(store, "first")

        class Failing(Meanwhile):
            def pwritev(self, file, views, offset):
                if any(page_key("c") in view for view in map(bytes, views)):
                    raise OSError(code, os.strerror(code))
                return super().pwritev(file, views, offset)

        calls = Failing(store, pool, ["b", "c", "d"])
        monkeypatch.setattr(direct, "calls", calls)
        keep(store, "a")
        b, c, d = calls.answers
        assert b.result() == d.result() == [True]
        if code == 5:
            with pytest.raises(StoreError):
                c.result()
        else:
            assert c.result() == [False]
        assert held(store, "first", "a", "b", "c", "d") == [True, True, True, False, True]
        shutil.copytree(path, path.with_name("copy"))
    for each in (path, path.with_name("copy")):
        with make_store(each) as store:
            assert held(store, "first", "a", "b", "c", "d") == [True, True, True, False, True]


def test_what_failed_to_be_put_and_was_deleted_does_not_come_back(path, monkeypatch):
    """Its bytes may be on the disk, whole, though it was never acknowledged."""
    with make_store(path) as store:
        keep(store, "first")
        failing = ["fdatasync", "pwritev"]  # of the put, then of the table of its segment

        def before(call):
            if failing and call == failing[0]:
                raise OSError(5, failing.pop(0))

        monkeypatch.setattr(direct, "calls", Watched(before))
        with pytest.raises(StoreError):
            put(store, "a")
        assert delete(store, "a") == 0
        shutil.copytree(path, path.with_name("copy"))
    with make_store(path.with_name("copy")) as store:
        assert held(store, "first", "a") == [True, False]


@pytest.mark.parametrize(
    ("failed", "calls"), [("delete", ["fdatasync", "pwritev"]), ("clear", ["fdatasync", "unlink"])]
)
def test_what_is_put_after_a_removal_that_failed_is_written(path, monkeypatch, failed, calls):
    """The note may be on the disk, whole: then it would take away what was put after it."""
    with make_store(path) as store:
        keep(store, "a", "b")
        failing = list(calls)  # of the note, then of ending its segment

        def before(call):
            if failing and call == failing[0]:
                raise OSError(5, failing.pop(0))

        monkeypatch.setattr(direct, "calls", Watched(before))
        with pytest.raises(StoreError):
            delete(store, "a") if failed == "delete" else store.clear()
        keep(store, "a")
        shutil.copytree(path, path.with_name("killed"))
        assert has_all(store, "a", "b") and store.stats()["records"] == 2
    for each in (path, path.with_name("killed")):
        with make_store(each) as store:
            assert has_all(store, "a")


def test_a_write_that_failed_is_not_found_after_a_power_loss_either(path, monkeypatch):
    """The table that leaves it out is on the disk before anybody relies on it."""
    with make_store(path) as store:
        keep(store, "a")
        made = []

        def before(call):
            made.append(call)
            if made == ["pwritev", "fdatasync"]:
                raise OSError(5, "failing")

        monkeypatch.setattr(direct, "calls", Watched(before))
        with pytest.raises(StoreError):
            delete(store, "a")
        store.close()
    assert made[2:] == ["pwritev", "ftruncate", "fdatasync"]


@pytest.mark.parametrize("what", ["clear", "compact"])
def test_who_changes_everything_waits_for_who_is_writing(path, pool, monkeypatch, what):
    with make_store(path) as store:
        keep(store, "first", "second")
        delete(store, "second")
        others = []

        def before(call):
            if call == "pwritev" and not others:
                others.append(pool.submit(getattr(store, what)))
                until(lambda: others[0].done() or store._log.lock._waiters, f"{what} waits for the lock")  # type: ignore[attr-defined]
                assert not others[0].done()

        monkeypatch.setattr(direct, "calls", Watched(before))
        keep(store, "a")
        others[0].result()
        keep(store, "b")
        expected = [what == "compact", False, what == "compact", True]
        assert held(store, "first", "second", "a", "b") == expected
    with make_store(path) as store:
        assert held(store, "first", "second", "a", "b") == expected


def test_who_is_interrupted_leaves_nothing_to_be_written(path, monkeypatch):
    with make_store(path) as store:

        def before(call):
            if call == "pwritev":
                raise KeyboardInterrupt

        with monkeypatch.context() as context:
            context.setattr(direct, "calls", Watched(before))
            with pytest.raises(KeyboardInterrupt):
                put(store, "a")
        keep(store, "b")
        assert held(store, "a", "b") == [False, True]


def test_a_key_that_two_put_at_the_same_time_is_one_record(path, pool, monkeypatch):
    with make_store(path) as store:
        calls = Meanwhile(store, pool, ["a", "a"])
        monkeypatch.setattr(direct, "calls", calls)
        keep(store, "a")
        assert [answer.result() for answer in calls.answers] == [[True]] * 2
        assert store.stats()["records"] == 1 and has_all(store, "a")
        assert delete(store, "a") == 1 and has_none(store, "a")
    with make_store(path) as store:
        assert has_none(store, "a")


def test_closing_waits_for_those_who_are_at_work(path, monkeypatch):
    store = make_store(path)
    closing = []

    def before(call):
        if call == "fdatasync" and not closing:
            closing.append(Thread(target=store.close))
            closing[0].start()
            until(lambda: store._closed, "close has begun")

    monkeypatch.setattr(direct, "calls", Watched(before))
    keep(store, "a")
    closing[0].join(30)
    assert not closing[0].is_alive(), "close does not return"
    with pytest.raises(StoreError, match="closed"):
        store.contains([key_of("a")])
    with make_store(path) as store:
        assert has_all(store, "a")


def test_many_threads_fill_many_segments_and_everything_is_there(path):
    names = [[f"{thread}-{number}" for number in range(40)] for thread in range(6)]

    def work(mine):
        for start in range(0, len(mine), 5):
            keep(store, *mine[start : start + 5])
            assert has_all(store, *mine[start : start + 5])
            assert delete(store, mine[start]) == 1

    with make_store(path, 8 * 1024 * 1024) as store, ThreadPoolExecutor(6) as pool:
        list(pool.map(work, names))
        shutil.copytree(path, path.with_name("copy"))
    for each in (path, path.with_name("copy")):
        with make_store(each, 8 * 1024 * 1024) as store:
            for mine in names:
                assert held(store, *mine) == [number % 5 != 0 for number in range(40)]


def test_threads_that_put_more_than_fits_keep_to_the_size(path):
    size = 1024 * 1024

    def work(thread):
        for number in range(60):
            keep(store, f"{thread}-{number}:12000")
            assert has_all(store, f"{thread}-{number}:12000")
            assert store.stats()["bytes_on_disk"] <= size

    with make_store(path, size) as store, ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
        assert store.check().bad == []
