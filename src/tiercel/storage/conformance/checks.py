"""The checks. Every public function of this module is one: it takes an empty store, or the subject. It raises
AssertionError, which says what is wrong with the store, or Inapplicable."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from inspect import isfunction
from itertools import pairwise
from threading import Semaphore

from tiercel.errors import StoreError
from tiercel.storage.base import Get, Put, Store
from tiercel.storage.conformance.samples import (
    SMALL_BYTES,
    WAIT_S,
    Inapplicable,
    Read,
    Subject,
    expect,
    expect_absent,
    expect_there,
    keep,
    kept,
    maker,
    read_some,
    together,
)
from tiercel.storage.record import ALIGN_LEAST, View
from tiercel.types import Kind

_SIZES = (1, 4096, 256 << 10, 3 << 20)
_THREADS = 8


def a_value_comes_back_as_it_was_put(store: Store) -> None:
    """Payloads of one byte up to a few megabytes, each alone and all in one batch."""
    expect(store.align >= ALIGN_LEAST and store.align % ALIGN_LEAST == 0, f"align is {store.align}")
    samples = [maker(store)(number, size) for number, size in enumerate(_SIZES)]
    for sample in samples:
        keep(store, [sample])
        expect_there(store, [sample], f"a payload of {sample.payload_bytes} B")
    expect_there(store, samples, "all sizes together")


def parts_may_be_many_and_lie_anywhere(store: Store) -> None:
    """Hundreds of parts of bytes, bytearray and memoryview, at odd addresses; cut differently when read."""
    sample = maker(store)(1, 64 << 10)
    record = sample.header + sample.payload
    cuts = sorted(random.Random(1).sample(range(sample.form.header_bytes + 1, len(record)), 300))
    parts: list[View] = [sample.header]
    parts += [record[start:end] for start, end in pairwise([len(sample.header), *cuts, len(record)])]
    parts[1::3] = [bytearray(part) for part in parts[1::3]]
    parts[2::3] = [memoryview(b"?" + bytes(part))[1:] for part in parts[2::3]]
    expect(store.put([Put(sample.key, parts)]) == [True], f"a value of {len(parts)} parts was not kept")
    for cut in ([], random.Random(2).sample(range(len(sample.header), len(record)), 200), [len(record) - 1]):
        read = Read(sample, cut)
        expect(store.get([read.get]) == [True], f"a value of {len(parts)} parts was not found")
        read.check(f"put as {len(parts)} parts, read as {len(read.get.parts)}")


def registered_memory_makes_no_difference(subject: Subject) -> None:
    """Payloads inside and outside of registered memory. The store is closed before that memory is freed."""
    with subject.open() as store:
        samples = [maker(store)(number, 1 << 20) for number in range(3)]
        memory = memoryview(bytearray((3 << 20) + 7))
        store.register(memory)
        inside = [memory[at << 20 : (at + 1) << 20] for at in range(2)]
        inside[0][:] = samples[0].payload
        values = [Put(samples[0].key, [samples[0].header, inside[0]]), samples[1].put()]
        expect(store.put(values) == [True] * 2, "values in registered memory were not kept")
        expect_there(store, samples[:2], "put from registered memory")
        header, read = memoryview(bytearray(len(samples[1].header))), Read(samples[0])
        answer = store.get([read.get, Get(samples[1].key, [header, inside[1]]), Read(samples[2]).get])
        expect(answer == [True, True, False], f"get into registered memory answered {answer}")
        read.check("beside one in registered memory")
        flaw = samples[1].form.flaw(header, samples[1].page_key, [inside[1]])
        expect(flaw is None, f"read into registered memory: {flaw}")
        expect(inside[0] == samples[0].payload, "get wrote outside the parts it was given")


def a_miss_is_an_answer(store: Store) -> None:
    """A key that was never put is a miss, in an empty store and beside other keys."""
    samples = [maker(store)(number) for number in range(3)]
    expect_absent(store, samples[:1], "an empty store")
    keep(store, samples[1:2])
    expect_absent(store, samples[::2], "a key that was never put")


def another_length_is_a_miss(store: Store) -> None:
    """A get for more or fewer bytes than were put returns False, and the value stays."""
    (sample,) = kept(store, 1, 5000)
    for bytes_more in (1, -1, 100_000, -4999):
        answer = store.get([Read(sample, bytes_more=bytes_more).get])
        expect(answer == [False], f"asked for {bytes_more:+} bytes, get answered {answer}")
    expect_there(store, [sample], "after asking for another length")


def what_can_not_be_read_is_deleted_and_put_again(subject: Subject) -> None:
    """A damaged value, or one of another length, does not affect others, and can be deleted and put again."""
    for spoil in (None, subject.spoil) if subject.spoil else (None,):
        store = subject.open()
        samples = kept(store, 3, 5000)
        spoiled = samples[1]
        if spoil is None:
            store.delete([spoiled.key])
            keep(store, [maker(store)(1, 2500)])
        else:
            spoil(store, spoiled.key)
        reads = [Read(sample) for sample in samples]
        answer = store.get([read.get for read in reads])
        expect(answer[::2] == [True, True], f"beside a value that can not be read get answered {answer}")
        expect(not answer[1] or reads[1].flaw() is not None, "get answered True with what was never put")
        store.delete([spoiled.key])
        expect_absent(store, [spoiled], "deleted because it could not be read")
        keep(store, [spoiled])
        expect_there(store, samples, "put again after it could not be read")
        if subject.open_again is not None:
            store.close()
            expect_there(subject.open_again(), samples, "and opened again")


def a_batch_answers_each_in_its_place(store: Store) -> None:
    """Hits, misses, wrong lengths and repeated keys in one batch."""
    make = maker(store)
    a, b, absent = make(1, 100), make(2, 3000), make(3)
    keep(store, [a, b, a])
    found = store.contains([absent.key, a.key, absent.key, b.key, a.key])
    expect(found == [False, True, False, True, True], "contains mixes up a batch")
    reads = [Read(absent), Read(b), Read(a, bytes_more=2900), Read(a), Read(absent), Read(b)]
    answer = store.get([read.get for read in reads])
    expect(answer == [False, True, False, True, False, True], f"get answered {answer}")
    for read in (reads[1], reads[3], reads[5]):
        read.check("one of a batch")


def an_empty_batch_is_nothing(store: Store) -> None:
    """Every call accepts an empty batch."""
    answers = (store.contains([]), store.get([]), store.put([]), store.delete([]))
    expect(answers == ([], [], [], 0), f"contains, get, put, delete of nothing answered {answers}")


def a_batch_may_be_large(store: Store) -> None:
    """Many values in one call, and many bytes."""
    make = maker(store)
    for samples in ([make(n, 64) for n in range(1200)], [make(2000 + n, 3 << 20) for n in range(7)]):
        keep(store, samples)
        expect_there(store, samples, f"one batch of {len(samples)}")
        gone = store.delete([sample.key for sample in samples])
        expect(gone == len(samples), f"delete of {len(samples)} answered {gone}")


def a_key_may_be_put_twice(store: Store) -> None:
    """The second put returns True, and the value is the same."""
    sample = maker(store)(1)
    for _ in range(2):
        keep(store, [sample])
        expect_there(store, [sample], "a key that was put again")
    expect(store.delete([sample.key]) == 1, "a key that was put twice is there twice")
    expect_absent(store, [sample], "put twice, deleted once")


def any_bytes_may_be_a_key(store: Store) -> None:
    """Zeros, line ends, pattern characters, high bytes; keys that differ in one byte, or only in the kind."""
    names = [bytes(32), b"\xff" * 32, b"*" * 32, b"[a-z]?\\\r\n\0" * 3 + b"**", bytes(31) + b"\1"]
    kinds = (Kind.PAGE, Kind.TAIL)
    samples = [maker(store)(name, 100, kind) for name in names for kind in kinds]
    keep(store, samples)
    expect_there(store, samples, "a key of unusual bytes")
    expect(store.delete([samples[6].key]) == 1, "delete of one key")
    expect_absent(store, samples[6:7], "deleted")
    expect_there(store, samples[:6] + samples[7:], "not deleted")


def what_was_deleted_is_gone_and_counted(store: Store) -> None:
    """`delete` counts each key once, if it was there; other keys stay; a deleted key can be put again."""
    samples = [maker(store)(number) for number in range(4)]
    keep(store, samples[:3])
    keys = [samples[0].key, samples[3].key, samples[1].key, samples[0].key]
    gone = store.delete(keys)
    expect(gone == 2, f"two of the deleted keys were there, delete answered {gone}")
    expect_absent(store, [*samples[:2], samples[3]], "deleted")
    expect_there(store, [samples[2]], "not deleted")
    expect(store.delete(keys) == 0, "deleted again, and counted again")
    keep(store, samples[:1])
    expect_there(store, samples[:1], "put after it was deleted")


def clear_forgets_everything(store: Store) -> None:
    """The store can be used afterwards."""
    samples = kept(store, 50)
    store.clear()
    expect_absent(store, samples, "after clear")
    expect(store.delete([samples[0].key]) == 0, "after clear there was something to delete")
    store.clear()
    keep(store, samples[:2])
    expect_there(store, samples[:2], "put after clear")


def buffers_are_not_kept(store: Store) -> None:
    """The caller may change its memory after a put or a get: the stored value stays the same."""
    sample = maker(store)(1, 300_000)
    header, payload = bytearray(sample.header), bytearray(sample.payload)
    expect(store.put([Put(sample.key, [header, memoryview(payload)])]) == [True], "put")
    header[:], payload[:] = bytes(len(header)), bytes(len(payload))
    expect_there(store, [sample], "the caller's memory was overwritten after put")
    read = Read(sample)
    expect(store.get([read.get]) == [True], "get")
    for part in read.get.parts:
        part[:] = bytes(len(part))
    expect_there(store, [sample], "the caller's memory was overwritten after get")


def what_is_there_is_never_missed(store: Store) -> None:
    """A value is found while others put it again. (After a wrong miss the caller would delete it.)"""
    samples = kept(store, 4, 20_000)

    def put_again() -> None:
        for _ in range(30):
            keep(store, samples)

    def find() -> None:
        for _ in range(30):
            expect_there(store, samples, "while others put it again")

    together([put_again, find] * (_THREADS // 2))


def what_one_thread_keeps_others_find(store: Store) -> None:
    """Eight threads put different values at the same time; afterwards each is found by another."""
    make = maker(store)
    shares = [[make(10 * thread + n, 20_000) for n in range(4)] for thread in range(_THREADS)]
    together(partial(keep, store, share) for share in shares)
    together(partial(expect_there, store, share, "put by another thread") for share in shares[::-1])


def threads_see_whole_values_or_none(store: Store) -> None:
    """Eight threads put, get, delete and clear the same keys. A value that is found is always whole."""
    sizes = (100, 4000, 4000, 30_000, 30_000, 200_000)
    samples = [maker(store)(number, size) for number, size in enumerate(sizes)]
    puts = {sample: sample.put() for sample in samples}

    def act(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            some = chance.choices(samples, k=chance.randint(1, 3))
            keys = [sample.key for sample in some]
            match chance.choices(("put", "get", "delete", "contains", "clear"), (40, 45, 8, 5, 2))[0]:
                case "put":
                    answer = store.put([puts[sample] for sample in some])
                    expect(len(answer) == len(some), f"put of {len(some)} answered {answer}")
                case "get":
                    read_some(store, some, "while others put, delete and clear")
                case "delete":
                    gone = store.delete(keys)
                    expect(0 <= gone <= len(set(keys)), f"delete of {len(keys)} answered {gone}")
                case "contains":
                    store.contains(keys)
                case _:
                    store.clear()

    together(partial(act, seed) for seed in range(_THREADS))
    store.clear()
    expect_absent(store, samples, "cleared when all was over")
    keep(store, samples)
    expect_there(store, samples, "put when all was over")


def closing_under_way_breaks_nothing(store: Store) -> None:
    """A call during `close` by another thread gets an answer or a StoreError, never a part of a value."""
    (sample,) = kept(store, 1, 200_000)
    begun = Semaphore(0)

    def use() -> None:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            try:
                read_some(store, [sample], "while it was closed")
                store.put([sample.put()])
            except StoreError:
                return
            finally:
                begun.release()
        raise AssertionError("closed, and yet it goes on answering")

    def close() -> None:
        for _ in range(_THREADS):
            begun.acquire(timeout=WAIT_S)
        store.close()

    together([use] * (_THREADS - 1) + [close])


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
    hits = read_some(store, samples, "in a full store")
    expect(not all(hits), f"all of {len(samples)} values are there: it is not small")
    store.clear()
    deadline = time.monotonic() + WAIT_S
    while store.put([samples[0].put()]) != [True]:  # a store may free space with some delay
        expect(time.monotonic() < deadline, "it was cleared, and yet refuses everything")
        time.sleep(0.01)


def removed_tells_only_what_the_store_let_go(store: Store) -> None:
    """Not the keys that the caller deleted or cleared."""
    samples = kept(store, 2)
    store.removed()
    store.delete([samples[0].key])
    store.clear()
    removed = store.removed()
    expect(removed == [], f"the caller deleted and cleared, removed() answered {removed}")


def keys_lists_what_is_there(store: Store) -> None:
    """Each key with the length of its value. A store that can not list raises StoreError."""
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
    samples = kept(store, 3, 5000)
    try:
        checked = store.check()
    except StoreError as why:
        raise Inapplicable(str(why)) from why
    expect(checked == (3, []), f"three good values, check answered {checked}")
    if subject.spoil is not None:
        subject.spoil(store, samples[1].key)
        bad = [key for key, _ in store.check().bad]
        expect(bad == [samples[1].key], f"one of three is damaged, check found {bad}")


def compact_loses_nothing(store: Store) -> None:
    """Deleted values stay deleted; all others are there."""
    samples = kept(store, 40, 20_000)
    store.delete([sample.key for sample in samples[::2]])
    given = store.compact()
    expect(given >= 0, f"compact answered {given}")
    expect_absent(store, samples[::2], "deleted before compact")
    expect_there(store, samples[1::2], "after compact")


def stats_has_records_and_bytes(store: Store) -> None:
    """The numbers are right, or None if the store does not know them."""
    before = store.stats()
    expect({"records", "bytes"} <= before.keys(), f"stats answered {before}")
    expect(not before["records"], f"an empty store has {before['records']} records")
    samples = kept(store, 2)
    after = store.stats()
    expect(after["records"] in (2, None), f"two records were put, stats says {after['records']}")
    least, held = sum(sample.form.record_bytes for sample in samples), after["bytes"]
    expect(held is None or held >= least, f"{least} B were put, stats says {held}")


def a_closed_store_refuses(store: Store) -> None:
    """After `close` every other call raises StoreError. `close` may be called again."""
    (sample,) = kept(store, 1)
    store.close()
    store.close()
    _expect_refused("contains", lambda: store.contains([sample.key]))
    _expect_refused("get", lambda: store.get([Read(sample).get]))
    _expect_refused("put", lambda: store.put([sample.put()]))
    _expect_refused("delete", lambda: store.delete([sample.key]))
    _expect_refused("clear", store.clear)
    _expect_refused("stats", store.stats)
    _expect_refused("keys", lambda: list(store.keys()))
    _expect_refused("check", store.check)
    store.close()


def _expect_refused(name: str, call: Callable[[], object]) -> None:
    try:
        answer = call()
    except StoreError:
        return
    raise AssertionError(f"{name} after close answered {answer}")


def leaving_a_with_closes(subject: Subject) -> None:
    """`with` gives the store itself, and closes it at the end."""
    with subject.open() as store:
        keep(store, [maker(store)(1)])
    _expect_refused("stats", store.stats)


def what_was_kept_outlives_the_store(subject: Subject) -> None:
    """After close and open, values that were put are there, deleted ones are not."""
    if subject.open_again is None:
        raise Inapplicable("the store is not durable")
    store = subject.open()
    samples = kept(store, 10, 10_000)
    store.delete([samples[0].key])
    store.close()
    again = subject.open_again()
    expect_there(again, samples[1:], "after close and open")
    expect_absent(again, samples[:1], "deleted before close and open")


CHECKS: list[Callable[..., None]] = [
    each
    for name, each in list(globals().items())
    if isfunction(each) and each.__module__ == __name__ and not name.startswith("_")
]
