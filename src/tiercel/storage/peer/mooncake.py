"""Mooncake's Transfer Engine as a transport: one-sided reads from memory that the peer has registered.

Mooncake is configured by environment variables (`storage.mooncake.set_environment`): connections are kept,
and the two time-outs that end a transfer are ours. It has no keys: anyone who reaches its port can read and
write registered memory. So a server offers it only where it was asked to, for a network without strangers.

A read that failed must not write later: its memory has another owner by then. Mooncake's own call for a batch
returns as soon as one piece has failed, or after 30 s, and the other pieces go on writing (that was seen). So
every piece is a batch of its own, and a read returns, or raises, when each of them has ended. Mooncake ends a
piece that makes too little progress: less than 64 KiB in `timeout_s`. A peer that goes on sending slowly
keeps the thread of its read and the memory until the read ends; no other call waits for it, and nothing more
is asked of that peer (`PeerStore`).
"""

from __future__ import annotations

import mmap
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from time import sleep
from typing import Any

from tiercel.errors import StoreError
from tiercel.storage.mooncake import address_of, set_environment
from tiercel.storage.peer.link import Link
from tiercel.storage.peer.transport import Transport, Wanted
from tiercel.storage.peer.wire import End, Message, pack_bytes

STAGING_BYTES = 8 << 20
POLL_S = 0.0002
_NO_BATCH = (0, 2**64 - 1)
"""Results of an engine that could not begin a read."""
_ENDED_WELL = 1
_ENDED = (_ENDED_WELL, -1)
"""States of a read that does nothing more. In every other state it may still write."""


class MooncakeTransport(Transport):
    """Reads of one store. Memory that is not registered is read through staging memory."""

    places = True

    def __init__(self, host: str, protocol: str, device: str, timeout_s: float) -> None:
        self._engine = engine_of(host, protocol, device, timeout_s)
        self._registered: list[range] = []

    def register(self, memory: memoryview) -> None:
        self._registered.append(self._engine.register(memory))

    def read(self, link: Link, offer: Any, lease: int, wanted: Sequence[Wanted]) -> End:
        session, base = str(offer["session"]), int(offer["base"])
        with self._laid([part for each in wanted for part in each.parts]) as (targets, copies):
            sources = [(base + offset, size) for each in wanted for offset, size in each.entry.pieces]
            ours, theirs, sizes = crossed(targets, sources)
            self._engine.pull(session, zip(ours, theirs, sizes, strict=True))
            for part, staged in copies:
                part[:] = staged
        link.send(Message.DONE, pack_bytes(lease))
        kind, body = link.receive()
        if kind is not Message.END:
            raise StoreError(f"it answered the end of a read with {kind.name}")
        return End.parse(body)

    @contextmanager
    def _laid(
        self, parts: Sequence[memoryview]
    ) -> Iterator[tuple[list[tuple[int, int]], list[tuple[memoryview, memoryview]]]]:
        """(address, bytes) of memory for all parts in a row, and what is to be copied from it afterwards:
        parts in memory that is not registered are read into staging memory."""
        outside = sum(len(part) for part in parts if not self._is_registered(part))
        area = self._engine.take(outside) if outside else None
        targets, copies, at = list[tuple[int, int]](), list[tuple[memoryview, memoryview]](), 0
        for part in parts:
            if not len(part):
                continue
            if area is not None and not self._is_registered(part):
                copies.append((part, area[at : at + len(part)]))
                at += len(part)
                targets.append((address_of(copies[-1][1]), len(part)))
            else:
                targets.append((address_of(part), len(part)))
        try:
            yield targets, copies
        finally:
            if area is not None:
                self._engine.give_back(area)

    def _is_registered(self, part: memoryview) -> bool:
        if not self._registered or not len(part):
            return not len(part)
        start = address_of(part)
        return any(start in memory and start + len(part) <= memory.stop for memory in self._registered)

    def close(self) -> None:
        for memory in self._registered:
            self._engine.unregister(memory)
        self._registered = []


class MooncakeEngine:
    """Mooncake's Transfer Engine under one name of this machine, for all reads and offers. It is never
    closed: that takes a second in which no thread of the interpreter runs."""

    def __init__(self, host: str, protocol: str, device: str, timeout_s: float) -> None:
        set_environment(host, timeout_s)
        from mooncake.engine import TransferEngine  # type: ignore[import-untyped]

        self._engine = TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, device)
        if code:
            raise StoreError(f"mooncake: no transfer engine for host {host}: code {code}")
        self._lock = Lock()
        self._users: Counter[range] = Counter()
        self._idle: list[memoryview] = []

    @property
    def port(self) -> int:
        """The port where others find it."""
        return int(self._engine.get_rpc_port())

    def register(self, memory: memoryview) -> range:
        """Register memory. Returns its addresses. The same memory may be registered twice."""
        start = address_of(memory)
        own = range(start, start + len(memory))
        with self._lock:
            if not self._users[own] and self._engine.register_memory(start, len(memory)):
                raise StoreError(f"mooncake: {len(memory):,} B of memory can not be registered")
            self._users[own] += 1
        return own

    def unregister(self, memory: range) -> None:
        with self._lock:
            self._users[memory] -= 1
            if not self._users[memory]:
                self._engine.unregister_memory(memory.start)

    def pull(self, session: str, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Reads every piece. When this returns or raises, all that were begun have ended."""
        begun, failed = deque[int](), False
        for ours, theirs, size in pieces:
            batch = self._engine.batch_transfer_async_read(session, [ours], [theirs], [size])
            if batch in _NO_BATCH:
                failed = True
                break
            begun.append(batch)
        while begun:
            state = self._engine.transfer_check_status(begun[0])
            if state in _ENDED:
                failed |= state != _ENDED_WELL
                begun.popleft()
            else:
                sleep(POLL_S)
        if failed:
            raise StoreError(f"mooncake: a read from {session} failed")

    def take(self, size: int) -> memoryview:
        """Staging memory. The caller gives it back."""
        with self._lock:
            for area in self._idle:
                if len(area) >= size:
                    self._idle.remove(area)
                    return area
        area = memoryview(mmap.mmap(-1, max(size, STAGING_BYTES)))
        self.register(area)
        return area

    def give_back(self, area: memoryview) -> None:
        with self._lock:
            self._idle.append(area)


_engines: dict[tuple[str, str, str], MooncakeEngine] = {}
_engines_lock = Lock()


def engine_of(host: str, protocol: str, device: str, timeout_s: float) -> MooncakeEngine:
    """The engine of this process. The first call decides about its time-outs."""
    with _engines_lock:
        name = host, protocol, device
        if name not in _engines:
            _engines[name] = MooncakeEngine(*name, timeout_s)
        return _engines[name]


def crossed(
    targets: Sequence[tuple[int, int]], sources: Sequence[tuple[int, int]]
) -> tuple[list[int], list[int], list[int]]:
    """The fewest reads that bring the sources, one after the other, into the targets, one after the other:
    where to, where from, how many bytes. Pieces that touch on both sides are one read, even if they are far
    apart in the records: the same rows of neighbouring pages."""
    if sum(size for _, size in targets) != sum(size for _, size in sources):
        raise StoreError("it describes places of another length than its records have")
    pairs, number, skip = list[tuple[int, int, int]](), 0, 0
    for begin, size in sources:
        while size:
            target, room = targets[number][0] + skip, targets[number][1] - skip
            take = min(size, room)
            pairs.append((begin, target, take))
            begin, size, skip = begin + take, size - take, skip + take
            if skip == targets[number][1]:
                number, skip = number + 1, 0
    ours, theirs, sizes = list[int](), list[int](), list[int]()
    for begin, target, size in sorted(pairs):
        if sizes and ours[-1] + sizes[-1] == target and theirs[-1] + sizes[-1] == begin:
            sizes[-1] += size
        else:
            ours.append(target)
            theirs.append(begin)
            sizes.append(size)
    return ours, theirs, sizes
