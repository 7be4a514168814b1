"""Goal: one bad place costs one record, and the store is opened whatever is in its files. Method: a folder of
a store that was closed and one of a store that was killed; every block of every file is damaged in turn, by
a flipped bit or a disk that does not give it back. The rest must be there, also after compacting."""

import errno
import logging
import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from tests.storage.file.make import (
    aligned,
    delete,
    files_of,
    form_of,
    has_all,
    in_memory,
    keep,
    key_of,
    make_store,
    page_key,
    put,
    room_of,
    without_queue,
)
from tiercel.errors import StoreError
from tiercel.storage.base import Get
from tiercel.storage.file import direct
from tiercel.storage.file.segment import UNREADABLE_MOST, Table, note
from tiercel.storage.record import Header, Note, RecordKey, checksum, flaw_of, pack

NAMES = [f"{number}:{size}" for number, size in enumerate([100, 9000, 4096, 5000, 12_000, 1, 8192, 300] * 2)]
GONE = [NAMES[2], NAMES[9]]
THERE = [name for name in NAMES if name not in GONE]
BLOCK = 4096


@pytest.fixture
def place(tmp_path):
    with in_memory(tmp_path) as place:
        yield place


@pytest.fixture(params=["closed", "killed"])
def folder(place, request):
    """As it was left."""
    with make_store(place / "closed") as store:
        keep(store, *NAMES[:8])
        delete(store, GONE[0])
        keep(store, *NAMES[8:])
        delete(store, GONE[1])
        shutil.copytree(place / "closed", place / "killed")
    return place / request.param


def readable(store) -> set[str]:
    """What can be had of the names, every byte right. What can not be had of them is a miss, or wrong."""
    wanted = []
    for name in NAMES:
        form = form_of(name)
        parts = [memoryview(bytearray(form.header_bytes)), memoryview(bytearray(form.payload_bytes))]
        wanted.append(Get(key_of(name), parts))
    return {
        name
        for name, get, hit in zip(NAMES, wanted, store.get(wanted), strict=True)
        if hit and form_of(name).flaw(get.parts[0], page_key(name), get.parts[1:]) is None
    }


def touched_by(data: bytes, block: int) -> set[str]:
    """Which names a block of a segment is about: of its record, or of the note that it is gone."""
    names = set()
    for name in NAMES:
        at = data.find(form_of(name).header(page_key(name), [b""])[:16])
        while at >= 0 and data[at + 40 : at + 72] != page_key(name):
            at = data.find(data[at : at + 16], at + BLOCK)
        if at >= 0 and at <= block < at + room_of(name):
            names.add(name)
        if data[block:].startswith(note(Note.REMOVED, key_of(name))[:100]):
            names.add(name)
    return names


def blocks(folder: Path):
    for name in files_of(folder):
        data = (folder / name).read_bytes()
        assert len(data) % BLOCK == 0
        for block in range(0, len(data), BLOCK):
            yield name, data, block


def check(store, suspects: set[str]) -> None:
    """All but the suspects are as they were; and so it stays when everything is copied."""
    found = readable(store)
    assert set(THERE) - found <= suspects and found - set(THERE) <= suspects
    assert len(set(THERE) - found) <= 1
    keep(store, "more")
    store.compact()
    assert readable(store) == found and {key for key, _ in store.check().bad} <= set(map(key_of, suspects))


@pytest.mark.parametrize("byte", [0, 8, 16, 2000])
def test_a_flipped_bit_costs_one_record(folder, place, byte):
    """In the magic, the version, the length, and in what follows."""
    costs = 0
    for name, data, block in blocks(folder):
        copy = place / "copy"
        shutil.copytree(folder, copy)
        damaged = bytearray(data)
        damaged[block + byte] ^= 1
        (copy / name).write_bytes(damaged)
        suspects = touched_by(data, block)
        with make_store(copy) as store:
            check(store, suspects)
            costs += len(set(THERE) - readable(store))
        with make_store(copy) as store:
            assert set(THERE) - readable(store) <= suspects
        shutil.rmtree(copy)
    assert costs > len(THERE)


class BadBlock(direct.Calls):
    """A disk that does not give back some blocks of a file."""

    def __init__(self, name: str, bad: set[int], code: int = errno.EIO) -> None:
        self.name, self.bad, self.code = name, bad, code

    def fails(self, file, offset, views) -> bool:
        if Path(f"/proc/self/fd/{file}").readlink().name != self.name:
            return False
        return any(offset < block + BLOCK and block < offset + sum(map(len, views)) for block in self.bad)

    def preadv(self, file, views, offset):
        if self.fails(file, offset, views):
            raise OSError(self.code, "the disk does not give it back")
        return super().preadv(file, views, offset)


@pytest.mark.parametrize("queued", [True, False])
def test_a_block_that_can_not_be_read_costs_one_record(folder, place, monkeypatch, queued):
    read = direct.Queue.read  # type: ignore[attr-defined]

    def read_some(queue, asked):
        answers = read(queue, asked)
        return [
            -errno.EIO if direct.calls.fails(file, offset, views) else answer  # type: ignore[attr-defined]
            for answer, (file, offset, views) in zip(answers, asked, strict=True)
        ]

    if not queued:
        without_queue(monkeypatch)
    for name, data, block in blocks(folder):
        copy = place / "copy"
        shutil.copytree(folder, copy)
        suspects = touched_by(data, block)
        with monkeypatch.context() as context:
            context.setattr(direct, "calls", BadBlock(name, {block}))
            context.setattr(direct.Queue, "read", read_some)  # type: ignore[attr-defined]
            with make_store(copy) as store:
                found = readable(store)
                assert set(THERE) - found <= suspects and found - set(THERE) <= suspects
                keep(store, "more")
        with make_store(copy) as store:
            assert readable(store) == set(THERE), "nothing was destroyed: the disk may be well again"
        with monkeypatch.context() as context:
            context.setattr(direct, "calls", BadBlock(name, {block}, errno.ENODATA))
            context.setattr(direct.Queue, "read", read_some)  # type: ignore[attr-defined]
            with make_store(copy) as store:
                check(store, suspects)
        shutil.rmtree(copy)


def test_what_is_damaged_is_counted_and_named(folder, monkeypatch, caplog):
    name = files_of(folder)[-1]
    (folder / name).write_bytes((folder / name).read_bytes()[:-BLOCK])  # no table
    monkeypatch.setattr(direct, "calls", BadBlock(name, {0}))
    with caplog.at_level(logging.WARNING), make_store(folder) as store:
        assert store.stats()["damaged"] == 1
    assert name in caplog.text and "unreadable at bytes [0]" in caplog.text


def test_a_disk_that_gives_nothing_back_costs_nothing_once_it_does(folder, monkeypatch):
    with monkeypatch.context() as context:
        for name in files_of(folder):
            context.setattr(direct, "calls", BadBlock(name, set(range(0, 1024**2, BLOCK))))
            make_store(folder).close()
    with make_store(folder) as store:
        assert readable(store) == set(THERE)


def test_of_a_segment_with_many_bad_places_the_rest_is_not_tried(place, monkeypatch):
    """Each of them can take the disk seconds."""
    with make_store(place / "store", 2**20, segment_bytes=2**18) as store:
        keep(store, *NAMES)
        shutil.copytree(place / "store", place / "killed")
    (name,) = files_of(place / "killed")
    calls = BadBlock(name, set(range(BLOCK, 1024**2, BLOCK)))
    tried = []
    monkeypatch.setattr(calls, "fails", lambda *asked: tried.append(asked) or BadBlock.fails(calls, *asked))
    monkeypatch.setattr(direct, "calls", calls)
    with make_store(place / "killed") as store:
        assert readable(store) == set()
    assert len(tried) < 8 * UNREADABLE_MOST


def test_a_segment_that_can_not_be_opened_is_set_aside(folder, monkeypatch, caplog):
    first, *_ = files_of(folder)

    class Calls(direct.Calls):
        def open(self, path, flags):
            if path.endswith(first):
                raise OSError(errno.EIO, "bad inode")
            return super().open(path, flags)

    with monkeypatch.context() as context, caplog.at_level(logging.WARNING):
        context.setattr(direct, "calls", Calls())
        with make_store(folder) as store:
            assert set(THERE) > readable(store) > set()
            keep(store, "more")
            assert min(store.stats()["bytes_on_disk"], store.stats()["bytes"]) > 0
    assert first in caplog.text
    with make_store(folder) as store:
        assert readable(store) == set(THERE)


@pytest.mark.parametrize("call", ["open", "fdatasync"])
def test_what_else_fails_at_opening_is_told_with_the_name_of_the_file(place, monkeypatch, call):
    with make_store(place / "store") as store:
        keep(store, *NAMES[:3])
        shutil.copytree(place / "store", place / "killed")
    (name,) = files_of(place / "killed")

    class Calls(direct.Calls):
        def open(self, path, flags):
            if call == "open" and path.endswith(name):
                raise OSError(errno.EMFILE, "too many")
            return super().open(path, flags)

        def fdatasync(self, file):
            raise OSError(errno.EIO, "gone")

    with monkeypatch.context() as context:
        context.setattr(direct, "calls", Calls())
        with pytest.raises(StoreError, match=name):
            make_store(place / "killed")
    with make_store(place / "killed") as store:
        assert readable(store) == set(NAMES[:3])


def damage(store, name: str, byte: int) -> None:
    """Flip a bit of a record while the store is open."""
    segment, row = store._index.find(key_of(name))
    with segment.path.open("r+b") as file:
        file.seek(segment.table.offsets[row] + byte)
        (old,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([old ^ 1]))
        os.fsync(file.fileno())


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("byte", [0, 40, 5000], ids=["magic", "key", "payload"])
def test_a_put_of_a_record_that_is_listed_and_damaged_writes_it_anew(place, noticed, byte):
    with make_store(place / "store") as store:
        keep(store, "a:9000", "b:9000", "c:9000")
        damage(store, "b:9000", byte)
        if noticed:
            form = form_of("b:9000")
            read = Get(key_of("b:9000"), [memoryview(bytearray(form.record_bytes))])
            assert store.get([read]) == [False] or flaw_of(read.parts[0], read.key) is not None
        assert store.contains([key_of("b:9000")]) == [True]
        assert put(store, "a:9000", "b:9000", "b:9000", "c:9000") == [True] * 4
        assert has_all(store, "a:9000", "b:9000", "c:9000") and store.check().bad == []
        assert store.stats()["records"] == 3
    with make_store(place / "store") as store:
        assert has_all(store, "a:9000", "b:9000", "c:9000")


def test_a_put_of_a_record_that_is_whole_writes_nothing_and_is_no_use_of_it(place):
    with closing(make_store(place / "store")) as store:
        keep(store, "a:9000", "b:9000")
        (segment,) = store._index.segments.values()
        end, uses = segment.table.end, bytes(segment.used) + bytes(segment.hits)
        keep(store, "a:9000", "b:9000")
        assert segment.table.end == end and bytes(segment.used) + bytes(segment.hits) == uses


def test_a_put_of_a_damaged_record_that_finds_no_room_answers_false(place, monkeypatch):
    with closing(make_store(place / "store")) as store:
        keep(store, "a:9000", "b:9000")
        damage(store, "b:9000", 5000)
        with monkeypatch.context() as context:
            context.setattr(store._log, "append", lambda records: 0)
            assert put(store, "a:9000", "b:9000") == [True, False]


# What somebody else wrote


def test_a_note_about_no_name_is_passed_over(place):
    with make_store(place / "store") as store:
        keep(store, *NAMES[:3])
        shutil.copytree(place / "store", place / "killed")
    (name,) = files_of(place / "killed")
    data = bytearray((place / "killed" / name).read_bytes())
    at = sum(map(room_of, NAMES[:3]))
    odd = pack(Header(Note.REMOVED, BLOCK, 0, bytes(16), page_key(NAMES[0]), checksum([b""]), b"\1\1"))
    data[at : at + BLOCK] = odd
    (place / "killed" / name).write_bytes(data)
    for _ in range(2):
        with make_store(place / "killed") as store:
            assert readable(store) == set(NAMES[:3])


@pytest.mark.parametrize(
    ("note_kind", "offset", "size"),
    [(0, 0, 2**63), (0, 0, 2**64 - 1), (0, 2**43, 100), (0, BLOCK, 100), (99, 3 * BLOCK, 100)],
)
def test_a_table_that_speaks_of_other_places_than_its_file_has_is_not_believed(
    place, note_kind, offset, size
):
    with make_store(place / "store") as store:
        keep(store, "a:100", "b:100")
    (name,) = files_of(place / "store")
    file = place / "store" / name
    table = Table()
    table.add([key_of("a:100")], note=0, offset=0, sizes=[form_of("a:100").record_bytes])
    table.add([RecordKey(bytes(49))], note=note_kind, offset=offset, sizes=[size])
    file.write_bytes(file.read_bytes()[: 4 * BLOCK] + bytes(aligned(table.pack())))
    with make_store(place / "store") as store:
        stats = store.stats()
        assert stats["records"] == 2 and 0 < stats["bytes"] < stats["bytes_on_disk"] <= stats["bytes_most"]
        assert store.contains([key_of("a:100"), key_of("b:100")]) == [True, True] and store.check().bad == []
