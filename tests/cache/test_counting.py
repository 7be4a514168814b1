"""Goal: what a cache says it saved is what was not computed, each text once. Method: the cache of the other
tests; every number of the statistics from what a few texts did."""

import pytest

from tests.cache.test_store_tier import StoreDriver, filled
from tests.cache.test_tiered_cache import TEXT, WINDOW, Driver
from tiercel.policy.resume import Why
from tiercel.storage.memory import MemoryStore
from tiercel.storage.record import kind_of
from tiercel.transfer.plan import Direction
from tiercel.types import Kind

OTHER = [7] * 10


def drop_tails(driver):
    for page in list(driver.cache.tree.index.values()):
        if page.tail is not None:
            driver.cache.tree.copies.drop(page.tail)


def hits(driver):
    stats = driver.cache.stats()
    return {**stats.hit_tokens, "replayed": stats.counters["tokens_replayed"]}


def test_tokens_that_are_computed_again_are_no_hits_of_any_tier():
    """Sixteen tokens are found, four of them on the host, and the last three are computed again."""
    driver = Driver(WINDOW, tail_every_pages=9)
    driver.serve(TEXT)
    drop_tails(driver)
    driver.cache.places.settle()
    driver.push_out(pages=5)
    request = driver.begin_loaded(TEXT, replay=True)
    reuse = request.reuse
    assert (reuse.device_tokens, reuse.host_tokens, reuse.replay_tokens) == (12, 1, 3)
    assert reuse.why is Why.REPLAYED and reuse.computed_tokens == len(TEXT) - 13
    assert hits(driver) == {"device": 12, "host": 1, "store": 0, "replayed": 3}


def test_a_text_that_begins_again_is_counted_once():
    """It finds what it has computed itself: that saved nothing."""
    driver = Driver()
    driver.serve(TEXT[:8])
    chain = driver.cache.chain(TEXT)
    request = driver.cache.begin(chain)
    driver.compute(request, TEXT)
    driver.cache.preempt(request)
    again = driver.cache.begin(chain)
    assert again.reuse.device_tokens == 16
    stats = driver.cache.stats()
    assert stats.hit_tokens["device"] == 8 and stats.counters["tokens_asked"] == 8 + len(TEXT)


def test_a_load_that_failed_supplied_nothing():
    driver = Driver(held=True)
    driver.serve(TEXT)
    driver.push_out()
    chain = driver.cache.chain(TEXT)
    request = driver.cache.begin(chain)

    def refuse(*args):
        raise RuntimeError("cannot schedule new futures after shutdown")

    submit, driver.copies[Direction.LOAD].submit = driver.copies[Direction.LOAD].submit, refuse
    driver.cache.step()
    (loaded,) = driver.cache.step()
    assert loaded.request is request and loaded.error is not None
    assert driver.cache.stats().hit_tokens["host"] == 0
    driver.copies[Direction.LOAD].submit = submit
    driver.cache.begin(chain)
    driver.settle()
    assert driver.cache.stats().hit_tokens["host"] == 16


def test_the_time_saved_is_a_sum_of_what_each_text_saved_when_it_began():
    driver = Driver()
    cache = driver.cache
    driver.serve(TEXT)
    driver.serve(TEXT)
    assert cache.stats().compute_saved_s == 0, "no speed is known yet"
    cache.compute.observe(100, 1.0)
    driver.serve(TEXT)
    saved = cache.stats().compute_saved_s
    assert saved == pytest.approx(32 / 100), "the second text, too"
    cache.compute.forget()
    cache.compute.observe(1000, 1.0)
    assert cache.stats().compute_saved_s == saved, "another speed changes nothing of what was saved"
    driver.serve(TEXT)
    assert cache.stats().compute_saved_s == pytest.approx(saved + 16 / 1000)


# What leaves


def evicted(driver):
    """(tier, what, why): how many, where there are some."""
    return {
        (tier, what, why): count
        for tier, kinds in driver.cache.stats().evicted.items()
        for what, whys in kinds.items()
        for why, count in whys.items()
        if count
    }


def test_what_leaves_for_others_is_counted_by_tier():
    driver = Driver(host_pages=4)
    driver.serve(TEXT)
    assert evicted(driver) == {}
    driver.push_out()
    driver.settle()
    told = evicted(driver)
    assert told["device", "pages", "room"] == 4 and all(why == "room" for _, _, why in told)
    driver.push_out(pages=7)
    assert evicted(driver)["host", "pages", "room"] > 0


def test_a_tenant_above_its_limit_loses_pages_for_that_reason():
    driver = Driver()
    chain = driver.cache.chain(TEXT, ("a",), owner="a")
    request = driver.cache.begin(chain)
    driver.compute(request, TEXT, ("a",))
    driver.cache.finish(request)
    driver.settle()
    driver.cache.limit("a", 0)
    driver.cache.step()
    assert evicted(driver) == {("device", "pages", "limit"): 4, ("host", "pages", "limit"): 4}


def test_a_text_with_too_many_tails_loses_some_for_that_reason():
    driver = Driver(WINDOW, tail_every_pages=1, tails_per_path=2)
    driver.serve(TEXT)
    told = evicted(driver)
    assert told and all((what, why) == ("tails", "path") for _, what, why in told)


def test_a_flush_is_no_eviction():
    driver = Driver()
    driver.serve(TEXT)
    assert driver.cache.flush() == 0 and evicted(driver) == {}


def test_what_a_store_evicts_is_counted():
    driver = StoreDriver(store=MemoryStore(size=1500))
    for first in range(6):
        driver.serve([first, *TEXT])
        driver.settle()
    assert evicted(driver)["store", "pages", "room"] > 0


# The store's own numbers


def test_how_much_a_store_holds_is_known_when_its_writes_have_ended():
    """Nobody looked at the numbers meanwhile, and no time passed."""
    driver = filled()
    told = driver.cache.stats().store
    assert (told.records, told.bytes) == (len(driver.store._values), driver.store.stats()["bytes"])
    assert told.records == 4
    driver.cache.store.clear()
    driver.settle()
    assert driver.cache.stats().store.records == 0


# Why not more


def test_pages_in_the_store_without_a_tail_after_them_are_told_so():
    first = filled(WINDOW, tail_every_pages=2)
    tails = [key for key in first.store._values if kind_of(key)[0] is Kind.TAIL]
    assert tails
    first.store.delete(tails)
    again = first.restart(tail_every_pages=2)
    reuse = again.serve(TEXT)
    assert reuse.cached_tokens == 0 and reuse.why is Why.STORE_NO_TAIL
    assert reuse.found_tokens == 16 and "the store has more pages" in str(reuse)


def test_a_store_whose_last_pages_have_no_tail_says_so_of_the_rest():
    first = filled(WINDOW, tail_every_pages=2)
    last = first.cache.chain(TEXT).keys[3]
    (tail,) = [key for key in first.store._values if kind_of(key)[0] is Kind.TAIL and last in key]
    first.store.delete([tail])
    reuse = first.restart(tail_every_pages=2).serve(TEXT)
    assert (reuse.store_tokens, reuse.why) == (8, Why.STORE_NO_TAIL)


def test_a_store_that_has_nothing_more_is_not_blamed():
    first = filled(WINDOW, tail_every_pages=2)
    reuse = first.restart(tail_every_pages=2).serve([*TEXT[:16], *OTHER])
    assert reuse.why is Why.NOT_CACHED
