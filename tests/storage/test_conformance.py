"""Goal: the checks of the contract find what they are for. Method: stores that are right but for one thing,
each of which must be caught by the check that is about it; and a third party's view of a run."""

import time
from threading import Lock

import pytest

from tiercel.errors import StoreError
from tiercel.storage.base import Checked, Put, Store
from tiercel.storage.conformance import Verdict, checks, run_checks, samples
from tiercel.storage.conformance.checks import CHECKS
from tiercel.storage.conformance.samples import SMALL_BYTES, Subject
from tiercel.storage.memory import MemoryStore
from tiercel.storage.record import Flaw, parse


class AcceptsAnyLength(MemoryStore):
    """Fills what it was given, as far as the value goes."""

    def get(self, wanted):
        answers = []
        for each in wanted:
            value = self._values.get(each.key)
            for part in each.parts if value is not None else ():
                part[: len(value)] = value[: len(part)]
                value = value[len(part) :]
            answers.append(value is not None)
        return answers


class KeepsTheCallersBuffer(MemoryStore):
    """Joins the parts when they are asked for."""

    def put(self, values):
        kept = super().put(values)
        for each in values:
            self._values[each.key] = Joined(each.parts)
        return kept


class Joined:
    def __init__(self, parts):
        self.parts = parts

    def __len__(self):
        return sum(map(len, self.parts))

    def __getitem__(self, where):
        return b"".join(self.parts)[where]


class AnswersForAnotherKey(MemoryStore):
    """Looks only at the end of a key: two kinds of one page are one to it."""

    def put(self, values):
        return super().put([Put(each.key[1:], each.parts) for each in values])

    def get(self, wanted):
        return super().get([each._replace(key=each.key[1:]) for each in wanted])

    def contains(self, keys):
        return super().contains([key[1:] for key in keys])

    def delete(self, keys):
        return super().delete([key[1:] for key in keys])


class TearsValues(MemoryStore):
    """Writes a value where it can be read while it is written."""

    def put(self, values):
        for each in values:
            value = bytearray(each.bytes)
            self._values[each.key] = value
            at = 0
            for part in each.parts:
                value[at : at + len(part)] = part
                at += len(part)
                time.sleep(0.0005)
        return [True] * len(values)


class ReusesMemory(MemoryStore):
    """What is deleted makes room for others while somebody may still be reading it."""

    def get(self, wanted):
        answers = []
        for each in wanted:
            value = self._values.get(each.key)
            if value is None or len(value) != each.bytes:
                answers.append(False)
                continue
            at = 0
            for part in each.parts:
                time.sleep(0.0005)
                part[:] = value[at : at + len(part)]
                at += len(part)
            answers.append(True)
        return answers

    def put(self, values):
        kept = super().put(values)
        for each in values:
            self._values[each.key] = bytearray(self._values[each.key])
        return kept

    def delete(self, keys):
        for key in keys:
            value = self._values.get(key, bytearray())
            value[:] = bytes(len(value))
        return super().delete(keys)


class RaisesOnAMiss(MemoryStore):
    def get(self, wanted):
        if not all(each.key in self._values for each in wanted):
            raise StoreError("no such key")
        return super().get(wanted)


class ForgetsWhatItPut(MemoryStore):
    """Answers True and keeps only the last of a batch."""

    def put(self, values):
        super().put(values[-1:])
        return [True] * len(values)


class ClearsNothing(MemoryStore):
    def clear(self):
        pass


class CountsAbsentKeys(MemoryStore):
    def delete(self, keys):
        super().delete(keys)
        return len(keys)


class GoesOnAfterClose(MemoryStore):
    def close(self):
        pass


class ClosesOnlyOnce(MemoryStore):
    def close(self):
        if self._closed:
            raise StoreError("the store is closed")
        super().close()


class RaisesWhenFull(MemoryStore):
    def put(self, values):
        if self._size is not None and self._bytes + sum(each.bytes for each in values) > self._size:
            raise StoreError("full")
        return super().put(values)


class NeverFull(MemoryStore):
    """Takes everything, whatever its size."""

    def __init__(self, size=None):
        super().__init__()


class AnswersInAnotherOrder(MemoryStore):
    """Looks keys up sorted."""

    def contains(self, keys):
        return super().contains(sorted(keys))


class FillsOneOfTwo(MemoryStore):
    """Of a key that comes twice in a batch it fills the last, as Mooncake's client does."""

    def get(self, wanted):
        last = {each.key: each for each in wanted}
        answers = dict(zip(last, super().get(list(last.values())), strict=True))
        return [answers[each.key] for each in wanted]


class WritesBesideTheParts(MemoryStore):
    """Takes neighbouring parts for one range."""

    def get(self, wanted):
        answers = super().get(wanted)
        for each, hit in zip(wanted, answers, strict=True):
            if hit:
                part = each.parts[0]
                part.obj[part.nbytes + 3 : part.nbytes + 6] = bytes(3)
        return answers


class TellsWhatTheCallerDeleted(MemoryStore):
    def delete(self, keys):
        self._removed += [key for key in keys if key in self._values]
        return super().delete(keys)


class TellsRemovedTwice(MemoryStore):
    def removed(self):
        return list(self._removed)


class ListsPayloadBytes(MemoryStore):
    def keys(self):
        listed = super().keys()
        return ((key, size - 192) for key, size in listed)


class MiscountsRecords(MemoryStore):
    def stats(self):
        return {**super().stats(), "records": len(self._values) + 1}


class HasNoStats(MemoryStore):
    def stats(self):
        return {}


class DropsWhatIsLong(MemoryStore):
    """Keeps at most a megabyte of a value."""

    def put(self, values):
        return super().put([Put(each.key, [b"".join(each.parts)[: 1 << 20]]) for each in values])


class ReadsAfterClose(MemoryStore):
    """A call under way finds everything gone when another thread closes: half of its parts are filled."""

    def get(self, wanted):
        answers = []
        for each in wanted:
            value = self._values.get(each.key, b"")
            for part in each.parts:
                if self._closed:
                    value = bytes(len(value))
                part[:] = value[: len(part)]
                value = value[len(part) :]
                time.sleep(0.002)
            answers.append(True)
        return answers


class IsNoFactoryOfItself(MemoryStore):
    """Leaving a `with` does nothing."""

    def __exit__(self, *_):
        pass


class Lasting(MemoryStore):
    """Right: what it holds is still there when it is opened again."""

    def __init__(self, held):
        super().__init__()
        self._held = held
        self._values = dict(held)

    def close(self):
        if not self._closed:
            self._held |= self._values
        super().close()

    def delete(self, keys):
        for key in keys:
            self._held.pop(key, None)
        return super().delete(keys)


class ComesBackWithWhatWasDeleted(Lasting):
    """Forgets only until it is opened again."""

    def put(self, values):
        kept = super().put(values)
        self._held |= self._values
        return kept

    def delete(self, keys):
        return MemoryStore.delete(self, keys)


class RaisesOnDamage(MemoryStore):
    """One value that can not be read fails everything that was asked for with it."""

    def get(self, wanted):
        if any(len(self._values.get(each.key, b"")) not in (0, each.bytes) for each in wanted):
            raise StoreError("a value has another length")
        return super().get(wanted)


class DeletesOnlyWhatItCanRead(MemoryStore):
    def delete(self, keys):
        return super().delete([key for key in keys if parse(self._values.get(key, b"")) is not Flaw.FOREIGN])


class RemembersWhatItHad(MemoryStore):
    """Writes no key twice: what it once had it takes to be there."""

    def put(self, values):
        had = self.__dict__.setdefault("_had", set())
        kept = super().put([value for value in values if value.key not in had])
        had.update(value.key for value in values)
        return kept + [True] * (len(values) - len(kept))


class IsNotThereWhileItIsPut(MemoryStore):
    """Takes the old value away before the new one is whole."""

    def put(self, values):
        super().delete([each.key for each in values])
        time.sleep(0.0005)
        return super().put(values)


class ChecksOnlyLengths(MemoryStore):
    """Finds nothing wrong with what it can read."""

    def check(self):
        return Checked(len(self._values), [])


class CompactsTooMuch(MemoryStore):
    """Gives back space that holds something."""

    def compact(self):
        return len(self._values.popitem()[1])


BROKEN = {
    ChecksOnlyLengths: checks.check_finds_what_is_damaged,
    CompactsTooMuch: checks.compact_loses_nothing,
    RaisesOnDamage: checks.what_can_not_be_read_is_deleted_and_put_again,
    DeletesOnlyWhatItCanRead: checks.what_can_not_be_read_is_deleted_and_put_again,
    RemembersWhatItHad: checks.what_can_not_be_read_is_deleted_and_put_again,
    IsNotThereWhileItIsPut: checks.what_is_there_is_never_missed,
    AcceptsAnyLength: checks.another_length_is_a_miss,
    KeepsTheCallersBuffer: checks.buffers_are_not_kept,
    AnswersForAnotherKey: checks.any_bytes_may_be_a_key,
    TearsValues: checks.threads_see_whole_values_or_none,
    ReusesMemory: checks.threads_see_whole_values_or_none,
    RaisesOnAMiss: checks.a_miss_is_an_answer,
    ForgetsWhatItPut: checks.a_batch_answers_each_in_its_place,
    ClearsNothing: checks.clear_forgets_everything,
    CountsAbsentKeys: checks.what_was_deleted_is_gone_and_counted,
    GoesOnAfterClose: checks.a_closed_store_refuses,
    ClosesOnlyOnce: checks.a_closed_store_refuses,
    RaisesWhenFull: checks.a_full_store_answers,
    NeverFull: checks.a_full_store_answers,
    TellsRemovedTwice: checks.a_full_store_answers,
    AnswersInAnotherOrder: checks.a_batch_answers_each_in_its_place,
    FillsOneOfTwo: checks.a_batch_answers_each_in_its_place,
    WritesBesideTheParts: checks.a_value_comes_back_as_it_was_put,
    TellsWhatTheCallerDeleted: checks.removed_tells_only_what_the_store_let_go,
    ListsPayloadBytes: checks.keys_lists_what_is_there,
    MiscountsRecords: checks.stats_has_records_and_bytes,
    HasNoStats: checks.stats_has_records_and_bytes,
    DropsWhatIsLong: checks.a_value_comes_back_as_it_was_put,
    ReadsAfterClose: checks.closing_under_way_breaks_nothing,
    IsNoFactoryOfItself: checks.leaving_a_with_closes,
    ComesBackWithWhatWasDeleted: checks.what_was_kept_outlives_the_store,
}


def subject_of(store_class):
    if issubclass(store_class, Lasting):
        folders = [{}]

        def open_new():
            folders.append({})
            return store_class(folders[-1])

        return Subject(open_new, None, lambda: store_class(folders[-1]))
    return Subject(store_class, lambda: store_class(SMALL_BYTES), spoil=overwrite)


def overwrite(store, key):
    store._values[key] = bytes(len(store._values[key]))


@pytest.mark.parametrize("store_class", BROKEN, ids=lambda store_class: store_class.__name__)
def test_a_broken_store_is_found_by_the_check_that_is_about_it(store_class):
    result = run_checks(subject_of(store_class), [BROKEN[store_class]])[0]
    assert result.outcome is Verdict.FAILED
    assert result.why


@pytest.mark.parametrize("right", [MemoryStore, Lasting])
def test_a_right_store_passes_every_check_that_concerns_it(right):
    results = run_checks(subject_of(right))
    assert [result.check for result in results] == [check.__name__ for check in CHECKS]
    failed = [str(result) for result in results if result.outcome is Verdict.FAILED]
    assert not failed
    inapplicable = {result.check for result in results if result.outcome is Verdict.INAPPLICABLE}
    assert inapplicable == (
        {"what_was_kept_outlives_the_store"} if right is MemoryStore else {"a_full_store_answers"}
    )


def test_a_store_that_can_not_list_is_not_wrong():
    class Silent(MemoryStore):
        keys = Store.keys

    result = run_checks(Subject(Silent), [checks.keys_lists_what_is_there])[0]
    assert result.outcome is Verdict.INAPPLICABLE
    assert "can not list" in result.why


def test_every_store_that_was_opened_is_closed_also_by_a_check_that_fails():
    opened = []

    def open_one():
        opened.append(ClearsNothing())
        return opened[-1]

    run_checks(Subject(open_one))
    assert len(opened) >= len(CHECKS) - 2
    for store in opened:
        with pytest.raises(StoreError):
            store.stats()


def test_a_result_reads_as_a_sentence():
    result = run_checks(Subject(ClearsNothing), [checks.clear_forgets_everything])[0]
    assert str(result) == "FAILED       clear forgets everything: AssertionError: after clear: contains"


def test_a_store_that_hangs_is_told(monkeypatch):
    monkeypatch.setattr(samples, "WAIT_S", 0.2)
    stuck = Lock()

    class Hangs(MemoryStore):
        def put(self, values):
            with stuck:
                return super().put(values)

    with stuck:
        result = run_checks(Subject(Hangs), [checks.what_one_thread_keeps_others_find])[0]
    assert "did not return" in result.why


def test_every_check_is_listed_and_says_what_it_is():
    listed = {check.__name__ for check in CHECKS}
    assert len(listed) == len(CHECKS)
    public = {
        name
        for name, value in vars(checks).items()
        if getattr(value, "__module__", "") == checks.__name__ and not name.startswith("_")
    }
    assert public == listed
    assert all(check.__doc__ for check in CHECKS)
