"""Seeded faults in every phase of a transfer, between a real engine and servers that it pulls from.

    greeting     the server shows who it is, and that it has the key
    question     the reader has asked; the first byte of the answer is due
    answer       within the answer: what is there, and where
    payload      within the bytes of the pages
    done         within the end of the lease

A seed says what happens, where and to how many connections. Afterwards: the answer is right, bit by bit, and
has ended once; no place and no lease is lost on either side; and the next request pulls again.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from random import Random
from typing import Any, NamedTuple

from tests.engine.drive import PAGE, make_ask, make_engine, run, settle, words
from tests.peers.forks import Forks
from tests.peers.proxy import Proxy
from tests.peers.test_engines import pulling, same
from tests.servers import free_port
from tests.wait import until
from tiercel.asks.ask import Answer, Ask
from tiercel.engine.engine import Engine
from tiercel.engine.loop import plain_steps
from tiercel.storage.peer.wire import HEAD, Message, parse_bytes

TEXTS = [words(3 * PAGE + 20, seed=31), words(5 * PAGE + 1, seed=32)]
PHASES = ("greeting", "question", "answer", "payload", "done")
FAULTS = ("kill", "restart", "stop", "cut", "stall", "flip", "no room", "evicted")
RESTARTED = ("kill", "restart", "evicted")
TRANSPORTS = ("tcp", "mooncake")
STOPPED_S = 3.0
"""Longer than a reader waits."""


class Plan(NamedTuple):
    fault: str
    phase: str
    share: float  # of the bytes of the phase
    once: bool
    text: int
    transport: str

    @staticmethod
    def of(seed: int) -> Plan:
        random = Random(seed)
        fault, phase = FAULTS[seed % len(FAULTS)], random.choice(PHASES)
        transport = random.choices(TRANSPORTS, (3, 1))[0]
        return Plan(fault, phase, random.random(), random.random() < 0.5, random.randrange(2), transport)


class Pair:
    """An engine for each transport, and the servers that they pull from through a proxy."""

    def __init__(self, forks: Forks, proxy: Proxy, stopped_s: float) -> None:
        self._forks, self._proxy, self._stopped_s, self._asks = forks, proxy, stopped_s, 0
        cold = make_engine(cache={"force_miss": True})
        self._truths = run(cold, *(make_ask(f"cold {i}", text) for i, text in enumerate(TEXTS)))
        forks.wait()
        forks.start()
        url = f"peer://{proxy.address}?timeout_s=0.4&hold_s=2&transport="
        self.engines = {name: pulling(url + name) for name in TRANSPORTS}
        self._phases = {
            name: [self._recorded(engine, text) for text in range(len(TEXTS))]
            for name, engine in self.engines.items()
        }

    def _recorded(self, engine: Engine, text: int) -> dict[str, range]:
        """Which bytes of a connection belong to which phase: as one was without a fault."""

        def record() -> dict[str, range] | None:
            self._forget(engine)
            self._proxy.record = sent = bytearray()
            phases = phases_of(bytes(sent)) if self._pulls(engine, text) else {}
            return phases if set(phases) == set(PHASES) else None

        return until(record, "one connection has all phases")  # type: ignore[return-value]

    def trial(self, plan: Plan) -> None:
        """Raises if anything is not as it must be."""
        engine = self.engines[plan.transport]

        def happens() -> bool:
            happened = self._happens(engine, plan)
            if not happened:  # what was recorded was asked twice, perhaps, on a busy machine
                self._phases[plan.transport][plan.text] = self._recorded(engine, plan.text)
            return happened

        until(happens, f"it happens: {plan}")

    def _happens(self, engine: Engine, plan: Plan) -> bool:
        """Whether the transfer came by the byte where the fault waits: reads share their connections as it
        comes, so some do not."""
        self._forget(engine)
        restarts = self._restarts(engine)
        with self._faulty(engine, plan):
            self._ask(engine, plan.text)
        settle(engine)
        happened = plan.fault == "no room" or self._proxy.hurts > 0
        if not self._forks.alive:
            self._forks.start()
        until(lambda: self._again(engine, plan.text), f"the peer is used again after {plan}")
        until(lambda: self._forks.ask("check") == {"leases": 0}, f"no lease is left after {plan}")
        if happened and plan.fault in RESTARTED:
            assert self._restarts(engine) > restarts, "another start is noticed"
        return happened

    @contextmanager
    def _faulty(self, engine: Engine, plan: Plan) -> Iterator[None]:
        forks, proxy, goes_on = self._forks, self._proxy, threading.Event()
        at = self._phases[plan.transport][plan.text][plan.phase]
        byte = at[int(plan.share * len(at))]

        def stop() -> None:
            if not goes_on.is_set():
                goes_on.set()
                forks.signal(signal.SIGSTOP)

        def kill() -> None:
            if forks.alive:
                forks.kill()

        held = None
        if plan.fault == "no room":
            other = engine.cache.chain(words(200 * PAGE, seed=99))
            held = engine.cache.land(other, 0, 200)
        elif plan.fault == "evicted":
            proxy.hurt("call", byte, once=plan.once, do=lambda: forks.ask("flush"))
        elif plan.fault in ("kill", "restart", "stop"):
            do = {"kill": kill, "restart": forks.restart, "stop": stop}[plan.fault]
            proxy.hurt("call", byte, once=plan.once or plan.fault != "kill", do=do)
        else:
            proxy.hurt(plan.fault, byte, once=plan.once)
        began_s = time.monotonic()
        yield
        proxy.heal()
        if goes_on.is_set():
            time.sleep(max(0.0, began_s + self._stopped_s - time.monotonic()))
            forks.signal(signal.SIGCONT)
        if held is not None:
            engine.cache.landed(held)
        if plan.fault == "evicted":
            forks.restart()  # with all its pages

    def _restarts(self, engine: Engine) -> int:
        """How often this engine has met a server that was another one than before."""
        return int(engine.cache.store.mover._store.stats()["peers"]["1"]["restarts"])

    def _again(self, engine: Engine, text: int) -> bool:
        self._forget(engine)
        return self._pulls(engine, text)

    def _pulls(self, engine: Engine, text: int) -> bool:
        answer = self._ask(engine, text)
        return answer.usage.store_tokens == (len(TEXTS[text]) - 1) // PAGE * PAGE

    def _ask(self, engine: Engine, text: int) -> Answer:
        """The answer is right, and ends once."""
        self._asks += 1
        ask = make_ask(f"ask {self._asks}", TEXTS[text])
        answer = ended_once(engine, ask)
        assert same(answer, self._truths[text]), "a wrong token"
        return answer

    def _forget(self, engine: Engine) -> None:
        """The next request pulls all, on a connection of its own."""
        settle(engine)
        assert engine.cache.flush() == 0
        assert engine.cache.host_pages.free == engine.cache.host_pages.capacity, "no place is lost"
        self._proxy.cut_all()

    def close(self) -> None:
        for engine in self.engines.values():
            engine.cache.close()


def ended_once(engine: Engine, ask: Ask) -> Answer:
    answer, ends = Answer(), 0
    engine.add(ask)
    for deltas in plain_steps(engine):
        for delta in deltas:
            answer.add(delta)
            ends += delta.finish is not None
        if ends and not engine.cache.busy:
            break
    assert ends == 1
    return answer


def phases_of(sent: bytes) -> dict[str, range]:
    """`sent`: what a server sent on one connection. Its last answer is the one with a lease."""
    phases, at, greeting = dict[str, range](), 0, True
    while at < len(sent):
        size, kind = HEAD.unpack_from(sent, at)
        end = at + HEAD.size + size
        greeting = greeting and kind in (Message.HELLO, Message.WELCOME)
        if greeting:
            phases["greeting"] = range(end)
        elif kind == Message.FOUND:
            phases["question"], phases["answer"] = range(at, at + 1), range(at + 1, end)
            phases["payload"] = range(end - 1, end)  # unless it follows here, another transport brings it
        elif kind == Message.BYTES:
            first, end = end, end + parse_bytes(sent[at + HEAD.size : end])
            phases["payload"] = range(first, end)
        elif kind == Message.END:
            phases["done"] = range(at, end)
        at = end
    return phases


@contextmanager
def pair(stopped_s: float = STOPPED_S) -> Iterator[Pair]:
    address = f"127.0.0.1:{free_port()}"
    options: dict[str, Any] = {"texts": TEXTS, "address": address, "mooncake": "tcp"}
    with (
        closing(Forks(**options)) as forks,
        closing(Proxy(address)) as proxy,
        closing(Pair(forks, proxy, stopped_s)) as both,
    ):
        yield both
