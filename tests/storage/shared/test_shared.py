"""Goal: several processes use one folder as if each had it alone, whoever of them ends, and how. Method: real
owners and real processes; `kill_loop`. (The contract: `tests/contract`.)"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.storage.file.kill_loop import ROOT
from tests.storage.file.make import (
    SEGMENT_BYTES,
    SIZE,
    files_of,
    got,
    has_all,
    has_none,
    keep,
    key_of,
    make_store,
)
from tests.storage.shared.kill_loop import run
from tests.storage.shared.make import kill_owner, make_shared, owner_of, wait_for_end
from tests.wait import until
from tiercel.errors import ConfigError, StoreError
from tiercel.storage.base import Put
from tiercel.storage.file import FileStore, direct
from tiercel.storage.open import open_store, why_not
from tiercel.storage.shared import SharedStore
from tiercel.storage.shared.owner import Owner
from tiercel.storage.shared.wire import Line, listen
from tiercel.threads import start

KILLS = int(os.environ.get("TIERCEL_KILLS", "24"))

SCRIPT = """
import sys
from pathlib import Path
from tests.storage.file.make import keep, has_all
from tests.storage.shared.make import make_shared
with make_shared(Path(sys.argv[1])) as store:
    for word in sys.argv[2:]:
        print(keep(store, word[1:]) if word[0] == "+" else has_all(store, word[1:]), flush=True)
"""


def ask(path, *words):
    """Another process: `+name` puts a record, `?name` looks for it."""
    command = [sys.executable, "-c", SCRIPT, str(path), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.split()


def log_of(path):
    return (path / "owner.log").read_text()


def test_what_one_process_puts_others_find(tmp_path):
    with make_shared(tmp_path / "a") as store:
        keep(store, "ours")
        assert ask(tmp_path / "a", "?ours", "+theirs", "?theirs") == ["True", "None", "True"]
        assert has_all(store, "ours", "theirs")
        assert store.stats()["processes"] == 1
        assert "Traceback" not in log_of(tmp_path / "a")


def test_it_outlives_those_who_use_it(tmp_path):
    with make_shared(tmp_path) as store:
        keep(store, "a")
        owner = owner_of(store)
    with make_shared(tmp_path) as store:
        assert owner_of(store) == owner, "it stays for a moment"
        assert has_all(store, "a")
    wait_for_end(owner)
    assert not (tmp_path / "SOCKET").exists()
    with make_store(tmp_path) as alone:
        assert has_all(alone, "a")
    with make_shared(tmp_path) as store:
        assert owner_of(store) != owner and has_all(store, "a")


def test_a_killed_owner_is_started_again_by_the_next_call(tmp_path):
    with make_shared(tmp_path) as first, make_shared(tmp_path) as second:
        keep(first, "a")
        kill_owner(first)
        keep(second, "b")
        assert has_all(first, "a", "b") and has_all(second, "a", "b")
        assert owner_of(first) == owner_of(second)


def test_all_connections_to_a_killed_owner_are_given_up_at_once(tmp_path):
    """Also those that nobody used when it died: a call is sent three times at most."""
    store = make_shared(tmp_path, 256 << 20, segment_bytes=None)
    with store:
        names = [f"{n}:{4 << 20}" for n in range(12)]
        keep(store, *names)  # in parts, each over a connection of its own
        assert len(store._open) > 3
        kill_owner(store)
        assert has_all(store, *names) and len(store._open) == 1


FORKING = """
import os, sys, time
from pathlib import Path
from tests.storage.shared.make import make_shared, owner_of
store = make_shared(Path(sys.argv[1]))
if (child := os.fork()) == 0:
    for file in (0, 1, 2):
        os.close(file)
    time.sleep(60)
    os._exit(0)
print(child, owner_of(store), flush=True)
os._exit(0)
"""


def test_a_forked_process_keeps_no_connection(tmp_path):
    """Of a process that ends without closing its store."""
    command = [sys.executable, "-c", FORKING, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True)
    child, owner = map(int, done.stdout.split())
    try:
        wait_for_end(owner)
    finally:
        os.kill(child, signal.SIGKILL)


def test_who_may_not_ask_the_owner_is_told_so(tmp_path, monkeypatch):
    def refuse(folder):
        raise PermissionError(13, "Permission denied")

    with make_shared(tmp_path):
        monkeypatch.setattr("tiercel.storage.shared.starting.connect", refuse)
        with pytest.raises(StoreError, match="can not be asked: .*Permission denied"):
            make_shared(tmp_path)


def test_an_owner_that_is_told_to_end_ends_well_and_another_goes_on(tmp_path):
    with make_shared(tmp_path) as store:
        keep(store, "a")
        owner = owner_of(store)
        os.kill(owner, signal.SIGTERM)
        wait_for_end(owner)
        assert has_all(store, "a") and owner_of(store) != owner
        assert "Traceback" not in log_of(tmp_path)


@pytest.mark.parametrize("kills", [KILLS])
def test_whoever_is_killed_nothing_is_lost(tmp_path, kills):
    run(tmp_path, kills, seed=1)


def test_processes_that_start_at_the_same_time_have_one_owner(tmp_path):
    stores, lock = [], threading.Lock()

    def open_one():
        store = make_shared(tmp_path)
        with lock:
            stores.append(store)

    threads = [threading.Thread(target=open_one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert len({owner_of(store) for store in stores}) == 1 and len(stores) == 8
        assert log_of(tmp_path).count("owns") == 1
    finally:
        for store in stores:
            store.close()


def test_all_open_it_with_the_same_options(tmp_path, monkeypatch):
    monkeypatch.setattr("tiercel.storage.shared.starting.START_S", 1.0)
    said = f"size = {2 * SIZE}: others have the store open with size = {SIZE}"
    with make_shared(tmp_path), pytest.raises(ConfigError, match=said):
        make_shared(tmp_path, 2 * SIZE)
    with make_shared(tmp_path, 2 * SIZE) as store:  # nobody else uses it: its owner ends first
        assert store.stats()["bytes_most"] == 2 * SIZE


def test_what_its_owner_can_not_do_is_told_here(tmp_path):
    with pytest.raises(ConfigError, match="size = 7: must be at least"):
        make_shared(tmp_path / "a", 7)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "letter.txt").touch()
    with pytest.raises(ConfigError, match=r"holds 'letter.txt'"):
        make_shared(tmp_path / "b")
    (tmp_path / "c").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        make_shared(tmp_path / "c")
    with make_shared(tmp_path / "d") as store:
        with pytest.raises(StoreError, match="must begin with the header of a record"):
            store.put([Put(key_of("a"), [b"no record at all"])])
        keep(store, "a")


def test_a_folder_that_one_process_has_alone_is_not_shared(tmp_path, monkeypatch):
    with make_store(tmp_path), pytest.raises(ConfigError, match=f"is open in process {os.getpid()}"):
        make_shared(tmp_path)
    with (
        make_shared(tmp_path) as store,
        pytest.raises(ConfigError, match=f"is open in process {owner_of(store)}"),
    ):
        make_store(tmp_path)


def test_the_path_of_a_folder_may_be_long(tmp_path):
    path = tmp_path / ("x" * 120) / ("y" * 120)
    with make_shared(path) as store:
        keep(store, "a")
        assert has_all(store, "a")


def test_records_may_be_larger_than_what_is_written_at_once(tmp_path):
    with make_shared(tmp_path, 256 << 20, segment_bytes=64 << 20) as store:
        keep(store, "small", f"large:{40 << 20}", "small too", f"other:{17 << 20}")
        assert has_all(store, "small", f"large:{40 << 20}", "small too", f"other:{17 << 20}")


def test_each_process_hears_of_what_was_evicted(tmp_path):
    with make_shared(tmp_path, 8 * SEGMENT_BYTES) as first:
        keep(first, *(f"{n}:6000" for n in range(20)))
        with make_shared(tmp_path, 8 * SEGMENT_BYTES) as second:
            keep(first, *(f"{n}:6000" for n in range(20, 100)))
            heard = first.removed()
            assert heard and set(heard) == set(second.removed())
            assert has_none(second, *(f"{n}:6000" for n in range(100) if key_of(f"{n}:6000") in set(heard)))
            assert first.removed() == second.removed() == []


def test_a_process_that_stops_while_it_writes_is_given_up_and_may_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr("tiercel.storage.shared.owner.WRITE_S", 0.5)
    write, stopped, goes_on = direct.write, threading.Event(), threading.Event()

    def stop_once(file, offset, views):
        if threading.current_thread().name == "late" and not stopped.is_set():
            stopped.set()
            assert goes_on.wait(60)
        write(file, offset, views)

    monkeypatch.setattr(direct, "write", stop_once)
    with owned_here(tmp_path) as owned, make_shared(tmp_path) as slow, make_shared(tmp_path) as other:
        late = start(lambda: keep(slow, "a", "b"), "late")
        assert stopped.wait(60)
        keep(other, "c", "d")
        assert not late.done() and has_none(other, "a", "b") and has_all(other, "c", "d")
        goes_on.set()  # it writes where it was told before, and is told another place then
        late.result(60)
        assert has_all(other, "a", "b", "c", "d") and owned.check().bad == []
    with make_store(tmp_path) as alone:
        assert has_all(alone, "a", "b", "c", "d")


def test_a_process_that_does_not_hear_where_to_write_is_given_up(tmp_path, monkeypatch):
    """It stops as soon as it has asked, and the socket has no room for the answer."""

    class Narrow(Line):
        def __init__(self, connection):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            super().__init__(connection)

    monkeypatch.setattr("tiercel.storage.shared.owner.WRITE_S", 0.5)
    monkeypatch.setattr("tiercel.storage.shared.owner.Line", Narrow)
    size, segment_bytes = 256 << 20, 64 << 20
    keys = [key_of(f"{n}") for n in range(4096)]
    with owned_here(tmp_path, size=size, segment_bytes=segment_bytes) as owned:
        other = SharedStore(tmp_path, size, free=0, segment_bytes=segment_bytes, linger_s=60.0)
        with other, other._line() as line:
            line.send({"call": "put", "sizes": [4096] * 4096}, keys)
            until(lambda: owned._log.commit._busy, "it is told where to write")
            keep(other, "a", "b")
            assert has_all(other, "a", "b") and not any(other.contains(keys))


@contextmanager
def owned_here(path, **options):
    """An owner in this process."""
    options = {"size": SIZE, "evict": "lru", "free": 0, "segment_bytes": SEGMENT_BYTES} | options
    with FileStore(path, **options) as owned, listen(str(path)) as listener:
        owner = Owner(owned, options, linger_s=60.0)
        serving = start(lambda: owner.serve(listener), "owner")
        yield owned
        owner.end()
        serving.result(60)


def test_what_is_evicted_while_it_is_read_is_missed_and_gives_its_space_back(tmp_path):
    """The segment goes between the owner's answer and the opening of the file."""
    with make_shared(tmp_path) as store:
        keep(store, "a", "b")
        for name in files_of(tmp_path):
            (tmp_path / name).rename(tmp_path / f"{name}.away")
        assert got(store, "a", "b") == [False, False]
        for name in list(tmp_path.iterdir()):
            if name.suffix == ".away":
                name.rename(name.with_suffix(""))
        assert has_all(store, "a", "b")


def test_no_file_of_a_segment_stays_open(tmp_path):
    """An evicted segment that somebody had open would keep its space on the disk."""
    with make_shared(tmp_path) as store:
        keep(store, *map(str, range(40)))
        assert has_all(store, *map(str, range(40)))
        files = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.exists()]
        assert not [file for file in files if "segment-" in file and str(tmp_path) in file]


def test_a_fork_leaves_the_store_to_its_parent(tmp_path):
    with make_shared(tmp_path) as store:
        keep(store, "a")
        child = os.fork()
        if child == 0:
            try:
                has_all(store, "a")
            except StoreError:
                store.close()
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert has_all(store, "a")


def test_an_owner_holds_nothing_of_the_process_that_started_it(tmp_path):
    """Whoever waits for the end of an engine's output must not wait for the owner of its store."""
    began_s = time.monotonic()
    path = tmp_path / "a"
    use = "from tiercel.storage.shared import SharedStore; SharedStore(sys.argv[1], 1 << 20, linger_s=30)"
    code = f"import sys; {use}"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, timeout=60, check=True
    )
    assert not done.stderr and time.monotonic() - began_s < 25
    owner = int((path / "LOCK").read_text())
    assert Path(f"/proc/{owner}").exists()
    os.kill(owner, signal.SIGTERM)
    wait_for_end(owner)


def test_it_is_opened_by_a_url(tmp_path):
    with open_store(f"shared://{tmp_path}/a?size=1MiB&linger_s=0.5") as store:
        keep(store, "a")
        assert has_all(store, "a")
    assert why_not(f"shared://{tmp_path}/a", [f"shared://{tmp_path}"]) == ""
    assert why_not(f"shared://{tmp_path}/a", [f"file://{tmp_path}"])
