"""Goal: one process writes, and no file of others is harmed. Method: a real second process, any folders."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage.file.make import (
    delete,
    files_of,
    has_all,
    has_none,
    held,
    keep,
    key_of,
    make_put,
    make_store,
)
from tiercel.errors import ConfigError, StoreError
from tiercel.storage.file import direct, folder, queue

ROOT = Path(__file__).parents[3]
NAMES = [f"{number}:12000" for number in range(60)]

OTHER = """
import sys
from pathlib import Path
from tests.storage.file.make import keep, make_store
store = make_store(Path(sys.argv[1]))
keep(store, "theirs")
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def other_process(path):
    """A process that has the store open, until it is killed."""
    command = [sys.executable, "-c", OTHER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout.readline() == b"open\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_and_told_who_has_it(path, other_process):
    with pytest.raises(ConfigError, match=f"is open in process {other_process.pid};"):
        make_store(path)
    other_process.kill()
    other_process.wait()
    with make_store(path) as store:
        assert has_all(store, "theirs")


def test_opening_twice_in_one_process_is_refused_too(path):
    with make_store(path), pytest.raises(ConfigError, match=f"process {os.getpid()};"):
        make_store(path)
    make_store(path).close()


def test_a_reader_beside_the_owner_sees_what_was_whole_when_it_opened(path, other_process):
    with make_store(path, read_only=True) as reader:
        assert has_all(reader, "theirs") and reader.stats()["read_only"]


def test_a_reader_keeps_what_it_found_also_when_the_owner_lets_it_go(path):
    with make_store(path) as store:
        keep(store, "a", "b")
        with make_store(path, read_only=True) as reader:
            keep(store, "c")
            delete(store, "a")
            assert held(reader, "a", "b", "c") == [True, True, False]
            store.clear()
            keep(store, *NAMES)
            assert held(reader, "a", "b", "c") == [True, True, False]
        with make_store(path, read_only=True) as reader:
            assert has_none(reader, "a", "b", "c") and has_all(reader, NAMES[-1])


def test_a_reader_changes_nothing(path):
    with make_store(path) as store:
        keep(store, "a", "b")
        delete(store, "b")
        before = {name: (path / name).read_bytes() for name in files_of(path)}
        with make_store(path, read_only=True) as reader:
            for change in (
                lambda: reader.put([make_put("c")]),
                lambda: reader.delete([key_of("a")]),
                reader.clear,
                reader.compact,
            ):
                with pytest.raises(StoreError, match="reading only"):
                    change()
            assert held(reader, "a", "b", "c") == [True, False, False]
        assert {name: (path / name).read_bytes() for name in files_of(path)} == before


def test_a_reader_that_sees_a_file_go_looks_again(path, monkeypatch):
    """What was deleted before it opened is gone for it, though the note went while it was opening."""
    with make_store(path) as store:
        keep(store, *NAMES[:12])
        delete(store, *NAMES[:12:4])
        opened = direct.Calls.open

        class Slow(direct.Calls):
            def open(self, file, flags):
                if file.endswith(files_of(path)[-1]):
                    monkeypatch.setattr(direct, "calls", direct.Calls())
                    store.compact()
                return opened(self, file, flags)

        monkeypatch.setattr(direct, "calls", Slow())
        with make_store(path, read_only=True) as reader:
            assert has_none(reader, *NAMES[:12:4]) and has_all(reader, *NAMES[1:12:4])


def test_a_reader_does_not_make_a_folder(path):
    with pytest.raises(ConfigError, match="No such file"):
        make_store(path, read_only=True)
    assert not path.exists()


def test_a_folder_with_files_of_somebody_else_is_refused_and_left_alone(path):
    path.mkdir()
    (path / "thesis.odt").write_text("mine")
    with pytest.raises(ConfigError, match=r"thesis\.odt"):
        make_store(path)
    assert [file.name for file in path.iterdir()] == ["thesis.odt"]


@pytest.mark.parametrize(
    "name",
    [
        "segment-1.tcs",
        "segment-00000000001.tcs",
        "segment-0000000001.tcs.bak",
        "segment-9999999999.tcs",
        "segment-99999999999999999999.tcs",
    ],
)
def test_a_name_that_is_almost_a_segments_is_not_one_of_ours(path, name):
    path.mkdir()
    (path / name).write_text("mine")
    with pytest.raises(ConfigError, match="does not belong to a store"):
        make_store(path)


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
@pytest.mark.parametrize("name", ["LOCK", "segment-0000000001.tcs"])
def test_what_is_no_file_is_not_one_of_ours(path, name, kind, read_only):
    """It is not followed, not waited for, and not written to."""
    path.mkdir()
    outside = path.with_name("outside")
    if kind == "link":
        outside.write_text("mine")
    if kind in ("link", "dangling link"):
        (path / name).symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(path / name)
    else:
        (path / name).mkdir()
    with pytest.raises(ConfigError, match="does not belong to a store"):
        make_store(path, read_only=read_only)
    assert [file.name for file in path.iterdir()] == [name]
    assert not outside.exists() or outside.read_text() == "mine"


def test_a_link_that_comes_after_the_folder_was_looked_at_is_not_followed(path, monkeypatch):
    path.mkdir()
    outside = path.with_name("outside")
    outside.write_text("mine")
    monkeypatch.setattr(folder.Folder, "numbers", lambda _: [1])
    (path / "LOCK").symlink_to(outside)
    with pytest.raises(ConfigError, match="symbolic links"):
        make_store(path)
    (path / "LOCK").unlink()
    (path / "segment-0000000001.tcs").symlink_to(outside)
    with pytest.raises(StoreError, match=r"symbolic links.*segment-0000000001"):
        make_store(path)
    assert outside.read_text() == "mine"


def test_an_opening_that_fails_gives_back_what_it_took(path, monkeypatch):
    with make_store(path) as store:
        keep(store, "a")

    class Exhausted(direct.Calls):
        def open(self, path, flags):
            if path.endswith(".tcs"):
                raise OSError(errno.EMFILE, "too many open files")
            return super().open(path, flags)

    made, make = [], queue.Queue.__init__
    monkeypatch.setattr(queue.Queue, "__init__", lambda self: made.append(self) or make(self))
    monkeypatch.setattr(direct, "calls", Exhausted())
    open_files = len(files_open())
    for _ in range(5):
        with pytest.raises(StoreError, match="too many open files"):
            make_store(path)
    assert len(made) <= 1, "queues of the kernel"
    assert len(files_open()) == open_files


def files_open() -> list[Path]:
    return [file.resolve() for file in Path("/proc/self/fd").iterdir()]


def in_a_fork(work) -> bool:
    """Whether it returns True in a forked process."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def test_a_fork_can_neither_read_nor_write(path):
    """Its parent goes on writing where it would write."""
    with make_store(path) as store:
        keep(store, "a")

        def refused():
            for call in (lambda: keep(store, "b"), lambda: held(store, "a"), store.clear, store.stats):
                with pytest.raises(StoreError, match=f"process {os.getppid()}"):
                    call()
            store.close()
            return True

        assert in_a_fork(refused)
        keep(store, "c")
        assert held(store, "a", "b", "c") == [True, False, True]
    with make_store(path) as store:
        assert held(store, "a", "b", "c") == [True, False, True]


def test_a_fork_does_not_hold_the_lock_or_the_files(path):
    with make_store(path) as store:
        keep(store, "a")
        ours = {file.resolve() for file in path.iterdir()}

        assert ours <= set(files_open())
        assert in_a_fork(lambda: not ours & set(files_open()))
        with pytest.raises(ConfigError, match="is open in process"):
            make_store(path)
        assert has_all(store, "a")


def test_a_file_system_of_its_own_is_not_refused_for_what_is_in_every_one(path):
    (path / "lost+found").mkdir(parents=True)
    make_store(path).close()


@pytest.mark.parametrize("kind", ["a file", "in a file"])
def test_what_is_no_folder_is_refused(path, kind):
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is not a folder"):
        make_store(path if kind == "a file" else path / "store")
    assert path.read_text() == "mine"


def test_a_folder_that_may_not_be_written_is_refused(path, monkeypatch):
    path.mkdir()

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folder.os, "open", refuse)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="Permission denied"):
        make_store(path)


def test_the_files_are_for_their_owner_only(path):
    with make_store(path) as store:
        keep(store, "a")
        assert {(path / name).stat().st_mode & 0o077 for name in [*files_of(path), "LOCK"]} == {0}
