"""Goal: a store keeps to its size and to the room others need, and lets the right things go. Method: stores
of sixteen segments, looked at after every put; the decisions alone, as values."""

import random
import shutil

import pytest

from tests.storage.file.make import (
    NO_SPACE,
    SEGMENT_BYTES,
    SIZE,
    Watched,
    bytes_of,
    delete,
    failing,
    has_all,
    has_none,
    held,
    keep,
    key_of,
    make_store,
    page_key,
    payload_of,
    put,
    room_of,
)
from tiercel.errors import StoreError
from tiercel.storage.file import direct
from tiercel.storage.file.room import Candidate, Going, Limits, Standing, free_for, going, staying

NAMES = [f"{number}:12000" for number in range(400)]
"""Three of them fill a segment."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


def test_the_size_is_never_exceeded_and_what_is_gone_is_told(path, monkeypatch):
    peaks = []
    monkeypatch.setattr(direct, "calls", Watched(lambda call: peaks.append(bytes_of(path))))
    with make_store(path) as store:
        there = set()
        for name in NAMES[:120]:
            keep(store, name)
            there = (there | {key_of(name)}) - set(store.removed())
            assert bytes_of(path) <= SIZE and store.stats()["bytes_on_disk"] == bytes_of(path)
            assert dict(store.keys()).keys() == there
        assert max(peaks) <= SIZE
        assert store.stats()["evicted"] == 120 - len(there)
        assert bytes_of(path) > SIZE * 3 // 4, "what it may use, it uses"


def test_batches_with_several_threads_keep_to_the_size_too(path):
    with make_store(path) as store:
        for start in range(0, 400, 40):
            keep(store, *NAMES[start : start + 40])
            assert bytes_of(path) <= SIZE
        assert has_all(store, *NAMES[-10:])


@pytest.mark.parametrize("evict", ["lru", "lfu", "slru"])
def test_what_is_read_stays_and_what_is_not_goes(path, evict):
    hot = NAMES[:12:3]
    with make_store(path, evict=evict) as store:
        keep(store, *NAMES[:12])
        for name in NAMES[12:204]:
            keep(store, name)
            assert has_all(store, *hot)
        assert has_none(store, *(set(NAMES[:100]) - set(hot)))
        assert not {key_of(name) for name in hot} & set(store.removed())


def test_what_stays_is_on_the_disk_before_its_old_place_is_given_up(path, monkeypatch):
    """Opened by another before every call that changes something: the hot record is always there."""
    with make_store(path, SIZE // 2) as store:
        keep(store, "hot", *NAMES[:15])
        held(store, "hot")
        seen = []

        def before(call):
            with make_store(path, SIZE // 2, read_only=True) as reader:
                seen.append(has_all(reader, "hot"))

        monkeypatch.setattr(direct, "calls", Watched(before))
        for name in NAMES[15:45]:
            keep(store, name)
            assert has_all(store, "hot")
        assert len(seen) > 100 and all(seen)


def test_for_every_byte_put_at_most_one_more_is_written(path, monkeypatch):
    """Also when everything is hot."""
    written = [0]

    class Counting(direct.Calls):
        def pwritev(self, file, views, offset):
            done = super().pwritev(file, views, offset)
            written[0] += done
            return done

    monkeypatch.setattr(direct, "calls", Counting())
    with make_store(path) as store:
        for name in NAMES[:200]:
            keep(store, name)
            held(store, *NAMES[:200])
    assert written[0] <= 2.2 * sum(room_of(name) for name in NAMES[:200])


def test_what_stays_is_synced_before_its_old_place_is_given_up(path, monkeypatch):
    made = []
    monkeypatch.setattr(direct, "calls", Watched(made.append))
    with make_store(path, SIZE // 2) as store:
        keep(store, "hot")
        for name in NAMES[:100]:
            keep(store, name)
            assert has_all(store, "hot")
    moves = 0
    for at, call in enumerate(made):
        since = made[:at][::-1]
        if call == "unlink" and "pwritev" in since[: since.index("fsync")]:
            assert since[0] == "fdatasync"
            moves += 1
    assert moves > 3


@pytest.mark.parametrize("evict", ["lru", "lfu", "slru"])
@pytest.mark.parametrize("read", [True, False])
def test_dead_bytes_push_out_nothing_that_lives(path, evict, read):
    """In a store that is less than half full, something is put and deleted again and again."""
    live = NAMES[:20]
    with make_store(path, evict=evict) as store:
        keep(store, *live)
        assert store.stats()["bytes"] < 0.45 * SIZE
        for number in range(300):
            keep(store, f"again {number % 2}:9000")
            delete(store, f"again {number % 2}:9000")
            if read:
                assert has_all(store, live[number % len(live)])
        assert has_all(store, *live) and store.removed() == []
        assert bytes_of(path) <= SIZE
    with make_store(path) as store:
        assert has_all(store, *live) and has_none(store, "again 0:9000", "again 1:9000")


def test_dead_bytes_between_what_lives_are_cleaned_and_nothing_else_goes(path, monkeypatch):
    """Every third record is deleted, wherever it is; what is left and what comes fits."""
    with make_store(path) as store:
        there = []
        for number, name in enumerate(NAMES):
            keep(store, name)
            there.append(name)
            if len(there) > 26:
                delete(store, there.pop(number * 7 % 20))
        assert store.removed() == [] and has_all(store, *there)
    with make_store(path) as store:
        assert has_all(store, *there) and has_none(store, *(set(NAMES) - set(there)))


def test_the_coldest_goes_wherever_it_is_written(path):
    """Old records that are read stay where they are; newer ones that nobody reads go before them."""
    with make_store(path) as store:
        keep(store, *NAMES[:18])
        for name in NAMES[18:100]:
            keep(store, name)
            held(store, *NAMES[:18])
        assert has_all(store, *NAMES[:18])
        assert has_all(store, *NAMES[95:100]) and has_none(store, *NAMES[18:60])


def test_a_large_record_finds_a_place_beside_what_stays(path):
    """What stays of an old segment leaves room in the new one for what it was begun for."""
    huge = f"huge:{SEGMENT_BYTES - 4 * 4096}"
    with make_store(path) as store:
        for name in NAMES[:60]:
            keep(store, name)
            held(store, *NAMES)
        before = store.stats()["evicted"]
        keep(store, huge)
        assert has_all(store, huge) and store.stats()["evicted"] - before <= 4, "one segment went"


def test_deleting_a_record_that_was_moved_deletes_it_for_good(path):
    with make_store(path) as store:
        keep(store, "hot")
        for name in NAMES[:60]:
            keep(store, name)
            held(store, "hot")
        assert delete(store, "hot") == 1
        for name in NAMES[60:200]:
            keep(store, name)
            assert has_none(store, "hot")
    with make_store(path) as store:
        assert has_none(store, "hot")


def test_a_note_is_not_forgotten_before_what_it_speaks_of(path):
    """Deletes between puts, with everything being evicted and moved: nothing deleted is ever found again."""
    chance = random.Random(1)
    gone, there = set(), set()
    with make_store(path) as store:
        for name in NAMES[:250]:
            keep(store, name)
            there.add(name)
            if chance.random() < 0.4:
                some = set(chance.sample(sorted(there), min(3, len(there))))
                delete(store, *some)
                gone, there = gone | some, there - some
            held(store, *chance.choices(sorted(there | gone), k=3))
            if chance.random() < 0.05:
                with make_store(path, read_only=True) as reader:
                    assert has_none(reader, *gone)
            if chance.random() < 0.02:
                store.compact()
    with make_store(path) as store:
        assert has_none(store, *gone)


def test_compacting_keeps_to_the_size(path, monkeypatch):
    with make_store(path) as store:
        keep(store, *NAMES[:60])
        delete(store, *NAMES[:60:3])
        there = [name for name in NAMES[:60] if held(store, name)[0]]
        peaks = []
        monkeypatch.setattr(direct, "calls", Watched(lambda call: peaks.append(bytes_of(path))))
        store.compact()
        assert len(peaks) > 20 and max(peaks) <= SIZE
        assert has_all(store, *there)


def test_an_unreadable_segment_does_not_stand_in_the_way(path, monkeypatch):
    class Unreadable(direct.Calls):
        def preadv(self, file, views, offset):
            raise OSError(5, "bad sector")

    with make_store(path) as store:
        for name in NAMES[:40]:
            keep(store, name)
        held(store, *NAMES[:40])
        monkeypatch.setattr(direct, "calls", Unreadable())
        for name in NAMES[40:100]:
            keep(store, name)
        monkeypatch.undo()
        assert has_all(store, *NAMES[90:100]) and bytes_of(path) <= SIZE


def test_what_was_half_moved_does_not_come_back(path, monkeypatch):
    """The disk fails in the middle of moving records. Copies that are on the disk already do not count, and
    are deleted with what they are copies of, though that was evicted before."""
    monkeypatch.setitem(direct.Lanes.__init__.__kwdefaults__, "size", 2 * 4096)
    hot = [f"hot {number}:100" for number in range(3)]
    with make_store(path) as store:
        keep(store, *hot, *NAMES[:38])
        held(store, *hot)
        moved = []

        class Wearing(direct.Calls):
            def pwritev(self, file, views, offset):
                moved.extend(name for name in hot if page_key(name) in bytes(views[0]))
                if len(moved) == 2:
                    raise OSError(5, "bad sector")
                return super().pwritev(file, views, offset)

        later = iter(NAMES[38:])
        with monkeypatch.context() as context:
            context.setattr(direct, "calls", Wearing())
            with pytest.raises(StoreError, match="bad sector"):
                for name in later:
                    keep(store, name)
        for name in later:
            if has_none(store, *hot):
                break
            held(store, *NAMES)
            keep(store, name)
        else:
            pytest.fail("the hot records never leave")
        assert delete(store, *hot) == 0
        shutil.copytree(path, path.with_name("copy"))
    for each in (path, path.with_name("copy")):
        with make_store(each) as store:
            assert has_none(store, *hot) and store.check().bad == []


def test_a_damaged_record_is_not_moved_and_takes_nothing_along(path):
    """Nobody could read it there; and a scan would find damage where there was none."""
    hot = [f"hot {number}:100" for number in range(3)]
    with make_store(path) as store:
        keep(store, *hot, *NAMES[:38])
        held(store, *hot)
        spoil(path, hot[1])
        for name in NAMES[38:]:
            if store.stats()["evicted"]:
                break
            keep(store, name)
        assert store.stats()["damaged"] == 1
        assert key_of(hot[1]) in store.removed() and held(store, *hot) == [True, False, True]
        shutil.copytree(path, path.with_name("copy"))
    with make_store(path.with_name("copy")) as store:
        assert held(store, *hot) == [True, False, True] and store.stats()["damaged"] == 0


def test_compacting_lets_a_damaged_record_go(path):
    with make_store(path) as store:
        keep(store, *NAMES[:9])
        delete(store, *NAMES[:9:3])
        spoil(path, NAMES[4])
        store.compact()
        there = [number % 3 > 0 and number != 4 for number in range(9)]
        assert held(store, *NAMES[:9]) == there
        assert store.removed() == [key_of(NAMES[4])] and store.stats()["damaged"] == 1
        keep(store, NAMES[4])
    with make_store(path) as store:
        assert store.check().bad == [] and has_all(store, NAMES[4])


def spoil(path, name):
    """Change the last byte of a record on the disk."""
    for file in path.glob("segment-*"):
        at = file.read_bytes().find(payload_of(name))
        if at >= 0:
            with file.open("r+b") as opened:
                opened.seek(at + len(payload_of(name)) - 1)
                opened.write(b"!")
            return
    raise AssertionError("it is not there")


class Disk(direct.Calls):
    """A file system of a size, with something of others in it."""

    def __init__(self, path, in_all):
        self.path, self.in_all, self.others = path, in_all, 0

    def space(self, path):
        return direct.Space(self.in_all - self.others - bytes_of(self.path), self.in_all)


def test_some_of_the_file_system_stays_free(path, monkeypatch):
    path.mkdir()
    disk = Disk(path, 12 * SEGMENT_BYTES)
    monkeypatch.setattr(direct, "calls", disk)
    free = 2 * SEGMENT_BYTES
    with make_store(path, free=free) as store:
        for name in NAMES[:60]:
            keep(store, name)
            assert disk.space("").free >= free
        assert bytes_of(path) > 6 * SEGMENT_BYTES
        disk.others = 4 * SEGMENT_BYTES
        for name in NAMES[60:80]:
            keep(store, name)
        assert disk.space("").free >= free and has_all(store, NAMES[79])


def test_a_disk_filled_by_others_is_an_answer_and_costs_nothing(path, monkeypatch):
    path.mkdir()
    disk = Disk(path, 12 * SEGMENT_BYTES)
    monkeypatch.setattr(direct, "calls", disk)
    with make_store(path, free=2 * SEGMENT_BYTES) as store:
        keep(store, *NAMES[:9])
        disk.others = 11 * SEGMENT_BYTES
        answers = [put(store, name)[0] for name in NAMES[9:30]]
        assert not answers[-1] and has_all(store, *NAMES[:9])
        assert store.removed() == []
        disk.others = 0
        keep(store, *NAMES[30:33])
        assert has_all(store, *NAMES[30:33])


def test_a_store_can_be_cleared_when_there_is_no_room_for_a_note(path, monkeypatch):
    path.mkdir()
    disk = Disk(path, 12 * SEGMENT_BYTES)
    monkeypatch.setattr(direct, "calls", disk)
    with make_store(path) as store:
        keep(store, *NAMES[:9])
        disk.others = 20 * SEGMENT_BYTES
        store.clear()
        assert bytes_of(path) == 0 and has_none(store, *NAMES[:9])


def test_a_full_disk_is_an_answer(path, monkeypatch):
    with make_store(path) as store:
        keep(store, *NAMES[:3])
        with monkeypatch.context() as context:
            context.setattr(direct, "calls", Watched(failing("fallocate", NO_SPACE)))
            answers = put(store, *NAMES[3:9])
            assert answers == sorted(answers, reverse=True) and not answers[-1]
            assert has_all(store, *NAMES[:3])
        keep(store, *NAMES[3:9])
        assert has_all(store, *NAMES[:9])


def test_no_room_for_a_note_is_an_error_for_who_deletes(path, monkeypatch):
    with make_store(path) as store:
        keep(store, *NAMES[:3])
        monkeypatch.setattr(direct, "calls", Watched(failing("pwritev", NO_SPACE)))
        with pytest.raises(StoreError, match="no room"):
            delete(store, NAMES[0])
        monkeypatch.undo()
        assert delete(store, NAMES[0]) == 1


# The decisions


def standing(*ranks, dead=0, carried=95):
    return Standing(100, carried, ranks, dead)


def test_the_segment_with_the_coldest_middle_goes_whatever_its_age():
    segments = [standing(1, 90, 95), standing(40, 50, 60), standing(10, 20, 99)]
    assert going(segments, left=100, segment_bytes=100) == Going(2, 20)
    assert going([*segments, standing(99, dead=2)], left=100, segment_bytes=100).number == 3, (
        "dead is coldest"
    )
    assert going([standing(), standing(1)], left=100, segment_bytes=100) == Going(0, 1)


def test_a_segment_that_is_dead_for_an_eighth_goes_first_and_all_that_lives_in_it_stays():
    segments = [standing(1, 2), standing(98, 99, carried=87), standing(3, 4)]
    assert going(segments, left=100, segment_bytes=100) == Going(1, None)
    assert going(segments, left=86, segment_bytes=100).number == 0, "where it would not find room"
    segments[1] = standing(98, 99, carried=89)
    assert going(segments, left=100, segment_bytes=100).number == 0, "where it gains too little"


def test_what_is_not_cold_stays_the_hottest_first_in_the_order_of_their_places():
    candidates = [Candidate(rank, row, 10) for row, rank in enumerate([5, 90, 60, 10, 80, 50])]
    assert staying(candidates, cold=50, bytes_most=1000) == [1, 2, 4]
    assert staying(candidates, cold=50, bytes_most=20) == [1, 4]
    assert staying(candidates, cold=50, bytes_most=0) == []
    assert staying(candidates, cold=None, bytes_most=1000) == [0, 1, 2, 3, 4, 5]


def test_a_record_too_large_for_what_is_left_makes_way_for_a_smaller_one():
    candidates = [Candidate(9, 0, 100), Candidate(8, 1, 10)]
    assert staying(candidates, cold=1, bytes_most=50) == [1]


def test_what_is_missing_is_the_larger_of_two_lacks():
    limits = Limits(size=SIZE, free=1000, segment_bytes=SEGMENT_BYTES)
    assert limits.missing(bytes_on_disk=0, bytes_free=SIZE) < 0
    assert limits.missing(bytes_on_disk=SIZE - SEGMENT_BYTES, bytes_free=SIZE) == 0
    assert limits.missing(bytes_on_disk=SIZE, bytes_free=SIZE) == SEGMENT_BYTES
    assert limits.missing(bytes_on_disk=0, bytes_free=SEGMENT_BYTES) == 1000


def test_others_are_left_a_twentieth_but_not_more_than_a_gibibyte():
    assert free_for(10**9) == 50_000_000 and free_for(10**12) == 1024**3


def test_a_store_larger_than_its_file_system_says_so_when_it_is_opened(path, caplog):
    for size in (2**60, shutil.disk_usage(path.parent).total // 2):
        make_store(path, size).close()
    make_store(path, 2**60, read_only=True).close()
    (line,) = [each.getMessage() for each in caplog.records]
    assert f"the store in {path} never becomes 1,048,576 TiB: its file system has" in line
