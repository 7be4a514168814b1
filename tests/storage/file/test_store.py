"""Goal: a file store does what it promises in ordinary life. Method: small stores of named records."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.storage.file.make import (
    NO_SPACE,
    SEGMENT_BYTES,
    SIZE,
    Watched,
    aligned,
    bytes_of,
    delete,
    failing,
    files_of,
    form_of,
    has_all,
    has_none,
    held,
    keep,
    key_of,
    make_put,
    make_store,
    page_key,
    payload_of,
    put,
    room_of,
    without_queue,
)
from tiercel.errors import ConfigError, StoreError
from tiercel.storage.base import Get, Put
from tiercel.storage.file import FileStore, direct, segment
from tiercel.storage.file.room import SIZE_LEAST, segment_bytes_for
from tiercel.storage.record import Flaw, Form, Note, pack, parse
from tiercel.types import Kind

NAMES = [f"page {number}" for number in range(24)]
BIG = [f"{number}:20000" for number in range(200)]
"""Two of them fill a segment."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def no_queue(monkeypatch):
    without_queue(monkeypatch)


# Keeping


def test_what_was_put_is_there_at_once_and_after_opening_again(path):
    with make_store(path) as store:
        keep(store, *NAMES)
        assert has_all(store, *NAMES) and has_none(store, "never put")
        before = dict(store.keys())
    with make_store(path) as store:
        assert has_all(store, *NAMES) and dict(store.keys()) == before
        assert store.stats()["records"] == len(NAMES)
        assert store.stats()["bytes"] == sum(form_of(name).record_bytes for name in NAMES)
        assert store.check().bad == []


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 16 * 1024, 40_001, 48 * 1024])
@pytest.mark.parametrize("place", [bytes, bytearray, aligned, lambda data: aligned(b"x" + data)[1:]])
def test_parts_may_lie_anywhere_and_have_any_length(path, size, place):
    name = f"page:{size}"
    header, payload = make_put(name).parts
    with make_store(path) as store:
        assert store.put([Put(key_of(name), [place(bytes(header)), place(bytes(payload))])]) == [True]
        buffers = aligned(bytes(8 * 4096)), aligned(bytes(2 * SEGMENT_BYTES))
        for start in (0, 1):
            parts = [buffers[0][start : len(header) + start], buffers[1][start : size + start]]
            assert store.get([Get(key_of(name), parts)]) == [True]
            assert parts[1] == payload and parts[0] == header


def test_a_header_may_be_longer_than_a_page_of_the_disk(path):
    streams = tuple((f"stream {number}", (0, 1, 2), 1) for number in range(300))
    form = Form(Kind.TAIL, b"f" * 16, streams, 900, FileStore.align)
    assert form.header_bytes > 2 * 4096
    record = [form.header(b"k" * 32, [b"p" * 900]), b"p" * 900]
    key = form.key(b"k" * 32)
    with make_store(path) as store:
        keep(store, "before")
        assert store.put([Put(key, record)]) == [True]
        keep(store, "after")
        copy = crashed(path)
    with make_store(copy) as store:
        parts = [memoryview(bytearray(form.header_bytes)), memoryview(bytearray(900))]
        assert store.get([Get(key, parts)]) == [True] and parts == record
        assert has_all(store, "before", "after")


def test_a_page_and_a_tail_of_one_key_are_two_records(path):
    with make_store(path) as store:
        assert store.put([make_put("same"), make_put("same", Kind.TAIL)]) == [True, True]
        assert store.stats()["records"] == 2
        assert store.delete([key_of("same", Kind.TAIL)]) == 1
        assert store.contains([key_of("same"), key_of("same", Kind.TAIL)]) == [True, False]


def test_what_is_there_is_not_written_again(path, monkeypatch):
    with make_store(path) as store:
        keep(store, "a", "b")
        monkeypatch.setattr(direct, "calls", Watched(failing("pwritev", NO_SPACE)))
        keep(store, "b", "a", "a")
        assert put(store, "a", "c") == [True, False]


def test_a_key_twice_in_a_batch_is_kept_once(path):
    with make_store(path) as store:
        keep(store, "a", "b", "a")
        assert store.stats()["records"] == 2 and has_all(store, "a", "b")


def test_a_batch_may_be_larger_than_a_segment(path):
    with make_store(path) as store:
        keep(store, *BIG[:12])
        assert store.stats()["segments"] >= 6 and has_all(store, *BIG[:12])


def test_a_value_larger_than_a_segment_is_refused_and_the_others_are_kept(path):
    with make_store(path) as store:
        assert put(store, "a", f"huge:{SEGMENT_BYTES}", "b") == [True, False, True]
        assert held(store, "a", "b") == [True, True]


@pytest.mark.parametrize("wrong", ["no header", "another key", "another length", "a note"])
def test_what_is_not_a_record_is_refused_before_anything_is_written(path, wrong):
    header, payload = make_put("a").parts
    key, parts = {
        "no header": (key_of("a"), [bytes(4096), payload]),
        "another key": (key_of("b"), [header, payload]),
        "another length": (key_of("a"), [header, payload + b"x"]),
        "a note": (key_of("a", Note.REMOVED), [header, payload]),
    }[wrong]
    with make_store(path) as store:
        keep(store, "kept")
        with pytest.raises(StoreError):
            store.put([Put(key, parts)])
        keep(store, "later")
        copy = crashed(path)
    with make_store(copy) as store:
        assert has_all(store, "kept", "later") and store.stats()["records"] == 2


# Forgetting


def test_what_was_deleted_stays_away(path):
    with make_store(path) as store:
        keep(store, *NAMES)
        assert delete(store, NAMES[3], "never put", NAMES[5], NAMES[3]) == 2
        assert held(store, *NAMES[3:6]) == [False, True, False]
        copy = crashed(path)
    for each in (path, copy):
        with make_store(each) as store:
            assert held(store, *NAMES[3:6]) == [False, True, False]


def test_what_was_deleted_can_be_put_again(path):
    with make_store(path) as store:
        for _ in range(3):
            keep(store, "a")
            assert delete(store, "a") == 1
        keep(store, "a")
        copy = crashed(path)
    with make_store(copy) as store:
        assert has_all(store, "a") and store.stats()["records"] == 1


def test_what_was_cleared_stays_away_and_its_files_are_gone(path):
    with make_store(path) as store:
        keep(store, *BIG[:8])
        store.clear()
        assert has_none(store, *BIG[:8]) and store.stats()["bytes"] == 0
        assert len(files_of(path)) == 1
        keep(store, "new")
        copy = crashed(path)
    for each in (path, copy):
        with make_store(each) as store:
            assert has_none(store, *BIG[:8]) and has_all(store, "new")


def test_a_clear_that_is_interrupted_has_cleared(path, monkeypatch):
    """After its note is on the disk: whatever files are still there, nothing in them is."""
    with make_store(path) as store:
        keep(store, *BIG[:8])
        monkeypatch.setattr(direct, "calls", Watched(failing("unlink", 5)))
        with pytest.raises(StoreError):
            store.clear()
        assert has_none(store, *BIG[:8])
        copy = crashed(path)
    assert len(files_of(copy)) > 4
    monkeypatch.undo()
    with make_store(copy) as store:
        assert has_none(store, *BIG[:8])


def test_clearing_touches_no_file_of_somebody_else(path):
    with make_store(path) as store:
        keep(store, "a")
        (path / "notes.txt").write_text("mine")
        (path / "segment-1.tcs").write_text("mine too")
        store.clear()
        assert (path / "notes.txt").read_text() == "mine"
        assert (path / "segment-1.tcs").read_text() == "mine too"


def test_compacting_gives_back_what_was_deleted_and_keeps_the_rest(path):
    with make_store(path) as store:
        keep(store, *BIG[:12])
        delete(store, *BIG[:12:3])
        before, kept = bytes_of(path), [name for name in BIG[:12] if name not in BIG[:12:3]]
        gained = store.compact()
        assert gained >= 4 * room_of(BIG[0]) and has_all(store, *kept)
        copy = crashed(path)
    assert bytes_of(path) <= before - gained + SEGMENT_BYTES
    for each in (path, copy):
        with make_store(each) as store:
            assert has_all(store, *kept) and has_none(store, *BIG[:12:3])


def test_compacting_a_store_without_anything_dead_moves_nothing(path):
    with make_store(path) as store:
        keep(store, *BIG[:8])
    files = {name: (path / name).stat().st_ino for name in files_of(path)}
    with make_store(path) as store:
        assert store.compact() == 0 and has_all(store, *BIG[:8])
    assert {name: (path / name).stat().st_ino for name in files_of(path)} == files


# Reading


def test_another_length_is_a_miss(path):
    with make_store(path) as store:
        keep(store, "a:5000")
        parts = [memoryview(bytearray(4096)), memoryview(bytearray(5001))]
        assert store.get([Get(key_of("a:5000"), parts)]) == [False]


def test_hits_and_misses_in_a_batch_stay_in_their_places(path):
    with make_store(path) as store:
        keep(store, *NAMES)
        order = [NAMES[7], "never", NAMES[2], NAMES[3], NAMES[2], "put", NAMES[23]]
        assert held(store, *order) == [True, False, True, True, True, False, True]


@pytest.mark.parametrize("count", [1, 3, 200])
def test_without_the_kernels_queue_threads_read_the_same(path, no_queue, count):
    with make_store(path, 8 * SIZE) as store:
        names = [f"page {number}" for number in range(count)]
        keep(store, *names)
        assert not store._log.lanes.queued and has_all(store, *names)  # type: ignore[attr-defined]


def test_where_direct_io_is_refused_the_store_is_buffered(path, monkeypatch):
    class Refusing(direct.Calls):
        def open(self, file, flags):
            if flags & os.O_DIRECT:
                raise OSError(22, "no direct I/O here")
            return super().open(file, flags)

    monkeypatch.setattr(direct, "calls", Refusing())
    with make_store(path) as store:
        assert store.stats()["direct"] is False
        keep(store, *NAMES)
        assert has_all(store, *NAMES)
    with make_store(path) as store:
        assert has_all(store, *NAMES)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory here")
def test_a_store_may_be_in_memory(tmp_path):
    path = Path("/dev/shm") / f"tiercel-{os.getpid()}-{tmp_path.name}"
    try:
        with make_store(path) as store:
            keep(store, *NAMES)
            assert has_all(store, *NAMES)
        with make_store(path) as store:
            assert has_all(store, *NAMES)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def damage(path: Path, name: str, where: str) -> None:
    """Change one byte of a record on the disk."""
    header, _ = make_put(name).parts
    for file in files_of(path):
        data = bytearray((path / file).read_bytes())
        at = data.find(bytes(header[:128]))
        if at >= 0:
            name = header.index(page_key(name))
            data[at + {"magic": 0, "name": name, "header": 200, "payload": len(header)}[where]] ^= 1
            (path / file).write_bytes(data)
            return
    raise AssertionError("it is not there")


@pytest.mark.parametrize("where", ["magic", "name"])
def test_what_does_not_begin_as_its_record_is_a_miss(path, where):
    with make_store(path) as store:
        keep(store, *NAMES[:3])
    damage(path, NAMES[1], where)
    with make_store(path) as store:
        assert hit_and_flaw(store, NAMES[1])[0] is False
        assert has_all(store, NAMES[0], NAMES[2])
        assert [key for key, _ in store.check().bad] == [key_of(NAMES[1])]


@pytest.mark.parametrize(("where", "flaw"), [("header", Flaw.HEADER), ("payload", Flaw.CHECKSUM)])
def test_other_damage_is_found_by_check_and_by_whoever_verifies(path, where, flaw):
    with make_store(path) as store:
        keep(store, *NAMES[:3])
    damage(path, NAMES[1], where)
    with make_store(path) as store:
        assert store.check().bad == [(key_of(NAMES[1]), flaw)]
        assert hit_and_flaw(store, NAMES[1]) == (True, flaw)


def hit_and_flaw(store, name):
    form = form_of(name)
    header, payload = memoryview(bytearray(form.header_bytes)), memoryview(bytearray(form.payload_bytes))
    (hit,) = store.get([Get(key_of(name), [header, payload])])
    return hit, form.flaw(header, page_key(name), [payload])


def test_a_record_that_lies_where_another_should_is_told(path):
    with make_store(path) as store:
        keep(store, "a:100", "b:100")
        place = store._index.find(key_of("a:100"))  # type: ignore[attr-defined]
        place[0].table.offsets[place[1]] += 8192
        assert store.check().bad == [(key_of("a:100"), Flaw.KEY)]
        parts = [memoryview(bytearray(4096)), memoryview(bytearray(100))]
        assert store.get([Get(key_of("a:100"), parts)]) == [False]


@pytest.mark.parametrize("names", [BIG[:1], BIG[:2]])
def test_a_file_that_was_cut_short_gives_misses(path, names):
    """Also into memory that holds the same record from before."""
    with make_store(path) as store:
        keep(store, *names)
        parts = [[memoryview(bytearray(4096)), memoryview(bytearray(20_000))] for _ in names]
        wanted = [Get(key_of(name), each) for name, each in zip(names, parts, strict=True)]
        assert store.get(wanted) == [True] * len(names)
        os.truncate(path / files_of(path)[0], 4096 * 4)
        assert store.get(wanted) == [False] * len(names)


@pytest.mark.parametrize("queued", [True, False])
def test_a_read_that_fails_for_another_reason_than_damage_is_an_error(path, monkeypatch, queued):
    class Exhausted(direct.Calls):
        def preadv(self, file, views, offset):
            raise OSError(errno.ENOMEM, "no memory")

    if not queued:
        without_queue(monkeypatch)
    with make_store(path) as store:
        keep(store, *NAMES)
        with monkeypatch.context() as context:
            context.setattr(direct.Queue, "read", lambda queue, asked: [-errno.ENOMEM] * len(asked))  # type: ignore[attr-defined]
            context.setattr(direct, "calls", Exhausted())
            with pytest.raises(StoreError, match="no memory"):
                held(store, *NAMES)
        assert has_all(store, *NAMES)


def test_what_is_being_read_may_be_removed_meanwhile(path, no_queue, monkeypatch):
    """The file stays open for those who read it; nothing else ever lies there."""
    with make_store(path) as store:
        keep(store, *NAMES)

        class Between(direct.Calls):
            def preadv(self, file, views, offset):
                monkeypatch.setattr(direct, "calls", direct.Calls())
                store.clear()
                keep(store, *BIG[:3])
                return super().preadv(file, views, offset)

        monkeypatch.setattr(direct, "calls", Between())
        form = form_of(NAMES[0])
        header, payload = memoryview(bytearray(4096)), memoryview(bytearray(form.payload_bytes))
        assert store.get([Get(key_of(NAMES[0]), [header, payload])]) == [True]
        assert payload == payload_of(NAMES[0])
        assert has_none(store, *NAMES) and has_all(store, *BIG[:3])


# Opening


def crashed(path: Path) -> Path:
    """The folder as a crash would leave it now."""
    copy = path.with_name(path.name + " after a crash")
    shutil.copytree(path, copy)
    return copy


def test_a_closed_store_is_opened_without_reading_its_records(path, monkeypatch):
    with make_store(path) as store:
        keep(store, *BIG[:20])
        delete(store, BIG[4])

    def scan(segment):
        raise AssertionError("it has a table")

    monkeypatch.setattr(segment, "_scan", scan)
    with make_store(path) as store:
        assert has_all(store, *BIG[5:20]) and has_none(store, BIG[4])


def test_after_a_crash_everything_acknowledged_is_found_by_reading(path):
    with make_store(path) as store:
        keep(store, *NAMES)
        copy = crashed(path)
    with make_store(copy) as store:
        assert has_all(store, *NAMES)
        keep(store, "more")
    with make_store(copy) as store:
        assert has_all(store, *NAMES, "more")


@pytest.mark.parametrize("keep_bytes", [0, 1, 4096, 5000, 12_288, 12_289])
def test_a_torn_end_is_not_served_and_not_an_error(path, keep_bytes):
    """Two whole records, then the first bytes of a third; one that was written with it is whole."""
    names = ["a:8000", "b:8000", "c:12000", "d:8000"]
    with make_store(path) as store:
        for name in names:
            keep(store, name)
        copy = crashed(path)
    file = copy / files_of(copy)[0]
    data = bytearray(file.read_bytes())
    start = 2 * room_of("a:8000")
    data[start + keep_bytes : start + 16_384] = bytes(16_384 - keep_bytes)
    file.write_bytes(data)
    with make_store(copy) as store:
        assert held(store, *names) == [True, True, False, True]
        assert store.stats()["damaged"] == 1
        keep(store, "c:12000")
        assert has_all(store, *names)
        again = crashed(copy)
    with make_store(again) as store:
        assert has_all(store, *names) and store.stats()["damaged"] == 0


def test_a_table_that_is_damaged_is_made_again_from_the_records(path):
    with make_store(path) as store:
        keep(store, *NAMES)
        delete(store, NAMES[0])
    for name in files_of(path):
        data = bytearray((path / name).read_bytes())
        data[-4096] ^= 1
        (path / name).write_bytes(data)
    with make_store(path) as store:
        assert has_all(store, *NAMES[1:]) and has_none(store, NAMES[0])


def test_opening_and_closing_again_and_again_makes_no_more_files(path):
    for number in range(12):
        with make_store(path) as store:
            keep(store, f"{number}:100")
    assert len(files_of(path)) <= 3
    with make_store(path) as store:
        assert has_all(store, *(f"{number}:100" for number in range(12)))


def test_opening_leaves_no_empty_files(path):
    for _ in range(3):
        make_store(path).close()
    assert files_of(path) == []
    (path / "segment-0000000007.tcs").touch()
    make_store(path).close()
    assert files_of(path) == []


def test_records_of_another_version_are_refused_and_left_alone(path):
    with make_store(path) as store:
        keep(store, "a")
        copy = crashed(path)
    (name,) = files_of(copy)
    data = bytearray((copy / name).read_bytes())
    header = parse(data)
    data[: header.header_bytes] = pack(header._replace(version=99))
    (copy / name).write_bytes(data)
    with pytest.raises(ConfigError, match=rf"{name}.*version"):
        make_store(copy)
    assert (copy / name).read_bytes() == data


def test_tables_of_another_version_are_refused_and_left_alone(path, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(segment, "_TABLE_VERSION", 99)
        with make_store(path) as store:
            keep(store, "a")
    data = (path / files_of(path)[0]).read_bytes()
    with pytest.raises(ConfigError, match="version 99"):
        make_store(path)
    assert (path / files_of(path)[0]).read_bytes() == data


def test_a_store_may_be_opened_smaller(path):
    with make_store(path) as store:
        keep(store, *BIG[:20])
    with make_store(path, SIZE // 2) as store:
        assert bytes_of(path) <= SIZE // 2
        there = held(store, *BIG[:20])
        assert there[-1] and there == sorted(there), "the oldest went"
        assert set(store.removed()) == {key_of(n) for n, hit in zip(BIG[:20], there, strict=True) if not hit}


def test_sizes_that_make_no_sense_are_refused(path):
    with pytest.raises(ConfigError, match="size"):
        FileStore(path, SIZE_LEAST - 1)
    with pytest.raises(ConfigError, match="free"):
        FileStore(path, SIZE, free=-1)
    for segment_bytes in (4096, 5000 * 4, SIZE // 2):
        with pytest.raises(ConfigError, match="segment_bytes"):
            FileStore(path, SIZE, segment_bytes=segment_bytes)
    with pytest.raises(ConfigError, match="evict"):
        FileStore(path, SIZE, evict="nobody")
    make_store(path).close()


@pytest.mark.parametrize("size", [SIZE_LEAST, 10**6, 10**8, 10**9, 10**11, 10**13])
def test_segments_follow_from_the_size(size):
    chosen = segment_bytes_for(size)
    assert chosen % 4096 == 0 and 8 <= size // chosen <= 520


def test_after_closing_every_call_is_refused(path):
    store = make_store(path)
    store.close()
    store.close()
    calls = [
        lambda: store.contains([]),
        lambda: store.get([]),
        lambda: store.put([]),
        lambda: store.delete([]),
        store.clear,
        store.stats,
        store.keys,
        store.removed,
        store.compact,
        store.check,
    ]
    for call in calls:
        with pytest.raises(StoreError, match="closed"):
            call()
