"""Goal: records that other processes write into a segment are kept as our own, and a process that ends, fails
or comes too late costs its own records only. Method: writers that write where they are told, or later, or
not."""

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.storage.file.make import (
    SIZE,
    aligned,
    delete,
    files_of,
    has_all,
    has_none,
    held,
    keep,
    key_of,
    make_put,
    make_store,
    room_of,
)
from tests.wait import until
from tiercel.errors import StoreError
from tiercel.storage.file import direct
from tiercel.storage.file.segment import load

NAMES = {key_of(name): name for name in [*"abcdefgh", *(f"{n}:9000" for n in range(100))]}


class Writer:
    """Writes each time it is told, unless it is given another `outcome`."""

    def __init__(self, store, *outcomes):
        self.store, self.outcomes, self.told = store, list(outcomes), []

    def begin(self, file, offset, keys):
        self.told.append((os.fdopen(os.dup(file), "r+b", buffering=0), offset, [NAMES[key] for key in keys]))

    def write(self, told):
        file, offset, names = told
        with file:
            data = b"".join(bytes(part) for name in names for part in padded_parts(name))
            direct.write(file.fileno(), offset, [aligned(data)])

    def end(self):
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome:
            raise OSError(outcome, "injected")
        self.write(self.told[-1])


def padded_parts(name):
    parts = make_put(name).parts
    size = sum(map(len, parts))
    return [*parts, bytes(direct.padded(size) - size)]


def put_by(store, writer, *names):
    sizes = [make_put(name).bytes for name in names]
    return store.put_by(writer, [key_of(name) for name in names], sizes)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


def after(store, path):
    """The store after a kill, and after it was closed."""
    copy = path.parent / "copy"
    shutil.copytree(path, copy)
    (copy / "LOCK").unlink()
    with make_store(copy) as scanned:
        yield scanned
    store.close()
    with make_store(path) as sealed:
        yield sealed


def test_what_another_process_writes_is_kept(path):
    store = make_store(path, segment_bytes=SIZE // 4)
    writer = Writer(store)
    assert put_by(store, writer, "a", "b", "a", "c") == [True] * 4
    keep(store, "d")
    assert put_by(store, writer, "a", "e", "d") == [True] * 3
    assert [names for _, _, names in writer.told] == [["a", "b", "c"], ["e"]]
    delete(store, "b")
    for again in after(store, path):
        assert held(again, *"abcde") == [True, False, True, True, True] and again.check().bad == []


def test_a_batch_is_written_where_there_is_room(path):
    with make_store(path) as store:
        names, writer = [f"{n}:9000" for n in range(40)], Writer(store)
        assert put_by(store, writer, *names) == [True] * 40
        assert has_all(store, *names)
        assert store.stats()["segments"] > 4


@pytest.mark.parametrize("late", [False, True])
def test_others_that_wrote_at_the_same_time_are_written_again(path, late):
    """`late`: a process that was given up writes after all, behind everybody's back."""
    store = make_store(path, segment_bytes=SIZE // 4)
    keep(store, "a")
    good, bad = Writer(store), Writer(store, errno.ECONNABORTED, errno.ECONNABORTED)
    with ThreadPoolExecutor(2) as crew:
        with store._log.commit.alone():
            kept = [crew.submit(put_by, store, *each) for each in ((bad, "b", "c"), (good, "d", "e"))]
            until(lambda: len(store._log.commit.queue) == 2, "both wait for their turn")
        with pytest.raises(StoreError, match="injected"):
            kept[0].result()
        assert kept[1].result() == [True, True]
    assert len(bad.told) == 2 and len(good.told) == 2
    keep(store, "f")
    assert has_all(store, "a", "d", "e", "f") and has_none(store, "b", "c")
    for told in bad.told:
        if late:
            bad.write(told)
        told[0].close()
    assert has_all(store, "a", "d", "e", "f") and has_none(store, "b", "c") and store.check().bad == []
    first = load(path / files_of(path)[0], 1, direct_io=False, read_only=True)
    assert first.sealed, "its table was not written over"
    first.close()
    delete(store, "b")
    for again in after(store, path):
        assert has_all(again, "a", "d", "e", "f") and has_none(again, "b") and again.check().bad == []
        assert held(again, "c")[0] in ((True, False) if late else (False,))


def test_where_another_process_may_still_be_writing_nothing_else_is_written(path, tmp_path):
    """The owner was killed while it waited for that process."""
    store = make_store(path, segment_bytes=SIZE // 4)
    keep(store, "a")
    shutil.copytree(path, tmp_path / "copy")
    (tmp_path / "copy" / "LOCK").unlink()
    (late,) = files_of(tmp_path / "copy")
    with make_store(tmp_path / "copy", segment_bytes=SIZE // 4) as again:
        keep(again, "d", "e")
        with (tmp_path / "copy" / late).open("r+b") as file:
            file.seek(room_of("a"))
            file.write(b"".join(bytes(part) for part in padded_parts("b")))
        assert has_all(again, "a", "d", "e")
    with make_store(tmp_path / "copy", segment_bytes=SIZE // 4) as again:
        assert has_all(again, "a", "d", "e") and again.check().bad == []
    store.close()
