"""The contract of a store: what every store guarantees, and what its callers must do.

A store keeps values by key outside the process. Values are records (`storage.record`), keys are `RecordKey`s.
A store may read the header of a record, but need not: the reader verifies every record (I9).

A store guarantees
- **A value is there in full or not at all.** When `get` returns True, it has filled every byte of one `put`
  of this key. This holds while other threads put, delete or clear, and after any crash.
- **A miss is a result, not an error.** A key is missed if it was never put, was deleted or evicted, or if
  its value is damaged or has another length than the caller asks for. The rest of the batch is served.
- **A value that is there can be read**, also while others put it again. If a value can not be read now but
  perhaps later, the store raises StoreError. So when `get` returns False and `contains` then returns True,
  the value is lost, and the caller deletes it: after that the key is not there, and the next `put` writes it.
- **When `put` returns True, the value is kept**: in a durable store it is on the disk.
- **A full store is a result, not an error**: it evicts values, or `put` returns False.
- Every other failure is a `StoreError`. The store can be used again afterwards.
- Any number of threads may call at the same time. A call that waits does not hold the GIL.
- `close` may be called twice. After it, every other call raises `StoreError`.
- Opening a store that can not be reached, and perhaps can later, raises `StoreAway`: a server then starts
  without it and opens it later. Whatever only its user can set right is another error.

A store that can not be written to (`writes` is False) returns False from `put` and raises StoreError for
`delete` and `clear`. Damaged values in it are never repaired; the time of reading them counts against it.

A caller must
- leave its buffers unchanged until the call returns. The store does not use them after that.
- expect calls to block (on a disk, on a network): worker threads call a store, request threads do not.

A key names its content: two values of one key have the same bytes. So if a key is there, `put` may keep the
old value or the new one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from tiercel.errors import StoreError
from tiercel.progress import progress
from tiercel.storage.record import ALIGN_LEAST, Flaw, RecordKey, View, flaw_of

CHECK_BYTES = 64 << 20
"""How many bytes `check` reads at a time: enough for any disk, and little of the machine's memory."""


class Put(NamedTuple):
    """A value to keep: its parts in a row, the header of the record first."""

    key: RecordKey
    parts: Sequence[View]

    @property
    def bytes(self) -> int:
        return sum(map(len, self.parts))


class Get(NamedTuple):
    """A value to read into these parts, the header of the record first. Together they have its length."""

    key: RecordKey
    parts: Sequence[memoryview]

    @property
    def bytes(self) -> int:
        return sum(map(len, self.parts))

    def fill(self, value: View) -> bool:
        """Copy a value into the parts. False: it has another length."""
        view, at = memoryview(value), 0
        if len(view) != self.bytes:
            return False
        for part in self.parts:
            part[:] = view[at : at + len(part)]
            at += len(part)
        return True


class Checked(NamedTuple):
    """What `Store.check` found."""

    records: int
    bad: list[tuple[RecordKey, Flaw]]


class Store(ABC):
    """Values by key, outside the process. The docstring of this module is the contract."""

    align: int = ALIGN_LEAST
    """The payload of a record begins at a multiple of this."""

    writes: bool = True
    """False: the store can only be read."""

    trouble: str = ""
    """Why it keeps nothing now, if that was seen when it was opened. For whoever starts a server."""

    away: bool = False
    """Whether it has not been reached yet (`storage.late`)."""

    @abstractmethod
    def contains(self, keys: Sequence[RecordKey]) -> list[bool]:
        """Which of the keys are there."""

    def kept(self, keys: Sequence[RecordKey]) -> list[bool]:
        """Which of the keys are there because `put` wrote them. A store that reads from more places than it
        writes to overrides this."""
        return self.contains(keys)

    @abstractmethod
    def get(self, wanted: Sequence[Get]) -> list[bool]:
        """Fill the parts of each. False: a miss; its parts may then hold any bytes."""

    @abstractmethod
    def put(self, values: Sequence[Put]) -> list[bool]:
        """Keep each value. False: not kept, because the store is full. A value that `delete` could not remove
        is written again."""

    @abstractmethod
    def delete(self, keys: Sequence[RecordKey]) -> int:
        """Delete these keys, durably. Returns how many were there."""

    @abstractmethod
    def clear(self) -> None:
        """Delete everything, durably."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Numbers to show. At least `records` and `bytes` (None if the store does not know them)."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""

    def keys(self) -> Iterator[tuple[RecordKey, int]]:
        """Every key with the length of its value, in any order."""
        raise StoreError(f"{type(self).__name__} can not list what it holds")

    def removed(self) -> list[RecordKey]:
        """Keys that the store evicted since the last call, as far as it knows."""
        return []

    def compact(self) -> int:
        """Free space that holds no values. Returns how many bytes."""
        return 0

    def check(self) -> Checked:
        """Read every value and verify every byte. A store may override this with a faster order."""
        records, bad = 0, list[tuple[RecordKey, Flaw]]()
        listed = (Get(key, [memoryview(bytearray(size))]) for key, size in self.keys())
        with progress("checking", self.stats()["records"], counted="records") as done:
            for batch in trips(listed, CHECK_BYTES):
                records += len(batch)
                for (key, (value,)), there in zip(batch, self.get(batch), strict=True):
                    flaw = flaw_of(value, key) if there else Flaw.UNREADABLE
                    if flaw and (there or self.contains([key])[0]):  # else it was deleted after it was listed
                        bad.append((key, flaw))
                done(len(batch))
        return Checked(records, bad)

    def register(self, memory: memoryview) -> None:  # noqa: B027 - most stores do not need it
        """Most parts of `get` and `put` will be in this memory. Called once, before them."""

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_Item = TypeVar("_Item")


def trips(
    items: Iterable[_Item], bytes_most: int, bytes_of: Callable[[_Item], int] = attrgetter("bytes")
) -> Iterator[list[_Item]]:
    """Split a batch, in order, into batches of at most `bytes_most`. A larger item is a batch of its own."""
    trip, size = list[_Item](), 0
    for item in items:
        more = bytes_of(item)
        if trip and size + more > bytes_most:
            yield trip
            trip, size = [], 0
        trip.append(item)
        size += more
    if trip:
        yield trip
