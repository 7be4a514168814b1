"""Checks of a store as a whole: full, listed, checked, compacted, closed, opened again."""

from __future__ import annotations

import time
from collections.abc import Callable

from tiercel.errors import StoreError
from tiercel.storage.conformance.samples import (
    WAIT_S,
    Read,
    expect,
    expect_absent,
    expect_there,
    keep,
    maker,
)
from tiercel.storage.conformance.subject import SMALL_BYTES, Check, Inapplicable, Subject


def a_full_store_answers(subject: Subject) -> None:
    """More values than fit: nothing raises, values are evicted or refused, and those there are right."""
    if subject.open_small is None:
        raise Inapplicable("it can not be opened small")
    store = subject.open_small()
    samples = [maker(store)(number, 400_000) for number in range(4 * SMALL_BYTES // 400_000)]
    kept = [answer for sample in samples for answer in store.put([sample.put()])]
    expect(any(kept), "it refused everything")
    removed = store.removed()
    expect(set(removed) <= {sample.key for sample in samples}, "removed() tells keys that were never put")
    expect(not any(store.contains(removed)), "removed() tells a key that is there")
    expect(store.removed() == [], "removed() tells the same twice")
    store.put([sample.put() for sample in samples])
    answer = store.put([maker(store)(10_000, 2 * SMALL_BYTES).put()])
    expect(answer == [False], f"a value larger than the whole store: put answered {answer}")
    reads = [Read(sample) for sample in samples]
    hits = store.get([read.get for read in reads])
    expect(not all(hits), f"all of {len(samples)} values are there: it is not small")
    for read, hit in zip(reads, hits, strict=True):
        if hit:
            read.check("in a full store")
    store.clear()
    deadline = time.monotonic() + WAIT_S
    while store.put([samples[0].put()]) != [True]:  # a store may free space with some delay
        expect(time.monotonic() < deadline, "it was cleared, and yet refuses everything")
        time.sleep(0.01)


def removed_tells_only_what_the_store_let_go(subject: Subject) -> None:
    """Not the keys that the caller deleted or cleared."""
    store = subject.open()
    samples = [maker(store)(number) for number in range(2)]
    keep(store, samples)
    store.removed()
    store.delete([samples[0].key])
    store.clear()
    removed = store.removed()
    expect(removed == [], f"the caller deleted and cleared, removed() answered {removed}")


def keys_lists_what_is_there(subject: Subject) -> None:
    """Each key with the length of its value. A store that can not list raises StoreError."""
    store = subject.open()
    try:
        empty = list(store.keys())
    except StoreError as why:
        raise Inapplicable(str(why)) from why
    expect(empty == [], f"an empty store lists {empty}")
    samples = [maker(store)(number, 100 + number) for number in range(20)]
    keep(store, samples)
    store.delete([samples[0].key])
    listed = list(store.keys())
    expect(len(listed) == 19, f"19 are there, {len(listed)} are listed")
    want = {sample.key: sample.form.record_bytes for sample in samples[1:]}
    expect(dict(listed) == want, f"listed {listed}")


def check_finds_what_is_damaged(subject: Subject) -> None:
    """It finds nothing in a good store, and exactly the damaged value in another."""
    store = subject.open()
    samples = [maker(store)(number, 5000) for number in range(3)]
    keep(store, samples)
    try:
        checked = store.check()
    except StoreError as why:
        raise Inapplicable(str(why)) from why
    expect(checked == (3, []), f"three good values, check answered {checked}")
    if subject.spoil is not None:
        subject.spoil(store, samples[1].key)
        bad = store.check().bad
        expect([key for key, _ in bad] == [samples[1].key], f"one of three is damaged, check found {bad}")


def compact_loses_nothing(subject: Subject) -> None:
    """Deleted values stay deleted; all others are there."""
    store = subject.open()
    samples = [maker(store)(number, 20_000) for number in range(40)]
    keep(store, samples)
    store.delete([sample.key for sample in samples[::2]])
    given = store.compact()
    expect(given >= 0, f"compact answered {given}")
    expect_absent(store, samples[::2], "deleted before compact")
    expect_there(store, samples[1::2], "after compact")


def stats_has_records_and_bytes(subject: Subject) -> None:
    """The numbers are right, or None if the store does not know them."""
    store = subject.open()
    before = store.stats()
    expect({"records", "bytes"} <= before.keys(), f"stats answered {before}")
    expect(not before["records"], f"an empty store has {before['records']} records")
    samples = [maker(store)(number) for number in range(2)]
    keep(store, samples)
    after = store.stats()
    expect(after["records"] in (2, None), f"two records were put, stats says {after['records']}")
    least = sum(sample.form.record_bytes for sample in samples)
    held = after["bytes"]
    expect(held is None or held >= least, f"{least} B were put, stats says {held}")


def a_closed_store_refuses(subject: Subject) -> None:
    """After `close` every other call raises StoreError. `close` may be called again."""
    store = subject.open()
    sample = maker(store)(1)
    keep(store, [sample])
    store.close()
    store.close()
    calls: dict[str, Callable[[], object]] = {
        "contains": lambda: store.contains([sample.key]),
        "get": lambda: store.get([Read(sample).get]),
        "put": lambda: store.put([sample.put()]),
        "delete": lambda: store.delete([sample.key]),
        "clear": store.clear,
        "stats": store.stats,
        "keys": lambda: list(store.keys()),
        "check": store.check,
    }
    for name, call in calls.items():
        try:
            answer = call()
        except StoreError:
            continue
        raise AssertionError(f"{name} after close answered {answer}")
    store.close()


def leaving_a_with_closes(subject: Subject) -> None:
    """`with` gives the store itself, and closes it at the end."""
    with subject.open() as store:
        sample = maker(store)(1)
        keep(store, [sample])
    try:
        store.contains([sample.key])
    except StoreError:
        return
    raise AssertionError("after the with it is still open")


def what_was_kept_outlives_the_store(subject: Subject) -> None:
    """After close and open, values that were put are there, deleted ones are not."""
    if subject.open_again is None:
        raise Inapplicable("the store is not durable")
    store = subject.open()
    samples = [maker(store)(number, 10_000) for number in range(10)]
    keep(store, samples)
    store.delete([samples[0].key])
    store.close()
    again = subject.open_again()
    expect_there(again, samples[1:], "after close and open")
    expect_absent(again, samples[:1], "deleted before close and open")


CHECKS: tuple[Check, ...] = (
    a_full_store_answers,
    removed_tells_only_what_the_store_let_go,
    keys_lists_what_is_there,
    check_finds_what_is_damaged,
    compact_loses_nothing,
    stats_has_records_and_bytes,
    a_closed_store_refuses,
    leaving_a_with_closes,
    what_was_kept_outlives_the_store,
)
