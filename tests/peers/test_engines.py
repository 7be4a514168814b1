"""Goal: an engine that pulled its pages answers as one that computed them, bit by bit; the counts of both are
right. Method: the embedded model in two engines, each behind its own thread, on real sockets."""

import asyncio
from contextlib import contextmanager

import pytest

from tests.engine.drive import (
    PAGE,
    deltas_of,
    logprobs_of,
    make_ask,
    make_engine,
    run,
    settle,
    tokens_of,
    words,
)
from tests.wait import until
from tiercel.asks.ask import Answer
from tiercel.config import LAYOUTS
from tiercel.engine.service import EngineService
from tiercel.peers.offering import open_listener, where
from tiercel.storage.open import open_store


@pytest.fixture(scope="module")
def cold():
    return make_engine(cache={"force_miss": True})


@contextmanager
def serving(key="", **options):
    """An engine behind its thread, and the URL of its pages."""
    engine = make_engine(host_pages=200, **options)
    service = EngineService(engine, "tiny-v4")
    listener = open_listener("127.0.0.1:0")
    service.offer_pages(listener, key=key)
    try:
        yield service, f"peer://{where(listener)}"
        service._ask(engine.cache.check).result(30)
        until(lambda: service._ask(lambda: len(engine.cache.leases)).result(30) == 0, "no lease is left")
    finally:
        service.close()


def pulling(url, **options):
    cache = {"fetch": "wait"} | options.pop("cache", {})
    engine = make_engine(host_pages=200, cache=cache, **options)
    engine.cache.compute.observe = lambda *_: None  # what can be pulled is, however fast this machine is
    engine.cache.attach(open_store(url))
    return engine


def asked(service, *asks):
    async def one(ask):
        answer = Answer()
        async for delta in deltas_of(service, ask):
            answer.add(delta)
        return answer

    async def every():
        return await asyncio.gather(*map(one, asks))

    return asyncio.run(every())


def saved(service):
    """All that was computed is on the host."""
    until(lambda: service._ask(lambda: not service._engine.cache.busy).result(30), "everything is saved")


def same(answer, truth):
    return tokens_of(answer) == tokens_of(truth) and logprobs_of(answer) == logprobs_of(truth)


@pytest.mark.parametrize("layouts", [LAYOUTS, LAYOUTS[::-1]], ids=" from ".join)
def test_answers_are_bit_by_bit_the_same_and_only_what_is_missing_travels(cold, layouts):
    ours, theirs = layouts
    long = words(9 * PAGE + 5)
    prompts = [long[: 4 * PAGE + 7], long, words(PAGE - 1, seed=3), words(PAGE + 1, seed=4)]
    with serving(cache={"layout": theirs, "evict": "lfu"}) as (service, url):
        truths = run(cold, *(make_ask(f"t{i}", prompt) for i, prompt in enumerate(prompts)))
        first = asked(service, *(make_ask(f"a{i}", prompt) for i, prompt in enumerate(prompts)))
        assert all(map(same, first, truths))
        saved(service)
        second = pulling(url, cache={"layout": ours})
        spec, sent = second.cache.spec, 0
        for i, (prompt, truth) in enumerate(zip(prompts, truths, strict=True)):
            [answer] = run(second, make_ask(f"b{i}", prompt))
            assert same(answer, truth)
            settle(second)
            pages = (4, 5, 0, 1)[i]  # the second prompt continues the first
            assert answer.usage.store_tokens == pages * PAGE
            read = second.cache.store.counters["bytes_read"] - sent
            assert (read - pages * spec.page_bytes) % spec.tail_bytes == 0 and read >= pages * spec.page_bytes
            sent += read
        stats = asyncio.run(service.stats()).shared
        assert stats["bytes_sent"] == sent
        second.cache.close()


def test_a_tenant_takes_only_its_own_pages(cold):
    text = words(4 * PAGE + 9)
    with serving() as (service, url):
        asked(service, make_ask("a", text, namespace=("one",)))
        saved(service)
        second = pulling(url)
        for name, tokens in (("two", 0), ("one", 4 * PAGE)):
            [answer] = run(second, make_ask(name, text, namespace=(name,)))
            assert answer.usage.store_tokens == tokens
            assert same(answer, run(cold, make_ask("t", text))[0])
        settle(second)
        second.cache.close()


def test_a_sleeping_engine_wakes_for_a_reader_and_a_busy_one_answers_between_its_steps(cold):
    text = words(3 * PAGE + 1)
    with serving() as (service, url):
        asked(service, make_ask("a", text))
        saved(service)
        second = pulling(url)
        [answer] = run(second, make_ask("b", text))
        assert answer.usage.store_tokens == 3 * PAGE, "nobody asked the engine for anything meanwhile"
        second.cache.flush()

        async def beside():
            ask, heard = make_ask("long", words(2 * PAGE, seed=9), 20), 0
            async for delta in deltas_of(service, ask):
                heard += len(delta.tokens)
                if 0 < heard < 9:
                    [answer] = await asyncio.to_thread(run, second, make_ask(f"c{heard}", text))
                    assert answer.usage.cached_tokens == 3 * PAGE
                    second.cache.flush()

        asyncio.run(beside())
        settle(second)
        second.cache.close()


def test_a_server_that_closes_ends_its_readers_and_they_compute(cold):
    text = words(5 * PAGE)
    with serving() as (service, url):
        asked(service, make_ask("a", text))
        saved(service)
        second = pulling(url)
        [answer] = run(second, make_ask("b", text))
        assert answer.usage.store_tokens
    second.cache.flush()
    [again] = run(second, make_ask("c", text))
    assert again.usage.store_tokens == 0 and same(again, answer)
    settle(second)
    second.cache.close()
