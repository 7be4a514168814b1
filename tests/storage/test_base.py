"""Goal: what every store can do because of its contract: `check` finds every flaw, whatever the store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tiercel.errors import StoreError
from tiercel.storage import base
from tiercel.storage.base import Get, Put
from tiercel.storage.conformance.samples import Sample
from tiercel.storage.memory import MemoryStore
from tiercel.storage.record import Flaw, RecordKey

RECORD_BYTES = Sample(1).put().bytes


def put_of(number: int) -> Put:
    return Sample(number).put()


class Broken(MemoryStore):
    """Lists what it can not give."""

    def get(self, wanted: list[Get]) -> list[bool]:  # type: ignore[override]
        return [False] * len(wanted)


def values_with_flaws() -> Iterator[tuple[RecordKey, bytes, Flaw | None]]:
    """Each what it should be, but for one thing."""
    good = b"".join(put_of(1).parts)
    yield put_of(1).key, good, None
    yield put_of(2).key, good, Flaw.KEY
    yield put_of(3).key, b"not a record", Flaw.FOREIGN
    yield put_of(4).key, b"".join(put_of(4).parts)[:-1], Flaw.FORM
    yield put_of(5).key, b"".join(put_of(5).parts)[:-1] + b"?", Flaw.CHECKSUM
    damaged = bytearray(b"".join(put_of(6).parts))
    damaged[50] ^= 1
    yield put_of(6).key, bytes(damaged), Flaw.HEADER


@pytest.mark.parametrize("read_bytes", [1, 2 * RECORD_BYTES, 1 << 30])
def test_every_flaw_of_any_store_is_found(monkeypatch: pytest.MonkeyPatch, read_bytes: int) -> None:
    monkeypatch.setattr(base, "CHECK_BYTES", read_bytes)
    store = MemoryStore()
    values = list(values_with_flaws())
    store.put([Put(key, [value]) for key, value, _ in values])
    records, flaws = store.check()
    assert records == len(values)
    assert dict(flaws) == {key: flaw for key, _, flaw in values if flaw}


def test_a_record_that_is_listed_and_can_not_be_read_is_bad() -> None:
    store = Broken()
    store.put([put_of(1)])
    assert store.check() == (1, [(put_of(1).key, Flaw.UNREADABLE)])


def test_a_record_that_went_after_it_was_listed_is_not_bad() -> None:
    class Late(Broken):
        def contains(self, keys: list[RecordKey]) -> list[bool]:  # type: ignore[override]
            return [False] * len(keys)

    store = Late()
    store.put([put_of(1)])
    assert store.check().bad == []


def test_a_store_that_can_not_list_can_not_be_checked() -> None:
    class Silent(MemoryStore):
        def keys(self) -> Iterator[tuple[RecordKey, int]]:
            raise StoreError("can not list")

    with pytest.raises(StoreError, match="can not list"):
        Silent().check()
