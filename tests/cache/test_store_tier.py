"""Goal: what a store adds and what it never does, one promise per test. Method: the cache of the other tests,
workers that run when they are told to, a clock that stands still, and stores that misbehave on request."""

import logging
from dataclasses import replace
from random import Random

import pytest

from tests.cache.test_tiered_cache import PLAIN, TEXT, V4, WINDOW, Driver
from tests.simulation.copies import HeldCopies
from tests.simulation.stores import FalseStore
from tiercel.cache import Request, Wait, WaitFor
from tiercel.config import LAYOUT_NAMES
from tiercel.errors import ConfigError, StoreAway, StoreError
from tiercel.policy.breaker import BreakerState
from tiercel.policy.fetch import FetchPolicy
from tiercel.policy.resume import Why
from tiercel.spec.identity import Identity
from tiercel.storage.base import Put
from tiercel.storage.file import FileStore
from tiercel.storage.late import LateStore
from tiercel.storage.memory import MemoryStore
from tiercel.storage.record import page_key_of
from tiercel.transfer.mover import ItemPlace, Work, Workers
from tiercel.tree.node import Cleared, Event
from tiercel.types import Kind, Tier


class StoreDriver(Driver):
    """With a store whose workers run only in `settle` and `work`."""

    def __init__(self, spec=PLAIN, *, store=None, **settings):
        super().__init__(spec, **({"fetch": "wait", "copier": "reference"} | settings))
        self.now_s = 0.0
        self.store = store if store is not None else MemoryStore()
        self.readers, self.writers = HeldCopies(), HeldCopies()
        workers = Workers(self.readers, self.readers, self.writers, retry_after_s=())
        self.cache.attach(self.store, clock=lambda: self.now_s, workers=workers)

    def work(self):
        self.readers.shutdown()
        self.writers.shutdown()

    def settle(self):
        while self.cache.busy:
            self.cache.step()
            self.work()
            super().settle()

    def begin_loaded(self, tokens, namespace=(), **options):
        chain = self.cache.chain(tokens, namespace)
        for _ in range(8):
            request = self.cache.begin(chain, **options)
            self.settle()
            if isinstance(request, Request):
                self.check_bytes(request, tokens, namespace)
                return request
        raise AssertionError(f"still {request}")

    def restart(self, **settings):
        """Another cache on the same store."""
        other = StoreDriver(self.spec, store=self.store, **settings)
        other.bytes.texts = self.bytes.texts
        return other


def filled(spec=PLAIN, text=TEXT, store=None, **settings):
    driver = StoreDriver(spec, store=store, **settings)
    driver.serve(text)
    return driver


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("spec", [PLAIN, WINDOW, V4], ids=lambda spec: spec.model)
def test_another_cache_on_the_same_store_goes_on_where_the_first_ended(spec, layout):
    first = filled(spec, layout=layout, tail_every_pages=1)
    again = first.restart(layout=layout, tail_every_pages=1)
    reuse = again.serve(TEXT)
    assert (reuse.store_tokens, reuse.host_tokens, reuse.device_tokens) == (16, 0, 0)
    assert reuse.why is Why.COMPLETE
    assert again.serve(TEXT).device_tokens == 16, "and the second time it is near"


def test_records_are_the_same_whatever_the_layout_of_the_host():
    first = filled(layout="layer_first")
    assert first.restart(layout="page_first_direct").serve(TEXT).store_tokens == 16


def test_what_the_store_has_already_is_not_written_again():
    first, puts = filled(), []
    again = first.restart()
    again.settle()
    real = first.store.put
    first.store.put = lambda values: puts.extend(values) or real(values)
    request = again.cache.begin(again.cache.chain(TEXT), load=False)
    again.compute(request, TEXT)
    again.cache.finish(request)
    again.settle()
    assert puts == [] and again.cache.store.counters["pages_written"] == 4


def test_a_request_waits_for_the_store_and_begins_with_the_step_after_the_last_byte():
    driver = filled().restart()
    chain = driver.cache.chain(TEXT)
    assert driver.cache.begin(chain) == Wait(WaitFor.STORE)
    driver.work()
    driver.cache.step()
    assert driver.cache.begin(chain) == Wait(WaitFor.STORE)
    driver.work()
    driver.cache.step()
    request = driver.cache.begin(chain)
    assert isinstance(request, Request) and request.reuse.store_tokens == 16
    driver.settle()
    driver.cache.abort(request)


def test_best_effort_never_waits_and_takes_what_was_announced_in_time():
    first = filled()
    late = first.restart(fetch="best_effort")
    request = late.begin(TEXT)
    assert isinstance(request, Request) and request.reuse.tokens == 0
    assert request.reuse.why is Why.STORE_LATE
    early = first.restart(fetch="best_effort")
    chain = early.cache.chain(TEXT)
    early.cache.prefetch(chain)
    early.settle()
    assert early.cache.begin(chain).reuse.store_tokens == 16


class TwoSeconds(FetchPolicy):
    """A user's own policy."""

    def waits(self, fetch):
        return fetch.waited_s < 2.0


def test_a_users_own_policy_decides_how_long_a_request_waits():
    driver = filled().restart(fetch=f"{__name__}:TwoSeconds")
    chain = driver.cache.chain(TEXT)
    for now_s in (0.0, 1.9):
        driver.now_s = now_s
        assert driver.cache.begin(chain) == Wait(WaitFor.STORE)
    driver.now_s = 2.1
    request = driver.cache.begin(chain)
    assert isinstance(request, Request) and request.reuse.why is Why.STORE_LATE
    with pytest.raises(ConfigError, match="fetch"):
        filled().restart(fetch=f"{__name__}:StoreDriver")


def test_a_stuck_store_costs_a_request_its_deadline_and_no_more():
    driver = filled().restart(fetch="deadline", fetch_deadline_s=0.25)
    chain = driver.cache.chain(TEXT)
    assert driver.cache.begin(chain) == Wait(WaitFor.STORE)
    driver.now_s += 0.24
    driver.cache.step()
    assert driver.cache.begin(chain) == Wait(WaitFor.STORE)
    driver.now_s += 0.02
    request = driver.cache.begin(chain)
    assert request.reuse.tokens == 0 and request.reuse.why is Why.STORE_LATE
    driver.cache.check()
    driver.cache.finish(request)
    driver.settle()


@pytest.mark.parametrize("steps", range(6))
def test_a_request_that_leaves_in_any_phase_leaves_nothing_behind(steps):
    driver = filled().restart()
    free = driver.cache.host_pages.free
    chain = driver.cache.chain(TEXT)
    driver.cache.begin(chain)
    for step in range(steps):
        driver.work() if step % 2 == 0 else driver.cache.step()
    driver.cache.withdraw(chain)
    driver.cache.check()
    driver.settle()
    assert not driver.cache.store.fetches.of and not driver.cache.busy
    driver.cache.flush()
    assert driver.cache.host_pages.free == free


def test_the_longest_legal_boundary_counts_not_the_least_of_pages_and_tails():
    """A tail at page 4 is lost, the one at 2 is there: two pages are fetched, not none and not four."""
    first = filled(WINDOW, tail_every_pages=2)
    lost = ItemPlace(Kind.TAIL, first.cache.chain(TEXT).keys[3])
    assert first.store.delete([first.cache.store.mover.keys(lost)[-1]]) == 1
    again = first.restart(tail_every_pages=2)
    request = again.begin_loaded(TEXT)
    assert request.reuse.store_tokens == 8
    again.cache.abort(request)


def test_pages_that_arrived_before_the_deadline_are_used_up_to_a_legal_boundary(monkeypatch):
    monkeypatch.setattr("tiercel.cache.fetch.READ_BYTES_LEAST", 1)
    monkeypatch.setattr("tiercel.cache.fetch.READS", 8)
    first = filled(WINDOW, tail_every_pages=1)
    driver = first.restart(fetch="deadline", tail_every_pages=1)
    chain = driver.cache.chain(TEXT)
    driver.cache.begin(chain)
    driver.work()
    driver.cache.step()
    assert len(driver.readers.held) == 8, "four pages and their tails"
    for _ in range(5):
        driver.readers.run(0)
    driver.cache.step()
    driver.now_s += 100.0
    request = driver.cache.begin(chain)
    assert (request.reuse.store_tokens, request.reuse.why) == (8, Why.STORE_LATE)
    driver.settle()
    driver.check_bytes(request, TEXT)
    driver.cache.abort(request)
    driver.settle()


LIES = ("flip", "zero", "swap", "stale", "cut", "deny")


@pytest.mark.parametrize("lie", LIES)
def test_a_store_that_lies_is_a_miss_and_the_record_is_removed(lie, caplog):
    store = FalseStore(Random(4))
    store.liar, store._size = 0.0, None
    driver = filled(store=store).restart()
    driver.settle()
    store.mood, store.times = lie, 1
    reuse = driver.serve(TEXT)
    assert reuse.tokens < 16 and reuse.why is Why.STORE_DAMAGED
    flaws = driver.cache.store.mover.flaws
    assert sum(flaws.values()) >= 1 and sum("removed" in line for line in caplog.messages) == len(flaws)
    store.mood = None
    assert driver.restart().serve(TEXT).store_tokens == 16, "computed again, and stored again"


@pytest.mark.parametrize("bad", range(4))
def test_a_page_that_can_not_be_read_any_more_is_computed_and_written_again(bad):
    """One other value under one name, as anybody with access to a shared server can leave it there."""
    first = filled()
    (name,) = [key for key in first.store._values if page_key_of(key) == first.cache.chain(TEXT).keys[bad]]
    first.store.put([Put(name, [b"somebody else's"])])
    second = first.restart()
    reuse = second.serve(TEXT)
    assert (reuse.store_tokens, reuse.why) == (4 * bad, Why.STORE_DAMAGED)
    assert second.cache.stats().store.flaws == {"unreadable": 1}
    third = second.restart()
    assert third.serve(TEXT).store_tokens == 16, "it is in the store again"


def test_what_is_found_damaged_while_the_host_has_it_is_told_and_written_again():
    """A request computes a page while another reads the same page's damaged record: who writes sees a name
    that is listed, and believes it."""
    first = filled()
    first.store._values = dict.fromkeys(first.store._values, b"somebody else's")
    driver = first.restart()
    driver.settle()
    events = []
    driver.cache.watch(events.extend)
    driver.cache.prefetch(driver.cache.chain(TEXT))
    driver.work()
    driver.cache.step()  # the store said that it has all; the reads are on their way
    request = driver.cache.begin(driver.cache.chain(TEXT), load=False)
    driver.compute(request, TEXT)
    driver.cache.finish(request)
    while driver.cache.store.writes.backlog or not driver.cache.store.counters["pages_written"]:
        driver.cache.step()
        driver.writers.shutdown()
        Driver.settle(driver)
    assert driver.cache.store.counters["pages_written"] == 4
    driver.settle()
    assert driver.cache.stats().store.flaws == {"unreadable": 4}
    gone = [event for event in events if isinstance(event, Event) and event.tier is Tier.STORE]
    assert [event.stored for event in gone].count(False) == 4
    assert driver.restart().serve(TEXT).store_tokens == 16


def test_a_store_that_fails_is_left_alone_and_tried_again(caplog):
    store = FalseStore(Random(1))
    store.liar, store._size = 0.0, None
    driver = filled(store=store)
    store.mood, store.times = "raise", 10**6
    again = driver.restart()
    for text in range(4):
        assert again.serve([text, *TEXT]).tokens == 0, "requests go on"
    tier = again.cache.store
    assert tier.breaker.state is BreakerState.OFF
    calls = tier.counters["failures"]
    reuse = again.serve(TEXT[:-1])
    assert reuse.why is Why.STORE_OFF and tier.counters["failures"] == calls, "not even asked"
    store.mood = None
    again.now_s += 1.0
    again.serve([7, 7, *TEXT])
    assert tier.breaker.state is BreakerState.WORKING
    again.settle()
    assert not tier.writes.backlog, "what could not be written then is written now"
    assert driver.restart().serve([0, *TEXT]).store_tokens == 16


def test_a_store_that_is_away_is_tried_without_a_request_until_it_is_there(caplog):
    tries, kept = [], MemoryStore()

    def make():
        tries.append(driver.now_s)
        if driver.now_s < 5.0:
            raise StoreAway("nobody is there")
        return kept

    why, clock = StoreAway("nobody is there"), lambda: driver.now_s
    driver = StoreDriver(store=LateStore(make, MemoryStore, why, clock))
    tier = driver.cache.store
    assert tier.stats().state == "trying", "a store that is known to be away does not count as working"
    driver.work()
    driver.cache.step()
    assert tier.stats().state == "off" and driver.cache.stores.pending, "the engine goes on to look at it"
    with caplog.at_level("INFO"):
        while tier.stats().state != "working":
            driver.now_s += 0.25
            assert driver.now_s < 10.0
            driver.cache.step()
            driver.work()
    assert tries == [0.0, 1.0, 3.25, 7.5], "each time it waits longer, and no try is made twice"
    assert "the store works" in caplog.messages and not driver.cache.stores.pending
    driver.serve(TEXT)
    driver.settle()
    assert driver.restart().serve([*TEXT, 1]).store_tokens == 16


class Full(MemoryStore):
    """Keeps nothing while it is full."""

    full = True

    def put(self, values):
        return [False] * len(values) if self.full else super().put(values)


def test_a_store_that_keeps_nothing_is_told_once_and_when_that_changes(caplog):
    store = Full()
    driver = StoreDriver(store=store)
    told = "the store works and does not keep what is written: it is full, or has no memory"
    with caplog.at_level("INFO"):
        for first in range(3):
            driver.serve([first, *TEXT])
        stats = driver.cache.store.stats()
        assert (stats.state, stats.refused) == ("working", True) and stats.counters["writes_refused"] > 3
        assert caplog.messages.count(told) == 1
        store.full = False
        driver.now_s += 100.0
        driver.serve([7, 7, *TEXT])
    assert not driver.cache.store.stats().refused
    assert caplog.messages.count("the store keeps what is written") == 1


def test_an_operation_that_never_ends_turns_the_tier_off_and_holds_only_its_places():
    driver = filled().restart(fetch="wait", store_timeout_s=10.0)
    chain = driver.cache.chain(TEXT)
    driver.cache.begin(chain)
    driver.work()
    driver.cache.step()
    while isinstance(request := driver.cache.begin(chain), Wait):
        driver.now_s += 11.0
        driver.cache.step()
    assert driver.now_s <= 33.0 and request.reuse.why is Why.STORE_OFF
    driver.cache.check()
    driver.cache.finish(request)
    driver.work()
    driver.settle()


def test_nobody_waits_behind_a_read_that_never_ends():
    other = [7, *TEXT]
    first = filled()
    first.serve(other)
    driver = first.restart(fetch="deadline", store_timeout_s=10.0)
    driver.settle()
    driver.cache.compute.observe(16, 1.0)
    driver.cache.store.fetches.costs.read.observe(16 // PLAIN.page_tokens * PLAIN.page_bytes, 0.8)
    driver.cache.begin(driver.cache.chain(TEXT))
    driver.work()
    driver.cache.step()
    [(read, go_on)] = driver.readers.held
    driver.readers.held.clear()
    read.set_running_or_notify_cancel()
    driver.now_s += 11.0
    driver.cache.step()
    assert driver.cache.store.counters["timeouts"] == 1
    assert driver.serve(other).store_tokens == 16, "reading it is sooner than computing it"
    read.set_result(go_on())
    driver.cache.step()
    driver.settle()
    assert driver.cache.store.fetches.reading.bytes_under_way == 0


def test_writes_hold_no_more_host_memory_than_they_may():
    driver = StoreDriver(store_writing_bytes=1)
    request = driver.begin_loaded(TEXT)
    driver.compute(request, TEXT)
    driver.cache.finish(request)
    Driver.settle(driver)
    writing = [op for op in driver.cache.store.mover.under_way if op.work is Work.WRITE]
    assert [len(op.pieces) for op in writing] == [1]
    driver.settle()
    assert driver.cache.store.counters["pages_written"] == 4


def test_a_copy_that_is_being_written_stays_on_the_host_until_it_is():
    driver = StoreDriver(host_pages=4)
    request = driver.begin_loaded(TEXT)
    driver.compute(request, TEXT)
    driver.cache.finish(request)
    Driver.settle(driver)
    storing = [page for page in driver.cache.tree.index.values() if page.readers]
    assert storing
    driver.cache.tree.flush()
    driver.cache.places.settle()
    driver.cache.check()
    assert driver.cache.host_pages.free == 4 - len(storing)
    driver.settle()
    assert driver.cache.host_pages.free == 4


def test_a_small_host_is_a_buffer_on_the_way_to_the_store():
    """Five host pages, eight on the device: everything computed is stored all the same."""
    driver = StoreDriver(host_pages=5)
    text = list(range(100, 132))
    request = driver.begin_loaded(text)
    for upto in range(4, 33, 4):
        driver.compute(request, text, upto=upto)
        driver.settle()
    driver.cache.finish(request)
    driver.settle()
    assert driver.cache.store.counters["pages_written"] == 8
    assert driver.restart().serve(text).store_tokens == 28


@pytest.mark.parametrize("save", ["through", "selective", "back"])
def test_what_a_fetch_goes_on_from_may_leave_meanwhile(save, monkeypatch):
    """The first page is on the device only, and a large text pushes it out while the rest is being read."""
    monkeypatch.setattr("tiercel.cache.fetch.READ_BYTES_LEAST", 1)
    driver = filled().restart(save=save, device_pages=4)
    driver.settle()
    request = driver.cache.begin(driver.cache.chain(TEXT[:4]), load=False)
    driver.compute(request, TEXT[:4])
    driver.cache.finish(request)
    chain = driver.cache.chain(TEXT)
    driver.cache.prefetch(chain)
    driver.work()
    driver.cache.step()
    driver.readers.run(0)
    driver.cache.step()
    large = driver.cache.begin(driver.cache.chain([77] * 16), load=False)
    assert isinstance(large, Wait) or driver.cache.extend(large, 16)
    driver.settle()
    driver.cache.withdraw(chain)
    if isinstance(large, Request):
        driver.cache.abort(large)
    driver.settle()


def test_a_fetch_that_waits_holds_nothing_of_the_device():
    driver = filled().restart(device_pages=4)
    request = driver.cache.begin(driver.cache.chain(TEXT[:4]), load=False)
    driver.compute(request, TEXT[:4])
    driver.cache.finish(request)
    driver.cache.prefetch(driver.cache.chain(TEXT))
    driver.work()
    driver.cache.step()
    assert all(page.lock == 0 for page in driver.cache.tree.index.values())


class Panic(BaseException):
    """As clients written in other languages raise."""


@pytest.mark.parametrize("call", ["contains", "get", "put", "stats", "removed", "clear"])
def test_whatever_a_store_raises_or_answers_the_cache_goes_on(call):
    store = MemoryStore()
    driver = filled(store=store)

    def panic(*_):
        raise Panic("not an Exception")

    setattr(store, call, panic)
    again = driver.restart()
    again.cache.store.clear()
    assert again.serve(TEXT).tokens in (0, 16)
    setattr(store, call, lambda *_: [b""] if call == "removed" else None)
    again.serve([5, *TEXT])
    again.cache.stats()
    again.cache.check()


def test_asking_is_not_reading():
    """Somebody who only asks about many pages takes no room from others."""
    first = filled()
    driver = first.restart(host_pages=12)
    driver.settle()
    driver.cache.prefetch(driver.cache.chain([8] * 400))
    chain = driver.cache.chain(TEXT)
    driver.cache.begin(chain)
    driver.readers.run(1)
    driver.cache.step()
    driver.settle()
    assert driver.cache.begin(chain).reuse.store_tokens == 16


def test_who_finds_no_room_yet_is_served_when_there_is():
    """Host memory for one fetch at a time, and three that want one."""
    texts = [[t] * 18 for t in (1, 2, 3)]
    first = StoreDriver()
    for text in texts:
        first.serve(text)
    driver = first.restart(host_pages=8)
    chains = [driver.cache.chain(text) for text in texts]
    for chain in chains:
        driver.cache.prefetch(chain, wait_s=10.0)
    driver.settle()
    for chain, text in zip(chains, texts, strict=True):
        while isinstance(request := driver.cache.begin(chain), Wait):
            driver.settle()
        assert request.reuse.store_tokens == 16
        driver.settle()
        driver.check_bytes(request, text)
        driver.cache.finish(request)


def test_what_was_being_written_when_a_store_was_left_goes_to_the_next():
    driver = StoreDriver()
    request = driver.begin_loaded(TEXT)
    driver.compute(request, TEXT)
    driver.cache.finish(request)
    Driver.settle(driver)
    assert any(page.readers for page in driver.cache.tree.index.values())
    driver.cache.detach()
    other = MemoryStore()
    driver.cache.attach(other)
    while driver.cache.busy:
        driver.cache.step()
        driver.work()
    assert other.stats()["records"] == 4


def test_a_write_that_ends_after_the_store_was_emptied_proves_nothing():
    driver = StoreDriver()
    request = driver.begin_loaded(TEXT)
    driver.compute(request, TEXT)
    driver.cache.finish(request)
    Driver.settle(driver)
    driver.cache.store.clear()
    driver.writers.shutdown()
    driver.cache.store.mover._ended.rotate(1)  # the writer's thread was the slower one
    driver.settle()
    pages = driver.cache.tree.index.values()
    assert all(page.stored for page in pages) and driver.store.stats()["records"] == len(pages)


def parts_of(spec):
    """Two stages, and two ranks, whose streams are equal: nothing but the form tells their records apart."""
    middle = spec.layers[len(spec.layers) // 2]
    return {
        "stages": (spec.stage(0, middle), spec.stage(middle, spec.layers[-1] + 1)),
        "ranks": (replace(spec, shard="0/2"), replace(spec, shard="1/2")),
    }


@pytest.mark.parametrize("parts", ["stages", "ranks"])
@pytest.mark.parametrize("spec", [PLAIN, V4], ids=lambda spec: spec.model)
def test_parts_of_one_model_agree_on_page_keys_and_never_read_each_others_records(tmp_path, spec, parts):
    one, two = parts_of(spec)[parts]
    drivers = []
    for part in (one, two):
        with FileStore(tmp_path / "store", 64 * 1024**2) as store:
            driver = StoreDriver(part, store=store, tail_every_pages=1)
            assert driver.serve(TEXT).tokens == 0, "the other part's records are there, and not found"
            driver.cache.close()
        drivers.append(driver)
    assert drivers[0].cache.chain(TEXT).keys == drivers[1].cache.chain(TEXT).keys
    for driver in drivers:
        with FileStore(tmp_path / "store", 64 * 1024**2) as store:
            again = StoreDriver(driver.spec, store=store, tail_every_pages=1)
            assert again.serve(TEXT).store_tokens == 16
            assert not again.cache.stats().store.flaws
            again.cache.close()


def test_what_a_store_lets_go_of_another_part_is_still_there_of_this_one():
    class Told(MemoryStore):
        gone = ()

        def removed(self):
            gone, self.gone = self.gone, ()
            return gone

    one, two = parts_of(PLAIN)["ranks"]
    store = Told()
    other, driver = filled(two, store=store), filled(one, store=store)
    page = driver.cache.tree.index[driver.cache.chain(TEXT).keys[3]]
    for who, stored in ((other, True), (driver, False)):
        store.gone = (*who.cache.store.mover.keys(ItemPlace(Kind.PAGE, page.key)), b"a strange name")
        driver.serve([int(stored)] * 9)  # something is written, and the store tells
        assert not store.gone and page.stored is stored


def test_whose_numbers_they_are_is_asked_before_how_they_lie():
    first = filled()
    for other in (
        Identity("another model"),
        Identity(PLAIN.model, "rope 8"),
        Identity(PLAIN.model, "", "avx2"),
    ):
        again = first.restart(identity=other)
        assert again.serve(TEXT).tokens == 0
    renamed = StoreDriver(replace(PLAIN, model="renamed"), store=first.store, identity=Identity(PLAIN.model))
    renamed.bytes.texts = first.bytes.texts
    assert renamed.serve(TEXT).store_tokens == 16, "the name is for people"


def test_two_tenants_never_meet_in_the_store():
    first = StoreDriver()
    first.serve(TEXT, ("tenant", "a"))
    again = first.restart()
    assert again.serve(TEXT, ("tenant", "b")).tokens == 0
    assert again.serve(TEXT, ("tenanta",)).tokens == 0
    assert again.serve(TEXT, ("tenant", "a")).store_tokens == 16


def test_a_store_is_attached_to_a_living_cache_and_gets_what_the_host_has():
    driver = Driver()
    driver.serve(TEXT)
    store = MemoryStore()
    driver.cache.attach(store)
    while driver.cache.busy:
        driver.cache.step()
    assert store.stats()["records"] == 4
    with pytest.raises(ConfigError, match="attached already"):
        driver.cache.attach(MemoryStore())
    driver.cache.detach()
    while driver.cache.stores.detaching:
        driver.cache.step()
    with pytest.raises(StoreError, match="closed"):
        store.stats()
    assert not any(page.stored for page in driver.cache.tree.index.values())


def test_a_store_without_a_host_tier_is_refused():
    with pytest.raises(ConfigError, match="host tier"):
        Driver(host_pages=0).cache.attach(MemoryStore())


def test_detaching_gives_up_what_is_being_fetched_and_requests_go_on():
    driver = filled().restart()
    chain = driver.cache.chain(TEXT)
    driver.cache.begin(chain)
    driver.work()
    driver.cache.step()
    driver.cache.detach()
    driver.cache.check()
    request = driver.cache.begin(chain)
    assert isinstance(request, Request) and request.reuse.tokens == 0
    driver.settle()
    driver.cache.abort(request)


def test_an_observer_hears_of_the_store_and_of_what_a_page_says():
    store = MemoryStore(size=1700)
    driver = StoreDriver(store=store)
    told = []
    driver.cache.watch(told.extend)
    driver.serve(TEXT)
    driver.cache.step()
    stored = [event for event in told if isinstance(event, Event) and event.tier is Tier.STORE]
    keys = driver.cache.chain(TEXT).keys
    assert [event.key for event in stored if event.stored] == keys
    assert [event.parent for event in stored if event.stored] == [b"", *keys[:-1]]
    assert stored[1].tokens == b"".join(token.to_bytes(4, "little") for token in TEXT[4:8])
    for number in range(20):
        driver.serve([100 + number] * 17)
    driver.cache.step()
    gone = {event.key for event in told if isinstance(event, Event) and not event.stored}
    assert keys[0] in gone, "the store let go of the oldest"
    driver.cache.store.clear()
    driver.settle()
    assert told[-1] == Cleared(Tier.STORE)


def test_a_slow_store_is_not_asked_to_bring_what_is_computed_sooner():
    driver = filled().restart(fetch="deadline")
    driver.cache.compute.observe(1000, 0.01)
    driver.settle()
    driver.cache.store.fetches.costs.read.observe(1, 100.0)
    driver.cache.store.fetches.costs.read.observe(1, 100.0)
    for _ in range(60):
        driver.cache.store.fetches.costs.read.observe(1, 100.0)
    reuse = driver.serve(TEXT)
    assert reuse.tokens == 0 and reuse.why is Why.STORE_SLOW
    assert driver.cache.store.counters["bytes_read"] == 0


@pytest.fixture(autouse=True)
def _warnings_are_expected(caplog):
    caplog.set_level(logging.WARNING)
