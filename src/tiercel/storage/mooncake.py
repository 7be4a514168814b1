"""Records in a Mooncake Store: in the memory of other machines, found through a master.

    this process                                 a holder                    the master
    ────────────                                 ────────                    ──────────
    put: where to? ──────────────────────────────────────────────────────▶  a place of that length
         parts ─────────────────────────────────▶ segment
         written ────────────────────────────────────────────────────────▶  now it can be found
    get: where is it? ───────────────────────────────────────────────────▶  place, length, lease
         parts ◀───────────────────────────────── segment

Parts in registered memory are sent from where they are. Other parts, and small ones, are copied through
registered staging memory, next to each other: over TCP each piece costs about 100 µs whatever its size. All
that is read comes through staging memory: see the first point below.

How Mooncake 0.3.13 behaves (all of it was observed):
- A call returns when every piece of every record has ended, also if one has failed: a piece without progress
  ends by our time-outs. But after 60 s the call returns in any case, and **a holder that still sends, slowly,
  goes on writing into the memory of the call**. So that memory is never the caller's, and staging memory of a
  call that took this long is not used again.
- The master knows where every record is. Without a master a call of the client takes 4 s, so the store asks
  for its health first and fails at once; an absent master is noticed within a second. When it is back, calls
  work again within a second, but **a master that was restarted has forgotten every record**.
- When a holder dies its records are lost. For 10 s (the master's `--client_ttl`) they are still found and can
  not be read: a StoreError. After that they are gone; with `replicas=2` the other replica is read.
- If a key is there, or another process is putting it, the old value stays and `put` returns True.
- A record that was read has a lease of 10 s and is not evicted meanwhile. A read that takes longer is a
  StoreError: the record may still be there. `delete` and `clear` do not wait for leases: a read of another
  process at that moment may get damaged bytes, which it detects (I9). In this process they wait for reads.
- `close` takes up to 2 s, 12 s without a master, and holds the GIL meanwhile.
- To use a client after its `close` crashes the process: `_Gate` prevents that.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from threading import Condition
from time import monotonic
from typing import Any, NamedTuple, TypeVar
from urllib.request import ProxyHandler, build_opener

import numpy as np

from tiercel.errors import ConfigError, StoreAway, StoreError
from tiercel.storage.base import Get, Put, Store, trips
from tiercel.storage.record import RecordKey, View

log = logging.getLogger(__name__)

_PREFIX = "tiercel:2:"
_TRIP_BYTES = 16 << 20
"""The most bytes of one call, so that it is shorter than a lease even over a slow network."""
_PIECE_LEAST = {"tcp": 512 << 10}
"""Shorter parts are copied to staging. Loopback TCP, 2 × Neoverse-N1, 2026-11, two pieces (header, payload)
against one: 618 / 715 MB/s at 256 KiB, 1356 / 1249 at 1 MiB; 60 pieces of 4 KiB against one: 74 / 708. Other
protocols gather pieces themselves (not measured): 0."""

NO_MEMORY = (
    "it keeps nothing: no process gives this Mooncake memory, or all of it is in use; "
    "local_segment=4GiB in the URL gives it memory of this server"
)
_TRY_BYTES = 64

_GIVES_UP_S = 50.0
"""Less than the 60 s after which Mooncake no longer waits. A call that takes longer may not have ended."""
_GIVEN_UP_MOST = 64
"""The most areas of staging memory that such calls may keep."""

_Area = tuple[memoryview, int]
_Value = TypeVar("_Value", Get, Put)


class _Code(IntEnum):
    """Codes of the client that this store handles."""

    OK = 0
    NO_ROOM = -200
    VALUE_IS_LONGER = -600
    NOT_WRITTEN_YET = -703
    NOT_THERE = -704
    LEASE_ENDED = -707
    TRANSFER_FAILED = -800


_ABSENT = (_Code.NOT_THERE, _Code.NOT_WRITTEN_YET)
_MISSES = (*_ABSENT, _Code.VALUE_IS_LONGER)


class MooncakeStore(Store):
    """Values in a Mooncake cluster, through its master at `host:port`. Several processes may share it."""

    def __init__(  # noqa: PLR0913 - each is an option of the URL
        self,
        master: str,
        *,
        local_segment: int = 0,
        replicas: int = 1,
        protocol: str = "tcp",
        device: str = "",
        host: str = "",
        metrics_port: int = 9003,
        timeout_s: float = 5.0,
    ) -> None:
        """`local_segment`: bytes of this process's memory for records of the cluster. 0 by default: such
        records are outside the host budget, and are lost when this process ends. Some process must give
        memory, or every `put` returns False. `host`: this machine's name for the others; by default its
        address in a connection to the master. `device`: names of RDMA devices, for `protocol=rdma`.
        `metrics_port`: the master's, for `keys`."""
        if replicas < 1:
            raise ConfigError("replicas", replicas, "must be at least 1")
        self._closed = True
        self._gate = _Gate()
        self._metrics = f"http://{master.rpartition(':')[0]}:{metrics_port}"
        self._timeout_s = timeout_s
        self._piece_least = _PIECE_LEAST.get(protocol, 0)
        seen_as = _address_towards(master, timeout_s)
        own_host = host or seen_as
        set_environment(own_host, timeout_s)
        from mooncake import store  # type: ignore[import-untyped]

        self._how = store.ReplicateConfig()
        self._how.replica_num = replicas
        self._client: Any = store.MooncakeDistributedStore()
        code = self._client.setup(own_host, "P2PHANDSHAKE", local_segment, 0, protocol, device, master)
        if code != _Code.OK:
            raise StoreError(f"mooncake: no client for master {master}, host {own_host}: code {code}")
        self._registered: list[range] = []
        self._staging = _Staging(self._client)
        self._closed = False
        if not self._has_room():
            self.trouble = NO_MEMORY
            log.warning("the store: %s", NO_MEMORY)

    def _has_room(self) -> bool:
        """Whether the cluster takes a small value now. The master counts no memory that one may ask for: only
        its metrics do, on a port that need not be open."""
        name = f"tiercel:try:{os.urandom(8).hex()}"
        with self._staging.lend(_TRY_BYTES) as (_, address):
            codes = self._client.batch_put_from([name], [address], [_TRY_BYTES], self._how)
        self._client.batch_remove([name], True)
        return _Code.NO_ROOM not in codes

    def register(self, memory: memoryview) -> None:
        with self._asking() as client:
            start = address_of(memory)
            _check("register", [client.register_buffer(start, len(memory))])
            self._registered.append(range(start, start + len(memory)))

    def contains(self, keys: Sequence[RecordKey]) -> list[bool]:
        with self._asking() as client:
            codes = client.batch_is_exist([_name(key) for key in keys])
        _check("contains", codes)
        return [code == 1 for code in codes]

    def get(self, wanted: Sequence[Get]) -> list[bool]:
        filled: list[bool] = []
        for some in _trips(wanted):
            names = [_name(each.key) for each in some]
            with self._asking() as client, self._laid(some, in_place=False) as laid:
                addresses, sizes = [each.addresses for each in laid], [each.sizes for each in laid]
                codes = client.batch_get_into_multi_buffers(names, addresses, sizes)
                hits = [_is_hit(client, each, code) for each, code in zip(some, codes, strict=True)]
                for hit, each in zip(hits, laid, strict=True):
                    for part, staged in each.copies if hit else ():
                        part[:] = staged
            filled += hits
        return filled

    def put(self, values: Sequence[Put]) -> list[bool]:
        kept: list[bool] = []
        for some in _trips(values):
            names = [_name(each.key) for each in some]
            with self._asking() as client, self._laid(some, in_place=True) as laid:
                for each in laid:
                    for part, staged in each.copies:
                        staged[:] = part
                addresses, sizes = [each.addresses for each in laid], [each.sizes for each in laid]
                codes = client.batch_put_from_multi_buffers(names, addresses, sizes, self._how)
            _check("put", codes, _Code.NO_ROOM)
            kept += [code == _Code.OK for code in codes]
        return kept

    def delete(self, keys: Sequence[RecordKey]) -> int:
        with self._asking(alone=True) as client:
            codes: list[int] = client.batch_remove([_name(key) for key in keys], True)
        _check("delete", codes, *_ABSENT)
        return codes.count(_Code.OK)

    def clear(self) -> None:
        with self._asking(alone=True) as client:
            _check("clear", [client.remove_by_regex(f"^{_PREFIX}", True)])

    def stats(self) -> dict[str, Any]:
        """Nothing: the master counts only the records of all its users together, in its own metrics."""
        with self._asking():
            return {"records": None, "bytes": None}

    def keys(self) -> Iterator[tuple[RecordKey, int]]:
        with self._asking():
            plain = build_opener(ProxyHandler({}))
            try:
                with plain.open(f"{self._metrics}/get_all_keys", timeout=self._timeout_s) as answer:
                    names = answer.read().decode().split()
            except OSError as error:
                raise StoreError(f"mooncake: {self._metrics} does not list keys: {error}") from error
        return self._sizes([name for name in names if name.startswith(_PREFIX)])

    def _sizes(self, names: Sequence[str]) -> Iterator[tuple[RecordKey, int]]:
        for name in names:
            with self._asking() as client:
                size = client.get_size(name)
            _check("keys", [size], _Code.NOT_THERE)
            if size >= 0:  # else it is gone since it was listed
                yield RecordKey(bytes.fromhex(name.removeprefix(_PREFIX))), size

    def close(self) -> None:
        with self._gate.enter(alone=True):
            if self._closed:
                return
            self._closed = True
            for memory in self._registered:
                self._client.unregister_buffer(memory.start)
            self._staging.close()
            self._client.close()

    @contextmanager
    def _asking(self, alone: bool = False) -> Iterator[Any]:
        """The client, while the store is open and the master answers."""
        with self._gate.enter(alone=alone):
            if self._closed:
                raise StoreError("the store is closed")
            if self._client.health_check() != _Code.OK:
                raise StoreError("mooncake: the master does not answer")
            yield self._client

    @contextmanager
    def _laid(self, values: Sequence[_Value], *, in_place: bool) -> Iterator[list[_Laid]]:
        """Each value as pieces in registered memory: in place if possible, or in staging memory."""
        places = [
            [(part, self._in_place(part) if in_place else None) for part in value.parts] for value in values
        ]
        staged = sum(len(part) for parts in places for part, address in parts if address is None)
        with self._staging.lend(staged) as (view, start):
            laid, at = [], 0
            for parts in places:
                laid.append(_Laid([], [], []))
                for part, address in parts:
                    if address is None:
                        laid[-1].copies.append((part, view[at : at + len(part)]))
                        address = start + at
                        at += len(part)
                    laid[-1].add(address, len(part))
            yield laid

    def _in_place(self, part: View) -> int | None:
        """The address of a part that is sent from where it is. None: it goes through staging."""
        if not self._registered or len(part) < max(1, self._piece_least):
            return None
        address = address_of(part)
        inside = any(address in memory and address + len(part) <= memory.stop for memory in self._registered)
        return address if inside else None


class _Laid(NamedTuple):
    """A value as pieces. Neighbouring parts make one piece."""

    addresses: list[int]
    sizes: list[int]
    copies: list[tuple[Any, memoryview]]  # parts that are copied, each with its staging memory

    def add(self, address: int, size: int) -> None:
        if self.addresses and self.addresses[-1] + self.sizes[-1] == address:
            self.sizes[-1] += size
        else:
            self.addresses.append(address)
            self.sizes.append(size)


_given_up: list[_Area] = []
"""Areas of all stores of this process that Mooncake may still write to. They stay mapped."""


class _Staging:
    """Registered memory of the store. Each area, a view and its address, is lent to one call at a time."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._idle: list[_Area] = []
        self._given_up = 0

    @contextmanager
    def lend(self, size: int) -> Iterator[_Area]:
        area, began_s = self._take(size), monotonic()
        try:
            yield area
        finally:
            if monotonic() - began_s > _GIVES_UP_S:
                self._given_up += 1
                _given_up.append(area)
            elif size > _TRIP_BYTES:
                self._client.unregister_buffer(area[1])
            else:
                self._idle.append(area)

    def _take(self, size: int) -> _Area:
        if self._given_up >= _GIVEN_UP_MOST:
            raise StoreError("mooncake: too many calls did not end in time. Attach the store again")
        if size <= _TRIP_BYTES:
            with suppress(IndexError):
                return self._idle.pop()
        view = memoryview(mmap.mmap(-1, max(size, _TRIP_BYTES)))
        area = view, address_of(view)
        _check("register", [self._client.register_buffer(area[1], len(view))])
        return area

    def close(self) -> None:
        while self._idle:
            self._client.unregister_buffer(self._idle.pop()[1])


class _Gate:
    """A readers-writer lock: many callers, or one `alone`. A waiting `alone` goes before later callers."""

    def __init__(self) -> None:
        self._turn = Condition()
        self._inside = 0
        self._alone = False

    @contextmanager
    def enter(self, *, alone: bool) -> Iterator[None]:
        with self._turn:
            self._turn.wait_for(lambda: not self._alone)
            self._alone = alone
            self._turn.wait_for(lambda: not alone or not self._inside)
            self._inside += 1
        try:
            yield
        finally:
            with self._turn:
                self._inside -= 1
                self._alone = self._alone and not alone
                self._turn.notify_all()


def set_environment(host: str, timeout_s: float) -> None:
    """Mooncake is configured by environment variables. It reads some when it is imported and some when a
    client starts, so the first store of a process decides. Variables that are already set stay."""
    seconds, milliseconds = str(math.ceil(timeout_s)), str(math.ceil(timeout_s * 1000))
    for name, value in {
        # Otherwise every connection is logged. Errors can not be turned off.
        "MC_LOG_LEVEL": "ERROR",
        # Otherwise it may tell the others a wrong address of this machine.
        "MC_TCP_BIND_ADDRESS": host,
        # Otherwise each transfer makes a connection: batches of 256 × 64 KiB at 50 MB/s instead of 600.
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        # These time-outs end a transfer. MC_TRANSFER_TIMEOUT (left at 30 s) only stops waiting for it: late
        # bytes were then written into memory that had another use.
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_RPC_TIMEOUT_MS": milliseconds,
        "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
        # The default of 20 tries takes 90 s if the master does not answer.
        "MC_STORE_CLIENT_SETUP_RETRIES": "3",
    }.items():
        os.environ.setdefault(name, value)


def _address_towards(master: str, timeout_s: float) -> str:
    """This machine's address as the master sees it. If there is no master, this fails quickly."""
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout_s) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise StoreAway(f"mooncake: no master at {master}: {error}") from error


def address_of(view: View) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def _trips(values: Iterable[_Value]) -> Iterator[list[_Value]]:
    """Batches without repeated keys: of two equal keys the client fills one and returns True for both."""
    for trip in trips(values, _TRIP_BYTES):
        start, keys = 0, set[RecordKey]()
        for at, each in enumerate(trip):
            if each.key in keys:
                yield trip[start:at]
                start, keys = at, set()
            keys.add(each.key)
        yield trip[start:]


def _name(key: RecordKey) -> str:
    return _PREFIX + key.hex()


def _is_hit(client: Any, wanted: Get, code: int) -> bool:
    if code == wanted.bytes:
        return True
    if code == _Code.TRANSFER_FAILED and client.get_size(_name(wanted.key)) == wanted.bytes:
        raise _error("get", code)  # if the sizes differ, the value is shorter than asked for: a miss
    if code >= 0 or code in _MISSES or code == _Code.TRANSFER_FAILED:
        return False
    raise _error("get", code)


def _check(doing: str, codes: Iterable[int], *allowed: int) -> None:
    """Raises for the first code that is an error and not allowed."""
    for code in codes:
        if code < 0 and code not in allowed:
            raise _error(doing, code)


def _error(doing: str, code: int) -> StoreError:
    name = f" ({_Code(code).name})" if code in _Code.__members__.values() else ""
    return StoreError(f"mooncake: {doing} answered {code}{name}")
