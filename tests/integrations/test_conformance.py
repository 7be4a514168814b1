"""Goal: the checks of named pages find what they are for. Method: named pages that are right but for one
thing, each of which must be caught by the check that is about it. (Right ones pass on every store:
`tests/contract`.)"""

import pytest

from tiercel.integrations import conformance as checks
from tiercel.integrations import named_pages
from tiercel.integrations.named_pages import NamedPages, Pool
from tiercel.policy.breaker import Breaker
from tiercel.storage.conformance import Subject, Verdict, run_checks
from tiercel.storage.conformance.samples import SMALL_BYTES
from tiercel.storage.memory import MemoryStore
from tiercel.storage.record import Form


class Lasting(MemoryStore):
    """Keeps its values when it is closed."""

    kept: dict = {}

    def close(self):
        Lasting.kept = dict(self._values)
        super().close()


def again():
    store = Lasting()
    store._values.update(Lasting.kept)
    return store


def spoil(store, key):
    value = bytearray(store._values[key])
    value[-1] ^= 1
    store._values[key] = bytes(value)


SUBJECT = Subject(Lasting, lambda: MemoryStore(SMALL_BYTES), again, spoil)


def nothing_is_verified(patch):
    patch.setattr(Form, "flaw", lambda *_: None)


def what_is_damaged_stays(patch):
    patch.setattr(Pool, "delete", lambda *_: 0)


def one_meaning_for_all(patch):
    patch.setattr(NamedPages, "pool", lambda self, name, size, about=None: Pool(self, name, size, []))


def a_failing_store_is_an_error(patch):
    patch.setattr(NamedPages, "call", lambda self, do, without: do())


def a_failing_store_is_asked_for_ever(patch):
    patch.setattr(Breaker, "failed", lambda *_: None)


def a_pages_pieces_are_read_in_one(patch):
    real = Pool._parts
    patch.setattr(Pool, "_parts", lambda self, page: real(self, page)[::-1])


def keys_are_cut(patch):
    real = named_pages.page_key
    patch.setattr(named_pages, "page_key", lambda key: real(key[:1]))


def nothing_is_deleted(patch):
    patch.setattr(Pool, "delete", lambda self, keys: len(keys))


def everything_is_kept(patch):
    patch.setattr(Pool, "put", lambda self, keys, pages: [True] * len(keys))


BROKEN = {
    nothing_is_verified: checks.a_spoiled_page_is_a_miss_and_can_be_put_again,
    what_is_damaged_stays: checks.a_spoiled_page_is_a_miss_and_can_be_put_again,
    one_meaning_for_all: checks.another_meaning_is_another_page,
    a_failing_store_is_an_error: checks.a_store_that_fails_costs_hits_only,
    a_failing_store_is_asked_for_ever: checks.a_store_that_fails_costs_hits_only,
    a_pages_pieces_are_read_in_one: checks.a_page_may_be_in_pieces_and_a_key_any_text_or_bytes,
    keys_are_cut: checks.threads_may_use_a_pool,
    nothing_is_deleted: checks.pages_come_back_as_they_were_put,
    everything_is_kept: checks.pages_outlive_the_store,
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda each: each.__name__)
def test_broken_pages_are_found_by_the_check_that_is_about_it(broken, monkeypatch):
    broken(monkeypatch)
    result = run_checks(SUBJECT, [BROKEN[broken]])[0]
    assert result.outcome is Verdict.FAILED and result.why


class LosesTheLastByte(MemoryStore):
    def get(self, wanted):
        found = super().get(wanted)
        for each in wanted[1:]:
            each.parts[-1][-1:] = b"?"
        return found


def test_a_store_that_mixes_up_pages_is_found(monkeypatch):
    nothing_is_verified(monkeypatch)
    small = Subject(LosesTheLastByte, lambda: LosesTheLastByte(SMALL_BYTES))
    for check in (checks.pages_come_back_as_they_were_put, checks.a_full_store_loses_pages_and_mixes_up_none):
        assert "other bytes" in run_checks(small, [check])[0].why


def test_every_check_is_listed_and_passes_where_it_concerns():
    assert {result.outcome for result in run_checks(SUBJECT, checks.CHECKS)} == {Verdict.PASSED}
    assert len(checks.CHECKS) == 8
    without = {each.check for each in run_checks(Subject(MemoryStore), checks.CHECKS) if each.why}
    assert len(without) == 3 and all(each.__doc__ for each in checks.CHECKS)
