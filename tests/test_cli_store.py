"""Goal: a store can be looked into, checked, compacted and cleared from a shell, also beside its server.
Method: the real command on real folders, and on a real Redis."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.servers import redis_server
from tests.terminal import Terminal
from tests.test_cli import run
from tiercel.storage.base import Put
from tiercel.storage.file import FileStore
from tiercel.storage.memory import MemoryStore
from tiercel.storage.open import open_store
from tiercel.storage.record import Flaw, Form, Header, pack, parse
from tiercel.types import Kind

SIZE = 64 * 1024**2
PAYLOAD_BYTES = 5000
FORM = b"f".hex() * 16


def put_of(number: int, kind: Kind = Kind.PAGE, align: int = FileStore.align) -> Put:
    page_key, payload = bytes([number]) * 32, bytes([number]) * PAYLOAD_BYTES
    form = Form(kind, b"f" * 16, (("rows", (0,), PAYLOAD_BYTES),), PAYLOAD_BYTES, align)
    return Put(form.key(page_key), [form.header(page_key, [payload]), payload])


PUTS = [put_of(1), put_of(2), put_of(2, Kind.TAIL)]
RECORD_BYTES = PUTS[0].bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a store with two pages and a tail."""
    path = tmp_path / "store"
    with FileStore(path, SIZE) as store:
        assert store.put(PUTS) == [True] * 3
    return path


def url_of(folder: Path) -> str:
    return f"file://{folder}?size={SIZE}"


def damage(folder: Path, number: int) -> None:
    """One byte of the payloads of a number, wherever they are."""
    pattern = bytes([number]) * PAYLOAD_BYTES
    for segment in folder.glob("segment-*"):
        data = bytearray(segment.read_bytes())
        at = data.find(pattern)
        while at >= 0:
            data[at + 100] ^= 1
            at = data.find(pattern, at + PAYLOAD_BYTES)
        segment.write_bytes(data)


def test_stat_tells_what_the_store_says(folder: Path) -> None:
    numbers = json.loads(run("store", "stat", url_of(folder), "--json").stdout)
    assert (numbers["records"], numbers["bytes_most"]) == (3, SIZE)
    lines = dict(line.split(maxsplit=1) for line in run("store", "stat", url_of(folder)).stdout.splitlines())
    assert (lines["records"], lines["bytes_most"]) == ("3", f"{SIZE:,}")


def test_ls_tells_kind_form_key_and_bytes(folder: Path) -> None:
    listed = json.loads(run("store", "ls", url_of(folder), "--json").stdout)
    assert sorted(listed, key=str) == [
        {"kind": "page", "form": FORM, "key": "01" * 32, "bytes": RECORD_BYTES},
        {"kind": "page", "form": FORM, "key": "02" * 32, "bytes": RECORD_BYTES},
        {"kind": "tail", "form": FORM, "key": "02" * 32, "bytes": RECORD_BYTES},
    ]
    lines = sorted(run("store", "ls", url_of(folder)).stdout.splitlines())
    assert [line.split() for line in lines] == [
        ["page", FORM, "01" * 32, f"{RECORD_BYTES:,}"],
        ["page", FORM, "02" * 32, f"{RECORD_BYTES:,}"],
        ["tail", FORM, "02" * 32, f"{RECORD_BYTES:,}"],
    ]
    assert len(run("store", "ls", url_of(folder), "--limit", "2").stdout.splitlines()) == 2


def test_check_tells_how_far_it_is(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a bar on a terminal, and as a line in the log. A store that can not count has no end of the bar."""

    class Uncounted(MemoryStore):
        def stats(self) -> dict[str, Any]:
            return {"records": None, "bytes": None}

    own = Uncounted()
    with open_store(url_of(folder), read_only=True) as store, caplog.at_level("INFO", "tiercel.progress"):
        assert store.check().records == 3
        own.put([put_of(1), put_of(2)])
        assert own.check().records == 2
    told = [record.message.split(" in ")[0] for record in caplog.records]
    assert told == ["checking: 3 records", "checking: 2 records"]


def test_check_of_a_good_store_is_content(folder: Path) -> None:
    done = run("store", "check", url_of(folder))
    assert (done.returncode, done.stdout) == (0, "3 records, 0 of them bad\n")
    assert json.loads(run("store", "check", url_of(folder), "--json").stdout) == {"records": 3, "bad": []}


def test_check_lists_what_is_bad_and_says_so_to_programs(folder: Path) -> None:
    damage(folder, 2)
    done = run("store", "check", url_of(folder))
    assert done.returncode == 1
    *bad, last = done.stdout.splitlines()
    assert sorted(line.split(maxsplit=3) for line in bad) == [
        ["page", FORM, "02" * 32, Flaw.CHECKSUM.value],
        ["tail", FORM, "02" * 32, Flaw.CHECKSUM.value],
    ]
    assert last == "3 records, 2 of them bad"
    told = run("store", "check", url_of(folder), "--json")
    assert told.returncode == 1
    bad = {"kind": "tail", "form": FORM, "key": "02" * 32, "flaw": "CHECKSUM", "why": Flaw.CHECKSUM.value}
    assert bad in json.loads(told.stdout)["bad"]


def older(put: Put) -> Put:
    """The same as a record of format version 2."""
    header = parse(put.parts[0])
    assert isinstance(header, Header)
    old = header._replace(version=2, grains=0)
    return Put(old.key, [pack(old), *put.parts[1:]])


def test_records_of_an_older_format_are_told_apart_checked_and_removed(folder: Path) -> None:
    old = [older(put_of(number)) for number in (7, 8)]
    with FileStore(folder, SIZE) as store:
        assert store.put(old) == [True, True]
        keys = [*(put.key for put in PUTS), *(put.key for put in old)]
        assert store.contains(keys) == [True] * 5, "an old and a new record of a page do not meet"
    for segment in folder.glob("segment-*"):  # without its table a segment is scanned
        segment.write_bytes(segment.read_bytes()[:-4096])
    stat = json.loads(run("store", "stat", url_of(folder), "--json").stdout)
    assert (stat["records"], stat["records_older"], stat["bytes_older"]) == (5, 2, 2 * RECORD_BYTES)
    assert run("store", "check", url_of(folder)).stdout == "5 records, 0 of them bad\n"
    assert (
        sum(line.startswith("page, v2") for line in run("store", "ls", url_of(folder)).stdout.splitlines())
        == 2
    )
    done = run("store", "compact", url_of(folder)).stdout
    assert done.startswith("2 records of older formats removed, ")
    stat = json.loads(run("store", "stat", url_of(folder), "--json").stdout)
    assert (stat["records"], stat["records_older"], stat["bytes_older"]) == (3, 0, 0)


def test_looking_works_beside_a_server_and_compacting_does_not(folder: Path) -> None:
    with FileStore(folder, SIZE) as server:
        assert json.loads(run("store", "stat", url_of(folder), "--json").stdout)["records"] == 3
        for looking in ("ls", "check"):
            assert run("store", looking, url_of(folder)).returncode == 0
        done = run("store", "compact", url_of(folder))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        assert server.contains([PUTS[0].key]) == [True]


def test_looking_changes_nothing(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for looking in ("stat", "ls", "check"):
        run("store", looking, url_of(folder))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_compact_tells_how_much_it_gave_back(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path, SIZE) as store:
        for number in range(100):
            store.put([put_of(number)])
        store.delete([put_of(number).key for number in range(99)])
    before = sum(each.stat().st_size for each in path.iterdir())
    done = run("store", "compact", url_of(path), "--json")
    assert done.returncode == 0
    given = json.loads(done.stdout)["bytes"]
    assert given > 50 * RECORD_BYTES
    assert sum(each.stat().st_size for each in path.iterdir()) < before - 50 * RECORD_BYTES
    assert run("store", "compact", url_of(path)).stdout == "0 B given back\n"
    assert run("store", "check", url_of(path)).stdout == "1 records, 0 of them bad\n"


def records_in(folder: Path) -> int:
    with FileStore(folder, SIZE) as store:
        return store.contains([put.key for put in PUTS]).count(True)


def test_clear_removes_everything_and_tells_how_much(folder: Path) -> None:
    done = run("store", "clear", url_of(folder), "--yes", "--json")
    assert json.loads(done.stdout) == {"records": 3, "bytes": 3 * RECORD_BYTES}
    assert records_in(folder) == 0


def test_clear_of_a_shared_database_leaves_what_is_not_ours() -> None:
    with (
        redis_server() as server,
        open_store(server.url) as store,
        redis.Redis.from_url(server.client_url) as client,
    ):
        assert store.put([put_of(number, align=store.align) for number in (1, 2)]) == [True, True]
        client.set("another", "stays")
        size = sum(dict(store.keys()).values())
        done = run("store", "clear", server.url, "--yes")
        assert done.stdout == f"removed: 2 records, {size:,} B\n"
        assert list(store.keys()) == [] and client.get("another") == b"stays"


@pytest.mark.parametrize(("answer", "left", "code"), [("n", 3, 1), ("y", 0, 0)])
def test_clear_asks_on_a_terminal(folder: Path, answer: str, left: int, code: int) -> None:
    terminal = Terminal("store", "clear", url_of(folder), home=folder)
    assert "Remove 3 records" in terminal.read("[y/N]: ")
    terminal.press(answer.encode() + b"\r")
    terminal.__exit__(None)
    assert terminal.code == code
    assert records_in(folder) == left


def test_clear_removes_nothing_without_a_yes_nor_beside_a_server(folder: Path) -> None:
    with FileStore(folder, SIZE):
        beside = run("store", "clear", url_of(folder), "--yes")
    for done, why in ((beside, "is open in process"), (run("store", "clear", url_of(folder)), "--yes")):
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert why in done.stderr
    assert records_in(folder) == 3


@pytest.mark.parametrize("looking", ["stat", "ls", "check", "compact"])
@pytest.mark.parametrize("url", ["nonsense", "carrier-pigeon://loft", "file:///proc/version?size=1GiB"])
def test_a_url_that_is_no_store_is_one_line_and_exit_code_2(looking: str, url: str) -> None:
    done = run("store", looking, url)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tiercel: ")
    assert done.stderr.count("\n") == 1


def test_a_password_is_not_said_again() -> None:
    done = run("store", "stat", "redis://user:sesame@host:no/0")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "sesame" not in done.stderr


def test_a_folder_that_is_not_there_is_not_made_by_looking(tmp_path: Path) -> None:
    done = run("store", "stat", url_of(tmp_path / "none"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "none").exists()


def test_torch_is_not_loaded(folder: Path) -> None:
    for words in (["stat"], ["ls"], ["check"], ["compact"], ["clear", "--yes"]):
        code = (
            f"import sys; sys.argv = ['tiercel', 'store', *{words!r}, {url_of(folder)!r}]\n"
            "from tiercel.cli import main\n"
            "try: main()\n"
            "except SystemExit as end: assert not end.code\n"
            "assert 'torch' not in sys.modules and 'fastapi' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# A store of one's own


def test_a_store_that_keeps_the_contract_passes_and_is_told_check_by_check() -> None:
    done = run("store", "conformance", "tiercel.storage.memory:MemoryStore")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) > 20 and not any("FAILED" in line for line in lines)
    assert any("inapplicable" in line and "outlives" in line for line in lines)


FORGETFUL = """
from pathlib import Path
from tiercel.storage.memory import MemoryStore

class Forgetful(MemoryStore):
    def __init__(self, path):
        Path(path).touch()
        super().__init__()

    def get(self, wanted):
        return [False] * len(wanted)

class Full(MemoryStore):
    def stats(self):
        return {"records": 7, "bytes": 1}

    def clear(self):
        raise SystemExit("it was emptied")

class Blue(MemoryStore):
    def stats(self):
        return {"records": 0, "bytes": 0, "colour": "blue"}

class Shut(MemoryStore):
    def __init__(self):
        raise RuntimeError("it does not open")
"""


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As the installed command runs: it does not find modules of the current folder by itself (-P)."""
    (folder / "mine.py").write_text(FORGETFUL)
    words = [sys.executable, "-P", "-m", "tiercel.cli", "store", *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder)


def test_one_that_does_not_keep_it_fails_and_says_where(tmp_path: Path) -> None:
    done = run_in(tmp_path, "conformance", "mine:Forgetful?path=made", "--durable", "--json")
    assert done.returncode == 1
    outcomes = {each["check"]: each for each in json.loads(done.stdout)}
    assert outcomes["a_value_comes_back_as_it_was_put"]["outcome"] == "failed"
    assert "get answered [False]" in outcomes["a_value_comes_back_as_it_was_put"]["why"]
    assert outcomes["what_was_kept_outlives_the_store"]["outcome"] == "failed"
    assert outcomes["a_miss_is_an_answer"]["outcome"] == "passed"
    assert (tmp_path / "made").exists()


def test_a_class_in_the_current_folder_is_found_by_every_command(tmp_path: Path) -> None:
    assert "blue" in run_in(tmp_path, "stat", "mine:Blue").stdout


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("mine", "is none of file:"),
        ("mine:Forgetful", "missing a required argument: 'path'"),
        ("mine:Nobody", "can not be loaded"),
        ("nowhere:Store", "can not be loaded"),
        (":", "is none of file:"),
        ("json:dumps", "is not a class derived from"),
        ("mine:Shut", "it does not open"),
        ("mine:Full", "holds 7 records"),
    ],
)
def test_what_can_not_be_checked_is_one_line_and_exit_code_2(
    tmp_path: Path, source: str, message: str
) -> None:
    done = run_in(tmp_path, "conformance", source)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
