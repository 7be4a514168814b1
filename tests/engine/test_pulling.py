"""Goal: who waits for a prompt that is pulled does not keep the engine's thread awake. Method: a peer that
says at once that it has everything, a store whose reads end when the test says so; calls and steps are
counted."""

import threading
from contextlib import closing

import pytest

from tests.engine.drive import PAGE, make_ask, make_engine, words
from tiercel.asks.ask import Prefiller
from tiercel.engine import service as service_module
from tiercel.engine.service import EngineService
from tiercel.errors import EngineError
from tiercel.storage.memory import MemoryStore
from tiercel.storage.peer.store import News
from tiercel.threads import start

AT = "127.0.0.1", 9


class Peer:
    """Has whatever it is asked for."""

    def watch(self, keys, wait_s):
        yield News(list(keys), [])

    def close(self):
        pass


class Shut(MemoryStore):
    """A read begins, and ends when it may."""

    def __init__(self):
        super().__init__()
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def get(self, wanted):
        self.begun.set()
        self.may_end.wait(60)
        return super().get(wanted)


class Pulling:
    """A service on an engine that is going to pull; its thread sleeps for an hour if nobody wakes it."""

    def __init__(self, monkeypatch, overlap):
        monkeypatch.setattr(service_module, "PENDING_S", 3600.0)
        self.store, self.engine = Shut(), make_engine(host_pages=40, overlap=overlap)
        self.engine.cache.attach(self.store)
        while self.engine.cache.busy:
            self.engine.cache.step()
        self.store.begun.clear()
        self.store.may_end.clear()
        self.sleeping, self.steps, self.asked = threading.Event(), 0, 0
        self._real_wait = self.engine.cache.wait_until
        self.engine.cache.wait_until = self._wait
        self.service = EngineService(self.engine, "tiny-v4")
        self._real_step, self.service._step = self.service._step, self._step
        self.service.pull_prompts({AT: Peer()}, 600)  # type: ignore[dict-item]
        self._real_ask, self.service._pulls._ask = self.service._ask, self._ask

    def _wait(self, woken, timeout_s, *, store_s):
        if store_s == 3600.0 and self.engine.cache.busy:
            self.sleeping.set()
        self._real_wait(woken, timeout_s, store_s=store_s)
        self.sleeping.clear()

    def _step(self, steps):
        self.steps += 1
        self._real_step(steps)

    def _ask(self, what):
        self.asked += 1
        return self._real_ask(what)

    def ask(self, pages=3):
        return make_ask("pulled", words(pages * PAGE + 1), prefiller=Prefiller(*AT, "room"))

    def pull(self, pages=3):
        """Returns when a read is under way and the engine's thread sleeps."""
        pulled = start(lambda: self.service._pulls.pull(self.ask(pages), threading.Event()), "pull")
        assert self.store.begun.wait(30) and self.sleeping.wait(30)
        return pulled


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_the_engine_s_thread_sleeps_until_a_read_has_ended(monkeypatch, overlap):
    pulling = Pulling(monkeypatch, overlap)
    with closing(pulling.service):
        pulled = pulling.pull()
        pulling.store.may_end.set()
        assert pulled.result(30) == 3
        assert pulling.asked == 3, "for the keys, for the read, and that it is over"
        woken_by = 3 + 1  # and by the read
        assert pulling.steps <= woken_by + 1


def test_who_asks_something_meanwhile_does_not_wait_for_the_read(monkeypatch):
    pulling = Pulling(monkeypatch, False)
    with closing(pulling.service) as service:
        pulled = pulling.pull()
        assert service._ask(lambda: "here").result(30) == "here"
        assert not pulled.done()
        pulling.store.may_end.set()
        assert pulled.result(30) == 3


def test_who_waits_is_told_when_the_engine_fails(monkeypatch):
    pulling = Pulling(monkeypatch, False)
    with closing(pulling.service) as service:
        pulled = pulling.pull()
        monkeypatch.setattr(service._engine.scheduler, "plan", lambda: 1 / 0)
        service._ask(lambda: None)
        with pytest.raises(EngineError, match="the log says why"):
            pulled.result(30)
        pulling.store.may_end.set()


def test_who_waits_goes_on_without_the_pages_when_the_engine_stops(monkeypatch):
    pulling = Pulling(monkeypatch, False)
    pulled = pulling.pull()
    closed = start(lambda: pulling.service.close(0.0), "close")
    assert pulled.result(30) == 0
    pulling.store.may_end.set()
    assert closed.result(30)


def test_who_asks_when_the_engine_has_stopped_is_refused(monkeypatch):
    pulling = Pulling(monkeypatch, False)
    pulling.store.may_end.set()
    assert pulling.service.close(0.0)
    with pytest.raises(EngineError, match="has stopped"):
        start(lambda: pulling.service._pulls.pull(pulling.ask(), threading.Event()), "pull").result(30)
    assert pulling.service.failure is None, "it did not fail"
