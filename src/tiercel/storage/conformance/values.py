"""Checks of single values and batches: put, get, delete, clear."""

from __future__ import annotations

import random
from itertools import pairwise

from tiercel.storage.base import Get, Put
from tiercel.storage.conformance.samples import Read, expect, expect_absent, expect_there, keep, maker
from tiercel.storage.conformance.subject import Check, Subject
from tiercel.storage.record import ALIGN_LEAST, Kind, View

_SIZES = (1, 4096, 256 << 10, 3 << 20)


def a_value_comes_back_as_it_was_put(subject: Subject) -> None:
    """Payloads of one byte up to a few megabytes, each alone and all in one batch."""
    store = subject.open()
    expect(store.align >= ALIGN_LEAST and store.align % ALIGN_LEAST == 0, f"align is {store.align}")
    samples = [maker(store)(number, size) for number, size in enumerate(_SIZES)]
    for sample in samples:
        keep(store, [sample])
        expect_there(store, [sample], f"a payload of {sample.payload_bytes} B")
    expect_there(store, samples, "all sizes together")


def parts_may_be_many_and_lie_anywhere(subject: Subject) -> None:
    """Hundreds of parts of bytes, bytearray and memoryview, at odd addresses; cut differently when read."""
    store = subject.open()
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
        header, reads = memoryview(bytearray(len(samples[1].header))), [Read(samples[0]), Read(samples[1])]
        wanted = [reads[0].get, Get(samples[1].key, [header, inside[1]]), Read(samples[2]).get]
        answer = store.get(wanted)
        expect(answer == [True, True, False], f"get into registered memory answered {answer}")
        reads[0].check("beside one in registered memory")
        flaw = samples[1].form.flaw(header, samples[1].page_key, [inside[1]])
        expect(flaw is None, f"read into registered memory: {flaw}")
        expect(inside[0] == samples[0].payload, "get wrote outside the parts it was given")


def a_miss_is_an_answer(subject: Subject) -> None:
    """A key that was never put is a miss, in an empty store and beside other keys."""
    store = subject.open()
    make = maker(store)
    expect_absent(store, [make(1)], "an empty store")
    keep(store, [make(2)])
    expect_absent(store, [make(1), make(3)], "a key that was never put")


def another_length_is_a_miss(subject: Subject) -> None:
    """A get for more or fewer bytes than were put answers False, and the value stays."""
    store = subject.open()
    sample = maker(store)(1, 5000)
    keep(store, [sample])
    for bytes_more in (1, -1, 100_000, -4999):
        answer = store.get([Read(sample, bytes_more=bytes_more).get])
        expect(answer == [False], f"asked for {bytes_more:+} bytes, get answered {answer}")
    expect_there(store, [sample], "after asking for another length")


def what_can_not_be_read_is_deleted_and_put_again(subject: Subject) -> None:
    """A damaged value, or one of another length, does not affect others, and can be deleted and put again."""
    for spoil in (None, subject.spoil)[: 2 if subject.spoil else 1]:
        store = subject.open()
        make = maker(store)
        samples = [make(number, 5000) for number in range(3)]
        spoiled = samples[1]
        keep(store, samples)
        if spoil is None:
            store.delete([spoiled.key])
            keep(store, [make(1, 2500)])
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


def a_batch_answers_each_in_its_place(subject: Subject) -> None:
    """Hits, misses, wrong lengths and repeated keys in one batch."""
    store = subject.open()
    make = maker(store)
    a, b, absent = make(1, 100), make(2, 3000), make(3)
    answer = store.put([a.put(), b.put(), a.put()])
    expect(answer == [True] * 3, f"put of a key twice in one batch answered {answer}")
    keys = [absent.key, a.key, absent.key, b.key, a.key]
    expect(store.contains(keys) == [False, True, False, True, True], "contains mixes up a batch")
    reads = [Read(absent), Read(b), Read(a, bytes_more=2900), Read(a), Read(absent), Read(b)]
    answer = store.get([read.get for read in reads])
    expect(answer == [False, True, False, True, False, True], f"get answered {answer}")
    for read in (reads[1], reads[3], reads[5]):
        read.check("one of a batch")


def an_empty_batch_is_nothing(subject: Subject) -> None:
    """Every call accepts an empty batch."""
    store = subject.open()
    answers = (store.contains([]), store.get([]), store.put([]), store.delete([]))
    expect(answers == ([], [], [], 0), f"contains, get, put, delete of nothing answered {answers}")


def a_batch_may_be_large(subject: Subject) -> None:
    """Many values in one call, and many bytes."""
    store = subject.open()
    make = maker(store)
    for samples in ([make(n, 64) for n in range(1200)], [make(2000 + n, 3 << 20) for n in range(7)]):
        keep(store, samples)
        expect_there(store, samples, f"one batch of {len(samples)}")
        gone = store.delete([sample.key for sample in samples])
        expect(gone == len(samples), f"delete of {len(samples)} answered {gone}")


def a_key_may_be_put_twice(subject: Subject) -> None:
    """The second put answers True, and the value is the same."""
    store = subject.open()
    sample = maker(store)(1)
    for _ in range(2):
        keep(store, [sample])
        expect_there(store, [sample], "a key that was put again")
    expect(store.delete([sample.key]) == 1, "a key that was put twice is there twice")
    expect_absent(store, [sample], "put twice, deleted once")


def any_bytes_may_be_a_key(subject: Subject) -> None:
    """Zeros, line ends, pattern characters, high bytes; keys that differ in one byte, or only in the kind."""
    store = subject.open()
    names = [bytes(32), b"\xff" * 32, b"*" * 32, b"[a-z]?\\\r\n\0" * 3 + b"**", bytes(31) + b"\1"]
    kinds = (Kind.PAGE, Kind.TAIL, Kind.PAGE_BY_ENTRY)
    samples = [maker(store)(name, 100, kind) for name in names for kind in kinds]
    keep(store, samples)
    expect_there(store, samples, "a key of unusual bytes")
    expect(store.delete([samples[6].key]) == 1, "delete of one key")
    expect_absent(store, samples[6:7], "deleted")
    expect_there(store, samples[:6] + samples[7:], "not deleted")


def what_was_deleted_is_gone_and_counted(subject: Subject) -> None:
    """The answer counts each key once, if it was there; other keys stay; a deleted key can be put again."""
    store = subject.open()
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


def clear_forgets_everything(subject: Subject) -> None:
    """The store can be used afterwards."""
    store = subject.open()
    samples = [maker(store)(number) for number in range(50)]
    keep(store, samples)
    store.clear()
    expect_absent(store, samples, "after clear")
    expect(store.delete([samples[0].key]) == 0, "after clear there was something to delete")
    store.clear()
    keep(store, samples[:2])
    expect_there(store, samples[:2], "put after clear")


def buffers_are_not_kept(subject: Subject) -> None:
    """The caller may change its memory after a put or a get: the stored value stays the same."""
    store = subject.open()
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


CHECKS: tuple[Check, ...] = (
    a_value_comes_back_as_it_was_put,
    parts_may_be_many_and_lie_anywhere,
    registered_memory_makes_no_difference,
    a_miss_is_an_answer,
    another_length_is_a_miss,
    what_can_not_be_read_is_deleted_and_put_again,
    a_batch_answers_each_in_its_place,
    an_empty_batch_is_nothing,
    a_batch_may_be_large,
    a_key_may_be_put_twice,
    any_bytes_may_be_a_key,
    what_was_deleted_is_gone_and_counted,
    clear_forgets_everything,
    buffers_are_not_kept,
)
