"""Goal: a page is there in full or not at all, whatever happens to one of its records. Method: a spec whose
pages and tails are several records each, the reference store, and every record in turn."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from tests.memory.specs import V4, in_records
from tests.simulation.specs import SPECS
from tests.transfer import test_mover
from tests.transfer.rig import pieces_of
from tests.transfer.test_mover import KEY, OTHER
from tiercel.config import LAYOUTS
from tiercel.peers.records import Records
from tiercel.spec import CacheSpec
from tiercel.storage.memory import MemoryStore
from tiercel.storage.record import ALIGN_LEAST, Header, parse
from tiercel.transfer.mover import ItemPlace, Presence, Work
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


# Two pools


ONE, TWO = in_records(V4), in_records(replace(V4, second=("c4",)))


def rig_of(spec: CacheSpec, layout: str, store: MemoryStore | None = None) -> test_mover.Rig:
    return type("Own", (test_mover.Rig,), {"spec": spec})(store=store, layout=layout)


def rows_of(rig: test_mover.Rig, item: ItemPlace) -> dict[tuple[str, int], torch.Tensor]:
    """The rows of a page or tail, wherever its memory has them."""
    return {
        (stream.name, layer): torch.cat(pieces_of(rig.host, stream.name, layer, item.host))
        for stream in rig.spec.streams_of(item.kind)
        for layer in stream.layers
    }


@pytest.mark.parametrize(("writer", "reader"), [(ONE, TWO), (TWO, ONE), (TWO, TWO)])
@pytest.mark.parametrize("layouts", [*product(LAYOUTS, LAYOUTS)], ids=lambda both: " to ".join(both))
@pytest.mark.parametrize("kind", Kind)
def test_stored_bytes_do_not_depend_on_pools(writer, reader, layouts, kind) -> None:
    store, count = MemoryStore(), V4.places_of(kind)
    here, there = rig_of(writer, layouts[0], store), rig_of(reader, layouts[1], store)
    item = here.piece(*range(count - 1, -1, -1), kind=kind)
    here.host.flat.random_(0, 256)
    assert here.do(Work.WRITE, item).answers == [HERE]
    assert len(store._values) == len(ONE.grains(kind)) > 1
    back = there.piece(*range(9, 9 + count), kind=kind)
    assert there.do(Work.READ, back).answers == [HERE]
    written, read = rows_of(here, item), rows_of(there, back)
    assert written.keys() == read.keys() and all(torch.equal(written[row], read[row]) for row in written)
    again = rig_of(reader, layouts[1])
    again.host.flat.copy_(there.host.flat)
    assert again.do(Work.WRITE, back).answers == [HERE]
    assert again.store._values == store._values, "the same records under the same names"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", Kind)
def test_a_peer_is_told_where_the_bytes_of_a_record_are(kind, layout) -> None:
    rig = rig_of(TWO, layout)
    item = rig.piece(*range(V4.places_of(kind)), kind=kind)
    rig.host.flat.random_(0, 256)
    assert rig.do(Work.WRITE, item).answers == [HERE]
    records, own = Records(rig.host, TWO), SimpleNamespace(kind=kind)
    for name in rig.mover.keys(item):
        value = rig.store._values[name]
        payload = value[parse(value).header_bytes :]
        assert b"".join(records.views(name, own, item.host)) == payload
        described = records.describe(name, own, item.host, align=ALIGN_LEAST, pieces=True)
        memory = rig.host.mapped
        assert b"".join(memory[at : at + size] for at, size in described.pieces) == payload


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
