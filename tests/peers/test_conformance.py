"""Goal: a peer is a store, as far as it can be read. Method: the checks for such stores, with a real offering
process, over both transports and from both host layouts; and a store that does one thing wrong."""

import pytest

from tests.peers.offering import offering
from tests.peers.readers import Record
from tiercel.errors import StoreError
from tiercel.storage.base import Get
from tiercel.storage.conformance.reading import READ_CHECKS, ReadSubject
from tiercel.storage.memory import MemoryStore
from tiercel.storage.peer import PeerStore
from tiercel.types import Kind

HELD = [Record(1), Record(4, Kind.TAIL), Record(2), Record(8), Record(8, Kind.TAIL)]
ABSENT = [Record(9).key, Record(3, Kind.TAIL).key]


LAYOUTS = ["page_first_direct", "layer_first"]


@pytest.fixture(scope="module")
def peers():
    """One for each layout."""
    with offering(*({"layout": layout, "shuffle": 7, "mooncake": "tcp"} for layout in LAYOUTS)) as offers:
        yield dict(zip(LAYOUTS, offers, strict=True))
        for each in offers:
            assert each.ask("check") == {"leases": 0}
            assert each.ask("flush") == {"free": 64, "capacity": 64}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("check", READ_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("transport", ["tcp", "mooncake"])
def test_a_peer_keeps_the_contract_of_a_store_that_is_read(peers, layout, transport, check):
    opened = []

    def open_peer():
        opened.append(PeerStore(peers[layout].address, transport=transport))
        return opened[-1]

    check(ReadSubject(open_peer, [(record.key, record.value) for record in HELD], ABSENT))
    for store in opened:
        store.close()


class Reads(MemoryStore):
    """Right in everything but one thing."""

    writes = False

    def __init__(self):
        super().__init__()
        self._values = {record.key: record.value for record in HELD}

    def kept(self, keys):
        return [False] * len(keys)

    def put(self, values):
        return [False] * len(self.contains([each.key for each in values]))

    def delete(self, keys):
        if self.contains(keys):
            raise StoreError("it can only be read")
        return 0

    def clear(self):
        raise StoreError("it can only be read")


class Writes(Reads):
    def put(self, values):
        return MemoryStore.put(self, values)


class Deletes(Reads):
    def delete(self, keys):
        return MemoryStore.delete(self, keys)


class TakesAnyLength(Reads):
    def get(self, wanted):
        for each in wanted:
            value = self._values.get(each.key, b"")
            for part in each.parts:
                size = min(len(part), len(value))
                part[:size], value = value[:size], value[size:]
        return [each.key in self._values for each in wanted]


class ReadsOneByteWrong(Reads):
    def get(self, wanted):
        answers = super().get(wanted)
        wanted[-1].parts[-1][-1:] = b"?" if answers[-1] else wanted[-1].parts[-1][-1:]
        return answers


class MixesUpABatch(Reads):
    def get(self, wanted):
        return super().get(sorted(wanted, key=lambda each: each.key))


class WritesBesideItsParts(Reads):
    def get(self, wanted):
        for each in wanted:
            wide = each.parts[0].obj
            wide[0:1] = b"?"
        return super().get([Get(each.key, each.parts) for each in wanted])


class AnswersAfterClose(Reads):
    def close(self):
        pass


@pytest.mark.parametrize(
    ("kind", "caught"),
    [
        (Writes, "nothing_is_ever_written"),
        (Deletes, "nothing_is_ever_written"),
        (TakesAnyLength, "another_length_is_a_miss"),
        (ReadsOneByteWrong, "what_is_there_is_read_as_it_was_put"),
        (MixesUpABatch, "a_batch_answers_each_in_its_place"),
        (WritesBesideItsParts, "parts_may_be_many_and_lie_anywhere"),
        (AnswersAfterClose, "a_closed_store_refuses"),
    ],
)
def test_the_checks_find_what_they_are_for(kind, caught):
    subject = ReadSubject(kind, [(record.key, record.value) for record in HELD], ABSENT)
    [check] = [each for each in READ_CHECKS if each.__name__ == caught]
    with pytest.raises(AssertionError):
        check(subject)


def test_a_store_that_is_right_passes_them_all():
    for check in READ_CHECKS:
        check(ReadSubject(Reads, [(record.key, record.value) for record in HELD], ABSENT))
