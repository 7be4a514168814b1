"""Goal: a page is there in full or not at all, whatever happens to one of its records. Method: a spec whose
pages and tails are several records each, the reference store, and every record in turn."""

from __future__ import annotations

import pytest

from tests.simulation.specs import SPECS
from tests.transfer import test_mover
from tests.transfer.test_mover import KEY, OTHER
from tiercel.config import LAYOUTS
from tiercel.storage.memory import MemoryStore
from tiercel.storage.record import Header, parse
from tiercel.transfer.mover import Presence, Work
from tiercel.types import Kind

SPEC = SPECS["in records"]
RECORDS = {kind: len(SPEC.grains(kind)) for kind in Kind}
HERE, MISSING, DAMAGED = Presence.HERE, Presence.MISSING, Presence.DAMAGED
EACH = [(kind, number) for kind in Kind for number in range(RECORDS[kind])]


class Rig(test_mover.Rig):
    spec = SPEC

    def item(self, kind, first=0, key=KEY):
        return self.piece(*range(first, first + SPEC.places_of(kind)), kind=kind, key=key)

    def written(self, kind, key=KEY):
        item = self.item(kind, key=key)
        self.fill(item, 7)
        assert self.do(Work.WRITE, item).answers == [HERE]
        return item


def test_there_are_several_records_of_each_kind() -> None:
    assert min(RECORDS.values()) > 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", Kind)
def test_the_records_of_an_item_together_are_its_bytes_and_say_which_they_are(kind, layout) -> None:
    rig = Rig(layout=layout)
    item = rig.written(kind)
    values = [rig.store._values[key] for key in rig.mover.keys(item)]
    headers = [parse(value) for value in values]
    assert all(isinstance(header, Header) for header in headers) and len(values) == RECORDS[kind]
    payloads = [value[header.header_bytes :] for value, header in zip(values, headers, strict=True)]
    assert b"".join(payloads) == rig.bytes_of(item)
    parts = [(header.kind, header.grain, header.grains) for header in headers]
    assert parts == [(kind, grain.number, grain.of) for grain in SPEC.grains(kind)]


@pytest.mark.parametrize(("kind", "number"), EACH)
def test_without_any_one_record_the_item_is_missing_and_only_that_record_is_written_again(
    kind, number
) -> None:
    rig = Rig()
    item, back = rig.written(kind), rig.item(kind, 10)
    lost = rig.mover.keys(item)[number]
    rig.store.delete([lost])
    assert rig.do(Work.ASK, item).answers == [MISSING]
    assert rig.do(Work.READ, back).answers == [MISSING]
    put, real = [], rig.store.put
    rig.store.put = lambda values: put.extend(values) or real(values)
    assert rig.do(Work.WRITE, item).answers == [HERE]
    assert [value.key for value in put] == [lost]
    assert rig.do(Work.READ, back).answers == [HERE] and rig.bytes_of(back) == rig.bytes_of(item)


@pytest.mark.parametrize(("kind", "number"), EACH)
def test_damage_in_any_one_record_is_found_and_repaired(kind, number) -> None:
    rig = Rig()
    item, other, back = rig.written(kind), rig.item(kind, key=OTHER), rig.item(kind, 10)
    rig.written(kind, key=OTHER)
    name = rig.mover.keys(item)[number]
    rig.store._values[name] = rig.store._values[name][:-1] + b"?"
    both = rig.do(Work.READ, back, other._replace(host=rig.item(kind, 5).host))
    assert both.answers == [DAMAGED, HERE]
    assert rig.mover.flaws == {"checksum": 1} and name not in rig.store._values
    assert rig.do(Work.WRITE, item).answers == [HERE]
    assert rig.do(Work.READ, back).answers == [HERE] and rig.bytes_of(back) == rig.bytes_of(item)


@pytest.mark.parametrize("kind", Kind)
def test_two_records_of_a_page_that_were_exchanged_are_found(kind) -> None:
    rig = Rig()
    first, last = rig.mover.keys(rig.written(kind))[:2]
    values = rig.store._values
    values[first], values[last] = values[last], values[first]
    assert rig.do(Work.READ, rig.item(kind, 10)).answers in ([DAMAGED], [MISSING])


def test_all_records_of_a_batch_go_in_one_call() -> None:
    rig, calls = Rig(), []
    for name in ("contains", "get", "put"):
        real = getattr(rig.store, name)
        setattr(
            rig.store, name, lambda some, name=name, real=real: calls.append((name, len(some))) or real(some)
        )
    items = [rig.item(Kind.PAGE), rig.item(Kind.TAIL, 3)]
    records = sum(RECORDS.values())
    rig.do(Work.WRITE, *items)
    rig.do(Work.ASK, *items)
    rig.do(Work.READ, *items)
    assert calls == [("contains", records), ("put", records), ("contains", records), ("get", records)]


def test_a_page_that_loses_its_records_one_after_the_other_is_told_once_until_it_is_written_again() -> None:
    rig = Rig()
    item = rig.written(Kind.PAGE)
    first, *rest = rig.mover.keys(item)

    def evict(*keys):
        rig.store.delete(keys)
        rig.store._removed += keys
        rig.written(Kind.PAGE, key=OTHER)
        told = list(rig.mover.removed)
        rig.mover.removed.clear()
        return told

    assert evict(first, b"a strange name") == [(Kind.PAGE, KEY)]
    assert evict(*rest) == [], "the page is known to be gone"
    rig.written(Kind.PAGE)
    assert evict(first, *rest) == [(Kind.PAGE, KEY)]
    rig.written(Kind.PAGE)
    assert evict(first) == [(Kind.PAGE, KEY)]
    rig.written(Kind.PAGE)
    assert evict(*rest) == [(Kind.PAGE, KEY)]


def test_a_store_that_keeps_some_records_of_a_page_has_not_kept_the_page() -> None:
    rig = Rig()
    rig.store.put = lambda values: [*MemoryStore.put(rig.store, values[:-1]), False]
    assert rig.do(Work.WRITE, rig.item(Kind.PAGE)).answers == [MISSING]
    assert rig.do(Work.ASK, rig.item(Kind.PAGE)).answers == [MISSING]
