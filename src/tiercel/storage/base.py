"""What every store promises, and what it may rely on.

A store keeps values by key outside the process. Values are records (`storage.record`), keys are
`RecordKey`s. A store may look into a record's header; it need not, and whoever reads verifies (I9).

Guaranteed by a store
- **A value is there in full or not at all.** A `get` that answers True has filled every byte that was put,
  for this key, by one `put`; also while others put, delete or clear, and after any crash.
- **A miss is an answer, not an error**: a key that is not there, never was, was evicted, or whose value can
  not be read: it is damaged, or has another length than was asked for. The others of its batch are answered.
- **What is there can be read**, also while others put it again. What might be read a moment later is a
  StoreError. So who gets False from `get` and then True from `contains` knows that this value is lost to
  everybody, and deletes it: then it is not there, and the next `put` writes it.
- **True from `put` means kept** as well as this store keeps anything: a durable store has it on the disk.
- **Capacity is an answer**: a store that is full lets something go, or answers False. It does not raise.
- Whatever else goes wrong is a `StoreError`, and the store can be used again afterwards.
- Any number of threads may call at the same time; none of them holds the interpreter while it waits.
- `close` may be called twice; afterwards every other call raises `StoreError`.

Required of the caller
- Buffers stay as they are until the call that got them returns. Nothing is kept of them after that.
- Calls may block (a disk, a network): they are made from workers, never from the thread of the requests.

Keys name contents: two values of one key are the same bytes. So a `put` of a key that is there may keep
either value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, TypeVar

from tiercel.errors import StoreError
from tiercel.storage.record import ALIGN_LEAST, Flaw, RecordKey, View, flaw_of

CHECK_BYTES = 64 << 20
"""`check` reads so many bytes at a time: enough for any disk, and little of the machine's memory."""


class Put(NamedTuple):
    """A value to keep: its parts one after the other, the record's header first."""

    key: RecordKey
    parts: Sequence[View]

    @property
    def bytes(self) -> int:
        return sum(len(part) for part in self.parts)


class Get(NamedTuple):
    """A value to read into these parts, the record's header first. Together they are as long as the value."""

    key: RecordKey
    parts: Sequence[memoryview]

    @property
    def bytes(self) -> int:
        return sum(len(part) for part in self.parts)


class Checked(NamedTuple):
    """What `Store.check` found."""

    records: int
    bad: list[tuple[RecordKey, Flaw]]


class Store(ABC):
    """Values by key, outside the process. The contract is in this module's docstring."""

    align: ClassVar[int] = ALIGN_LEAST
    """A payload begins at a multiple of this many bytes in its record."""

    @abstractmethod
    def contains(self, keys: Sequence[RecordKey]) -> list[bool]:
        """Which of the keys are there."""

    @abstractmethod
    def get(self, wanted: Sequence[Get]) -> list[bool]:
        """Fill the parts of each; False: a miss, and its parts then hold anything."""

    @abstractmethod
    def put(self, values: Sequence[Put]) -> list[bool]:
        """Keep each; False: not kept, for want of room. The whole batch is on the disk when it returns. What
        could not be deleted is written."""

    @abstractmethod
    def delete(self, keys: Sequence[RecordKey]) -> int:
        """Forget these, durably; answers how many were there."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, durably."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Numbers. At least `records` and `bytes` (None where they are not known)."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""

    def keys(self) -> Iterator[tuple[RecordKey, int]]:
        """Every key with the bytes of its value, in no order."""
        raise StoreError(f"{type(self).__name__} can not list what it holds")

    def removed(self) -> list[RecordKey]:
        """What the store let go of by itself since the last call, as far as it knows."""
        return []

    def compact(self) -> int:
        """Give back space that holds nothing; answers how many bytes."""
        return 0

    def check(self) -> Checked:
        """Read every value and verify every byte. A store that knows a faster order has its own."""
        records, bad = 0, list[tuple[RecordKey, Flaw]]()
        listed = (Get(key, [memoryview(bytearray(size))]) for key, size in self.keys())
        for batch in trips(listed, CHECK_BYTES):
            records += len(batch)
            for (key, (value,)), there in zip(batch, self.get(batch), strict=True):
                flaw = flaw_of(value, key) if there else Flaw.UNREADABLE
                if flaw and (there or self.contains([key])[0]):  # else it was deleted after it was listed
                    bad.append((key, flaw))
        return Checked(records, bad)

    def register(self, memory: memoryview) -> None:  # noqa: B027 - most stores need not know
        """Parts of `get` and `put` will mostly lie in here. Called once, before them."""

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_Value = TypeVar("_Value", Get, Put)


def trips(values: Iterable[_Value], bytes_most: int) -> Iterator[list[_Value]]:
    """A batch as a network likes it: in order, as many together as make `bytes_most`; a larger one alone."""
    trip: list[_Value] = []
    bytes_in_trip = 0
    for each in values:
        if trip and bytes_in_trip + each.bytes > bytes_most:
            yield trip
            trip, bytes_in_trip = [], 0
        trip.append(each)
        bytes_in_trip += each.bytes
    if trip:
        yield trip
