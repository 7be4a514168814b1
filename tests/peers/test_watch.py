"""Goal: what is being computed is pulled page by page; a reader learns at once what does not come. Method:
engines behind their threads, and a real server that prefills a long prompt."""

import asyncio
import threading
from contextlib import closing, contextmanager

import httpx
import pytest

from tests.engine.drive import PAGE, deltas_of, make_ask, words
from tests.peers.test_engines import asked, saved, serving
from tests.wait import until
from tests.whole.process import running
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.errors import StoreError
from tiercel.peers.offering import where
from tiercel.storage.base import Get
from tiercel.storage.peer import PeerStore
from tiercel.storage.record import ALIGN_LEAST
from tiercel.transfer.mover import forms_of
from tiercel.types import Kind

TEXT = words(6 * PAGE + 9)


@contextmanager
def reading(url, **options):
    with closing(PeerStore(url.removeprefix("peer://"), **({"timeout_s": 5.0} | options))) as store:
        yield store


def records_of(cache, tokens):
    """(form, page key) of every page of a text, and of the tail where it is resumed."""
    forms, keys = forms_of(cache.spec, ALIGN_LEAST), cache.chain(tokens).keys
    last = (len(tokens) - 1) // cache.spec.page_tokens
    pages = [(form, key) for key in keys[:last] for form in forms[Kind.PAGE]]
    return [*pages, *((form, keys[last - 1]) for form in forms[Kind.TAIL])]


def keys_of(records):
    return [form.key(page_key) for form, page_key in records]


def pull(store, records):
    """Every byte of what is there is right."""
    gets = [Get(form.key(key), [memoryview(bytearray(form.record_bytes))]) for form, key in records]
    assert store.get(gets) == [True] * len(gets)
    for get, (form, key) in zip(gets, records, strict=True):
        value = get.parts[0]
        assert form.flaw(value, key, [value[form.header_bytes :]]) is None


def begin(service, ask):
    """Computed by a thread of its own. Joining it waits for the answer."""
    thread = threading.Thread(target=asked, args=(service, ask))
    thread.start()
    return thread


def decided(news):
    """All that was told, and that each thing was told once."""
    here = [key for each in news for key in each.here]
    absent = [key for each in news for key in each.absent]
    assert len({*here, *absent}) == len(here) + len(absent)
    return here, absent


def test_what_is_there_is_told_at_once():
    with serving() as (service, url), reading(url) as store:
        asked(service, make_ask("a", TEXT))
        saved(service)
        records = records_of(service._engine.cache, TEXT)
        news = list(store.watch(keys_of(records), 30))
        assert decided(news) == (keys_of(records), [])


def test_what_is_computed_later_is_told_as_it_is_saved():
    """The question comes first. Pages are told in the order of the text, in more than one batch."""
    with serving(step_tokens=PAGE) as (service, url), reading(url) as store:
        records = records_of(service._engine.cache, TEXT)
        news, computing, batches = [], None, 0
        for each in store.watch(keys_of(records), 30):
            computing = computing or begin(service, make_ask("a", TEXT, 40))
            pull(store, [record for record in records if record[0].key(record[1]) in each.here])
            batches += bool(each.here)
            news.append(each)
        computing.join()
        here, absent = decided(news)
        assert absent == [] and sorted(here) == sorted(keys_of(records)) and batches > 1
        pages = [key for key in here if key in keys_of(records)[:-1]]
        assert pages == keys_of(records)[:-1]


def test_what_nobody_computes_is_absent_when_the_wait_is_over():
    with serving() as (service, url), reading(url) as store:
        keys = keys_of(records_of(service._engine.cache, TEXT))
        assert decided(list(store.watch(keys, 0.3))) == ([], keys)
        assert not service._offering.questions.watched
        assert decided(list(store.watch([], 5))) == ([], [])


def test_the_end_of_the_request_that_computed_them_is_told():
    """It is aborted after its first page."""
    with serving(step_tokens=PAGE) as (service, url), reading(url) as store:
        text = words(60 * PAGE)
        keys = keys_of(records_of(service._engine.cache, text))

        async def abort_after(heard):
            async for _ in deltas_of(service, make_ask("a", text)):
                pass

        news, computing, loop = [], None, asyncio.new_event_loop()
        aborted = threading.Event()

        async def compute():
            task = asyncio.ensure_future(abort_after(news))
            while not aborted.is_set():
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for each in store.watch(keys, 60):
            if computing is None:
                computing = threading.Thread(target=loop.run_until_complete, args=(compute(),))
                computing.start()
            if each.here:
                aborted.set()
            news.append(each)
        computing.join()
        loop.close()
        here, absent = decided(news)
        assert here and absent and len(here) + len(absent) == len(keys)


def test_a_reader_that_leaves_ends_its_watch_and_its_leases():
    with serving(step_tokens=PAGE) as (service, url), reading(url) as store:
        asked(service, make_ask("a", TEXT[: 3 * PAGE]))
        saved(service)
        keys = keys_of(records_of(service._engine.cache, TEXT))
        leases = lambda: service._ask(lambda: len(service._engine.cache.leases)).result(30)  # noqa: E731
        watch = store.watch(keys, 60)
        assert next(watch).here and leases() == 1
        watch.close()
        until(
            lambda: leases() == 0 and not service._offering.questions.watched, "it is forgotten", timeout_s=5
        )


def test_a_lease_of_a_watch_ends_by_its_time():
    with serving() as (service, url), reading(url, hold_s=0.2) as store:
        asked(service, make_ask("a", TEXT[: 3 * PAGE]))
        saved(service)
        keys = keys_of(records_of(service._engine.cache, TEXT))
        watch = store.watch(keys, 60)
        assert next(watch).here
        until(lambda: service._offering.stats().get("leases_timed_out"), "the lease has ended", timeout_s=5)
        watch.close()


def test_a_server_that_ends_ends_the_watch():
    with serving() as (service, url), reading(url) as store:
        watch = store.watch(keys_of(records_of(service._engine.cache, TEXT)), 60)
        next(watch)
        service._offering.close()
        with pytest.raises(StoreError):
            list(watch)


def test_a_long_prompt_is_pulled_while_a_real_server_prefills_it():
    """Most of it has arrived before the answer ends."""
    prompt = words(6 * PAGE + 60, seed=8)
    options = ("--device-memory", "24MiB", "--host-memory", "64MiB", "--share-pages", "127.0.0.1:0")
    config = EngineConfig(cache=CacheConfig(host_bytes=1 << 24))
    engine, _ = open_engine(Build(device_bytes=1 << 24), config)
    records = records_of(engine.cache, prompt)
    with running(*options, "--step-tokens", str(PAGE)) as server:
        address = server.told.partition("offering host pages at ")[2].split()[0]
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}}
        ended = threading.Event()

        def compute():
            httpx.post(f"{server.url}/generate", json=body, timeout=120).raise_for_status()
            ended.set()

        computing, early, here = None, 0, []
        with reading(f"peer://{address}") as store:
            for each in store.watch(keys_of(records), 60):
                if computing is None:
                    computing = threading.Thread(target=compute)
                    computing.start()
                pull(store, [record for record in records if record[0].key(record[1]) in each.here])
                here += each.here
                early += len(each.here) if not ended.is_set() else 0
        computing.join()
        assert sorted(here) == sorted(keys_of(records))
        assert early >= len(records) // 2, "most of it was here before the answer ended"
        stats = httpx.get(f"{server.url}/v1/cache/stats", timeout=30).json()["shared"]
        assert stats["bytes_sent"] == sum(form.payload_bytes for form, _ in records)
    engine.cache.close()


def test_an_address_is_told_as_it_is_written():
    class Listener:
        def __init__(self, *name):
            self.getsockname = lambda: name

    assert where(Listener("127.0.0.1", 9)) == "127.0.0.1:9"
    assert where(Listener("::1", 9, 0, 0)) == "[::1]:9"
