"""Goal: bytes go to a store and come back right, or are told to be missing; no worker dies. Method: host
memory in every layout, the reference store, and stores that misbehave."""

from threading import Condition

import pytest

from tests.simulation.copies import HeldCopies
from tests.simulation.specs import SPECS
from tiercel.config import LAYOUTS
from tiercel.errors import StoreError
from tiercel.memory.buffers import HostMemory
from tiercel.storage.memory import MemoryStore
from tiercel.storage.record import VERSION, kind_of, parse
from tiercel.transfer.mover import ItemPlace, Presence, StoreMover, Work, Workers
from tiercel.types import HostPageId, Kind, PageKey

V4 = SPECS["compressed"]
KEY, OTHER = PageKey(b"k" * 32), PageKey(b"o" * 32)


class Rig:
    spec = V4

    def __init__(self, store=None, layout="page_first_direct", retries=(0.0,)):
        self.host = HostMemory(self.spec, layout, 20 * self.spec.place_bytes)
        self.store = store or MemoryStore()
        self.hands = HeldCopies()
        workers = Workers(self.hands, self.hands, self.hands, retry_after_s=retries)
        self.mover = StoreMover(self.store, self.spec, self.host, landed=Condition(), workers=workers)

    def do(self, work, *pieces):
        operation = self.mover.submit(work, pieces)
        self.hands.shutdown()
        assert self.mover.poll() == [operation] and not self.mover.under_way
        return operation

    def piece(self, *places, kind=Kind.PAGE, key=KEY):
        return ItemPlace(kind, key, tuple(HostPageId(place) for place in places))

    def fill(self, piece, seed):
        for view in self.host.views(piece.host, [self.size(piece)])[0]:
            view[:] = bytes((seed + i) % 251 for i in range(len(view)))

    def bytes_of(self, piece):
        return b"".join(*self.host.views(piece.host, [self.size(piece)]))

    def size(self, piece):
        return self.spec.item_bytes(piece.kind)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", Kind)
def test_what_is_written_from_some_places_is_read_into_others(layout, kind):
    rig, count = Rig(layout=layout), V4.places_of(kind)
    there = rig.piece(*range(count), kind=kind)
    back = rig.piece(*range(10, 10 + count), kind=kind)
    rig.fill(there, 3)
    assert rig.do(Work.WRITE, there).answers == [Presence.HERE]
    assert rig.do(Work.ASK, back, rig.piece(1, key=OTHER)).answers == [
        Presence.HERE,
        Presence.MISSING,
    ]
    assert rig.do(Work.READ, back).answers == [Presence.HERE]
    assert rig.bytes_of(back) == rig.bytes_of(there)


@pytest.mark.parametrize(("layout", "ranges"), [("page_first_direct", 1), ("layer_first", None)])
def test_a_page_kept_together_goes_without_a_copy_and_a_scattered_one_range_by_range(layout, ranges):
    rig, seen = Rig(layout=layout), []
    real = rig.store.put
    rig.store.put = lambda values: seen.extend(values) or real(values)
    piece = rig.piece(2)
    rig.do(Work.WRITE, piece)
    header, *payload = seen[0].parts
    assert parse(header).kind is Kind.PAGE and kind_of(seen[0].key) == (Kind.PAGE, VERSION)
    rows = sum(len(stream.layers) for stream in V4.page_streams)
    assert len(payload) == (ranges or rows)
    payload[0][:1] = b"\xab"
    assert rig.bytes_of(piece)[:1] == b"\xab", "the very bytes of the host"


def test_what_is_there_is_not_written_and_what_is_not_kept_is_told():
    rig = Rig(MemoryStore(size=10))
    assert rig.do(Work.WRITE, rig.piece(0)).answers == [Presence.MISSING]
    rig = Rig()
    rig.do(Work.WRITE, rig.piece(0))
    rig.store.put = None
    assert rig.do(Work.WRITE, rig.piece(1)).answers == [Presence.HERE]


def test_a_damaged_record_is_removed_counted_and_logged_once(caplog):
    rig = Rig()
    for key in (KEY, OTHER):
        rig.do(Work.WRITE, rig.piece(0, key=key))
    for key, value in rig.store._values.items():
        rig.store._values[key] = value[:-1] + bytes([value[-1] ^ 1])
    both = [rig.piece(1), rig.piece(2, key=OTHER)]
    assert rig.do(Work.READ, *both).answers == [Presence.DAMAGED, Presence.DAMAGED]
    assert rig.do(Work.ASK, *both).answers == [Presence.MISSING, Presence.MISSING]
    assert rig.mover.flaws == {"checksum": 2} and len(caplog.messages) == 1


def spoil(store, how):
    """Every value is listed still, and can not be read any more."""
    if how == "another length":
        store._values = dict.fromkeys(store._values, b"SET by somebody else")
    else:
        store.get = lambda wanted: [False] * len(wanted)


@pytest.mark.parametrize("how", ["another length", "unreadable"])
def test_what_is_listed_and_not_read_is_damaged_removed_counted_and_written_again(how, caplog):
    rig = Rig()
    rig.fill(rig.piece(0), 3)
    rig.do(Work.WRITE, rig.piece(0))
    spoil(rig.store, how)
    assert rig.do(Work.READ, rig.piece(1), rig.piece(2, key=OTHER)).answers == [
        Presence.DAMAGED,
        Presence.MISSING,
    ]
    assert rig.mover.flaws == {"unreadable": 1} and len(caplog.messages) == 1
    rig.store.__dict__.pop("get", None)
    assert rig.do(Work.ASK, rig.piece(1)).answers == [Presence.MISSING]
    assert rig.do(Work.WRITE, rig.piece(0)).answers == [Presence.HERE]
    assert rig.do(Work.READ, rig.piece(1)).answers == [Presence.HERE]
    assert rig.bytes_of(rig.piece(1)) == rig.bytes_of(rig.piece(0))


def test_what_left_between_the_question_and_the_read_is_missing_and_no_damage():
    rig = Rig()
    rig.do(Work.WRITE, rig.piece(0))
    rig.store.clear()
    assert rig.do(Work.READ, rig.piece(1)).answers == [Presence.MISSING]
    assert not rig.mover.flaws


class Undeletable(MemoryStore):
    """As a store that is open for reading only, or whose disk is full."""

    def delete(self, keys):
        raise StoreError("can not be removed")


def test_what_can_not_be_removed_is_not_asked_for_again_until_it_was_written_again():
    rig = Rig(Undeletable())
    for key in (KEY, OTHER):
        rig.do(Work.WRITE, rig.piece(0, key=key))
    bad = rig.mover.keys(rig.piece(0))[-1]
    rig.store._values[bad] = b"damaged"
    both = [rig.piece(1), rig.piece(2, key=OTHER)]
    read = rig.do(Work.READ, *both)
    assert read.answers == [Presence.DAMAGED, Presence.HERE] and read.error is None
    assert rig.do(Work.ASK, *both).answers == [Presence.MISSING, Presence.HERE]
    assert rig.do(Work.WRITE, *both).answers == [Presence.HERE, Presence.HERE]
    assert rig.do(Work.READ, *both).answers == [Presence.HERE, Presence.HERE]
    assert rig.do(Work.ASK, *both).answers == [Presence.HERE, Presence.HERE]


class Flaky(MemoryStore):
    """Fails a given number of times."""

    failures = 0

    def contains(self, keys):
        if self.failures:
            self.failures -= 1
            raise ConnectionResetError("gone")
        return super().contains(keys)


def test_an_operation_is_tried_again_and_then_has_failed():
    rig = Rig(Flaky(), retries=(0.0, 0.0))
    rig.store.failures = 2
    assert rig.do(Work.WRITE, rig.piece(0)).error is None
    rig.store.failures = 3
    failed = rig.do(Work.WRITE, rig.piece(1, key=OTHER))
    assert isinstance(failed.error, StoreError) and isinstance(failed.error.__cause__, ConnectionResetError)
    assert rig.do(Work.WRITE, rig.piece(1, key=OTHER)).error is None, "the worker lives"


def test_a_request_is_not_kept_waiting_by_trying_to_ask_again():
    rig = Rig(Flaky(), retries=(0.0, 0.0))
    rig.store.failures = 1
    assert rig.do(Work.ASK, rig.piece(0)).error is not None


@pytest.mark.parametrize("answer", [[], [True, True], None, "yes"], ids=repr)
def test_an_answer_of_the_wrong_shape_is_a_failure(answer):
    rig = Rig(retries=())
    rig.store.get = lambda wanted: answer
    assert rig.do(Work.READ, rig.piece(0)).error is not None
    rig.store.contains = lambda keys: answer
    assert rig.do(Work.ASK, rig.piece(0)).error is not None
    assert rig.do(Work.WRITE, rig.piece(0)).error is not None


def test_what_nobody_waits_for_is_not_begun():
    rig = Rig()
    rig.store.get = None
    read = rig.mover.submit(Work.READ, [rig.piece(0)])
    read.cancelled = True
    rig.hands.shutdown()
    assert rig.mover.poll() == [read] and read.answers == [Presence.MISSING] and read.error is None


def test_a_probe_tells_how_fast_a_page_is_read_and_leaves_nothing():
    rig = Rig()
    probe = rig.do(Work.PROBE)
    assert probe.error is None and probe.read_s is not None and rig.store.stats()["records"] == 0
    rig.do(Work.STATS)
    assert rig.mover.numbers["records"] == 0


def test_workers_that_are_gone_fail_the_operation():
    rig = Rig()

    def refuse(*_):
        raise RuntimeError("can not start new thread")

    rig.hands.submit = refuse
    operation = rig.mover.submit(Work.ASK, [rig.piece(0)])
    assert rig.mover.poll() == [operation] and isinstance(operation.error, StoreError)


def test_real_workers_read_while_others_write_and_the_store_is_closed_at_the_end():
    host = HostMemory(V4, "page_first_direct", 20 * V4.place_bytes)
    landed, store = Condition(), MemoryStore()
    mover = StoreMover(store, V4, host, landed=landed)
    pieces = [ItemPlace(Kind.PAGE, PageKey(bytes([i]) * 32), (HostPageId(i),)) for i in range(20)]
    for piece in pieces:
        mover.submit(Work.WRITE, [piece])
    ended = []
    while len(ended) < 20:
        with landed:
            landed.wait_for(lambda: mover.landed, 5)
        ended += mover.poll()
    assert all(op.answers == [Presence.HERE] for op in ended)
    mover.close()
    with pytest.raises(StoreError):
        store.stats()
