"""Goal: what was used is known after a restart, and nothing depends on it. Method: stores that are closed,
killed and damaged between uses; what they let go tells what they know."""

import shutil
import struct

import pytest
import xxhash

from tests.storage.file.make import has_all, held, keep, make_store
from tiercel.errors import ConfigError
from tiercel.storage.file import index

NAMES = [f"{number}:12000" for number in range(200)]
"""Three of them fill a segment, 45 of them the store."""
HOT = NAMES[:15]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


def survivors(path):
    """How many of the hot ones are left after others came, without being read again."""
    with make_store(path) as store:
        for name in NAMES[100:115]:
            keep(store, name)
        return sum(held(store, *HOT))


def filled(path):
    store = make_store(path)
    keep(store, *NAMES[:42])
    held(store, *HOT)
    return store


def test_what_was_used_before_a_restart_stays_after_it(path):
    filled(path).close()
    assert survivors(path) == len(HOT)


@pytest.mark.parametrize("damage", ["gone", "empty", "flipped", "cut"])
def test_without_it_the_order_of_writing_decides_and_nothing_is_lost(path, damage):
    filled(path).close()
    file = path / "uses"
    data = file.read_bytes()
    file.unlink()
    if damage == "empty":
        file.write_bytes(b"")
    elif damage == "flipped":
        file.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    elif damage == "cut":
        file.write_bytes(data[:-8])
    with make_store(path, read_only=True) as store:
        assert has_all(store, *NAMES[:42])
    assert survivors(path) < len(HOT)


@pytest.mark.parametrize(
    ("clock", "body"),
    [
        (1, struct.pack("<QQ", 1, 2**40)),
        (1, struct.pack("<QQ", 1, 2**63)),
        (1, b"short"),
        (2**64 - 1, b""),
        (1, struct.pack("<QQQQ", 1, 1, 2**64 - 1, 0)),
        (1, struct.pack("<QQQQ", 1, 1, 0, 2**64 - 1)),
    ],
)
def test_one_that_somebody_else_wrote_is_not_believed(path, clock, body):
    """Though its checksum is right."""
    filled(path).close()
    head = index._HEAD.pack(index._MAGIC, index._VERSION, clock, xxhash.xxh3_128_digest(body))
    (path / "uses").write_bytes(head + body)
    with make_store(path) as store:
        assert has_all(store, *NAMES[:42])
        keep(store, NAMES[42])


def test_something_else_of_its_name_is_not_ours(path, tmp_path):
    filled(path).close()
    (path / "uses").unlink()
    (path / "uses").symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match="uses"):
        make_store(path)
    assert not (tmp_path / "outside").exists()


def test_it_is_written_now_and_then_so_a_kill_costs_only_what_came_since(path, monkeypatch):
    monkeypatch.setattr(index, "BYTES_PUT_PER_BYTE", 1)
    store = filled(path)
    keep(store, *NAMES[42:45])
    copy = path.with_name("copy")
    shutil.copytree(path, copy)
    store.close()
    (copy / "LOCK").unlink()
    with make_store(copy) as killed:
        assert has_all(killed, *NAMES[42:45])
    assert survivors(copy) == len(HOT)


def test_what_came_after_it_was_written_counts_as_used_later(path):
    """An old file beside newer segments: those are not taken for the coldest."""
    filled(path).close()
    old = (path / "uses").read_bytes()
    with make_store(path) as store:
        keep(store, *NAMES[60:75])
    (path / "uses").write_bytes(old)
    with make_store(path) as store:
        keep(store, *NAMES[100:109])
        assert has_all(store, *NAMES[60:75]) and has_all(store, *HOT)


def test_a_reader_writes_nothing(path):
    filled(path).close()
    before = (path / "uses").stat().st_mtime_ns
    with make_store(path, read_only=True) as store:
        held(store, *NAMES[:42])
    assert (path / "uses").stat().st_mtime_ns == before
