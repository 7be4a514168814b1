"""What the checks work with: the store to check, and records whose bytes follow from their names."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

from tiercel.storage.base import Get, Put, Store
from tiercel.storage.record import ALIGN_LEAST, Flaw, Form, RecordKey
from tiercel.threads import start
from tiercel.types import Kind

SMALL_BYTES = 16 << 20  # the size of a small store, about
_BESIDE = b"\xa5\xa5\xa5"  # bytes between the parts of a read: `get` must not change them
WAIT_S = 120  # How long a check waits for a thread. After that it fails: the store hangs.


@dataclass(frozen=True)
class Subject:
    """How to open the store to check. Most checks leave stores open: `run_checks` closes them."""

    open: Callable[[], Store]
    """An empty store. It may be the same store as before, cleared, if that is still open."""
    open_small: Callable[[], Store] | None = None
    """An empty store of about `SMALL_BYTES`. None: not possible."""
    open_again: Callable[[], Store] | None = None
    """Called after a close: the last store of `open`, with its values. None: the store is not durable."""
    spoil: Callable[[Store, RecordKey], None] | None = None
    """Damage the value of a key without using the store. None: not possible."""


class Inapplicable(Exception):
    """The check does not concern this store."""


@dataclass(frozen=True)
class Sample:
    """A record: its key follows from the name, its payload from the key."""

    name: int | bytes  # a number, or a page key of 32 bytes
    payload_bytes: int = 4096
    kind: Kind = Kind.PAGE
    align: int = ALIGN_LEAST

    @cached_property
    def page_key(self) -> bytes:
        return self.name if isinstance(self.name, bytes) else hashlib.sha256(b"%d" % self.name).digest()

    @property
    def key(self) -> RecordKey:
        return self.form.key(self.page_key)

    @cached_property
    def form(self) -> Form:
        streams = (("rows", (0,), self.payload_bytes),)
        return Form(self.kind, b"conformance" + bytes(5), streams, self.payload_bytes, self.align)

    @cached_property
    def payload(self) -> bytes:
        return random.Random(self.key + b"%d" % self.payload_bytes).randbytes(self.payload_bytes)

    @cached_property
    def header(self) -> bytes:
        return self.form.header(self.page_key, [self.payload])

    def put(self) -> Put:
        return Put(self.key, [self.header, self.payload])


class Read:
    """Memory to read one record into: parts at odd addresses that do not touch."""

    def __init__(self, sample: Sample, cuts: Sequence[int] = (), bytes_more: int = 0) -> None:
        """Parts end behind the header and at `cuts`. The memory is `bytes_more` longer than the record."""
        self.sample = sample
        whole = sample.form.record_bytes + bytes_more
        ends = sorted({cut for cut in (sample.form.header_bytes, *cuts) if cut < whole} | {whole})
        self._ranges = [
            slice(begin + len(_BESIDE) * number, end + len(_BESIDE) * number)
            for number, (begin, end) in enumerate(pairwise([0, *ends]), start=1)
        ]
        self._memory = bytearray(_BESIDE) * (self._ranges[-1].stop // len(_BESIDE) + 2)
        view = memoryview(self._memory)
        self.get = Get(sample.key, [view[each] for each in self._ranges])

    def flaw(self) -> Flaw | None:
        """What is wrong with the record that was read."""
        data, size = b"".join(self.get.parts), self.sample.form.header_bytes
        return self.sample.form.flaw(data[:size], self.sample.page_key, [data[size:]])

    def check(self, what: str) -> None:
        """Every byte of the record is right, and nothing was written outside the parts."""
        flaw = self.flaw()
        expect(flaw is None, f"{what}: get answered True, but it is {flaw.value if flaw else ''}")
        payload = b"".join(self.get.parts)[self.sample.form.header_bytes :]
        expect(payload == self.sample.payload, f"{what}: get answered True with the bytes of another put")
        beside = bytearray(self._memory)
        for each in reversed(self._ranges):
            del beside[each]
        expect(not beside.strip(_BESIDE), f"{what}: get wrote outside the parts it was given")


def expect(condition: bool, why: str) -> None:
    if not condition:
        raise AssertionError(why)


def keep(store: Store, samples: Sequence[Sample]) -> None:
    answer = store.put([sample.put() for sample in samples])
    expect(answer == [True] * len(samples), f"put of {len(samples)} values answered {answer}")


def kept(store: Store, count: int, payload_bytes: int = 4096) -> list[Sample]:
    """New samples, put into the store."""
    samples = [maker(store)(number, payload_bytes) for number in range(count)]
    keep(store, samples)
    return samples


def read_some(store: Store, samples: Sequence[Sample], what: str) -> list[bool]:
    """Which of them `get` finds. What it finds is right in every byte."""
    reads = [Read(sample) for sample in samples]
    hits = store.get([read.get for read in reads])
    for read, hit in zip(reads, hits, strict=False):  # the caller compares the lengths
        if hit:
            read.check(what)
    return hits


def expect_there(store: Store, samples: Sequence[Sample], what: str) -> None:
    """`contains` and `get` find them, with every byte."""
    expect(store.contains([sample.key for sample in samples]) == [True] * len(samples), f"{what}: not there")
    answer = read_some(store, samples, what)
    expect(answer == [True] * len(samples), f"{what}: contains says it is there, get answered {answer}")


def expect_absent(store: Store, samples: Sequence[Sample], what: str) -> None:
    expect(store.contains([sample.key for sample in samples]) == [False] * len(samples), f"{what}: contains")
    answer = store.get([Read(sample).get for sample in samples])
    expect(answer == [False] * len(samples), f"{what}: get answered {answer}")


def maker(store: Store) -> Callable[..., Sample]:
    """A factory of samples with the alignment of this store."""
    return partial(Sample, align=store.align)


def together(acts: Iterable[Callable[[], None]]) -> None:
    """Run all at the same time, each in a thread. Raises the first error."""
    running = [start(act, "tiercel-conformance") for act in acts]
    expect(not wait(running, WAIT_S).not_done, f"a call did not return in {WAIT_S} s")
    for each in running:
        each.result()
