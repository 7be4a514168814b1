"""One reader of our host pages: its connection, its questions, its leases.

    greeting ─► question ─► lease ─► bytes ─► END ─► question …
        │                     │
     REFUSED                  └── ends with DONE, with its last byte, with its time, with its connection

The thread of a connection waits for the engine's thread (`peers.questions`), reads the host pages that its
leases hold, and ends the leases whatever happens.
"""

from __future__ import annotations

import hmac
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple, Protocol, TypeVar

from tiercel.cache.leases import Lease
from tiercel.errors import StoreError, TiercelError
from tiercel.peers.questions import Finding, Questions, Watch
from tiercel.peers.records import Records
from tiercel.storage.peer import wire
from tiercel.storage.peer.link import Link, LinkLost
from tiercel.storage.peer.wire import Message
from tiercel.storage.record import RecordKey

T = TypeVar("T")

MESSAGE_S = 5.0
"""The time limit of one message. Messages are short."""
ANSWER_S = 30.0
"""The engine answers between two steps. If it takes longer than this, it hangs."""
IDLE_S = 600.0
"""A connection that asks nothing for this time is closed. Its reader opens another."""
LEASE_MOST_S = 60.0
"""The longest lease. A longer one would let a reader that stopped keep pages for long."""
ALIVE_S = 0.25
"""How often a reader that waits is told that we are still there, while there is no news."""
COUNTED = (
    *("bytes_sent", "records_sent", "leases", "leases_timed_out"),
    *("keys_refused", "readers_refused", "errors"),
)
"""Each is there from the start, as 0."""


class Ask(Protocol):
    """Has the thread that drives the cache do something between two steps, and wakes it."""

    def __call__(self, what: Callable[[], T], /) -> Future[T]: ...


@dataclass(frozen=True)
class Offer:
    """What all readers of one server get."""

    questions: Questions
    ask: Ask
    records: Records
    forms: Sequence[bytes]
    key: str
    transports: dict[str, Any]
    boot: bytes = field(default_factory=lambda: os.urandom(wire.BOOT_BYTES))
    counters: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTED, 0)))

    def asked(self, what: Callable[[], T]) -> T:
        """The result of `what`, run in the cache's thread. After a time-out `what` is never run."""
        future = self.ask(what)
        try:
            try:
                return future.result(ANSWER_S)
            except TimeoutError:
                if future.cancel():
                    raise StoreError("the engine does not answer") from None
                return future.result()  # it is being done now
        except TiercelError as error:
            raise StoreError(f"the engine does not answer: {error}") from error


class Held(NamedTuple):
    """A lease, its end, and its records by their numbers in the question."""

    until_s: float
    lease: Lease
    keys: dict[int, RecordKey]


class Reader:
    """One connection. Its thread is the only one that takes and ends its leases."""

    def __init__(self, offer: Offer, link: Link) -> None:
        self._offer = offer
        self.link = link
        self._leases: dict[int, Held] = {}
        self._next = 1

    def run(self) -> None:
        """Answer questions until the connection ends."""
        self._greet()
        while True:
            self._wait_for_question()
            self._limit()
            kind, body = self.link.receive()
            if kind is Message.FIND:
                self._find(wire.Find.parse(body))
            elif kind is Message.READ:
                self._read(wire.Read.parse(body))
            elif kind is Message.DONE:
                self._done(wire.parse_bytes(body))
            else:
                raise StoreError(f"{kind.name} is no question")

    def close(self) -> None:
        """End every lease."""
        self.link.close()
        for number in list(self._leases):
            self._end(number)

    def _greet(self) -> None:
        link, offer = self.link, self._offer
        hello = wire.Hello(offer.boot, os.urandom(wire.NONCE_BYTES))
        link.within(MESSAGE_S)
        link.send(Message.HELLO, hello.pack())
        kind, body = link.receive(most=wire.GREETING_MOST)
        nonce, shown = body[: wire.NONCE_BYTES], body[wire.NONCE_BYTES :]
        wanted = wire.proof(offer.key, b"reader", hello, nonce)
        if kind is not Message.PROOF or not hmac.compare_digest(shown, wanted):
            offer.counters["keys_refused"] += 1
            link.send(Message.REFUSED, b"its key is missing or wrong (--share-key)")
            raise StoreError("its key is missing or wrong")
        own = wire.proof(offer.key, b"server", hello, nonce)
        link.send(Message.WELCOME, wire.Welcome(own, offer.forms, offer.transports).pack())

    def _wait_for_question(self) -> None:
        """Wait for a question. Meanwhile leases end when their time is over."""
        until_s, arrived = monotonic() + IDLE_S, False
        while not arrived:
            next_s = min((until_s, *(held.until_s for held in self._leases.values())))
            arrived = self.link.arrived(next_s - monotonic())
            self._end_old()
            if monotonic() > until_s:
                raise LinkLost("it asked nothing for long")

    # Questions

    def _find(self, question: wire.Find) -> None:
        questions, hold_s = self._offer.questions, min(question.hold_s, LEASE_MOST_S)
        if question.wait_s:
            self._watch(question, hold_s)
            return
        finding = self._offer.asked(lambda: questions.find(question.keys, hold=hold_s > 0))
        self._tell(question, finding, hold_s, last=True)

    def _watch(self, question: wire.Find, hold_s: float) -> None:
        """Send what is decided, until all is decided or the wait is over."""
        questions, watch, left = self._offer.questions, Watch(question.keys, hold_s > 0), False
        try:
            self._offer.asked(lambda: questions.watch(watch))
            self._tell_news(watch, question, hold_s, monotonic() + question.wait_s)
            rest = self._offer.asked(lambda: questions.unwatch(watch))
            left = True
            self._tell_all(watch, question, hold_s)
            self._tell(question, rest, hold_s, last=True)
        finally:
            if not left:
                self._offer.asked(lambda: questions.leave(watch))
            for finding in watch.news:  # not sent any more: `close` ends the lease
                self._hold(question.keys, finding, hold_s)
            watch.close()

    def _tell_news(self, watch: Watch, question: wire.Find, hold_s: float, until_s: float) -> None:
        """Send news of a watch. The reader may end leases meanwhile, or leave."""
        while True:
            self._tell_all(watch, question, hold_s)
            left_s = until_s - monotonic()
            if left_s <= 0 or not watch.undecided:
                return
            woken, arrived = self.link.wait(min(left_s, ALIVE_S), watch.wake)
            if woken:
                os.eventfd_read(watch.wake)
            if arrived:
                self._limit()
                kind, body = self.link.receive()
                if kind is not Message.DONE:
                    raise StoreError(f"{kind.name} while it waits for an answer")
                self._done(wire.parse_bytes(body))
            self._end_old()
            if not (woken or arrived):
                self._limit()
                self.link.send(Message.FOUND, wire.Found([], last=False).pack())

    def _tell_all(self, watch: Watch, question: wire.Find, hold_s: float) -> None:
        while watch.news:
            self._tell(question, watch.news.popleft(), hold_s, last=False)

    def _tell(self, question: wire.Find, finding: Finding, hold_s: float, *, last: bool) -> None:
        number, details, lease = self._hold(question.keys, finding, hold_s), {}, finding.lease
        if lease is not None:
            for key_number, item, places in zip(finding.here, lease.items, lease.places, strict=True):
                details[key_number] = self._offer.records.describe(
                    question.keys[key_number], item, places, align=question.align, pieces=question.places
                )
        entries = [wire.Entry(each, state, *details.get(each, ())) for each, state in finding.states.items()]
        self._limit()
        self.link.send(Message.FOUND, wire.Found(entries, number, last).pack())

    def _read(self, question: wire.Read) -> None:
        """Send the bytes from host memory; then end the lease."""
        held = self._leases.get(question.lease)
        if held is None:
            self._done(question.lease)
            return
        at = {number: position for position, number in enumerate(held.keys)}
        if not all(number in at for number in question.numbers):
            raise StoreError("a read of something that its lease does not hold")
        views = list[memoryview]()
        for number in question.numbers:
            item, places = held.lease.items[at[number]], held.lease.places[at[number]]
            views += self._offer.records.views(held.keys[number], item, places)
        size = sum(map(len, views))
        self.link.within(held.until_s - monotonic())  # afterwards others may write there
        self.link.send(Message.BYTES, wire.pack_bytes(size))
        self.link.send_all(views)
        self._offer.counters["bytes_sent"] += size
        self._offer.counters["records_sent"] += len(question.numbers)
        self._done(question.lease)

    def _done(self, number: int) -> None:
        held = self._leases.get(number)
        in_time = held is not None and monotonic() < held.until_s
        self._end(number)
        self._limit()
        self.link.send(Message.END, wire.End(number, in_time).pack())

    # Leases

    def _hold(self, keys: Sequence[RecordKey], finding: Finding, hold_s: float) -> int:
        """Hold what was found. Returns the number of the lease; 0: there is none."""
        if finding.lease is None:
            return 0
        number, self._next = self._next, self._next + 1
        here = {each: keys[each] for each in finding.here}
        self._leases[number] = Held(monotonic() + hold_s, finding.lease, here)
        self._offer.counters["leases"] += 1
        return number

    def _limit(self) -> None:
        """Set the time limit of a message: a few seconds, and no longer than any lease."""
        self._end_old()
        now = monotonic()
        self.link.within(min((MESSAGE_S, *(held.until_s - now for held in self._leases.values()))))

    def _end_old(self) -> None:
        now = monotonic()
        for number in [number for number, held in self._leases.items() if held.until_s <= now]:
            self._offer.counters["leases_timed_out"] += 1
            self._end(number)

    def _end(self, number: int) -> None:
        held = self._leases.pop(number, None)
        if held is not None:
            with suppress(StoreError):  # an engine that failed evicts nothing any more
                self._offer.asked(lambda: self._offer.questions.end(held.lease))
